"""vLLM's HTTP schemas: the fields that Bridle's server reads and its adapter writes.

Source: vLLM 0.33.0, `entrypoints/openai/{chat_completion,completion}/protocol.py` and
`entrypoints/scale_out/token_in_token_out/protocol.py`. Prompt ids are `msgspec.Raw`: they stay the
bytes that came. Unknown fields are ignored, as in vLLM.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Raw

from bridle.engines.base import GenerateChunk
from bridle.types import JSON, FinishReason, Sampling, VersionSpan

if TYPE_CHECKING:
    from bridle.engines._core import Tokens

EMPTY = Raw(b"")
"""A raw field that was not sent."""

ABSENT = (EMPTY, Raw(b"null"))
"""A raw field without a value."""

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"


# ---- requests


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool = False


class TransferParams(msgspec.Struct):
    """`kv_transfer_params`: the prompt ids of a chat call."""

    prompt_token_ids: Raw = EMPTY


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling fields as all three routes name them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None

    def sampling(self, max_tokens: int | None) -> Sampling:
        """Return the sampling parameters of a request, with `max_tokens` as given here."""
        given = {one.name: getattr(self, one.name) for one in fields(Sampling)}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        ids = tuple(self.stop_token_ids or ())
        return Sampling(**given | {"max_tokens": max_tokens, "stop": stop, "stop_token_ids": ids})


class CommonFields(SamplingFields, kw_only=True):
    """Fields of both chat and completion requests beside sampling."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    request_id: str | None = None
    session_id: str | None = None
    response_format: JSON | None = None
    structured_outputs: JSON | None = None

    @property
    def usage_wanted(self) -> bool:
        """Return whether the client asked for a usage chunk at the end of the stream."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(CommonFields, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Raw
    tools: Raw = EMPTY
    tool_choice: str | JSON | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: JSON | None = None
    echo: bool = False
    kv_transfer_params: TransferParams | None = None


class TokenSampling(SamplingFields, kw_only=True):
    """`sampling_params` of the token route."""

    n: int | None = None
    logprobs: int | None = None
    structured_outputs: JSON | None = None


class TokenRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /inference/v1/generate`."""

    token_ids: Raw
    sampling_params: TokenSampling
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /tokenize`: a prompt or messages."""

    prompt: str | None = None
    messages: list[JSON] | None = None
    tools: list[JSON] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: JSON | None = None


class VersionRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /update_weight_version`."""

    new_version: int | str


class RpcRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /collective_rpc`."""

    method: str
    kwargs: JSON = msgspec.field(default_factory=dict)


class AbortRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /abort_requests`; no ids means all calls."""

    request_ids: list[str] | None = None


# ---- replies, as the adapter reads them


class TokenLogprob(msgspec.Struct, gc=False):
    """Logprob of one sampled token, whose id is in `token` or `token_id`; each reply has many."""

    logprob: float | None = None
    token: str = ""
    token_id: int | None = None


class Logprobs(msgspec.Struct):
    """Chat and token routes have `content`; completions have parallel lists."""

    content: list[TokenLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None


class Span(msgspec.Struct):
    """Version span; vLLM's versions are texts."""

    version: int | str
    start: int
    end: int


class CalledFunction(msgspec.Struct):
    """Function of a tool call."""

    name: str | None = None
    arguments: str | None = None


class Called(msgspec.Struct):
    """Tool call of a message or delta."""

    index: int = 0
    id: str | None = None
    function: CalledFunction | None = None


class ReplyMessage(msgspec.Struct):
    """Message, or the delta of a streamed one."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Called] | None = None


class VllmChoice(msgspec.Struct):
    """The only choice of a reply or stream chunk, on any of the three routes."""

    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: Raw = EMPTY
    prompt_token_ids: Raw = EMPTY
    """Completions only; chat and token routes have it at the top."""
    logprobs: Logprobs | None = None
    message: ReplyMessage | None = None
    delta: ReplyMessage | None = None
    text: str | None = None
    weight_versions: list[Span] | None = None
    routed_experts: str | None = None


class PromptDetails(msgspec.Struct):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int | None = None


class ReplyUsage(msgspec.Struct):
    """`usage`."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class VllmReply(msgspec.Struct):
    """Whole reply or one stream chunk, on any of the three routes."""

    choices: list[VllmChoice] = []
    prompt_token_ids: Raw = EMPTY
    usage: ReplyUsage | None = None
    error: Raw = EMPTY
    """A failure in mid-stream."""


class ErrorDetail(msgspec.Struct):
    """Error of an engine."""

    message: str = ""
    code: int | str | None = None


class ErrorAnswer(msgspec.Struct):
    """Error body: vLLM nests it under `error`; FastAPI's own has `detail`."""

    error: ErrorDetail | str | None = None
    message: str | None = None
    detail: Any = None


FINISH = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
"""A reply's `finish_reason` -> Bridle's; `error` and others are failed calls."""


# ---- replies, read in one pass by compiled code

try:
    from bridle.engines._core import read_event, read_reply
except ImportError:  # it is not compiled where there is no C compiler

    def read_reply(body: bytes | memoryview, sent: bytes | memoryview) -> None:  # type: ignore[misc]
        """Read nothing: `read_answer` reads every reply then."""

    def read_event(body: bytes) -> None:  # type: ignore[misc]
        """Read nothing: `read_answers` reads every event then."""


def usual_reply(body: bytes | memoryview, sent: bytes) -> GenerateChunk | None:
    """Read a usual whole reply to the prompt whose JSON text is `sent`.

    `None` = `read_answer` is to read it.
    """
    if (found := read_reply(body, sent)) is None:
        return None
    tokens, reason, spans, cached = found
    if reason not in FINISH:
        return None
    return _chunk_of(
        tokens,
        finish_reason=FINISH[reason],
        versions=tuple([VersionSpan(*span) for span in spans]),
        prompt_ids_json=sent,
        cached_tokens=cached,
        numbered=bool(spans),
    )


def usual_event(body: bytes) -> GenerateChunk | None:
    """Read an event of a stream that has tokens and nothing else; `None` = it is another one."""
    return None if (tokens := read_event(body)) is None else _chunk_of(tokens)


def _chunk_of(tokens: Tokens, **last: Any) -> GenerateChunk:  # noqa: ANN401 - its fields
    ids, logprobs, bounds = tokens
    ids_array, values = np.frombuffer(ids, np.int32), np.frombuffer(logprobs, np.float32)
    return GenerateChunk(ids_array, values, bounds=bounds, **last)
