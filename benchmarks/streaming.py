"""Time to the first token: through the gateway, live, against the engine itself.

The engine plays a script at a fixed pace behind vLLM's HTTP shape; client, engine and gateway have
a process each. Every stream is the second turn of a session of its own (Chat Completions, about
`--context` tokens), so the gateway extends, reads, streams live and commits to SQLite. `direct`
sends the engine the ids of the same conversation. With more than one stream, new ones begin evenly,
as fast as old ones end, so that so many are open all the time; only those are measured that begin
when all are open (`--burst`: all begin in one moment). Both ways take turns in one run; the number
is the ratio.

    python benchmarks/streaming.py [--streams 1 256] [--rounds 3] [--pace 0.5]

The budget is 1.1 times the direct time plus 5 ms.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
import uvloop
from gateway_parts import CHUNKS_END, open_session, words

from bridle.engines.base import GenerateRequest
from bridle.engines.vllm_routes import VllmRoute, call_parts
from bridle.prompting.prompt import PromptIds
from bridle.prompting.renderer import load_renderer
from bridle.scripted.engine import ScriptedEngine
from bridle.scripted.script import make_script
from bridle.scripted.server import EngineServer
from bridle.types import Message, Role, Sampling, TextPart

TEXT = " the" * 19
TOKENS = 20
"""Of `TEXT` with the end token."""
CONTROL = "a-control-token-of-a-benchmark"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


# ---- the parts


async def serve_engine(pace_s: float, prefill_s: float) -> None:
    """The paced engine, until stdin ends."""
    turn = {"content": TEXT, "pace_s": pace_s, "delay_s": prefill_s}
    script = make_script({"conversations": [{"turns": [{"content": "ok"}, turn]}]}, "benchmark")
    async with EngineServer(ScriptedEngine(script)) as up:
        say(url=up.url)
        await asyncio.to_thread(sys.stdin.read)


@contextmanager
def gateway(engine: str, data: str, workers: int) -> Iterator[str]:
    """A live gateway on that engine, as the command line has it; its URL."""
    command = [
        *(sys.executable, "-m", "bridle.cli", "gateway", "--port", "0", "--tokenizer", "builtin"),
        *("--engine", engine, "--data", data, "--stream", "live"),
        *("--workers", str(workers), "--json"),
    ]
    environment = {**ENVIRONMENT, "BRIDLE_CONTROL_TOKEN": CONTROL}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def say(**result: str) -> None:
    """Tell the client where we are."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


@contextmanager
def part(*arguments: str) -> Iterator[str]:
    """Another process of this file; its URL."""
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.stdin.close()
        process.wait(20)


# ---- the client


def stream_body(messages: list[Any]) -> bytes:
    """Request that asks for a stream."""
    return json.dumps({"model": "m", "stream": True, "messages": messages}).encode()


@dataclass
class Round:
    """One way, one number of streams."""

    first_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    """Between two pieces of a stream."""


class Reader(asyncio.Protocol):
    """A client's connection: it reads one stream at a time, and notes when its pieces came.

    A general client would take as long for a piece as the gateway does, on the same cores.
    """

    def __init__(self, sign: bytes) -> None:
        self._sign = sign
        """It stands in the piece with the first token."""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    async def post(self, request: bytes) -> tuple[float, list[float]]:
        """Send a request; return the time of its first token, and ms between its pieces."""
        self._seen, self._first, self._last, self._gaps = b"", 0.0, 0.0, list[float]()
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended
        assert self._first, "no token came"
        return self._first, self._gaps

    def data_received(self, data: bytes) -> None:
        """Note a piece; the last one ends in the empty chunk."""
        arrived = time.perf_counter()
        self._seen = (self._seen[-len(CHUNKS_END) :] if self._first else self._seen) + data
        if self._first:
            self._gaps.append((arrived - self._last) * 1e3)
        elif self._sign in self._seen:
            self._first = arrived
        self._last = arrived
        if self._seen.endswith(CHUNKS_END):
            self._ended.set_result(None)
        elif not self._first and not b"HTTP/1.1 200".startswith(self._seen[:12]):
            self._ended.set_exception(SystemExit(f"{self._seen[:500]!r}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail a stream that has not ended."""
        if not self._ended.done():
            self._ended.set_exception(exc or ConnectionError("closed"))


class Client:
    """Opens streams on one way."""

    def __init__(self, way: str, urls: dict[str, str]) -> None:
        self._url = urlsplit(urls[way])
        self._way = way
        self._sign = b'"token_ids":[' if way == "direct" else b'"delta":{"content":"'
        self._idle: list[Reader] = []
        self._renderer = load_renderer("builtin")

    async def prepare(self, context: int) -> bytes:
        """Return the request of a second turn, head and body."""
        seed = time.perf_counter_ns()
        asked = f"Go {seed}." + words(context, seed)
        if self._way == "direct":
            return self._request(VllmRoute.GENERATE.path, self._engine_body(asked), "")
        session = await asyncio.to_thread(open_session, self._url.geturl(), CONTROL)
        path = urlsplit(session["base_url"]["openai"]).path + "/chat/completions"
        key = f"Authorization: Bearer {session['key']}\r\n"
        messages: list[Any] = [{"role": "user", "content": asked}]
        await self.stream(self._request(path, stream_body(messages), key))
        messages += {"role": "assistant", "content": "ok"}, {"role": "user", "content": "And then?"}
        return self._request(path, stream_body(messages), key)

    def _request(self, path: str, body: bytes, more: str) -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: {self._url.netloc}\r\n{more}"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def _engine_body(self, asked: str) -> bytes:
        result = [(Role.USER, asked), (Role.ASSISTANT, "ok"), (Role.USER, "And then?")]
        messages = [Message(role, (TextPart(text),)) for role, text in result]
        ids = self._renderer.render(messages, (), thinking=None)
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=1000)
        name = f"b-{time.perf_counter_ns()}"
        call = GenerateRequest(name, PromptIds.root(np.asarray(ids)), sampling, stream=True)
        parts = call_parts(VllmRoute.GENERATE, call, "scripted", room=1000, token_in=True)
        return b"".join(parts)

    async def stream(self, request: bytes) -> tuple[float, list[float]]:
        """One stream: ms to its first token, and ms between its pieces."""
        started = time.perf_counter()
        if self._idle:
            reader = self._idle.pop()
        else:
            _, reader = await asyncio.get_running_loop().create_connection(
                lambda: Reader(self._sign), self._url.hostname, self._url.port
            )
        first, gaps = await reader.post(request)
        self._idle.append(reader)
        return (first - started) * 1e3, gaps


async def measure_round(client: Client, streams: int, options: argparse.Namespace) -> Round:
    """`streams` open at once, for as long as it takes to measure as many."""
    measured = Round()
    lasts_s = options.pace * TOKENS + options.prefill
    alone, measured_from = streams == 1, 0 if options.burst else streams
    count = options.alone if alone else measured_from + streams
    asked = [await client.prepare(options.context) for _ in range(count)]

    async def one(number: int) -> None:
        if not (alone or options.burst):
            await asyncio.sleep(number * lasts_s / streams)
        first, gaps = await client.stream(asked[number])
        if alone or number >= measured_from:
            measured.first_ms.append(first)
            measured.gaps_ms += gaps

    if alone:
        for number in range(count):
            await one(number)
    else:
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(one(number))
    return measured


async def run_all(options: argparse.Namespace, urls: dict[str, str]) -> list[dict[str, Any]]:
    """All numbers of streams, both ways in turns."""
    rows = []
    clients = {way: Client(way, urls) for way in urls}
    for streams in options.streams:
        rounds: dict[str, list[Round]] = {way: [] for way in urls}
        for _ in range(options.rounds):
            for way, client in clients.items():
                rounds[way].append(await measure_round(client, streams, options))
        rows.append(row(streams, rounds))
    return rows


def row(streams: int, rounds: dict[str, list[Round]]) -> dict[str, Any]:
    """Medians over the rounds, and the ratio and what is added, round by round."""

    def of(way: str, share: float) -> list[float]:
        return [float(np.quantile(one.first_ms, share)) for one in rounds[way]]

    median = statistics.median
    found: dict[str, Any] = {"streams": streams}
    for name, share in (("p50", 0.5), ("p95", 0.95)):
        direct, through = of("direct", share), of("gateway", share)
        found[f"direct_{name}_ms"] = round(median(direct), 2)
        found[f"gateway_{name}_ms"] = round(median(through), 2)
        pairs = list(zip(through, direct, strict=True))
        found[f"ratio_{name}"] = round(median(one / other for one, other in pairs), 3)
        found[f"of_budget_{name}"] = round(median(a / (1.1 * b + 5) for a, b in pairs), 3)
    for way, several in rounds.items():
        gaps = [gap for one in several for gap in one.gaps_ms]
        found[f"{way}_gap_p99_ms"] = round(float(np.quantile(gaps, 0.99)), 1)
    return found


def main() -> None:
    """Measure, or be one of the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("engine",))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burst", action="store_true", help="all begin in one moment")
    parser.add_argument("--alone", type=int, default=20, help="streams one after another")
    parser.add_argument("--context", type=int, default=2_000)
    parser.add_argument("--pace", type=float, default=0.5, help="seconds per token")
    parser.add_argument("--prefill", type=float, default=0.05, help="seconds to the first token")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="take precedence over all else (root), if others work",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes of the gateway")
    options = parser.parse_args()
    if options.part == "engine":
        uvloop.run(serve_engine(options.pace, options.prefill))
    else:
        if options.realtime:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))  # the parts inherit it
        pace = ("--pace", str(options.pace), "--prefill", str(options.prefill))
        with tempfile.TemporaryDirectory() as data, ExitStack() as stack:
            engine = stack.enter_context(part("engine", *pace))
            through = stack.enter_context(gateway(engine, data, options.workers))
            rows = uvloop.run(run_all(options, {"direct": engine, "gateway": through}))
        for found in rows:
            sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
