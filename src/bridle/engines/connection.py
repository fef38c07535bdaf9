"""Minimal HTTP/1.1 client: one POST and its reply over kept-alive connections.

A general client spends 0.19 ms on a call, more than everything else that the gateway does with it;
this one takes 0.05. An engine's reply needs a length, chunks or the end of the connection, but no
redirects, cookies or compression. All other requests use aiohttp (`http`).
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, TypeAlias, cast

from yarl import URL

from bridle.aio import Nursery, retry

KEEPALIVE_S: Final = 4.0
"""Idle connections are dropped before uvicorn's 5 s, so none is used while its server closes it."""

CONNECT_S: Final = 10.0

END_S: Final = 1.0
"""Time in which a stream must end after its last event, so that its connection is kept."""

FIRST_WAIT_S: Final = 0.5
"""Wait before a failed connect is tried again; doubles."""

MANY: Final = 16
"""Number of streams without a first part at which the later parts of others are gathered."""

GATHER_S: Final = 0.05
"""Longest time for which parts of a stream are gathered."""

_HEAD_BYTES: Final = 1 << 16

MOST_BYTES: Final = 512 << 20
"""Largest reply in bytes; a million tokens with logprobs and expert ids take less."""


_STATUS: Final = re.compile(rb"HTTP/1\.([^ \r\n]*) ([0-9]+)(?![^ \r])")

_READ: Final = re.compile(
    rb"\r\n[ \t]*(content-length|content-type|retry-after|transfer-encoding|connection)"
    rb"[ \t]*:([^\r]*)",
    re.IGNORECASE,
)
"""Headers that are read from a reply."""


_SMALL_BYTES: Final = 1 << 12
"""Bytes of an unfinished chunk up to which it is read again with what comes behind it."""


class NoConnectionError(TimeoutError):
    """The server took no connection within `CONNECT_S`."""


class CutReplyError(ConnectionError):
    """The connection ended in mid-reply."""


_Head: TypeAlias = tuple[bytes, int, bytes, int, bool, bytes]
"""A head before its `Content-Length`, and behind it, each with its size; whether the connection
stays; the type."""


class HttpReply:
    """Parser of a reply from bytes, without I/O. Raises `ConnectionError` for other protocols."""

    status = 0
    """0 = the head is incomplete."""
    keeps = True
    """True if the connection can be reused."""
    retry_after: str | None = None
    """Its `Retry-After`."""
    _content_type = b""
    ends = False
    """True if its reader has all it wanted, and only its end may be missing."""
    is_whole = False
    """True if the whole reply has arrived."""
    error: BaseException | None = None
    """The failure that ended it, if any."""
    _size = 0
    _length = -1
    """Bytes of the body; -1 = until the connection ends."""
    _chunked = False

    def __init__(self, head: _Head | None = None) -> None:
        self.head = head
        """Head of an earlier reply; one that differs in its length alone need not be read."""
        self._pieces: list[bytes | memoryview] = []
        self._rest = bytearray()
        """Bytes of a chunked reply that are not yet a whole chunk."""
        self._chunks: list[bytes] = []

    @property
    def content_type(self) -> bytes:
        """`Content-Type` of the reply in lower case, without parameters."""
        return self._content_type.lower().partition(b";")[0].rstrip()

    @property
    def body(self) -> bytes:
        """Return the whole body of a reply that is complete."""
        return bytes(self.view)

    @property
    def view(self) -> bytes | memoryview:
        """Return `body`, not copied if it arrived in one piece."""
        pieces = self._pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    def has_part(self) -> bool:
        """Return whether `take` would return something of a reply whose head has arrived."""
        return any(self._chunks) if self._chunked else any(self._pieces)

    def take(self) -> bytes:
        """Return the part of the body that arrived since the last call; the head must have
        arrived.
        """
        if self._chunked:
            chunks, self._chunks = self._chunks, []
            return b"".join(chunks)
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def feed(self, data: bytes) -> bool:
        """Take received bytes; return whether the reply is complete."""
        if self.head is not None and not self.status and not self._pieces:
            before, start, after, behind, keeps, content_type = self.head
            end = data.find(b"\r", start, start + 20)
            length = data[start:end]
            if length.isdigit() and data.startswith(before) and data.startswith(after, end):
                self.status, self.keeps, self._content_type = 200, keeps, content_type
                self._length = int(length)
                if self._length > MOST_BYTES:
                    self._bound(self._length)
                self._size = len(data) - end - behind
                self._pieces = [memoryview(data)[end + behind :]]  # copied when it is read
                return self._length <= self._size
        self._size += len(data)
        if self._size > MOST_BYTES:
            self._bound(self._size)
        if self.status:
            if self._chunked:
                return self._read_chunks(data)
            self._pieces.append(data)
        else:
            self._pieces.append(data)
            if not self._read_head():
                return False
        if self._chunked:
            return self._read_chunks(bytes(self._pieces.pop()))
        return 0 <= self._length <= self._size

    def ended(self) -> bool:
        """Take the end of the connection; return whether the reply is complete."""
        return bool(self.status) and self._length < 0 and not self._chunked

    @staticmethod
    def _bound(size: int) -> None:
        if size > MOST_BYTES:
            raise ConnectionError(
                f"the server's reply is larger than {MOST_BYTES >> 20} MiB, the limit"
            )

    def _read_head(self) -> bool:
        text = self.body
        end = text.find(b"\r\n\r\n")
        if end < 0:
            if len(text) > _HEAD_BYTES or not b"HTTP/1.".startswith(text[:7]):
                raise ConnectionError("the server's reply is not valid HTTP/1.1")
            self._pieces = [text]
            return False
        first = _STATUS.match(text, 0, end)
        if first is None:
            raise ConnectionError("the server's reply is not valid HTTP/1.1")
        self._pieces = [text[end + 4 :]]
        self._size = len(text) - end - 4
        status = int(first[2])
        if 100 <= status < 200:  # an interim reply; the real one follows
            return self._read_head()
        self.status = status
        self.keeps = first[1] != b"0"
        lengths = []
        for match in _READ.finditer(text, 0, end):
            self._take(match[1].lower(), match[2])
            if match[1].lower() == b"content-length":
                lengths.append(match.end() - len(match[2].lstrip()))
        if status in {204, 304}:
            self._length = 0
        elif status == 200 and len(lengths) == 1 and not self._chunked and not self.retry_after:
            after = text[lengths[0] : end + 4].lstrip(b"0123456789")
            ends = text[: lengths[0]], lengths[0], after, len(after)
            self.head = *ends, self.keeps, self._content_type
        return True

    def _take(self, name: bytes, raw: bytes) -> None:
        value = raw.strip()
        match name:
            case b"content-length" if value.isdigit():
                self._length = int(value)
                self._bound(self._length)
            case b"content-length":
                raise ConnectionError("the server's reply is not valid HTTP/1.1")
            case b"content-type":
                self._content_type = value
            case b"retry-after":
                self.retry_after = value.decode(errors="replace")
            case b"transfer-encoding":
                self._chunked = value.lower() == b"chunked"
            case b"connection":
                self.keeps = value.lower() == b"keep-alive" or (
                    self.keeps and value.lower() != b"close"
                )

    def _read_chunks(self, data: bytes) -> bool:
        """Decode more of the chunked body; return whether the last chunk has arrived."""
        rest, at = self._rest, 0
        if not rest or len(rest) < _SMALL_BYTES:  # else a large chunk would be read again and again
            chunks, data = _first_chunks(bytes(rest) + data)
            self._chunks += chunks
            rest.clear()
            if not data:
                return False
        rest += data
        while (end := rest.find(b"\r\n", at, at + _HEAD_BYTES)) >= 0:
            size_text = rest[at:end].partition(b";")[0].strip()
            if not size_text.isalnum():
                raise ConnectionError("the server's reply is not valid HTTP/1.1")
            try:
                size = int(size_text, 16)
            except ValueError:
                raise ConnectionError("the server's reply is not valid HTTP/1.1") from None
            if size == 0:
                if rest.find(b"\r\n\r\n", end, end + _HEAD_BYTES) < 0:
                    break  # its trailers are still to come
                self._pieces = [b"".join(self._chunks)]
                return True
            begin = end + 2
            if begin + size + 2 > len(rest):
                break
            self._chunks.append(bytes(rest[begin : begin + size]))
            at = begin + size + 2
        else:
            if len(rest) - at > _HEAD_BYTES:
                raise ConnectionError("the server's reply is not valid HTTP/1.1")
        del rest[:at]
        return False


def _first_chunks(data: bytes) -> tuple[list[bytes], bytes]:
    """Return whole chunks that `data` begins with, up to one that holds a line's end; the rest."""
    parts = data.split(b"\r\n")
    sizes, chunks = parts[:-2:2], parts[1:-1:2]
    found = end = 0
    try:
        for size, digits, length in zip(sizes, map(len, sizes), map(len, chunks), strict=True):
            if not length or int(size, 16) != length:
                break
            found += 1
            end += digits + length + 4
    except ValueError:  # what follows is read by itself
        pass
    if not b"".join(sizes[:found]).isalnum():  # `int` takes more than digits
        return [], data
    return chunks[:found], data[end:]


class _Streams:
    """Streamed replies of one server: first parts are read before others.

    While `MANY` calls wait for the first part of their replies, those that have begun are read
    `GATHER_S` after a part has come, with all that came in between. Each read costs the loop about
    as much with one token as with several, and it is the loop that the first parts wait for.
    """

    def __init__(self) -> None:
        self.waiting: set[_Connection] = set()
        """Those whose first part has not come."""
        self._gathering: set[_Connection] = set()

    def came(self, connection: _Connection) -> None:
        """Have a part that has come read, at once or with the next ones."""
        if connection in self.waiting:
            if connection.has_part:
                self.waiting.discard(connection)
            connection.wake()
        elif len(self.waiting) < MANY:
            connection.wake()
        else:
            if not self._gathering:
                asyncio.get_running_loop().call_later(GATHER_S, self._wake)
            self._gathering.add(connection)

    def _wake(self) -> None:
        gathering, self._gathering = self._gathering, set()
        for connection in gathering - self.waiting:  # a new call may have it by now
            connection.wake()


class _Connection(asyncio.Protocol):
    """Connection for one call at a time."""

    def __init__(self, silent_s: float, made: set[_Connection], streams: _Streams) -> None:
        """`made` holds it until it is lost."""
        self._silent_s = silent_s
        self._made = made
        self._all_streams = streams
        self._loop = asyncio.get_running_loop()
        self._reply: HttpReply | None = None
        self._head: _Head | None = None
        """Head of the last reply, if it was a whole one."""
        self._waiting: asyncio.Future[HttpReply] | None = None
        self._streams = False
        """True if the caller wants each part of the reply as it arrives."""
        self._received = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport | None = None
        self._first: tuple[bytes, ...] = ()
        """Pieces to send once it is made."""
        self.is_closed = False
        self._keep: Callable[[_Connection], None] | None = None
        """Takes it when a reply that nobody waits for is whole; `None` = somebody does."""
        self.idle_since = 0.0
        """Time of the loop at the end of the last reply."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._made.add(self)
        if self.is_closed:
            self.transport.abort()
        elif self._first:
            self.transport.writelines(self._first)
            self._first = ()

    def call(self, head: bytes, *body: bytes, streams: bool = False) -> asyncio.Future[HttpReply]:
        """Send a request, once it is made; return a future of its reply, or head (`streams`).

        The body's length is written behind `head`.
        """
        self._reply, self._streams = HttpReply(self._head), streams
        if streams:
            self._all_streams.waiting.add(self)
        self._waiting = self._loop.create_future()
        self._received = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._silent_s, self._look)
        # asyncio of Python 3.12 and 3.13 would try to send an empty part for ever, and never close.
        parts = (head + b"%d\r\n\r\n" % sum(map(len, body)), *filter(None, body))
        if self.transport is None:
            self._first = parts
        else:
            self.transport.writelines(parts)
        return self._waiting

    def data_received(self, data: bytes) -> None:
        if self._reply is None:
            self.close()  # nobody asked
            return
        self._received = self._loop.time()
        try:
            whole = self._reply.feed(data)
        except ConnectionError as error:
            self.fail(error)
            return
        if whole:
            self._done()
        elif self._streams and self._reply.status:
            if self._all_streams.waiting:
                self._all_streams.came(self)
            else:
                self.wake()

    @property
    def has_part(self) -> bool:
        """Return whether a part of the reply has come that is not read."""
        return self._reply is not None and self._reply.has_part

    def wake(self) -> None:
        """End the wait of a stream's caller, if it waits."""
        waiting, reply = self._waiting, self._reply
        if waiting is not None and reply is not None and self._streams:
            self._waiting = None
            if not waiting.done():
                waiting.set_result(reply)

    async def more(
        self, reply: HttpReply, watch: Callable[[asyncio.Future[HttpReply]], None]
    ) -> bytes:
        """Wait for more of a streamed reply's body; empty at its end."""
        while not (data := reply.take()) and not reply.is_whole:
            if reply.error is not None:
                raise reply.error
            self._waiting = self._loop.create_future()
            watch(self._waiting)
            await self._waiting
        return data

    def _done(self) -> None:
        reply, self._reply = self._reply, None
        if self._streams:
            self._all_streams.waiting.discard(self)
        self.idle_since = self._received
        assert reply is not None
        self._head = reply.head
        reply.is_whole = True
        if not reply.keeps:
            self.close()
        elif self._keep is not None:
            self._keep(self)
        self._keep = None
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def end_within(self, seconds: float, keep: Callable[[_Connection], None]) -> None:
        """Have it kept once the reply that nobody reads any more is whole, or close it."""
        self._keep = keep
        self._loop.call_later(seconds, self._end_now)

    def _end_now(self) -> None:
        if self._keep is not None:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._made.discard(self)
        if self._reply is not None and self._reply.ended():
            self._reply.keeps = False
            self._done()
        begun = self._reply is not None and self._reply.status
        kind = CutReplyError if begun else ConnectionError
        self.fail(kind(str(exc) if exc else "Server disconnected"))

    def _look(self) -> None:
        """Fail the call if the server has been silent too long."""
        self._timer = None
        if self._reply is None:
            return
        left = self._received + self._silent_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self.fail(TimeoutError())

    def connected(self, connecting: asyncio.Future[_Connection]) -> None:
        """Fail the call if the connection could not be made."""
        if connecting.cancelled():
            self.fail(ConnectionError("the client is closed"))
        elif (error := connecting.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the call with an error, and the connection."""
        waiting, reply = self._waiting, self._reply
        self._waiting = self._reply = None
        if reply is not None:
            reply.error = error
        self.close()
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    def close(self) -> None:
        """Drop the connection, at which the server aborts the running call."""
        self.is_closed = True
        self._all_streams.waiting.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.transport is not None:
            self.transport.abort()


class _Heads(dict[str, bytes]):
    """The head of a request by its path, up to the body's length."""

    def __init__(self, url: URL, lines: str) -> None:
        super().__init__()
        self._url = url
        self._lines = lines

    def __missing__(self, path: str) -> bytes:
        target = URL(str(self._url).rstrip("/") + path).raw_path_qs
        head = f"POST {target} HTTP/1.1\r\n{self._lines}\r\nContent-Length: ".encode()
        self[path] = head
        return head


class AbortedError(Exception):
    """`HttpCall.abort` ended the call."""


class HttpCall:
    """One call of a server. `abort` ends each wait for it, also those to come."""

    def __init__(
        self,
        connection: _Connection | None = None,
        waiting: asyncio.Future[HttpReply] | None = None,
    ) -> None:
        self.connection = connection
        """The connection over which `Connections.begin` sent its request; `None` = `begin` did not,
        or a task waits for the reply."""
        self.waiting = waiting
        """The future that is awaited, or was last; `None` = none was."""
        self.version: int | None = None
        """Version of the adapter that it samples with; `None` = the engine's weights alone."""
        self.unnamed = 0
        """Version of the engine's weights when it began, if they have no number."""
        self._aborted = False

    def abort(self) -> None:
        """End the call's present wait, or its next one, with `AbortedError`."""
        self._aborted = True
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_exception(AbortedError())

    def watch(self, waiting: asyncio.Future[HttpReply]) -> None:
        """Register the future that the call awaits, so that `abort` can end it."""
        if self._aborted:
            waiting.cancel()
            raise AbortedError
        self.waiting = waiting

    def arrived(self) -> bytes | memoryview | None:
        """Return the body of an answer that has arrived and is JSON; `None` = `post` says what it
        is.
        """
        assert self.waiting is not None, "its request was sent"
        try:
            reply = self.waiting.result()
        except (OSError, TimeoutError, AbortedError, asyncio.CancelledError):
            return None
        body = reply.view
        return body if reply.status == 200 and body[:1] == b"{" else None


class Connections:
    """Connection pool of one server. `silent_s` is how long it may be silent within one call.

    `attempts` is how often a failed connect is tried.
    """

    def __init__(
        self,
        url: URL,
        headers: dict[str, str],
        *,
        silent_s: float,
        keepalive_s: float = KEEPALIVE_S,
        attempts: int = 1,
    ) -> None:
        self._url = url
        self._silent_s = silent_s
        self._keepalive_s = keepalive_s
        self._attempts = attempts
        lines = [f"Host: {url.host_port_subcomponent}", "User-Agent: bridle", "Accept: */*"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._heads = _Heads(url, "\r\n".join(lines))
        self._idle: deque[_Connection] = deque()
        """Ordered by last use, the latest last."""
        self._made: set[_Connection] = set()
        """Those that are not lost."""
        self._streams = _Streams()
        self._connecting = Nursery(lambda _: None)  # a failure is the call's

    def begin(self, path: str, *body: bytes, streams: bool = False) -> HttpCall:
        """Send a POST at once, or once a new connection is made; `post` (with `streams`, `stream`),
        `keep` and `drop` end it.
        """
        connection = self._idle_one()
        if connection is None:
            connection = self._new()
            connecting = self._connecting.start(self._connect(connection), name="connect")
            connecting.add_done_callback(connection.connected)
        return HttpCall(connection, connection.call(self._heads[path], *body, streams=streams))

    async def post(self, path: str, body: bytes, call: HttpCall) -> HttpReply:
        """Send a POST, unless `begin` has sent it, and return its reply.

        Cancelling or `call.abort` ends it. Raises `OSError` (`CutReplyError` in mid-reply),
        `TimeoutError` after silence, or `AbortedError`.
        """
        connection, waiting = call.connection, call.waiting
        if connection is None or waiting is None:
            connection = await self._take()
            waiting = connection.call(self._heads[path], body)
        call.connection = None
        try:
            call.watch(waiting)
            reply = await waiting
        except BaseException:
            waiting.cancel()
            connection.close()
            raise
        self.keep(connection)
        return reply

    def drop(self, call: HttpCall) -> None:
        """Abort a POST that `begin` sent: close its connection, at which the server ends the call,
        too.
        """
        if call.connection is not None and call.waiting is not None:
            call.waiting.cancel()
            call.connection.close()

    @asynccontextmanager
    async def stream(
        self, path: str, body: bytes, call: HttpCall
    ) -> AsyncIterator[tuple[HttpReply, Callable[[], Awaitable[bytes]]]]:
        """Send a POST, unless `begin` has sent it; yield the head of its reply, and a function that
        awaits more of its body.

        That function returns an empty part at the end. Failures are those of `post`.
        """
        connection, waiting = call.connection, call.waiting
        if connection is None or waiting is None:
            connection = await self._take()
            waiting = connection.call(self._heads[path], body, streams=True)
        call.connection = None
        try:
            call.watch(waiting)
            reply = await waiting
            yield reply, partial(connection.more, reply, call.watch)
        except BaseException:
            connection.close()
            raise
        if not reply.is_whole and reply.ends:
            connection.end_within(END_S, self.keep)
        elif not reply.is_whole:
            connection.close()
        else:
            self.keep(connection)

    def keep(self, connection: _Connection) -> None:
        """Keep an open connection for the next call, and close those idle for too long."""
        if connection.is_closed:
            return
        self._idle.append(connection)
        since = connection.idle_since - self._keepalive_s
        while self._idle[0].idle_since < since:
            self._idle.popleft().close()

    def _idle_one(self) -> _Connection | None:
        """Return a connection that can send a call, and was not idle for too long."""
        since = asyncio.get_running_loop().time() - self._keepalive_s
        while self._idle:
            connection = self._idle.pop()
            transport = connection.transport
            is_open = transport is not None and not transport.is_closing()
            if is_open and connection.idle_since > since:
                return connection
            connection.close()
        return None

    def _new(self) -> _Connection:
        return _Connection(self._silent_s, self._made, self._streams)

    async def _take(self) -> _Connection:
        connection = self._idle_one()
        if connection is not None:
            return connection
        return await retry(
            self._connect, attempts=self._attempts, backoff_s=FIRST_WAIT_S, retry_on=(OSError,)
        )

    async def _connect(self, connection: _Connection | None = None) -> _Connection:
        secure = ssl.create_default_context() if self._url.scheme == "https" else None
        try:
            async with asyncio.timeout(CONNECT_S):
                _, made = await asyncio.get_running_loop().create_connection(
                    lambda: connection or self._new(),
                    str(self._url.host),
                    self._url.port or 80,
                    ssl=secure,
                )
        except TimeoutError as error:
            raise NoConnectionError from error
        return made

    async def aclose(self) -> None:
        """Close all connections; running calls end with `ConnectionError`."""
        await self._connecting.cancel()
        for connection in tuple(self._made):
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the transports close their sockets in the loop's next round
