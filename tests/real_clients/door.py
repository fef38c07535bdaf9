"""A connection that breaks: stands before the gateway and cuts replies in the middle.

It passes bytes on as they are. A `Cut` names the request by a text in its body, and the place: at
the first block or item of the streamed reply, before it is complete or right after. A reply that is
not streamed is cut in half. Each cut is made once; `Door.made` tells which were, and `Door.waits`
how long a client waited after each 429 before it asked again.
"""

import asyncio
import contextlib
import re
import time
from dataclasses import dataclass
from typing import Literal

from aiohttp import web

from bridle.dialects import DIALECTS
from bridle.errors import RequestError
from bridle.types import Dialect

COMPLETE = {
    "messages": rb"event: content_block_stop\n",
    "chat/completions": rb'"tool_calls":|"finish_reason":"',
    "responses": rb"event: response\.output_item\.done\n",
    "enerateContent": rb'"parts":\[\{',
}
"""End of a path -> what tells that a block, call or item is complete; it stands in its event."""

SPOKEN = {
    "/messages": Dialect.ANTHROPIC,
    "/chat/completions": Dialect.OPENAI_CHAT,
    "/responses": Dialect.OPENAI_RESPONSES,
    "enerateContent": Dialect.GOOGLE,
}

REQUEST = re.compile(rb"POST \S*?(%s)[? ]" % "|".join(COMPLETE).encode())
END = re.compile(rb"\r?\n\r?\n")


@dataclass(frozen=True)
class Cut:
    """One broken reply."""

    request_has: bytes
    """The first request whose body holds this, and that asks for a reply."""
    point: Literal["before", "after"]


def cut_position(reply: bytes, path: str, point: str) -> int | None:
    """Return how many bytes of the partial `reply` get through; `None` = not known yet."""
    head = reply.find(b"\r\n\r\n") + 4
    if head < 4:
        return None
    if b"text/event-stream" not in reply[:head]:
        length = re.search(rb"Content-Length: (\d+)", reply[:head])
        whole = head + int(length[1]) if length else None
        return None if whole is None or len(reply) < whole else head + (whole - head) // 2
    mark = re.compile(COMPLETE[path]).search(reply, head)
    end = END.search(reply, mark.end()) if mark else None
    if mark is None or end is None:
        return None
    if point == "after":
        return end.end()
    # Google's events are complete in themselves: theirs is broken off inside.
    start = reply.rfind(b"\n\n", head, mark.start())
    return mark.start() if path == "enerateContent" or start < 0 else start + 2


class Door:
    """Listens while its `async with` lasts; `url` says where. Set `upstream` to the real port."""

    def __init__(self, *cuts: Cut) -> None:
        self.upstream = 0
        self.made: list[Cut] = []
        self.waits: list[float] = []
        """Seconds."""
        self.refused = 0
        """Answers of status 400."""
        self._refused_at: float | None = None
        self._due = list(cuts)
        self._writers: set[asyncio.StreamWriter] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._idle.wait()

    async def _connected(self, reader, writer):
        with contextlib.suppress(OSError):
            there = await asyncio.open_connection("127.0.0.1", self.upstream)
            both = {writer, there[1]}
            self._writers |= both
            self._idle.clear()
            try:
                await _Connection(self, (reader, writer), there).run()
            finally:
                self._writers -= both
                if not self._writers:
                    self._idle.set()

    def asked(self) -> None:
        """A client asks for a reply."""
        if self._refused_at is not None:
            self.waits.append(time.monotonic() - self._refused_at)
            self._refused_at = None

    def answered(self, reply: bytes) -> None:
        """Bytes of an answer, its head if it is the first."""
        self.refused += reply.startswith(b"HTTP/1.1 400")
        if reply.startswith(b"HTTP/1.1 429"):
            self._refused_at = time.monotonic()

    def cut_for(self, body: bytes) -> Cut | None:
        """The cut that a request with this much of its body is due."""
        cut = next((cut for cut in self._due if cut.request_has in body), None)
        if cut is not None:
            self._due.remove(cut)
        return cut


class _Connection:
    """One connection of a client, and the one to the gateway that serves it."""

    def __init__(self, door, here, there):
        self._door, self._here, self._there = door, here, there
        self._request, self._reply = b"", b""
        self._path = ""
        self._cut: Cut | None = None

    async def run(self):
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pass(self._here[0], self._there[1], self._asked))
            group.create_task(self._pass(self._there[0], self._here[1], self._answered))
        for _, writer in (self._here, self._there):
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _pass(self, reader, writer, look):
        try:
            while data := await reader.read(1 << 16):
                writer.write(look(data))
                await writer.drain()
            if writer.can_write_eof() and not writer.is_closing():
                writer.write_eof()
        except OSError:
            writer.transport.abort()

    def _asked(self, data):
        if found := REQUEST.match(data):
            self._request, self._path = b"", found[1].decode()
            self._door.asked()
        if self._path and self._cut is None:
            self._request += data
            self._cut = self._door.cut_for(self._request)
        return data

    def _answered(self, data):
        self._door.answered(data)
        if self._cut is None:
            return data
        self._reply += data
        position = cut_position(self._reply, self._path, self._cut.point)
        if position is None:
            return b""
        self._door.made.append(self._cut)
        # What is written before a close still leaves.
        self._here[1].write(self._reply[:position])
        self._here[1].close()
        self._there[1].transport.abort()
        return b""


class Nowhere:
    """Stands in the gateway's place: every call of the model gets its dialect's own 404."""

    def __init__(self) -> None:
        self.upstream = 0
        self.asked = 0
        """Calls of the model."""

    async def __aenter__(self):
        runner = self._runner = web.ServerRunner(web.Server(self._answer), shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def _answer(self, request):
        await request.read()
        dialect = next((d for end, d in SPOKEN.items() if end in request.path), None)
        if request.method != "POST" or dialect is None:
            return web.Response(status=404)
        self.asked += 1
        error = RequestError("no such model here", status=404, code="not_found", param="model")
        status, headers, body = DIALECTS[dialect].error(error)
        return web.Response(status=status, headers=headers, body=body)
