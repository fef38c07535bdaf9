"""Messages replies and errors, streamed or whole.

Error types and statuses are those of Anthropic's API documentation; Claude Code compacts on the
words `prompt is too long`, and obeys `retry-after` on 429 and 529.

A stream opens, fills and closes one block after another. Its last event is `message_delta` with
`message_stop`: a client that has not seen them takes the reply as cut. Errors after the start are
`error` events, which the SDKs raise and Claude Code retries.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from bridle.dialects.anthropic_tools import member_call
from bridle.dialects.base import ENGINE_FAILURES, ReplyHead, StreamEncoder, event_bytes
from bridle.dialects.ids import call_id, signature
from bridle.dialects.json_reader import arguments_object, encode
from bridle.errors import RequestError
from bridle.types import JSON, FinishReason, Reply, ToolCall, Usage

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
    """Return the reply. `thinking`: `text`, `omitted` (signature only), or `None` (no block)."""
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
    """Thinking block `number` of a reply, with the signature by which we know it again."""
    return {"type": "thinking", "thinking": text, "signature": signature(head.reply_id, number)}


def call_block(head: ReplyHead, index: int, call: ToolCall, toolsets: Collection[str] = ()) -> JSON:
    """Call `index` of a reply; arguments that are no object are wrapped, in streams too.

    A call of one of the `toolsets` is one of its action.
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
    """Return the stop reason, and the stop sequence where one ended the reply."""
    if reply.finish_reason is not FinishReason.STOP:
        return "max_tokens", None
    if reply.tool_calls:
        return "tool_use", None
    if reply.stop_text is not None:
        return "stop_sequence", reply.stop_text
    return "end_turn", None


def usage_json(usage: Usage) -> JSON:
    """Return token counts; cached tokens are not part of `input_tokens`."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


# ---- errors


def status_of(error: RequestError) -> int:
    return _ERRORS.get(error.code, (error.status, ""))[0]


def error_body(error: RequestError) -> JSON:
    """Return the error object, as a body or as the data of an `error` event."""
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
        """Return `message_start` and a ping, as the provider begins."""
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
        """Return a thinking delta; nothing for a client that did not ask."""
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
        """Return the end of the open block, and the event with stop reason and usage."""
        reason, stop = stop_reason(reply)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        last = _event("message_delta", delta=delta, usage=usage_json(usage))
        return self._end(), last + _event("message_stop")

    def keepalive(self) -> bytes:
        return _PING

    def error(self, error: RequestError) -> bytes:
        """Return an `error` event; a failure of ours in the form of the provider's own.

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
