"""Tools that Anthropic defines and the client runs, as functions with their published schemas.

The model's calls of them leave as `tool_use` blocks of the tool's own name, which is the form that
the API gives them. A toolset (`computer_toolset_*`, `browser_toolset_*`) is shown as one function
with an `action`; its calls leave under the action's name, with `toolset_name`. What only the
provider can run (web search, code execution...) is no entry here.
"""

from __future__ import annotations

import json
import re

from bridle.dialects.json_reader import flag_at, object_at
from bridle.dialects.tools import object_schema
from bridle.types import JSON, ToolCall, ToolSpec

_TEXT: JSON = {"type": "string"}
_WHOLE: JSON = {"type": "integer"}
_POINT: JSON = {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2}
_VERSION = re.compile(r"_(\d{8})$")

_COMPUTER = "Controls a computer with a display, a mouse and a keyboard, and takes screenshots."
_ACTIONS = (
    "key type mouse_move left_click left_click_drag right_click middle_click double_click "
    "screenshot cursor_position"
)
_NEWER_ACTIONS = " left_mouse_down left_mouse_up scroll hold_key wait triple_click"  # since 2025


def _bash(version: int, tool: JSON) -> tuple[str, JSON, list[str]]:
    del version, tool
    description = "Runs a command in a persistent bash session and returns what it prints."
    restart = {"type": "boolean", "description": "Start the session anew instead of a command."}
    return description, {"command": _TEXT, "restart": restart}, []


def _text_editor(version: int, tool: JSON) -> tuple[str, JSON, list[str]]:
    del tool
    description = "Views, creates and edits files."
    return description, _file_edits("view create str_replace insert", version), ["command", "path"]


def _memory(version: int, tool: JSON) -> tuple[str, JSON, list[str]]:
    del tool
    description = (
        "Keeps notes for later as files under /memories: look there first, and keep it in order."
    )
    edits = _file_edits("view create str_replace insert delete rename", version)
    return description, edits | {"old_path": _TEXT, "new_path": _TEXT}, ["command"]


def _file_edits(commands: str, version: int) -> JSON:
    known = commands.split()
    if version < 20250429:
        known.append("undo_edit")
    return {
        "command": {"type": "string", "enum": known},
        "path": {**_TEXT, "description": "Absolute path of a file or folder."},
        "file_text": {**_TEXT, "description": "The whole file, for `create`."},
        "old_str": {**_TEXT, "description": "What `str_replace` replaces; stands there once."},
        "new_str": {**_TEXT, "description": "What `str_replace` puts there."},
        "insert_line": {**_WHOLE, "description": "The line after which `insert` inserts."},
        "insert_text": {**_TEXT, "description": "What `insert` inserts."},
        "view_range": {**_POINT, "description": "First and last line to `view`; -1 = the end."},
    }


def _computer(version: int, tool: JSON) -> tuple[str, JSON, list[str]]:
    size = [tool.get("display_width_px"), tool.get("display_height_px")]
    description = _COMPUTER
    if all(size):
        description += f" The display is {size[0]} pixels wide and {size[1]} pixels high."
    actions = _ACTIONS + (_NEWER_ACTIONS if version >= 20250124 else "")
    properties: JSON = {
        "action": {"type": "string", "enum": actions.split()},
        "coordinate": {**_POINT, "description": "x and y in pixels from the upper left."},
        "text": {**_TEXT, "description": "What to type, or the key to press."},
    }
    if version >= 20250124:
        properties |= {
            "start_coordinate": {**_POINT, "description": "Where a drag begins."},
            "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
            "scroll_amount": _WHOLE,
            "duration": {"type": "number", "description": "Seconds to hold a key or to wait."},
        }
    if tool.get("enable_zoom"):
        properties["action"]["enum"].append("zoom")
        properties["region"] = _REGION
    return description, properties, ["action"]


_POINTING = (
    "left_click right_click middle_click double_click triple_click mouse_move left_click_drag "
    "left_mouse_down left_mouse_up scroll type key hold_key wait screenshot zoom"
)
_PAGES = (
    "navigate list_tabs new_tab switch_tab close_tab read_page get_page_text find form_input "
    "scroll_to hover"
)
_TARGET: JSON = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["coordinate", "ref"]},
        "x": {**_WHOLE, "description": "Pixels from the left edge of the viewport."},
        "y": {**_WHOLE, "description": "Pixels from the top edge of the viewport."},
        "ref": {**_TEXT, "description": "An element, as `read_page` or `find` names it."},
    },
    "required": ["type"],
    "description": "A coordinate with x and y, or an element with its ref.",
}
_CORNERS: JSON = {"type": "array", "items": _WHOLE, "minItems": 4, "maxItems": 4}
_REGION: JSON = {**_CORNERS, "description": "x0, y0, x1, y1 of what to zoom into."}
_BOTH: JSON = {
    "text": {**_TEXT, "description": "What to type, the keys to press, or the script to run."},
    "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
    "scroll_amount": _WHOLE,
    "duration": {"type": "number", "description": "Seconds to hold a key or to wait."},
    "repeat": {**_WHOLE, "description": "How often to press the key."},
    "region": _REGION,
}
_TOOLSETS: dict[str, tuple[str, str, str, JSON]] = {
    "computer": (
        _COMPUTER,
        f"{_POINTING} cursor_position",
        "",
        {
            "coordinate": {**_POINT, "description": "x and y in pixels from the upper left."},
            "start_coordinate": {**_POINT, "description": "Where a drag begins."},
            **_BOTH,
        },
    ),
    "browser": (
        "Controls a browser: its tabs, pages and their elements.",
        f"{_POINTING} {_PAGES}",
        "read_console read_network file_upload javascript_exec",
        {
            "target": _TARGET,
            "from": {**_TARGET, "description": "The coordinate where a drag begins."},
            "tab_id": {**_TEXT, "description": "The tab to act on, if not the active one."},
            "url": {**_TEXT, "description": 'A URL, or "back", "forward" or "reload".'},
            "query": {**_TEXT, "description": "The elements to find, in words."},
            "value": {"type": ["string", "number", "boolean"]},
            "modifiers": {**_TEXT, "description": 'Keys to hold meanwhile, such as "ctrl+shift".'},
            "ref": {**_TEXT, "description": "The element to read; none = the page."},
            "depth": {**_WHOLE, "description": "How deep to read a page."},
            "filter": {"type": "string", "enum": ["all", "interactive"]},
            "paths": {"type": "array", "items": _TEXT, "description": "Files to upload."},
            "document_ids": {"type": "array", "items": _TEXT},
            **_BOTH,
        },
    ),
}
"""Descriptions, actions (those that are on by default and those that are not) and arguments."""

TOOLSETS = frozenset(_TOOLSETS)


_CLIENT_RUN = {
    "bash": _bash,
    "text_editor": _text_editor,
    "memory": _memory,
    "computer": _computer,
}

_ALIASES = {"str_replace_based_edit_tool": "text_editor_20250429"}
"""Types without a date. The computer-use quickstart sends the editor's name as its type."""


def client_run(kind: str, name: str, tool: JSON) -> ToolSpec | None:
    """Return the function for a tool of type `kind` (`bash_20250124`...).

    `None` for a tool that the client does not run.
    """
    kind = _ALIASES.get(kind, kind)
    found = _VERSION.search(kind)
    make = None if found is None else _CLIENT_RUN.get(kind[: found.start()])
    if found is None or make is None:
        return None
    description, properties, required = make(int(found[1]), tool)
    return ToolSpec(name, description, object_schema(properties, required))


def toolset(kind: str, tool: JSON, path: str) -> tuple[ToolSpec, bool] | None:
    """Return the function for a toolset of type `kind`, and whether its loading is deferred.

    `None` for what is no toolset that the client runs.
    """
    family, found, _ = kind.partition("_toolset_")
    if not found or family not in _TOOLSETS:
        return None
    description, on, off, properties = _TOOLSETS[family]
    where = f"{path}.configs"
    configs = object_at(tool, "configs", path) or {}
    enabled, deferred = [], False
    for action in [*on.split(), *off.split()]:
        config = object_at(configs, action, where) or {}
        asked = flag_at(config, "enabled", f"{where}.{action}")
        if asked or (asked is None and action in on.split()):
            enabled.append(action)
            deferred = deferred or bool(flag_at(config, "defer_loading", f"{where}.{action}"))
    shown = {"action": {"type": "string", "enum": enabled}, **properties}
    return ToolSpec(family, description, object_schema(shown, ["action"])), deferred


def member_call(call: ToolCall) -> tuple[str, str] | None:
    """Return action and arguments of a call of a toolset's function; `None` = no action."""
    try:
        given = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    action = given.pop("action", None) if isinstance(given, dict) else None
    if not isinstance(action, str) or not action:
        return None
    return action, json.dumps(given, ensure_ascii=False)
