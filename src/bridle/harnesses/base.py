"""The harness contract: how an unmodified agent is installed and started.

A harness file knows one program: its pinned version, how to install it once per node into a bundle
folder, the configuration it reads, its launch line, the environment that makes its runs
reproducible, and what its exit code really means. It never touches the program itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import ValidationError

from bridle.config import AgentSpec, Settings, explain
from bridle.errors import ConfigError
from bridle.types import Cause, Dialect

SCRIPTS = Path(__file__).parent / "scripts"
"""Programs of ours that run inside runtimes and know nothing of Bridle."""


ARGUMENT_LIMIT = 120_000
"""Bytes; Linux takes 128 KiB in one argument or variable (MAX_ARG_STRLEN)."""


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """Everything a session passes to its harness."""

    instruction: str
    base_urls: Mapping[str, str]
    """`anthropic`, `openai`, `google` -> base URL as seen from inside the runtime."""
    key: str
    """The session's key; the harness's only credential."""
    model_name: str
    workdir: str
    home: str
    bundle: str
    """The installed bundle as seen inside; empty for a harness without one."""
    session_id: str
    context_length: int
    """Tokens that the model takes in and gives out together."""
    task_id: str = ""
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One process to start."""

    command: str | tuple[str, ...]
    """A string is a shell line."""
    env: Mapping[str, str]
    """Beside the runtime's own minimal environment; never holds a control token."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Absolute path inside -> content, written before the start (configuration in the home)."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Absolute path inside -> host folder that is copied there before the start (skills)."""
    stdin: bytes | None = None
    logs: tuple[str, ...] = ()
    """Paths inside that are worth keeping after the run."""


class Harness(Protocol):
    """One agent program, with one task's `AgentSpec`: its class is called with that.

    The constructor raises `ConfigError` where the spec asks for what the program does not have.
    """

    name: str
    version: str
    """Pinned; recorded in every result."""
    dialect: Dialect
    """The wire format that it is run with by default."""

    async def install(self, bundles: Path, report: Callable[[str], None]) -> Path | None:
        """Make the bundle if it is not there yet; returns its folder, `None` = needs none.

        Idempotent, safe when two processes do it at once (built aside, renamed into place), and a
        half-built bundle is never taken for a whole one. `report` gets one line per step. Raises
        `HarnessError` naming what is missing (node, network, disk) and what to do.
        """

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process that works on the task."""

    def exit_cause(self, exit_code: int | None, signal: int | None, stdout: bytes) -> Cause | None:
        """Classify the exit of this program; `None` = it succeeded."""


class Unpackaged:
    """A harness with nothing to install, whose exit code tells whether it succeeded."""

    async def install(self, bundles: Path, report: Callable[[str], None]) -> Path | None:
        del bundles, report
        return None

    def exit_cause(self, exit_code: int | None, signal: int | None, stdout: bytes) -> Cause | None:
        del stdout
        return crash(exit_code, signal)


def needs_model(harness: Harness) -> bool:
    """Return whether a session of this harness must have called the model to be COMPLETED.

    True unless its class says `needs_model = False`, as those do that check a task set.
    """
    return bool(getattr(harness, "needs_model", True))


SettingsT = TypeVar("SettingsT", bound=Settings)


def parse_settings(agent: AgentSpec, kind: type[SettingsT]) -> SettingsT:
    """Parse `AgentSpec.settings` as a harness's own; `ConfigError` names the wrong field."""
    try:
        return kind.model_validate(agent.settings)
    except ValidationError as error:
        raise explain(error, f"agent.settings of harness {agent.harness!r}") from None


def refuse_commands(agent: AgentSpec) -> None:
    """Raise `ConfigError` if a command or a function is asked for."""
    for field_name in ("command", "function"):
        if getattr(agent, field_name) is not None:
            message = (
                f"agent.{field_name}: only harness {field_name!r} takes one, not {agent.harness!r}"
            )
            raise ConfigError(message)


def check_argument(instruction: str, subject: str, advice: str = "") -> None:
    """Raise `ConfigError` if an instruction cannot be an argument of a process."""
    size = len(instruction.encode())
    if size > ARGUMENT_LIMIT or "\0" in instruction:
        raise ConfigError(
            f"{subject} takes its instruction as an argument: at most {ARGUMENT_LIMIT} bytes and "
            f"no NUL; this one has {size} bytes{advice}"
        )


def crash(exit_code: int | None, signal: int | None) -> Cause | None:
    """Return the cause of an end by the exit code alone; `None` = success."""
    return None if exit_code == 0 and signal is None else Cause.HARNESS_CRASH
