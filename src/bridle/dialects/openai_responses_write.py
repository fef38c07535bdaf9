"""Responses replies, streamed or whole, and pages of the items of stored replies.

A reply does not repeat the request's instructions and tools: replies are stored, and would grow
with every turn. Reasoning is a summary where the request asks for one, else an item without text;
its encrypted content, where asked for, is an opaque value by which we know the item again.

The last event of a stream is `response.completed` (or `response.incomplete`): without it a client
takes the stream as cut. A failure after the start is `response.failed`, on which Codex acts by its
code.

Tools of Responses are functions for the model, and calls of those functions are written as the
items that clients expect:

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

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from bridle.dialects.base import ReplyHead, StreamEncoder, event_bytes
from bridle.dialects.ids import item_id, signature
from bridle.dialects.json_reader import (
    an_object,
    arguments_text,
    content_digest,
    decode,
    encode,
    member,
    name_at,
    object_at,
    objects,
    objects_at,
    text_at,
    without_lone_surrogates,
)
from bridle.dialects.openai_chat_write import error_object
from bridle.dialects.tools import (
    ToolList,
    freeform_input,
    freeform_spec,
    function_spec,
    object_schema,
    provider_run,
)
from bridle.errors import RequestError
from bridle.types import JSON, FinishReason, Reply, ToolCall, ToolSpec, Usage

_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_OWN_TOOLS: dict[str, tuple[str, str, str, JSON, tuple[str, ...]]] = {
    "local_shell": (
        "lsh",
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
        "sh",
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
        "cu",
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
        "apc",
        "operation",
        "Creates, changes or deletes one file by a patch in the V4A diff format.",
        {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": _TEXT,
            "diff": {**_TEXT, "description": "Not needed to delete a file."},
        },
        ("type", "path"),
    ),
    "tool_search": ("tsc", "arguments", "Finds further tools.", {"query": _TEXT}, ()),
}
"""Tools with an item type of their own: the prefix of such an item's id, where the item holds the
arguments, the description, the arguments' schema, and which of them there must be."""


def qualified_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a tool: the namespace's name and the
    tool's own.
    """
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def read_tools(value: object, path: str) -> ToolList:
    """Parse the field `tools`, or the tools of an `additional_tools` item."""
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
        _, _, text, properties, required = _OWN_TOOLS[own]
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
    """Return the tool call in an item whose type belongs to one tool; `None` = it is no
    such item.
    """
    name = kind.removesuffix("_call")
    if name == kind or name not in _OWN_TOOLS:
        return None
    key = _OWN_TOOLS[name][1]
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
    """Return a call of tool `name` as an item of the tool's own type; `None` if its arguments do
    not fit.

    `tool` is the type of the tool that the request named: `computer` has a list of actions.
    """
    _, key, _, _, required = _OWN_TOOLS[name]
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


@dataclass(frozen=True, slots=True)
class Dress:
    """The form of reply that one request asks for."""

    freeform: frozenset[str] = frozenset()
    """Names of freeform tools."""
    wire: Mapping[str, JSON] = field(default_factory=dict)
    """Tools whose calls have another name or item type on the wire."""
    summary: bool = False
    """True if reasoning is shown as a summary."""
    encrypted: bool = False
    """True if reasoning items carry encrypted content."""
    compacts: bool = False
    """True if the whole reply is one compaction item."""
    echo: JSON = field(default_factory=dict)
    """Members of the response that repeat the request."""


def response_json(
    head: ReplyHead, dress: Dress, reply: Reply | None = None, usage: Usage | None = None
) -> JSON:
    """Return a reply as the Responses API's object; without a `reply`, the object of one in
    progress.
    """
    status, details = "in_progress", None
    output: list[JSON] = []
    if reply is not None:
        status, details = status_of(reply)
        output = output_items(head, dress, reply)
    return {
        "id": f"resp_{head.reply_id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": details,
        "instructions": None,
        "model": head.model,
        "output": output,
        "tools": [],
        "usage": None if usage is None else usage_json(usage),
        "user": None,
        **dress.echo,
    }


def compaction_json(head: ReplyHead, dress: Dress, reply: Reply, usage: Usage) -> JSON:
    """Return the answer of `POST /responses/compact`: one item that replaces all items
    before it.
    """
    return {
        "id": f"resp_{head.reply_id}",
        "object": "response.compaction",
        "created_at": head.created,
        "output": output_items(head, dress, reply),
        "usage": usage_json(usage),
    }


def status_of(reply: Reply) -> tuple[str, JSON | None]:
    """Return the Responses API's status of an ended reply, and why it is incomplete if so."""
    if reply.finish_reason is FinishReason.STOP:
        return "completed", None
    return "incomplete", {"reason": "max_output_tokens"}


def output_items(head: ReplyHead, dress: Dress, reply: Reply) -> list[JSON]:
    """Return a reply's output items: reasoning, message, calls; or one compaction item."""
    if dress.compacts:
        return [compaction_item(head, reply.content)]
    items: list[JSON] = []
    if reply.reasoning:
        items.append(reasoning_item(head, dress, 0, reply.reasoning))
    if reply.content or not (items or reply.tool_calls):
        items.append(message_item(head, len(items), reply.content))
    for call in reply.tool_calls:
        items.append(call_item(head, dress, len(items), call))
    return items


def compaction_item(head: ReplyHead, text: str) -> JSON:
    """Return the item that replaces the conversation so far by its summary `text`."""
    identity = item_id("cmp", head.reply_id, 0)
    return {"id": identity, "type": "compaction", "encrypted_content": compacted(text)}


def reasoning_item(head: ReplyHead, dress: Dress, index: int, text: str) -> JSON:
    """Return the reasoning of a reply as output item `index`."""
    summary = [{"type": "summary_text", "text": text}] if dress.summary and text else []
    item: JSON = {
        "id": item_id("rs", head.reply_id, index),
        "type": "reasoning",
        "summary": summary,
    }
    if dress.encrypted:
        item["encrypted_content"] = signature(head.reply_id, index)
    return item


def message_item(head: ReplyHead, index: int, text: str) -> JSON:
    """Return the text of a reply as output item `index`."""
    return {
        "id": item_id("msg", head.reply_id, index),
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [output_text(text)],
    }


def output_text(text: str) -> JSON:
    """Return text as a content part of a message item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(head: ReplyHead, dress: Dress, index: int, call: ToolCall) -> JSON:
    """Return a tool call as an item of its tool's type; one that does not fit is a
    `function_call`.
    """
    common: JSON = {
        "status": "completed",
        "call_id": call.id or item_id("call", head.reply_id, index),
    }
    wire = dict(dress.wire.get(call.name) or {})
    tool = wire.pop("tool", "")
    own = item_of_call(call.name, call.arguments, tool) if "type" in wire else None
    if own is not None:
        prefix = _OWN_TOOLS[wire["type"]][0]
        return {"id": item_id(prefix, head.reply_id, index), **own, **common}
    wire.pop("type", None)
    if call.custom or call.name in dress.freeform:
        text = call.arguments if call.custom else freeform_input(call.arguments)
        item: JSON = {"id": item_id("ctc", head.reply_id, index), "type": "custom_tool_call"}
        return {**item, **common, "name": call.name, **wire, "input": text}
    item = {"id": item_id("fc", head.reply_id, index), "type": "function_call"}
    return {**item, **common, "name": call.name, **wire, "arguments": call.arguments}


def usage_json(usage: Usage) -> JSON:
    """Return token counts in the Responses API's form; the details are always objects."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


_COMPACTED = "bridle1."


def compacted(text: str) -> str:
    """Return a summary as the opaque content of a compaction item, from which it can be
    read again.
    """
    return _COMPACTED + base64.urlsafe_b64encode(without_lone_surrogates(text).encode()).decode()


def summary_in(content: str | None) -> str | None:
    """Return the summary in a compaction item that this gateway made; `None` for another's."""
    if content is None or not content.startswith(_COMPACTED):
        return None
    try:
        raw = content.removeprefix(_COMPACTED)
        return base64.b64decode(raw, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def responses_message(error: RequestError) -> str:
    """Return the text of an error; for a context overflow it is the Responses API's own."""
    if error.code != "context_length_exceeded":
        return str(error)
    numbers = ""
    if error.context_length is not None:
        numbers = f" ({error.prompt_tokens} tokens > {error.context_length} maximum)"
    return (
        "Your input exceeds the context window of this model. Please adjust your input and try "
        f"again.{numbers}"
    )


# ---- the stream


_DELTAS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


class ResponsesStream(StreamEncoder):
    """One reply as Responses events."""

    def __init__(self, head: ReplyHead, dress: Dress) -> None:
        super().__init__()
        self._head = head
        self._dress = dress
        self._sequence = 0
        self._items: list[JSON] = []
        self._kind: str | None = None
        self._filled = ""

    def open(self) -> bytes:
        """Return the events that begin the stream: `response.created` and
        `response.in_progress`.
        """
        begun = response_json(self._head, self._dress)
        created = self._event("response.created", response=begun)
        return created + self._event("response.in_progress", response=begun)

    def write_reasoning(self, text: str) -> bytes:
        """Return the events of a piece of reasoning: a summary, or an item without text."""
        if self._dress.compacts:
            return b""
        begin = self._begin("reasoning")
        self._filled += text
        if not self._dress.summary:
            return begin
        return begin + self._part_event(
            "response.reasoning_summary_text.delta", "summary_index", delta=text
        )

    def write_text(self, text: str) -> bytes:
        """Return the events of a piece of text; none where the whole reply becomes one compaction
        item.
        """
        if self._dress.compacts:
            return b""
        begin = self._begin("message")
        self._filled += text
        return begin + self._part_event(
            "response.output_text.delta", "content_index", delta=text, logprobs=[]
        )

    def write_call(self, index: int, call_id: str, name: str, arguments: str) -> bytes:
        """Return the events of a whole tool call; none where the reply becomes one
        compaction item.
        """
        del index
        if self._dress.compacts:
            return b""
        closed = self._end()
        call = ToolCall(call_id, name, arguments)
        item = call_item(self._head, self._dress, len(self._items), call)
        event, key = _DELTAS.get(item["type"], ("", ""))
        empty = {**item, "status": "in_progress", **({key: ""} if key else {})}
        events = [closed, self._added(empty)]
        if key:
            events.append(self._item_event(f"{event}.delta", item, delta=item[key]))
            events.append(self._item_event(f"{event}.done", item, **{key: item[key]}))
        return b"".join(events) + self._done(item)

    def finish(self, reply: Reply, usage: Usage) -> tuple[bytes, bytes]:
        """Return the end of the open item, and the last event: the response with all streamed
        items.
        """
        before = self._end()
        if self._dress.compacts:
            item = compaction_item(self._head, reply.content)
            before += self._added(item) + self._done(item)
        elif not self._items:
            before += self._begin("message") + self._end()
        whole = response_json(self._head, self._dress, reply, usage) | {"output": self._items}
        return before, self._event(f"response.{status_of(reply)[0]}", response=whole)

    def keepalive(self) -> bytes:
        """Return a further `response.in_progress`: a comment does not reset Codex's timeout."""
        return self._event("response.in_progress", response=response_json(self._head, self._dress))

    def error(self, error: RequestError) -> bytes:
        """Return `response.failed` with the error's code; a failure of the gateway is a
        `server_error`.

        At that Codex asks again; at `server_is_overloaded` it ends its run.
        """
        shown = error_object(error, responses_message(error))
        code = "server_error" if error.passes else shown["code"] or shown["type"]
        failed = {
            **response_json(self._head, self._dress),
            "status": "failed",
            "error": {"code": code, "message": shown["message"]},
            "output": self._items,
        }
        return self._event("response.failed", response=failed)

    # ---- items

    def _begin(self, kind: str) -> bytes:
        """Open a reasoning or message item unless one of its kind is open."""
        if self._kind == kind:
            return b""
        closed = self._end()
        self._kind, self._filled = kind, ""
        item = self._item(kind, "")
        if kind == "message":
            added = self._added({**item, "status": "in_progress", "content": []})
            return closed + added + self._content_part("added", "")
        added = self._added(item)
        return closed + added + (self._summary_part("added", "") if self._dress.summary else b"")

    def _end(self) -> bytes:
        if self._kind is None:
            return b""
        kind, text = self._kind, self._filled
        if kind == "message":
            done = self._part_event(
                "response.output_text.done", "content_index", text=text, logprobs=[]
            ) + self._content_part("done", text)
        elif self._dress.summary:
            done = self._part_event(
                "response.reasoning_summary_text.done", "summary_index", text=text
            ) + self._summary_part("done", text)
        else:
            done = b""
        self._kind = None
        return done + self._done(self._item(kind, text))

    def _item(self, kind: str, text: str) -> JSON:
        index = len(self._items)
        if kind == "message":
            return message_item(self._head, index, text)
        return reasoning_item(self._head, self._dress, index, text)

    def _content_part(self, state: str, text: str) -> bytes:
        event = f"response.content_part.{state}"
        return self._part_event(event, "content_index", part=output_text(text))

    def _summary_part(self, state: str, text: str) -> bytes:
        part = {"type": "summary_text", "text": text}
        return self._part_event(
            f"response.reasoning_summary_part.{state}", "summary_index", part=part
        )

    # ---- events

    def _added(self, item: JSON) -> bytes:
        index = len(self._items)
        return self._event("response.output_item.added", output_index=index, item=item)

    def _done(self, item: JSON) -> bytes:
        index = len(self._items)
        self._items.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)

    def _item_event(self, event: str, item: JSON, **fields: object) -> bytes:
        return self._event(event, item_id=item["id"], output_index=len(self._items), **fields)

    def _part_event(self, event: str, position: str, **fields: object) -> bytes:
        item = self._item(self._kind or "message", "")
        return self._item_event(event, item, **{position: 0}, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event_bytes(encode(event), kind)


# ---- replies that were kept: items, pages, deletions


MOST_ITEMS = 100
"""Items of one page."""

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}
_NO_STATUS = frozenset(
    {"reasoning", "compaction", "additional_tools", "compaction_trigger", "configuration_update"}
)


def items_page(spans: Sequence[bytes], query: str) -> bytes:
    """Return one page of a stored request's items as JSON, by default newest first.

    `query` may have `limit`, `order` and `after`. `RequestError` names a value that is wrong.
    """
    asked = {name: values[-1] for name, values in parse_qs(query).items()}
    limit = _limit(asked.get("limit", "20"))
    if (order := asked.get("order", "desc")) not in ("asc", "desc"):
        raise RequestError(
            f"Invalid value for 'order': {order!r}. Supported values are: 'asc' and 'desc'.",
            param="order",
        )
    # A span is one or several items, joined with commas.
    stored = [an_object(one, "input") for span in spans for one in decode(b"[%b]" % span, "input")]
    items = [_shown(item, place) for place, item in enumerate(stored)]
    if order == "desc":
        items.reverse()
    if (after := asked.get("after")) is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise RequestError(
                f"Invalid value for 'after': the response's input has no item with id {after!r}.",
                param="after",
            )
        items = items[places[0] + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    listed = {"object": "list", "data": page, "has_more": len(items) > limit}
    return encode({"first_id": None, "last_id": None, **listed, **ends})


def deleted_json(response_id: str) -> bytes:
    """Return the answer that a stored response was deleted."""
    return encode({"id": response_id, "object": "response", "deleted": True})


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_ITEMS):
        message = f"Invalid value for 'limit': {text!r} is not between 1 and {MOST_ITEMS}."
        raise RequestError(message, param="limit")
    return int(text)


def _shown(item: JSON, place: int) -> JSON:
    """Return an item as the API lists it. An id that it lacks is made of its content and place."""
    kind = item.get("type") or "message"
    shown: JSON = {**item, "type": kind}
    if not isinstance(shown.get("id"), str):
        prefix = _PREFIXES.get(kind, "item")
        shown["id"] = f"{prefix}_{content_digest(encode(item)).hex()}{place:04d}"
    if kind not in _NO_STATUS:
        shown.setdefault("status", "completed")
    if kind == "message" and isinstance(content := shown.get("content"), str):
        ours = shown.get("role") == "assistant"
        text: JSON = {"type": "output_text" if ours else "input_text", "text": content}
        shown["content"] = [{**text, "annotations": []} if ours else text]
    return shown
