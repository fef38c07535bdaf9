"""Messages replies and errors, streamed or whole, and the tools that Anthropic defines.

Error types and statuses are those of Anthropic's API documentation; Claude Code compacts on the
words `prompt is too long`, and obeys `retry-after` on 429 and 529.

A stream opens, fills and closes one block after another. Its last event is `message_delta` with
`message_stop`: a client that has not seen them takes the reply as cut. Errors after the start are
`error` events, which the SDKs raise and Claude Code retries.

Tools that Anthropic defines and the client runs are functions for the model, with their published
schemas. Its calls of them leave as `tool_use` blocks of the tool's own name, which is the form that
the API gives them. A toolset (`computer_toolset_*`, `browser_toolset_*`) is shown as one function
with an `action`; its calls leave under the action's name, with `toolset_name`. What only the
provider can run (web search, code execution...) is no entry here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

import msgspec

from bridle.dialects.base import ENGINE_FAILURES, ReplyHead, StreamEncoder, event_bytes
from bridle.dialects.ids import call_id, signature
from bridle.dialects.json_reader import arguments_object, encode, flag_at, object_at
from bridle.dialects.tools import object_schema
from bridle.errors import RequestError
from bridle.types import JSON, FinishReason, Reply, ToolCall, ToolSpec, Usage

_ERRORS: dict[str, tuple[int, str]] = {
    "authentication_error": (401, "authentication_error"),
    "permission_error": (403, "permission_error"),
    "not_found": (404, "not_found_error"),
    "thread_not_found": (404, "not_found_error"),
    "request_too_large": (413, "request_too_large"),
    "context_length_exceeded": (400, "invalid_request_error"),
    "rate_limit": (429, "rate_limit_error"),
    "session_busy": (429, "rate_limit_error"),
    "budget_exhausted": (402, "billing_error"),
    "overloaded": (529, "overloaded_error"),
    "paused": (529, "overloaded_error"),
    "engine_error": (500, "api_error"),
    **dict.fromkeys((*ENGINE_FAILURES, "store_error"), (500, "api_error")),
}
"""Our code -> status and type as Anthropic says them."""


def message_json(
    head: ReplyHead,
    reply: Reply,
    usage: Usage,
    thinking: str | None,
    toolsets: Collection[str] = (),
) -> JSON:
    """Return a reply as a message of Anthropic's API.

    `thinking` says how its reasoning is shown: `text`, `omitted` (signature only), or `None` (no
    block).
    """
    content: list[JSON] = []
    if reply.reasoning and thinking is not None:
        content.append(thinking_block(head, 0, reply.reasoning if thinking == "text" else ""))
    if reply.content:
        content.append({"type": "text", "text": reply.content})
    calls = enumerate(reply.tool_calls)
    content += [call_block(head, index, call, toolsets) for index, call in calls]
    reason, stop = stop_reason(reply)
    return {
        "id": f"msg_{head.reply_id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": usage_json(usage),
    }


def thinking_block(head: ReplyHead, number: int, text: str) -> JSON:
    """Return a reply's reasoning as thinking block `number`, with a signature by which the gateway
    recognises the block in later requests.
    """
    return {"type": "thinking", "thinking": text, "signature": signature(head.reply_id, number)}


def call_block(head: ReplyHead, index: int, call: ToolCall, toolsets: Collection[str] = ()) -> JSON:
    """Return tool call `index` of a reply as a block; arguments that are no object are wrapped.

    A call of one of the `toolsets` is written as a call of its action.
    """
    found = member_call(call) if call.name in toolsets else None
    name, arguments = found or (call.name, call.arguments)
    return {
        "type": "tool_use",
        "id": call_id("toolu", call.id, head.reply_id, index),
        "name": name,
        "input": msgspec.Raw(arguments_object(arguments)),
        **({"toolset_name": call.name} if found else {}),
    }


def stop_reason(reply: Reply) -> tuple[str, str | None]:
    """Return Anthropic's stop reason of a reply, and the stop sequence where one ended it."""
    if reply.finish_reason is not FinishReason.STOP:
        return "max_tokens", None
    if reply.tool_calls:
        return "tool_use", None
    if reply.stop_text is not None:
        return "stop_sequence", reply.stop_text
    return "end_turn", None


def usage_json(usage: Usage) -> JSON:
    """Return token counts in Anthropic's form; cached tokens are not part of `input_tokens`."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


# ---- errors


def status_of(error: RequestError) -> int:
    """Return the HTTP status with which Anthropic's API reports such an error."""
    return _ERRORS.get(error.code, (error.status, ""))[0]


def error_body(error: RequestError) -> JSON:
    """Return an error as Anthropic's object, for a body or for the data of an `error` event."""
    kind = _ERRORS.get(error.code, (0, "invalid_request_error"))[1]
    shown: JSON = {"type": kind, "message": _error_message(error)}
    if error.code == "thread_not_found":
        shown["details"] = {"error_code": error.code}
    return {"type": "error", "error": shown}


def _error_message(error: RequestError) -> str:
    if error.code != "context_length_exceeded":
        return str(error)
    if error.context_length is None:
        return f"prompt is too long: {error}"
    return f"prompt is too long: {error.prompt_tokens} tokens > {error.context_length} maximum"


# ---- the stream


_PING = event_bytes(b'{"type":"ping"}', "ping")


class MessagesStream(StreamEncoder):
    """One reply as Messages events. `thinking`: `text`, `omitted`, or `None` (not shown)."""

    def __init__(
        self, head: ReplyHead, *, thinking: str | None, toolsets: Collection[str] = ()
    ) -> None:
        super().__init__()
        self._head = head
        self._thinking = thinking
        self._toolsets = toolsets
        self._index = -1
        self._open: str | None = None
        self._thoughts = 0

    def open(self) -> bytes:
        """Return the events that begin the stream: `message_start` and a ping, as Anthropic sends
        them.
        """
        nothing = Reply("", None, (), FinishReason.STOP)
        message = message_json(self._head, nothing, Usage(self._head.prompt_tokens, 0), None)
        return _event("message_start", message=message | {"stop_reason": None}) + _PING

    def write_reasoning(self, text: str) -> bytes:
        """Return the events of a piece of reasoning; none for a client that did not ask for it."""
        if self._thinking is None:
            return b""
        begin = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        if self._thinking == "omitted":
            return begin
        return begin + self._delta({"type": "thinking_delta", "thinking": text})

    def write_text(self, text: str) -> bytes:
        begin = self._begin("text", {"type": "text", "text": ""})
        return begin + self._delta({"type": "text_delta", "text": text})

    def write_call(self, index: int, call_id: str, name: str, arguments: str) -> bytes:
        block = call_block(self._head, index, ToolCall(call_id, name, arguments), self._toolsets)
        given = bytes(block["input"]).decode()
        begin = self._end() + self._begin("tool_use", {**block, "input": {}})
        delta = self._delta({"type": "input_json_delta", "partial_json": given})
        return begin + delta + self._end()

    def finish(self, reply: Reply, usage: Usage) -> tuple[bytes, bytes]:
        """Return the end of the open block, and the last event, with stop reason and usage."""
        reason, stop = stop_reason(reply)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        last = _event("message_delta", delta=delta, usage=usage_json(usage))
        return self._end(), last + _event("message_stop")

    def keepalive(self) -> bytes:
        """Return a ping event, which keeps the client waiting."""
        return _PING

    def error(self, error: RequestError) -> bytes:
        """Return an `error` event; a failure of the gateway is reported as `overloaded_error`.

        At that every client that tries again at all does so; at `api_error` opencode and Qwen Code
        end their run.
        """
        return event_bytes(encode(_OVERLOADED if error.passes else error_body(error)), "error")

    def _begin(self, kind: str, block: JSON) -> bytes:
        """Open a block of `kind` unless one is open."""
        if self._open == kind:
            return b""
        closed = self._end()
        self._open = kind
        self._index += 1
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _end(self) -> bytes:
        """Close the open block, a thinking block with its signature."""
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            mark = thinking_block(self._head, self._thoughts, "")["signature"]
            signed = self._delta({"type": "signature_delta", "signature": mark})
            self._thoughts += 1
        self._open = None
        return signed + _event("content_block_stop", index=self._index)

    def _delta(self, delta: JSON) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


_OVERLOADED: JSON = {
    "type": "error",
    "error": {"type": "overloaded_error", "message": "Overloaded"},
}


def _event(kind: str, **fields: object) -> bytes:
    return event_bytes(encode({"type": kind, **fields}), kind)


# ---- tools that the client runs


_TEXT: JSON = {"type": "string"}
_WHOLE: JSON = {"type": "integer"}
_POINT: JSON = {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2}
_SCROLLING: JSON = {
    "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
    "scroll_amount": _WHOLE,
    "duration": {"type": "number", "description": "Seconds to hold a key or to wait."},
}
_VERSION = re.compile(r"_(\d{8})$")

_COMPUTER = "Controls a computer with a display, a mouse and a keyboard, and takes screenshots."
_ACTIONS = (
    "key type mouse_move left_click left_click_drag right_click middle_click double_click "
    "screenshot cursor_position"
)
_NEWER_ACTIONS = " left_mouse_down left_mouse_up scroll hold_key wait triple_click"  # since 2025


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


def _computer(version: int, tool: JSON) -> tuple[str, JSON]:
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
            **_SCROLLING,
        }
    if tool.get("enable_zoom"):
        properties["action"]["enum"].append("zoom")
        properties["region"] = _REGION
    return description, properties


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
    **_SCROLLING,
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


_ALIASES = {"str_replace_based_edit_tool": "text_editor_20250429"}
"""Types without a date. The computer-use quickstart sends the editor's name as its type."""


def client_run(kind: str, name: str, tool: JSON) -> ToolSpec | None:
    """Return the function for a tool of type `kind` (`bash_20250124`...) that the client runs.

    `None` for a tool that the client does not run.
    """
    kind = _ALIASES.get(kind, kind)
    if (found := _VERSION.search(kind)) is None:
        return None
    version = int(found[1])
    match kind[: found.start()]:
        case "bash":
            description = "Runs a command in a persistent bash session and returns what it prints."
            again = {
                "type": "boolean",
                "description": "Start the session anew instead of a command.",
            }
            schema = object_schema({"command": _TEXT, "restart": again})
        case "text_editor":
            description = "Views, creates and edits files."
            edits = _file_edits("view create str_replace insert", version)
            schema = object_schema(edits, ["command", "path"])
        case "memory":
            description = (
                "Keeps notes for later as files under /memories: look there first, and keep it in "
                "order."
            )
            edits = _file_edits("view create str_replace insert delete rename", version)
            both = {"old_path": _TEXT, "new_path": _TEXT}
            schema = object_schema(edits | both, ["command"])
        case "computer":
            description, properties = _computer(version, tool)
            schema = object_schema(properties, ["action"])
        case _:
            return None
    return ToolSpec(name, description, schema)


def toolset(kind: str, tool: JSON, path: str) -> tuple[ToolSpec, bool] | None:
    """Return the function for a toolset of type `kind`, and whether its loading is deferred.

    `None` for a tool that is no toolset run by the client.
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
    """Return action and arguments from a call of a toolset's function; `None` = it names no
    action.
    """
    try:
        given = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    action = given.pop("action", None) if isinstance(given, dict) else None
    if not isinstance(action, str) or not action:
        return None
    return action, json.dumps(given, ensure_ascii=False)
