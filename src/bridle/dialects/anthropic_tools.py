"""Tools that Anthropic defines and the client runs, as functions with their published schemas.

The model's calls of them leave as `tool_use` blocks of the tool's own name, which is the form that
the API gives them. What only the provider can run (web search, code execution...) is no entry here.
"""

from __future__ import annotations

import re

from bridle.types import JSON, ToolSpec

_TEXT: JSON = {"type": "string"}
_WHOLE: JSON = {"type": "integer"}
_POINT: JSON = {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2}
_VERSION = re.compile(r"_(\d{8})$")

_ACTIONS = (
    "key type mouse_move left_click left_click_drag right_click middle_click double_click "
    "screenshot cursor_position"
)
_NEWER_ACTIONS = " left_mouse_down left_mouse_up scroll hold_key wait triple_click"  # since 2025


def _bash(version: int, tool: JSON) -> tuple[str, JSON, list[str]]:
    del version, tool
    told = "Runs a command in a persistent bash session and returns what it prints."
    restart = {"type": "boolean", "description": "Start the session anew instead of a command."}
    return told, {"command": _TEXT, "restart": restart}, []


def _text_editor(version: int, tool: JSON) -> tuple[str, JSON, list[str]]:
    del tool
    told = "Views, creates and edits files."
    return told, _file_edits("view create str_replace insert", version), ["command", "path"]


def _memory(version: int, tool: JSON) -> tuple[str, JSON, list[str]]:
    del tool
    told = "Keeps notes for later as files under /memories: look there first, and keep it in order."
    edits = _file_edits("view create str_replace insert delete rename", version)
    return told, edits | {"old_path": _TEXT, "new_path": _TEXT}, ["command"]


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
    told = "Controls a computer with a display, a mouse and a keyboard, and takes screenshots."
    if all(size):
        told += f" The display is {size[0]} pixels wide and {size[1]} pixels high."
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
        corners = {"type": "array", "items": _WHOLE, "minItems": 4, "maxItems": 4}
        properties["region"] = {**corners, "description": "x0, y0, x1, y1 of what to zoom into."}
    return told, properties, ["action"]


_CLIENT_RUN = {
    "bash": _bash,
    "text_editor": _text_editor,
    "memory": _memory,
    "computer": _computer,
}


def client_run(kind: str, name: str, tool: JSON) -> ToolSpec | None:
    """The function that stands for a tool of type `kind` (`bash_20250124`...).

    `None` for a tool that the client does not run.
    """
    found = _VERSION.search(kind)
    make = None if found is None else _CLIENT_RUN.get(kind[: found.start()])
    if found is None or make is None:
        return None
    told, properties, required = make(int(found[1]), tool)
    schema = {"type": "object", "properties": properties, "required": required}
    return ToolSpec(name, told, schema)
