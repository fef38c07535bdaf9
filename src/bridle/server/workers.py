"""Who computes sessions for the server: one run in, one result out, and what became of old runs.

`NodeWorkers` is a node in the server's own process. What a node captured of a run outlives the
server, so a run that ended before its result could be stored is recalled, not done again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol, Self

from bridle.capture.records import Outcome
from bridle.capture.store import Store
from bridle.config import Task
from bridle.gateway.app import Gateway
from bridle.gateway.weights import SetPolicy
from bridle.lifecycle.events import Event
from bridle.lifecycle.manager import Node
from bridle.lifecycle.results import SessionResult, result_from
from bridle.lifecycle.run_folder import SESSIONS, RunFolder, hold
from bridle.types import JSON, Cause, SessionStatus

KILLED = "its server was killed"
"""Error of a run that has no end of its own."""


class Workers(Protocol):
    """Where sessions are computed."""

    @property
    def capacity(self) -> int:
        """How many runs may be under way at once."""

    async def run(
        self, task: Task, sample_index: int, run_id: str, avoid: frozenset[str]
    ) -> SessionResult:
        """One run to its end, on none of the nodes `avoid` while there is another.

        `ConfigError`, or `StoreError` if it could not be recorded.
        Cancelling the caller ends the run; nothing of it is left behind.
        """

    def cancel(self, run_id: str) -> bool:
        """End a run, whose result will be CANCELLED; whether there was one."""

    async def recall(self, run_id: str) -> SessionResult | None:
        """The result of a run that ended under an earlier server; `None` = it came to no end.

        What is left of one without an end is closed, so that its key is dead.
        """

    async def set_policy(self, wanted: SetPolicy) -> None:
        """Steer the engines. `EngineError` if they did not do their part."""

    def policy(self) -> JSON:
        """Which version samples, and whether sampling is held."""

    def listening(self, listener: Callable[[Event], None]) -> AbstractContextManager[None]:
        """Tell `listener` what happens to runs."""

    def artifact(self, run_id: str, name: str) -> Path | None:
        """The path of a run's log or kept file; `None` = there is none of that name."""


class ServerFolder(RunFolder):
    """A node's folder under a server: logs and kept files of runs; results are the server's."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """Make it, or take the one that is there. `ConfigError` if another process has it."""
        (path / SESSIONS).mkdir(parents=True, exist_ok=True)
        return cls(path, hold(path))

    def append(self, result: SessionResult) -> None:
        """Nothing: the server writes it to where its rows say."""


class NodeWorkers:
    """Implements `Workers` on a node of this process."""

    def __init__(self, node: Node, gateway: Gateway, store: Store) -> None:
        self._node = node
        self._gateway = gateway
        self._store = store

    @property
    def capacity(self) -> int:
        """As the node's."""
        return self._node.capacity

    async def run(
        self, task: Task, sample_index: int, run_id: str, avoid: frozenset[str]
    ) -> SessionResult:
        """As `Workers.run`."""
        return await self._node.run(task, sample_index, session_id=run_id, avoid=avoid)

    def cancel(self, run_id: str) -> bool:
        """As `Workers.cancel`."""
        return self._node.cancel(run_id)

    async def recall(self, run_id: str) -> SessionResult | None:
        """As `Workers.recall`. A run that the stopping server ended did not come to its end."""
        known = {record.session_id for record in self._store.sessions()}
        if run_id not in known:
            return None
        outcome = self._store.outcome(run_id)
        if outcome is None:
            with suppress(KeyError):
                await self._gateway.seal(run_id)
            ended = Outcome(
                session_id=run_id,
                status=SessionStatus.ERROR,
                ended_at=time.time(),
                reward=None,
                cause=Cause.INFRASTRUCTURE,
                error=KILLED,
            )
            await self._store.close_session(ended)
            return None
        if outcome.status == SessionStatus.CANCELLED or outcome.error == KILLED:
            return None
        capture = await asyncio.to_thread(self._store.read, run_id)
        return await asyncio.to_thread(result_from, capture)

    async def set_policy(self, wanted: SetPolicy) -> None:
        """As `Workers.set_policy`."""
        await self._gateway.set_policy(wanted)

    def policy(self) -> JSON:
        """As `Workers.policy`."""
        return self._gateway.policy()

    def listening(self, listener: Callable[[Event], None]) -> AbstractContextManager[None]:
        """As `Workers.listening`."""
        return self._node.events.listening(listener)

    def artifact(self, run_id: str, name: str) -> Path | None:
        """As `Workers.artifact`; only what lies in the run's own folder."""
        folder = self._node.folder.session_folder(run_id).resolve()
        path = (folder / name).resolve()
        inside = path.is_relative_to(folder) and path.is_relative_to(self._node.folder.path)
        return path if inside and path.is_file() else None
