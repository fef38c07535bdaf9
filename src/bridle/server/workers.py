"""Execution of sessions for the server: one run in, one result out, and the results of old runs.

`NodeWorkers` is a node in the server's own process. What a node captured of a run outlives the
server, so a run that ended before its result could be stored is recalled, not done again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, Self

from bridle.capture.sqlite import SqliteStore
from bridle.capture.store import Store
from bridle.config import Task
from bridle.errors import ConfigError
from bridle.executors.hosting import CAPTURE, Hosted, artifact_path, captured, recalled
from bridle.folders import private_folder
from bridle.gateway.app import Gateway
from bridle.gateway.weights import SetPolicy
from bridle.lifecycle.events import Event
from bridle.lifecycle.manager import Node
from bridle.lifecycle.results import SessionResult
from bridle.lifecycle.run_folder import SESSIONS, RunFolder
from bridle.types import JSON


class Workers(Protocol):
    """A place that runs sessions."""

    outlive: bool
    """Whether runs go on when their caller is cancelled, for the server's next life."""

    @property
    def capture(self) -> Path | None:
        """The capture file of all runs; `None` = each node has one of its own."""

    @property
    def capacity(self) -> int:
        """Return how many runs may be in progress at once."""

    async def run(
        self, task: Task, sample_index: int, run_id: str, avoid: frozenset[str]
    ) -> SessionResult:
        """One run to its end, on none of the nodes `avoid` while there is another.

        `ConfigError`, `StoreError` if it could not be recorded, `NodeLostError` if its machine was
        lost. Cancelling the caller ends the run and leaves nothing of it behind, or, where runs
        `outlive`, leaves it alone.
        """

    def cancel(self, run_id: str) -> bool:
        """End a run, whose result will be CANCELLED; whether there was one."""

    def expect(self, run_id: str) -> bool:
        """Return whether a run of an earlier server goes on; `run` joins it by its id."""

    async def settle(self) -> None:
        """All runs of an earlier server that go on are expected; the keys of others end."""

    async def recall(self, run_id: str) -> SessionResult | None:
        """The result of a run that ended under an earlier server; `None` = it came to no end.

        What is left of one without an end is closed, so that its key is dead.
        """

    def release(self, run_id: str) -> None:
        """The result of a run is stored: nothing of it needs to stay in memory."""

    async def remove(self, run_id: str) -> None:
        """Remove what was kept of a run that has ended: capture, logs, files. `StoreError`."""

    async def kept_bytes(self) -> int:
        """Return the bytes that are kept of runs here."""

    async def set_policy(self, wanted: SetPolicy) -> None:
        """Steer the engines. `EngineError` if they did not do their part."""

    def policy(self) -> JSON:
        """Return the version that samples, and whether sampling is held."""

    def nodes(self) -> list[JSON]:
        """The nodes that there are: name, state, slots, free ones, stages, what went wrong."""

    async def metrics(self) -> dict[str, str]:
        """Return the gateway metrics of each node that answers, by the node's name."""

    async def drain_node(self, name: str) -> None:
        """Give a node no further run. `ConfigError` if there is none, or it is the only one."""

    async def add_replica(self, engine: str) -> None:
        """A server joins the engines of all nodes. `EngineError` if it cannot serve."""

    async def remove_replica(self, name: str, drain_s: float) -> None:
        """A server leaves them, its calls after so many seconds."""

    def listening(self, listener: Callable[[Event], None]) -> AbstractContextManager[None]:
        """Tell `listener` what happens to runs."""

    async def artifact(self, run_id: str, name: str) -> Path | bytes | None:
        """A run's log or kept file: its path, or, from elsewhere, its content; `None` = there is
        none of that name. `capture.sqlite` is what was captured of it, so far.
        """


class ServerFolder(RunFolder):
    """A node's folder under a server: logs and kept files of runs; results are the server's."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """Make it, or take the one that is there. `ConfigError` if another process has it."""
        private_folder(path / SESSIONS)
        return cls(path)

    def append(self, result: SessionResult) -> None:
        """Nothing: the server writes it to where its rows say."""


class NodeWorkers:
    """Implements `Workers` on a node of this process."""

    outlive = False

    def __init__(self, node: Node, gateway: Gateway, store: Store) -> None:
        self._node = node
        self._gateway = gateway
        self._store = store
        self.capture = store.path if isinstance(store, SqliteStore) else None
        self._earlier = gateway.session_ids()
        hosted = Hosted(node, gateway, store)
        self.remove, self.kept_bytes = hosted.remove, hosted.kept_bytes

    @property
    def capacity(self) -> int:
        return self._node.capacity

    async def run(
        self, task: Task, sample_index: int, run_id: str, avoid: frozenset[str]
    ) -> SessionResult:
        return await self._node.run(task, sample_index, session_id=run_id, avoid=avoid)

    def cancel(self, run_id: str) -> bool:
        return self._node.cancel(run_id)

    def expect(self, run_id: str) -> bool:  # noqa: ARG002 - those of an earlier process died with it
        return False

    async def recall(self, run_id: str) -> SessionResult | None:
        return await recalled(run_id, self._gateway, self._store)

    def release(self, run_id: str) -> None:
        self._gateway.forget(run_id)

    async def settle(self) -> None:
        """End sessions of earlier processes and forget them."""
        for session_id in self._earlier:
            if not self._gateway.forget(session_id):
                await recalled(session_id, self._gateway, self._store)
                self._gateway.forget(session_id)

    async def set_policy(self, wanted: SetPolicy) -> None:
        await self._gateway.set_policy(wanted)

    def policy(self) -> JSON:
        return self._gateway.policy()

    def nodes(self) -> list[JSON]:
        stages = {str(status): count for status, count in self._node.stages().items()}
        return [
            {
                "name": "local",
                "node_id": None,
                "state": "live",
                "slots": self._node.capacity,
                "free": self._node.free,
                "stages": stages,
                "policy": self._gateway.policy(),
                "error": None,
            }
        ]

    async def metrics(self) -> dict[str, str]:
        return {"local": self._gateway.metrics()}

    async def drain_node(self, name: str) -> None:  # noqa: ARG002 - whichever it is
        raise ConfigError("the only node is the server's own: drain the server (POST /v1/drain)")

    async def add_replica(self, engine: str) -> None:
        await self._gateway.add_replica(engine)

    async def remove_replica(self, name: str, drain_s: float) -> None:
        await self._gateway.remove_replica(name, drain_s)

    def listening(self, listener: Callable[[Event], None]) -> AbstractContextManager[None]:
        return self._node.events.listening(listener)

    async def artifact(self, run_id: str, name: str) -> Path | bytes | None:
        """Return only what lies in the run's own folder."""
        if name == CAPTURE:
            return await captured(self._store, run_id)
        return artifact_path(self._node, run_id, name)
