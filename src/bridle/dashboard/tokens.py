"""The tokens of a trace, a page at a time: what each is, whether it trains, and if not, why. Pure.

A page has at most `PAGE` tokens, so a trace of any length costs a browser the same. The strip above
it shows the whole trace in `CELLS` cells, each the way to its place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bridle.trajectory.sample import MaskReason, Trace

if TYPE_CHECKING:
    from bridle.types import Ids

PAGE = 1000
"""Tokens of a page."""

CELLS = 200
"""Parts of the strip."""

LEVELS = (-0.105, -0.693, -2.303, -4.605)
"""Logprobs at which a trained token's colour changes: probabilities 0.9, 0.5, 0.1 and 0.01."""

WHITE = {"\n": "⏎\n", "\t": "⇥", "\r": "␍", "": "∅"}
"""What is shown for a token that cannot be seen."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token as shown."""

    text: str
    style: str
    """CSS classes."""
    title: str
    """All that is known of it."""
    ends: str | None = None
    """The exchange whose sampled tokens end with it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A part of the strip."""

    start: int
    style: str
    here: bool
    """Whether its tokens, or some of them, are on the page."""

    @property
    def page(self) -> int:
        """Return the start of the page that contains the first token."""
        return self.start // PAGE * PAGE


@dataclass(frozen=True, slots=True)
class TokenPage:
    """A page of a trace."""

    start: int
    end: int
    total: int
    tokens: Sequence[Token]
    cells: Sequence[Cell]
    has_text: bool
    """Whether ids could be turned into text."""

    @property
    def before(self) -> int | None:
        """Return the start of the previous page; `None` = this is the first."""
        return max(0, self.start - PAGE) if self.start else None

    @property
    def after(self) -> int | None:
        """Return the start of the next page; `None` = this is the last."""
        return self.end if self.end < self.total else None

    @property
    def last(self) -> int:
        """Return the start of the last page."""
        return max(0, (self.total - 1) // PAGE * PAGE)


def token_page(trace: Trace, at: int, decode: Callable[[Ids], str] | None) -> TokenPage:
    """The page that begins at token `at`, counted from the prompt's first."""
    ids = np.concatenate([trace.prompt_ids, trace.response_ids])
    total, prompt = len(ids), len(trace.prompt_ids)
    start = min(max(0, at), max(0, total - 1))
    end = min(total, start + PAGE)
    ends = {
        prompt + end_ - 1: name
        for name, end_ in zip(trace.exchange_ids, trace.turn_ends, strict=False)
    }
    tokens = [_token(trace, ids, place, decode, ends.get(place)) for place in range(start, end)]
    return TokenPage(start, end, total, tokens, _cells(trace, start, end), decode is not None)


def _token(
    trace: Trace, ids: Ids, place: int, decode: Callable[[Ids], str] | None, ends: str | None
) -> Token:
    text = str(ids[place]) if decode is None else decode(ids[place : place + 1])
    index = place - len(trace.prompt_ids)
    facts = [f"#{place}", f"id {ids[place]}"]
    if decode is not None:
        facts.append(repr(text))
    if index < 0:
        style, why = "prompt", "prompt: before the first sampled token"
    else:
        reason = MaskReason(int(trace.reasons[index]))
        style, why = _style(trace, index, reason)
        if trace.versions[index] >= 0:
            facts.append(f"policy version {trace.versions[index]}")
        if trace.token_rewards is not None:
            facts.append(f"reward {trace.token_rewards[index]:g}")
    shown = f"{text} " if decode is None else "".join(WHITE.get(one, one) for one in text) or "∅"
    return Token(shown, style, " · ".join([*facts, why]), ends)


def _style(trace: Trace, index: int, reason: MaskReason) -> tuple[str, str]:
    if reason is MaskReason.TRAINED:
        logprob = float(trace.response_logprobs[index])
        level = sum(logprob < limit for limit in LEVELS)
        return f"on l{level}", f"trains, logprob {logprob:.4f} (p {math.exp(logprob):.3f})"
    if reason is MaskReason.PROMPT:
        return "prompt", "given to the model"
    return "off", f"sampled, does not train: {reason.key}"


def _cells(trace: Trace, start: int, end: int) -> list[Cell]:
    """The strip: each cell shows what most of its tokens are."""
    prompt = np.zeros(len(trace.prompt_ids), dtype=np.uint8)
    kinds = np.full(len(trace.reasons), 2, dtype=np.uint8)
    kinds[trace.reasons == MaskReason.TRAINED] = 1
    kinds[trace.reasons == MaskReason.PROMPT] = 0
    kinds = np.concatenate([prompt, kinds])
    total = len(kinds)
    count = min(CELLS, total)
    edges = [round(n * total / count) for n in range(count + 1)] if count else [0]
    return [
        Cell(
            left,
            ("prompt", "on", "off")[int(np.bincount(kinds[left:right], minlength=3).argmax())],
            left < end and right > start,
        )
        for left, right in itertools.pairwise(edges)
    ]
