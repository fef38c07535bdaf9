"""A listening socket whose connections cannot be held open by half a request.

A thin layer over aiohttp's low-level server: no router, no middleware, no access log (a path may
hold a key). A handler is cancelled when its client goes. The head of a request must be complete
some time after its first byte; bodies are timed by whoever reads them. A client that takes nothing
of what waits for it for some time is cut off. A client whose body is refused before all of it was
read gets `Connection: close`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import resource
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol, Self

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from bridle.errors import ConfigError, cannot_listen

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_quiet = logging.getLogger("bridle.gateway.http")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False

_AGENT = re.compile(rb"\r\nuser-agent:[^\r\n]*(?=\r\n)", re.IGNORECASE)

HEADER_BYTES: Final = 64 * 1024
"""Longest header line; some harnesses send their whole state in one."""

HEAD_BYTES: Final = 256 * 1024
"""Longest head of a request, all lines together."""

BEHIND_BYTES: Final = 64 * 1024
"""Most bytes of an unfinished head behind a request that is being served: no client needs any."""

MOST_KEPT: Final = 8 * 1024
"""Longest head of which a connection keeps the bytes."""

UNFINISHED_BYTES: Final = 32 * 1024 * 1024
"""Bytes of unfinished heads, over all connections of a listener."""

AT_ONCE: Final = 1 << 15
"""Bytes of a reply up to which it stays below what a transport holds before its writer waits
(64 KiB), whatever its head."""

JSON_TYPE: Final = "application/json"

BACKLOG: Final = 4096

MANY_CONNECTIONS: Final = 1 << 16
"""Connections at a time where the system sets no limit."""

MAX_PORT: Final = 65535

ENCODINGS: Final = "gzip, deflate, or a body without Content-Encoding"
"""The encodings of a body that a gateway reads."""

LINGER_S: Final = 5.0
"""Time that a client that still sends a refused body may take to read its answer and close."""


class DisconnectListener(Protocol):
    """Whoever waits at a connection for a reply."""

    def lost(self) -> None:
        """Act on the loss of the connection."""


class ConnectionServer(DisconnectListener, Protocol):
    """Serves requests of one connection that aiohttp does not see."""

    @property
    def flight(self) -> object:
        """Request that the connection serves; `None` = none."""

    def received(self, data: bytes) -> bool:
        """Take received bytes; `False` = aiohttp is to read them."""


class Connection(RequestHandler):
    """One client connection, with a deadline for the head of each request, the first included."""

    __slots__ = (
        *("_arriving", "_behind", "_deadline", "_head_timeout_s", "_lingers", "_names_agent"),
        *("_stuck", "_unfinished", "_write_timeout_s"),
        *("body", "handed", "head", "is_known", "line", "raw_head", "was_served"),
    )

    def __init__(
        self,
        manager: web.Server,
        *,
        head_timeout_s: float,
        write_timeout_s: float,
        make_line: Callable[[Connection], ConnectionServer] | None,
        **settings: Any,  # noqa: ANN401 - aiohttp's own, passed through
    ) -> None:
        super().__init__(manager, **settings)
        self._head_timeout_s = head_timeout_s
        self._write_timeout_s = write_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        """Rings when a client that does not read has had its time."""
        self._names_agent = False
        """True if the head that is being read has a `User-Agent` already."""
        self._lingers = False
        self._unfinished = 0
        """Bytes of the head that is being read."""
        self._behind = 0
        """The same of one that arrives while a request is being served."""
        self.body: StreamReader | None = None
        """Body of the last request that began to be served."""
        self.is_known = False
        """For the handler: whether a request of it was authenticated."""
        self.was_served = False
        """True if it has sent a whole head."""
        self.head: object = None
        """For the handler: what the head of its last request said."""
        self.raw_head: bytes | None = None
        """The same as it came; `None` = it came in pieces or behind another request, or is longer
        than `MOST_KEPT`."""
        self._arriving: bytes | None = None
        """Head of the request that aiohttp is about to begin, likewise."""
        self.line = None if make_line is None else make_line(self)
        """Sees first what arrives."""
        self.handed: DisconnectListener | None = None
        """For the handler: whom it answers, of a request that `line` began to serve."""

    @property
    def is_waiting(self) -> bool:
        """Return whether no request is being served."""
        if self.line is not None and self.line.flight is not None:
            return False
        return self._lingers or self._current_request is None

    @property
    def is_idle(self) -> bool:
        """Return whether the next byte is the first one of a request."""
        if self._unfinished or self._messages or self._current_request is not None:
            return False
        waiter = self._waiter
        return self._in_head() if waiter is None else not waiter.done()

    def _in_head(self) -> bool:
        """Return whether the next byte belongs to the head of a request.

        The first bytes of a connection may come before aiohttp's task waits for them.
        """
        if self._waiter is None:
            return not (self.was_served or self._messages)
        return not self._waiter.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a client, which must send its first byte within the time limit for a head."""
        super().connection_made(transport)
        self._begin_deadline()

    def _begin_deadline(self) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._head_timeout_s, self.force_close)
        self._names_agent = False

    def data_received(self, data: bytes) -> None:
        """Take received bytes; the first of a request starts the time limits."""
        if self._lingers:
            return
        if self.line is None or not self.line.received(data):
            self.pass_on(data)

    def pass_on(self, data: bytes) -> None:
        """Pass received bytes to aiohttp."""
        in_head, queued = self._in_head(), len(self._messages)
        is_behind = not (in_head or self._upgraded) and self._last_is_whole()
        if in_head:
            if self._deadline is None:
                self._begin_deadline()
            end = data.find(b"\r\n\r\n", 0, MOST_KEPT) + 4
            self._arriving = data[:end] if end > 4 and not self._unfinished else None
            data = self._with_one_agent(data)
        super().data_received(data)
        if in_head and not self._messages:
            self._hold(len(data))
        elif not is_behind or len(self._messages) > queued:
            self._behind = 0
        else:
            self._behind += len(data)
            if self._behind > BEHIND_BYTES:
                self.force_close()

    def _last_is_whole(self) -> bool:
        """Return whether the body of the last request that has a head has arrived."""
        if self._messages:
            return self._messages[-1][1].is_eof()
        return self.body is None or self.body.is_eof()

    def _with_one_agent(self, data: bytes) -> bytes:
        """Return a part of a head without a second `User-Agent`, which aiohttp would refuse."""
        end = data.find(b"\r\n\r\n")
        end = len(data) if end < 0 else end + 2
        found = list(_AGENT.finditer(data, 0, end))
        extra = found if self._names_agent else found[1:]
        self._names_agent |= bool(found)
        for match in reversed(extra):
            data = data[: match.start()] + data[match.end() :]
        return data

    def _hold(self, more: int) -> None:
        """Count bytes of an unfinished head; close it, or others, if there are too many."""
        self._unfinished += more
        assert isinstance(self._manager, _Server)
        self._manager.unfinished += more
        if self._unfinished > HEAD_BYTES:
            self.force_close()
        elif self._manager.unfinished > UNFINISHED_BYTES:
            self._manager.make_room()

    def head_arrived(self) -> None:
        """End the time limit of a request's head, which has arrived."""
        self.was_served = True
        self.raw_head, self._arriving = self._arriving, None
        if self._unfinished:
            self._let_go()
        if self._deadline is not None:
            self._end_deadline()

    async def linger(self) -> None:
        """Discard what the client still sends, until it closes (cancellation) or `LINGER_S` later.

        A connection that is closed while its client sends is reset, and the client may lose its
        answer. The discarded bytes are not decompressed.
        """
        self._lingers = True
        if self.transport is not None:
            self.transport.resume_reading()
        await asyncio.sleep(LINGER_S)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that aiohttp cannot read: in JSON, of which SDKs show the message."""
        answer = super().handle_error(request, status, exc, message)
        if status < 500 and isinstance(answer, web.Response):
            if isinstance(exc, ContentEncodingError):
                message = f"this Content-Encoding cannot be read; send {ENCODINGS}"
            kind = "invalid_request_error"
            error = {"type": kind, "message": message, "code": status, "status": "INVALID_ARGUMENT"}
            answer.body = json.dumps({"type": "error", "error": error}).encode()
            answer.content_type = "application/json"
        return answer

    def write_reply(self, data: bytes) -> None:
        """Write a whole reply to a request that was read without aiohttp."""
        assert self.transport is not None
        self.transport.write(data)
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout

    def _process_keepalive(self) -> None:
        """Close the connection after an idle time; aiohttp takes a call of `line` for one."""
        if self.line is not None and self.line.flight is not None:
            self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        super()._process_keepalive()

    def pause_writing(self) -> None:
        """Give a client that does not read some time."""
        super().pause_writing()
        if self.transport is not None:
            self._watch(self.transport)

    def resume_writing(self) -> None:
        """End that time: the client reads."""
        super().resume_writing()
        self._end_watch()

    def force_close(self) -> None:
        """Close the connection; the client gets some time to take what waits for it."""
        transport = self.transport
        super().force_close()
        if transport is not None and transport.get_write_buffer_size():
            self._watch(transport)

    def _watch(self, transport: asyncio.Transport, before: int | None = None) -> None:
        """Cut off a client that took nothing since `before` bytes waited for it."""
        self._end_watch()
        waiting = transport.get_write_buffer_size()
        if before is not None and waiting >= before:
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._stuck = loop.call_later(self._write_timeout_s, self._watch, transport, waiting)

    def _end_watch(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _let_go(self) -> None:
        if self._unfinished and isinstance(self._manager, _Server):
            self._manager.unfinished -= self._unfinished
        self._unfinished = 0

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release what the connection holds, because its client has gone."""
        self._end_deadline()
        self._let_go()
        for served in (self.line, self.handed):
            if served is not None:
                served.lost()
        self.line = self.handed = self.body = None
        super().connection_lost(exc)
        self._end_watch()


class _Server(web.Server):
    """Makes `Connection`s, as many as there is room for.

    When there is no more, the oldest that never sent a valid key are closed: first those that never
    sent a whole head, then those without a request, then others. One that has sent a valid key is
    closed only when no other is left, and not while it has a request. So peers without a key keep
    nobody out.
    """

    def __init__(self, handler: Handler, *, most: int | None, **settings: Any) -> None:  # noqa: ANN401 - aiohttp's own, passed through
        super().__init__(handler, **settings)
        self._most = most
        self.unfinished = 0
        """Bytes of unfinished heads."""

    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Make room, then count it in."""
        if len(self._connections) >= (self._most or most_connections()):
            self.make_room()
        super().connection_made(handler, transport)

    def make_room(self) -> None:
        """Close an eighth of those that may be closed, so that looking for them is rare."""
        held = [one for one in self._connections if isinstance(one, Connection)]
        waiting = [one for one in held if one.is_waiting]
        strangers = [one for one in held if not one.is_known]
        closed = [one for one in strangers if one.is_waiting] or strangers or waiting
        closed.sort(key=lambda one: one.was_served)  # stable: the oldest first
        for one in closed[: 1 + len(closed) // 8]:
            transport = one.transport
            one.force_close()
            if transport is not None:
                transport.abort()  # it would stay open for a client that does not read


def most_connections() -> int:
    """Return half of the files that the process may open: a model call needs a second
    connection.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MANY_CONNECTIONS if soft == resource.RLIM_INFINITY else max(soft // 2, 16)


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. `ConfigError` if `host:port` cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if port > MAX_PORT:
        raise ConfigError(f"cannot listen on {host}:{port}: the highest port is {MAX_PORT}")
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise cannot_listen(host, port, error) from error


class Listener(AbstractAsyncContextManager["Listener"]):
    """Serves `handler` at `host:port` while entered. `ConfigError` when it cannot listen there."""

    def __init__(  # noqa: PLR0913 - one address and one limit each
        self,
        handler: Handler,
        *,
        host: str,
        port: int,
        max_body_bytes: int,
        head_timeout_s: float,
        write_timeout_s: float = 300.0,
        listening: socket.socket | None = None,
        make_line: Callable[[Connection], ConnectionServer] | None = None,
        most: int | None = None,
    ) -> None:
        """`listening` is a socket that listens at `host` already: `port` is then not used.

        `make_line` makes what sees first what arrives at a connection; `None` = aiohttp does.
        `most` connections are held at a time; `None` = `most_connections()`.
        """
        self._most = most
        self._handler = handler
        self._host = host
        self._port = port
        self._listening = listening
        self._make_line = make_line
        self._max_body_bytes = max_body_bytes
        self._head_timeout_s = head_timeout_s
        self._write_timeout_s = write_timeout_s
        self._runner: web.ServerRunner | None = None
        self.url = ""
        """`http://host:port`, known when entered."""

    async def __aenter__(self) -> Self:
        server = _Server(
            self._answer,
            most=self._most,
            request_factory=self._request,
            handler_cancellation=True,
            access_log=None,
            logger=_quiet,
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
            lingering_time=0.0,
            head_timeout_s=self._head_timeout_s,
            write_timeout_s=self._write_timeout_s,
            make_line=self._make_line,
        )
        runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=2.0)
        await runner.setup()
        self._runner = runner
        try:
            if self._listening is not None:
                await web.SockSite(runner, self._listening, backlog=BACKLOG).start()
            else:
                await web.TCPSite(runner, self._host, self._port, backlog=BACKLOG).start()
        except OSError as error:
            await runner.cleanup()
            raise cannot_listen(self._host, self._port, error) from error
        port = runner.addresses[0][1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer; a client whose body was not read to its end has to come with a new connection."""
        response = await self._handler(http)
        if not http.content.is_eof() and not response.prepared:
            response.force_close()
            await response.prepare(http)
            await response.write_eof()
            connection = http.protocol
            assert isinstance(connection, Connection)
            await connection.linger()
        return response

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        assert isinstance(protocol, Connection)
        protocol.head_arrived()
        protocol.body = payload
        return web.BaseRequest(
            message,
            payload,
            protocol,
            writer,
            task,
            asyncio.get_running_loop(),
            client_max_size=self._max_body_bytes,
        )


# ---- replies that leave whole


def reply_head(headers: dict[str, str]) -> bytes:
    """Return the head of a reply over a connection that stays; the date is left to be filled in."""
    lines = [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(
        ["HTTP/1.1 200 OK", *lines, "Date: %b", f"Server: {SERVER_SOFTWARE}", "\r\n"]
    ).encode()


_JSON_HEAD: Final = reply_head({"Content-Type": JSON_TYPE, "Content-Length": "%d"})


def whole_reply(body: bytes) -> bytes:
    """Return the bytes of a whole HTTP reply with its head, for a connection that stays open."""
    return _JSON_HEAD % (len(body), rfc822_formatted_time().encode()) + body


def takes_at_once(transport: asyncio.WriteTransport | None, size: int) -> bool:
    """Return whether a connection can be written `size` bytes without waiting."""
    if transport is None or size > AT_ONCE or transport.is_closing():
        return False
    return transport.get_write_buffer_size() == 0
