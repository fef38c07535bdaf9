"""What the gateway adds to a model call: latency, calls per second, CPU, against a bare proxy.

Workload: append-only sessions of 16 turns, 128 sampled tokens, JSON replies, an instant engine.
Client, engine, proxy and gateway have a process each (`gateway_parts`). What is measured are the
turns that extend; a session's first call, which renders and tokenises its whole context, is made
before the clock starts and has a column of its own.

- `direct`: the client sends the engine the bytes that the gateway would send it.
- `proxy`: the same bytes through bare aiohttp: the floor for any gateway in Python.
- `chat`, `responses`, `anthropic`, `google`: the client sends messages in that dialect; the gateway
  makes ids of them, keeps them and commits to SQLite.
- `text`: as `chat`, but the engine gets the messages and renders them itself; replies come back
  parsed, and nothing can be trained.

    python benchmarks/gateway.py [--contexts 2000 16000 64000] [--sessions 1 32] [--rounds 5]

The ways take turns, so that what else the machine does meets all of them; each number is the median
over the rounds, each ratio the median of the rounds' ratios. CPU is that of the measured process
alone (of the engine for `direct`), and moves least on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import gateway_parts as parts
import numpy as np
import orjson
import uvloop

from bridle.engines.ids import ids_json
from bridle.engines.vllm_routes import Route
from bridle.prompting.prompt import PromptIds

TURNS = 16
NEW_TOKENS = 64
"""What the harness adds per turn, about."""

Body = bytes
Bodies = Generator[Body, bytes, None]
Row = dict[str, float | int | str]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def part(*arguments: str) -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes]]]:
    """Another process of this file, until the `with` ends."""
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        env=ENVIRONMENT,
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


@dataclass(frozen=True)
class Served:
    """A gateway that listens."""

    url: str
    token: str
    pids: list[int]
    """Of all its processes."""


@contextmanager
def gateway(engine: str, data: Path, options: argparse.Namespace) -> Iterator[Served]:
    """A gateway before `engine`: one process with its profile, or as the command line has it."""
    data.mkdir()
    if options.workers == 1:
        extra = ("--profile", options.profile) if options.profile else ()
        own = ("--engine", engine, "--data", str(data), "--fsync", options.fsync)
        with part("gateway", *own, *extra) as (told, process):
            yield Served(told["url"], told["token"], [process.pid])
        return
    command = [
        *(sys.executable, "-m", "bridle.cli", "gateway", "--port", "0", "--tokenizer", "builtin"),
        *("--engine", engine, "--data", str(data), "--workers", str(options.workers), "--json"),
        *(("--fsync",) if options.fsync == "group" else ()),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        token = Path(said["control_token"]).read_text().strip()
        yield Served(said["url"], token, [process.pid, *map(int, children)])
        process.terminate()


# ---- what sessions send


def first_tokens(context: int) -> int:
    """Tokens that a session begins with, so that its mean context is about `context`."""
    return max(16, context - TURNS * (parts.OUTPUT_TOKENS + NEW_TOKENS) // 2)


def growing(before: bytes, after: bytes, items: list[bytes], size: int) -> Iterator[bytes]:
    """JSON of an array that grows by what is put into `items`, `size` times."""
    inside = b""
    for _ in range(size):
        inside = b",".join([inside, *items] if inside else items)
        items.clear()
        yield b"".join((before, inside, after))


def engine_bodies(context: int) -> Bodies:
    """Bodies as the gateway sends them to the engine, of the same lengths in tokens."""
    call = parts.engine_call(Route.GENERATE, PromptIds.root(np.zeros(1, np.int32)))
    before, _, after = call.rpartition(b"[0]")
    seed = time.perf_counter_ns()
    ids = np.random.default_rng(seed).integers(300, 1500, first_tokens(context))
    items = [ids_json(ids.astype(np.int32))[1:-1]]
    for body in growing(before + b"[", b"]" + after, items, TURNS):
        yield body
        items.append(b",".join([b"1234"] * (parts.OUTPUT_TOKENS + NEW_TOKENS + 8)))


def dialect_bodies(way: str, context: int, tools: int) -> Bodies:
    """Bodies of one session, growing by the reply that was sent in and a new user message."""
    seed = time.perf_counter_ns()
    # No two sessions begin alike, or the tokenizer would remember the text.
    opening = f"Go {seed}." + parts.words(first_tokens(context), seed)
    instruction = "You are a careful agent."
    items: list[bytes] = []
    if way in {"chat", "text"}:
        items.append(orjson.dumps({"role": "system", "content": instruction}))
    chat = (b'{"model":"m",' + parts.tool_list(tools) + b'"messages":[', b"]}")
    before, after = {
        "chat": chat,
        "text": chat,
        "responses": (b'{"model":"m","instructions":"%b","input":[', b"]}"),
        "anthropic": (b'{"model":"m","max_tokens":4096,"system":"%b","messages":[', b"]}"),
        "google": (b'{"systemInstruction":{"parts":[{"text":"%b"}]},"contents":[', b"]}"),
    }[way]
    items.append(user_message(way, opening))
    before = before.replace(b"%b", instruction.encode())
    for turn, body in enumerate(growing(before, after, items, TURNS)):
        reply = yield body
        items += assistant_messages(way, orjson.loads(reply))
        items.append(user_message(way, f"Turn {turn}." + parts.words(NEW_TOKENS, turn)))


def user_message(way: str, text: str) -> bytes:
    """A user's message in a dialect."""
    key, value = ("parts", [{"text": text}]) if way == "google" else ("content", text)
    return orjson.dumps({"role": "user", key: value})


def assistant_messages(way: str, reply: dict[str, Any]) -> list[bytes]:
    """A reply as a harness sends it back."""
    match way:
        case "chat" | "text":
            found = [reply["choices"][0]["message"]]
        case "responses":
            found = reply["output"]
        case "anthropic":
            found = [{"role": "assistant", "content": reply["content"]}]
        case _:
            found = [reply["candidates"][0]["content"]]
    return [orjson.dumps(message) for message in found]


PATHS = {
    "chat": ("openai", "/chat/completions"),
    "text": ("openai", "/chat/completions"),
    "responses": ("openai", "/responses"),
    "anthropic": ("anthropic", "/v1/messages"),
    "google": ("google", "/v1beta/models/m:generateContent"),
}


# ---- the client


@dataclass
class Measured:
    """One round of one way, one context, one number of sessions."""

    latencies_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0
    root_cpu_s: float = 0.0
    """CPU of the sessions' first calls."""
    roots: int = 0
    disk_bytes: int = 0

    @property
    def p50_ms(self) -> float:
        """Median latency of a call."""
        return statistics.median(self.latencies_ms)

    @property
    def calls_per_s(self) -> float:
        """Calls of all sessions together."""
        return len(self.latencies_ms) / self.seconds

    @property
    def cpu_ms(self) -> float:
        """CPU per call."""
        return 1000 * self.cpu_s / len(self.latencies_ms)


@dataclass(frozen=True)
class Where:
    """Where the parts listen."""

    engine: str
    proxy: str
    gateway: str
    text: str | None
    """The gateway of the way `text`, if it is asked for."""
    tokens: dict[str, str]
    """The control token of each gateway."""
    pids: dict[str, list[int]]
    """Processes of each part: engine, proxy, gateway, text."""
    data: Path
    tools: int
    """How many tools a request of the way `chat` shows."""

    def server(self, way: str) -> str:
        """Where a way's calls go."""
        others = {"direct": self.engine, "proxy": self.proxy, "text": self.text}
        return others.get(way, self.gateway) or self.gateway

    def cpu_seconds(self, way: str) -> float:
        """CPU time of the measured processes so far."""
        part = {"direct": "engine", "proxy": "proxy", "text": "text"}.get(way, "gateway")
        return sum(map(parts.cpu_seconds, self.pids[part]))


class Player:
    """One session over one connection."""

    def __init__(self, way: str, context: int, where: Where) -> None:
        self._way = way
        self._where = where
        if way in PATHS:
            bodies = dialect_bodies(way, context, where.tools)
        else:
            bodies = engine_bodies(context)
        self._bodies = bodies
        self._body: bytes | None = next(bodies)

    async def __aenter__(self) -> Self:
        where = self._where
        server = where.server(self._way)
        target, key = server + Route.GENERATE.path, "none"
        if self._way in PATHS:
            opened = parts.open_session(server, where.tokens[server])
            family, path = PATHS[self._way]
            target, key = opened["base_url"][family] + path, opened["key"]
        self._head, url = post_head(target, key), urlsplit(target)
        loop = asyncio.get_running_loop()
        _, self._caller = await loop.create_connection(
            parts.Caller, str(url.hostname), url.port or 80
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._caller.transport.close()

    async def turn(self) -> float:
        """One call; returns its latency in ms, from the first byte sent to the last received."""
        assert self._body is not None
        started = time.perf_counter()
        reply = await self._caller.post(self._head, self._body)
        ended = time.perf_counter()
        try:
            self._body = self._bodies.send(reply)
        except StopIteration:
            self._body = None
        return (ended - started) * 1e3

    async def rest(self, measured: Measured) -> None:
        """All calls after the first."""
        for _ in range(TURNS - 1):
            measured.latencies_ms.append(await self.turn())


def post_head(target: str, key: str) -> bytes:
    """The head of a POST, up to the length of its body."""
    url = urlsplit(target)
    return (
        f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {key}\r\n"
        "Content-Type: application/json\r\nContent-Length: "
    ).encode()


async def play(way: str, context: int, sessions: int, repeat: int, where: Where) -> Measured:
    """Play `repeat` times `sessions` sessions at once."""
    measured = Measured()
    for _ in range(repeat):
        async with contextlib.AsyncExitStack() as stack:
            before = where.cpu_seconds(way)
            players = [
                await stack.enter_async_context(Player(way, context, where))
                for _ in range(sessions)
            ]
            async with asyncio.TaskGroup() as group:
                for player in players:
                    group.create_task(player.turn())
            warm, started = where.cpu_seconds(way), time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for player in players:
                    group.create_task(player.rest(measured))
            measured.seconds += time.perf_counter() - started
            measured.cpu_s += where.cpu_seconds(way) - warm
            measured.root_cpu_s += warm - before
            measured.roots += sessions
    return measured


async def run_all(options: argparse.Namespace, where: Where) -> list[Row]:
    """Measure every way, context and number of sessions; the first round is thrown away."""
    rows = []
    for context in options.contexts:
        for sessions in options.sessions:
            repeat = max(1, options.calls // ((TURNS - 1) * sessions))
            rounds: dict[str, list[Measured]] = {way: [] for way in options.ways}
            for number in range(options.rounds + 1):
                for way in options.ways:
                    disk = parts.disk_bytes(where.data)
                    measured = await play(way, context, sessions, repeat, where)
                    measured.disk_bytes = parts.disk_bytes(where.data) - disk
                    if number:
                        rounds[way].append(measured)
            rows += [row(way, context, sessions, rounds) for way in options.ways]
    return rows


def row(way: str, context: int, sessions: int, rounds: dict[str, list[Measured]]) -> Row:
    """One line of the table."""
    mine, floor, direct = rounds[way], rounds["proxy"], rounds["direct"]
    pairs = list(zip(mine, floor, strict=True))
    added = [one.p50_ms - other.p50_ms for one, other in zip(mine, direct, strict=True)]
    median = statistics.median
    return {
        "way": way,
        "context": context,
        "sessions": sessions,
        "p50_ms": round(median(one.p50_ms for one in mine), 3),
        "added_p50_ms": round(median(added), 3),
        "calls_per_s": round(median(one.calls_per_s for one in mine)),
        "of_floor": round(median(one.calls_per_s / other.calls_per_s for one, other in pairs), 2),
        "cpu_ms": round(median(one.cpu_ms for one in mine), 3),
        "cpu_of_floor": round(median(one.cpu_ms / other.cpu_ms for one, other in pairs), 2),
        "root_cpu_ms": round(1000 * median(one.root_cpu_s / one.roots for one in mine), 1),
        "kib_per_session": round(median(one.disk_bytes / 1024 / one.roots for one in mine)),
    }


def show(rows: list[Row]) -> None:
    """Print the rows as a table."""
    names = list(rows[0])
    lines = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(cells) + "\n")


def check(where: Where) -> None:
    """Refuse numbers of calls that were not what they should be: each turn extends its parent."""
    for gateway, token in where.tokens.items():
        check_one(gateway, token)


def check_one(gateway: str, token: str) -> None:
    """Refuse the numbers of one gateway."""
    connection = http.client.HTTPConnection(urlsplit(gateway).netloc)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
    told = connection.getresponse().read().decode()
    connection.close()
    numbers = dict(line.rsplit(" ", 1) for line in told.splitlines() if line[:1] != "#")
    roots = float(numbers.get('bridle_placements_total{extended="False",kind="root"}', 0))
    extended = float(numbers.get('bridle_placements_total{extended="True",kind="child"}', 0))
    if float(numbers["bridle_prompt_breaks_total"]) or extended != roots * (TURNS - 1):
        raise SystemExit(f"not what was to be measured:\n{told}")


def main() -> None:
    """Measure, or be one of the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("engine", "proxy", "gateway"))
    parser.add_argument("--contexts", type=int, nargs="+", default=[2_000, 16_000, 64_000])
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--ways", nargs="+", default=["chat"], choices=list(PATHS))
    parser.add_argument(
        "--workers", type=int, default=1, help="processes of `bridle gateway --workers`"
    )
    parser.add_argument("--tools", type=int, default=0, help="tools that `chat` shows")
    parser.add_argument("--calls", type=int, default=480, help="calls per way and round, about")
    parser.add_argument("--rounds", type=int, default=5)
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
    options.ways = ["direct", "proxy", *options.ways]
    match options.part:
        case "engine":
            uvloop.run(parts.run_engine())
        case "proxy":
            uvloop.run(parts.run_proxy(options.engine))
        case "gateway":
            uvloop.run(
                parts.run_gateway(options.engine, options.data, options.fsync, options.profile)
            )
        case None:
            measure(options)


def measure(options: argparse.Namespace) -> None:
    """Start the parts, measure, report."""
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))  # the parts inherit it
    with tempfile.TemporaryDirectory() as data, ExitStack() as stack:
        engine, sampling = stack.enter_context(part("engine"))
        proxy, proxying = stack.enter_context(part("proxy", "--engine", engine["url"]))
        served = stack.enter_context(gateway(engine["url"], Path(data) / "chat", options))
        text = None
        if "text" in options.ways:
            own = f"openai:{engine['url']}/v1#instant"
            text = stack.enter_context(gateway(own, Path(data) / "text", options))
        where = Where(
            engine["url"],
            proxy["url"],
            served.url,
            None if text is None else text.url,
            {one.url: one.token for one in (served, text) if one is not None},
            pids={
                "engine": [sampling.pid],
                "proxy": [proxying.pid],
                "gateway": served.pids,
                "text": [] if text is None else text.pids,
            },
            data=Path(data),
            tools=options.tools,
        )
        rows = uvloop.run(run_all(options, where))
        check(where)
    if options.json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    else:
        show(rows)


if __name__ == "__main__":
    main()
