"""The stream of Messages: blocks opened, filled and closed one after another.

The last event is `message_delta` with `message_stop`: a client that has not seen them takes the
reply as cut. Errors after the start are `error` events, which the SDKs raise and Claude Code
retries.
"""

from __future__ import annotations

from collections.abc import Collection

from bridle.dialects.anthropic_write import (
    call_block,
    error_body,
    stop_reason,
    thinking_block,
    usage_json,
)
from bridle.dialects.base import ReplyHead
from bridle.dialects.reading import encode
from bridle.dialects.sse import event_bytes
from bridle.dialects.streaming import PiecewiseEncoder
from bridle.errors import RequestError
from bridle.types import JSON, Reply, ToolCall, Usage

_PING = event_bytes(b'{"type":"ping"}', "ping")


class MessagesStream(PiecewiseEncoder):
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
        """`message_start` and a ping, as the provider begins."""
        message: JSON = {
            "id": f"msg_{self._head.reply_id}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_json(Usage(self._head.prompt_tokens, 0)),
        }
        return _event("message_start", message=message) + _PING

    def write_reasoning(self, text: str) -> bytes:
        """A thinking delta; nothing for a client that did not ask."""
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
        """A whole `tool_use` block."""
        block = call_block(self._head, index, ToolCall(call_id, name, arguments), self._toolsets)
        given = bytes(block["input"]).decode()
        begin = self._end() + self._begin("tool_use", {**block, "input": {}})
        delta = self._delta({"type": "input_json_delta", "partial_json": given})
        return begin + delta + self._end()

    def finish(self, reply: Reply, usage: Usage) -> tuple[bytes, bytes]:
        """The open block's end; then why it stopped, the usage, and the end."""
        reason, stop = stop_reason(reply)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        last = _event("message_delta", delta=delta, usage=usage_json(usage))
        return self._end(), last + _event("message_stop")

    def keepalive(self) -> bytes:
        return _PING

    def error(self, error: RequestError) -> bytes:
        """An `error` event. A failure of ours is told as the provider tells its own.

        At `overloaded_error` every client that tries again at all does so; at `api_error` opencode
        and Qwen Code end their run.
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
