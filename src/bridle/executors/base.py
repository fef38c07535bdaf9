"""The executor contract: tasks in, results out, in the order in which sessions end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from bridle.config import Task
from bridle.lifecycle.results import SessionResult


class Executor(Protocol):
    """Computes the sessions of many tasks."""

    def run(
        self, tasks: Sequence[Task]
    ) -> AbstractAsyncContextManager[AsyncIterator[SessionResult]]:
        """Run `num_samples` sessions of each task.

            async with executor.run(tasks) as results:
                async for result in results: ...

        Every session gives one result, whatever became of it. Leaving the block ends what still
        runs; nothing of it is left behind. Raises `ConfigError` before the first session if a task
        names what is not there.
        """
