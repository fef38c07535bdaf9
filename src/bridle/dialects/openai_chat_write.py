"""Chat Completions replies and errors, streamed or whole; any conversation in Chat's form.

Statuses, types and codes of errors, which Responses shares, are those of OpenAI's error guide.
Clients act on the code (Codex), on the status (the SDKs) or on words of the message (opencode, pi:
`maximum context length is`, `exceeds the context window`). `x-should-retry: false` keeps the SDKs
from repeating what cannot succeed.

Clients take a stream for whole when they have seen a finish reason, some only at `[DONE]`, so the
finish chunk, the usage chunk and `[DONE]` are one last event. A failure after the start cuts the
stream: every recorded Chat client then sends the same request again (November 2026).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from bridle.dialects.base import (
    DONE,
    ENGINE_FAILURES,
    ReplyHead,
    Route,
    RouteKind,
    StreamEncoder,
    retry_headers,
)
from bridle.dialects.json_reader import encode
from bridle.dialects.media import BLOCK_TYPE
from bridle.dialects.tools import as_function, freeform_input
from bridle.errors import RequestError
from bridle.types import (
    JSON,
    FinishReason,
    Message,
    Part,
    Reply,
    Role,
    TextPart,
    ToolCall,
    ToolSpec,
    Usage,
    one_line,
)


def finish_reason(reply: Reply) -> str:
    """Return OpenAI's finish reason of a reply; an aborted one is incomplete, so `length`."""
    if reply.finish_reason is not FinishReason.STOP:
        return "length"
    return "tool_calls" if reply.tool_calls else "stop"


def tool_call_json(call: ToolCall, freeform: Collection[str]) -> JSON:
    """Return one tool call as a message of Chat Completions has it."""
    if call.custom or call.name in freeform:
        text = call.arguments if call.custom else freeform_input(call.arguments)
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def logprobs_json(sampled: Sequence[tuple[str, float]]) -> JSON:
    """Return the logprobs of all sampled tokens, control tokens too, in OpenAI's form."""
    tokens = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in sampled
    ]
    return {"content": tokens, "refusal": None}


def usage_json(usage: Usage) -> JSON:
    """Return token counts in OpenAI's form; the details are always objects (trae-agent fails on
    null).
    """
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def models_json(route: Route, names: Sequence[str], context_length: int) -> bytes:
    """Return OpenAI's model list, or the one model that the path names, with vLLM's context
    length.
    """

    def model(name: str) -> JSON:
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "bridle",
            "max_model_len": context_length,
        }

    if route.kind is RouteKind.MODEL:
        return encode(model(route.model or ""))
    return encode({"object": "list", "data": [model(name) for name in names]})


# ---- errors, of Responses too


_SHAPES: dict[str, tuple[int, str, str | None]] = {
    "authentication_error": (401, "invalid_request_error", "invalid_api_key"),
    "permission_error": (403, "invalid_request_error", "permission_denied"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "request_too_large": (413, "invalid_request_error", "request_too_large"),
    "context_length_exceeded": (400, "invalid_request_error", "context_length_exceeded"),
    "rate_limit": (429, "rate_limit_error", "rate_limit_exceeded"),
    "session_busy": (429, "rate_limit_error", "rate_limit_exceeded"),
    "budget_exhausted": (429, "insufficient_quota", "insufficient_quota"),
    "overloaded": (503, "server_error", "server_is_overloaded"),
    "paused": (503, "server_error", "server_is_overloaded"),
    "engine_error": (500, "server_error", "server_error"),
    **{code: (503, "server_error", code) for code in (*ENGINE_FAILURES, "store_error")},
}
"""Our code -> status, type and code as OpenAI says them."""


def error_object(error: RequestError, message: str) -> JSON:
    """Return an error as the value of the member `error` of OpenAI's bodies."""
    _, kind, code = _SHAPES.get(error.code, (0, "invalid_request_error", None))
    return {"message": message, "type": kind, "param": error.param, "code": code}


def error_response(error: RequestError, message: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of a refused request, in OpenAI's form."""
    status = _SHAPES.get(error.code, (error.status, "", None))[0]
    headers = retry_headers(error)
    return status, headers, encode({"error": error_object(error, message)})


def chat_error_message(error: RequestError) -> str:
    """Return the text of an error; for a context overflow it is Chat Completions' own."""
    if error.code != "context_length_exceeded" or error.context_length is None:
        return str(error)
    return (
        f"This model's maximum context length is {error.context_length} tokens. However, your "
        f"messages resulted in {error.prompt_tokens} tokens. Please reduce the length of the "
        "messages."
    )


# ---- the stream


class ChatStream(StreamEncoder):
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
        """Return the chunk that begins the stream, with the role."""
        return self._delta({"role": "assistant", "content": ""})

    def write_reasoning(self, text: str) -> bytes:
        return self._delta({"reasoning_content": text})

    def write_text(self, text: str) -> bytes:
        return self._delta({"content": text})

    def write_call(self, index: int, call_id: str, name: str, arguments: str) -> bytes:
        """Return a whole tool call in one chunk, as providers send short ones."""
        call = tool_call_json(ToolCall(call_id, name, arguments), self._freeform)
        return self._delta({"tool_calls": [{"index": index, **call}]})

    def finish(self, reply: Reply, usage: Usage) -> tuple[bytes, bytes]:
        """Return the chunk with the finish reason and all logprobs that were asked for, and the
        rest: the usage if asked for, and `[DONE]`.
        """
        reason = b',"finish_reason":' + encode(finish_reason(reply)) + b"}]"
        if reply.token_logprobs is not None:
            shown = encode(logprobs_json(reply.token_logprobs))
            reason = b',"logprobs":' + one_line(shown) + reason
        null = b',"usage":null' if self._include_usage else b""
        last = self._before + b"{}" + reason + null + b"}\n\n"
        if self._include_usage:
            counts = encode(usage_json(usage))
            last += b"data: " + self._common + b',"choices":[],"usage":' + counts + b"}\n\n"
        return b"", last + DONE

    def keepalive(self) -> bytes:
        """Return a chunk with an empty delta: a comment does not reset every client's timeout."""
        return self._delta({})

    def error(self, error: RequestError) -> bytes | None:
        """Return `None`: a started stream is cut, at which clients retry."""
        del error
        return None

    def _delta(self, delta: JSON) -> bytes:
        return self._before + one_line(encode(delta)) + self._after + b"}\n\n"


# ---- conversations in Chat's form


def chat_messages(messages: Sequence[Message]) -> list[JSON]:
    """Return the messages in OpenAI Chat form, one each, in order."""
    return [_chat_message(message) for message in messages]


def chat_tools(tools: Sequence[ToolSpec]) -> list[JSON]:
    """Return the tools in OpenAI Chat form; keys without a value are left out."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: ToolSpec) -> JSON:
    function: JSON = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    if tool.strict:
        function["strict"] = True
    return function


def _chat_message(message: Message) -> JSON:
    shown: JSON = {"role": message.role.value, "content": _content(message)}
    if message.role is Role.ASSISTANT:
        if message.reasoning:
            shown["reasoning_content"] = message.reasoning
        if message.tool_calls:
            shown["content"] = shown["content"] or None
            shown["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in map(as_function, message.tool_calls)
            ]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        shown["name"] = message.name
    return shown


def _content(message: Message) -> str | list[JSON]:
    if all(isinstance(part, TextPart) for part in message.content):
        return message.text
    return [chat_part(part) for part in message.content]


def chat_part(part: Part) -> JSON:
    """Return one part of a message's content in OpenAI Chat form."""
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    kind = part.media_type.partition("/")[0]
    if part.media_type == BLOCK_TYPE and not part.source.startswith("data:"):
        block: JSON = json.loads(part.source)
        return block
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": part.source}}
    if kind == "audio":
        form = part.media_type.partition("/")[2]
        data = part.source.partition(",")[2]
        return {"type": "input_audio", "input_audio": {"data": data, "format": form}}
    return {"type": "file", "file": {"file_data": part.source}}
