"""Byte-level BPE by tiktoken, in a fifth of the time or less, where its ids are provably the same.

Both merge the adjacent pair of the lowest rank, leftmost first. tiktoken knows tokens where
`tokenizers` knows pairs, and its ranks are the ids. That is the same if the pairs are ordered by
the ids of what they make, and every token is what its own bytes are merged to: two parts of a token
that stand beside each other in a text came from merges inside the token, which its own bytes go
through as well, so the pair is one of `tokenizers`' too. Both is checked at loading. Words are
split by one of `PATTERNS`, on whose words tests compare the two for every character; texts with a
character of `OTHERWISE` or an added token are left to `tokenizers`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import structlog

from bridle.prompting.pieces import ids_of, takes_pieces
from bridle.types import JSON

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = structlog.get_logger()

Encode = Callable[[str], list[int]]

_TAIL: Final = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
CL100K: Final = _WORDS + _TAIL
"""GPT-4, Llama 3."""
ONE_DIGIT: Final = _WORDS + _TAIL.replace("{1,3}", "", 1)
"""Qwen 2 and 3, and the shipped tokenizer."""
PATTERNS: Final = frozenset({CL100K, ONE_DIGIT})

OTHERWISE: Final = "\ud800-\udfff"
"""Characters on which the two may differ, as a class of a regular expression."""


def quick_encoder(backend: Tokenizer) -> Encode | None:
    """Encode normalized text without added tokens by tiktoken; `None` = it may give other ids."""
    try:
        return _quick(backend)
    except _OtherwiseError as reason:
        log.info("tokenized_slowly", why=str(reason))
        return None


def guarded(backend: Tokenizer, quick: Encode | None) -> Encode:
    """Encode as `backend` does without special tokens, by `quick` wherever that is the same."""

    def slow(text: str) -> list[int]:
        return ids_of(backend, text)

    if quick is None:
        return slow
    names = [token.content for token in backend.get_added_tokens_decoder().values()]
    unsafe = re.compile("|".join([f"[{OTHERWISE}]", *map(re.escape, names)]))
    normalizer = backend.normalizer

    def ids(text: str) -> list[int]:
        if unsafe.search(text):
            return slow(text)
        if normalizer is not None and not text.isascii():
            plain = normalizer.normalize_str(text)
            return slow(text) if unsafe.search(plain) else quick(plain)
        return quick(text)

    return ids


class _OtherwiseError(Exception):
    """The reason why tiktoken cannot take a tokenizer's place."""


def _quick(backend: Tokenizer) -> Encode:
    try:
        import tiktoken
    except ImportError:
        raise _OtherwiseError("tiktoken is not installed") from None
    if not takes_pieces(backend) or backend.truncation or backend.padding:
        raise _OtherwiseError("it is no plain byte-level BPE")
    pattern = _pattern(json.loads(backend.pre_tokenizer.__getstate__()))
    ranks = _ranks(backend, json.loads(backend.model.__getstate__()))
    made = tiktoken.Encoding("bridle", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return made.encode_ordinary


def _pattern(state: JSON) -> str:
    """The regular expression of a splitter into words, which is one of `PATTERNS`."""
    parts = state.get("pretokenizers", [])
    if [part["type"] for part in parts] != ["Split", "ByteLevel"] or parts[1]["use_regex"]:
        raise _OtherwiseError("its words are not split by one pattern")
    pattern: str = parts[0]["pattern"]["Regex"]
    if pattern not in PATTERNS:
        raise _OtherwiseError(f"its words are split by another pattern: {pattern}")
    return pattern


def _ranks(backend: Tokenizer, model: JSON) -> dict[bytes, int]:
    """Id of each token by its bytes; all that merging or a look-up can give, and no more."""
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _OtherwiseError("its tokens have a prefix or a suffix")
    vocabulary: dict[str, int] = model["vocab"]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    merged = [vocabulary["".join(pair)] for pair in pairs]
    if any(one > other for one, other in pairwise(merged)):
        raise _OtherwiseError("its merges are not in the order of its ids")
    byte_of = _alphabet()
    plain = {token: id_ for token, id_ in vocabulary.items() if byte_of.keys() >= set(token)}
    reached = set(_reached(backend, model, plain))
    if model.get("ignore_merges") and len(reached) < len(vocabulary):
        raise _OtherwiseError("it looks words up that no merges give")
    return {bytes(map(byte_of.__getitem__, token)): plain[token] for token in reached}


def _reached(backend: Tokenizer, model: JSON, tokens: Iterable[str]) -> Iterable[str]:
    """Those tokens which merging their own characters gives."""
    from tokenizers import models

    bpe = backend.model
    if model.get("ignore_merges"):
        pairs = [tuple(p.split(" ") if isinstance(p, str) else p) for p in model["merges"]]
        bpe = models.BPE(vocab=model["vocab"], merges=pairs)
    return (token for token in tokens if [one.value for one in bpe.tokenize(token)] == [token])


def _alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }
