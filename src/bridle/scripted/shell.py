"""Finds a harness's own shell tool among the tools of a request, and fills its arguments.

A script says *run this command*; every harness names its tool and its arguments otherwise. The tool
is found by name, else by schema; its arguments follow its JSON schema. Names and forms are those
seen on the wires of the harnesses that Bridle packages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridle.types import JSON

NAMES = (
    "bash",
    "shell",
    "run_shell_command",
    "exec_command",
    "execute_bash",
    "run_terminal_cmd",
    "shell_command",
    "local_shell",
    "terminal",
    "run_command",
    "run_commands",
    "execute_command",
    "run_in_terminal",
    "run_bash",
    "sh",
    "exec",
)
"""Names of shell tools, lower case, best first."""

ARGUMENTS = ("command", "cmd", "commands", "bash_command", "shell_command", "script", "input")
"""Names of the argument that holds the command line, best first."""

_HINTS = ("shell", "bash", "terminal", "command", "exec")
_PLACES = {"cwd", "workdir", "path", "directory", "dir"}
_TIMEOUT_S = 120


def find_shell(tools: Sequence[JSON]) -> JSON | None:
    """The function description (`name`, `parameters`) of the shell tool; `None` = there is none.

    An exact name wins over a telling one, and that over a tool that merely requires a command.
    Among equals the first listed is taken. A tool without a command argument is never one.
    """
    functions = [function for tool in tools if (function := _function(tool))]
    usable = [function for function in functions if _command_argument(function)]
    by_name = {str(function["name"]).lower(): function for function in reversed(usable)}
    for name in NAMES:
        if name in by_name:
            return by_name[name]
    for function in usable:
        if any(hint in str(function["name"]).lower() for hint in _HINTS):
            return function
    for function in usable:
        if _command_argument(function) in _required(_parameters(function)):
            return function
    return None


def shell_arguments(function: JSON, command: str) -> JSON:
    """Arguments that make `function`, found by `find_shell`, run `command`.

    The command's argument takes the form that its schema has: a string, `["bash", "-lc", command]`,
    or a list of whole commands where its name is plural. Every other required argument gets its
    default, its first allowed value, or something harmless of its type.
    """
    root = _parameters(function)
    name = _command_argument(function) or ARGUMENTS[0]
    arguments: JSON = {name: _command_value(name, _property(root, name), command, root)}
    for other in _required(root):
        if other not in arguments:
            arguments[other] = _harmless(other, _property(root, other), root)
    return arguments


def _function(tool: JSON) -> JSON | None:
    inner = tool.get("function")
    function = inner if isinstance(inner, dict) else tool
    return function if isinstance(function.get("name"), str) else None


def _parameters(function: JSON) -> JSON:
    found = function.get("parameters") or function.get("input_schema") or {}
    return found if isinstance(found, dict) else {}


def _properties(schema: JSON) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _property(root: JSON, name: str) -> JSON:
    return _resolved(_properties(root).get(name), root)


def _required(schema: JSON) -> list[str]:
    found = schema.get("required")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _command_argument(function: JSON) -> str | None:
    root = _parameters(function)
    for name in ARGUMENTS:
        if name in _properties(root) and _type(_property(root, name)) in {"string", "array"}:
            return name
    return None


def _command_value(name: str, schema: JSON, command: str, root: JSON) -> Any:  # noqa: ANN401 - JSON
    if _type(schema) != "array":
        return command
    items = _resolved(schema.get("items"), root)
    if _type(items) == "object":
        return [shell_arguments({"parameters": {**items, "$defs": root.get("$defs", {})}}, command)]
    return [command] if name.endswith("s") else ["bash", "-lc", command]


def _resolved(schema: object, root: JSON) -> JSON:
    """The schema itself, a local reference followed, of alternatives the first that is not null."""
    if not isinstance(schema, dict):
        return {}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: object = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        return target if isinstance(target, dict) else {}
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key) or ():
            found = _resolved(choice, root)
            if _type(found) != "null":
                return {**schema, **found}
    return schema


def _type(schema: JSON) -> str:
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    named = [one for one in kinds if isinstance(one, str) and one != "null"]
    if named:
        return named[0]
    if "null" in kinds:
        return "null"
    return "object" if "properties" in schema else "string"


def _harmless(name: str, schema: JSON, root: JSON) -> Any:  # noqa: ANN401 - any JSON value
    """A value of the schema that changes nothing about running the command."""
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return schema["enum"][0]
    kind = _type(schema)
    if kind == "object":
        inner = {one: _resolved(_properties(schema).get(one), root) for one in _required(schema)}
        return {one: _harmless(one, found, root) for one, found in inner.items()}
    if kind in {"integer", "number"}:
        return _number(name, schema)
    text = "." if name.lower() in _PLACES else "Run a command"
    return {"boolean": False, "array": []}.get(kind, text)


def _number(name: str, schema: JSON) -> int:
    if "timeout" in name.lower():
        text = f"{name} {schema.get('description', '')}".lower()
        in_ms = "ms" in text.replace("_", " ").split() or "millisecond" in text
        return _TIMEOUT_S * (1000 if in_ms else 1)
    return int(schema.get("minimum", 0))
