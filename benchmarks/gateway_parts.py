"""The parts that `gateway.py` measures, each a process of its own, and the HTTP between them.

What is not measured must not be what is slow. The client and the instant engine therefore speak
just enough HTTP/1.1 (keep-alive, bodies with a length or in chunks) on bare asyncio protocols; the
proxy is aiohttp on both sides, the floor of any gateway in Python.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import orjson
from aiohttp import web

from bridle.aio import Nursery
from bridle.capture.sqlite import SqliteStore
from bridle.cli.process import long_running
from bridle.engines import open_engine
from bridle.engines.base import EngineInfo, GenerateChunk, GenerateRequest
from bridle.engines.vllm_routes import VllmRoute, call_parts
from bridle.gateway.app import GatewayServer
from bridle.gateway.settings import GatewaySettings
from bridle.prompting.prompt import PromptIds
from bridle.prompting.renderer import load_renderer
from bridle.scripted.server import EngineServer
from bridle.scripted.tokenizer import load_tokenizer
from bridle.types import FinishReason, LogprobMode, Sampling, VersionSpan

OUTPUT_TOKENS = 128
LARGE = 1024
"""Bodies of this many bytes are calls; smaller ones are the gateway's questions at its start."""

JSON_HEADERS = {"Content-Type": "application/json"}

IDS = {
    VllmRoute.CHAT.path.encode(): b'"prompt_token_ids":[',
    VllmRoute.GENERATE.path.encode(): b'"token_ids":[',
}
"""What stands before the prompt's ids in a call, by path."""

TEXT = (
    "the file holds a test that fails when two workers read one line at once so we lock it first "
    "then run make again and look at what the log says about order before any change is written"
)


def words(count: int, seed: int) -> str:
    """About `count` tokens of text; another seed gives another order of the words."""
    known = TEXT.split()
    order = np.random.default_rng(seed).integers(0, len(known), count)
    return "".join([" " + known[index] for index in order])


def tools(count: int) -> list[dict[str, Any]]:
    """So many tools of 1.6 kB each, as OpenAI Chat has them."""
    result = " ".join([TEXT] * 2)
    fields = {f"field_{n}": {"type": "string", "description": result} for n in range(3)}
    schema = {"type": "object", "properties": fields, "required": ["field_0"]}
    return [
        {
            "type": "function",
            "function": {"name": f"tool_{n}", "description": result * 2, "parameters": schema},
        }
        for n in range(count)
    ]


# ---- HTTP


CHUNKS_END = b"\r\n0\r\n\r\n"
"""Ends a chunked body; no JSON text and no event holds it."""


def in_chunks(stream: bytes) -> bytes:
    """A stream's body as servers send it: each event as a chunk of its own."""
    found = [one + b"\n\n" for one in stream.removesuffix(b"\n\n").split(b"\n\n")]
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in found) + CHUNKS_END[2:]


def one_by_one(transport: asyncio.Transport, chunks: bytes) -> None:
    """Write a chunked body, each chunk in a round of the event loop of its own."""
    if transport.is_closing():
        return  # a client may go at `[DONE]`
    size = chunks.index(b"\r\n")
    end = size + 4 + int(chunks[:size], 16)
    transport.write(chunks[:end])
    if end < len(chunks):
        asyncio.get_running_loop().call_soon(one_by_one, transport, chunks[end:])


def out_of_chunks(body: bytes) -> bytes:
    """A chunked body without its frames."""
    pieces, at = [], 0
    while size := int(body[at : (line := body.index(b"\r\n", at))], 16):
        pieces.append(body[line + 2 : line + 2 + size])
        at = line + 4 + size
    return b"".join(pieces)


class Framed(asyncio.Protocol):
    """One connection; whole messages are given to `arrived`: of a given length, or in chunks."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._wanted = 0
        self._body_from = 0
        self._chunked = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Collect one message; neither side sends a second one before it has its answer."""
        self._pieces.append(data)
        self._size += len(data)
        if not self._wanted:
            so_far = b"".join(self._pieces)
            end = so_far.find(b"\r\n\r\n") + 4
            if end < 4:
                return
            head = so_far[:end].lower()
            found = head.find(b"content-length:")
            length = int(head[found + 15 : head.index(b"\r\n", found)]) if found >= 0 else 0
            self._body_from, self._wanted = end, end + length
            self._chunked = b"\r\ntransfer-encoding: chunked" in head
        if self._chunked:
            ends = b"".join(self._pieces[-8:])[-len(CHUNKS_END) :] == CHUNKS_END
        else:
            ends = self._size >= self._wanted
        if ends:
            whole = b"".join(self._pieces)
            start, self._pieces, self._size, self._wanted = self._body_from, [], 0, 0
            body = whole[start:]
            self.arrived(whole[:start], out_of_chunks(body) if self._chunked else body)

    def arrived(self, head: bytes, body: bytes) -> None:
        """A whole message is there."""
        raise NotImplementedError


class Caller(Framed):
    """A client's connection."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: asyncio.Future[tuple[bytes, bytes]] | None = None

    async def post(self, head: bytes, body: bytes) -> bytes:
        """Send a body; returns that of the answer. `head` ends where the length is to follow."""
        self._waiting = asyncio.get_running_loop().create_future()
        self.transport.write(head + b"%d\r\n\r\n" % len(body) + body)
        answered, reply = await self._waiting
        if not answered.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{head[:60]!r}: {answered[:40]!r} {reply[:300]!r}")
        return reply

    def arrived(self, head: bytes, body: bytes) -> None:
        """The answer."""
        assert self._waiting is not None
        self._waiting.set_result((head, body))

    def connection_lost(self, exc: Exception | None) -> None:
        """No answer comes any more."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(exc or ConnectionError("closed"))


Replies = dict[tuple[bytes, bool], tuple[bytes, bytes]]
"""What stands before and behind the prompt's ids in a reply, by path and whether it streams."""


class Canned(Framed):
    """A connection to the instant engine: calls get a canned reply, all else is asked elsewhere.

    `paced` streams bring one event at a time.
    """

    def __init__(self, replies: Replies, ask: Callable[..., None], *, paced: bool) -> None:
        super().__init__()
        self._paced = paced
        self._replies = replies
        self._ask = ask

    def arrived(self, head: bytes, body: bytes) -> None:
        """Answer with the reply of the path, the call's own prompt ids in it."""
        path = head.split(b" ", 2)[1]
        if len(body) < LARGE:
            self._ask(self.transport, head.split(b" ", 1)[0].decode(), path.decode(), body)
            return
        start = body.find(IDS[path]) + len(IDS[path]) - 1
        asked_in_ids = start >= len(IDS[path]) - 1
        ids = body[start : body.index(b"]", start) + 1] if asked_in_ids else b"null"
        streams = b'"stream":true' in body[:start] if asked_in_ids else b'"stream":true' in body
        before, after = self._replies[path, streams]
        if streams:
            first, _, rest = after.partition(b"\r\n")  # of the event that holds the ids
            event = before + ids + first
            chunks = b"%x\r\n" % len(event) + event + b"\r\n" + rest
            if self._paced:
                self.transport.write(STREAM_HEAD)
                one_by_one(self.transport, chunks)
            else:
                self.transport.write(STREAM_HEAD + chunks)
        else:
            answer(self.transport, 200, before + ids + after)


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def answer(transport: asyncio.Transport, status: int, body: bytes) -> None:
    """Write an answer."""
    head = b"HTTP/1.1 %d OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    transport.write(head % (status, len(body)) + body)


# ---- asked from outside


def open_session(server: str, token: str) -> dict[str, Any]:
    """Open a session; return the gateway's reply."""
    return control(f"{server}/sessions", token, b"{}")


def end_session(server: str, token: str, session_id: str) -> None:
    """End a session, so that the gateway frees its memory."""
    control(f"{server}/sessions/{session_id}", token, method="DELETE")


def control(
    url: str, token: str, body: bytes | None = None, method: str | None = None
) -> dict[str, Any]:
    """Call a control route, over a connection of its own; return the gateway's reply."""
    headers = {"Authorization": f"Bearer {token}"}
    asked = urllib.request.Request(url, body, headers, method=method)  # noqa: S310 - loopback
    with urllib.request.urlopen(asked) as reply:  # noqa: S310 - loopback
        answered: dict[str, Any] = orjson.loads(reply.read())
    return answered


def check_extended(server: str, token: str, turns: int) -> None:
    """Refuse numbers of a gateway's calls unless all but each session's first extended a parent."""
    headers = {"Authorization": f"Bearer {token}"}
    asked = urllib.request.Request(f"{server}/metrics", headers=headers)  # noqa: S310 - loopback
    with urllib.request.urlopen(asked) as reply:  # noqa: S310 - loopback
        result = reply.read().decode()
    numbers = dict(line.rsplit(" ", 1) for line in result.splitlines() if line[:1] != "#")
    roots = float(numbers.get('bridle_placements_total{extended="False",kind="root"}', 0))
    extended = float(numbers.get('bridle_placements_total{extended="True",kind="child"}', 0))
    if float(numbers["bridle_prompt_breaks_total"]) or extended != roots * (turns - 1):
        raise SystemExit(f"not what was to be measured:\n{result}")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, all threads."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def disk_bytes(folder: Path) -> int:
    """Size of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# ---- the parts


class InstantEngine:
    """Samples 127 tokens of text and the end token, at once, under any prompt."""

    def __init__(self) -> None:
        tokenizer = load_tokenizer(None)
        ids = tokenizer.encode(words(200, seed=0))[: OUTPUT_TOKENS - 1]
        self._ids = np.append(ids, tokenizer.end_id).astype(np.int32)
        self._logprobs = (-np.random.default_rng(0).exponential(0.5, OUTPUT_TOKENS)).astype("f4")
        self._folder = str(tokenizer.folder)

    async def start(self) -> EngineInfo:
        """Nothing to start."""
        return EngineInfo(
            model="instant",
            context_length=200_000,
            logprob_mode=LogprobMode.RAW,
            token_in=True,
            version=1,
            tokenizer_dir=self._folder,
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """The whole reply at once; a stream has a chunk for each token."""
        count = min(len(self._ids), request.sampling.max_tokens or OUTPUT_TOKENS)
        size = 1 if request.stream else count
        for start in range(0, count, size):
            last = start + size == count
            finish = FinishReason.STOP if count == len(self._ids) else FinishReason.LENGTH
            yield GenerateChunk(
                self._ids[start : start + size],
                self._logprobs[start : start + size],
                finish if last else None,
                versions=(VersionSpan(1, 0, count),) if last else (),
                prompt_ids_json=None if start else request.prompt.json(),
            )

    async def abort(self, request_id: str) -> None:
        """Nothing takes long enough."""
        del request_id

    async def health(self) -> None:
        """Always well."""

    async def aclose(self) -> None:
        """Nothing to release."""


def engine_call(route: VllmRoute, prompt: PromptIds, *, stream: bool = False) -> bytes:
    """The body of a call as the gateway sends it."""
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=100_000)
    request = GenerateRequest(
        "0" * 24, prompt, sampling, session_id="s-0123456789abcdef", stream=stream
    )
    return b"".join(call_parts(route, request, "instant", room=100_000, token_in=True))


def say(**result: str) -> None:
    """Tell the parent process where this part is."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


async def canned_replies(server: str, client: aiohttp.ClientSession) -> Replies:
    """The server's own replies on two routes, whole and streamed, without the prompt's ids."""
    replies: Replies = {}
    prompt = PromptIds.root(np.arange(300, 400, dtype=np.int32))
    for route in (VllmRoute.CHAT, VllmRoute.GENERATE):
        for streams in (False, True):
            body = engine_call(route, prompt, stream=streams)
            async with client.post(server + route.path, data=body, headers=JSON_HEADERS) as reply:
                before, found, after = (await reply.read()).partition(prompt.json())
            assert found, "the reply repeats the prompt's ids"
            if streams:
                first, _, rest = after.partition(b"\n\n")
                after = first + b"\n\n\r\n" + in_chunks(rest)
            replies[route.path.encode(), streams] = before, after
    return replies


@asynccontextmanager
async def instant_engine(*, paced: bool = False) -> AsyncIterator[str]:
    """The instant engine: `EngineServer`, and before it a front that repeats the server's replies.

    Gives the front's URL. With `paced`, each event of a stream is a read of its own.
    """
    async with (
        EngineServer(InstantEngine(), tokenizer="builtin") as server,
        aiohttp.ClientSession() as client,
        Nursery(print) as nursery,
    ):
        replies = await canned_replies(server.url, client)

        async def pass_on(
            transport: asyncio.Transport, method: str, path: str, body: bytes
        ) -> None:
            url = server.url + path
            data = body or None
            async with client.request(method, url, data=data, headers=JSON_HEADERS) as reply:
                answer(transport, reply.status, await reply.read())

        def ask(*parts: Any) -> None:  # noqa: ANN401 - `pass_on`'s own
            nursery.start(pass_on(*parts), name="pass on")

        loop = asyncio.get_running_loop()
        front = await loop.create_server(lambda: Canned(replies, ask, paced=paced), "127.0.0.1", 0)
        yield f"http://127.0.0.1:{front.sockets[0].getsockname()[1]}"
        front.close()


async def run_engine() -> None:
    """The instant engine, until this process is ended."""
    async with instant_engine() as url:
        say(url=url)
        await asyncio.Event().wait()


async def run_proxy(engine: str) -> None:
    """A proxy that passes bytes through."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as client:

        async def forward(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            url = engine + request.path
            async with client.post(url, data=body, headers=JSON_HEADERS) as reply:
                if reply.content_length is not None:
                    return web.Response(body=await reply.read(), headers=JSON_HEADERS)
                stream = web.StreamResponse(headers={"Content-Type": reply.content_type})
                await stream.prepare(request)
                async for piece in reply.content.iter_any():
                    await stream.write(piece)
                await stream.write_eof()
                return stream

        def factory(*parts: Any) -> web.BaseRequest:  # noqa: ANN401 - as aiohttp gives them
            message, payload, protocol, writer, task = parts
            loop = asyncio.get_running_loop()
            limit = 1 << 30
            return web.BaseRequest(
                message, payload, protocol, writer, task, loop, client_max_size=limit
            )

        runner = web.ServerRunner(web.Server(forward, request_factory=factory, access_log=None))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        say(url=f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()


@asynccontextmanager
async def gateway(
    engine: str, data: str, *, fsync: str = "off", stream: str = "whole"
) -> AsyncIterator[GatewayServer]:
    """A gateway on a SQLite store; token in, if the engine's URL stands alone."""
    opened = await SqliteStore.open(Path(data) / "capture.sqlite", fsync=fsync)  # type: ignore[arg-type]
    settings = GatewaySettings(
        data_dir=Path(data),
        allow_untokenized=engine.startswith("openai:"),
        stream=stream,  # type: ignore[arg-type]
    )
    renderer = load_renderer("builtin")
    async with (
        opened as store,
        GatewayServer(
            engine=open_engine(engine), renderer=renderer, store=store, settings=settings
        ) as served,
    ):
        yield served


async def run_gateway(engine: str, data: str, fsync: str, stream: str, profile: str | None) -> None:
    """A gateway, until this process is ended."""
    async with gateway(engine, data, fsync=fsync, stream=stream) as served:
        say(url=served.url, token=served.control_token)
        with long_running():  # as `bridle gateway` does
            if profile is None:
                await asyncio.Event().wait()
            else:
                await profiled(profile)


async def profiled(path: str) -> None:
    """Profile until the parent closes our standard input."""
    import cProfile

    profiler = cProfile.Profile(time.thread_time)  # waits are of no interest
    profiler.enable()
    await asyncio.to_thread(sys.stdin.read)
    profiler.disable()
    profiler.dump_stats(path)
