"""The local executor: all sessions on one node, in this process, and their forks.

A task with `branching` grows a tree: when a session has ended, forks of it begin at the turns that
the task names, and they are sessions of the task like the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from bridle.capture.sqlite import SqliteStore
from bridle.config import ForkSpec, Task
from bridle.errors import ConfigError, first_error
from bridle.gateway.replay import replies_of
from bridle.node.local import LocalNode, check
from bridle.node.results import SessionResult
from bridle.types import SessionStatus


class Executor(Protocol):
    """Computes the sessions of many tasks."""

    def run(
        self, tasks: Sequence[Task]
    ) -> AbstractAsyncContextManager[AsyncIterator[SessionResult]]:
        """Run `num_samples` sessions of each task; results come in the order in which they end.

            async with executor.run(tasks) as results:
                async for result in results: ...

        Tasks start in order, the samples of a task together. New sessions wait while results are
        not taken, so memory stays bounded. Leaving the block ends what still runs. `ConfigError`
        before the first session if a task names what is not there.
        """


class LocalExecutor:
    """Implements `Executor` on a node of this process."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node

    @asynccontextmanager
    async def run(self, tasks: Sequence[Task]) -> AsyncIterator[AsyncIterator[SessionResult]]:
        check(tasks)
        if any(task.branching for task in tasks) and not isinstance(self._node.store, SqliteStore):
            raise ConfigError("branching: the node must capture into a file")
        batch = _Batch(self._node, sum(task.num_samples for task in tasks))
        try:
            async with asyncio.TaskGroup() as group:
                feeder = group.create_task(batch.feed(_samples(tasks)), name="feeder")
                try:
                    yield batch.results()
                finally:
                    feeder.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors


class _Batch:
    """The sessions of one `run`."""

    def __init__(self, node: LocalNode, total: int) -> None:
        self._node = node
        self._total = total
        """Sessions of the batch, forks that are known included."""
        self._ended: asyncio.Queue[SessionResult] = asyncio.Queue()
        self._room = asyncio.Semaphore(node.capacity)
        self._sampled: Counter[str] = Counter()
        """Sampled tokens by task."""

    async def results(self) -> AsyncIterator[SessionResult]:
        taken = 0
        while taken < self._total:
            result = await self._ended.get()
            taken += 1
            self._room.release()
            yield result

    async def feed(self, samples: Iterator[tuple[Task, int]]) -> None:
        """Start sessions as there is room; a cancellation ends all of them."""
        async with asyncio.TaskGroup() as sessions:
            for task, sample_index in samples:
                await self._room.acquire()
                sessions.create_task(self._one(task, sample_index))

    async def _one(self, task: Task, sample_index: int, depth: int = 0) -> None:
        result = await self._node.run(task, sample_index)
        forks = await self._forks(task, result, depth)
        self._total += len(forks)
        self._ended.put_nowait(result)
        async with asyncio.TaskGroup() as sessions:
            for fork in forks:
                await self._room.acquire()
                sessions.create_task(self._one(fork, sample_index, depth + 1))

    async def _forks(self, task: Task, result: SessionResult, depth: int) -> list[Task]:
        """Return the forks of a session that has ended, each a task of one session."""
        spec, store = task.branching, self._node.store
        if spec is None or not isinstance(store, SqliteStore):
            return []
        stats = result.trajectory.metadata["stats"]
        again = stats["tokens_excluded"].get("replayed", 0)
        self._sampled[task.task_id] += stats["tokens_captured"] - again
        spent = spec.budget_tokens is not None and (
            self._sampled[task.task_id] >= spec.budget_tokens
        )
        if spent or depth == spec.max_depth or result.status is not SessionStatus.COMPLETED:
            return []
        capture = await asyncio.to_thread(store.read, result.session_id)
        replies, given = replies_of(capture)
        forks = [
            ForkSpec(capture=str(store.path.absolute()), session=result.session_id, at=at)
            for at in spec.points(given + 1, replies)
        ]
        return [
            task.model_copy(update={"fork": fork, "num_samples": 1})
            for fork in forks
            for _ in range(spec.samples)
        ]


def _samples(tasks: Sequence[Task]) -> Iterator[tuple[Task, int]]:
    for task in tasks:
        for sample_index in range(task.num_samples):
            yield task, sample_index
