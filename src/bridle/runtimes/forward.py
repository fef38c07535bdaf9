"""The one way out of a sandbox's own network: connections carried to the gateway, and nowhere else.

The listening socket belongs to the sandbox's network, where its loopback is all there is; this
process accepts on it and carries bytes to one fixed address. Nothing of ours runs inside, so there
is nothing of ours that a harness could end or change.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Self

from bridle.aio import Nursery

CHUNK = 1 << 16
MAX_CONNECTIONS = 1024
"""Open connections of one sandbox; more wait to be accepted."""

LINGER_S = 5.0
"""How long a client may still send after the gateway has closed its side."""

FULL_S = 0.1
"""Wait before another look when no descriptor is free to accept a connection."""


class Forwarder:
    """Carries what arrives at a listening socket to one address, until it is closed."""

    def __init__(self, listener: socket.socket) -> None:
        self.target: tuple[str, int] | None = None
        """Host and port; `None` = connections are closed at once."""
        self._listener = listener
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)
        self.linger_s = LINGER_S
        self._nursery = Nursery(_ignored)

    async def __aenter__(self) -> Self:
        await self._nursery.__aenter__()
        self._nursery.start(self._accept(), name="sandbox-forwarder")
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._nursery.cancel()
        finally:
            self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                inside, _ = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor is free
                self._room.release()
                await asyncio.sleep(FULL_S)
                continue
            self._nursery.start(self._carried(inside), name="sandbox-connection")

    async def _carried(self, inside: socket.socket) -> None:
        with inside:
            try:
                if self.target is not None:
                    with suppress(OSError):
                        await self._carry(inside, self.target)
            finally:
                self._room.release()

    async def _carry(self, inside: socket.socket, target: tuple[str, int]) -> None:
        inside.settimeout(0)
        inside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        outside = socket.socket()
        with outside:
            outside.settimeout(0)
            outside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(outside, target)
            async with asyncio.TaskGroup() as group:
                sent = group.create_task(_pump(inside, outside))
                await _pump(outside, inside)
                await asyncio.wait({sent}, timeout=self.linger_s)
                sent.cancel()


async def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copy until `source` ends, then close the writing half of `sink`."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while data := await loop.sock_recv(source, CHUNK):
            await loop.sock_sendall(sink, data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def _ignored(_error: BaseException) -> None:
    """A connection that failed is the business of its two ends."""
