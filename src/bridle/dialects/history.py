"""A session's memory of the beginnings of its requests, so that a growing history is read once.

Harnesses send their whole history again with every call. A body that begins with the bytes of an
earlier one, up to the end of that one's last message, has the same messages there: the same bytes
put a JSON reader into the same state. So only the rest is split, hashed and decoded, and a request
costs one comparison of bytes plus its new messages. Comparing 100 kB takes 2 us, splitting and
hashing them 110. Where the end of a body is that of the earlier one, too, its other fields (tools
among them) are the earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from bridle.types import Message

KEPT = 4
"""Beginnings that a session remembers: one per conversation (agent, sub-agents)."""

_COMMA = ord(",")

SMALLEST = 2_000
"""Bytes below which remembering does not pay."""


@dataclass(slots=True, eq=False)
class Begun:
    """The beginning of an earlier body, and its parsed items."""

    salt: bytes
    """The dialect in the memo's keys."""
    key: str
    """The array's name."""
    prefix: memoryview
    """The body up to the end of the array's last item."""
    start: int
    """Offset of its first item."""
    items: tuple[bytes, ...]
    digests: tuple[bytes, ...]
    lengths: tuple[int, ...]
    messages: tuple[Message, ...]
    tail: memoryview | bytes = b""
    """The body behind `prefix`."""
    fields: Mapping[str, msgspec.Raw] = field(default_factory=dict)
    """The body's other fields; empty = not kept."""
    head: Any = None
    """Values that a dialect made of these fields; `None` = nothing yet."""
    size: int = 0
    """Length of `prefix`."""
    behind: int = 0
    """Length of `tail`."""

    def grown(self, body: bytes) -> bytes | None:
        """Return the text of the new items if `body` is this earlier body with more items, else
        `None`.

        It must begin with the earlier items and end with the same `tail`; only the bytes between
        are new, and all other fields are known.
        """
        start, end = self.size, len(body) - self.behind
        if not self.fields or start >= end or body[start] != _COMMA:
            return None
        alike = body.endswith(self.tail) and body.startswith(self.prefix)
        return body[start + 1 : end] if alike else None

    def rest(self, body: bytes) -> bytes | None:
        """Return `body` without the items of this earlier body; `None` if it does not begin with
        them.
        """
        if not body.startswith(self.prefix):
            return None
        after = body[self.size :]
        # A second array of that name would be the one that counts.
        if b'"%s"' % self.key.encode() in after:
            return None
        match after[:1]:
            case b"]":
                return body[: self.start] + after
            case b"," if not after[1:].lstrip(b" \t\r\n").startswith(b"]"):
                return body[: self.start] + after[1:]
        return None


T = TypeVar("T")


class RequestHistory(dict[bytes, tuple[Message, ...]]):
    """A `bridle.dialects.base.SpanMemo` that remembers beginnings and heads too; one per session.

    Used by `bridle.dialects.json_reader` in this order: `grown` and `find` when a body is split,
    `reads` when its items are known, `begun` and `remember` when they are read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._begun: list[Begun] = []
        """Newest first."""
        self._heads: dict[Hashable, Any] = {}
        self.joined: list[Any] = []
        """Values that a dialect made of the items of its last requests, newest first."""
        self.same: Begun | None = None
        """The record whose other fields the present body has; `None` = they were read."""
        self._found: Begun | None = None
        self._place: tuple[bytes, int, int, Mapping[str, msgspec.Raw]] | None = None
        """Body, start and end of the items that are being read, and the other fields."""

    def grown(self, body: bytes, key: str, salt: bytes) -> tuple[Begun, bytes] | None:
        """Return the longest earlier body that `body` extends by further items only, and their
        text.

        `None` = there is none.
        """
        self.same = None
        if self._begun:  # mostly the newest, which mostly is the longest one that fits
            newest, others = self._begun[0], self._begun[1:]
            if newest.key == key and newest.salt == salt and (found := newest.grown(body)):
                for other in others:
                    if other.size > newest.size:
                        break
                else:
                    return newest, found
        return self._longest(Begun.grown, body, key, salt)

    def find(self, body: bytes, key: str, salt: bytes) -> tuple[Begun, bytes] | None:
        """Return the longest earlier body whose items `body` begins with, and `body` without these
        items.

        `None` = there is none.
        """
        self._found = self._place = None
        return self._longest(Begun.rest, body, key, salt)

    def newest(self, digests: tuple[bytes, ...]) -> Begun | None:
        """Return the newest earlier body if `digests` are those of its items and its other fields
        are kept.
        """
        found = self._begun[0] if self._begun else None
        return found if found is not None and found.fields and found.digests is digests else None

    def head(self, key: Hashable, read: Callable[[], T]) -> T:
        """Return `read()` for a request's fields other than its messages, from the cache if `key`
        is known.

        `key` holds all these fields. The last `KEPT` are remembered, so the caller must not change
        what it gets.
        """
        found: T | None = self._heads.get(key)
        if found is None:
            found = read()
            if len(self._heads) >= KEPT:
                del self._heads[next(iter(self._heads))]
            self._heads[key] = found
        return found

    def news(self, body: bytes) -> int:
        """Return how many bytes of `body` follow the longest earlier body that it begins with."""
        known = [one.size for one in self._begun if body.startswith(one.prefix)]
        return len(body) - max(known, default=0)

    def adopt(self, other: RequestHistory) -> None:
        """Take over the earlier bodies that another history remembers, as the newest."""
        self.update(other)
        self._begun = [*other._begun, *self._begun][:KEPT]

    def _longest(
        self, cut: Callable[[Begun, bytes], bytes | None], body: bytes, key: str, salt: bytes
    ) -> tuple[Begun, bytes] | None:
        best: tuple[Begun, bytes] | None = None
        for begun in self._begun:
            if begun.key != key or begun.salt != salt:
                continue
            if best is not None and begun.size <= best[0].size:
                continue
            if (found := cut(begun, body)) is not None:
                best = begun, found
        return best

    def reads(
        self,
        found: Begun | None,
        body: bytes,
        start: int,
        end: int,
        fields: Mapping[str, msgspec.Raw],
    ) -> None:
        """Record that the items between two offsets of `body` will be read, after those of `found`.

        `fields` are the body's other fields.
        """
        self._found = found
        self._place = None
        self.same = found if found is not None and fields is found.fields else None
        if end - start >= SMALLEST:
            # A raw field is a view of its body, which shall not be kept for it.
            kept = fields if self.same else {name: raw.copy() for name, raw in fields.items()}
            self._place = body, start, end, kept

    def begun(self, items: Sequence[bytes]) -> Begun | None:
        """Return the record of the earlier body that these items begin with."""
        found, self._found = self._found, None
        if found is None or not items or items[0] is not found.items[0]:
            return None
        return found

    def remember(
        self,
        begun: Begun | None,
        salt: bytes,
        key: str,
        items: tuple[bytes, ...],
        digests: tuple[bytes, ...],
        lengths: tuple[int, ...],
        messages: tuple[Message, ...],
    ) -> None:
        """Keep the messages of the body just read, so that the next body need not repeat the work.

        They replace `begun`, the record of the shorter body that this one extends.
        """
        place, self._place = self._place, None
        if place is None:
            return
        body, start, end, fields = place
        kept = self._begun
        if begun is not None:
            kept = kept[1:] if kept[0] is begun else [one for one in kept if one is not begun]
        head = begun.head if begun is not None and begun is self.same else None
        view = memoryview(body)  # no copy: what is behind the prefix is kept as well
        newest = Begun(
            *(salt, key, view[:end], start, items, digests, lengths, messages),
            *(view[end:], fields, head, end, len(body) - end),
        )
        self._begun = [newest, *kept][:KEPT]
