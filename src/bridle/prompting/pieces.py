"""Long texts tokenised in pieces, to the same ids as whole, and no further than a context goes.

A tokenizer takes about 150 bytes of memory for each character of a text, and cannot be stopped. So
what is longer than `WHOLE` goes in pieces. A piece ends where the tokenizer's own splitting into
words ends one: between a letter or digit and white space or a bracket or comma, seen with
`AHEAD` characters behind it, which is further than any splitting looks. Tokenizers that do not
split left to right, or that add something at the start of a text, take every text whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Final

from bridle.errors import ContextOverflowError, RenderError
from bridle.types import JSON

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WHOLE: Final = 1 << 19
"""Characters of the longest text that is tokenised at once: 80 MB of memory, half a second."""

PIECE: Final = 1 << 15
"""Characters of a piece: parting it into words holds up the interpreter for some 10 ms."""

AHEAD: Final = 64
"""Characters that must be known behind the end of a piece."""

_END = re.compile(r"(?<=[^\W_])(?=[\s,;:(){}\[\]<>\"=])")
"""Pattern of places where a piece may end; no pattern of a pre-tokenizer takes both sides as one
word."""

COUNTED: Final = 2048
"""Characters from which a text counts for an `Allowance`."""


class Allowance:
    """Number of tokens that the long texts of one prompt may have before it is certainly too long.

    A rendering may tokenise a text twice, so twice the context is the measure.
    """

    def __init__(self, context_length: int) -> None:
        self._context_length = context_length
        self._used = 0
        self.stopped = False
        """Set from another thread: the prompt is not wanted any more."""

    def take(self, tokens: int) -> None:
        """Count tokens. `ContextOverflowError` when there are too many, or after `stopped`."""
        self._used += tokens
        if self.stopped or self._used > 2 * self._context_length:
            raise ContextOverflowError(self._used, self._context_length, None)


_ALLOWED: ContextVar[Allowance | None] = ContextVar("allowance", default=None)


@contextmanager
def count_against(allowance: Allowance) -> Iterator[None]:
    """Have all long texts that are tokenised meanwhile, in this context, counted."""
    token = _ALLOWED.set(allowance)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def chars_per_token(backend: Tokenizer) -> float:
    """Return the most characters of a text that one token can stand for; infinite = no bound is
    known.

    A token of a byte-level vocabulary has one character per byte, and no character has less than a
    byte. NFC makes one character of at most four.
    """
    added = backend.get_added_tokens_decoder().values()
    if not takes_pieces(backend) or any(token.lstrip or token.rstrip for token in added):
        return float("inf")
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)))
    return longest * (1 if backend.normalizer is None else 4)


def takes_pieces(backend: Tokenizer) -> bool:
    """Return whether the ids of a text are those of its pieces, in order.

    So it is with byte-level BPE over words that a text is parted into from left to right.
    """
    from tokenizers import models, pre_tokenizers

    normalizer, model = _state(backend.normalizer), backend.model
    if normalizer is not None and normalizer["type"] != "NFC":
        return False
    if (
        not isinstance(model, models.BPE)
        or model.dropout
        or not _divides(_state(backend.pre_tokenizer))
    ):
        return False
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return all(byte in vocabulary for byte in pre_tokenizers.ByteLevel.alphabet())


def _state(part: object) -> JSON | None:
    """Return a part of a tokenizer as its file has it."""
    return None if part is None else json.loads(part.__getstate__())  # type: ignore[arg-type]


def _divides(part: JSON | None) -> bool:
    """Return whether a pre-tokenizer splits from left to right, adds nothing and never looks back.

    A `Sequence` has to hold a `ByteLevel`, which knows every byte.
    """
    if part is None:
        return False
    if part["type"] == "Sequence":
        kinds = [one["type"] for one in part["pretokenizers"]]
        return "ByteLevel" in kinds and all(map(_divides, part["pretokenizers"]))
    if part["type"] == "ByteLevel":
        return not part["add_prefix_space"]
    if part["type"] != "Split":
        return bool(part["type"] == "Digits")
    pattern = part["pattern"].get("Regex", "(?<")
    isolated = part["behavior"] == "Isolated" and not part["invert"]
    return isolated and re.search(r"\(\?<|\\[AG]|(?<!\[)\^", pattern) is None


def tokenised(
    backend: Tokenizer,
    text: str,
    *,
    added: re.Pattern[str] | None,
    encode: Callable[[str], list[int]] | None = None,
) -> list[int]:
    """Return the ids of a text, without special tokens. `ContextOverflowError`, `RenderError`.

    `added` finds the tokenizer's added tokens, near which no piece ends; `None` = the text is to be
    tokenised whole. `encode` gives what `backend` gives; `None` = `backend` itself.
    """
    ids_of_part = encode or partial(ids_of, backend)
    if len(text) < COUNTED:
        return ids_of_part(text)
    allowed = _ALLOWED.get()
    ids: list[int] = []
    for part in (text,) if added is None or len(text) <= WHOLE else _pieces(backend, text, added):
        found = ids_of_part(part)
        ids += found
        if allowed is not None:
            allowed.take(len(found))
    return ids


def _pieces(
    backend: Tokenizer, text: str, added: re.Pattern[str], piece: int = PIECE
) -> Iterator[str]:
    start, size = 0, piece
    while len(text) - start > size:
        end = _end_in(backend, text[start : start + size], added)
        if end is not None:
            yield text[start : start + end]
            start, size = start + end, piece
        elif size < WHOLE:
            size *= 2
        else:
            message = f"a text has more than {WHOLE} characters without a break between words"
            raise RenderError(message)
    yield text[start:]


def _end_in(backend: Tokenizer, text: str, added: re.Pattern[str]) -> int | None:
    """Return the end of the last piece of `text` that no further text changes, if any."""
    last = len(text) - AHEAD
    words: set[int] | None = None
    for begin in range(max(last - 4096, 1), 0, -4096):
        places = [found.start() for found in _END.finditer(text, begin, min(begin + 4096, last))]
        for place in reversed(places):
            if added.search(text, max(place - AHEAD, 0), place + AHEAD):
                continue
            if words is None:
                parted = backend.pre_tokenizer.pre_tokenize_str(text)
                words = {start for _, (start, _) in parted}
            if place in words:
                return place
    return None


def ids_of(backend: Tokenizer, text: str) -> list[int]:
    """Return ids of a text; without offsets, which nobody asks for, in two thirds of the time."""
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
