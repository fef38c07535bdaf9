"""Helpers of harness files that write a program's own configuration. Pure but for `skill_folders`.

Each program takes MCP servers, skills and limits in a form of its own; what is common to these
forms is here, and each harness file adds what only its program knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from bridle.config import AgentSpec, McpServer
from bridle.errors import ConfigError
from bridle.types import JSON

SKILL = "SKILL.md"
PATIENCE_S = 3600
"""Timeout of programs for a model's reply: sampling may be slow, and budgets are Bridle's."""

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

TRANSPORTS = ("stdio", "streamable-http", "sse")


def as_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


def as_toml(value: Mapping[str, Any]) -> bytes:
    """Return a TOML file: a line per top-level key, inner tables inline, no `None` members."""
    given = {name: item for name, item in value.items() if item is not None}
    lines = (f"{_toml_key(name)} = {_toml(item)}\n" for name, item in given.items())
    return "".join(lines).encode()


def output_budget(context_length: int) -> int:
    """Tokens that a program may ask for in one reply: most of them keep this much free."""
    return max(256, min(32_000, context_length // 4))


def refuse_extras(
    agent: AgentSpec, *, transports: Collection[str] = TRANSPORTS, skills: bool = True
) -> None:
    """Raise `ConfigError` where a task gives a program MCP servers or skills it can't use.

    So it does where there are no skills in the folder that is named.
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
        message = f"agent.skills_path: {agent.harness!r} has no skills"
        raise ConfigError(message)
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
        message = f"agent.skills_path: no skill (a folder with a {SKILL}) in {root}"
        raise ConfigError(message)
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
            message = f"{value!r} cannot be written as TOML"
            raise ConfigError(message)
