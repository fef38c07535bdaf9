"""The stream of generateContent: partial responses, as SSE or as the items of one JSON array.

The last event is the response with the finish reason and the usage. Comments break Google's clients
and so does silence: what keeps them waiting is a blank line.
"""

from __future__ import annotations

from collections.abc import Sequence

from bridle.dialects.base import ReplyHead
from bridle.dialects.google_write import call_part, error_json, finish_reason, response_json, sign
from bridle.dialects.reading import encode
from bridle.dialects.streaming import PiecewiseEncoder
from bridle.errors import RequestError
from bridle.types import JSON, Reply, ToolCall, Usage, one_line


class ContentStream(PiecewiseEncoder):
    """One reply as partial responses. Without `sse` they are the items of one JSON array.

    Its calls leave in one response: clients that run tools at each response would otherwise answer
    the first call without the others.
    """

    calls_at_end = True

    def __init__(self, head: ReplyHead, *, thoughts: bool, sse: bool) -> None:
        super().__init__()
        self._head = head
        self._thoughts = thoughts
        self._sse = sse
        self._items = 0

    def open(self) -> bytes:
        """Nothing, or the array's begin."""
        return b"" if self._sse else b"["

    def write_reasoning(self, text: str) -> bytes:
        """A thought part; nothing for a client that did not ask."""
        return self._piece([{"text": text, "thought": True}]) if self._thoughts else b""

    def write_text(self, text: str) -> bytes:
        return self._piece([{"text": text}])

    def write_call(self, index: int, call_id: str, name: str, arguments: str) -> bytes:
        """A whole function call."""
        return self.write_calls(index, [ToolCall(call_id, name, arguments)])

    def write_calls(self, first: int, calls: Sequence[ToolCall]) -> bytes:
        """All of them in one response."""
        parts = [call_part(self._head, index, call) for index, call in enumerate(calls, first)]
        return self._piece(parts) if parts else b""

    def finish(self, reply: Reply, usage: Usage) -> tuple[bytes, bytes]:
        """Nothing before; the finish reason, usage, and the signature where no call had one."""
        signed = reply.content and not reply.tool_calls
        parts = [{"text": "", **(sign(self._head, 0) if signed else {})}]
        last = self._framed(response_json(self._head, parts, finish_reason(reply), usage))
        return b"", last if self._sse else last + b"]"

    def keepalive(self) -> bytes:
        """A blank line."""
        return b"\r\n"

    def error(self, error: RequestError) -> bytes:
        """An error object in place of a response."""
        shown = self._framed(error_json(error))
        return shown if self._sse else shown + b"]"

    def _piece(self, parts: list[JSON]) -> bytes:
        return self._framed(response_json(self._head, parts))

    def _framed(self, value: JSON) -> bytes:
        if self._sse:
            return b"data: " + one_line(encode(value)) + b"\r\n\r\n"
        self._items += 1
        return (b"" if self._items == 1 else b",\r\n") + encode(value)
