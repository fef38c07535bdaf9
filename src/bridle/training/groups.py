"""Sources of groups: the order of tasks, and sessions that run ahead by a bounded number.

Every task comes once per epoch, or those that teach more often. A draw is a function of the seed,
its number, and (for weighted draws) the history so far, so a training that is resumed draws the
same tasks as one that never stopped.

The loop says how many groups may begin (`allow`); a source begins them in order and delivers each
when all its sessions have ended. With `B` groups per update and `max_lag` updates between sampling
and training, `(updates + 1 + max_lag) * B` are allowed: no group begins that could not be trained
in time, and with a lag of 0 the batch of an update begins when the update before it is in the
engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from bridle.config import Task
from bridle.errors import ConfigError, first_error
from bridle.node.local import Executor
from bridle.training.samples import Group
from bridle.trajectory.scores import clustered_mean
from bridle.types import JSON

Curriculum = Literal["epochs", "learnable"]
"""`epochs`: all tasks once, in an order of the seed's, then again. `learnable`: by chance, tasks
the more often the nearer their success is to one half."""

EXPLORE = 0.05
"""Weight that a task keeps which was always, or never, solved; the largest is 0.25."""


@dataclass(slots=True)
class Record:
    """Results of a task so far."""

    groups: int = 0
    sessions: int = 0
    """With a known reward."""
    reward: float = 0.0
    """Sum over those sessions."""
    flat: int = 0
    """Groups whose rewards did not vary."""
    unknown: int = 0
    """Sessions without a reward."""

    @property
    def success(self) -> float:
        """Mean reward, with one session at one half before the first."""
        return (self.reward + 0.5) / (self.sessions + 1)


class History:
    """Per task, what its groups came to."""

    def __init__(self, records: dict[str, Record] | None = None) -> None:
        self.records = records or {}

    def add(self, group: Group) -> None:
        record = self.records.setdefault(group.task_id, Record())
        known = [reward for reward in group.rewards if not np.isnan(reward)]
        record.groups += 1
        record.sessions += len(known)
        record.reward += float(sum(known))
        record.flat += not group.varies
        record.unknown += len(group.rewards) - len(known)

    def json(self) -> JSON:
        names = ("groups", "sessions", "reward", "flat", "unknown")
        return {
            task_id: {name: getattr(record, name) for name in names}
            for task_id, record in self.records.items()
        }

    @classmethod
    def of(cls, value: JSON) -> History:
        return cls({task_id: Record(**record) for task_id, record in value.items()})


class TaskDraws:
    """Draws tasks by number."""

    def __init__(
        self,
        tasks: Sequence[Task],
        history: History,
        *,
        seed: int,
        curriculum: Curriculum = "epochs",
    ) -> None:
        """`ConfigError` if there is no task, or two have one id."""
        self._tasks = {task.task_id: task for task in tasks}
        self._ids = list(self._tasks)
        self._history = history
        self._seed = seed
        self._curriculum = curriculum
        if not tasks:
            raise ConfigError("no tasks to train on")
        if len(self._ids) != len(tasks):
            raise ConfigError("two tasks have one task_id")

    def draw(self, number: int) -> Task:
        """The task of draw `number`, 0 the first."""
        size = len(self._ids)
        if self._curriculum == "epochs":
            epoch, place = divmod(number, size)
            order = np.random.default_rng([self._seed, epoch]).permutation(size)
            return self._tasks[self._ids[int(order[place])]]
        chances = [self._history.records.get(task_id, Record()).success for task_id in self._ids]
        success = np.array(chances)
        weights = np.maximum(success * (1 - success), EXPLORE)
        random = np.random.default_rng([self._seed, number])
        return self._tasks[self._ids[int(random.choice(size, p=weights / weights.sum()))]]

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._tasks

    def named(self, task_id: str) -> Task:
        """The task of that id; `ConfigError` if the set has none."""
        if task_id not in self._tasks:
            raise ConfigError(f"the checkpoint goes on with task {task_id!r}, which is not there")
        return self._tasks[task_id]


LABEL = "evaluated_with"
"""Key of a held-out task's metadata: what it is played with, where that is not its own harness."""


@dataclass(frozen=True, slots=True)
class HeldOutEvaluation:
    """Success on tasks that are not trained on."""

    reward: float | None
    """Mean over sessions with a known reward; `None` = there is none."""
    sessions: int
    unknown: int
    """Sessions without a reward."""
    rewards: dict[str, list[float | None]]
    """Per task, in the order of its samples."""
    half_width: float | None = None
    """Of the reward's 95 % interval, over tasks; `None` = fewer than two have a known reward."""
    others: dict[str, HeldOutEvaluation] = field(default_factory=dict)
    """By label, the same tasks with other harnesses; not part of the numbers above."""

    def json(self) -> JSON:
        """Return the object that the run's files hold."""
        value: JSON = {"reward": self.reward, "sessions": self.sessions, "unknown": self.unknown}
        if self.half_width is not None:
            value["half_width"] = self.half_width
        if self.others:
            value["others"] = {label: one.json() for label, one in self.others.items()}
        return value


def evaluation_of(
    held_out: Sequence[Task], rewards: Mapping[str, Sequence[float | None]]
) -> HeldOutEvaluation:
    """Average the held-out rewards (`rewards` by task id), overall and per label."""
    labels = [str(task.metadata.get(LABEL, "")) for task in held_out]
    made = {}
    for label in dict.fromkeys(["", *labels]):
        ids = [task.task_id for task, of in zip(held_out, labels, strict=True) if of == label]
        found = {task_id: list(rewards.get(task_id, ())) for task_id in ids}
        every = [reward for of in found.values() for reward in of]
        known = [[reward for reward in of if reward is not None] for of in found.values()]
        mean, half_width = clustered_mean([some for some in known if some])
        unknown = len(every) - sum(map(len, known))
        made[label] = HeldOutEvaluation(mean, len(every), unknown, found, half_width)
    return replace(made.pop(""), others=made)


class GroupSource(Protocol):
    """Gives groups and evaluates."""

    def allow(self, groups: int) -> None:
        """Let so many more groups begin."""

    async def take(self) -> Group:
        """The next group whose sessions have all ended; raises what broke the source."""

    async def evaluate(self) -> HeldOutEvaluation | None:
        """Play the held-out tasks with the weights that the engine has; `None` = there are none."""

    def cursor(self) -> JSON:
        """Return the position of the source; groups begun but not taken are begun again after a
        resume.
        """

    async def kept(self) -> None:
        """A checkpoint has the last `cursor`: what was taken before it is not needed again."""


class LocalGroups:
    """Groups of an executor's sessions; `local_groups` opens one."""

    def __init__(
        self, executor: Executor, draws: TaskDraws, held_out: Sequence[Task], cursor: JSON
    ) -> None:
        self._executor = executor
        self._draws = draws
        self._held_out = held_out
        self._next: int = cursor.get("next", 0)
        self._again: list[tuple[int, str]] = [tuple(one) for one in cursor.get("open", ())]
        self._open: dict[int, str] = {}
        self._allowed = asyncio.Semaphore(0)
        self._ended: asyncio.Queue[Group] = asyncio.Queue()

    def allow(self, groups: int) -> None:
        for _ in range(groups):
            self._allowed.release()

    async def take(self) -> Group:
        group = await self._ended.get()
        del self._open[group.index]
        return group

    def cursor(self) -> JSON:
        left = sorted([*self._open.items(), *self._again])
        return {"next": self._next, "open": [list(one) for one in left]}

    async def kept(self) -> None:
        """See `GroupSource.kept`: nothing is held for one that comes back."""

    async def evaluate(self) -> HeldOutEvaluation | None:
        if not self._held_out:
            return None
        found: dict[str, list[float | None]] = {}
        async with self._executor.run(self._held_out) as results:
            ended = [result async for result in results]
        for result in sorted(ended, key=lambda one: one.sample_index):
            found.setdefault(result.task_id, []).append(result.reward)
        return evaluation_of(self._held_out, found)

    async def feed(self) -> None:
        """Begin groups as they are allowed; cancelling it ends all that run."""
        async with asyncio.TaskGroup() as playing:
            while True:
                await self._allowed.acquire()
                if self._again:
                    index, task_id = self._again.pop(0)
                    task = self._draws.named(task_id)
                else:
                    index, self._next = self._next, self._next + 1
                    task = self._draws.draw(index)
                self._open[index] = task.task_id
                playing.create_task(self._play(index, task), name=f"group {index}")

    async def _play(self, index: int, task: Task) -> None:
        async with self._executor.run([task]) as results:
            ended = [result async for result in results]
        ended.sort(key=lambda result: result.sample_index)
        sessions = tuple(result.trajectory for result in ended)
        self._ended.put_nowait(Group(index, task.task_id, sessions))


@asynccontextmanager
async def local_groups(
    executor: Executor,
    draws: TaskDraws,
    *,
    held_out: Sequence[Task] = (),
    cursor: JSON | None = None,
) -> AsyncIterator[LocalGroups]:
    """Groups of an executor's sessions; leaving the block ends what still runs.

    `cursor` is that of a checkpoint. What breaks the executor is raised in the block's body.
    """
    source = LocalGroups(executor, draws, held_out, cursor or {})
    try:
        async with asyncio.TaskGroup() as group:
            feeder = group.create_task(source.feed(), name="groups")
            try:
                yield source
            finally:
                feeder.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
