"""The reply on the wire: one JSON body, or a stream that is kept alive while the model thinks.

A stream's headers leave with the first sampled token or after a while; from there the encoder's
keep-alives fill the silence. A live reply leaves as it becomes certain, each client at its own
pace; what is left of it, or all of it, is written when its exchange is committed, and the last
event only then (law 4). `Deliveries` learns whether the client got all of it, whatever happens.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Final

from aiohttp import HttpVersion11, web
from aiohttp.helpers import rfc822_formatted_time

from bridle.dialects.base import Route, StreamEncoder, WireFormat
from bridle.errors import RequestError
from bridle.gateway.call import Call
from bridle.gateway.listener import JSON_TYPE, reply_head, takes_at_once, whole_reply
from bridle.gateway.live import LiveReply, Mark
from bridle.gateway.registry import GatewaySession
from bridle.gateway.retries import Deliveries
from bridle.gateway.settings import GatewaySettings
from bridle.types import ModelRequest

SSE_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
}


def json_response(
    body: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=body, status=status, headers={"Content-Type": JSON_TYPE, **(headers or {})}
    )


def refusal(wire: WireFormat, error: RequestError) -> web.Response:
    """Return an error as an HTTP response in the provider's form."""
    status, headers, body = wire.error(error)
    return json_response(body, status, headers)


class StreamState:
    """A stream to one client, and how much of it is written."""

    __slots__ = ("encoder", "ending", "mark", "opening")

    def __init__(self, encoder: StreamEncoder) -> None:
        self.encoder = encoder
        self.opening = encoder.open()
        """Bytes that begin the stream, until they are written."""
        self.mark = Mark()
        """The end of the part of the live reply that is written."""
        self.ending = b""
        """The encoded rest of the stream, if it is known and not written."""


class Relay:
    """Writes the replies of one gateway."""

    def __init__(self, settings: GatewaySettings, deliveries: Deliveries) -> None:
        self._settings = settings
        self._deliveries = deliveries

    async def answer(
        self,
        http: web.BaseRequest,
        session: GatewaySession,
        call: Call,
        request: ModelRequest,
        route: Route,
        wire: WireFormat,
        *,
        waited_s: float = 0.0,
        begun: StreamState | None = None,
    ) -> web.StreamResponse:
        """Wait for a call and write its reply; the client is detached from it at the end.

        `waited_s` is how long the client has waited before; `begun` is the stream that it was
        written a part of. Cancellation means that the client has gone. `ConnectionError` when it
        went, or was too slow, in the middle of a reply.
        """
        writer = _Writer(http, self._settings.write_timeout_s)
        task = asyncio.current_task()
        assert task is not None
        session.replying[task] = call
        try:
            if request.stream:
                patience_s = self._settings.headers_after_s - waited_s
                await _within(call.began, patience_s)
                response = await self._stream(writer, call, request, route, wire, begun)
            else:
                response = await self._whole(writer, call, wire)
        except TimeoutError:
            self._deliveries.left(session, call, partly=writer.began_reply)
            writer.abort()
            raise _too_slow() from None
        except BaseException:
            self._deliveries.left(session, call, partly=writer.began_reply)
            if session.sealed:
                writer.abort()  # its record says that it was cut
            raise
        else:
            if call.error is None:
                self._deliveries.received(session, call)
            else:
                self._deliveries.refused(session, call, call.error)
        finally:
            del session.replying[task]
        return response

    async def stored(self, http: web.BaseRequest, body: bytes) -> web.StreamResponse:
        """Write what was kept of an earlier call. `ConnectionError` when the client went, or was
        too slow.
        """
        writer = _Writer(http, self._settings.write_timeout_s)
        try:
            return await writer.whole(body)
        except TimeoutError:
            writer.abort()
            raise _too_slow() from None

    async def _whole(self, writer: _Writer, call: Call, wire: WireFormat) -> web.StreamResponse:
        await call.done.wait()
        if call.error is not None:
            return refusal(wire, call.error)
        return await writer.whole(call.answered().body)

    async def _stream(
        self, writer: _Writer, call: Call, request: ModelRequest, route: Route, wire: WireFormat,
        begun: StreamState | None,
    ) -> web.StreamResponse:  # fmt: skip
        if begun is None:
            if call.error is not None and not wire.refuses_in_stream(call.error):
                return refusal(wire, call.error)
            await writer.start(route)
            begun = StreamState(wire.stream(request, call.head))
        else:
            writer.go_on()
        if begun.ending:
            return await writer.finish(begun.ending)
        await self._until_done(writer, call, begun)
        if call.error is not None:
            return await writer.broken(begun.opening, begun.encoder.error(call.error))
        answer = call.answered()
        before, last = begun.encoder.close(answer.reply, answer.usage)
        return await writer.finish(begun.opening + before + last)

    async def _until_done(self, writer: _Writer, call: Call, stream: StreamState) -> None:
        """Write what is certain as it comes, and keep-alives."""
        loop, silence = asyncio.get_running_loop(), self._settings.keepalive_s
        silent_until = loop.time()
        while not call.done.is_set():
            live, pieces = call.live, b""
            if live is not None:
                pieces, stream.mark = live.after(stream.mark, stream.encoder)
            if pieces and live is not None:
                live.note(stream.mark)
                await writer.write_reply(stream.opening + pieces)
            elif (now := loop.time()) >= silent_until:
                await writer.write(stream.opening or stream.encoder.keepalive())
            elif live is None or call.first_token_s is None:
                began = call.began.is_set()
                await _within(call.done if began else call.began, silent_until - now)
                continue
            else:
                follower = _Follower(writer, call, live, stream)
                silent_until = await follower.follow(silence, silent_until)
                continue
            stream.opening, silent_until = b"", loop.time() + silence


def _too_slow() -> ConnectionResetError:
    return ConnectionResetError("the client did not read its reply in time")


class _Follower:
    """Writes a live reply's pieces as they come, while their connection takes them at once.

    It wakes no task for a piece: what was sampled in one round of the event loop leaves in it.
    """

    def __init__(self, writer: _Writer, call: Call, live: LiveReply, stream: StreamState) -> None:
        self._writer = writer
        self._call = call
        self._live = live
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._stopped = self._loop.create_future()
        self._flushing: asyncio.Handle | None = None

    async def follow(self, silence_s: float, silent_until: float) -> float:
        """Follow until the call ends, the connection has no room, or nothing came for so long.

        Returns when the next keep-alive is due.
        """
        self._silence_s, self._silent_until = silence_s, silent_until
        self._alarm = self._loop.call_at(silent_until, self._ring)
        self._live.followers.add(self._look)
        try:
            await self._stopped
        finally:
            self._live.followers.discard(self._look)
            self._alarm.cancel()
            if self._flushing is not None:
                self._flushing.cancel()
        return self._silent_until

    def _look(self) -> None:
        """Schedule one `_flush`, which writes all that is new by then."""
        if self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = None
        transport = self._writer.free() if self._call.in_flight else None
        if transport is None:
            self._stop()
            return
        stream = self._stream
        pieces, stream.mark = self._live.after(stream.mark, stream.encoder)
        if pieces:
            self._live.note(stream.mark)
            self._writer.began_reply = True
            transport.write(b"%x\r\n%b\r\n" % (len(pieces), pieces))
            self._silent_until = self._loop.time() + self._silence_s

    def _ring(self) -> None:
        """Stop after a silence, which every piece ends."""
        if self._loop.time() >= self._silent_until:
            self._stop()
        else:
            self._alarm = self._loop.call_at(self._silent_until, self._ring)

    def _stop(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)


_STREAM_HEADS: Final = {
    sse: reply_head({**headers, "Transfer-Encoding": "chunked"})
    for sse, headers in ((True, SSE_HEADERS), (False, {"Content-Type": JSON_TYPE}))
}


def stream_head(route: Route) -> bytes:
    """Return the head of a stream over a connection that stays open."""
    return _STREAM_HEADS[route.sse] % rfc822_formatted_time().encode()


def whole_stream(call: Call, request: ModelRequest, route: Route, wire: WireFormat) -> bytes:
    """Return the bytes of a committed reply as a whole stream with its head, over a connection that
    stays open.
    """
    encoder, answer = wire.stream(request, call.head), call.answered()
    opening = encoder.open()
    before, last = encoder.close(answer.reply, answer.usage)
    head = stream_head(route)
    size = len(opening) + len(before) + len(last)
    return b"%b%x\r\n%b%b%b\r\n0\r\n\r\n" % (head, size, opening, before, last)


class _Written(web.StreamResponse):
    """A reply that has left whole over a connection that stays: aiohttp has nothing left to do."""

    prepared = keep_alive = True
    status = 200

    async def prepare(self, request: web.BaseRequest) -> None:
        """Do nothing: nothing is left to send."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing: nothing is left to send."""


_WRITTEN: Final = _Written()


class _Writer:
    """One response; aiohttp writes those whose connection does not stay."""

    def __init__(self, http: web.BaseRequest, timeout_s: float) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._stays = http.keep_alive and http.version == HttpVersion11
        self._response: web.StreamResponse = _WRITTEN
        self._head = b""
        """Head of a stream, until it has left."""
        self.began_reply = False

    async def whole(self, body: bytes) -> web.StreamResponse:
        """Write a whole reply; returns when the connection has accepted all of it."""
        self.began_reply = True
        if self._stays and takes_at_once(self._http.transport, len(body)):
            self._put(whole_reply(body))
            return _WRITTEN
        response = json_response(body)
        async with asyncio.timeout(self._timeout_s):
            await response.prepare(self._http)
            await response.write_eof()
        return response

    async def start(self, route: Route) -> None:
        """Begin a stream; its headers leave with the first bytes."""
        if self._stays:
            self._head = stream_head(route)
            return
        headers = SSE_HEADERS if route.sse else {"Content-Type": JSON_TYPE}
        self._response = web.StreamResponse(headers=headers)
        await self._response.prepare(self._http)
        self._closes_by(reset=True)

    def _closes_by(self, *, reset: bool) -> None:
        """Have whatever closes an HTTP/1.0 connection reset it: a plain close ends a stream there
        as if it were whole.
        """
        transport = self._http.transport
        if self._http.version < HttpVersion11 and transport is not None:
            linger = struct.pack("ii", reset, 0)
            connected = transport.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def go_on(self) -> None:
        """Continue a stream of which a part was written, over a connection that stays open."""
        self.began_reply = True
        self._http.writer.output_size += 1  # what fails from here on finds a begun reply

    def free(self) -> asyncio.WriteTransport | None:
        """Return the connection for a stream's next chunk; `None` = more is to leave before."""
        transport = self._http.transport
        free = self._stays and not self._head and takes_at_once(transport, 0)
        return transport if free else None

    def _put(self, data: bytes) -> None:
        transport, self._head = self._http.transport, b""
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client closed its connection before it had its reply")
        transport.write(data)
        self._http.writer.output_size += len(data)  # what fails from here on finds a begun reply

    async def write(self, data: bytes) -> None:
        """Write what is not yet the reply: the opening, a keep-alive."""
        if self._stays:
            if data:
                await self._taken(b"%b%x\r\n%b\r\n" % (self._head, len(data), data))
            return
        async with asyncio.timeout(self._timeout_s):
            await self._response.write(data)

    async def _taken(self, data: bytes) -> None:
        """Write to a connection that stays; returns when it has room again."""
        at_once = takes_at_once(self._http.transport, len(data))
        self._put(data)
        if not at_once:
            async with asyncio.timeout(self._timeout_s):
                await self._http.writer.drain()

    async def write_reply(self, data: bytes) -> None:
        """Write a part of the reply."""
        self.began_reply = True
        await self.write(data)

    async def finish(self, data: bytes) -> web.StreamResponse:
        """Write the reply's end, which is not empty, and end the stream."""
        self.began_reply = True
        if self._stays:
            await self._taken(b"%b%x\r\n%b\r\n0\r\n\r\n" % (self._head, len(data), data))
            return _WRITTEN
        async with asyncio.timeout(self._timeout_s):
            await self._response.write_eof(data)
        self._closes_by(reset=False)
        return self._response

    def abort(self) -> None:
        """Drop the connection with whatever is still to be sent."""
        if self._http.transport is not None:
            self._http.transport.abort()

    async def broken(self, opening: bytes, event: bytes | None) -> web.StreamResponse:
        """Tell a late failure by its event, or cut the stream where that is what is retried."""
        if event is not None:
            return await self.finish(opening + event)
        if opening:
            await self.write(opening)
        if self._http.transport is not None:
            self._http.transport.close()
        return self._response


async def _within(event: asyncio.Event, seconds: float) -> None:
    """Return when `event` is set, or after so many seconds."""
    if not event.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
