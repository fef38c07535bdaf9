"""The stream of Chat Completions: chunks with deltas, and what must come together at the end.

Clients take a stream for whole when they have seen a finish reason, some only at `[DONE]`, so the
finish chunk, the usage chunk and `[DONE]` are one last event. A failure after the start is told by
cutting the stream: every recorded Chat client then sends the same request again (recorded November
2026).
"""

from __future__ import annotations

from collections.abc import Collection

from bridle.dialects.base import ReplyHead
from bridle.dialects.openai_chat_write import finish_reason, tool_call_json, usage_json
from bridle.dialects.reading import encode
from bridle.dialects.sse import DONE
from bridle.dialects.streaming import PiecewiseEncoder
from bridle.errors import RequestError
from bridle.types import JSON, Reply, ToolCall, Usage, one_line


class ChatStream(PiecewiseEncoder):
    """One reply as `chat.completion.chunk` objects."""

    def __init__(
        self, head: ReplyHead, *, include_usage: bool, freeform: Collection[str] = ()
    ) -> None:
        super().__init__()
        self._include_usage = include_usage
        self._freeform = freeform
        common = one_line(
            encode(
                {
                    "id": f"chatcmpl-{head.reply_id}",
                    "object": "chat.completion.chunk",
                    "created": head.created,
                    "model": head.model,
                }
            )
        )
        self._before = b"data: " + common[:-1] + b',"choices":[{"index":0,"delta":'
        # OpenAI sends `usage: null` on every other chunk when usage was asked for.
        self._after = b',"finish_reason":null}]' + (b',"usage":null' if include_usage else b"")
        self._common = common[:-1]

    def open(self) -> bytes:
        """The chunk that says who speaks."""
        return self._delta({"role": "assistant", "content": ""})

    def write_reasoning(self, text: str) -> bytes:
        """A `reasoning_content` delta."""
        return self._delta({"reasoning_content": text})

    def write_text(self, text: str) -> bytes:
        """A content delta."""
        return self._delta({"content": text})

    def write_call(self, index: int, call_id: str, name: str, arguments: str) -> bytes:
        """The whole call in one delta, as providers send short ones."""
        call = tool_call_json(ToolCall(call_id, name, arguments), self._freeform)
        return self._delta({"tool_calls": [{"index": index, **call}]})

    def finish(self, reply: Reply, usage: Usage) -> tuple[bytes, bytes]:
        """Nothing before; the finish chunk, the usage chunk if asked for, and `[DONE]`."""
        reason = b',"finish_reason":' + encode(finish_reason(reply)) + b"}]"
        null = b',"usage":null' if self._include_usage else b""
        last = self._before + b"{}" + reason + null + b"}\n\n"
        if self._include_usage:
            counts = encode(usage_json(usage))
            last += b"data: " + self._common + b',"choices":[],"usage":' + counts + b"}\n\n"
        return b"", last + DONE

    def keepalive(self) -> bytes:
        """A chunk with an empty delta; comments do not reset every client's clock."""
        return self._delta({})

    def error(self, error: RequestError) -> bytes | None:
        """None: cut."""
        del error
        return None

    def _delta(self, delta: JSON) -> bytes:
        return self._before + one_line(encode(delta)) + self._after + b"}\n\n"
