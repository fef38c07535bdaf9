"""A node on a machine of its own, which runs sessions for owners in other processes.

Owners call `NodeHost` through a `base.RemoteNode`. It owns the runs that it starts: an owner may
die, connect again under the same name, and find its living and its ended runs. The end of a run is
held until its owner acknowledges it; capture keeps it for good, so that another process on the same
folder finds it again (`recall_all`).

`poll` is a long poll: it returns when there is an event, or after `wait_s`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Final, Self

import structlog

from bridle.aio import Nursery
from bridle.config import Task
from bridle.errors import BridleError, NodeLostError, StoreError, boundary
from bridle.folders import private_file, private_folder
from bridle.node.base import (
    Event,
    EventBatch,
    Handshake,
    NodeCapacity,
    RunEnd,
    RunRequest,
    SessionChanged,
    SessionEnded,
)
from bridle.node.local import LocalNode
from bridle.node.results import SessionResult
from bridle.types import JSON, without_user_info

KEPT_EVENTS: Final = 4096
"""Events that are held for an owner who does not listen; older ones are dropped."""

ARTIFACT_BYTES: Final = 256 << 20
"""Size of the largest file that is sent to an owner."""

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _HeldRun:
    owner: str
    run_id: str
    end: RunEnd | None = None


@dataclass(slots=True, eq=False)
class _Owner:
    name: str
    placed: int = 0
    at: int = 0
    """Number of the last event or end."""
    events: list[tuple[int, Event]] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    """Run id -> the number of its end."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, event: Event | None = None, ended: str | None = None) -> None:
        """Record an event or an ended run, and wake the owner's poll."""
        self.at += 1
        if event is not None:
            self.events.append((self.at, event))
            del self.events[:-KEPT_EVENTS]
        if ended is not None:
            self.ended[ended] = self.at
        self.changed.set()


class NodeHost:
    """Runs sessions for owners elsewhere; the other end of a `base.RemoteNode`.

    Use as an async context manager, inside the node's own.

    All methods belong to one event loop.
    """

    def __init__(self, node: LocalNode, *, node_id: str) -> None:
        self.node = node
        self.node_id = node_id
        self.epoch = token_hex(8)
        self._runs: dict[str, _HeldRun] = {}
        self._owners: dict[str, _Owner] = {}
        self._draining = False
        self._nursery = Nursery(lambda error: log.error("a run was lost", error=repr(error)))
        self._stack = ExitStack()

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self.node.events.listening(self._hear))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._nursery.cancel()
        self._stack.close()

    async def call(self, method: str, *given: object) -> object:
        """Call one of the methods in `base.REMOTE_METHODS`, of this host or else of its node."""
        value = getattr(self if hasattr(self, method) else self.node, method)(*given)
        return await value if asyncio.iscoroutine(value) else value

    # ---- owners

    def connect(self, owner: str) -> Handshake:
        """Accept a connection of a new process of `owner` (a server).

        Events for the owner's earlier process are dropped.
        """
        one = self._owner(owner)
        one.events.clear()
        own = [run for run in self._runs.values() if run.owner == owner]
        return Handshake(
            node_id=self.node_id,
            epoch=self.epoch,
            room=self._room(one),
            living=tuple(run.run_id for run in own if run.end is None),
            ended=tuple(run.run_id for run in own if run.end is not None),
            policy=self.node.policy(),
        )

    async def poll(self, owner: str, epoch: str, after: int, wait_s: float) -> EventBatch:
        """Return the events for `owner` after number `after`; wait up to `wait_s` until there is
        one.

        `NodeLostError` if this process is not `epoch`: it was restarted.
        """
        if epoch != self.epoch:
            raise NodeLostError("the node's process was restarted", may_return=True)
        one = self._owner(owner)
        if one.at <= after:
            one.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await one.changed.wait()
        one.events = [(at, event) for at, event in one.events if at > after]
        return EventBatch(
            at=one.at,
            room=self._room(one),
            events=tuple(event for _, event in one.events),
            ended=tuple(run_id for run_id, at in one.ended.items() if at > after),
        )

    def _owner(self, name: str) -> _Owner:
        return self._owners.setdefault(name, _Owner(name))

    def _room(self, owner: _Owner) -> NodeCapacity:
        stages = {str(status): count for status, count in self.node.stages().items()}
        living = sum(run.end is None for run in self._runs.values())
        capacity = self.node.capacity
        return NodeCapacity(capacity, capacity - living, owner.placed, self._draining, stages)

    # ---- runs

    def start(self, owner: str, requests: Sequence[RunRequest]) -> list[str | None]:
        """Start runs for `owner`; returns for each the reason why not, or `None`."""
        return [self._start(self._owner(owner), one) for one in requests]

    def _start(self, owner: _Owner, wanted: RunRequest) -> str | None:
        if wanted.run_id in self._runs:
            return None
        if self._draining or self._room(owner).free <= 0:
            return "draining" if self._draining else "full"
        run = self._runs[wanted.run_id] = _HeldRun(owner.name, wanted.run_id)
        owner.placed += 1
        self._nursery.start(self._one(owner, run, wanted), name=wanted.run_id)
        return None

    async def _one(self, owner: _Owner, run: _HeldRun, wanted: RunRequest) -> None:
        try:
            with boundary(StoreError, f"running {run.run_id}"):
                task = Task.model_validate_json(wanted.task)
                result = await self.node.run(task, wanted.sample_index, run.run_id)
            run.end = replace(result, node_id=self.node_id)
        except BridleError as error:
            run.end = error
        # Every owner learns that a slot is free.
        for each in self._owners.values():
            each.note(ended=run.run_id if each is owner else None)

    def _hear(self, event: Event) -> None:
        """Report a session's event to its owner, any other event to all owners."""
        if isinstance(event, SessionChanged):
            run = self._runs.get(event.session_id)
            if run is not None:
                self._owner(run.owner).note(event)
            return
        if isinstance(event, SessionEnded):
            return  # the owner gets the result itself
        for each in self._owners.values():
            each.note(event)

    def result(self, run_id: str) -> RunEnd | None:
        run = self._runs.get(run_id)
        return None if run is None else run.end

    def ack(self, owner: str, run_ids: Sequence[str]) -> None:
        """Drop runs of `owner` that have ended from memory; their capture stays."""
        for run_id in run_ids:
            run = self._runs.get(run_id)
            if run is not None and run.owner == owner and run.end is not None:
                del self._runs[run_id]
                self._owner(owner).ended.pop(run_id, None)
                self.node.release(run_id)

    def cancel(self, run_id: str) -> bool:
        run = self._runs.get(run_id)
        if run is None or run.end is not None:
            return False
        return self.node.cancel(run_id)

    async def recall_all(self, run_ids: Sequence[str]) -> dict[str, SessionResult]:
        found: dict[str, SessionResult] = {}
        for run_id in run_ids:
            run = self._runs.get(run_id)
            if run is None:
                result = await self.node.recall(run_id)
                if result is not None:
                    found[run_id] = replace(result, node_id=self.node_id)
            elif isinstance(run.end, SessionResult):
                found[run_id] = run.end
        return found

    # ---- operations of `base.Node` that differ where the caller is elsewhere

    async def artifact(self, run_id: str, name: str) -> bytes | None:
        """Return the content of a run's file, if it has at most `ARTIFACT_BYTES`."""
        found = await self.node.artifact(run_id, name)
        if isinstance(found, Path):
            found = found.read_bytes() if found.stat().st_size <= ARTIFACT_BYTES else None
        return None if found is None or len(found) > ARTIFACT_BYTES else found

    def drain(self, *, draining: bool = True) -> None:
        """Refuse further runs (or accept them again); those in progress continue."""
        self._draining = draining
        for each in self._owners.values():
            each.note()

    async def add_replica(self, engine: str) -> JSON:
        """Add an inference server to the node's engines; one that is among them is left alone."""
        policy = self.node.policy()
        if without_user_info(engine) in policy["replicas"]:
            return policy
        return await self.node.add_replica(engine)

    async def remove_replica(self, name: str, drain_s: float) -> JSON:
        """Remove an inference server from the node's engines; does nothing if it is not
        among them.
        """
        policy = self.node.policy()
        if without_user_info(name) not in policy["replicas"]:
            return policy
        return await self.node.remove_replica(name, drain_s)


def node_name(folder: Path) -> str:
    """Return the name of the node that uses this folder, the same in every process."""
    path = folder / "node.id"
    if not path.exists():
        private_folder(path.parent)
        private_file(path).write_text(f"{socket.gethostname()}-{token_hex(3)}")
    return path.read_text()
