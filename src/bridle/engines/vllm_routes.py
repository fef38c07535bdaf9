"""vLLM's three routes for sampling: writers of their requests and readers of their replies.

A request is assembled from bytes: the prompt's JSON text is spliced in, never encoded again. A
reply's prompt ids are cut out before it is decoded, so only sampled ids are parsed. Field names are
in `bridle.engines.vllm_schemas`.

`ImageRenderer` requests the token ids and image features of messages before sampling.
`/v1/chat/completions/render` (served with `--enable-scale-out`) returns the ids with all
placeholders expanded and the position of each image's placeholder; `/tokenize`, which every vLLM
has, returns the ids alone. The processor's metadata of an image (`image_grid_thw`, the number of
patches) comes only together with its pixels. So it is requested once per image, in a message of
that image alone, and cached by vLLM's hash of the image. Source: vLLM 0.33.0,
`entrypoints/scale_out/token_in_token_out/protocol.py` and `mm_serde.py`.
"""

from __future__ import annotations

import base64
import struct
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import chain, groupby, repeat
from operator import attrgetter, itemgetter
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
import orjson

from bridle.engines import vllm_schemas
from bridle.engines.adapter import UNNAMED, as_version, check_paired, ids_from
from bridle.engines.base import (
    GarbledError,
    GenerateChunk,
    GenerateRequest,
    Picture,
    Seen,
    TextDelta,
)
from bridle.engines.connection import HttpCall
from bridle.engines.http import EngineClient
from bridle.engines.ids import IdsError, compact, cut_ids, parse_ids
from bridle.engines.probe import Finding
from bridle.errors import EngineError
from bridle.experts import KEY, Rows, npy_rows
from bridle.types import (
    JSON,
    FinishReason,
    Ids,
    Logprobs,
    Reply,
    Sampling,
    ToolCall,
    VersionSpan,
    record,
)

T = TypeVar("T")

RENDER, TOKENIZE = "/v1/chat/completions/render", "/tokenize"

MISSING = frozenset({404, 405, 501})
"""Statuses of a server without the route."""

BLIND = ("is not a multimodal model", "At most 0 image")
"""Texts of vLLM's refusals by a model that takes no images."""


def fold_images(ids: Ids, pictures: Sequence[Picture]) -> Ids:
    """Return the ids with each image's placeholders reduced to one, as `/inference/v1/generate`
    requires.

    vLLM's processor expands it as before; it reports the ids that it used, and those are compared
    with `ids` as for any reply. The placeholder is assumed to be the most frequent token of an
    image's ids; the probe detects a model for which that is wrong (`image_finding`).
    """
    pieces, at = [], 0
    for one in pictures:
        place = ids[one.start : one.start + one.length]
        values, counts = np.unique(place, return_counts=True)
        pieces += [ids[at : one.start], values[counts.argmax()][None]]
        at = one.start + one.length
    return np.concatenate([*pieces, ids[at:]])


class _Place(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_placeholders: dict[str, list[_Place]] = {}
    mm_hashes: dict[str, list[str]] = {}
    mm_metadata: dict[str, list[str | None]] | None = None
    """Base64 of msgpack: metadata of each item beside its pixels."""


class _Rendered(msgspec.Struct):
    """Answer of both routes, which name the ids differently."""

    token_ids: list[int] | None = None
    tokens: list[int] | None = None
    features: _Features | None = None


SAMPLE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAT0lEQVR42u3PQQkAAAgEsEty/aMYywi+hcEKLNO+"
    "FgEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQGBywLKp0DxvxLbjwAAAABJRU5E"
    "rkJggg=="
)
"""A red square of 64 pixels, for the probe."""

SIZES_KEPT = 4096
"""Images whose sizes are cached; the least recently used are dropped first."""


class ImageRenderer:
    """Renders chat bodies by one server, with images or without."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._known: OrderedDict[str, JSON] = OrderedDict()
        """Hash of an image -> its sizes; empty = not reported."""
        self._renders = True
        """True if the server may have the route that renders whole calls."""

    async def see(self, body: JSON) -> Seen | None:
        """Return the server's rendering of a body with images; `None` = the model takes none."""
        try:
            rendered = await self._asked(body, _rendered)
        except EngineError as error:
            if error.status == 400 and any(words in str(error) for words in BLIND):
                return None
            raise
        listed = rendered.tokens if rendered.token_ids is None else rendered.token_ids
        places = await self._places(body, rendered.features or _Features())
        return Seen(np.array(listed, dtype=np.int32), places)

    async def render(self, body: JSON) -> Ids:
        """Return the prompt ids that the server's render route makes of a body."""
        return await self._asked(body, ids_from)

    async def _asked(self, body: JSON, ask: Callable[[EngineClient, str, JSON], Awaitable[T]]) -> T:
        """Render a body by the route that the server has for it."""
        if self._renders:
            try:
                asked = {**body, "tool_choice": "none", "mm_payload": "none"}
                return await ask(self._client, RENDER, asked)
            except EngineError as error:
                if error.status not in MISSING:
                    raise
            self._renders = False
        return await ask(self._client, TOKENIZE, body)

    async def _places(self, body: JSON, features: _Features) -> tuple[JSON, ...]:
        places = features.mm_placeholders.get("image", [])
        hashes = features.mm_hashes.get("image", [])
        placeholders: list[JSON] = [{"start": one.offset, "length": one.length} for one in places]
        if len(hashes) == len(places):
            images = _images(body["messages"])
            for place, name, image in zip(placeholders, hashes, images, strict=False):
                if sizes := await self._sizes(body["model"], name, image):
                    place["grid"] = sizes
        return tuple(placeholders)

    async def _sizes(self, model: str, name: str, image: JSON) -> JSON:
        """Return the processor's metadata of one image; empty if the server does not report it."""
        known = self._known.get(name)
        if known is None:
            message = {"role": "user", "content": [image]}
            body = {"model": model, "messages": [message], "mm_payload": "tensors"}
            try:
                alone = (await _rendered(self._client, RENDER, body)).features or _Features()
            except EngineError:
                return {}
            same = alone.mm_hashes.get("image") == [name]
            known = _small(alone.mm_metadata) if same else {}
            self._known[name] = known
            if len(self._known) > SIZES_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(name)
        return known


async def _rendered(client: EngineClient, path: str, body: JSON) -> _Rendered:
    text = await client.post(path, msgspec.json.encode(body), HttpCall(), prompt_tokens=0)
    try:
        rendered = msgspec.json.decode(text, type=_Rendered)
    except msgspec.MsgspecError as error:
        raise EngineError(f"the reply of {client.base_url}{path} cannot be read: {error}") from None
    if not rendered.token_ids and not rendered.tokens:
        raise EngineError(f"{client.base_url}{path} returned no token ids")
    return rendered


def image_finding(*, seen: Seen | None, ids_taken: bool) -> Finding:
    """Return the probe's finding about images. `seen` is the rendering of one image."""
    if seen is None:
        return Finding.note("images", "the model takes none")
    return Finding.check(
        "images",
        ok=ids_taken,
        found="taken, with ids beside them too" if ids_taken else "taken as messages only",
        means="A prompt with an image is rendered by the server each time.",
        fix="Nothing: this model's processor has its placeholders otherwise.",
    )


def _images(messages: Sequence[JSON]) -> Iterator[JSON]:
    """Yield the parts of messages that are images, in order."""
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from (part for part in content if part.get("type") == "image_url")


def _small(metadata: dict[str, list[str | None]] | None) -> JSON:
    """Decode the sizes from vLLM's metadata of an item; empty if its form is unknown."""
    try:
        (text,) = (metadata or {})["image"]
        item = _UNPACKED.decode(base64.b64decode(text or ""))
        return {name: _numbers(element["data"]) for name, element in item.items()}
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError):
        return {}


def _numbers(data: Any) -> Any:  # noqa: ANN401 - numbers, nested as the tensor is
    """Convert a tensor (its dtype, shape and bytes) to lists; return a number as it is."""
    if not isinstance(data, list):
        return data
    dtype, shape, raw = data
    return np.frombuffer(raw, dtype).reshape(shape).tolist()


_UNPACKED = msgspec.msgpack.Decoder(dict[str, dict[str, Any]], ext_hook=lambda _, raw: bytes(raw))


_PROMPT_IDS = b'"prompt_token_ids":['
_LAST_IDS = 32
"""Bytes of a prompt's ids by which their end is found in a reply."""
_ENCODER = msgspec.json.Encoder()
_ANSWER = msgspec.json.Decoder(vllm_schemas.VllmReply)
_ANSWERS = msgspec.json.Decoder(list[vllm_schemas.VllmReply])
_MISSING = -9998.0
"""vLLM writes -9999.0 for a missing logprob."""


class VllmRoute(StrEnum):
    """Route for sampling."""

    path: str
    """Path below the base URL."""

    def __new__(cls, name: str, path: str) -> Self:
        route = str.__new__(cls, name)
        route._value_, route.path = name, path
        return route

    CHAT = "chat", vllm_schemas.CHAT
    """Chat completions with `kv_transfer_params.prompt_token_ids`."""
    GENERATE = "generate", vllm_schemas.GENERATE
    """`/inference/v1/generate`: reports policy versions per token; needs --enable-scale-out."""
    COMPLETIONS = "completions", vllm_schemas.COMPLETIONS
    """Completions with ids for a prompt; every vLLM has it."""


def call_parts(
    route: VllmRoute,
    request: GenerateRequest,
    model: str,
    *,
    room: int,
    token_in: bool,
    experts: bool = False,
) -> tuple[bytes, bytes, bytes]:
    """Return the JSON body of a call in three parts, of which the middle one is the prompt's ids.

    Without `token_in` a body of the chat route has messages in place of ids. `room` is the rest of
    the context in tokens, the budget of a request without one (the routes for completions would
    take 16). With `experts` the body asks for the routed experts of the new tokens.
    """
    sampling, by_ids = request.sampling, token_in and not request.by_messages
    most = sampling.max_tokens
    if most is None and route is not VllmRoute.CHAT:
        most = room
    kind = route, request.model or model, *_SHARED_VALUES(sampling)
    if experts or not by_ids or not _has_only_ids(request):
        shared = _shared_text(route, request, model, experts=experts)
    elif (shared := _SHARED_TEXTS.get(kind, b"")) == b"":
        if len(_SHARED_TEXTS) == _SHARED_KEPT:
            _SHARED_TEXTS.clear()
        shared = _shared_text(route, request, model, experts=False)
        if len(shared) <= _SHARED_BYTES:  # stop texts may be long
            _SHARED_TEXTS[kind] = shared
    own = b"" if most is None else b',"max_tokens":%d' % most
    if route is VllmRoute.GENERATE:
        own += b"}"
    own += b',"request_id":' + _ENCODER.encode(request.request_id)
    if request.session_id is not None and route is not VllmRoute.GENERATE:
        own += b',"session_id":' + _ENCODER.encode(request.session_id)
    if not by_ids and route is VllmRoute.CHAT:
        return shared, own, b"}"
    key, end = _IDS_KEYS[route]
    if request.pictures and route is VllmRoute.GENERATE:
        folded_ids = fold_images(request.prompt.array(), request.pictures)
        return shared + own + key, _ENCODER.encode(folded_ids.tolist()), end
    return shared + own + key, request.prompt.json(), end


_IDS_KEYS = {
    VllmRoute.CHAT: (b',"kv_transfer_params":{"prompt_token_ids":', b"}}"),
    VllmRoute.GENERATE: (b',"token_ids":', b"}"),
    VllmRoute.COMPLETIONS: (b',"prompt":', b"}"),
}
"""Text before and behind the prompt's ids."""

_SHARED_TEXTS: dict[tuple[Any, ...], bytes] = {}
"""The fields that calls share which have only ids, by route, model and sampling."""

_SHARED_BYTES = 1024
"""Longer ones are made anew each time."""

_SHARED_KEPT = 256
"""Beyond this many they are made anew."""


def _has_only_ids(request: GenerateRequest) -> bool:
    """Return whether a call differs from others in its ids, sampling and model only.

    One with a seed counts as another, because seeds differ from call to call.
    """
    return not (
        request.stream
        or request.messages
        or request.tools
        or request.arguments
        or request.grammar is not None
        or request.pictures
        or request.sampling.seed is not None
        or request.sampling.logit_bias is not None
    )


def _shared_text(route: VllmRoute, request: GenerateRequest, model: str, *, experts: bool) -> bytes:
    """Write the fields that are the same for calls of one kind, as an object that is left open.

    The token route's ends in its sampling, which is left open as well.
    """
    stream: JSON = {}
    if request.stream:
        stream = {"stream": True, "stream_options": {"include_usage": True}}
    head: JSON = {"model": request.model or model, **stream, "return_token_ids": True}
    values = zip(_SHARED_NAMES, _SHARED_VALUES(request.sampling), strict=True)
    sampling = {name: value for name, value in values if value is not None and value != ()}
    if experts:
        place = sampling if route is VllmRoute.GENERATE else head
        place["routed_experts_prompt_start"] = request.experts_from
    if route is VllmRoute.GENERATE:
        if request.grammar is not None:
            sampling["structured_outputs"] = _structured_outputs(request.grammar)
        if request.pictures:
            images = [{"type": "image_url", "url": one.url} for one in request.pictures]
            head["content_parts"] = images
        return _ENCODER.encode({**head, "sampling_params": {**sampling, "logprobs": 0}})[:-2]
    head |= {**sampling, "return_tokens_as_token_ids": True, "return_weight_versions": True}
    if request.grammar is not None:
        head["response_format"] = response_format(request.grammar)
    if route is VllmRoute.COMPLETIONS:
        head["logprobs"] = 0
    else:
        head |= _chat_fields(request)
    return _ENCODER.encode(head)[:-1]


def _chat_fields(request: GenerateRequest) -> JSON:
    # Hidden reasoning would hide ids and logprobs with it.
    body: JSON = {"logprobs": True, "top_logprobs": 0, "include_reasoning": True}
    body["messages"] = request.messages or [{"role": "user", "content": "."}]
    if request.tools:
        body["tools"] = request.tools
    if request.arguments:
        body["chat_template_kwargs"] = request.arguments
    if request.by_messages or (request.tools and not request.calls):
        body["tool_choice"] = "none"  # the tools are shown; that calls are parsed needs a flag
    return body


_SHARED_NAMES = tuple(one.name for one in fields(Sampling) if one.name != "max_tokens")
_SHARED_VALUES = attrgetter(*_SHARED_NAMES)


def _structured_outputs(grammar: JSON) -> JSON:
    if "structural_tag" in grammar:
        return {"structural_tag": _ENCODER.encode(grammar["structural_tag"]).decode()}
    return {"json": grammar.get("json_schema", {})}


def response_format(grammar: JSON) -> JSON:
    """Return the field `response_format` of OpenAI's API for a grammar."""
    if "structural_tag" in grammar:
        tag: JSON = grammar["structural_tag"]
        return tag
    schema = grammar.get("json_schema", {})
    if not schema:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}


# ---- replies


@record()
class Read:
    """One decoded reply or stream chunk."""

    chunk: GenerateChunk | None
    """`None` for a chunk without a choice (usage at the end of a stream)."""
    cached_tokens: int
    spans: tuple[VersionSpan, ...] | None
    """Value as reported by the engine; `None` = not reported."""
    paired: bool | None
    """True if the logprobs name their ids; `None` = there were none."""
    message: vllm_schemas.ReplyMessage | None
    text: str | None
    has_ids: bool
    """True if the reply has a field for sampled ids; it may be empty."""
    prompt_tokens: int | None = None


def read_answer(body: bytes, *, unnamed: int = 0, sent: bytes | None = None) -> Read:
    """Decode a whole reply or one stream chunk of any route.

    `unnamed` is the version of tokens under weights without a number. `sent` is the JSON text of
    the prompt's ids: a reply that repeats it is recognised by one comparison. Raises `GarbledError`
    for unusable replies: no JSON, different numbers of logprobs and ids, logprobs of other ids, a
    missing logprob, an error in a stream.
    """
    text, prompt_text = body, None
    start, end = -1, -1
    if sent is not None and len(sent) < len(body):
        # The ids end where the last of them are: near the end of vLLM's replies.
        last = sent[-_LAST_IDS:]
        end = body.rfind(last) + len(last)
        start = end - len(sent)
    name = start - len(_PROMPT_IDS) + 1
    if (
        name >= 0
        and sent is not None
        and body.startswith(_PROMPT_IDS[:-1], name)
        and body.startswith(sent, start)
        # Where the name stands twice, one may be the request's own, repeated.
        and body.find(_PROMPT_IDS[:-2], 0, name) < 0
        and body.find(_PROMPT_IDS[:-2], end) < 0
    ):
        text, prompt_text = b"%bnull%b" % (body[:start], body[end:]), sent
    elif _PROMPT_IDS in body:
        text, prompt_text = cut_ids(body, b"prompt_token_ids")
    try:
        return _read(_ANSWER.decode(text), prompt_text, unnamed)
    except (msgspec.MsgspecError, IdsError) as error:
        raise GarbledError(f"the engine's reply cannot be read: {error}: {_start(body)}") from None


def read_answers(
    bodies: list[bytes], *, unnamed: int = 0, sent: bytes | None = None
) -> Iterator[Read]:
    """Decode stream chunks that arrived together, each as `read_answer` does.

    Neighbours with nothing but tokens are read as one. An unusable chunk raises after all before it
    have been yielded. `unnamed` is the version of tokens under weights without a number; `sent` is
    the JSON text of the prompt's ids, by which a reply that repeats them is recognised.
    """
    if len(bodies) == 1 or _PROMPT_IDS in bodies[0]:
        yield read_answer(bodies[0], unnamed=unnamed, sent=sent)
        if not (bodies := bodies[1:]):
            return
    answers = _decoded(bodies)
    kinds = zip(bodies, answers, _only_tokens(answers), strict=True)
    for only_tokens, group in groupby(kinds, itemgetter(2)):
        together = [*group]
        if only_tokens and len(together) > 1:
            with suppress(EngineError, IdsError):
                yield _read_together([answer.choices[0] for _, answer, _ in together if answer])
                continue
        for body, _, _ in together:
            yield read_answer(body, unnamed=unnamed, sent=sent)


def _decoded(bodies: list[bytes]) -> Sequence[vllm_schemas.VllmReply | None]:
    """Decode the bodies at once; `None` for each if they must be decoded one by one."""
    with suppress(msgspec.MsgspecError):
        answers = _ANSWERS.decode(b"[" + b",".join(bodies) + b"]")
        if len(answers) == len(bodies):
            return answers
    return [None] * len(bodies)


def _only_tokens(answers: Sequence[vllm_schemas.VllmReply | None]) -> list[bool]:
    """Return of each stream chunk whether it has ids, logprobs, and no other field that is used."""
    absent = vllm_schemas.ABSENT
    return [
        answer is not None
        and bool(answer.choices)
        and answer.usage is None
        and answer.error in absent
        and answer.prompt_token_ids in absent
        and (choice := answer.choices[0]).prompt_token_ids in absent
        and choice.finish_reason is None
        and choice.weight_versions is None
        and choice.routed_experts is None
        and choice.logprobs is not None
        and choice.logprobs.content is not None
        and (ids := bytes(choice.token_ids))[:1] == b"["
        and ids != b"[]"
        for answer in answers
    ]


def _read_together(choices: list[vllm_schemas.VllmChoice]) -> Read:
    """Join neighbours with only tokens into one chunk; fails unless each has as many logprobs."""
    entries = [one.logprobs.content or [] for one in choices if one.logprobs is not None]
    texts = [bytes(one.token_ids)[1:-1] for one in choices]
    if [*map(len, entries)] != [1 + commas for commas in map(bytes.count, texts, repeat(b","))]:
        raise GarbledError(
            "a chunk of the engine's stream has more token ids than logprobs, or fewer"
        )
    ids_text = b"[" + b",".join(texts) + b"]"
    ids, logprobs, paired = _sampled(vllm_schemas.Logprobs([*chain(*entries)]), ids_text)
    chunk = GenerateChunk(ids, logprobs, first=len(entries[0]))
    return Read(chunk, 0, None, paired, None, None, has_ids=True)


def _failed(error: msgspec.Raw) -> EngineError:
    """Return the failure that a stream reports, with the status 503 of one that will pass."""
    status = None
    with suppress(msgspec.MsgspecError):
        detail = msgspec.json.decode(error, type=vllm_schemas.ErrorDetail)
        status = 503 if detail.code == 503 else None
    message = f"the engine failed in mid-reply: {_start(error)}"
    return EngineError(message, retryable=True, status=status)


def _read(answer: vllm_schemas.VllmReply, prompt_text: bytes | None, unnamed: int) -> Read:
    if answer.error not in vllm_schemas.ABSENT:
        raise _failed(answer.error)
    usage = answer.usage
    details = usage.prompt_tokens_details if usage is not None else None
    cached = max(0, details.cached_tokens or 0) if details is not None else 0
    if not answer.choices:
        prompt_tokens = None if usage is None else usage.prompt_tokens
        return Read(None, cached, None, None, None, None, False, prompt_tokens)  # noqa: FBT003
    choice = answer.choices[0]
    if (reason := choice.finish_reason) is not None and reason not in vllm_schemas.FINISH:
        raise EngineError(
            f"the engine ended a reply with the unknown finish reason {reason!r}", retryable=True
        )
    spans: tuple[VersionSpan, ...] = ()
    numbered = bool(choice.weight_versions)
    for span in choice.weight_versions or ():
        numbered &= span.version != UNNAMED
        version = as_version(span.version, unnamed=unnamed)
        spans += (VersionSpan(version, span.start, span.end),)
    has_ids = choice.token_ids not in vllm_schemas.ABSENT
    ids_text = bytes(choice.token_ids) if has_ids else b""
    ids, logprobs, paired = _sampled(choice.logprobs, ids_text)
    chunk = GenerateChunk(
        output_ids=ids,
        logprobs=logprobs,
        finish_reason=None if reason is None else vllm_schemas.FINISH[reason],
        stop_text=choice.stop_reason if type(choice.stop_reason) is str else None,
        versions=spans,
        prompt_ids_json=_prompt_text(answer, choice) if prompt_text is None else prompt_text,
        cached_tokens=cached,
        extra={} if choice.routed_experts is None else {KEY: _experts(choice.routed_experts)},
        numbered=numbered,
    )
    message = choice.message or choice.delta
    prompt_tokens = None if usage is None else usage.prompt_tokens
    named_spans = spans or None
    return Read(chunk, cached, named_spans, paired, message, choice.text, has_ids, prompt_tokens)


_NO_IDS: Ids = np.empty(0, np.int32)
_NO_LOGPROBS: Logprobs = np.empty(0, np.float32)


def _prompt_text(answer: vllm_schemas.VllmReply, choice: vllm_schemas.VllmChoice) -> bytes | None:
    """Return the ids that were not cut out; a server may repeat the request's elsewhere."""
    for raw in (answer.prompt_token_ids, choice.prompt_token_ids):
        if raw not in vllm_schemas.ABSENT:
            return compact(bytes(raw))
    return None


def _sampled(
    given: vllm_schemas.Logprobs | None, ids_text: bytes
) -> tuple[Ids, Logprobs, bool | None]:
    """Return the ids of a reply, their logprobs, and whether the logprobs name these ids."""
    if given is None or not ids_text:
        return parse_ids(ids_text) if ids_text else _NO_IDS, _NO_LOGPROBS, None
    content = given.content or []
    values: list[Any] = [entry.logprob for entry in content]  # numbers, or `None`
    if given.content is None:
        values = list(given.token_logprobs or ())
    same = False
    paired: bool | None = True
    if content and content[0].token_id is not None:
        try:  # nearly always these are the very ids, which need not be parsed then
            numbers = struct.pack(f"{len(content)}i", *[entry.token_id for entry in content])
            ids = np.frombuffer(numbers, np.int32)
            same = orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY) == ids_text
        except struct.error:  # `None`, or a number beyond all ids, is among them
            pass
    if not same or b"-" in ids_text:
        ids, paired = _parsed(ids_text, given, len(values))
        if not ids.size:
            return ids, _NO_LOGPROBS, None
    try:
        packed: bytes | array[float] = struct.pack(f"{len(values)}f", *values)
    except (OverflowError, struct.error):  # one is infinite in float32, or `None`
        packed = b"" if None in values else array("f", values)
    logprobs = np.frombuffer(packed, np.float32)
    missing = int(logprobs.argmin()) if packed else values.index(None)
    if not packed or logprobs[missing] <= _MISSING:
        raise GarbledError(f"the engine gave no logprob for token {missing} of a reply")
    return ids, logprobs, paired


def _parsed(ids_text: bytes, given: vllm_schemas.Logprobs, count: int) -> tuple[Ids, bool | None]:
    """Return the ids in a text, and whether the `count` logprobs name them; `None` = they do not.

    Raises `GarbledError` for logprobs of other ids.
    """
    ids = parse_ids(ids_text)
    if not ids.size:
        return ids, None
    if count != ids.size:
        raise GarbledError(f"the engine gave {len(ids)} token ids, but {count} logprobs")
    content = given.content or []
    has_numbers = bool(content) and content[0].token_id is not None
    numbers = [entry.token_id for entry in content] if has_numbers else [None]
    if None not in numbers:
        check_paired(ids, np.array(numbers))
        return ids, True
    names = [entry.token for entry in content] or given.tokens or []
    joined = ",".join(names).encode()
    if joined != b"token_id:" + ids_text[1:-1].replace(b",", b",token_id:"):
        if not names or not all(name.startswith("token_id:") for name in names):
            return ids, None
        check_paired(ids, parse_ids(b"[" + joined.replace(b"token_id:", b"") + b"]"))
    return ids, True


def _experts(text: str) -> Rows:
    try:
        return npy_rows(text)
    except ValueError as error:
        raise GarbledError(f"the engine's routed experts cannot be read: {error}") from None


def _start(body: bytes | msgspec.Raw) -> str:
    text = bytes(body)[:200].decode(errors="replace")
    return repr(text)


@dataclass(slots=True)
class MessageText:
    """Collector of the text, reasoning and calls that an engine parsed itself."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Index -> id, name, arguments."""

    def add(self, read: Read) -> TextDelta:
        """Add one piece of a reply; return its text and reasoning."""
        if read.message is None:
            self.content += read.text or ""
            return TextDelta(text=read.text or "")
        delta = TextDelta(read.message.reasoning or "", read.message.content or "")
        self.content += delta.text
        self.reasoning += delta.reasoning
        for position, call in enumerate(read.message.tool_calls or ()):
            entry = self.calls.setdefault(max(call.index, position), ["", "", ""])
            entry[0] = call.id or entry[0]
            if call.function is not None:
                entry[1] += call.function.name or ""
                entry[2] += call.function.arguments or ""
        return delta

    def reply(self, finish: FinishReason) -> Reply:
        """Return the whole reply: text, reasoning and tool calls of all pieces."""
        calls = [ToolCall(id_ or None, name, text) for id_, name, text in self.calls.values()]
        return Reply(self.content, self.reasoning or None, tuple(calls), finish)
