"""What the gateway adds to a model call: latency, calls per second, against a bare proxy.

Workload: append-only sessions of 16 turns, 128 sampled tokens each, JSON replies, contexts of about
2k, 16k and 64k tokens, an instant engine. Every part has its own process: the engine (any engine
over HTTP, `bridle.engines.server`), the gateway (token in, everything committed to SQLite), a bare
aiohttp proxy that passes bytes through, and the client, which is the same for all.

- `direct`: the client sends the engine the prompt's ids, as the gateway does.
- `proxy`: the same bytes through the bare proxy: the floor for any gateway in Python.
- `gateway`: the client sends messages; ids are made, kept and committed by the gateway.

    python benchmarks/gateway.py [--contexts 2000 16000 64000] [--sessions 1 32] [--fsync group]

The roots of sessions are rendered and tokenised here too (22 ms at 16k tokens, once per session):
they are in the calls per second and in the CPU time, not in the median.

Prints a table, and JSON with `--json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import uvloop
from aiohttp import web

from bridle.capture.sqlite import SqliteStore
from bridle.engines import open_engine
from bridle.engines.base import EngineInfo, GenerateChunk, GenerateRequest
from bridle.engines.server import EngineServer
from bridle.engines.tokenizer import load_tokenizer
from bridle.engines.vllm_routes import Route, call_body
from bridle.gateway.app import Gateway
from bridle.gateway.settings import GatewaySettings
from bridle.prompting.prompt import PromptIds
from bridle.prompting.renderer import load_renderer
from bridle.types import FinishReason, LogprobMode, Sampling, VersionSpan

TURNS = 16
OUTPUT_TOKENS = 128
NEW_TOKENS = 64
"""What the harness adds per turn, about."""
WORD = " alpha"


# ---- the parts, each a process


class InstantEngine:
    """Samples 127 tokens of text and the end token, at once, under any prompt."""

    def __init__(self) -> None:
        tokenizer = load_tokenizer(None)
        text = WORD * 200
        ids = tokenizer.encode(text)[: OUTPUT_TOKENS - 1]
        self._ids = np.append(ids, tokenizer.end_id).astype(np.int32)
        self._logprobs = np.full(OUTPUT_TOKENS, -0.5, dtype=np.float32)
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
        """The whole reply at once."""
        count = min(len(self._ids), request.sampling.max_tokens or OUTPUT_TOKENS)
        yield GenerateChunk(
            self._ids[:count],
            self._logprobs[:count],
            FinishReason.STOP if count == len(self._ids) else FinishReason.LENGTH,
            versions=(VersionSpan(1, 0, count),),
            prompt_ids_json=request.prompt.json(),
        )

    async def abort(self, request_id: str) -> None:
        """Nothing takes long enough."""
        del request_id

    async def health(self) -> None:
        """Always well."""

    async def aclose(self) -> None:
        """Nothing to release."""


def say(**told: str) -> None:
    """Tell the parent process where this part is."""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


async def run_engine() -> None:
    """The instant engine over HTTP."""
    async with EngineServer(InstantEngine(), tokenizer="builtin") as server:
        say(url=server.url)
        await asyncio.Event().wait()


async def run_proxy(engine: str) -> None:
    """A proxy that passes bytes through."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as client:

        async def forward(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            headers = {"Content-Type": "application/json"}
            async with client.post(engine + request.path, data=body, headers=headers) as reply:
                return web.Response(body=await reply.read(), headers=headers)

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


async def run_gateway(engine: str, data: str, fsync: str, profile: str | None) -> None:
    """The gateway, token in, on a SQLite store."""
    store = await SqliteStore.open(Path(data) / "capture.sqlite", fsync=fsync)  # type: ignore[arg-type]
    gateway = Gateway(
        engine=open_engine(engine),
        renderer=load_renderer("builtin"),
        store=store,
        settings=GatewaySettings(data_dir=Path(data)),
    )
    async with gateway:
        say(url=gateway.url, token=gateway.control_token)
        if profile is None:
            await asyncio.Event().wait()
        else:
            await profiled(profile)


async def profiled(path: str) -> None:
    """Profile until the parent closes our standard input."""
    import cProfile

    profiler = cProfile.Profile()
    profiler.enable()
    await asyncio.to_thread(sys.stdin.read)
    profiler.disable()
    profiler.dump_stats(path)


@contextmanager
def part(*arguments: str) -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes]]]:
    """Another process of this file, until the `with` ends."""
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{arguments[0]} did not start")
        yield json.loads(line), process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        if "--profile" in arguments:
            process.wait(20)
        process.terminate()
        process.wait(10)


# ---- the client


@dataclass
class Measured:
    """One way, one context, one number of sessions."""

    way: str
    context: int
    sessions: int
    latencies_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0
    disk_bytes: int = 0

    @property
    def p50_ms(self) -> float:
        """Median latency of a call."""
        return statistics.median(self.latencies_ms)

    @property
    def calls_per_s(self) -> float:
        """Calls of all sessions together."""
        return len(self.latencies_ms) / self.seconds


Row = dict[str, float | int | str]
Post = Callable[[bytes], Awaitable[bytes]]
Bodies = Generator[bytes, bytes, None]


@dataclass(frozen=True)
class Where:
    """Where the parts listen."""

    engine: str
    proxy: str
    gateway: str
    token: str
    pids: dict[str, int]
    """Process of each way; for `direct`, the engine."""
    data: Path


def first_tokens(context: int) -> int:
    """Tokens that a session begins with, so that its mean context is about `context`."""
    return max(16, context - TURNS * (OUTPUT_TOKENS + NEW_TOKENS) // 2)


def chat_bodies(context: int) -> Bodies:
    """Bodies of one session, growing by the reply that was sent in and a new user message."""
    # No two sessions begin alike, or the tokenizer would remember the text.
    opening = f"Go {time.perf_counter_ns()}." + WORD * first_tokens(context)
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "You are a careful agent."},
        {"role": "user", "content": opening},
    ]
    for turn in range(TURNS):
        reply = yield orjson.dumps({"model": "m", "messages": messages})
        if turn + 1 < TURNS:
            message = orjson.loads(reply)["choices"][0]["message"]
            messages += [message, {"role": "user", "content": f"Turn {turn}." + WORD * NEW_TOKENS}]


def direct_bodies(context: int) -> Bodies:
    """Bodies as the gateway sends them to the engine, of the same lengths in tokens."""
    prompt = PromptIds.root(np.full(max(32, first_tokens(context)), 300, dtype=np.int32))
    for turn in range(TURNS):
        request = GenerateRequest(
            f"r-{turn}",
            prompt,
            Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4096),
            session_id="s-0123456789abcdef",
        )
        yield call_body(Route.CHAT, request, "instant", room=100_000, token_in=True)
        output = np.full(OUTPUT_TOKENS, 301, dtype=np.int32)
        prompt = prompt.extend(output, np.full(NEW_TOKENS + 8, 302, dtype=np.int32))


async def drive(bodies: Bodies, post: Post, measured: Measured) -> None:
    """Play one session; each call's latency is from its first byte to its last."""
    body = next(bodies)
    while True:
        started = time.perf_counter()
        reply = await post(body)
        measured.latencies_ms.append((time.perf_counter() - started) * 1e3)
        try:
            body = bodies.send(reply)
        except StopIteration:
            return


async def play(way: str, context: int, sessions: int, repeat: int, where: Where) -> Measured:
    """Play `repeat` rounds of `sessions` sessions at once."""
    measured = Measured(way, context, sessions)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as client:
        for _ in range(repeat):
            made = [await open_way(client, way, context, where) for _ in range(sessions)]
            started = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for bodies, post in made:
                    group.create_task(drive(bodies, post, measured))
            measured.seconds += time.perf_counter() - started
    return measured


async def open_way(
    client: aiohttp.ClientSession, way: str, context: int, where: Where
) -> tuple[Bodies, Post]:
    """A new session's bodies, and how they are sent."""
    headers = {"Content-Type": "application/json"}
    if way == "gateway":
        opening = {"Authorization": f"Bearer {where.token}"}
        async with client.post(f"{where.gateway}/sessions", data=b"{}", headers=opening) as reply:
            opened = orjson.loads(await reply.read())
        headers["Authorization"] = f"Bearer {opened['key']}"
        url = opened["base_url"]["openai"] + "/chat/completions"
        bodies = chat_bodies(context)
    else:
        url = (where.engine if way == "direct" else where.proxy) + "/v1/chat/completions"
        bodies = direct_bodies(context)

    async def post(body: bytes) -> bytes:
        async with client.post(url, data=body, headers=headers) as reply:
            raw = await reply.read()
            if reply.status != 200:
                raise SystemExit(f"{way}: {reply.status} {raw[:300]!r}")
            return raw

    return bodies, post


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run_all(options: argparse.Namespace, where: Where) -> list[Measured]:
    """Measure every way, context and number of sessions; a first round of each is thrown away."""
    results = []
    for context in options.contexts:
        for sessions in options.sessions:
            for way in options.ways:
                repeat = max(1, options.calls // (TURNS * sessions))
                await play(way, context, sessions, 1, where)
                cpu, disk = cpu_seconds(where.pids[way]), disk_bytes(where.data)
                measured = await play(way, context, sessions, repeat, where)
                measured.cpu_s = cpu_seconds(where.pids[way]) - cpu
                if way == "gateway":
                    measured.disk_bytes = disk_bytes(where.data) - disk
                results.append(measured)
    return results


def disk_bytes(folder: Path) -> int:
    """Size of a folder's files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def report(results: list[Measured]) -> list[Row]:
    """Rows of the table: each way beside the direct call of its context and sessions."""
    direct = {(one.context, one.sessions): one for one in results if one.way == "direct"}
    floor = {(one.context, one.sessions): one for one in results if one.way == "proxy"}
    rows: list[Row] = []
    for one in results:
        place = one.context, one.sessions
        calls = len(one.latencies_ms)
        rows.append(
            {
                "way": one.way,
                "context": one.context,
                "sessions": one.sessions,
                "p50_ms": round(one.p50_ms, 3),
                "added_p50_ms": round(one.p50_ms - direct[place].p50_ms, 3),
                "calls_per_s": round(one.calls_per_s),
                "of_floor": round(one.calls_per_s / floor[place].calls_per_s, 2),
                "cpu_s_per_1000": round(1000 * one.cpu_s / calls, 2),
                "disk_kib_per_session": round(one.disk_bytes / 1024 / (calls / TURNS)),
            }
        )
    return rows


def show(rows: list[Row]) -> None:
    """Print the rows as a table."""
    names = list(rows[0])
    lines = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(cells) + "\n")


def main() -> None:
    """Measure, or be one of the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("engine", "proxy", "gateway"))
    parser.add_argument("--contexts", type=int, nargs="+", default=[2_000, 16_000, 64_000])
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--ways", nargs="+", default=["direct", "proxy", "gateway"])
    parser.add_argument("--calls", type=int, default=512, help="measured calls per row, about")
    parser.add_argument("--fsync", choices=("off", "group"), default="off")
    parser.add_argument("--profile", help="write a profile of the gateway here")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="take precedence over all else (root), if others work",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine")
    parser.add_argument("--data")
    options = parser.parse_args()
    match options.part:
        case "engine":
            uvloop.run(run_engine())
        case "proxy":
            uvloop.run(run_proxy(options.engine))
        case "gateway":
            uvloop.run(run_gateway(options.engine, options.data, options.fsync, options.profile))
        case None:
            measure(options)


def measure(options: argparse.Namespace) -> None:
    """Start the parts, measure, report."""
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))  # the parts inherit it
    with tempfile.TemporaryDirectory() as data, ExitStack() as stack:
        engine, sampling = stack.enter_context(part("engine"))
        proxy, proxying = stack.enter_context(part("proxy", "--engine", engine["url"]))
        extra = ("--profile", options.profile) if options.profile else ()
        arguments = ("--engine", engine["url"], "--data", data, "--fsync", options.fsync, *extra)
        gateway, serving = stack.enter_context(part("gateway", *arguments))
        where = Where(
            engine["url"],
            proxy["url"],
            gateway["url"],
            gateway["token"],
            pids={"direct": sampling.pid, "proxy": proxying.pid, "gateway": serving.pid},
            data=Path(data),
        )
        rows = report(uvloop.run(run_all(options, where)))
    if options.json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    else:
        show(rows)


if __name__ == "__main__":
    main()
