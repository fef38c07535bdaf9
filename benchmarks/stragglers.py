"""Engine time that a slow session in every batch costs, on a real clock and a real rollout server.

    python -m benchmarks.stragglers --ahead 16             # sessions run while the trainer trains
    python -m benchmarks.stragglers --ahead 0 --warm 1 --batches 5    # whole batches

Batches are 8 groups of 8 sessions; one session of every 64 takes ten times as long as the others,
and a step of the trainer half as long. Sessions are waits; the server, its database, its HTTP and
slime's asynchronous rollout function are the real ones. Lost is what the 64 run slots were empty,
from the end of the first `--warm` batches to the end of the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from benchmarks.server import TOKEN, InstantWorkers, serving, task

from bridle.bridges.base import TaskTable
from bridle.bridges.remote import ServerSessions
from bridle.bridges.slime import Ahead
from bridle.config import Task
from bridle.node.results import SessionResult

SLOTS, GROUPS, SAMPLES = 64, 8, 8


class SlowWorkers(InstantWorkers):
    """Runs of one length, one of every 64 ten times as long; knows how long its slots were busy."""

    def __init__(self, session_s: float) -> None:
        super().__init__(SLOTS, 1100, 0.0)
        self._session_s = session_s
        self._started = self._running = 0
        self._busy_s, self._since = 0.0, time.perf_counter()

    def busy_s(self) -> float:
        """Slot seconds until now."""
        now = time.perf_counter()
        self._busy_s += self._running * (now - self._since)
        self._since = now
        return self._busy_s

    async def run(
        self, task: Task, sample_index: int, run_id: str, avoid: frozenset[str]
    ) -> SessionResult:
        """Wait, and end with a result."""
        self._started += 1
        length = self._session_s * (10 if self._started % SLOTS == 1 else 1)
        self.busy_s()
        self._running += 1
        try:
            await asyncio.sleep(length)
        finally:
            self.busy_s()
            self._running -= 1
        return await super().run(task, sample_index, run_id, avoid)


@dataclass
class Sample:
    """The fields of slime's `Sample` that the bridge writes or reads."""

    group_index: int
    index: int
    metadata: dict[str, Any]
    prompt: str = ""
    status: str = ""
    Status: Any = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Part of slime's checkpoint."""
        return {"group_index": self.group_index}


class Status:
    """slime's."""

    COMPLETED, TRUNCATED, ABORTED, FAILED = "completed", "truncated", "aborted", "failed"


Sample.Status = Status


class Source:
    """A data source of groups of eight."""

    def __init__(self) -> None:
        self.given, self.metadata = 0, {}

    def get_samples(self, count: int) -> list[list[Sample]]:
        """The next groups."""
        numbers = range(self.given, self.given + count)
        self.given += count
        return [
            [Sample(n, SAMPLES * n + at, {"task_id": "task-0"}) for at in range(SAMPLES)]
            for n in numbers
        ]


def train(url: str, workers: SlowWorkers, options: argparse.Namespace) -> dict[str, float]:
    """A trainer's loop; the share of slot time that was lost."""
    tasks = TaskTable([Task.model_validate(task(0, SAMPLES))])
    start = busy = 0.0
    with ServerSessions(url, token=TOKEN.token) as sessions:
        ahead = Ahead(sessions, tasks, Source(), "run")
        for rollout in range(options.warm + options.batches):
            if rollout == options.warm:
                start, busy = time.perf_counter(), workers.busy_s()
            ahead.take(rollout, GROUPS, options.ahead)
            time.sleep(options.session_s / 2)
    took = time.perf_counter() - start
    lost = 1 - (workers.busy_s() - busy) / (SLOTS * took)
    return {
        "ahead": options.ahead,
        "lost": round(lost, 3),
        "batch_s": round(took / options.batches, 2),
    }


async def measured(options: argparse.Namespace) -> dict[str, float]:
    """One line of the table."""
    workers = SlowWorkers(options.session_s)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bridle-bench-")))
        url = await stack.enter_async_context(serving(folder, workers))
        return await asyncio.to_thread(train, url, workers, options)


def main() -> None:
    """Measure, print JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ahead", type=int, default=16, help="groups under way beside a batch")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--session-s", type=float, default=1.0)
    print(json.dumps(uvloop.run(measured(parser.parse_args()))))


if __name__ == "__main__":
    main()
