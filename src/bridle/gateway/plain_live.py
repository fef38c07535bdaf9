"""A live stream's client, answered over its connection while a task samples the reply.

aiohttp does not see the request: pieces of the reply are written as they come, while the connection
takes each at once. Whatever else happens (an error, a silence, a client that reads slowly or sends
more, a seal) hands the client to the general path, which continues the stream where it stands.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from bridle.gateway.admission import Taken
from bridle.gateway.call import Call
from bridle.gateway.faults import trace_of
from bridle.gateway.linear import settle
from bridle.gateway.listener import takes_at_once
from bridle.gateway.registry import GatewaySession
from bridle.gateway.relay import StreamState, stream_head
from bridle.gateway.retries import Deliveries
from bridle.types import ModelRequest

if TYPE_CHECKING:
    from bridle.gateway.plain import PlainCall

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Handed:
    """A call whose client is to be answered by the general path."""

    session: GatewaySession
    call: Call
    request: ModelRequest
    taken: Taken
    deliveries: Deliveries
    begun: StreamState | None = None
    """The stream of which a part was written; `None` = nothing was."""

    def lost(self) -> None:
        """Give back the request's share and detach its client, which left before its reply."""
        self.taken.give_back()
        self.deliveries.left(self.session, self.call, partly=self.begun is not None)


class LiveAnswer:
    """Writes one live reply; made when its task has begun."""

    __slots__ = ("_alarm", "_began", "_flushing", "_live", "_loop", "_plain", "_stream", "_until")

    def __init__(self, plain: PlainCall) -> None:
        live = plain.call.live
        assert live is not None, "it leaves live"
        self._plain = plain
        self._live = live
        self._stream = StreamState(
            plain.question.wire.stream(plain.question.request, plain.call.head)
        )
        self._began = False
        """True if a part was written."""
        self._loop = asyncio.get_running_loop()
        self._flushing: asyncio.Handle | None = None
        patience_s = plain.path.settings.headers_after_s
        waited_s = time.perf_counter() - plain.call.clock_start
        self._until = self._loop.time() + patience_s - waited_s
        """When a silence is too long."""
        self._alarm = self._loop.call_at(self._until, self._ring)
        live.followers.add(self._look)
        plain.line.flight = plain.call.flight = self

    def _look(self) -> None:
        """Schedule one `_flush`, which writes all that is new by then."""
        if self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write what is new, if the connection takes it at once."""
        self._flushing = None
        plain, stream = self._plain, self._stream
        transport = plain.line.connection.transport
        try:
            if not plain.call.in_flight:
                self._end()
                return
            if transport is None or not takes_at_once(transport, 0):
                self.hand_over()
                return
            pieces, stream.mark = self._live.after(stream.mark, stream.encoder)
            if not pieces:
                return
            self._live.note(stream.mark)
            pieces = stream.opening + pieces
            self._until = self._loop.time() + plain.path.settings.keepalive_s
            if self._began:
                transport.write(b"%x\r\n%b\r\n" % (len(pieces), pieces))
                return
            self._alarm.cancel()  # it is set for the time until the head is to leave
            self._alarm = self._loop.call_at(self._until, self._ring)
            transport.write(b"%b%x\r\n%b\r\n" % (self._head(), len(pieces), pieces))
        except Exception as error:  # noqa: BLE001 - the top of a served request
            log.error("plain_path_failed", trace=trace_of(error))  # noqa: TRY400 - no variables
            if transport is not None:
                transport.abort()

    def _head(self) -> bytes:
        """Return the head of the response, which is written now; empty if it has left."""
        if self._began:
            return b""
        self._began, self._stream.opening = True, b""
        return stream_head(self._plain.route)

    def _end(self) -> None:
        """Write the rest of a committed reply."""
        plain, stream, call = self._plain, self._stream, self._plain.call
        connection = plain.line.connection
        if call.error is not None:
            self.hand_over()
            return
        answer = call.answered()
        before, last = stream.encoder.close(answer.reply, answer.usage)
        data = stream.opening + before + last
        if not takes_at_once(connection.transport, len(data)):
            stream.ending = data
            self.hand_over()
            return
        self._leave()
        connection.write_reply(b"%b%x\r\n%b\r\n0\r\n\r\n" % (self._head(), len(data), data))
        plain.answered()

    def _ring(self) -> None:
        """Hand the client over after a silence, which every piece ends."""
        if self._loop.time() >= self._until:
            self.hand_over()
        else:
            self._alarm = self._loop.call_at(self._until, self._ring)

    def _leave(self) -> None:
        plain = self._plain
        self._live.followers.discard(self._look)
        self._alarm.cancel()
        if self._flushing is not None:
            self._flushing.cancel()
        plain.line.flight = plain.call.flight = None

    def hand_over(self) -> None:
        """Let the general path continue the stream."""
        self._leave()
        self._plain.to_relay(self._stream if self._began else None)

    def client_gone(self) -> None:
        """Detach the client, which has gone; what it got may come back."""
        self._leave()
        session, call = self._plain.taken.session, self._plain.call
        settle(session)
        self._plain.taken.give_back()
        self._plain.path.deliveries.left(session, call, partly=self._began)
