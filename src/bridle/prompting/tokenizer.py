"""The tokenizer that prompts are made with: scaffold may hold control tokens, message text may not.

A chat template mixes its own control tokens with the harness's words in one string. If those words
hold `<|im_end|>`, a plain tokenizer would end the turn there. So every text of a message is escaped
before it is rendered: a mark after the first character of whatever looks like an added token. The
mark survives JSON and stripping, and `encode` takes it out again behind the match, so that marked
text becomes ordinary tokens and everything else is tokenised as always.

`quick_bpe` replaces byte-level BPE by tiktoken, which takes a fifth of the time, where its ids
are provably the same. Both merge the adjacent pair of the lowest rank, leftmost first; tiktoken
knows tokens where `tokenizers` knows pairs, and its ranks are the ids. The results agree if the
pairs are ordered by the ids of their products and every token is the product of its own bytes: two
adjacent parts of a token come from merges inside the token, which its own bytes go through as well.
Both conditions are checked at loading. Words are split by one of `PATTERNS`, for which tests
compare the two on every character; texts with a character of `OTHERWISE` or an added token stay
with `tokenizers`.

Long texts are tokenised in pieces, to the same ids as whole, and no further than a context goes. A
tokenizer takes about 150 bytes of memory for each character of a text, and cannot be stopped. So
what is longer than `WHOLE` goes in pieces. A piece ends where the tokenizer's own splitting into
words ends one: between a letter or digit and white space or a bracket or comma, seen with
`AHEAD` characters behind it, which is further than any splitting looks. Tokenizers that do not
split left to right, or that add something at the start of a text, take every text whole.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

from bridle.errors import ContextOverflowError, RenderError, boundary
from bridle.types import JSON, Ids

if TYPE_CHECKING:
    import tiktoken
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
        """Subtract tokens from the allowance.

        `ContextOverflowError` when there are too many, or after it was `stopped`.
        """
        self._used += tokens
        if self.stopped or self._used > 2 * self._context_length:
            raise ContextOverflowError(self._used, self._context_length, None)


_ALLOWED: ContextVar[Allowance | None] = ContextVar("allowance", default=None)


@contextmanager
def count_against(allowance: Allowance) -> Iterator[None]:
    """Within the context, count the tokens of all long texts against an allowance."""
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
    """Return whether a tokenizer gives the same ids for a text and for its pieces one after the
    other.

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
    encode: Callable[[str], list[int]],
) -> list[int]:
    """Return the ids of a text, without special tokens. `ContextOverflowError`, `RenderError`.

    `added` finds the tokenizer's added tokens, near which a long text is not divided; `None` = it
    is not divided at all. `encode` returns the same ids as `backend`, faster.
    """
    if len(text) < COUNTED:
        return encode(text)
    allowed = _ALLOWED.get()
    ids: list[int] = []
    for part in (text,) if added is None or len(text) <= WHOLE else _pieces(backend, text, added):
        found = encode(part)
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
    """Return the ids of a text by the tokenizer, without computing offsets (in two thirds of the
    time).
    """
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


MARK = "\x7f"
"""The escape character (DEL). `str.strip` leaves it alone, and `json.dumps` too, unless it has
to write ASCII only: that gives `_MARK_ASCII`."""

_MARK_ASCII = "\\u007f"
_MARKED, _LITERAL = MARK + "1", MARK + "0"
_UNESCAPED = {
    _MARKED: "",
    _LITERAL: MARK,
    _MARK_ASCII + "1": "",
    _MARK_ASCII + "0": _MARK_ASCII,
}
_TO_UNESCAPE = re.compile("|".join(map(re.escape, _UNESCAPED)))


JOINER = "\N{WORD JOINER}"
"""Separator inside a marker in text that somebody else tokenises: it shows nothing, and no normal
form of Unicode takes it away."""

FIRSTS = 8
"""First characters of what is escaped, up to which a text is searched for each of them first."""

SHORT = 32
"""Characters up to which a text counts as scaffold: role names, line breaks, markers."""

SHORT_KEPT = 4096
"""Scaffold texts that are remembered."""

LONG = 2048
"""Characters from which a text is remembered: 2,048 take 0.5 ms to tokenise."""

LONG_KEPT_CHARS = 1 << 23
"""Characters of long texts that are remembered, the least lately used going first: 8 MiB of text,
and about 8 MiB of ids."""


PLACEHOLDER_CHARS = 200
"""Characters from which a text may have one placeholder id (`PromptTokenizer.placeholders`): longer
than any scaffold whose tokens a renderer looks at."""


_LONG_TEXTS: ContextVar[list[str] | None] = ContextVar("long_texts", default=None)
"""Long texts of the current rendering; `None` = they are tokenised."""


class PromptTokenizer:
    """A fast tokenizer with escaping, in the shape that the `renderers` package asks for.

    It has no `__call__` on purpose: without offsets `renderers` encodes once, in half the time.
    """

    def __init__(self, fast: Any, *, long_kept_chars: int = LONG_KEPT_CHARS) -> None:  # noqa: ANN401 - a transformers fast tokenizer
        from tokenizers import Tokenizer

        self.fast = fast
        """The transformers tokenizer itself."""
        backend: Tokenizer = fast.backend_tokenizer
        self._backend = backend
        # The model is shared, not copied; only the added tokens stay behind.
        self._bare = Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if getattr(backend, part) is not None:
                setattr(self._bare, part, getattr(backend, part))
        added = backend.get_added_tokens_decoder()
        self.added = {token.content: id_ for id_, token in added.items()}
        """Every added token and its id."""
        self.control_ids = frozenset(self.added.values())
        names = sorted(self.added, key=len, reverse=True)
        escaped = [MARK, _MARK_ASCII, *names]
        self._to_escape = re.compile("|".join(map(re.escape, escaped)))
        firsts = tuple({found[0] for found in escaped})
        self._firsts = firsts if len(firsts) <= FIRSTS else ("",)
        """A text without any of these has nothing to escape."""
        spaced = [
            (r"(?:(?<!\s)\s*)?" if added[self.added[name]].lstrip else "")
            + re.escape(name)
            + (r"\s*" if added[self.added[name]].rstrip else "")
            for name in names
        ]
        self._to_split = re.compile("(" + "|".join(spaced) + ")") if names else None
        # Runs of white space are added tokens too, of vocabularies made for code; they say nothing.
        markers = [re.escape(name) for name in names if len(name) > 1 and not name.isspace()]
        self._to_part = re.compile("|".join(markers)) if markers else None
        self.unk_token_id: int | None = fast.unk_token_id
        self._short: dict[str, tuple[int, ...]] = {}
        self._long: OrderedDict[str, Ids] = OrderedDict()
        self._long_chars = 0
        self._long_kept_chars = long_kept_chars
        self._long_lock = threading.Lock()
        names_apart = self._to_part or re.compile(r"(?!)")
        self._apart = names_apart if takes_pieces(backend) else None
        quick = quick_bpe(backend)
        self._encoder, self._bare_encoder = (
            safe_encoder(backend, quick),
            safe_encoder(self._bare, quick),
        )
        self.text = safe_decoder(backend, quick)
        """Decodes ids, control tokens shown."""
        self.chars_per_token = chars_per_token(backend)
        """The most characters that one token can stand for; infinite = no bound is known."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the tokenizer has
        if name == "__call__":
            raise AttributeError(name)
        return getattr(self.fast, name)

    def __len__(self) -> int:
        return len(self.fast)

    def escape(self, text: str) -> str:
        """Return a message's text changed so that `encode` finds no control token in it.

        Lone surrogates, which no tokenizer takes, become U+FFFD.
        """
        for first in self._firsts:
            if first in text:
                text = self._to_escape.sub(_escaped, text)
                break
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return text

    def apart(self, text: str) -> str:
        """Return a message's text changed so that a server that tokenises it finds no control token
        in it.

        `JOINER` is put behind the first character of each text that looks like one; nothing else
        changes.
        """
        while self._to_part is not None and self._to_part.search(text):
            text = self._to_part.sub(lambda found: found[0][0] + JOINER + found[0][1:], text)
        return text

    def encode(self, text: str, add_special_tokens: bool = False, **_: object) -> list[int]:  # noqa: FBT001, FBT002 - the shape that is asked for
        """Return the ids of a rendered prompt; its escaped parts become ordinary tokens.

        The ids of texts that a template repeats in every turn (`SHORT`) and of long texts that
        sessions share (`LONG`: system prompts, tools, a task) are cached.
        """
        if add_special_tokens:
            return self._backend.encode_batch_fast([text], add_special_tokens=True)[0].ids
        size = len(text)
        if size <= SHORT:
            short = self._short.get(text)
            if short is None:
                short = tuple(self._encode(text))
                if len(self._short) < SHORT_KEPT:
                    self._short[text] = short
            return list(short)
        if size >= PLACEHOLDER_CHARS and (long_texts := _LONG_TEXTS.get()) is not None:
            long_texts.append(text)
            return [-len(long_texts)]
        if size >= LONG:
            return self._encode_long(text)
        if MARK in text or _MARK_ASCII in text:
            return self._encode(text)
        return self._encoder(text)

    def _encode_long(self, text: str) -> list[int]:
        with self._long_lock:
            known = self._long.get(text)
            if known is not None:
                self._long.move_to_end(text)
                remembered: list[int] = known.tolist()
                return remembered
        ids = self._encode(text)
        with self._long_lock:
            if text not in self._long:
                self._long[text] = np.array(ids, dtype=np.int32)
                self._long_chars += len(text)
            while self._long_chars > self._long_kept_chars:
                self._long_chars -= len(self._long.popitem(last=False)[0])
        return ids

    @contextmanager
    def placeholders(self) -> Iterator[list[str]]:
        """Within the context, `encode` returns `[-n]` for the n-th long text of this thread and
        adds the text to the list that is yielded.
        """
        long_texts: list[str] = []
        token = _LONG_TEXTS.set(long_texts)
        try:
            yield long_texts
        finally:
            _LONG_TEXTS.reset(token)

    def laid_out(self, lay: Callable[[], list[int] | None]) -> list[int] | None:
        """Return the ids that `lay` returns; long texts in them are tokenised after it has
        returned.
        """
        with self.placeholders() as texts:
            ids = lay()
        if ids is None or not texts:
            return ids
        whole: list[int] = []
        start = 0
        for place in [index for index, id_ in enumerate(ids) if id_ < 0]:
            whole += ids[start:place]
            whole += self.encode(texts[-ids[place] - 1])
            start = place + 1
        return whole + ids[start:]

    def _encode(self, text: str) -> list[int]:
        if MARK not in text and _MARK_ASCII not in text:
            return tokenised(self._backend, text, added=self._apart, encode=self._encoder)
        ids: list[int] = []
        for piece in self._to_split.split(text) if self._to_split else [text]:
            known = self.added.get(piece, self.added.get(piece.strip()))
            if known is not None:
                ids.append(known)
            elif piece:
                plain = _TO_UNESCAPE.sub(lambda found: _UNESCAPED[found.group()], piece)
                ids += tokenised(self._bare, plain, added=self._apart, encode=self._bare_encoder)
        return ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: object) -> str:  # noqa: ANN401, FBT001, FBT002 - the shape that is asked for
        """Return the text of token ids, control tokens shown unless `skip_special_tokens`."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if skip_special_tokens:
            return self._backend.decode(ids, skip_special_tokens=True)
        return self.text(ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:  # noqa: ANN401 - the shape that is asked for
        """Return the id of a token, or the ids of a list.

        Unknown tokens give the unknown token's id or `None`.
        """
        if isinstance(tokens, str):
            if (added := self.added.get(tokens)) is not None:
                return added
            known = self._backend.token_to_id(tokens)
            return self.unk_token_id if known is None else known
        return [self.convert_tokens_to_ids(token) for token in tokens]


def load_tokenizer(folder: Path) -> PromptTokenizer:
    """Return the tokenizer in `folder`. `RenderError` says which file is missing."""
    if not (folder / "tokenizer.json").is_file():
        raise RenderError(
            f"{folder}: no tokenizer.json; give a folder with a fast tokenizer "
            "(tokenizer.json, tokenizer_config.json and a chat template), or 'builtin'"
        )
    with boundary(RenderError, f"{folder}: loading the tokenizer"):
        # Not AutoTokenizer: it reads no more from these files, and loads torch where there is one.
        from transformers import PreTrainedTokenizerFast

        return PromptTokenizer(
            PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        )


def stop_ids_of(folder: Path, tokenizer: PromptTokenizer) -> list[int]:
    """Return the ids of the end tokens that the tokenizer and the generation config in `folder`
    name.
    """
    found = [] if tokenizer.fast.eos_token_id is None else [int(tokenizer.fast.eos_token_id)]
    path = folder / "generation_config.json"
    if path.is_file():
        with boundary(RenderError, f"{path}"):
            named = json.loads(path.read_text()).get("eos_token_id")
        found += [named] if isinstance(named, int) else list(named or [])
    return list(dict.fromkeys(found))


def _escaped(match: re.Match[str]) -> str:
    found = match.group()
    return _LITERAL if found == MARK else found[0] + _MARKED + found[1:]


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


Decode = Callable[[list[int]], str]


def quick_bpe(backend: Tokenizer) -> tiktoken.Encoding | None:
    """Return tiktoken's encoding that gives the tokenizer's ids for normalised text without added
    tokens.

    `None` = it may give other ids.
    """
    try:
        return _quick(backend)
    except _OtherwiseError as reason:
        log.info("tokenized_slowly", why=str(reason))
        return None


def safe_encoder(backend: Tokenizer, bpe: tiktoken.Encoding | None) -> Encode:
    """Return a function that encodes as `backend` does without special tokens.

    It uses the faster `bpe` wherever that gives the same ids.
    """

    def slow(text: str) -> list[int]:
        return ids_of(backend, text)

    if bpe is None:
        return slow
    quick, normalizer = bpe.encode_ordinary, backend.normalizer
    names = [token.content for token in backend.get_added_tokens_decoder().values()]
    # One pattern with a class among the names would be looked for at every character.
    added = re.compile("|".join(map(re.escape, names)) or r"(?!)")
    otherwise = re.compile(f"[{OTHERWISE}]")

    def ids(text: str) -> list[int]:
        if added.search(text):
            return slow(text)
        if text.isascii():
            return quick(text)
        plain = text if normalizer is None else normalizer.normalize_str(text)
        if otherwise.search(text) or added.search(plain) or otherwise.search(plain):
            return slow(text)
        return quick(plain)

    return ids


def safe_decoder(backend: Tokenizer, bpe: tiktoken.Encoding | None) -> Decode:
    """Return a function that decodes as `backend` does, added tokens shown.

    It uses the faster `bpe` wherever that gives the same text.
    """

    def slow(ids: list[int]) -> str:
        return backend.decode(ids, skip_special_tokens=False)

    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    if bpe is None or decoder is None or decoder["type"] != "ByteLevel":
        return slow
    quick = bpe.decode

    def text(ids: list[int]) -> str:
        try:
            return quick(ids)
        except (KeyError, OverflowError):  # an added token, or one that no merge gives
            return slow(ids)

    return text


class _OtherwiseError(Exception):
    """The reason why tiktoken cannot take a tokenizer's place."""


def _quick(backend: Tokenizer) -> tiktoken.Encoding:
    try:
        import tiktoken
    except ImportError:
        raise _OtherwiseError("tiktoken is not installed") from None
    if not takes_pieces(backend) or backend.truncation or backend.padding:
        raise _OtherwiseError("the tokenizer is not a plain byte-level BPE")
    pattern = _pattern(json.loads(backend.pre_tokenizer.__getstate__()))
    ranks = _ranks(backend, json.loads(backend.model.__getstate__()))
    return tiktoken.Encoding("bridle", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def _pattern(state: JSON) -> str:
    """Return the regular expression of a splitter into words, which is one of `PATTERNS`."""
    parts = state.get("pretokenizers", [])
    if [part["type"] for part in parts] != ["Split", "ByteLevel"] or parts[1]["use_regex"]:
        raise _OtherwiseError("the tokenizer does not split words by one pattern")
    pattern: str = parts[0]["pattern"]["Regex"]
    if pattern not in PATTERNS:
        raise _OtherwiseError(
            f"the tokenizer splits words by a pattern that is not known: {pattern}"
        )
    return pattern


def _ranks(backend: Tokenizer, model: JSON) -> dict[bytes, int]:
    """Return the id of each token by its bytes: all that merging or a look-up can give, no more."""
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _OtherwiseError("the tokenizer's tokens have a prefix or a suffix")
    vocabulary: dict[str, int] = model["vocab"]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    merged = [vocabulary["".join(pair)] for pair in pairs]
    if any(one > other for one, other in pairwise(merged)):
        raise _OtherwiseError("the tokenizer's merges are not in the order of its ids")
    byte_of = _alphabet()
    plain = {token: id_ for token, id_ in vocabulary.items() if byte_of.keys() >= set(token)}
    reached = set(_reached(backend, model, plain))
    if model.get("ignore_merges") and len(reached) < len(vocabulary):
        raise _OtherwiseError("the tokenizer looks up words that no merges give")
    return {bytes(map(byte_of.__getitem__, token)): plain[token] for token in reached}


def _reached(backend: Tokenizer, model: JSON, tokens: Iterable[str]) -> Iterable[str]:
    """Return those tokens which merging their own characters gives."""
    from tokenizers import models

    bpe = backend.model
    if model.get("ignore_merges"):
        pairs = [tuple(p.split(" ") if isinstance(p, str) else p) for p in model["merges"]]
        bpe = models.BPE(vocab=model["vocab"], merges=pairs)
    return (token for token in tokens if [one.value for one in bpe.tokenize(token)] == [token])


def _alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }
