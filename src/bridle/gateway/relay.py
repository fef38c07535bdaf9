"""The reply on the wire: one JSON body, or a stream that is kept alive while the model thinks.

A stream's headers leave with the first sampled token or after a while; from there the encoder's
keep-alives fill the silence. A live reply leaves as it becomes certain, each client at its own
pace; what is left of it, or all of it, is written when its exchange is committed, and the last
event only then (law 4). Whether the client got all of it is told to `Deliveries`, whatever happens.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from bridle.dialects.base import Route, StreamEncoder, WireFormat
from bridle.errors import RequestError
from bridle.gateway.call import Call
from bridle.gateway.live import Mark
from bridle.gateway.registry import Session
from bridle.gateway.retries import Deliveries
from bridle.gateway.settings import GatewaySettings
from bridle.types import ModelRequest

AT_ONCE: Final = 1 << 15
"""Bytes of a reply up to which it stays below what a transport holds before its writer waits
(64 KiB), whatever its head."""

JSON_TYPE: Final = "application/json"
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
    """An error in the provider's shape."""
    status, headers, body = wire.error(error)
    return json_response(body, status, headers)


class Relay:
    """Writes the replies of one gateway."""

    def __init__(self, settings: GatewaySettings, deliveries: Deliveries) -> None:
        self._settings = settings
        self._deliveries = deliveries

    async def answer(
        self,
        http: web.BaseRequest,
        session: Session,
        call: Call,
        request: ModelRequest,
        route: Route,
        wire: WireFormat,
    ) -> web.StreamResponse:
        """Wait for `call` and write its reply; the client is detached from it at the end.

        Cancellation means that the client has gone. `ConnectionError` when it went, or was too
        slow, in the middle of a reply.
        """
        writer = _Writer(http, self._settings.write_timeout_s)
        task = asyncio.current_task()
        assert task is not None
        session.replying[task] = call
        try:
            if request.stream:
                encoder = wire.stream(request, call.reply_head())
                response = await self._stream(writer, call, encoder, route, wire)
            else:
                response = await self._whole(writer, call, wire)
        except TimeoutError:
            self._deliveries.left(session, call, partly=writer.began_reply)
            writer.abort()
            raise ConnectionResetError("the client did not take its reply in time") from None
        except BaseException:
            self._deliveries.left(session, call, partly=writer.began_reply)
            raise
        else:
            if call.error is None:
                self._deliveries.received(session, call)
            else:
                self._deliveries.refused(session, call, call.error)
        finally:
            del session.replying[task]
        return response

    async def _whole(self, writer: _Writer, call: Call, wire: WireFormat) -> web.StreamResponse:
        await call.done.wait()
        if call.error is not None:
            return refusal(wire, call.error)
        return await writer.whole(json_response(call.answered().body))

    async def _stream(
        self, writer: _Writer, call: Call, encoder: StreamEncoder, route: Route, wire: WireFormat
    ) -> web.StreamResponse:
        await _within(call.began, self._settings.headers_after_s)
        if call.error is not None and not wire.refuses_in_stream(call.error):
            return refusal(wire, call.error)
        await writer.start(SSE_HEADERS if route.sse else {"Content-Type": JSON_TYPE})
        opening = await self._until_done(writer, call, encoder)
        if call.error is not None:
            return await writer.broken(opening, encoder.error(call.error))
        answer = call.answered()
        before, last = encoder.close(answer.reply, answer.usage)
        return await writer.finish(opening + before + last)

    async def _until_done(self, writer: _Writer, call: Call, encoder: StreamEncoder) -> bytes:
        """Write what is certain as it comes, and keep-alives; returns the opening if it is left."""
        clock, silence = asyncio.get_running_loop().time, self._settings.keepalive_s
        opening, mark, silent_until = encoder.open(), Mark(), clock()
        while not call.done.is_set():
            live, pieces = call.live, b""
            if live is not None:
                pieces, mark = live.after(mark, encoder)
            if pieces and live is not None:
                live.note(mark)
                await writer.write_reply(opening + pieces)
            elif clock() >= silent_until:
                await writer.write(opening or encoder.keepalive())
            else:
                await _within(_news(call), silent_until - clock())
                continue
            opening, silent_until = b"", clock() + silence
        return opening


class _Writer:
    """One response, and whether some of the reply has left."""

    def __init__(self, http: web.BaseRequest, timeout_s: float) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._response = web.StreamResponse()
        self.began_reply = False

    async def whole(self, response: web.Response) -> web.Response:
        """Write a whole reply; returns when the connection has accepted all of it."""
        self.began_reply = True
        if self._takes_at_once(response.content_length or 0):
            await self._send(response)
        else:
            async with asyncio.timeout(self._timeout_s):
                await self._send(response)
        return response

    async def _send(self, response: web.Response) -> None:
        await response.prepare(self._http)
        await response.write_eof()

    def _takes_at_once(self, size: int) -> bool:
        """Whether the connection has room for so many bytes, so that nothing waits."""
        transport = self._http.transport
        if transport is None or size > AT_ONCE:
            return False
        return transport.get_write_buffer_size() == 0

    async def start(self, headers: dict[str, str]) -> None:
        """Begin a stream; its headers leave with the first bytes."""
        self._response.headers.update(headers)
        await self._response.prepare(self._http)

    async def write(self, data: bytes) -> None:
        """Write what is not yet the reply: the opening, a keep-alive."""
        if self._takes_at_once(len(data)):
            await self._response.write(data)
            return
        async with asyncio.timeout(self._timeout_s):
            await self._response.write(data)

    async def write_reply(self, data: bytes) -> None:
        """Write a part of the reply."""
        self.began_reply = True
        await self.write(data)

    async def finish(self, data: bytes) -> web.StreamResponse:
        """Write the reply and end the stream."""
        self.began_reply = True
        async with asyncio.timeout(self._timeout_s):
            await self._response.write_eof(data)
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


def _news(call: Call) -> asyncio.Event:
    """What tells that there may be more of the reply."""
    if not call.began.is_set():
        return call.began
    return call.done if call.live is None else call.live.news


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Whether `event` is set within so many seconds."""
    if event.is_set():
        return True
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
