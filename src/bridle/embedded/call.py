"""One call in the batch: its tokens, its stop rules, and its own randomness.

A call is its token ids and how many of them the KV cache covers; the rest is computed next. So a
fresh prompt, one with a cached prefix, a decode step and a preempted call need no cases of their
own. Only the scheduler thread touches a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from bridle.engines.base import GenerateChunk
from bridle.errors import EngineError
from bridle.experts import KEY, Experts, Rows
from bridle.types import JSON, FinishReason, Ids, Sampling, VersionSpan

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens included."""

GREEDY_BELOW = 1e-5
"""A temperature below this means the most likely token (vLLM's own bound)."""

UNIFORM_BLOCK = 64

INCOMPLETE_MOST = 16
"""Tokens after which an incomplete character is decoded as it is."""


class Mailbox:
    """One caller's inbox, on the event loop that runs where it is made."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.messages: asyncio.Queue[GenerateChunk | EngineError] = asyncio.Queue()


class Uniforms:
    """The uniform numbers in [0, 1) that one call samples with: one per output token.

    They depend on the seed alone (Philox, a counter-based generator), never on the neighbours in
    the batch. `None` draws a seed from the system.
    """

    def __init__(self, seed: int | None) -> None:
        entropy = np.random.SeedSequence().entropy if seed is None else seed % (1 << 128)
        self._generator = np.random.Generator(np.random.Philox(key=entropy))
        self._block: list[float] = []

    def next(self) -> float:
        """Return the next random number in [0, 1 - 2**-24], so that a product with it never rounds
        up.
        """
        if not self._block:
            drawn = self._generator.random(UNIFORM_BLOCK, dtype=np.float32)
            self._block = drawn[::-1].astype(float).tolist()
        return self._block.pop()


class StopStrings:
    """Search for stop strings in the text of sampled ids, across token borders.

    Bytes of an incomplete character wait for the rest of it. The text is decoded in a sliding
    window, so the cost of a token does not grow with the reply.
    """

    def __init__(self, strings: tuple[str, ...], decode: Decode) -> None:
        self._strings = strings
        self._decode = decode
        self._longest = max(len(string) for string in strings)
        self._ids: list[int] = []
        self._shown = 0
        """Number of characters of the decoded window that are already in `_tail`."""
        self._tail = ""

    def push(self, token: int) -> str | None:
        """Add the next sampled token; return the stop string that it completes, if any."""
        self._ids.append(token)
        text = self._decode(self._ids)
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        if len(whole) == len(text) or len(self._ids) >= INCOMPLETE_MOST:
            piece = text[self._shown :]
            # The last token stays as left context: some tokenizers decode a first one differently.
            self._ids = self._ids[-1:]
            self._shown = len(self._decode(self._ids))
        else:
            piece = whole[self._shown :]
            self._shown = max(self._shown, len(whole))
        searched = self._tail + piece
        self._tail = searched[-(self._longest - 1) :] if self._longest > 1 else ""
        found = [(searched.find(string), string) for string in self._strings if string in searched]
        return min(found)[1] if found else None


class BatchedCall:
    """One call; `ids[:length]` is its prompt and what was sampled so far."""

    def __init__(
        self,
        request_id: str,
        prompt: Ids,
        sampling: Sampling,
        *,
        limit: int,
        stop_ids: frozenset[int],
        decode: Decode,
        mailbox: Mailbox | None,
        experts_from: int = 0,
    ) -> None:
        self.request_id = request_id
        self.mailbox = mailbox
        """The caller's inbox; `None` = no caller."""
        self.prompt_length = len(prompt)
        self.length = len(prompt)
        self.limit = limit
        """Most tokens it may sample."""
        self.ids: Ids = np.empty(len(prompt) + min(limit, 256), dtype=np.int32)
        self.ids[: len(prompt)] = prompt
        self._logprobs = np.empty(min(limit, 256), dtype=np.float32)
        self._sent = 0
        self._experts_from, self._routed = experts_from, 0  # and how many first ids have known ones
        self._experts: Rows | None = None
        self._spans: list[VersionSpan] = []

        self.computed = 0
        """Number of `ids` that the KV cache covers."""
        self.cache_version = -1
        """Version of the weights that all of its cache was computed under; -1 = mixed or none."""
        self.cached_tokens = 0
        """Number of prompt tokens that were cached when it first joined."""
        self.joined = False
        self.state: Any = None
        """State of `SingleDecoder`: the model's own cache for this call."""
        self.finish: FinishReason | None = None
        self.stop_text: str | None = None
        self.gone = False
        """True if its caller has gone."""

        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        self.greedy = temperature < GREEDY_BELOW
        self.temperature = 1.0 if self.greedy else temperature
        self.top_k = sampling.top_k if sampling.top_k and sampling.top_k > 0 else 0
        self.top_p = 1.0 if sampling.top_p is None else sampling.top_p
        self.min_tokens = min(sampling.min_tokens or 0, limit)
        self.presence = sampling.presence_penalty or 0.0
        self.frequency = sampling.frequency_penalty or 0.0
        self.repetition = sampling.repetition_penalty or 1.0
        self.min_p = sampling.min_p or 0.0
        self.bias = {int(token): value for token, value in (sampling.logit_bias or {}).items()}
        """Id -> addition to its logit."""
        penalised = self.presence or self.frequency or self.repetition != 1.0
        self.counts: dict[int, int] | None = {} if penalised else None
        """Counts of sampled tokens; `None` = no penalty needs them."""
        self.stop_ids = stop_ids
        self.uniforms = Uniforms(sampling.seed)
        strings = tuple(string for string in sampling.stop if string)
        self._stops = StopStrings(strings, decode) if strings else None

    @property
    def sampled(self) -> int:
        return self.length - self.prompt_length

    @property
    def pending(self) -> int:
        """Number of ids that the cache does not cover; 1 = ready for a decode step."""
        return self.length - self.computed

    @property
    def suppressed(self) -> frozenset[int]:
        """Ids that may not be sampled now, because they would end the call before `min_tokens`."""
        return self.stop_ids if self.sampled < self.min_tokens else frozenset()

    def append(self, token: int, logprob: float, version: int) -> None:
        """Add a sampled token; sets `finish` when it ends the call."""
        at = self.sampled
        if self.length == len(self.ids):
            self.ids = np.resize(self.ids, self.length * 2)
        if at == len(self._logprobs):
            self._logprobs = np.resize(self._logprobs, at * 2)
        self.ids[self.length] = token
        self._logprobs[at] = logprob
        self.length += 1
        if not self._spans or self._spans[-1].version != version:
            self._spans.append(VersionSpan(version, at, at))
        if self.counts is not None:
            self.counts[token] = self.counts.get(token, 0) + 1
        stop_text = None if self._stops is None else self._stops.push(token)
        if self.sampled < self.min_tokens:
            return
        if token in self.stop_ids:
            self.finish = FinishReason.STOP
        elif stop_text is not None:
            self.finish, self.stop_text = FinishReason.STOP, stop_text
        elif self.sampled >= self.limit:
            self.finish = FinishReason.LENGTH

    def routed(self, start: int, rows: Rows) -> None:
        """Record the experts of the ids from position `start` on; known ones are kept."""
        end = start + len(rows)
        if start > self._routed or end <= self._routed:
            return
        if self._experts is None or end > len(self._experts):
            longer = np.empty((2 * end, *rows.shape[1:]), np.int16)
            if self._experts is not None:
                longer[: self._routed] = self._experts[: self._routed]
            self._experts = longer
        self._experts[self._routed : end] = rows[self._routed - start :]
        self._routed = end

    @property
    def experts(self) -> Rows | None:
        """Return the experts of the leading ids for which they are known; `None` = the model has
        none.
        """
        return None if self._experts is None else self._experts[: self._routed]

    def has_unsent(self) -> bool:
        """Return whether the caller has not yet been sent all tokens and the end."""
        return self.finish is not None or self.sampled > self._sent

    def chunk(self) -> GenerateChunk:
        """Return the unsent tokens; the last chunk has the finish reason and the versions."""
        start, end = self._sent, self.sampled
        self._sent = end
        return GenerateChunk(
            output_ids=self.ids[self.prompt_length + start : self.prompt_length + end].copy(),
            logprobs=self._logprobs[start:end].copy(),
            finish_reason=self.finish,
            stop_text=self.stop_text,
            versions=() if self.finish is None else self.spans(),
            cached_tokens=self.cached_tokens,
            extra=self._extra() if self._routed and self.finish is not None else {},
        )

    def _extra(self) -> JSON:
        """Return the experts that were asked for; the last id was not computed."""
        assert self._experts is not None
        end = min(self._routed, self.length - 1)
        rows = self._experts[self._experts_from : end]
        return {KEY: Experts(self._experts_from, rows.copy())} if len(rows) else {}

    def spans(self) -> tuple[VersionSpan, ...]:
        """Return the weight versions of the output tokens; spans are half-open, without gaps."""
        ends = [*(span.start for span in self._spans), self.sampled][1:]
        return tuple(
            VersionSpan(span.version, span.start, end)
            for span, end in zip(self._spans, ends, strict=True)
        )


def common_prefix(a: Ids, b: Ids) -> int:
    """Return how many leading ids of both are equal."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n
