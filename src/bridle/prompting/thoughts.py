"""Count of the sampled tokens that are reasoning, for usage numbers, from the ids themselves.

Most families open and close reasoning with tokens of their own; what stands between is counted.
Others (channels, plain text) are counted as the shortest run of ids whose text holds the reasoning.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from bridle.prompting.tokenizer import PromptTokenizer

_PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Tokens that open and close reasoning, in the families that have such."""


def count_thoughts(tokenizer: PromptTokenizer, ids: Sequence[int], reasoning: str | None) -> int:
    """Return how many of the sampled `ids` are `reasoning`, without its opening and closing tokens.

    `ids` end before the turn's end token; `reasoning` is the text that a parser found in them.
    """
    text = (reasoning or "").strip()
    if not text:
        return 0
    for opener, closer in _PAIRS:
        close, begin = tokenizer.added.get(closer), tokenizer.added.get(opener)
        if close is not None:
            end = ids.index(close) if close in ids else len(ids)
            return end - (ids.index(begin) + 1 if begin in ids[:end] else 0)
    return _run_of(tokenizer, ids, text)


def _run_of(tokenizer: PromptTokenizer, ids: Sequence[int], text: str) -> int:
    """Length of the shortest run of `ids` whose text holds `text`; that of `text` alone if none."""

    def held(start: int, end: int) -> bool:
        return text in tokenizer.decode(ids[start:end])

    if not held(0, len(ids)):
        return len(tokenizer.encode(text))
    end = bisect_left(range(len(ids) + 1), True, key=lambda count: held(0, count))  # noqa: FBT003 - a value
    start = bisect_left(range(end + 1), True, key=lambda first: not held(first, end))  # noqa: FBT003 - a value
    return end - (start - 1)
