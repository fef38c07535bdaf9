"""One reply from the engine: chunks in, one sample out, with its prompt verified.

The engine tells which prompt ids it used; they are compared as bytes with those sent. Another
prompt is a break: the sample then belongs to the engine's ids, not to ours (law 1).

A call that the engine gave up (a weight update, a dead replica) is resumed from the tokens so far;
the harness sees one reply, and each token knows the version that sampled it.

A resumed call is the same call with the tokens so far at the end of its prompt. What an engine
knows of a call from its own tokens alone is put right here: the budget and the least number of
tokens that are left, a seed of its own (the same seed would draw the same numbers again), and stop
strings that begin before the seam and end behind it. A grammar cannot be entered in its middle, so
a constrained call begins again; so does one whose prompt is messages with images.

`Extras` is engine data other than the tokens of one call, over all its chunks and attempts. This
module does not interpret it. A list with an entry for each token stands at its tokens, whichever
piece brought it: one engine reports each piece's own part, another the whole try at its end.
Anything else belongs to its try as a whole; the last try's prompt holds the tokens of those before,
so its data is the reply's, and theirs is kept beside it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np

from bridle.capture.records import no_ids, no_logprobs
from bridle.engines.base import CutError, Engine, GarbledError, GenerateChunk, GenerateRequest
from bridle.engines.ids import compact, parse_ids
from bridle.errors import EngineError, boundary
from bridle.gateway.budgets import derived_seed
from bridle.prompting.prompt import PromptIds
from bridle.prompting.reply import REPLACEMENT
from bridle.types import (
    JSON,
    FinishReason,
    LogprobMode,
    VersionSpan,
    first_difference,
    record,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from bridle.types import Ids, Logprobs


def rest(request: GenerateRequest, prompt: PromptIds, sofar: Ids, tries: int) -> GenerateRequest:
    """Return the request for the rest of a reply of which the tokens `sofar` were sampled.

    `prompt` is its prompt, `tries` how often it was given to an engine. A call that would begin
    again is not streamed, so that nothing of it is shown which a later try would not repeat.
    """
    if request.begins_again and request.stream:
        request = replace(request, stream=False)
    if not tries:
        return request
    sampling = request.sampling
    if sampling.seed is not None and len(sofar):
        sampling = replace(sampling, seed=derived_seed(sampling.seed, f"after {len(sofar)}"))
    most, least = sampling.max_tokens, sampling.min_tokens
    return replace(
        request,
        request_id=f"{request.request_id}-{tries}",
        prompt=prompt.behind(sofar) if len(sofar) else prompt,
        sampling=replace(
            sampling,
            max_tokens=None if most is None else most - len(sofar),
            min_tokens=None if least is None else max(0, least - len(sofar)),
        ),
    )


async def stopping(
    chunks: AsyncGenerator[GenerateChunk, None],
    *,
    before: Ids,
    stop: Sequence[str],
    least: int,
    decode: Callable[[Ids], str],
    abort: Callable[[], Awaitable[None]],
) -> AsyncGenerator[GenerateChunk, None]:
    """Yield the chunks of a resumed call, up to a stop string that began in the tokens `before`.

    `decode` shows no control tokens, as engines look for stop strings. `least` is how many tokens
    must be sampled in all before one counts. `abort` ends the engine's call, whose last chunk then
    has the versions.
    """
    seam = _Seam(before, stop, least, decode)
    async with aclosing(chunks):
        async for chunk in chunks:
            found = seam.feed(chunk.output_ids)
            if found is None:
                yield chunk
                continue
            kept, text = found
            last, extra = chunk, first_of(chunk.extra, len(chunk.output_ids), kept)
            if chunk.finish_reason is None:
                await abort()
                rest_of_it = [ending async for ending in chunks]
                last = rest_of_it[-1]
                size = seam.passed + sum(len(one.output_ids) for one in (chunk, *rest_of_it))
                extra = first_of(last.extra, size, seam.passed + kept) | extra
            yield GenerateChunk(
                output_ids=chunk.output_ids[:kept],
                logprobs=chunk.logprobs[:kept],
                finish_reason=FinishReason.STOP,
                stop_text=text,
                versions=_clipped(last.versions, seam.passed + kept),
                prompt_ids_json=chunk.prompt_ids_json,
                cached_tokens=max(chunk.cached_tokens, last.cached_tokens),
                extra=extra,
            )
            return


class _Seam:
    """Looks for stop strings across the seam, until none can begin before it any more."""

    def __init__(
        self, before: Ids, stop: Sequence[str], least: int, decode: Callable[[Ids], str]
    ) -> None:
        self._stop = stop
        self._longest = max(map(len, stop))
        # A character may take as many tokens as it has bytes.
        self._ids = before[-4 * self._longest - 8 :]
        self._decode = decode
        self._begins = len(decode(self._ids).rstrip(REPLACEMENT))
        self._due = least - len(before)
        self._open = True
        self.passed = 0
        """Tokens of the resumed call that ended no stop string."""

    def feed(self, ids: Ids) -> tuple[int, str] | None:
        """Return how many of `ids` are kept and the stop string that ends there; else `None`."""
        for kept in range(1, len(ids) + 1 if self._open else 0):
            text = self._decode(np.concatenate((self._ids, ids[:kept])))
            if self.passed + kept > self._due:
                for stop in self._stop:
                    at = text.find(stop, max(0, self._begins - len(stop) + 1))
                    if 0 <= at < self._begins:
                        return kept, stop
            if len(text.rstrip(REPLACEMENT)) - self._begins >= self._longest - 1:
                self._open = False
                break
        if self._open:
            self._ids = np.concatenate((self._ids, ids))
        self.passed += len(ids)
        return None


def _clipped(spans: Sequence[VersionSpan], size: int) -> tuple[VersionSpan, ...]:
    return tuple(replace(span, end=min(span.end, size)) for span in spans if span.start < size)


@dataclass(slots=True)
class Extras:
    """The engine data of one call beside its tokens; sizes and places are in sampled tokens."""

    _lists: dict[str, list[Any]] = field(default_factory=dict)
    """Name -> one entry per token from the first on; `None` where the engine reported none."""
    _whole: JSON = field(default_factory=dict)
    """Of the try under way."""
    _tries: list[JSON] = field(default_factory=list)
    """Of the tries that ended and reported something, with the `tokens` that the call had then."""

    def add(self, extra: JSON, *, begun: int, at: int, size: int) -> None:
        """Record the extra data that the engine reported with a piece of `size` tokens.

        `begun` is the number of tokens before its try, `at` those before the piece itself.
        """
        for name, value in extra.items():
            if isinstance(value, list) and len(value) in {size, at + size - begun}:
                start = at if len(value) == size else begun
                entries = self._lists.setdefault(name, [])
                entries += [None] * (start - len(entries))
                entries[start:] = value
            else:
                self._whole[name] = value

    def end_try(self, tokens: int) -> None:
        """Record that a try ended when the call had so many tokens."""
        if self._whole:
            self._tries.append({"tokens": tokens, **self._whole})
            self._whole = {}

    def clear(self) -> None:
        """Drop the recorded data, because the call is sampled again from its start."""
        self._lists.clear()
        self._whole.clear()
        self._tries.clear()

    def whole(self, tokens: int) -> JSON:
        """Return all extra data that was reported for a call of `tokens` tokens.

        Lists have that length, with `None` where the engine reported no entry.
        """
        reported = {
            name: [*entries, *[None] * (tokens - len(entries))]
            for name, entries in self._lists.items()
            if entries
        }
        last = self._tries[-1] if self._tries and self._tries[-1]["tokens"] == tokens else {}
        return reported | {name: value for name, value in last.items() if name != "tokens"}

    def before(self, tokens: int) -> list[JSON]:
        """Return the extra data of earlier attempts, each with the number of tokens that the call
        had then.
        """
        return [one for one in self._tries if one["tokens"] != tokens]


def first_of(extra: JSON, size: int, kept: int) -> JSON:
    """Return the extra data of a reply of `size` tokens cut to its first `kept` tokens."""
    return {
        name: value[:kept] if isinstance(value, list) and len(value) == size else value
        for name, value in extra.items()
    }


Array = TypeVar("Array", bound="npt.NDArray[np.generic]")

FRUITLESS: Final = 3
"""Tries in a row that gave no token before a call counts as failed."""

MOST_TRIES: Final = 100
"""Tries of one call, fruitful ones included."""

_ABORT = FinishReason.ABORT

_SAMPLING = boundary(EngineError, "sampling")

BACKOFF_S: Final = 0.05
"""Wait before a fruitless try is repeated; doubles."""

REFUSED_TRIES: Final = 2
"""Further tries of a call that the engine refused before its first token."""

REFUSED_BACKOFF_S: Final = 0.25
"""Wait before such a try where the engine did not say when to come back; doubles."""

REFUSED_S: Final = 10.0
"""The time since its request after which a call is not tried again."""


@record(eq=False)
class SampledReply:
    """One whole reply as the engine gave it."""

    output_ids: Ids
    """Shape (T,), int32."""
    logprobs: Logprobs
    """Shape (T,), float32; empty where the engine gives none."""
    finish: FinishReason
    versions: tuple[VersionSpan, ...]
    """Over all output ids."""
    last: GenerateChunk
    """The chunk that ended it."""
    engine_prompt: PromptIds | None
    """The prompt that the engine used, if it is not the one that was sent."""
    break_position: int | None
    """First position where the two prompts differ; `None` = they do not."""
    resumed: int
    """Number of times that the engine aborted the call."""
    discarded: int = 0
    """Tokens of tries that could not be resumed (see `bridle.gateway.sampling`)."""
    mixed: bool = False
    """True if weights changed during a piece of it; such tokens have the version before."""
    extra: JSON = field(default_factory=dict)
    """Data of the engine besides the tokens (see `bridle.gateway.sampling`)."""
    extra_before: list[JSON] = field(default_factory=list)
    """Data that the attempts before the last one reported as wholes."""
    replayed: str | None = None
    """The exchange of another session whose reply this is; `None` = it was sampled for this one."""
    call_ids: tuple[str, ...] = ()
    """With `replayed`: the ids that its calls had."""


@dataclass(slots=True)
class Sofar:
    """Tokens and data of one call's attempts so far."""

    ids: list[Ids] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    tokens: int = 0
    tries: int = 0
    fruitless: int = 0
    refused: int = 0
    """Tries that failed with an error of the engine before the reply's first token."""
    failure: str = "engine_error"
    """Kind of the last error that ended a try."""
    reported_prompt: bytes | None = None
    discarded: int = 0
    mixed: bool = False
    extras: Extras | None = None
    """`None` = the engine reported nothing beside the tokens."""

    def output_ids(self) -> Ids:
        return _joined(self.ids) if self.ids else no_ids()

    def begin_again(self) -> None:
        """Drop the tokens: the next try starts at the prompt."""
        self.discarded += self.tokens
        self.tokens = 0
        self.ids.clear()
        self.logprobs.clear()
        self.versions.clear()
        self.mixed = False
        if self.extras is not None:
            self.extras.clear()

    def disown(self, version: int) -> None:
        """End a try whose tokens cannot be trusted, and drop all tokens of the call."""
        self.begin_again()
        self.reported_prompt = None
        self.add(GenerateChunk(no_ids(), no_logprobs()))
        self.end_try((), version)

    def add(self, chunk: GenerateChunk) -> None:
        if not self.ids and self.reported_prompt is None:
            self.reported_prompt = chunk.prompt_ids_json
        if chunk.extra:
            at = sum(map(len, self.ids))
            size = len(chunk.output_ids)
            self.extras = self.extras or Extras()
            self.extras.add(chunk.extra, begun=self.tokens, at=at, size=size)
        self.mixed |= chunk.mixed_versions
        self.ids.append(chunk.output_ids)
        self.logprobs.append(chunk.logprobs)

    def end_try(
        self, reported: tuple[VersionSpan, ...], version: int, *, moved: bool = False
    ) -> None:
        """End one try and record its policy versions; `version` if the engine reported none.

        The spans count from the try's own first token. One that was `moved` to another replica
        without a fault of its own is not counted as fruitless.
        """
        start, self.tokens = self.tokens, sum(map(len, self.ids))
        spans = reported or (VersionSpan(version, 0, self.tokens - start),)
        if start:
            spans = tuple(
                VersionSpan(span.version, start + span.start, start + span.end) for span in spans
            )
        self.versions += spans
        if self.extras is not None:
            self.extras.end_try(self.tokens)
        self.tries += 1
        if self.tokens > start:
            self.fruitless = 0
        elif not moved:
            self.fruitless += 1


class Sampler:
    """Samples replies of one engine.

    `version` is the policy's where a reply reports none; `decode` gives the text of ids
    without control tokens, for stop strings over a seam.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        mode: LogprobMode,
        version: Callable[[], int],
        decode: Callable[[Ids], str],
    ) -> None:
        self._engine = engine
        self._mode = mode
        self._version = version
        self.decode = decode

    async def sample(
        self,
        request: GenerateRequest,
        prompt: PromptIds,
        *,
        on_chunk: Callable[[GenerateChunk], None],
        sofar: Sofar | None = None,
        retry_until: float = 0.0,
    ) -> SampledReply:
        """Sample one reply under `prompt`; `on_chunk` gets each chunk as it arrives.

        While there is no token, an error status that may pass is tried again, up to the time
        `retry_until` (of `time.perf_counter`). Cancelling aborts the call. `EngineError` when the
        engine failed, ended the call for good, or sent an unusable answer; the tokens until then
        are in `sofar`.
        """
        sofar = sofar or Sofar()
        while True:
            left, tries = request, sofar.tries + sofar.refused
            if tries or request.stream:
                left = rest(request, prompt, sofar.output_ids(), tries)
            try:
                last = await self._try(left, sofar, on_chunk, request.sampling.min_tokens or 0)
            except EngineError as error:
                await _wait_after(error, sofar, retry_until)
                continue
            last = last or _budget_spent(request, sofar)
            if last is not None:
                return self._whole(request, sofar, last)
            if request.begins_again:
                sofar.begin_again()
            if sofar.fruitless >= FRUITLESS or sofar.tries >= MOST_TRIES:
                message = "the engine gave the call up"
                raise EngineError(message, retryable=True, kind=sofar.failure)
            if sofar.fruitless:
                await asyncio.sleep(BACKOFF_S * 2**sofar.fruitless)

    def cut(self, request: GenerateRequest, sofar: Sofar) -> SampledReply:
        """Return the tokens so far of a call that broke off, as a sample of their own."""
        if sum(map(len, sofar.ids)) > sofar.tokens:
            sofar.end_try((), self._version())
        return self._whole(request, sofar, GenerateChunk(no_ids(), no_logprobs(), _ABORT))

    async def _try(
        self,
        request: GenerateRequest,
        sofar: Sofar,
        on_chunk: Callable[[GenerateChunk], None],
        least: int,
    ) -> GenerateChunk | None:
        """Make one call to the engine; return its last chunk, or `None` if it was given up."""
        last: GenerateChunk | None = None
        with _SAMPLING:
            stream = self._chunks(request, sofar, least)
            try:
                try:
                    async for last in stream:
                        sofar.add(last)
                        # What a parser says of a reply's rest alone is not to be relied on.
                        on_chunk(replace(last, delta=None) if sofar.tokens and last.delta else last)
                finally:
                    await stream.aclose()
            except EngineError as error:
                begun = sum(map(len, sofar.ids)) > sofar.tokens
                if begun and isinstance(error, GarbledError):
                    sofar.disown(self._version())
                    raise EngineError(str(error), kind=error.kind) from error
                if not isinstance(error, CutError) and not (begun and error.retryable):
                    raise
                sofar.end_try((), self._version())
                sofar.failure = error.kind
                return None
        if last is None or last.finish_reason is None:
            raise EngineError("the engine's reply ended without a finish reason", retryable=True)
        sofar.end_try(last.versions, self._version(), moved=last.moved)
        return None if last.finish_reason is FinishReason.ABORT else last

    def _chunks(
        self, request: GenerateRequest, sofar: Sofar, least: int
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Return the engine's chunks; of a resumed call, up to a stop string over the seam."""
        chunks = cast("AsyncGenerator[GenerateChunk, None]", self._engine.generate(request))
        if not sofar.tokens or not request.sampling.stop:
            return chunks
        return stopping(
            chunks,
            before=sofar.output_ids(),
            stop=request.sampling.stop,
            least=least,
            decode=self.decode,
            abort=partial(self._engine.abort, request.request_id),
        )

    def _whole(self, request: GenerateRequest, sofar: Sofar, last: GenerateChunk) -> SampledReply:
        assert last.finish_reason is not None
        output_ids, logprobs, extras = _joined(sofar.ids), _joined(sofar.logprobs), sofar.extras
        if self._mode is not LogprobMode.NONE and output_ids.size != logprobs.size:
            raise EngineError(
                f"the engine sampled {len(output_ids)} token ids, but gave {len(logprobs)} logprobs"
            )
        engine_prompt, position = another_prompt(request, sofar.reported_prompt)
        return SampledReply(
            output_ids=output_ids,
            logprobs=logprobs,
            finish=last.finish_reason,
            versions=_spanned(sofar.versions),
            last=last if sofar.tries == 1 else replace(last, reply=None),
            engine_prompt=engine_prompt,
            break_position=position,
            resumed=sofar.tries - 1,
            discarded=sofar.discarded,
            mixed=sofar.mixed,
            extra={} if extras is None else extras.whole(len(output_ids)),
            extra_before=[] if extras is None else extras.before(len(output_ids)),
        )


async def _wait_after(error: EngineError, sofar: Sofar, until: float) -> None:
    """Wait before a refused call is tried again; raises `error` if it is not to be."""
    sampled = sum(map(len, sofar.ids))
    answered = error.status is not None or error.kind != "engine_error"
    if sampled or not error.retryable or not answered or sofar.refused >= REFUSED_TRIES:
        raise error
    wait_s = error.retry_after_s
    if wait_s is None:
        wait_s = REFUSED_BACKOFF_S * 2**sofar.refused
    if time.perf_counter() + wait_s > until:
        raise error
    sofar.refused += 1
    await asyncio.sleep(wait_s)


def _budget_spent(request: GenerateRequest, sofar: Sofar) -> GenerateChunk | None:
    """Return the end of a call that was given up just when its output budget was used."""
    most = request.sampling.max_tokens
    if most is None or sofar.tokens < most:
        return None
    return GenerateChunk(no_ids(), no_logprobs(), FinishReason.LENGTH)


def _spanned(spans: list[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Return the spans that hold tokens, those of one version joined; of a reply without any, the
    last.
    """
    if len(spans) == 1:
        return (spans[0],)
    joined: list[VersionSpan] = []
    for span in spans:
        if span.end == span.start:
            continue
        if joined and joined[-1].version == span.version:
            span = replace(span, start=joined.pop().start)  # noqa: PLW2901 - it grows to the left
        joined.append(span)
    return tuple(joined) or tuple(spans[-1:])


def _joined(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else cast("Array", np.concatenate(arrays))


def another_prompt(
    request: GenerateRequest, reported: bytes | None
) -> tuple[PromptIds | None, int | None]:
    """Return the prompt that the engine used and where it differs from the one that was sent.

    `(None, None)` if they are equal. `reported` is the JSON text of the ids that the engine used;
    `None` = it reports none, and those that were sent count.
    """
    if reported is None or reported == request.prompt.json():
        return None, None
    with boundary(EngineError, "reading the engine's prompt ids"):
        used = parse_ids(compact(reported))
    sent = request.prompt.array()
    position = first_difference(used, sent)
    if position == len(used) == len(sent):
        return None, None
    return PromptIds.root(used), position
