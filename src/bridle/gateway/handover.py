"""Accepted connections on their way to the process that serves them.

One process listens. It looks at the head of a connection's first request without taking it from the
socket, and gives the whole connection to the process whose session it names, over a Unix socket:
no byte of a call passes through the process that listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from bridle.errors import ConfigError

log = structlog.get_logger()

HEAD_BYTES: Final = 64 * 1024
"""So much of a head is looked at; what names a session stands in its beginning."""

RELOOK_S: Final = 0.005
"""Wait before a head that is not whole yet is looked at again."""

PER_ROUND: Final = 64
"""Connections that are accepted per round of the event loop."""

BACKLOG: Final = 4096

MOST_WAITING: Final = 4096
"""Connections that wait for a process to come back; more are closed."""

_FULL: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_FULL_WAIT_S: Final = 0.1


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at `host:port`. `ConfigError` when it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            message = f"cannot listen on {where}: the port is in use; choose another, or 0 for any"
        else:
            message = f"cannot listen on {where}: {error.strerror or error}"
        raise ConfigError(message) from error
    listening.settimeout(0)
    return listening


class Door:
    """Accepts at a listening socket and tells `decide` each connection with its first head.

    Both become their owner's at once. A head that is not whole `head_timeout_s` after the
    connection came is refused by closing it; one that sends nothing may wait.
    """

    def __init__(
        self,
        listening: socket.socket,
        decide: Callable[[bytes, socket.socket], None],
        *,
        head_timeout_s: float,
    ) -> None:
        self._listening = listening
        self._decide = decide
        self._head_timeout_s = head_timeout_s
        self._looked_at: dict[socket.socket, asyncio.TimerHandle | None] = {}
        self._loop = asyncio.get_running_loop()
        self._open = False

    def open(self) -> None:
        """Begin to accept."""
        self._open = True
        self._loop.add_reader(self._listening, self._accept)

    def close(self) -> None:
        """Accept nobody any more, and drop who has not said what he wants; idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._listening)
        self._listening.close()
        for connection, timer in list(self._looked_at.items()):
            if timer is not None:
                timer.cancel()
            self._drop(connection)

    def _accept(self) -> None:
        for _ in range(PER_ROUND):
            try:
                connection, _where = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _FULL:
                    log.error("cannot_accept", error=str(error))  # noqa: TRY400 - the text says all
                    self._loop.remove_reader(self._listening)
                    self._loop.call_later(_FULL_WAIT_S, self._reopen)
                return
            connection.settimeout(0)
            self._looked_at[connection] = None
            self._look(connection, None)

    def _reopen(self) -> None:
        if self._open:
            self._loop.add_reader(self._listening, self._accept)

    def _look(self, connection: socket.socket, deadline: float | None) -> None:
        """Look for a whole head; `deadline` is that of one that has begun."""
        self._looked_at[connection] = None
        self._loop.remove_reader(connection)
        try:
            head = connection.recv(HEAD_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            self._loop.add_reader(connection, self._look, connection, None)
            return
        except OSError:
            self._drop(connection)
            return
        now = self._loop.time()
        deadline = now + self._head_timeout_s if deadline is None else deadline
        if not head or now > deadline:
            self._drop(connection)
        elif b"\r\n\r\n" in head or len(head) == HEAD_BYTES:
            del self._looked_at[connection]
            self._decide(head, connection)
        else:
            again = self._loop.call_later(RELOOK_S, self._look, connection, deadline)
            self._looked_at[connection] = again

    def _drop(self, connection: socket.socket) -> None:
        del self._looked_at[connection]
        self._loop.remove_reader(connection)
        connection.close()


class Giver:
    """Gives connections to one process; while it is gone they wait for the next one.

    The process acknowledges each connection before it reads from it. One that it did not take
    before it died is given to its successor, and its client notices nothing.
    """

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._waiting: deque[socket.socket] = deque()
        self._given: deque[socket.socket] = deque()
        """Not acknowledged yet, oldest first."""
        self._watching = False

    def connect(self, channel: socket.socket) -> None:
        """From here on `channel` (ours to close) leads to the process."""
        self.disconnect()
        channel.settimeout(0)
        self._channel = channel
        asyncio.get_running_loop().add_reader(channel, self._hear)
        self._flush()

    def disconnect(self) -> None:
        """The process is gone or to end: its end of the channel is told."""
        channel = self._channel
        if channel is None:
            return
        self._channel = None
        self._hear_all(channel)
        asyncio.get_running_loop().remove_reader(channel)
        self._unwatch(channel)
        channel.close()
        while self._given:
            self._waiting.appendleft(self._given.pop())

    def give(self, connection: socket.socket) -> None:
        """Give a connection away; it is no longer the caller's."""
        if len(self._waiting) >= MOST_WAITING:
            connection.close()
            return
        self._waiting.append(connection)
        if not self._watching:
            self._flush()

    def close(self) -> None:
        """End the process's channel and drop what waits; idempotent."""
        self.disconnect()
        while self._waiting:
            self._waiting.popleft().close()

    def _flush(self) -> None:
        channel = self._channel
        if channel is None:
            return
        while self._waiting:
            try:
                socket.send_fds(channel, [b"c"], [self._waiting[0].fileno()])
            except BlockingIOError:
                if not self._watching:
                    self._watching = True
                    asyncio.get_running_loop().add_writer(channel, self._flush)
                return
            except OSError:
                self.disconnect()  # it has gone; another one will come
                return
            self._given.append(self._waiting.popleft())
        self._unwatch(channel)

    def _unwatch(self, channel: socket.socket) -> None:
        if self._watching:
            self._watching = False
            asyncio.get_running_loop().remove_writer(channel)

    def _hear(self) -> None:
        if self._channel is not None and not self._hear_all(self._channel):
            self.disconnect()

    def _hear_all(self, channel: socket.socket) -> bool:
        """Take all acknowledgements that are there; `False` = the process has gone."""
        while True:
            try:
                taken = len(channel.recv(4096))
            except BlockingIOError:
                return True
            except OSError:
                return False
            for _ in range(taken):
                self._given.popleft().close()
            if not taken:
                return False


class Taker:
    """The other end: tells `taken` each connection, and `ended` when the giver is gone."""

    def __init__(
        self,
        channel: socket.socket,
        taken: Callable[[socket.socket], None],
        ended: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._taken = taken
        self._ended = ended
        channel.settimeout(0)
        asyncio.get_running_loop().add_reader(channel, self._take)

    def _take(self) -> None:
        for _ in range(PER_ROUND):
            try:
                told, numbers, _flags, _from = socket.recv_fds(self._channel, 1, 4)
            except BlockingIOError:
                return
            except OSError:
                told, numbers = b"", []
            if not told:
                self.close()
                self._ended()
                return
            for number in numbers:
                with contextlib.suppress(OSError):
                    self._channel.send(b"t")
                self._taken(socket.socket(fileno=number))

    def close(self) -> None:
        """Take no more; idempotent."""
        if self._channel.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
