"""The text of recorded ids, long after the run: a session's record names its tokenizer.

Capture holds ids, not a vocabulary. What a report shows as text is therefore decoded by the
tokenizer that the session ran with, found again where it was and only if it is still the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bridle.config import builtin_tokenizer_dir
from bridle.errors import RenderError, boundary
from bridle.types import JSON, Ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer


KEY = "tokenizer"
"""Key of a session record's metadata under which the gateway names the tokenizer."""

BUILTIN = "builtin"


def tokenizer_record(source: str) -> JSON:
    """Return the tokenizer's entry in a session's record: its folder and the digest of its file.

    `source` is a folder or `builtin`. `OSError` if its `tokenizer.json` cannot be read.
    """
    folder = _folder(source)
    named = source if source == BUILTIN else str(folder.resolve())
    return {"source": named, "digest": _digest(folder / "tokenizer.json")}


def decoder_of(metadata: JSON) -> Callable[[Ids], str] | None:
    """Return a function that decodes a captured session's ids to text, control tokens shown.

    `metadata` is that of the session's record. `None` where the record names no tokenizer, or one
    that is gone or has changed. Cheap: the tokenizer is loaded at the first call.
    """
    named = metadata.get(KEY)
    if not isinstance(named, dict):
        return None
    try:
        if tokenizer_record(str(named["source"]))["digest"] != named["digest"]:
            return None
    except (OSError, KeyError):
        return None
    return lambda ids: _text(str(named["source"]), str(named["digest"]), ids)


def encoder_of(named: JSON) -> tuple[Callable[[str], Ids], int] | None:
    """Return a function that encodes text by a captured session's tokenizer, and its number of ids.

    `named` is the tokenizer's entry in the session's record. `None` where it is gone or has
    changed.
    """
    if not (named and decoder_of({KEY: named})):
        return None
    tokenizer = _loaded(str(named["source"]), str(named["digest"]))
    return (
        lambda text: np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32),
        tokenizer.get_vocab_size(),
    )


def _text(source: str, digest: str, ids: Ids) -> str:
    return _loaded(source, digest).decode(ids.tolist(), skip_special_tokens=False)


@lru_cache(maxsize=2)
def _loaded(source: str, _digest: str) -> Tokenizer:
    from tokenizers import Tokenizer

    with boundary(RenderError, f"tokenizer {source}"):
        return Tokenizer.from_file(str(_folder(source) / "tokenizer.json"))


def _folder(source: str) -> Path:
    return builtin_tokenizer_dir() if source == BUILTIN else Path(source)


def _digest(path: Path) -> str:
    facts = path.stat()
    return _digest_of(path, facts.st_size, facts.st_mtime_ns)


@lru_cache(maxsize=8)
def _digest_of(path: Path, _size: int, _changed_ns: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
