"""Prompt ids as a chain: a child is its parent, the parent's output, and a suffix of its own.

No earlier id is parsed, copied one by one, or hashed again: each segment keeps its ids and their
JSON text, the digest continues from the parent's. Only `array()` and `json()` touch the whole
prompt, as one copy of bytes each.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import orjson

from bridle.types import Ids

if TYPE_CHECKING:
    from hashlib import _Hash


_LITTLE = sys.byteorder == "little"


class PromptIds:
    """The ids of one prompt; an `engines.base.Prompt`. Immutable.

    The whole array and the whole JSON text are kept only until a child is made of this prompt, so
    that a conversation holds one of each, not one per turn.
    """

    __slots__ = (
        *("_array", "_json", "_json_before"),
        *("before", "hashed", "kept", "length", "segments", "suffix", "texts"),
    )

    def __init__(
        self, before: PromptIds | None, segments: Sequence[Ids], json_before: bytes | None = None
    ) -> None:
        """Use `root` and `extend`; `json_before` is the JSON text of `before`, if it is known."""
        self.before = before
        """The prompt that it extends; `None` = none."""
        self.segments: list[Ids] = []
        """The ids that it adds to the prompt before it."""
        self.texts: list[bytes] = []
        """JSON text of each segment, without brackets."""
        self._array: Ids | None = None
        self._json_before = json_before
        self._json: bytes | None = None
        self.hashed: _Hash = sha256() if before is None else before.hashed.copy()
        """sha256 over all ids so far."""
        length: int = 0 if before is None else before.length
        for ids in segments:
            if ids.flags.writeable or ids.dtype != np.int32 or not ids.flags.c_contiguous:
                ids = _frozen(ids)  # noqa: PLW2901 - the same ids
            self.hashed.update(ids.data if _LITTLE else ids.astype("<i4").data)
            length += ids.size
            self.segments += (ids,)
            self.texts += (orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1],)
        self.length: int = length
        """Number of ids; `len` of it."""
        self.suffix = self.segments[-1]
        """The ids after the first `kept`; all of them at a root."""
        self.kept: int = length - self.suffix.size
        """Number of ids that are the parent's prompt and output; 0 at a root."""

    @classmethod
    def root(cls, ids: Ids) -> PromptIds:
        """Return a prompt that extends no other. `ids`: int32, shape (T,)."""
        return cls(None, (ids,))

    def extend(self, output_ids: Ids, suffix: Ids) -> PromptIds:
        """Return the prompt of the next call: this prompt, the ids sampled under it, and
        new ids.
        """
        json, self._array, self._json = self._json, None, None
        return PromptIds(self, (output_ids, suffix), json)

    def instead(self, suffix: Ids) -> PromptIds:
        """Return the same prompt with `suffix` in place of its own new ids."""
        return PromptIds(self.before, (*self.segments[:-1], suffix))

    def behind(self, ids: Ids) -> PromptIds:
        """Return the same prompt with more ids at its end, as part of its own new ids."""
        return self.instead(np.concatenate((self.suffix, ids)))

    def __len__(self) -> int:
        return self.length

    @property
    def digest(self) -> bytes:
        """Return the sha256 (32 bytes) over all ids as little-endian int32."""
        return self.hashed.digest()

    def array(self) -> Ids:
        """Return all ids, int32, shape (T,). Read-only."""
        if self._array is None:
            segments = [ids for prompt in _chain(self) for ids in prompt.segments]
            self._array = np.concatenate(segments)
            self._array.flags.writeable = False
        return self._array

    def json(self) -> bytes:
        """Return all ids as the text of a JSON array without spaces."""
        if self._json is None:
            before, texts = self._json_before, self.texts
            if before is None or before == b"[]" or b"" in texts:
                texts = [text for prompt in _chain(self) for text in prompt.texts if text]
                self._json = b"[%b]" % b",".join(texts)
            else:
                self._json = b",".join((memoryview(before)[:-1], *texts[:-1], texts[-1] + b"]"))
            self._json_before = None
        return self._json

    def tail(self, count: int) -> Ids:
        """Return the last `count` ids, or all if there are fewer. Read-only."""
        last = self.segments[-1]
        if 0 < count <= last.size:
            return last[-count:]
        pieces: list[Ids] = []
        prompt: PromptIds | None = self
        while prompt is not None and count > 0:
            for ids in prompt.segments[::-1]:
                if count > 0:
                    pieces.append(ids[-count:])
                    count -= ids.size
            prompt = prompt.before
        if not pieces:
            return last[:0]
        pieces.reverse()
        joined = np.concatenate(pieces)
        joined.flags.writeable = False
        return joined


def _chain(last: PromptIds) -> list[PromptIds]:
    """Return the prompts from the root to this one."""
    found: list[PromptIds] = []
    prompt: PromptIds | None = last
    while prompt is not None:
        found.append(prompt)
        prompt = prompt.before
    found.reverse()
    return found


def _frozen(ids: Ids) -> Ids:
    """Return a read-only, contiguous int32 copy."""
    copied = np.array(ids, dtype=np.int32)
    copied.flags.writeable = False
    return copied
