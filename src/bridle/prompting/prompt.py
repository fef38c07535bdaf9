"""Prompt ids as a chain: a child is its parent, the parent's output, and a suffix of its own.

No earlier id is parsed, copied one by one, or hashed again: each segment keeps its ids and their
JSON text, the digest continues from the parent's. Only `array()` and `json()` touch the whole
prompt, as one copy of bytes each.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import orjson

from bridle.types import Ids

if TYPE_CHECKING:
    from hashlib import _Hash


_LITTLE = sys.byteorder == "little"


@dataclass(slots=True, eq=False)
class _Link:
    """Addition of one prompt to the one before it."""

    before: _Link | None
    segments: tuple[Ids, ...]
    texts: list[bytes]
    """JSON text of each segment, without brackets."""
    hashed: _Hash
    """sha256 over all ids so far."""
    length: int
    """Number of all ids so far."""


class PromptIds:
    """The ids of one prompt; an `engines.base.Prompt`. Immutable.

    The whole array and the whole JSON text are kept only until a child is made of this prompt, so
    that a conversation holds one of each, not one per turn.
    """

    __slots__ = ("_array", "_before", "_json", "_link", "length")

    def __init__(self, link: _Link, before: bytes | None = None) -> None:
        """Use `root` and `extend`; `before` is the JSON text of `link.before`, if it is known."""
        self._link = link
        self._array: Ids | None = None
        self._before = before
        self._json: bytes | None = None
        self.length = link.length
        """Number of ids; `len` of it."""

    @classmethod
    def root(cls, ids: Ids) -> PromptIds:
        """Return a prompt that extends nothing. `ids`: int32, shape (T,)."""
        return cls(_link(None, (_frozen(ids),)))

    def extend(self, output_ids: Ids, suffix: Ids) -> PromptIds:
        """Return the prompt of a child: this one, what was sampled under it, and new ids."""
        before, self._array, self._json = self._json, None, None
        return PromptIds(_link(self._link, (_frozen(output_ids), _frozen(suffix))), before)

    def instead(self, suffix: Ids) -> PromptIds:
        """Return the same prompt with another suffix."""
        link = self._link
        return PromptIds(_link(link.before, (*link.segments[:-1], _frozen(suffix))))

    def behind(self, ids: Ids) -> PromptIds:
        """Return the same prompt with more ids at its end; they belong to its own suffix."""
        return self.instead(np.concatenate((self.suffix, ids)))

    def __len__(self) -> int:
        return self._link.length

    @property
    def suffix(self) -> Ids:
        """The ids after the first `kept`; all of them at a root."""
        return self._link.segments[-1]

    @property
    def kept(self) -> int:
        """Return how many ids are the parent's prompt and output; 0 at a root."""
        return self.length - self._link.segments[-1].size

    @property
    def digest(self) -> bytes:
        """sha256 over all ids as little-endian int32, 32 bytes."""
        return self._link.hashed.digest()

    def array(self) -> Ids:
        """Return all ids, int32, shape (T,). Read-only."""
        if self._array is None:
            segments = [segment for link in _chain(self._link) for segment in link.segments]
            self._array = _frozen(np.concatenate(segments))
        return self._array

    def json(self) -> bytes:
        """Return all ids as the text of a JSON array without spaces."""
        if self._json is None:
            if self._before is None or self._before == b"[]":
                texts = [text for link in _chain(self._link) for text in link.texts if text]
                self._json = b"[%b]" % b",".join(texts)
            else:
                texts = [text for text in self._link.texts if text]
                new = b",%b]" % b",".join(texts) if texts else b"]"
                self._json = b"".join((memoryview(self._before)[:-1], new))
                self._before = None
        return self._json

    def tail(self, count: int) -> Ids:
        """Return the last `count` ids, or all if there are fewer. Read-only."""
        last = self._link.segments[-1]
        if 0 < count <= len(last):
            return last[-count:]
        pieces: list[Ids] = []
        link: _Link | None = self._link
        while link is not None and count > 0:
            for segment in link.segments[::-1]:
                if count > 0:
                    pieces.append(segment[-count:])
                    count -= len(segment)
            link = link.before
        if not pieces:
            return last[:0]
        pieces.reverse()
        joined = np.concatenate(pieces)
        joined.flags.writeable = False
        return joined


def _link(before: _Link | None, segments: tuple[Ids, ...]) -> _Link:
    hashed = sha256() if before is None else before.hashed.copy()
    length = 0 if before is None else before.length
    texts: list[bytes] = []
    for segment in segments:
        hashed.update(segment.data if _LITTLE else segment.astype("<i4").data)
        length += segment.size
        texts += (orjson.dumps(segment, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1],)
    return _Link(before, segments, texts, hashed, length)


def _chain(last: _Link) -> list[_Link]:
    """Return the links from the root to this one."""
    links: list[_Link] = []
    link: _Link | None = last
    while link is not None:
        links.append(link)
        link = link.before
    links.reverse()
    return links


def _frozen(ids: Ids) -> Ids:
    """Return the same ids as a read-only, contiguous int32 array that nobody else writes to."""
    if not ids.flags.writeable and ids.dtype == np.int32 and ids.flags.c_contiguous:
        return ids
    copied = np.array(ids, dtype=np.int32)
    copied.flags.writeable = False
    return copied
