"""The executor contracts: whole tasks, or one session at a time.

`Executor` takes tasks and gives results in the order in which sessions end. `SessionRunner` is for
who keeps the queue itself (the rollout server): it hands in a session when there is room.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from bridle.config import Task
from bridle.lifecycle.events import Events
from bridle.lifecycle.results import SessionResult
from bridle.types import SessionStatus


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


class SessionRunner(Protocol):
    """Computes sessions that are handed in one by one (`bridle.lifecycle.manager.Node`).

    Whoever feeds it keeps at most `capacity` calls of `run` going; when one returns there is room
    for the next.
    """

    events: Events
    """What happens to its sessions, as it happens."""

    @property
    def capacity(self) -> int:
        """Number of sessions that may be submitted at once."""

    @property
    def free(self) -> int:
        """Number of further sessions that fit now."""

    def stages(self) -> Mapping[SessionStatus, int]:
        """Count the running sessions per stage."""

    def session_ids(self) -> tuple[str, ...]:
        """The sessions that live now."""

    async def run(
        self,
        task: Task,
        sample_index: int = 0,
        *,
        session_id: str | None = None,
        avoid: frozenset[str] = frozenset(),
    ) -> SessionResult:
        """Run one session to its end; what became of it is in the result, with its files.

        `session_id` is the caller's own, else one is made. `avoid` are nodes (`node_id` of results)
        on which earlier runs of it failed: it goes elsewhere while any other node lives. Raises
        `ConfigError` for a task that names what is not there and for an id that lives already. A
        cancelled caller leaves a session that has ended and is recorded, and no result.
        """

    def cancel(self, session_id: str) -> bool:
        """End a living session, whose result will be CANCELLED; whether there was one."""
