"""The texts of a capture file: packed blobs, and a session's texts, unpacked on first access.

Texts are the reply, and the bodies and the request head that are new to the session. They are
packed in one blob per exchange, the first that has them:

    codec (1 byte: 0 plain, 1 zlib) | packed
    packed = entry*   entry = kind (1 byte: 0 body, 1 request head, 2 reply, 3 data, 4 parted body)
                              | 16-byte digest | u32 length | bytes

The same image recurs in messages that differ in a word. So long base64 in a body is a separate
entry, `data`, once per session, and the body is `parted`:

    u16 count | (u32 bytes of text before it, 16-byte digest of the data) * count | text

Training needs ids and logprobs only, so a reader gets those at once; at the first access to a text
it unpacks all of the session. A damaged blob loses its own texts and nothing else.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import NamedTuple, TypeAlias

from bridle.capture.records import Exchange, RequestRecord
from bridle.errors import StoreError

COMPRESS_FROM_BYTES = 2048
"""Below this zlib saves less than its time is worth: 0.65 of 1.3 kB in 23 us, of a turn of 500."""

COMPRESS_LEVEL = 1
"""On chat JSON level 1 keeps 0.45 of the bytes at 90 MB/s, level 6 0.40 at 35 MB/s."""

_WINDOWS = [max(9, (part << 8 | 255).bit_length()) for part in range(1 << 6)]
"""Bits of a window by the size of a text in steps of 256 bytes."""

DIGEST_BYTES = 16


class TextEntry(NamedTuple):
    """One text of an exchange's packed blob."""

    kind: int
    digest: bytes
    text: bytes


BODY, HEAD, REPLY, DATA, PARTED = 0, 1, 2, 3, 4
_ENTRY = struct.Struct("<B16sI")
_COUNT, _PART = struct.Struct("<H"), struct.Struct("<I16s")
DATA_BYTES = 4096
"""Shortest base64 that is stored by itself."""

_BASE64 = re.compile(rb'"(?:data:[^",]{0,80},)?([A-Za-z0-9+/_-]{4096,}={0,2})"')
"""JSON string of long base64, or a data URL of it."""


Packed: TypeAlias = tuple[int, bytes, bytes]
"""A `TextEntry` or its fields."""


def body_entries(digest: bytes, body: bytes) -> Sequence[Packed]:
    """Return a body as entries to pack: whole, or its inline data apart from the text around it.

    A body of fewer than `DATA_BYTES` is one entry.
    """
    data, parts, texts, at = [], [], [], 0
    for match in _BASE64.finditer(body):
        found = TextEntry(DATA, hashlib.sha256(match[1]).digest()[:DIGEST_BYTES], match[1])
        data.append(found)
        texts.append(body[at : match.start(1)])
        parts.append(_PART.pack(len(texts[-1]), found.digest))
        at = match.end(1)
    if not data:
        return ((BODY, digest, body),)
    return [
        *data,
        TextEntry(PARTED, digest, b"".join([_COUNT.pack(len(parts)), *parts, *texts, body[at:]])),
    ]


def _whole(parted: bytes, data: Mapping[bytes, bytes]) -> bytes:
    """Join a parted body. Raises `KeyError` if data are missing, `struct.error` if malformed."""
    (count,) = _COUNT.unpack_from(parted)
    at = _COUNT.size + count * _PART.size
    pieces: list[bytes] = []
    for number in range(count):
        length, address = _PART.unpack_from(parted, _COUNT.size + number * _PART.size)
        pieces += (parted[at : at + length], data[address])
        at += length
    return b"".join([*pieces, parted[at:]])


def pack(entries: Iterable[Packed]) -> bytes:
    """Return entries (texts with their digests) as one blob, compressed if that saves an eighth or
    more.
    """
    parts: list[bytes] = []
    for kind, digest, text in entries:
        parts += (_ENTRY.pack(kind, digest, len(text)), text)
    plain = b"".join(parts)
    size = len(plain)
    if size >= COMPRESS_FROM_BYTES:
        # With a window no larger than the text: making one of 32 KiB ready costs more than
        # compressing 2 KB, 0.045 ms with it and 0.017 ms without.
        window = 15 if size >= 1 << 14 else _WINDOWS[size >> 8]
        packer = zlib.compressobj(COMPRESS_LEVEL, zlib.DEFLATED, window, window - 7)
        small = packer.compress(plain) + packer.flush()
        if len(small) * 8 <= size * 7:
            return b"\x01" + small
    return b"\x00" + plain


def unpack(blob: bytes) -> Iterator[TextEntry]:
    """Yield the entries (texts with their digests) of a blob.

    Raises `ValueError`, `zlib.error` or `struct.error` if it is malformed.
    """
    codec, packed = blob[:1], blob[1:]
    if codec == b"\x01":
        packed = zlib.decompress(packed)
    elif codec != b"\x00":
        raise ValueError(
            f"stored texts begin with the unknown codec {codec!r}; known: 0 (plain) and 1 (zlib)"
        )
    at = 0
    while at < len(packed):
        kind, digest, length = _ENTRY.unpack_from(packed, at)
        at += _ENTRY.size
        if at + length > len(packed):
            raise ValueError(
                f"stored texts are damaged: an entry should have {length} bytes, and "
                f"{len(packed) - at} are left"
            )
        yield TextEntry(kind, digest, packed[at : at + length])
        at += length


def body_digests(blob: bytes) -> Iterator[bytes]:
    """Yield the digests of the bodies in a blob, and of the inline data in them.

    Raises `ValueError`, `zlib.error` or `struct.error` if it is malformed.
    """
    return (entry.digest for entry in unpack(blob) if entry.kind in {BODY, DATA, PARTED})


def head_digest(head: bytes) -> bytes:
    """Return the content address of a request's head (its fields other than messages and tools)."""
    return hashlib.sha256(head).digest()[:DIGEST_BYTES]


class SessionTexts(Mapping[bytes, bytes]):
    """A session's bodies by content digest, with its heads and replies.

    Rows are added in commit order. All are unpacked at the first access.
    """

    def __init__(self) -> None:
        self._blobs: list[bytes] = []
        self._heads: dict[bytes, bytes] = {}
        self._replies: dict[int, bytes] = {}
        self._bodies: dict[bytes, bytes] = {}
        self._data: dict[bytes, bytes] = {}
        self._unpacked: dict[int, list[TextEntry]] = {}
        self._done = 0
        self.damaged: dict[int, str] = {}
        """Blob number -> its damage; complete once a text was read."""

    def add(self, blob: bytes, head: bytes) -> bytes:
        """Add the packed texts of the session's next exchange; return the head of its request.

        The first exchange with a head stores its text, so most rows need no unpacking. A head whose
        text is damaged is `b""`.
        """
        self._blobs.append(blob)
        if head not in self._heads:
            entries = self._entries(len(self._blobs) - 1)
            self._heads |= {entry.digest: entry.text for entry in entries if entry.kind == HEAD}
        return self._heads.get(head, b"")

    def __len__(self) -> int:
        return len(self._loaded())

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._loaded())

    def __getitem__(self, digest: bytes) -> bytes:
        return self._loaded()[digest]

    @property
    def rows(self) -> int:
        """Number of exchanges whose texts were added."""
        return len(self._blobs)

    def reply(self, number: int) -> bytes:
        """Return the reply of the exchange in row `number`. Raises `StoreError` if it is
        damaged.
        """
        self._loaded()
        if number in self.damaged:
            raise StoreError(
                f"the stored texts of row {number} are damaged: {self.damaged[number]}"
            )
        return self._replies.get(number, b"")

    def _loaded(self) -> dict[bytes, bytes]:
        """Return the bodies, after unpacking all blobs."""
        while self._done < len(self._blobs):
            for entry in self._entries(self._done):
                if entry.kind == BODY:
                    self._bodies[entry.digest] = entry.text
                elif entry.kind == DATA:
                    self._data[entry.digest] = entry.text
                elif entry.kind == PARTED:
                    with suppress(KeyError, struct.error):  # its data went with a damaged row
                        self._bodies[entry.digest] = _whole(entry.text, self._data)
                elif entry.kind == REPLY:
                    self._replies[self._done] = entry.text
            self._unpacked.pop(self._done, None)
            self._blobs[self._done] = b""
            self._done += 1
        return self._bodies

    def _entries(self, number: int) -> list[TextEntry]:
        known = self._unpacked.get(number)
        if known is None:
            try:
                known = list(unpack(self._blobs[number]))
            except (ValueError, TypeError, zlib.error, struct.error) as error:
                self.damaged[number] = str(error)
                known = []
            self._unpacked[number] = known
        return known


class StoredExchange(Exchange):
    """Exchange of a file: its reply and its request are read on first access."""

    __slots__ = ("_place",)
    _place: tuple[SessionTexts, int, Callable[[], RequestRecord]]

    @classmethod
    def of(
        cls, texts: SessionTexts, request: Callable[[], RequestRecord], *values: object
    ) -> StoredExchange:
        """Return the exchange of the row that was last added to `texts`.

        `values` are its other fields in order. Its request and its reply are unpacked at their
        first use. Raises `ValueError` as `Exchange` does, or if values are missing.
        """
        exchange = cls.__new__(cls)
        for give, value in zip(_GIVE, values, strict=True):
            give(exchange, value)
        exchange.__post_init__()
        object.__setattr__(exchange, "_place", (texts, texts.rows - 1, request))
        return exchange

    def __reduce__(self) -> tuple[type[Exchange], tuple[object, ...]]:
        """Copy it as a plain exchange, with all that it has."""
        return Exchange, tuple(getattr(self, field.name) for field in fields(Exchange))

    def __getattr__(self, name: str) -> object:
        """Read the reply or the request, once."""
        if name not in _LATER:
            raise AttributeError(name)
        texts, number, request = self._place
        value = texts.reply(number) if name == "reply" else request()
        object.__setattr__(self, name, value)
        return value


_LATER = ("reply", "request")
_GIVE = tuple(
    getattr(Exchange, field.name).__set__ for field in fields(Exchange) if field.name not in _LATER
)
