"""The texts of a capture file: packed blobs, and a session's texts unpacked when first asked for.

Texts (the reply, and the bodies and the request head that an exchange brings for the first time in
its session) lie packed in one blob per exchange, because each has exactly one exchange that brought
it:

    codec (1 byte: 0 plain, 1 zlib) | packed
    packed = entry*   entry = kind (1 byte: 0 body, 1 request head, 2 reply, 3 data, 4 parted body)
                              | 16-byte digest | u32 length | bytes

The same image comes again in messages that differ in a word. So long base64 in a body is an entry
of its own, `data`, once per session, and the body is `parted`:

    u16 count | (u32 bytes of text before it, 16-byte digest of the data) * count | text

What trains is ids and logprobs, so a reader gets those at once and its texts when it asks for one:
then all of the session, once. A blob that is damaged costs its own texts and nothing else.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import NamedTuple, TypeAlias

from bridle.capture.records import Exchange, RequestRecord
from bridle.errors import StoreError

COMPRESS_FROM_BYTES = 256
"""Below this zlib saves less than its 20 us are worth."""

COMPRESS_LEVEL = 1
"""On chat JSON level 1 keeps 0.45 of the bytes at 90 MB/s, level 6 0.40 at 35 MB/s."""

DIGEST_BYTES = 16


class Entry(NamedTuple):
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
"""A JSON string of long base64, or a data URL of it."""


Packed: TypeAlias = tuple[int, bytes, bytes]
"""An `Entry`, or what one is made of."""


def body_entries(digest: bytes, body: bytes) -> list[Entry]:
    """The entries of a body: itself, or its data and what is around them."""
    if len(body) < DATA_BYTES:
        return [Entry(BODY, digest, body)]
    data, parts, texts, at = [], [], [], 0
    for match in _BASE64.finditer(body):
        found = Entry(DATA, hashlib.sha256(match[1]).digest()[:DIGEST_BYTES], match[1])
        data.append(found)
        texts.append(body[at : match.start(1)])
        parts.append(_PART.pack(len(texts[-1]), found.digest))
        at = match.end(1)
    if not data:
        return [Entry(BODY, digest, body)]
    return [
        *data,
        Entry(PARTED, digest, b"".join([_COUNT.pack(len(parts)), *parts, *texts, body[at:]])),
    ]


def _whole(parted: bytes, data: Mapping[bytes, bytes]) -> bytes:
    """A parted body put together. `KeyError`: its data are not there; `struct.error`: no parts."""
    (count,) = _COUNT.unpack_from(parted)
    at = _COUNT.size + count * _PART.size
    pieces: list[bytes] = []
    for number in range(count):
        length, address = _PART.unpack_from(parted, _COUNT.size + number * _PART.size)
        pieces += (parted[at : at + length], data[address])
        at += length
    return b"".join([*pieces, parted[at:]])


def pack(entries: Iterable[Packed]) -> bytes:
    """Entries as one blob, compressed where that saves an eighth or more."""
    parts: list[bytes] = []
    for kind, digest, text in entries:
        parts += (_ENTRY.pack(kind, digest, len(text)), text)
    plain = b"".join(parts)
    size = len(plain)
    if size >= COMPRESS_FROM_BYTES:
        small = _compressed(plain)
        if len(small) * 8 <= size * 7:
            return b"\x01" + small
    return b"\x00" + plain


_WINDOWS = [max(9, (part << 8 | 255).bit_length()) for part in range(1 << 6)]
"""Bits of a window by the size of a text in steps of 256 bytes."""


def _compressed(plain: bytes) -> bytes:
    """Compress with a window no larger than the text.

    Making a window of 32 KiB ready costs more than compressing 2 KB: 0.045 ms with it, 0.017 ms
    without.
    """
    size = len(plain)
    window = 15 if size >= 1 << 14 else _WINDOWS[size >> 8]
    packer = zlib.compressobj(COMPRESS_LEVEL, zlib.DEFLATED, window, window - 7)
    return packer.compress(plain) + packer.flush()


def unpack(blob: bytes) -> Iterator[Entry]:
    """The entries of a blob. A malformed one raises `ValueError`, `zlib.error`, `struct.error`."""
    codec, packed = blob[:1], blob[1:]
    if codec == b"\x01":
        packed = zlib.decompress(packed)
    elif codec != b"\x00":
        message = f"unknown text codec {codec!r}"
        raise ValueError(message)
    at = 0
    while at < len(packed):
        kind, digest, length = _ENTRY.unpack_from(packed, at)
        at += _ENTRY.size
        if at + length > len(packed):
            message = "a text ends before its length"
            raise ValueError(message)
        yield Entry(kind, digest, packed[at : at + length])
        at += length


def body_digests(blob: bytes) -> Iterator[bytes]:
    """The digests of the bodies, and of their data, in a blob; raises as `unpack`."""
    return (entry.digest for entry in unpack(blob) if entry.kind in {BODY, DATA, PARTED})


def head_digest(head: bytes) -> bytes:
    """Content address of a request's head."""
    return hashlib.sha256(head).digest()[:DIGEST_BYTES]


class SessionTexts(Mapping[bytes, bytes]):
    """A session's bodies by content digest; and its heads and replies, of which exchanges know.

    Rows are added in commit order. Unpacks when first asked, all at once.
    """

    def __init__(self) -> None:
        self._blobs: list[bytes] = []
        self._heads: dict[bytes, bytes] = {}
        self._replies: dict[int, bytes] = {}
        self._bodies: dict[bytes, bytes] = {}
        self._data: dict[bytes, bytes] = {}
        self._unpacked: dict[int, list[Entry]] = {}
        self._done = 0
        self.damaged: dict[int, str] = {}
        """Blob number -> what is wrong with it; complete when a text was asked for."""

    def add(self, blob: bytes, head: bytes) -> bytes:
        """Add the next row's blob; returns the text of its request's head.

        The first exchange with a head brings its text, so most rows need nothing unpacked. A head
        whose text is damaged is `b""`.
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
        return len(self._blobs)

    def reply(self, number: int) -> bytes:
        """The reply of the row that was added as that number. `StoreError` if it is damaged."""
        self._loaded()
        if number in self.damaged:
            message = f"a row's texts are damaged: {self.damaged[number]}"
            raise StoreError(message)
        return self._replies.get(number, b"")

    def _loaded(self) -> dict[bytes, bytes]:
        """The bodies, after unpacking all that is not unpacked."""
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

    def _entries(self, number: int) -> list[Entry]:
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
    """An exchange of a file: its reply and its request are read when somebody asks for them."""

    __slots__ = ("_place",)
    _place: tuple[SessionTexts, int, Callable[[], RequestRecord]]

    @classmethod
    def of(
        cls, texts: SessionTexts, request: Callable[[], RequestRecord], *values: object
    ) -> StoredExchange:
        """The exchange of the row that `texts` got last, with its other fields' values in order.

        Fields are set as what they are, slots: through the constructor of a frozen class each costs
        twice as much. `ValueError` where `Exchange` has one, or where values are missing.
        """
        exchange = cls.__new__(cls)
        for give, value in zip(_GIVE, values, strict=True):
            give(exchange, value)
        exchange.__post_init__()
        object.__setattr__(exchange, "_place", (texts, texts.rows - 1, request))
        return exchange

    def __getattr__(self, name: str) -> object:
        """Called for what is not set: the reply or the request, once."""
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
