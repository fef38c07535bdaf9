"""Overhead of the gateway per model call: latency, calls per second, CPU, beside a bare proxy.

Workload: append-only sessions of 16 turns (`--turns`), 128 sampled tokens a turn, 30 tools of 1.6
kB, an instant engine. Client, engine, proxy and gateway have a process each (`gateway_parts`).

- `direct`: the client sends the engine the bytes that the gateway would send it.
- `proxy`: the same bytes through bare aiohttp: the floor for any gateway in Python.
- `chat`, `responses`, `anthropic`, `google`: the client sends messages in that dialect; the gateway
  makes ids of them, keeps them and commits to SQLite.
- `text`: as `chat`, in JSON only, but the engine gets the messages and renders them itself; replies
  come back parsed, and nothing can be trained.
- `litellm`: the same messages through LiteLLM's proxy, in JSON only; it records nothing.

Each dialect is measured with `--replies json`, `whole` and `live`: the two streams of the gateway.
In streams `direct` and `proxy` pass the engine's own events, one per token.

    python -m benchmarks.gateway [--ways chat anthropic] [--replies json whole live]
        [--contexts 2000 16000 64000] [--sessions 1 32 256] [--tools 30] [--rounds 5]

Latency, calls and CPU are of the turns that extend; a session's first call, which renders and
tokenises its whole context, is made before the clock starts: `root_cpu_ms`, and
`cpu_of_proxy_with_roots` counts it in. The ways take turns, so that what else the machine does
meets all of them; each number is the median over the rounds, each ratio to the proxy the median of
the rounds' ratios, with the lowest and the highest behind it. CPU is that of the measured process
alone (of the engine for `direct`), and moves least on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from benchmarks.gateway_sessions import DIALECTS, LITELLM_KEY, TURNS, Player, Way

from benchmarks import gateway_parts as parts

Row = dict[str, object]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
LITELLM = "litellm[proxy]==1.108.7"
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1073741824", "MALLOC_MMAP_THRESHOLD_": "33554432"}
"""For the engine, which is not measured. In some runs its allocator (glibc's) gave the memory of
each body back to the system: 170 page faults a call, which took 0.3 ms and were counted as latency
of the gateway."""


@contextmanager
def part(*arguments: str) -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes]]]:
    """Another process of this module, until the `with` ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gateway", *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        env=ENVIRONMENT | (KEEPS_MEMORY if "engine" in arguments[:1] else {}),
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
    """A part that listens."""

    url: str
    token: str
    """Of its control routes; empty for an engine or a proxy."""
    pids: list[int]
    """Of all its processes."""


@contextmanager
def gateway(engine: str, data: Path, stream: str, options: argparse.Namespace) -> Iterator[Served]:
    """A gateway before `engine`: one process with its profile, or as the command line has it."""
    data.mkdir()
    if options.workers == 1:
        extra = ("--profile", f"{options.profile}.{data.name}") if options.profile else ()
        own = ("--engine", engine, "--data", str(data), "--fsync", options.fsync)
        with part("gateway", *own, "--stream", stream, *extra) as (result, process):
            yield Served(result["url"], result["token"], [process.pid])
        return
    command = [
        *(sys.executable, "-m", "bridle.cli", "gateway", "--port", "0", "--tokenizer", "builtin"),
        *("--engine", engine, "--data", str(data), "--stream", stream, "--json"),
        *("--workers", str(options.workers)),
        *(("--fsync",) if options.fsync == "group" else ()),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        token = Path(said["control_token"]).read_text().strip()
        yield Served(said["url"], token, family(process.pid))
        process.terminate()


@contextmanager
def litellm(engine: str, folder: Path) -> Iterator[Served]:
    """LiteLLM's proxy before `engine`, one process, started as its documentation says."""
    model = {"model": "openai/instant", "api_base": f"{engine}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": "m", "litellm_params": model}],
        "general_settings": {"master_key": LITELLM_KEY},
    }
    folder.mkdir()
    file, port = folder / "config.yaml", free_port()
    file.write_text(json.dumps(config))  # which YAML takes as well
    place = Path(sys.executable).parent
    command = [str(place / "uvx"), "--from", LITELLM, "litellm", "--config", str(file)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    environment = {**ENVIRONMENT, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_served(f"{url}/health/liveliness", process)
            yield Served(url, "", family(process.pid))
        finally:
            process.terminate()


def family(pid: int) -> list[int]:
    """A process and those that it started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += family(int(child))
    return found


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port: int = held.getsockname()[1]
        return port


def wait_until_served(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers; `SystemExit` if its process ends before."""
    while process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=10).close()  # noqa: S310 - loopback
            return
        time.sleep(0.2)
    raise SystemExit(f"{process.args} ended with {process.returncode}")


# ---- measuring


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

    @property
    def cpu_with_roots_ms(self) -> float:
        """CPU per call, the sessions' first calls among them."""
        return 1000 * (self.cpu_s + self.root_cpu_s) / (len(self.latencies_ms) + self.roots)


async def play(
    way: Way, context: int, sessions: int, served: Served, options: argparse.Namespace
) -> Measured:
    """Play sessions, so many at once, until there are about `options.calls` calls."""
    measured = Measured()

    def cpu_seconds() -> float:
        return sum(map(parts.cpu_seconds, served.pids))

    async def rest(player: Player) -> None:
        for _ in range(options.turns - 1):
            measured.latencies_ms.append(await player.turn())

    for _ in range(max(1, options.calls // ((options.turns - 1) * sessions))):
        async with contextlib.AsyncExitStack() as stack:
            before = cpu_seconds()
            players = [
                await stack.enter_async_context(
                    Player(way, context, options.tools, served.url, served.token, options.turns)
                )
                for _ in range(sessions)
            ]
            async with asyncio.TaskGroup() as group:
                for player in players:
                    group.create_task(player.turn())
            warm, started = cpu_seconds(), time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for player in players:
                    group.create_task(rest(player))
            measured.seconds += time.perf_counter() - started
            measured.cpu_s += cpu_seconds() - warm
            measured.root_cpu_s += warm - before
            measured.roots += sessions
    return measured


async def run_all(
    ways: list[Way], options: argparse.Namespace, servers: dict[str, Served], data: Path
) -> list[Row]:
    """Measure every way, context and number of sessions; the first round is thrown away."""
    rows = []
    for context in options.contexts:
        for sessions in options.sessions:
            rounds: dict[Way, list[Measured]] = {way: [] for way in ways}
            for number in range(options.rounds + 1):
                for way in ways:
                    disk = parts.disk_bytes(data)
                    measured = await play(way, context, sessions, servers[way.server], options)
                    measured.disk_bytes = parts.disk_bytes(data) - disk
                    if number:
                        rounds[way].append(measured)
            rows += [row(way, context, sessions, rounds) for way in ways]
    return rows


def row(way: Way, context: int, sessions: int, rounds: dict[Way, list[Measured]]) -> Row:
    """One line of the table."""
    mine, floor = rounds[way], rounds[way.floor]
    direct = rounds[Way("direct", way.floor.reply)]

    def middle(value: Callable[[Measured], float]) -> float:
        return statistics.median(map(value, mine))

    def ratio(value: Callable[[Measured], float]) -> str:
        pairs = zip(mine, floor, strict=True)
        found = sorted(value(one) / value(other) for one, other in pairs)
        return f"{statistics.median(found):.2f} ({found[0]:.2f}-{found[-1]:.2f})"

    added = [one.p50_ms - other.p50_ms for one, other in zip(mine, direct, strict=True)]
    return {
        "way": str(way),
        "context": context,
        "sessions": sessions,
        "p50_ms": round(middle(lambda one: one.p50_ms), 3),
        "added_p50_ms": round(statistics.median(added), 3),
        "calls_per_s": round(middle(lambda one: one.calls_per_s)),
        "calls_of_proxy": ratio(lambda one: one.calls_per_s),
        "cpu_ms": round(middle(lambda one: one.cpu_ms), 3),
        "cpu_of_proxy": ratio(lambda one: one.cpu_ms),
        "cpu_of_proxy_with_roots": ratio(lambda one: one.cpu_with_roots_ms),
        "root_cpu_ms": round(middle(lambda one: 1000 * one.root_cpu_s / one.roots), 1),
        "kib_per_session": round(middle(lambda one: one.disk_bytes / 1024 / one.roots)),
    }


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
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--ways", nargs="+", default=["chat"], choices=list(DIALECTS))
    parser.add_argument(
        "--replies", nargs="+", default=["json", "whole", "live"], choices=["json", "whole", "live"]
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="processes of `bridle gateway --workers`"
    )
    parser.add_argument("--tools", type=int, default=30, help="tools that each request shows")
    parser.add_argument("--turns", type=int, default=TURNS, help="calls of a session")
    parser.add_argument("--calls", type=int, default=480, help="calls per way and round, about")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fsync", choices=("off", "group"), default="off")
    parser.add_argument("--profile", help="write a profile of each gateway here, its name behind")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="take precedence over all else (root), if others work",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine")
    parser.add_argument("--data")
    parser.add_argument("--stream", default="whole")
    options = parser.parse_args()
    match options.part:
        case "engine":
            uvloop.run(parts.run_engine())
        case "proxy":
            uvloop.run(parts.run_proxy(options.engine))
        case "gateway":
            uvloop.run(
                parts.run_gateway(
                    options.engine, options.data, options.fsync, options.stream, options.profile
                )
            )
        case None:
            measure(options)


def ways_of(options: argparse.Namespace) -> list[Way]:
    """The ways that are asked for, behind the floors that they are compared with."""
    asked = [
        Way(name, reply)
        for reply in options.replies
        for name in options.ways
        if name not in {"text", "litellm"} or reply == "json"
    ]
    floors = {way.floor for way in asked}
    return [*(Way("direct", way.reply) for way in floors), *floors, *asked]


def measure(options: argparse.Namespace) -> None:
    """Start the parts, measure, report."""
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))  # the parts inherit it
    ways = ways_of(options)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        data = Path(folder)
        engine, sampling = stack.enter_context(part("engine"))
        proxy, proxying = stack.enter_context(part("proxy", "--engine", engine["url"]))
        servers = {
            "direct": Served(engine["url"], "", [sampling.pid]),
            "proxy": Served(proxy["url"], "", [proxying.pid]),
        }
        names = dict.fromkeys(way.server for way in ways)
        if "litellm" in names:
            servers["litellm"] = stack.enter_context(litellm(engine["url"], data / "litellm"))
        for name in names.keys() - servers.keys():
            asked = f"openai:{engine['url']}/v1#instant" if name == "text" else engine["url"]
            stream = "live" if name == "live" else "whole"
            servers[name] = stack.enter_context(gateway(asked, data / name, stream, options))
        rows = uvloop.run(run_all(ways, options, servers, data))
        for served in servers.values():
            if served.token:
                parts.check_extended(served.url, served.token, options.turns)
    if options.json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    else:
        show(rows)


if __name__ == "__main__":
    main()
