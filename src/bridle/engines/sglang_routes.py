"""SGLang's two routes for sampling: writers of their requests and readers of their replies.

Source: SGLang 0.5.23, `srt/managers/{io_struct,tokenizer_manager}.py`,
`srt/sampling/sampling_params.py` and `srt/entrypoints/openai/{protocol,serving_chat}.py`; checked
against a running server. `/generate` pairs each logprob with its id. Its streams repeat the whole
reply in each piece, unless the server was started with `--incremental-streaming-output`; both are
read by the number of sampled tokens that a chunk reports, and only the new end of a repeated text
is parsed.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import msgspec
import numpy as np
from msgspec import Raw

from bridle.engines import vllm_schemas
from bridle.engines.adapter import ROUTER, as_version, check_paired
from bridle.engines.base import GarbledError, GenerateChunk, GenerateRequest, spans_of
from bridle.engines.ids import IdsError, compact, cut_ids, parse_ids
from bridle.errors import EngineError
from bridle.experts import KEY, as_rows, reply_extra
from bridle.types import JSON, FinishReason, Ids, Logprobs, Reply, Sampling, ToolCall, VersionSpan

GENERATE, CHAT = "/generate", vllm_schemas.CHAT

_ENCODER = msgspec.json.Encoder()
_REPEATS, _LONGEST = 256, 32
"""A repeating stream comes in that many pieces for its whole budget, of at most that many tokens:
3,000 tokens are 14 MB in all, against 180 MB a token at a time."""


class SglangRoute(StrEnum):
    """Route for sampling."""

    GENERATE = "generate"
    """`/generate`: ids in and out, streams, policy versions per token, nothing parsed."""
    CHAT = "chat"
    """Chat completions, for messages with images: the server renders; replies are whole."""

    @property
    def path(self) -> str:
        """Path of the route below the base URL."""
        return GENERATE if self is SglangRoute.GENERATE else CHAT


# ---- requests


@dataclass(frozen=True, slots=True)
class Ask:
    """The server's abilities, and the room left, on which the body of a call depends."""

    model: str
    room: int
    """Rest of the context, the default budget: SGLang would default to 128 tokens."""
    seeds: bool = True
    """True if it knows `sampling_seed`."""
    incremental: bool = False
    """True if its streams send only new tokens."""
    prompt: bool = False
    """Request the prompt's ids even if that costs the prefix cache, as the probe does."""
    experts: bool = False
    """Request the experts that each token was routed to."""


def call_body(route: SglangRoute, request: GenerateRequest, rid: str, ask: Ask) -> bytes:
    """Return the JSON body of a call on one of SGLang's routes."""
    head: JSON = {"rid": rid}
    if ask.experts:
        head["return_routed_experts"] = True
        head["routed_experts_start_len"] = request.experts_from
    if request.session_id is not None:
        head["session_id"] = request.session_id
    if route is SglangRoute.CHAT:
        return _ENCODER.encode(head | _chat_fields(request, ask))
    head |= _generate_fields(request, ask)
    text = request.prompt.json()
    return b"".join((_ENCODER.encode(head)[:-1], b',"input_ids":', text, b"}"))


def _generate_fields(request: GenerateRequest, ask: Ask) -> JSON:
    fields = _sampling(request.sampling, ask)
    if request.grammar is not None:
        schema = request.grammar.get("json_schema") or {"type": "object"}
        fields["json_schema"] = _ENCODER.encode(schema).decode()
    if request.stream and not ask.incremental:
        every = math.ceil(fields["max_new_tokens"] / _REPEATS)
        fields["stream_interval"] = min(max(1, every), _LONGEST)
    asked: JSON = {"sampling_params": fields, "return_logprob": True, "stream": request.stream}
    # Each chunk of a stream would repeat the prompt; its length is in every chunk.
    asked["return_prompt_token_ids"] = not request.stream
    if ask.prompt:
        asked["logprob_start_len"] = 0
    return asked


def _sampling(sampling: Sampling, ask: Ask) -> JSON:
    most = ask.room if sampling.max_tokens is None else sampling.max_tokens
    fields: JSON = {"max_new_tokens": most}
    for name, ours in _NAMES.items():
        value = getattr(sampling, ours)
        if value is not None and value != () and (ask.seeds or ours != "seed"):
            fields[name] = value
    if "min_new_tokens" in fields:
        fields["min_new_tokens"] = min(fields["min_new_tokens"], most)
    return fields


_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_new_tokens": "min_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "sampling_seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_p": "min_p",
    "logit_bias": "logit_bias",
}
"""SGLang's names -> Bridle's; `max_new_tokens` is always sent."""

_CHAT_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens",
               "sampling_seed": "seed"}  # fmt: skip


def _chat_fields(request: GenerateRequest, ask: Ask) -> JSON:
    named = _sampling(request.sampling, ask).items()
    fields: JSON = {_CHAT_NAMES.get(name, name): value for name, value in named}
    fields |= {"model": request.model or ask.model, "logprobs": True, "return_token_ids": True}
    fields |= {"return_meta_info": True, "stream": False}
    fields["messages"] = list(request.messages or [{"role": "user", "content": "."}])
    if request.tools:
        fields["tools"] = list(request.tools)
    fields["return_prompt_token_ids"] = True
    if request.arguments:
        fields["chat_template_kwargs"] = request.arguments
    if request.grammar is not None:
        schema = request.grammar.get("json_schema") or {"type": "object"}
        named_schema = {"name": "reply", "schema": schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": named_schema}
    return fields


# ---- replies


class Matched(msgspec.Struct):
    """`meta_info.finish_reason`."""

    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class MetaInfo(msgspec.Struct):
    """`meta_info` of a reply or stream chunk."""

    finish_reason: Matched | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: int | str | None = None
    weight_versions: list[vllm_schemas.Span] | None = None
    output_token_logprobs: Raw = vllm_schemas.EMPTY
    """`[[logprob, id, text or null], ...]`."""
    input_token_logprobs: Raw = vllm_schemas.EMPTY
    routed_experts: Raw = vllm_schemas.EMPTY


class SglangMessage(msgspec.Struct):
    """Message of a chat reply."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[vllm_schemas.Called] | None = None


class ChatChoice(msgspec.Struct):
    """The only choice of a chat reply."""

    message: SglangMessage
    response_token_ids: Raw = vllm_schemas.EMPTY
    prompt_token_ids: Raw = vllm_schemas.EMPTY
    meta_info: MetaInfo | None = None


class SglangReply(msgspec.Struct):
    """Reply of either route, or one stream chunk of `/generate`."""

    meta_info: MetaInfo | None = None
    output_ids: Raw = vllm_schemas.EMPTY
    prompt_token_ids: Raw = vllm_schemas.EMPTY
    text: str | None = None
    choices: list[ChatChoice] = []
    error: Raw = vllm_schemas.EMPTY


Triple: TypeAlias = tuple[float | None, int, str | None]
"""Logprob, id, text."""

_ANSWER = msgspec.json.Decoder(SglangReply)
_TRIPLES: msgspec.json.Decoder[list[Triple]] = msgspec.json.Decoder(list[Triple])


@dataclass(slots=True)
class Reading:
    """Reader of one reply's pieces, in order. `strict` refuses sampled ids without logprobs."""

    prompt_tokens: int | None
    """Length of the prompt that was sent; `None` = the server made its own."""
    version: int
    """Version of weights without a number."""
    strict: bool = True
    experts_from: int = 0
    """First position whose experts were asked for."""
    experts_shape: tuple[int, int] | None = None
    """Layers and experts per token, which the server does not tell; `None` = not known."""
    count: int = 0
    """Tokens read so far."""
    has_ids: bool = False
    """True if the reply has a field for sampled ids; it may be empty."""
    _ids: bytes = b""
    _logprobs: bytes = b""
    _has_prompt: bool = False

    def read(self, body: bytes) -> GenerateChunk:
        """Return the new tokens of one piece of a reply. Raises `EngineError` for unusable
        replies.
        """
        text, prompt_text = cut_ids(body, b"prompt_token_ids")
        try:
            return self._read(_ANSWER.decode(text), prompt_text)
        except (msgspec.MsgspecError, IdsError) as error:
            start = repr(bytes(body[:200]).decode(errors="replace"))
            raise GarbledError(f"the engine's reply cannot be read: {error}: {start}") from None

    def _read(self, answer: SglangReply, prompt_text: bytes | None) -> GenerateChunk:
        if answer.error not in vllm_schemas.ABSENT:
            raise _stream_error(answer.error)
        choice = answer.choices[0] if answer.choices else None
        meta = answer.meta_info if choice is None else choice.meta_info
        if meta is None:
            raise EngineError(f"the engine's reply has no `meta_info`: {ROUTER}")
        finish = _finish(meta.finish_reason)
        raw = answer.output_ids if choice is None else choice.response_token_ids
        repeats = self._repeats(raw, meta)
        ids, logprobs = self._tokens(raw, meta, repeats=repeats)
        self.count += len(ids)
        prompt_ids = self._prompt(answer, choice, prompt_text, meta)
        if prompt_ids is None:
            self._check_prompt(meta)
        return GenerateChunk(
            output_ids=ids,
            logprobs=logprobs,
            finish_reason=finish,
            stop_text=_stop_text(meta.finish_reason),
            versions=() if finish is None else self._versions(meta),
            prompt_ids_json=prompt_ids,
            cached_tokens=max(0, meta.cached_tokens or 0),
            reply=None if finish is None else _reply(choice, answer.text, finish),
            extra={} if finish is None else self._experts(meta),
        )

    def _repeats(self, raw: Raw, meta: MetaInfo) -> bool:
        """Return whether a chunk repeats all tokens from the first on."""
        if not self.count:
            return True
        text = compact(bytes(raw)) if raw not in vllm_schemas.ABSENT else b"[]"
        size = text.count(b",") + (text != b"[]")
        known = meta.completion_tokens
        if known is None:
            return text.startswith(self._ids[:-1])
        return size >= known != self.count + size

    def _tokens(self, raw: Raw, meta: MetaInfo, *, repeats: bool) -> tuple[Ids, Logprobs]:
        """Return the ids and logprobs that are new in this piece."""
        text = compact(bytes(raw)) if raw not in vllm_schemas.ABSENT else b""
        entries = meta.output_token_logprobs
        reported = bytes(entries) if entries not in vllm_schemas.ABSENT else b""
        triples = self._triples(reported, repeats=repeats)
        if text:
            ids = parse_ids(_rest(text, self._ids) if repeats else text)
        else:  # servers before 0.4.7 send ids only with logprobs
            ids = np.array([one[1] for one in triples], dtype=np.int32)
        self.has_ids = self.has_ids or bool(text or triples)
        if repeats:
            self._ids, self._logprobs = text, reported
        elif meta.completion_tokens is not None:
            # A call that is aborted while it waits repeats its last token.
            new = max(0, meta.completion_tokens - self.count)
            ids, triples = ids[:new], triples[:new]
        return ids, self._checked(ids, triples)

    def _triples(self, reported: bytes, *, repeats: bool) -> list[Triple]:
        if not reported:
            return []
        if repeats and self.count and not reported.startswith(self._logprobs[:-1]):
            return _TRIPLES.decode(reported)[self.count :]
        return _TRIPLES.decode(_rest(reported, self._logprobs) if repeats else reported)

    def _checked(self, ids: Ids, triples: list[Triple]) -> Logprobs:
        if not triples and not self.strict:
            return np.empty(0, np.float32)
        if len(triples) != len(ids):
            raise GarbledError(f"the engine gave {len(ids)} token ids, but {len(triples)} logprobs")
        check_paired(ids, np.array([one[1] for one in triples], dtype=np.int64))
        values = [one[0] for one in triples]
        if None in values:
            missing = values.index(None)
            raise GarbledError(f"the engine gave no logprob for token {missing} of a reply")
        with np.errstate(over="ignore"):  # an infinite one is refused by `reported`
            return np.array(values, dtype=np.float64).astype(np.float32)

    def _prompt(
        self, answer: SglangReply, choice: ChatChoice | None, text: bytes | None, meta: MetaInfo
    ) -> bytes | None:
        """Return the prompt's ids, once, if the reply reports them."""
        if self._has_prompt:
            return None
        raw = answer.prompt_token_ids if choice is None else choice.prompt_token_ids
        prompt_ids = (
            text if text is not None else bytes(raw) if raw not in vllm_schemas.ABSENT else None
        )
        if prompt_ids is None and meta.input_token_logprobs not in vllm_schemas.ABSENT:
            named = [one[1] for one in _TRIPLES.decode(meta.input_token_logprobs)]
            prompt_ids = _ENCODER.encode(named) if named else None
        self._has_prompt = prompt_ids is not None
        return None if prompt_ids is None else compact(prompt_ids)

    def _check_prompt(self, meta: MetaInfo) -> None:
        given, used = self.prompt_tokens, meta.prompt_tokens
        if not self._has_prompt and None not in {given, used} and given != used:
            raise GarbledError(
                f"the engine sampled under {used} prompt tokens, but was given {given}"
            )

    def _versions(self, meta: MetaInfo) -> tuple[VersionSpan, ...]:
        if meta.weight_versions:
            return tuple(
                VersionSpan(as_version(one.version, unnamed=self.version), one.start, one.end)
                for one in meta.weight_versions
                if one.end > one.start
            )
        version = self.version
        if meta.weight_version is not None:
            version = as_version(meta.weight_version, unnamed=version)
        return spans_of(version, self.count)

    def _experts(self, meta: MetaInfo) -> JSON:
        """Place the routed experts, if there are any: base64 of int32 numbers, row after row."""
        if meta.routed_experts in vllm_schemas.ABSENT:
            return {}
        text = msgspec.json.decode(meta.routed_experts, type=str)
        if self.experts_shape is None:
            why = "the model's config.json, which has their shape, is not on this machine"
            return {f"{KEY}_dropped": why}
        try:
            numbers = np.frombuffer(base64.b64decode(text), "<i4")
            rows = as_rows(numbers.reshape(-1, *self.experts_shape))
        except ValueError as error:
            raise GarbledError(f"the engine's routed experts cannot be read: {error}") from None
        tokens = (meta.prompt_tokens or self.prompt_tokens or 0) + self.count
        return reply_extra(rows, asked=self.experts_from, tokens=tokens)


def _rest(text: bytes, known: bytes) -> bytes:
    """Return the items of a JSON array after the prefix `known`.

    Raises `IdsError` if it begins with others.
    """
    if len(known) <= 2:
        return text
    if not text.startswith(known[:-1]) or text[len(known) - 1 : len(known)] not in {b",", b"]"}:
        raise IdsError(
            "the engine's stream repeats its earlier tokens, and they are others than before"
        )
    return b"[" + text[len(known) - 1 :].removeprefix(b",")


def _finish(matched: Matched | None) -> FinishReason | None:
    if matched is None:
        return None
    if matched.type not in vllm_schemas.FINISH:
        raise EngineError(
            f"the engine ended a reply with the unknown finish reason {matched.type!r}",
            retryable=True,
        )
    if matched.type == "abort" and matched.status_code is not None:
        raise EngineError(
            f"the engine aborted the request: {matched.message}",
            retryable=matched.status_code >= 500 or matched.status_code == 429,
            status=matched.status_code,
        )
    return vllm_schemas.FINISH[matched.type]


def _stop_text(matched: Matched | None) -> str | None:
    if matched is None or matched.type != "stop" or not isinstance(matched.matched, str):
        return None
    return matched.matched


def _stream_error(raw: Raw) -> EngineError:
    try:
        detail = msgspec.json.decode(raw, type=vllm_schemas.ErrorDetail)
    except msgspec.MsgspecError:
        detail = vllm_schemas.ErrorDetail(bytes(raw).decode(errors="replace")[:300])
    status = detail.code if isinstance(detail.code, int) else None
    retryable = status is None or status >= 500 or status == 429
    return EngineError(
        f"the engine failed in mid-reply: {detail.message}", retryable=retryable, status=status
    )


def _reply(choice: ChatChoice | None, text: str | None, finish: FinishReason) -> Reply | None:
    """Return the reply that the server parsed; for `/generate`, its text."""
    if choice is None:
        return None if text is None else Reply(text, None, (), finish)
    calls = [
        ToolCall(one.id, one.function.name or "", one.function.arguments or "")
        for one in choice.message.tool_calls or ()
        if one.function is not None
    ]
    message = choice.message
    return Reply(message.content or "", message.reasoning_content or None, tuple(calls), finish)


def experts_shape(config: JSON) -> tuple[int, int] | None:
    """Return the number of layers and of experts per token in a model's configuration; `None` = it
    has no experts.
    """
    text = config.get("text_config") or config
    layers, top_k = text.get("num_hidden_layers"), text.get("num_experts_per_tok")
    return (layers, top_k) if isinstance(layers, int) and isinstance(top_k, int) else None
