"""Limits of a request before it is parsed: its bytes, its share, its length.

A body is read up to `max_body_bytes` as decoded, whatever its encoding. A session has a share of
requests and bytes in hand, and all sessions together have one. A body whose new part is long is
parsed in a thread, with a memory of its own that the session takes over when the request is
accepted, so that no event loop stands still and nothing stays of what was refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Self

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from bridle.aio import run_shielded
from bridle.dialects.base import Route, WireFormat
from bridle.dialects.history import RequestHistory
from bridle.dialects.json_reader import check_values
from bridle.errors import RequestError
from bridle.gateway.faults import RETRY_AFTER_S
from bridle.gateway.listener import ENCODINGS
from bridle.gateway.registry import GatewaySession
from bridle.gateway.settings import GatewaySettings
from bridle.prompting.canonical import AtomMemo, canonical
from bridle.types import ModelRequest

REQUESTS: Final = 512
"""Requests of one session at a time: each holds a connection and, when sampled, one more."""

SESSION_BODIES: Final = 4
"""Times the largest body that one session may have in hand."""

GATEWAY_BODIES: Final = 16
"""Times the largest body that all sessions together may have in hand."""

LONG_BYTES: Final = 1 << 18
"""New bytes from which a body is parsed in a thread: on the loop they would take some 10 ms."""

THREADS: Final = 2
"""Long bodies that are parsed at a time, of different sessions."""

SESSION_BYTES: Final = 1 << 30
"""New bytes of requests and replies that are captured of one session."""

REFUSED_BYTES: Final = 1 << 24
"""Bytes of requests without a sample after which a session forgets what it has read."""


_DECODED: Final = frozenset({"", "identity", "gzip", "deflate", "br", "zstd"})
"""Values of Content-Encoding that aiohttp has decoded or refused, and those of plain bodies."""


class Taken:
    """A request's part of its session's share, until it is given back."""

    __slots__ = ("_admission", "session", "size")

    def __init__(self, admission: Admission, session: GatewaySession, size: int = 0) -> None:
        """Take a place among the session's requests, and `size` bytes. `RequestError` beyond the
        share: then nothing is taken.
        """
        in_hand = session.in_hand
        if in_hand.requests >= REQUESTS:
            raise _too_many(f"this session has {REQUESTS} requests in progress, its limit", 429)
        if in_hand.captured >= SESSION_BYTES:
            message = f"this session has sent {SESSION_BYTES} new bytes, the most that are kept"
            raise RequestError(message, status=413, code="request_too_large")
        self._admission = admission
        self.session = session
        self.size = 0
        """Bytes."""
        if size:
            self.grow(size)
        in_hand.requests += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Give the request's place and bytes back to the session and the gateway; only once."""
        self.session.in_hand.requests -= 1
        self.session.in_hand.size -= self.size
        self._admission.bytes_in_hand -= self.size

    def grow(self, size: int) -> None:
        """Reserve `size` more bytes of the session's and the gateway's shares.

        `RequestError` beyond one of them: then none are reserved.
        """
        most, in_hand = self._admission.max_body_bytes, self.session.in_hand
        if in_hand.size + size > SESSION_BODIES * most:
            raise _too_many(
                "this session's requests in progress are too large together; wait for their "
                "replies",
                429,
            )
        if self._admission.bytes_in_hand + size > GATEWAY_BODIES * most:
            raise _too_many(
                "the requests in progress at this gateway are too large together; try again later",
                503,
            )
        self.size += size
        in_hand.size += size
        self._admission.bytes_in_hand += size


class Admission:
    """Takes requests in."""

    def __init__(self, settings: GatewaySettings, check: Callable[[ModelRequest], None]) -> None:
        """`check` refuses a request that is too long for its model, by its characters."""
        self.max_body_bytes = settings.max_body_bytes
        self.bytes_in_hand = 0
        self._timeout_s = settings.body_timeout_s
        self._check = check
        self._threads = asyncio.Semaphore(THREADS)

    async def body(self, http: web.BaseRequest, taken: Taken) -> bytes:
        """Return the whole body of a request, decompressed, within the limits of size and time.

        Raises `RequestError`.
        """
        if (http.content_length or 0) > self.max_body_bytes:
            raise self._too_large()
        if (encoding := http.headers.get("Content-Encoding", "")).lower() not in _DECODED:
            raise RequestError(f"Content-Encoding {encoding[:80]!r} is unknown; send {ENCODINGS}")
        try:
            if http.content.is_eof():  # it is here
                body = http.content.read_nowait()
                if len(body) > self.max_body_bytes:
                    raise self._too_large()
                taken.grow(len(body))
                return body
            if http.headers.get("Expect", "").lower() == "100-continue" and http.transport:
                http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            async with asyncio.timeout(self._timeout_s):
                return await self._arriving(http, taken)
        except TimeoutError:
            raise RequestError(
                f"the request's body did not arrive within {self._timeout_s:g} s", status=408
            ) from None
        except (web.RequestPayloadError, HttpProcessingError, ValueError) as error:
            why = str(error).rpartition("message:")[2].strip()  # aiohttp's text has two lines
            raise RequestError(f"the request's body cannot be read: {why}") from error

    async def _arriving(self, http: web.BaseRequest, taken: Taken) -> bytes:
        chunks, size = [], 0
        async for chunk in http.content.iter_any():
            size += len(chunk)
            if size > self.max_body_bytes:
                raise self._too_large()
            taken.grow(len(chunk))
            chunks.append(chunk)
            await asyncio.sleep(0)  # the next piece may be there at once, or be in this one's bytes
        return b"".join(chunks)

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the request is larger than {self.max_body_bytes} bytes",
            status=413,
            code="request_too_large",
        )

    async def read(
        self, session: GatewaySession, wire: WireFormat, route: Route, body: bytes
    ) -> ModelRequest:
        """Parse a request's body. `RequestError` for what is wrong with it, or if it is far too
        long.
        """
        if len(body) <= LONG_BYTES or session.messages.news(body) <= LONG_BYTES:
            return wire.parse(route, body, session.messages)
        messages, atoms = RequestHistory(), AtomMemo()

        def parse() -> ModelRequest:
            check_values(body)
            request = wire.parse(route, body, messages)
            self._check(request)
            canonical(request, atoms)
            return request

        async with session.in_hand.reading, self._threads:
            # The thread keeps its place until it ends, also when its client has gone.
            request = await run_shielded(asyncio.to_thread(parse), timeout_s=None)
        session.messages.adopt(messages)
        session.atoms.update(atoms)
        return request

    def refused(self, session: GatewaySession, body: bytes) -> None:
        """Count the bytes of a body for which nothing was sampled; many of them clear the session's
        cache.
        """
        session.in_hand.refused += len(body)
        if session.in_hand.refused > REFUSED_BYTES:
            session.in_hand.refused = 0
            session.messages, session.atoms = RequestHistory(), AtomMemo()


def _too_many(message: str, status: int) -> RequestError:
    code = "session_busy" if status == 429 else "overloaded"
    return RequestError(message, status=status, code=code, retry_after_s=RETRY_AFTER_S)
