"""Responses tools as functions, and calls of those functions as the items that clients expect.

| tool | shown to the model as | its call goes out as |
|---|---|---|
| `function` | itself | `function_call` |
| `custom` | a function with the one text `input` | `custom_tool_call` |
| `namespace` | its tools, named `NAMESPACE__TOOL` | `function_call` with `namespace` |
| `local_shell`, `shell`, `apply_patch` | a function with that name | `..._call` |
| `tool_search` that the client executes | a function with its parameters | `tool_search_call` |
| `computer`, `computer_use_preview` | the function `computer`: one action | `computer_call` |
| any other | not at all (rule `server_tools`) | |
"""

from __future__ import annotations

import json

from bridle.dialects.json_reader import (
    an_object,
    arguments_text,
    member,
    name_at,
    object_at,
    objects,
    objects_at,
    text_at,
)
from bridle.dialects.tools import (
    ToolList,
    freeform_spec,
    function_spec,
    object_schema,
    provider_run,
)
from bridle.types import JSON, ToolCall, ToolSpec

_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_OWN_TOOLS: dict[str, tuple[str, str, JSON, tuple[str, ...]]] = {
    "local_shell": (
        "action",
        "Runs a command on the user's machine and returns what it prints.",
        {
            "command": {**_TEXTS, "description": "The program and its arguments."},
            "working_directory": _TEXT,
            "timeout_ms": {"type": "integer"},
            "env": {"type": "object", "additionalProperties": _TEXT},
        },
        ("command",),
    ),
    "shell": (
        "action",
        "Runs shell commands on the user's machine and returns what they print.",
        {
            "commands": {**_TEXTS, "description": "Command lines, run one after another."},
            "timeout_ms": {"type": "integer"},
            "max_output_length": {"type": "integer"},
        },
        ("commands",),
    ),
    "computer": (
        "action",
        "Controls a computer with a display, a mouse and a keyboard; returns a screenshot.",
        {
            "type": {
                "type": "string",
                "enum": [
                    *("click", "double_click", "drag", "keypress", "move"),
                    *("screenshot", "scroll", "type", "wait"),
                ],
            },
            "x": {"type": "integer", "description": "Pixels from the left."},
            "y": {"type": "integer", "description": "Pixels from the top."},
            "button": {
                "type": "string",
                "enum": ["left", "right", "wheel", "back", "forward"],
            },
            "keys": {**_TEXTS, "description": "Keys to press, or to hold meanwhile."},
            "text": {**_TEXT, "description": "What to type."},
            "scroll_x": {"type": "integer"},
            "scroll_y": {"type": "integer"},
            "path": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
                    "required": ["x", "y"],
                },
                "description": "Points to drag along.",
            },
        },
        ("type",),
    ),
    "apply_patch": (
        "operation",
        "Creates, changes or deletes one file by a patch in the V4A diff format.",
        {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": _TEXT,
            "diff": {**_TEXT, "description": "Not needed to delete a file."},
        },
        ("type", "path"),
    ),
    "tool_search": ("arguments", "Finds further tools.", {"query": _TEXT}, ()),
}
"""Tools with an item type of their own: where that item holds the arguments, the description, the
arguments' schema, and which of them there must be."""


def qualified_name(namespace: str | None, name: str) -> str:
    """Our name of a tool in a namespace."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def read_tools(value: object, path: str) -> ToolList:
    """Return `tools`, or the tools of an `additional_tools` item."""
    found = ToolList()
    for tool, where in objects(value, path):
        found = found.plus(_read_tool(tool, where, None))
    return found


def _read_tool(tool: JSON, path: str, namespace: str | None) -> ToolList:
    kind = name_at(tool, "type", path)
    description = text_at(tool, "description", path)
    if kind == "namespace":
        name = name_at(tool, "name", path)
        inside = ToolList()
        for inner, where in objects_at(tool, "tools", path):
            inside = inside.plus(_read_tool(inner, where, name))
        return inside
    own = "computer" if kind == "computer_use_preview" else kind
    if own in _OWN_TOOLS and (own != "tool_search" or tool.get("execution") == "client"):
        _, text, properties, required = _OWN_TOOLS[own]
        if (width := tool.get("display_width")) and (height := tool.get("display_height")):
            text += f" The display is {width} by {height} pixels."
        schema = object_schema(properties, required)
        if own == "tool_search":
            text = description or text
            schema = object_at(tool, "parameters", path) or schema
        wire = {"type": own, "tool": kind} if own == "computer" else {"type": own}
        return ToolList((ToolSpec(own, text, schema),), wire={own: wire})
    if kind not in ("function", "custom"):
        return ToolList(removed=provider_run([kind]))
    name = name_at(tool, "name", path)
    ours = qualified_name(namespace, name)
    named: dict[str, JSON] = {ours: {"namespace": namespace, "name": name}} if namespace else {}
    if kind == "custom":
        return ToolList((freeform_spec(tool, path, ours),), frozenset((ours,)), named)
    spec = function_spec(tool, path, object_at(tool, "parameters", path), ours)
    return ToolList((spec,), wire=named)


def call_of_item(item: JSON, kind: str, call_id: str | None, path: str) -> ToolCall | None:
    """Read the call in an item of a tool with an item type of its own."""
    name = kind.removesuffix("_call")
    if name == kind or name not in _OWN_TOOLS:
        return None
    key = _OWN_TOOLS[name][0]
    actions = item.get("actions")
    if name == "computer" and isinstance(actions, list) and len(actions) == 1:
        item = {key: actions[0]}
    elif name == "computer" and isinstance(actions, list):
        return ToolCall(call_id, name, arguments_text({"actions": actions}))
    given = an_object(item.get(key), member(path, key))
    if name == "local_shell":
        given = {inner: value for inner, value in given.items() if inner != "type"}
    return ToolCall(call_id, name, arguments_text(given))


def item_of_call(name: str, arguments: str, tool: str = "") -> JSON | None:
    """Return a call of tool `name` in the tool's own item type; `None` if its arguments do not fit.

    `tool` is the type of the tool that the request named: `computer` has a list of actions.
    """
    key, _, _, required = _OWN_TOOLS[name]
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or any(word not in given for word in required):
        return None
    if name == "local_shell":
        given = {"type": "exec", "env": {}, **given}
    if name == "computer":
        shape: JSON = {"actions": [given]} if tool == "computer" else {key: given}
        return {"type": "computer_call", **shape, "pending_safety_checks": []}
    ran_by = {"execution": "client"} if name == "tool_search" else {}
    return {"type": f"{name}_call", **ran_by, key: given}
