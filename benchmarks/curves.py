"""Learning curves against sampled tokens and time, shared by the benchmarks of teachers and trees.

`measured` is one training of the reference trainer. Its held-out tasks are played by themselves,
between steps, so that the cost at each evaluation is that of training alone: tokens that the engine
sampled (replayed ones are not), CPU seconds of this process and its harnesses, and wall seconds.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import uvloop

from bridle.cli.train import LocalBackend, TrainSettings, local_backend, train_here
from bridle.config import Task
from bridle.node.local import Executor
from bridle.node.results import SessionResult
from bridle.training.groups import HeldOutEvaluation
from bridle.training.loop import Course
from bridle.types import JSON

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Two-sided 95 % quantiles of Student's t for a mean over so many seeds."""


def cpu_seconds() -> float:
    """Of this process and of all harnesses that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


NOTHING: JSON = {"sampled": 0, "cpu_s": 0.0, "wall_s": 0.0}
"""The cost before the first step."""


@dataclass
class Meter:
    """Runs sessions, counts what training costs, and keeps evaluations apart from it."""

    executor: Executor
    held_out: frozenset[str]
    """Task ids."""
    sampled: int = 0
    cpu_s: float = field(default_factory=lambda: -cpu_seconds())
    wall_s: float = field(default_factory=lambda: -time.monotonic())
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no held-out task runs."""
    points: list[JSON] = field(default_factory=list)
    """Success on held-out tasks."""
    played: list[JSON] = field(default_factory=list)
    """Mean reward of the sessions of each step."""
    costs: dict[int, JSON] = field(default_factory=dict)
    """By step."""

    def __post_init__(self) -> None:
        """Let sessions begin."""
        self.quiet.set()

    @asynccontextmanager
    async def run(self, tasks: Sequence[Task]) -> AsyncIterator[AsyncIterator[SessionResult]]:
        """Run tasks as the executor does; those of a training wait for an evaluation's end."""
        if tasks[0].task_id in self.held_out:
            self.quiet.clear()
            cpu_s, wall_s = cpu_seconds(), time.monotonic()
            async with self.executor.run(tasks) as results:
                yield results
            self.cpu_s -= cpu_seconds() - cpu_s
            self.wall_s -= time.monotonic() - wall_s
            self.quiet.set()
            return
        await self.quiet.wait()
        async with self.executor.run(tasks) as results:
            yield self._counted(results)

    async def _counted(self, results: AsyncIterator[SessionResult]) -> AsyncIterator[SessionResult]:
        async for result in results:
            stats = result.trajectory.metadata["stats"]
            self.sampled += stats["tokens_captured"] - stats["tokens_excluded"].get("replayed", 0)
            yield result

    def tell(self, course: Course) -> None:
        """Note the cost of a step when it is done, and the success of an evaluation.

        A step's sessions were sampled by the policy of the step before.
        """
        cost = {
            "sampled": self.sampled,
            "cpu_s": round(self.cpu_s + cpu_seconds(), 1),
            "wall_s": round(self.wall_s + time.monotonic(), 1),
        }
        if course.steps and course.step not in self.costs:
            before = self.costs.get(course.step - 1, NOTHING)
            reward = course.steps[-1]["reward"]
            self.played.append({"step": course.step - 1, **before, "success": reward})
        self.costs.setdefault(course.step, cost)
        if course.evaluations and course.evaluations[-1]["step"] == course.step:
            success = course.evaluations[-1]["reward"]
            self.points.append({"step": course.step, **self.costs[course.step], "success": success})


def measured(
    settings: TrainSettings,
    tasks: Sequence[Task],
    held_out: Sequence[Task],
    before: HeldOutEvaluation | None = None,
) -> JSON:
    """Train once; `points` on held-out tasks and `played` of each step, as in `Meter`."""
    meters: list[Meter] = []

    @asynccontextmanager
    async def opener(settings: TrainSettings, model: Path) -> AsyncIterator[LocalBackend]:
        async with local_backend(settings, model) as backend:
            ids = frozenset(task.task_id for task in held_out)
            meters.append(Meter(backend.executor, ids))
            yield replace(backend, executor=meters[0])

    def tell(course: Course) -> None:
        meters[0].tell(course)

    training = train_here(settings, tasks, held_out, before=before, tell=tell, opener=opener)
    uvloop.run(training)
    return {"points": meters[0].points, "played": meters[0].played}


class Results:
    """Runs that are done, a line each in a file; what is there is not done again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[JSON] = []
        if path.exists():
            self.runs = [json.loads(line) for line in path.read_text().splitlines()]

    def of(self, **key: object) -> list[JSON]:
        """The runs with these values."""
        return [one for one in self.runs if key.items() <= one.items()]

    def once(self, key: JSON, make: Callable[[], JSON]) -> None:
        """Do a run unless it is there."""
        if self.of(**key):
            return
        run = {**key, **make(), "load": round(os.getloadavg()[0], 1)}
        self.runs.append(run)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(run) + "\n")
        print(json.dumps(run), flush=True)


def smooth(points: Sequence[JSON]) -> list[JSON]:
    """The points with the mean success of each and its two neighbours."""
    values = [point["success"] for point in points]
    around = [values[max(0, place - 1) : place + 2] for place in range(len(values))]
    means = map(statistics.mean, around)
    return [{**point, "success": mean} for point, mean in zip(points, means, strict=True)]


def reached(points: Sequence[JSON], success: float, cost: str) -> float:
    """Cost of a curve until it first had this success, between points in a line; inf = never."""
    for before, after in pairwise(points):
        if after["success"] >= success:
            rise = after["success"] - before["success"]
            share = (success - before["success"]) / rise if rise > 0 else 0.0
            return float(before[cost] + max(0.0, share) * (after[cost] - before[cost]))
    return math.inf


def at_cost(points: Sequence[JSON], spent: float, cost: str) -> float:
    """Success of a curve when so much was spent, between points in a line; its last after."""
    for before, after in pairwise(points):
        if after[cost] >= spent:
            share = (spent - before[cost]) / (after[cost] - before[cost])
            return float(before["success"] + share * (after["success"] - before["success"]))
    return float(points[-1]["success"])


def interval(values: Sequence[float], form: str = ".3f") -> str:
    """Mean and half of its 95 % interval over seeds."""
    mean = statistics.mean(values)
    if math.isinf(mean):
        return f"{sum(map(math.isinf, values))} of {len(values)} not reached"
    if len(values) < 2:
        return f"{mean:{form}}"
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:{form}} ± {half:{form}}"
