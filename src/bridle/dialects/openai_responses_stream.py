"""The stream of Responses: items added, filled and done one after another.

The last event is `response.completed` (or `response.incomplete`): without it a client takes the
stream as cut. A failure after the start is `response.failed`, on which Codex acts by its code.
"""

from __future__ import annotations

from bridle.dialects.base import ReplyHead
from bridle.dialects.openai_errors import error_object, responses_message
from bridle.dialects.openai_responses_write import (
    Dress,
    call_item,
    compaction_item,
    message_item,
    output_text,
    reasoning_item,
    response_json,
    status_of,
)
from bridle.dialects.reading import encode
from bridle.dialects.sse import event_bytes
from bridle.dialects.streaming import PiecewiseEncoder
from bridle.errors import RequestError
from bridle.types import JSON, Reply, ToolCall, Usage

_FILLED = {"function_call": "arguments", "custom_tool_call": "input"}
_DELTAS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


class ResponsesStream(PiecewiseEncoder):
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
        """`response.created` and `response.in_progress`."""
        begun = response_json(self._head, self._dress)
        created = self._event("response.created", response=begun)
        return created + self._event("response.in_progress", response=begun)

    def write_reasoning(self, text: str) -> bytes:
        """A summary delta; without a summary, an item without text."""
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
        """A text delta; nothing where the whole reply becomes one compaction item."""
        if self._dress.compacts:
            return b""
        begin = self._begin("message")
        self._filled += text
        return begin + self._part_event(
            "response.output_text.delta", "content_index", delta=text, logprobs=[]
        )

    def write_call(self, index: int, call_id: str, name: str, arguments: str) -> bytes:
        """A whole call item; nothing where the whole reply becomes one compaction item."""
        del index
        if self._dress.compacts:
            return b""
        closed = self._end()
        call = ToolCall(call_id, name, arguments)
        item = call_item(self._head, self._dress, len(self._items), call)
        key = _FILLED.get(item["type"])
        empty = {**item, "status": "in_progress", **({key: ""} if key else {})}
        events = [closed, self._added(empty)]
        if key is not None:
            event, done = _DELTAS[item["type"]]
            events.append(self._item_event(f"{event}.delta", item, delta=item[key]))
            events.append(self._item_event(f"{event}.done", item, **{done: item[key]}))
        return b"".join(events) + self._done(item)

    def finish(self, reply: Reply, usage: Usage) -> tuple[bytes, bytes]:
        """The open item's end; then the whole response with the items as they were streamed."""
        before = self._end()
        if self._dress.compacts:
            item = compaction_item(self._head, reply.content)
            before += self._added(item) + self._done(item)
        elif not self._items:
            before += self._begin("message") + self._end()
        whole = {
            **response_json(self._head, self._dress, reply, usage),
            "output": self._items,
        }
        return before, self._event(f"response.{status_of(reply)[0]}", response=whole)

    def keepalive(self) -> bytes:
        """A further `response.in_progress`; comments do not reset Codex's clock."""
        return self._event("response.in_progress", response=response_json(self._head, self._dress))

    def error(self, error: RequestError) -> bytes:
        """`response.failed` with the error's code; a failure of ours is a `server_error`.

        At that Codex asks again; at `server_is_overloaded` it ends its run.
        """
        told = error_object(error, responses_message(error))
        code = "server_error" if error.passes else told["code"] or told["type"]
        failed = {
            **response_json(self._head, self._dress),
            "status": "failed",
            "error": {"code": code, "message": told["message"]},
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
        """Close the open item."""
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
