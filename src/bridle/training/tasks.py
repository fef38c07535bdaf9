"""Order of tasks: every task once per epoch, or those that teach more often.

A draw is a function of the seed, its number, and (for weighted draws) the history so far, so a
training that is resumed draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bridle.config import Task
from bridle.errors import ConfigError
from bridle.training.samples import Group
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
