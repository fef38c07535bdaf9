"""A listening socket whose connections cannot be held open by half a request.

A thin layer over aiohttp's low-level server: no router, no middleware, no access log (a path may
hold a key). A handler is cancelled when its client goes. The head of a request must be complete
some time after its first byte; bodies are timed by whoever reads them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Self

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
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

BACKLOG: Final = 4096

MAX_PORT: Final = 65535


class _Connection(RequestHandler):
    """One client connection, with a deadline for the head of each request."""

    __slots__ = ("_deadline", "_head_timeout_s", "_names_agent")

    def __init__(self, manager: web.Server, *, head_timeout_s: float, **settings: Any) -> None:  # noqa: ANN401 - aiohttp's own, passed through
        super().__init__(manager, **settings)
        self._head_timeout_s = head_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._names_agent = False
        """Whether the head that is being read has a `User-Agent` already."""

    def data_received(self, data: bytes) -> None:
        """Start the clock at a request's first byte."""
        if self._deadline is None and self._current_request is None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self._head_timeout_s, self.force_close)
            self._names_agent = False
        waiter = self._waiter
        if waiter is not None and not waiter.done():  # the next request's head is being read
            data = self._with_one_agent(data)
        super().data_received(data)

    def _with_one_agent(self, data: bytes) -> bytes:
        """Part of a head without a second `User-Agent`, for which aiohttp refuses the request."""
        end = data.find(b"\r\n\r\n")
        end = len(data) if end < 0 else end + 2
        found = list(_AGENT.finditer(data, 0, end))
        extra = found if self._names_agent else found[1:]
        self._names_agent |= bool(found)
        for match in reversed(extra):
            data = data[: match.start()] + data[match.end() :]
        return data

    def head_arrived(self) -> None:
        """A request is whole but for its body."""
        self._end_deadline()

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client has gone."""
        self._end_deadline()
        super().connection_lost(exc)


class _Server(web.Server):
    """Makes `_Connection`s."""

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. `ConfigError` if `host:port` cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if port > MAX_PORT:
        raise ConfigError(f"cannot listen on {host}:{port}: the last port is {MAX_PORT}")
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise cannot_listen(host, port, error) from error


class Listener(AbstractAsyncContextManager["Listener"]):
    """Serves `handler` at `host:port` while entered. `ConfigError` when it cannot listen there."""

    def __init__(
        self,
        handler: Handler,
        *,
        host: str,
        port: int,
        max_body_bytes: int,
        head_timeout_s: float,
        listening: socket.socket | None = None,
    ) -> None:
        """`listening` is a socket that listens at `host` already: `port` is then not used."""
        self._handler = handler
        self._host = host
        self._port = port
        self._listening = listening
        self._max_body_bytes = max_body_bytes
        self._head_timeout_s = head_timeout_s
        self._runner: web.ServerRunner | None = None
        self.url = ""
        """`http://host:port`, known when entered."""

    async def __aenter__(self) -> Self:
        server = _Server(
            self._handler,
            request_factory=self._request,
            handler_cancellation=True,
            access_log=None,
            logger=_quiet,
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
            lingering_time=5.0,
            head_timeout_s=self._head_timeout_s,
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

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        assert isinstance(protocol, _Connection)
        protocol.head_arrived()
        return web.BaseRequest(
            message,
            payload,
            protocol,
            writer,
            task,
            asyncio.get_running_loop(),
            client_max_size=self._max_body_bytes,
        )
