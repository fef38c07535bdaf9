"""The harness contract: how an unmodified agent is installed and started.

A harness file knows one program: its pinned version, how to install it once per node into a bundle
folder, the configuration it reads, its launch line, the environment that makes its runs
reproducible, and what its exit code really means. It never touches the program itself.

Each program takes MCP servers, skills and limits in a form of its own; what is common to these
forms is here, and each harness file adds what only its program knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from bridle.config import AgentSpec, McpServer, Settings, validated
from bridle.errors import ConfigError
from bridle.types import JSON, Cause, Dialect

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
        """Make the program's bundle if it does not exist yet; returns its folder, `None` = needs
        none.

        Idempotent, safe when two processes do it at once (built aside, renamed into place), and a
        half-built bundle is never taken for a whole one. `report` gets one line per step. Raises
        `HarnessError` naming what is missing (node, network, disk) and what to do.
        """

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process (command, environment, files) that works on the task.

        `ConfigError` where the program cannot take the task's instruction or model.
        """

    def exit_cause(self, exit_code: int | None, signal: int | None, stdout: bytes) -> Cause | None:
        """Return the cause of the agent program's failure, by its exit and output; `None` = it
        succeeded.
        """


class Unpackaged:
    """A harness with nothing to install, whose exit code tells whether it succeeded."""

    submittable: ClassVar[str] = ""
    """Settings that a submitted task may give, as `bridle.server.settings` reads them."""

    async def install(self, bundles: Path, report: Callable[[str], None]) -> Path | None:
        """Return `None`: this harness needs no bundle."""
        del bundles, report
        return None

    def exit_cause(self, exit_code: int | None, signal: int | None, stdout: bytes) -> Cause | None:
        """Return `HARNESS_CRASH` for an exit by a signal or by a code other than 0; `None` =
        success.
        """
        del stdout
        return crash(exit_code, signal)


def needs_model(harness: Harness) -> bool:
    """Return whether a session of this harness counts as COMPLETED only if it called the model.

    True unless the harness's class says `needs_model = False`, as harnesses do that only check a
    task set.
    """
    return bool(getattr(harness, "needs_model", True))


SettingsT = TypeVar("SettingsT", bound=Settings)


def parse_settings(agent: AgentSpec, kind: type[SettingsT]) -> SettingsT:
    """Parse the settings that a task gives its harness as `kind`.

    Raises `ConfigError`, which names the wrong field.
    """
    return validated(kind, agent.settings, f"agent.settings of harness {agent.harness!r}")


def refuse_commands(agent: AgentSpec) -> None:
    """Raise `ConfigError` if the task sets a command or a function, which this harness does not
    take.
    """
    for field_name in ("command", "function"):
        if getattr(agent, field_name) is not None:
            message = (
                f"agent.{field_name}: only harness {field_name!r} takes one, not {agent.harness!r}"
            )
            raise ConfigError(message)


def check_argument(instruction: str, subject: str, advice: str = "") -> None:
    """Raise `ConfigError` if an instruction is too long for a process argument or has a NUL byte.

    `subject` (the program) begins the message, `advice` ends it.
    """
    size = len(instruction.encode())
    if size > ARGUMENT_LIMIT or "\0" in instruction:
        raise ConfigError(
            f"{subject} takes its instruction as an argument: at most {ARGUMENT_LIMIT} bytes and "
            f"no NUL; this one has {size} bytes{advice}"
        )


def crash(exit_code: int | None, signal: int | None) -> Cause | None:
    """Return `HARNESS_CRASH` for an exit by a signal or by a code other than 0; `None` =
    success.
    """
    return None if exit_code == 0 and signal is None else Cause.HARNESS_CRASH


SKILL = "SKILL.md"
PATIENCE_S = 3600
"""Timeout of programs for a model's reply: sampling may be slow, and budgets are Bridle's."""

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

TRANSPORTS = ("stdio", "streamable-http", "sse")


def as_json(value: Mapping[str, Any]) -> bytes:
    """Return `value` as the bytes of an indented JSON file."""
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


def as_toml(value: Mapping[str, Any]) -> bytes:
    """Return `value` as the bytes of a TOML file: one line per top-level key, inner tables inline.

    Members that are `None` are left out.
    """
    given = {name: item for name, item in value.items() if item is not None}
    lines = (f"{_toml_key(name)} = {_toml(item)}\n" for name, item in given.items())
    return "".join(lines).encode()


def output_budget(context_length: int) -> int:
    """Return the most tokens that an agent program may ask for in one reply, given the context
    length.

    Most programs keep this much of the context free.
    """
    return max(256, min(32_000, context_length // 4))


def refuse_extras(
    agent: AgentSpec, *, transports: Collection[str] = TRANSPORTS, skills: bool = True
) -> None:
    """Raise `ConfigError` if a task sets MCP servers or skills that its harness cannot use.

    `transports` are the transports that the harness speaks to MCP servers; `skills` says whether it
    takes skills. A skills folder without a skill is refused, too.
    """
    for server in agent.mcp_servers:
        if server.transport not in transports:
            can = ", ".join(transports) or "no MCP server at all"
            message = (
                f"agent.mcp_servers: {agent.harness!r} cannot use {server.name!r} over "
                f"{server.transport}; it takes {can}"
            )
            raise ConfigError(message)
    if agent.skills_path is not None and not skills:
        raise ConfigError(
            f"agent.skills_path: harness {agent.harness!r} takes no skills; remove skills_path"
        )
    skill_folders(agent, "")


def mcp_entries(
    agent: AgentSpec,
    *,
    type_field: str | None = None,
    stdio: str | None = None,
    http: str = "http",
    http_url: str = "url",
    headers: str = "headers",
    **more: Any,  # noqa: ANN401 - any JSON value
) -> JSON:
    """Return the MCP servers of a task as `{name: entry}`, in a program's own form.

    `type_field` is the member that names the transport, by the words `stdio` (`None` = left out),
    `http` and `sse`; `http_url` and `headers` are members, too. `more` are members of each entry.
    """

    def entry(server: McpServer) -> JSON:
        if server.transport == "stdio":
            word = stdio
            members = {"command": server.command, "args": list(server.args), "env": server.env}
        else:
            word, url = ("sse", "url") if server.transport == "sse" else (http, http_url)
            members = {url: server.url, headers: server.headers}
        typed = {} if type_field is None or word is None else {type_field: word}
        return {**typed, **members, **more}

    return {server.name: entry(server) for server in agent.mcp_servers}


def skill_folders(agent: AgentSpec, target: str) -> dict[str, Path]:
    """Map target paths to host folders so that each skill lies in `target/<its name>`.

    `AgentSpec.skills_path` is a folder of skills, or one skill. Raises `ConfigError` if it is
    neither.
    """
    if agent.skills_path is None:
        return {}
    root = Path(agent.skills_path).absolute()
    single = (root / SKILL).is_file()
    folders = [root] if single else sorted(file.parent for file in root.glob(f"*/{SKILL}"))
    if not folders:
        raise ConfigError(f"agent.skills_path: no skill (a folder with a {SKILL}) in {root}")
    return {f"{target}/{folder.name}": folder for folder in folders}


def events_backwards(stdout: bytes, mark: str = "") -> Iterator[JSON]:
    """Yield the JSON objects among the lines of an event stream, last first.

    `mark` is a text that the line must contain. Other lines, and lines that the output limit
    cut, are skipped.
    """
    for line in reversed(stdout.split(b"\n")):
        if line.startswith(b"{") and mark.encode() in line:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event


def _toml_key(name: str) -> str:
    return name if BARE_KEY.fullmatch(name) else _toml(name)


def _toml(value: Any) -> str:  # noqa: ANN401 - any JSON value
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # JSON's escapes are TOML's; only DEL must be escaped in TOML alone.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            items = (f"{_toml_key(k)} = {_toml(v)}" for k, v in value.items() if v is not None)
            return "{ " + ", ".join(items) + " }"
        case list() | tuple():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
        case _:
            raise ConfigError(
                f"the setting {value!r} cannot be written as TOML, which the harness reads"
            )
