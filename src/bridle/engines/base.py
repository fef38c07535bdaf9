"""The engine contract: token ids in; token ids, logprobs and policy versions out.

Engines know nothing of dialects, sessions or harnesses. A `Prompt` gives its ids as an array (for
an engine in this process) or as JSON text (for HTTP), neither of which is parsed again.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from bridle.errors import EngineError
from bridle.types import (
    JSON,
    FinishReason,
    Ids,
    LogprobMode,
    Logprobs,
    Reply,
    Sampling,
    VersionSpan,
    record,
)

RETRYABLE = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which the same call may be tried again."""


class Prompt(Protocol):
    """Ids of a prompt. Each form is made only when it is asked for."""

    @property
    def kept(self) -> int:
        """Number of leading ids that an earlier call of the conversation had."""

    @property
    def length(self) -> int:
        """Number of ids of the prompt."""

    def __len__(self) -> int:
        """`length`."""

    def array(self) -> Ids:
        """Return the prompt's ids as int32, shape (T,), read-only."""

    def json(self) -> bytes:
        """Return the prompt's ids as the text of a JSON array without spaces, e.g. `b"[1,2,3]"`."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Image in a prompt of ids."""

    url: str
    """`data:image/...;base64,...`."""
    start: int
    """First of its placeholders in the prompt's ids."""
    length: int


@record()
class GenerateRequest:
    """One call to sample."""

    request_id: str
    """Id for `abort`."""
    prompt: Prompt
    sampling: Sampling
    """Effective values: only `None` fields are left to the engine's defaults."""
    session_id: str | None = None
    """For sticky routing and prefix-cache salt."""
    model: str | None = None
    """Model name on the engine's side; `None` = its only one."""
    messages: Sequence[JSON] | None = None
    """OpenAI Chat messages, for an engine that renders or parses itself; `None` = ids suffice."""
    tools: Sequence[JSON] | None = None
    calls: bool = True
    """True if the caller accepts tool calls, for an engine that parses by itself."""
    arguments: JSON | None = None
    """Extra arguments of the chat template, for an engine that renders; `None` = none."""
    by_messages: bool = False
    """True if `messages` are the prompt, because ids cannot hold their images; `prompt` is then the
    one that `Seeing.see` returned."""
    pictures: tuple[Picture, ...] = ()
    """The images whose placeholders `prompt` holds, in order; for an engine with
    `EngineInfo.pictures`."""
    grammar: JSON | None = None
    """`{"json_schema": {...}}`, or `{"structural_tag": {...}}` as xgrammar has it, to constrain the
    samples; `None` = free."""
    stream: bool = False
    """True if the caller wants pieces as they are sampled; an engine may still send one piece."""
    keeps: bool = False
    """True if sampled tokens must survive a broken reply, each with its version: a pool then has
    the call streamed if a whole reply would lose them."""

    @property
    def experts_from(self) -> int:
        """First position of the prompt whose routed experts no earlier call received."""
        return max(0, self.prompt.kept - 1)

    @property
    def begins_again(self) -> bool:
        """Return whether a call that breaks off is sampled again from its start instead of being
        resumed.
        """
        return self.grammar is not None or self.by_messages


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text of a chunk, parsed by the engine itself."""

    reasoning: str = ""
    text: str = ""


@record(eq=False)
class GenerateChunk:
    """Piece of one reply as sampled. The last one carries `finish_reason`."""

    output_ids: Ids
    logprobs: Logprobs
    """Same length as `output_ids` (empty if the mode is NONE)."""
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    """The stop string that ended it; `None` = end token, stop token or length."""
    versions: tuple[VersionSpan, ...] = ()
    """On the last chunk: over all output ids of the call."""
    mixed_versions: bool = False
    """On the last chunk: whether weights changed during a piece, which has the version at its
    beginning."""
    prompt_ids_json: bytes | None = None
    """On the first chunk, if the engine reports it: JSON text of the prompt's ids."""
    cached_tokens: int = 0
    reply: Reply | None = None
    """On the last chunk, if the engine parsed the reply itself; `None` = Bridle parses the ids."""
    delta: TextDelta | None = None
    """Text of this piece, if the engine parses by itself; `None` = it does not."""
    extra: JSON = field(default_factory=dict)
    """Data of the engine besides the tokens: `bridle.experts.Experts` under `experts.KEY`, the
    rest as it came (sampling masks)."""
    first: int | None = None
    """Tokens of the first message, if a chunk joins several that arrived together."""
    moved: bool = False
    """On the last chunk, with `ABORT`: whether the call was ended for a reason that is not its own
    (a weight update, a dead engine)."""
    numbered: bool = False
    """On the last chunk: whether the engine knows the number of each token's version."""
    bounds: tuple[int, int, float, float] | None = None
    """Least and largest id, then logprob; `None` = not known."""

    @classmethod
    def aborted(cls, versions: tuple[VersionSpan, ...], cached_tokens: int = 0) -> GenerateChunk:
        """Return the last chunk, without tokens, of a call that was ended early."""
        ids, logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        return cls(
            ids, logprobs, FinishReason.ABORT, versions=versions, cached_tokens=cached_tokens
        )


def spans_of(version: int, count: int) -> tuple[VersionSpan, ...]:
    """Return the version spans of `count` tokens that one policy version sampled."""
    return (VersionSpan(version, 0, count),) if count else ()


def join_chunks(chunks: Iterable[GenerateChunk]) -> Iterator[GenerateChunk]:
    """Yield the chunks, neighbouring ones that have only tokens joined.

    If reading `chunks` raises, those before are yielded first.
    """
    held: list[GenerateChunk] = []
    try:
        for chunk in chunks:
            if _has_only_tokens(chunk):
                held.append(chunk)
                continue
            yield from _as_one(held)
            held = []
            yield chunk
    except Exception:
        yield from _as_one(held)
        raise
    yield from _as_one(held)


def _has_only_tokens(chunk: GenerateChunk) -> bool:
    return (
        0 < len(chunk.output_ids) == len(chunk.logprobs)
        and chunk.finish_reason is None
        and chunk.prompt_ids_json is None
        and not chunk.extra
    )


def _as_one(chunks: list[GenerateChunk]) -> list[GenerateChunk]:
    if len(chunks) < 2:
        return chunks
    one = GenerateChunk(
        output_ids=np.concatenate([chunk.output_ids for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        cached_tokens=max([chunk.cached_tokens for chunk in chunks]),
        first=len(chunks[0].output_ids),
    )
    return [one]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Capabilities of an engine, found by probing it."""

    model: str
    context_length: int
    logprob_mode: LogprobMode
    token_in: bool
    """True if it samples under given ids."""
    version: int
    """Policy version of its weights now."""
    eos_token_ids: tuple[int, ...] = ()
    tokenizer_dir: str | None = None
    """Folder with the tokenizer, if it is on this machine."""
    grammar: bool = False
    """True if it samples under a `GenerateRequest.grammar`."""
    pictures: bool = False
    """True if it samples under ids that hold images (`GenerateRequest.pictures`)."""
    remote: bool = False
    """True if it is a server, which sends each piece of a reply as a message."""
    tells_versions: bool = False
    """True if a whole reply reports the version of each token, and holds the tokens so far if the
    server ends it for a weight update."""
    vocab_size: int | None = None
    """Number of ids of its model; `None` = not reported."""
    tells_prompt: bool = False
    """True if whole replies reported the prompt's ids during the probe."""
    tells_prompt_streamed: bool = False
    """True if streamed replies did."""


class Engine(Protocol):
    """Inference engine. Failures are `bridle.errors.EngineError`."""

    async def start(self) -> EngineInfo:
        """Connect to the engine or load it, and return its capabilities; idempotent."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Sample one reply; at least one chunk, the last with a finish reason.

        Closing the iterator early aborts the call. An adapter that was not asked to stream may
        yield everything in one chunk.
        """

    async def abort(self, request_id: str) -> None:
        """End a call; its iterator then yields a last chunk with `FinishReason.ABORT`."""

    async def health(self) -> None:
        """Return if the engine can sample now; otherwise raise `EngineError`."""

    async def aclose(self) -> None:
        """Close the engine's connections and free its memory; idempotent."""


@runtime_checkable
class Versioned(Protocol):
    """Engine whose policy version can be set from outside, after its weights were changed."""

    async def set_version(self, version: int) -> None:
        """Set the policy version of tokens that are sampled from here on."""


@runtime_checkable
class HasTokenizer(Protocol):
    """Server whose own tokenizer can be asked for ids."""

    async def tokenize(self, text: str) -> Ids | None:
        """Return the token ids of `text`, without special tokens added; `None` = not reported."""


@runtime_checkable
class Templating(Protocol):
    """Engine whose own chat template makes prompts, and that returns them before it samples."""

    async def template(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, arguments: JSON
    ) -> Ids:
        """Return the prompt ids that the engine's chat route makes of messages in OpenAI Chat's
        form.

        `arguments` are the chat template's. Raises `EngineError` (400) for messages that it
        refuses.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Messages with images as an engine's template and processor render them."""

    ids: Ids
    """The whole prompt, placeholders expanded."""
    places: tuple[JSON, ...]
    """`start` and `length` of each image's placeholder in `ids`, in order, and `grid`, the
    processor's sizes of it (`{"image_grid_thw": [1, 4, 6]}`), if reported; empty = not reported."""


@runtime_checkable
class Seeing(Protocol):
    """Engine that takes images in messages, and returns their rendering before it samples."""

    async def see(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, arguments: JSON
    ) -> Seen | None:
        """Return the rendered prompt of messages with images; `None` = the model takes no images.

        `arguments` are the chat template's. Raises `EngineError` (400) for images that it refuses.
        """


PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""Effect of a pause on running calls: it ends them and keeps their tokens, awaits them, or holds
them where they are."""


class Immediate(ABC):
    """An engine that can be called without a task: `begin`, then `arrived` and `end`.

    At any moment before `end`, `generate` of the same request takes over the begun call and handles
    whatever is unusual, so nothing is sampled twice.
    """

    @abstractmethod
    def begin(self, request: GenerateRequest) -> asyncio.Future[Any] | None:
        """Send a call at once; the returned future is done when its whole reply has arrived or it
        failed.

        `generate` is to read a call that asks for a stream. `None` = the call was not sent, and
        `generate` is to do all.
        """

    @abstractmethod
    def arrived(self, request: GenerateRequest) -> GenerateChunk | None:
        """Return the whole reply of a call that `begin` sent; `None` = `generate` is to read it.

        May be repeated. `EngineError` for a reply that cannot be used; `generate` raises the same.
        """

    @abstractmethod
    def end(self, request: GenerateRequest) -> None:
        """Forget a call that `begin` sent, because its reply was used."""

    @abstractmethod
    def drop(self, request: GenerateRequest) -> None:
        """Abort a call that `begin` sent and that `generate` will not take over."""


@runtime_checkable
class Pausable(Protocol):
    """Engine that can be held while its weights are changed from outside."""

    async def pause(self, mode: PauseMode) -> bool:
        """Stop sampling; return when nothing samples any more. New calls wait, or are refused with
        the status 503.

        `False` = the engine cannot be paused.
        """

    async def resume(self) -> None:
        """Continue sampling after a pause."""

    async def is_paused(self) -> bool:
        """Return whether the engine is paused, by whomever; `False` if it does not tell."""


@runtime_checkable
class Settling(Protocol):
    """Engine that may still be sent something after a call has ended."""

    async def settled(self) -> None:
        """Return when the server has been informed of all calls that have ended, also of aborted
        ones.
        """


Weights: TypeAlias = str | Path | Mapping[str, Any]
"""A model folder as the engine sees it; or a state dict, for an engine in this process."""


@runtime_checkable
class Updatable(Protocol):
    """Engine that takes new weights in place."""

    async def update_weights(self, source: Weights, version: int) -> None:
        """Load the weights of `source`; tokens sampled from then on have policy version `version`.

        Running calls continue. Raises `EngineError` if the old weights are still in place,
        `WeightsLostError` if the engine has none any more.
        """


ADAPTER = "adapter_config.json"
"""File by which a folder is a LoRA adapter, as the package `peft` writes it."""


def is_adapter(source: Weights) -> bool:
    """Return whether `source` is a folder on this machine that holds a LoRA adapter."""
    return not isinstance(source, Mapping) and (Path(source) / ADAPTER).is_file()


@runtime_checkable
class Adaptable(Protocol):
    """Engine that samples with LoRA adapters, each call with the one that it began with."""

    async def load_adapter(self, folder: str | Path, version: int) -> None:
        """Load a LoRA adapter; calls that begin from then on use it and have policy version
        `version`.

        Running calls keep their adapter and its version. Raises `EngineError` if the earlier
        adapter is still the newest.
        """

    def adapted(self) -> bool:
        """Return whether calls that begin now use an adapter."""

    def forget_adapters(self) -> None:
        """Leave the loaded adapters on the server at the end, because its trainer now uses it."""


class WeightsLostError(EngineError):
    """A weight update failed half-way: the engine must be restarted."""


class CutError(EngineError):
    """The connection to the engine ended in mid-reply; the tokens so far are valid."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True, kind="engine_cut")


class GarbledError(EngineError):
    """A reply reports values that the engine cannot have sampled; none of it may be used."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True, kind="engine_garbled")
