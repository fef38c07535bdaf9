"""Harnesses: unmodified agent programs, and how each is installed, started and read.

The contract is `base`. `command` runs any command line or a task's own solution, `function` a
Python function, and `sdk_agents` are scripts on SDKs; every other harness's file knows one program,
or two of one origin: `gemini_cli` has Qwen Code, too, and `pi` has openclaw. `packaged` is the base
of programs from PyPI or npm, with their installers; `bundles` puts them on this machine, once.
"""

import shlex
import sys

from bridle.config import AgentSpec
from bridle.errors import ConfigError
from bridle.harness_rules import HARNESS_RULES
from bridle.harnesses.base import SCRIPTS, Harness
from bridle.plugins import installed, load
from bridle.types import Dialect

HARNESSES = {name: row.adapter for name, row in HARNESS_RULES.items() if row.adapter is not None}
"""Short name -> `module:Class`; `AgentSpec.import_path` takes any other `package.module:Class`."""

CHECKS = {
    "empty": "bridle.harnesses.command:Empty",
    "oracle": "bridle.harnesses.command:Oracle",
}
"""Harnesses that are no agents: they show whether a task set's rewards are right."""

ANY_PROGRAM = ("command", "function")
"""Harnesses that run what a task names, and so install nothing."""


def default_agent(name: str) -> AgentSpec:
    """Return the settings of a harness by its short name, all at their defaults.

    `command` and `function` run the shell agent of this package.
    """
    agent = SCRIPTS / "shell_agent.py"
    match name:
        case "command":
            return AgentSpec(harness=name, command=shlex.join((sys.executable, str(agent))))
        case "function":
            return AgentSpec(harness=name, function=f"{agent}:run")
        case _:
            return AgentSpec(harness=name)


def dialects_of(name: str) -> tuple[Dialect, ...]:
    """Return every wire format that a harness can be run with, the default first.

    `command` and `function` run whatever a task names, in any of them.
    """
    default = open_harness(name).dialect
    if name in ANY_PROGRAM:
        return (default, *(dialect for dialect in Dialect if dialect is not default))
    others = (dialect for dialect in Dialect if dialect is not default)
    return (default, *(dialect for dialect in others if _speaks(name, dialect)))


def _speaks(name: str, dialect: Dialect) -> bool:
    try:
        open_harness(AgentSpec(harness=name, settings={"api": dialect}))
    except ConfigError:  # it has no such setting, or not this value
        return False
    return True


def open_harness(agent: AgentSpec | str) -> Harness:
    """Open the harness that a task names, or the one of that short name with its defaults.

    Raises `ConfigError` naming the field that is wrong: an unknown name, a version that is not
    packaged, a setting that this harness does not have, a missing command line.
    """
    if isinstance(agent, str):
        agent = default_agent(agent)
    if (agent.harness is None) == (agent.import_path is None):
        raise ConfigError("agent: give exactly one of 'harness' and 'import_path'")
    name = agent.harness or agent.import_path or ""
    table = {**HARNESSES, **CHECKS}
    more = {} if name in table or agent.harness is None else installed("harness")
    if agent.harness is not None and name not in table and name not in more:
        known = ", ".join(sorted({*table, *more}))
        message = f"unknown harness {name!r}; known: {known}; or 'import_path' for your own"
        raise ConfigError(message)
    harness: Harness = load(name, table, what="harness")(agent)
    return harness
