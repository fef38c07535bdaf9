"""Cost of the rollout server: a long queue, polls, and sessions that end all the time.

    python benchmarks/server.py --tasks 10000 --sessions 1000

The server is a process of its own with the real database, files and HTTP; its workers end each
session at once with a trajectory of so many tokens, so what is measured is the server. Seconds of
its CPU stand beside wall seconds: on a busy machine only they compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bridle.bridges import parquet
from bridle.client import AsyncClient
from bridle.config import Task
from bridle.gateway.weights import SetPolicy
from bridle.node.base import Events
from bridle.node.results import SessionResult
from bridle.server.app import serve_api
from bridle.server.callbacks import CallbackAddresses
from bridle.server.http import ApiToken, Auth, ServerContext, TokenRole
from bridle.server.service import Service
from bridle.server.settings import SubmissionPolicy
from bridle.server.storage import Database, TrajectoryFiles
from bridle.trajectory.sample import Trace, Trajectory
from bridle.types import JSON, SessionStatus

TOKEN = ApiToken(name="benchmark", token="a-token-of-sixteen", roles=(TokenRole.ADMIN,))  # noqa: S106 - of this measurement

TURNS = 20


class InstantWorkers:
    """Ends every run after `run_s` with a trajectory of `tokens` tokens.

    Notes how long each freed slot was empty: from the end of a run to the beginning of the next.
    """

    outlive = False

    def __init__(self, capacity: int, tokens: int, run_s: float) -> None:
        self.capacity = capacity
        self.events = Events()
        self._run_s = run_s
        self._freed: deque[float] = deque()
        self.empty_s: list[float] = []
        length = tokens - 1000
        ids = np.random.default_rng(0).integers(0, 150_000, tokens).astype(np.int32)
        turns = [{"role": "assistant", "content": "word " * 200}] * TURNS
        self._trace = Trace(
            "t",
            ids[:1000],
            ids[1000:],
            np.ones(length, dtype=np.uint8),
            np.linspace(-3, 0, length, dtype=np.float32),
            np.zeros(length, dtype=np.int32),
            np.zeros(length, dtype=np.uint8),
            tuple(f"e{turn}" for turn in range(TURNS)),
            tuple(length * (turn + 1) // TURNS for turn in range(TURNS)),
            "stop",
            "raw",
            prompt_messages=[{"role": "user", "content": "x" * 2000}],
            response_messages=turns,
        )

    async def run(
        self, task: Task, sample_index: int, run_id: str, _: frozenset[str]
    ) -> SessionResult:
        """One result."""
        if self._freed:
            self.empty_s.append(time.perf_counter() - self._freed.popleft())
        await asyncio.sleep(self._run_s * random.uniform(0.5, 1.5))  # noqa: S311 - a pace
        self._freed.append(time.perf_counter())
        return SessionResult(
            session_id=run_id,
            task_id=task.task_id,
            sample_index=sample_index,
            status=SessionStatus.COMPLETED,
            cause=None,
            error=None,
            trajectory=Trajectory(run_id, "COMPLETED", (self._trace,), 1.0, None, {"stats": {}}),
            reward=1.0,
            timing={"run": 1.0},
            harness="command",
            harness_version="1",
            exit_code=0,
            signal=None,
            logs={},
            metadata={},
        )

    def cancel(self, _: str) -> bool:
        """Too late: every run has ended."""
        return False

    async def recall(self, _: str) -> SessionResult | None:
        """Nothing is recalled."""

    def expect(self, _: str) -> bool:
        """No run outlives its server."""
        return False

    async def settle(self) -> None:
        """Nothing is held."""

    def release(self, _: str) -> None:
        """Nothing is held."""

    async def remove(self, _: str) -> None:
        """Nothing is kept."""

    async def kept_bytes(self) -> int:
        """None."""
        return 0

    async def set_policy(self, _: SetPolicy) -> JSON:
        """No engine."""
        return self.policy()

    def policy(self) -> JSON:
        """No engine."""
        return {"version": 0}

    def nodes(self) -> list[JSON]:
        """None."""
        return []

    async def drain_node(self, _: str) -> None:
        """No node."""

    async def add_replica(self, _: str) -> JSON:
        """No engine."""
        return self.policy()

    async def remove_replica(self, _: str, __: float) -> JSON:
        """No engine."""
        return self.policy()

    async def artifact(self, run_id: str, name: str) -> Path | bytes | None:
        """None is kept."""


@asynccontextmanager
async def serving(folder: Path, workers: InstantWorkers) -> AsyncIterator[str]:
    """Run a server over these workers; its URL."""
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(await Database.open(folder / "s.sqlite"))
        service = Service(
            database=database,
            files=TrajectoryFiles(folder / "trajectories", parquet),
            workers=workers,
        )
        await stack.enter_async_context(service)
        served = ServerContext(
            service, SubmissionPolicy(local=True), Auth([TOKEN]), CallbackAddresses([])
        )
        yield await stack.enter_async_context(serve_api(served, host="127.0.0.1", port=0))


async def serve(folder: Path, workers: InstantWorkers) -> None:
    """Serve until SIGTERM; prints the URL, and at last how long slots were empty."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with serving(folder, workers) as url:
        print(url, flush=True)
        await stop.wait()
    print(json.dumps(spread(workers.empty_s)), flush=True)


def task(number: int, samples: int) -> dict[str, object]:
    """One task of a thousand characters."""
    return {
        "task_id": f"task-{number}",
        "instruction": "x" * 1000,
        "num_samples": samples,
        "runtime": {"backend": "local"},
        "agent": {"harness": "command", "command": "true"},
    }


def cpu_s(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


class Clock:
    """Wall and CPU seconds of the server since it was made."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._wall, self._cpu = time.perf_counter(), cpu_s(pid)

    def read(self, count: int) -> dict[str, float]:
        """Per second of either."""
        wall, cpu = time.perf_counter() - self._wall, cpu_s(self._pid) - self._cpu
        return {
            "count": count,
            "wall_s": round(wall, 2),
            "cpu_s": round(cpu, 2),
            "per_s": round(count / wall, 1),
            "per_cpu_s": round(count / max(cpu, 0.01), 1),
        }


async def median_ms(ask: Callable[[], Awaitable[object]], times: int = 40) -> dict[str, float]:
    """Median and 95th percentile of a request."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        await ask()
        taken.append(time.perf_counter() - began)
    return spread(taken)


def spread(taken: list[float]) -> dict[str, float]:
    """Median and 95th percentile of seconds, in milliseconds."""
    taken = sorted(taken) or [0.0]
    return {
        "p50_ms": round(1000 * statistics.median(taken), 2),
        "p95_ms": round(1000 * taken[int(0.95 * len(taken))], 2),
    }


async def measure(url: str, pid: int, options: argparse.Namespace) -> dict[str, object]:
    """The whole table."""
    found: dict[str, object] = {"rss_start_mib": round(rss_mib(pid))}
    async with AsyncClient(url, token=TOKEN.token) as client:
        await client.pause()
        clock = Clock(pid)
        for start in range(0, options.tasks, 100):
            batch = [task(n, options.samples) for n in range(start, start + 100)]
            await client.submit_many(batch)
        found["submit"] = clock.read(options.tasks)
        found["status page"] = await median_ms(client.status)
        found["poll of a task"] = await median_ms(lambda: client.task("task-77"))
        found["page of 100 tasks"] = await median_ms(
            lambda: client._json("GET", "/v1/tasks", query={"cursor": 5000})  # noqa: SLF001 - one page
        )
        found["rss_queued_mib"] = round(rss_mib(pid))
        clock = Clock(pid)
        await client.resume()
        groups = 0
        async for _ in client.groups(trajectories=False, page=20):
            groups += 1
            if groups * options.samples >= options.sessions:
                break
        found["sessions ended"] = clock.read(groups * options.samples)
        await client.drain(30)
        found["status page later"] = await median_ms(client.status)
        found["poll of an ended task"] = await median_ms(lambda: client.task("task-3"))
        found["a trajectory (msgpack)"] = await median_ms(lambda: client.trajectory("task-3.0"), 10)
        found["rss_end_mib"] = round(rss_mib(pid))
    return found


async def refill(url: str, _: int, options: argparse.Namespace) -> dict[str, object]:
    """Keep all slots busy with runs of about a second; the server tells the rest."""
    async with AsyncClient(url, token=TOKEN.token) as client:
        await client.submit_many([task(n, options.samples) for n in range(100)])
        async for group in client.groups(trajectories=False, page=20):
            if group.cursor >= 40:
                break
    return {}


def run(
    options: argparse.Namespace,
    work: Callable[[str, int, argparse.Namespace], Coroutine[Any, Any, dict[str, object]]],
    *more: str,
) -> tuple[dict[str, object], dict[str, float]]:
    """Run `work` on a server of its own; return its result and the server's last report."""
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        command = [sys.executable, __file__, "--serve", folder, "--tokens", str(options.tokens)]
        command += ["--capacity", str(options.capacity), *more]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                found = uvloop.run(work(process.stdout.readline().strip(), process.pid, options))
            finally:
                process.terminate()
            return found, json.loads(process.stdout.readline())


def main() -> None:
    """Start the server, measure, print JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", type=Path)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--capacity", type=int, default=16)
    parser.add_argument("--run-s", type=float, default=0.0)
    options = parser.parse_args()
    if options.serve is not None:
        workers = InstantWorkers(options.capacity, options.tokens, options.run_s)
        uvloop.run(serve(options.serve, workers))
        return
    found, _ = run(options, measure)
    found["slot empty"] = run(options, refill, "--run-s", "1")[1]
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
