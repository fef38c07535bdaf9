"""Resumption of a reply that an engine aborted: one reply, whichever engine samples the rest.

A resumed call is the same call with the tokens so far at the end of its prompt. What an engine
knows of a call from its own tokens alone is put right here: the budget and the least number of
tokens that are left, a seed of its own (the same seed would draw the same numbers again), and stop
strings that begin before the seam and end behind it. A grammar cannot be entered in its middle, so
a constrained call begins again; so does one whose prompt is messages with images.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from bridle.engines.base import GenerateChunk, GenerateRequest
from bridle.gateway.budgets import derived_seed
from bridle.gateway.extras import first_of
from bridle.prompting.prompt import PromptIds
from bridle.types import FinishReason, VersionSpan

if TYPE_CHECKING:
    from bridle.types import Ids

_CUT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""Text that a decoder shows for a character whose last bytes are still to come."""


def rest(request: GenerateRequest, prompt: PromptIds, sofar: Ids, tries: int) -> GenerateRequest:
    """Return the request for the rest of `request` after the tokens `sofar`.

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
    """The chunks of a resumed call, up to a stop string that began in `before`.

    `decode` shows no control tokens, as engines look for stop strings. `least` is how many tokens
    must be sampled in all before one counts. `abort` ends the engine's call, whose last chunk then
    tells the versions.
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
        self._begins = len(decode(self._ids).rstrip(_CUT_CHARACTER))
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
            if len(text.rstrip(_CUT_CHARACTER)) - self._begins >= self._longest - 1:
                self._open = False
                break
        if self._open:
            self._ids = np.concatenate((self._ids, ids))
        self.passed += len(ids)
        return None


def _clipped(spans: Sequence[VersionSpan], size: int) -> tuple[VersionSpan, ...]:
    """The spans over the first `size` tokens."""
    return tuple(replace(span, end=min(span.end, size)) for span in spans if span.start < size)
