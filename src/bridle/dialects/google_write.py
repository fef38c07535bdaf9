"""Google replies and errors, streamed or whole.

Every call has an id and a signature of ours; a reply without calls has its signature on the last
text part, as the provider's newer models do. Statuses are those of Google's API error model
(google.rpc.Code); the time to wait is in a `RetryInfo` detail, which Gemini CLI reads, and in
`Retry-After`.

A stream is partial responses, as SSE or as the items of one JSON array; the last has the finish
reason and the usage. Google's clients fail on comments and on silence: a blank line keeps them
waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bridle.dialects.base import ENGINE_FAILURES, ReplyHead, StreamEncoder, retry_headers
from bridle.dialects.ids import call_id, signature
from bridle.dialects.json_reader import arguments_object, encode
from bridle.errors import RequestError
from bridle.types import JSON, FinishReason, Reply, ToolCall, Usage, one_line

_ERRORS: dict[str, tuple[int, str]] = {
    "authentication_error": (401, "UNAUTHENTICATED"),
    "permission_error": (403, "PERMISSION_DENIED"),
    "not_found": (404, "NOT_FOUND"),
    "request_too_large": (413, "INVALID_ARGUMENT"),
    "context_length_exceeded": (400, "INVALID_ARGUMENT"),
    "rate_limit": (429, "RESOURCE_EXHAUSTED"),
    "session_busy": (429, "RESOURCE_EXHAUSTED"),
    "budget_exhausted": (403, "PERMISSION_DENIED"),
    "overloaded": (503, "UNAVAILABLE"),
    "paused": (503, "UNAVAILABLE"),
    "engine_error": (500, "INTERNAL"),
    **dict.fromkeys((*ENGINE_FAILURES, "store_error"), (503, "UNAVAILABLE")),
}
"""Our code -> status and name as Google says them. Its clients try every 429 again, so a budget
that is used up is a refusal of permission."""


def content_json(head: ReplyHead, reply: Reply, usage: Usage, *, thoughts: bool) -> JSON:
    """Return a reply as a response of Google's API; with `thoughts` its reasoning is shown."""
    parts: list[JSON] = []
    if reply.reasoning and thoughts:
        parts.append({"text": reply.reasoning, "thought": True})
    if reply.content:
        parts.append({"text": reply.content, **({} if reply.tool_calls else sign(head, 0))})
    parts += [call_part(head, index, call) for index, call in enumerate(reply.tool_calls)]
    return response_json(head, parts, finish_reason(reply), usage)


def sign(head: ReplyHead, index: int) -> JSON:
    """Return the member `thoughtSignature` of tool call `index`, or of the text where there is no
    call.
    """
    return {"thoughtSignature": signature(head.reply_id, index)}


def call_part(head: ReplyHead, index: int, call: ToolCall) -> JSON:
    """Return tool call `index` of a reply as a part; arguments that are no object are wrapped."""
    function = {
        "id": call_id("call", call.id, head.reply_id, index),
        "name": call.name,
        "args": msgspec.Raw(arguments_object(call.arguments)),
    }
    return {"functionCall": function, **sign(head, index)}


def response_json(
    head: ReplyHead, parts: list[JSON], finish: str | None = None, usage: Usage | None = None
) -> JSON:
    """Return parts of a reply as a response object, the whole reply or one piece of a stream."""
    candidate: JSON = {"content": {"parts": parts, "role": "model"}, "index": 0}
    if finish is not None:
        candidate["finishReason"] = finish
    response: JSON = {"candidates": [candidate]}
    if usage is not None:
        response["usageMetadata"] = usage_json(usage)
    return {**response, "modelVersion": head.model, "responseId": head.reply_id}


def finish_reason(reply: Reply) -> str:
    """Return Google's finish reason of a reply; a reply with calls ends like one with text."""
    return "STOP" if reply.finish_reason is FinishReason.STOP else "MAX_TOKENS"


def usage_json(usage: Usage) -> JSON:
    """Return token counts in Google's form; those of thoughts are apart from the candidate's."""
    counts = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - usage.reasoning_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens:
        counts["cachedContentTokenCount"] = usage.cached_tokens
    if usage.reasoning_tokens:
        counts["thoughtsTokenCount"] = usage.reasoning_tokens
    return counts


# ---- errors


def error_json(error: RequestError) -> JSON:
    """Return an error as Google's object, for a body or for a piece of a stream."""
    status, name = _ERRORS.get(error.code, (error.status, "INVALID_ARGUMENT"))
    details: list[JSON] = []
    if error.param is not None:
        violation = {"field": error.param, "description": str(error)}
        kind = "type.googleapis.com/google.rpc.BadRequest"
        details.append({"@type": kind, "fieldViolations": [violation]})
    if error.retry_after_s is not None:
        kind = "type.googleapis.com/google.rpc.RetryInfo"
        details.append({"@type": kind, "retryDelay": f"{error.retry_after_s:g}s"})
    shown: JSON = {"code": status, "message": _error_message(error), "status": name}
    return {"error": {**shown, "details": details} if details else shown}


def error_response(error: RequestError) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of a refused request, in Google's form."""
    shown = error_json(error)
    return shown["error"]["code"], retry_headers(error), encode(shown)


def _error_message(error: RequestError) -> str:
    if error.code != "context_length_exceeded" or error.context_length is None:
        return str(error)
    return (
        f"The input token count ({error.prompt_tokens}) exceeds the maximum number of tokens "
        f"allowed ({error.context_length})."
    )


class ContentStream(StreamEncoder):
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
        """Return the bytes that begin the stream: nothing for server-sent events, else `[`."""
        return b"" if self._sse else b"["

    def write_reasoning(self, text: str) -> bytes:
        """Return the event of a piece of reasoning; nothing for a client that did not ask
        for it.
        """
        return self._piece([{"text": text, "thought": True}]) if self._thoughts else b""

    def write_text(self, text: str) -> bytes:
        return self._piece([{"text": text}])

    def write_call(self, index: int, call_id: str, name: str, arguments: str) -> bytes:
        return self.write_calls(index, [ToolCall(call_id, name, arguments)])

    def write_calls(self, first: int, calls: Sequence[ToolCall]) -> bytes:
        """Return one event with the last tool calls of a reply; nothing without calls."""
        parts = [call_part(self._head, index, call) for index, call in enumerate(calls, first)]
        return self._piece(parts) if parts else b""

    def finish(self, reply: Reply, usage: Usage) -> tuple[bytes, bytes]:
        """Return the end of the reply with finish reason and usage, and a signature where no call
        had one.
        """
        signed = reply.content and not reply.tool_calls
        parts = [{"text": "", **(sign(self._head, 0) if signed else {})}]
        last = self._framed(response_json(self._head, parts, finish_reason(reply), usage))
        return b"", last if self._sse else last + b"]"

    def keepalive(self) -> bytes:
        """Return an empty line, which keeps the client waiting."""
        return b"\r\n"

    def error(self, error: RequestError) -> bytes:
        """Return an error object as a piece of the stream."""
        shown = self._framed(error_json(error))
        return shown if self._sse else shown + b"]"

    def _piece(self, parts: list[JSON]) -> bytes:
        return self._framed(response_json(self._head, parts))

    def _framed(self, value: JSON) -> bytes:
        if self._sse:
            return b"data: " + one_line(encode(value)) + b"\r\n\r\n"
        self._items += 1
        return (b"" if self._items == 1 else b",\r\n") + encode(value)
