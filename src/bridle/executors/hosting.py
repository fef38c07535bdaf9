"""A node on a machine of its own: sessions that go on, and are kept, whoever asks for them.

`NodeHost` is what another process talks to (`bridle.executors.ray` carries the words). It starts
runs and owns them from then on: who asked for one may die, come again under the same name
(`owner`), and find what still lives and what has ended. What has ended is held until its owner has
acknowledged it; capture has it for good, so it is found again (`recall`) also by another process on
the same folder.

Nothing is polled: `news` answers when there is something to tell, or after `wait_s`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Final, Protocol, Self, TypeAlias

import structlog

from bridle.aio import Nursery
from bridle.capture.reader import excerpt
from bridle.capture.records import Outcome
from bridle.capture.sqlite import SqliteStore
from bridle.capture.store import Store
from bridle.config import Task
from bridle.errors import BridleError, StoreError, boundary
from bridle.folders import private_file, private_folder
from bridle.gateway.app import Gateway
from bridle.gateway.weights import SetPolicy
from bridle.lifecycle.events import Event, SessionChanged, SessionEnded
from bridle.lifecycle.manager import Node
from bridle.lifecycle.results import SessionResult, result_from
from bridle.lifecycle.run_folder import SESSIONS
from bridle.types import JSON, Cause, SessionStatus

KILLED: Final = "its process was killed"
"""Error of a run that has no end of its own."""

KEPT_EVENTS: Final = 4096
"""Events that are held for an owner who does not listen; older ones are dropped."""

CAPTURE: Final = "capture.sqlite"
"""The artifact that is made when it is asked for: what was captured of a run, so far."""

ARTIFACT_BYTES: Final = 256 << 20
"""Larger files stay where they are."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Hosted:
    """A node that is up, with what it stands on."""

    node: Node
    gateway: Gateway
    store: Store

    async def remove(self, run_id: str) -> None:
        """Remove what was kept of a run that has ended: capture, logs, files. `StoreError`."""
        self.gateway.forget(run_id)
        await self.store.forget(run_id)
        if "/" not in run_id:  # such a one never ran, and is not to lead out of the folder
            await asyncio.to_thread(self.node.folder.drop_logs, run_id)

    async def kept_bytes(self) -> int:
        """Return the bytes that runs occupy on disk."""
        logs = self.node.folder.path / SESSIONS
        return await asyncio.to_thread(lambda: self.store.size() + bytes_in(logs))


class Opens(Protocol):
    """Opens a node in a folder of its own; must be picklable."""

    def __call__(self, folder: Path, cpus: float | None) -> AbstractAsyncContextManager[Hosted]:
        """`cpus` is what the machine offers to sessions; `None` = all of it."""


@dataclass(frozen=True, slots=True)
class Start:
    """A run to be started."""

    run_id: str
    task: str
    """JSON."""
    sample_index: int


@dataclass(frozen=True, slots=True)
class Room:
    """Capacity of a node as one owner sees it."""

    capacity: int
    free: int
    """Whoever uses the others."""
    placed: int
    """Runs of this owner that were ever taken in."""
    draining: bool
    stages: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Hello:
    """A node's answer to an owner's first call."""

    node_id: str
    epoch: str
    """Of this process: another one on the same folder has another."""
    room: Room
    living: tuple[str, ...]
    """Runs of the owner that go on."""
    ended: tuple[str, ...]
    """Runs of the owner whose end is not acknowledged."""
    policy: JSON


@dataclass(frozen=True, slots=True)
class News:
    """Events since the owner's last poll."""

    at: int
    """To be given back at the next look."""
    room: Room
    events: tuple[Event, ...]
    ended: tuple[str, ...]


End: TypeAlias = SessionResult | BridleError
"""What a run came to; the error of one that could not be run, or not recorded."""


@dataclass(slots=True, eq=False)
class _Run:
    """One run of an owner."""

    owner: str
    run_id: str
    end: End | None = None
    work: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class _Owner:
    """State of one owner of runs."""

    name: str
    placed: int = 0
    at: int = 0
    """Counts what happens."""
    events: list[tuple[int, Event]] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    """Run id -> when it ended."""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, event: Event | None = None, ended: str | None = None) -> None:
        """Something has happened; whoever waits is told."""
        self.at += 1
        if event is not None:
            self.events.append((self.at, event))
            del self.events[:-KEPT_EVENTS]
        if ended is not None:
            self.ended[ended] = self.at
        self.news.set()


class NodeHost:
    """Runs sessions for owners elsewhere. Use as an async context manager, inside the node's own.

    All methods belong to one event loop.
    """

    def __init__(self, hosted: Hosted, *, node_id: str) -> None:
        self.node_id = node_id
        self.epoch = token_hex(8)
        self._node, self._gateway, self._store = hosted.node, hosted.gateway, hosted.store
        self.remove, self.kept_bytes = hosted.remove, hosted.kept_bytes
        self._runs: dict[str, _Run] = {}
        self._owners: dict[str, _Owner] = {}
        self._draining = False
        self._nursery = Nursery(_log_lost)
        self._stack = ExitStack()

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self._node.events.listening(self._hear))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._nursery.cancel()
        self._stack.close()

    # ---- who asks

    def hello(self, owner: str) -> Hello:
        """Greet a new life of `owner`; what was told to an earlier one is forgotten."""
        one = self._owner(owner)
        one.events.clear()
        own = [run for run in self._runs.values() if run.owner == owner]
        return Hello(
            node_id=self.node_id,
            epoch=self.epoch,
            room=self._room(one),
            living=tuple(run.run_id for run in own if run.end is None),
            ended=tuple(run.run_id for run in own if run.end is not None),
            policy=self._gateway.policy(),
        )

    async def news(self, owner: str, after: int, *, wait_s: float) -> News:
        """Return the events after `after` (0 at first); wait up to `wait_s` until there is one.

        Polling again with the same `after` returns the same events again.
        """
        one = self._owner(owner)
        if one.at <= after:
            one.news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await one.news.wait()
        one.events = [(at, event) for at, event in one.events if at > after]
        return News(
            at=one.at,
            room=self._room(one),
            events=tuple(event for _, event in one.events),
            ended=tuple(run_id for run_id, at in one.ended.items() if at > after),
        )

    def _owner(self, name: str) -> _Owner:
        return self._owners.setdefault(name, _Owner(name))

    def _room(self, owner: _Owner) -> Room:
        stages = {str(status): count for status, count in self._node.stages().items()}
        living = sum(run.end is None for run in self._runs.values())
        capacity = self._node.capacity
        return Room(capacity, capacity - living, owner.placed, self._draining, stages)

    # ---- runs

    def start(self, owner: str, starts: Sequence[Start]) -> list[str | None]:
        """Take runs in; for each why not, or `None`. One that is known is taken in already."""
        return [self._start(self._owner(owner), one) for one in starts]

    def _start(self, owner: _Owner, wanted: Start) -> str | None:
        if wanted.run_id in self._runs:
            return None
        if self._draining or self._room(owner).free <= 0:
            return "draining" if self._draining else "full"
        run = self._runs[wanted.run_id] = _Run(owner.name, wanted.run_id)
        owner.placed += 1
        run.work = self._nursery.start(self._one(owner, run, wanted), name=wanted.run_id)
        return None

    async def _one(self, owner: _Owner, run: _Run, wanted: Start) -> None:
        try:
            with boundary(StoreError, f"running {run.run_id}"):
                task = Task.model_validate_json(wanted.task)
                result = await self._node.run(task, wanted.sample_index, session_id=run.run_id)
            run.end = replace(result, node_id=self.node_id)
        except BridleError as error:
            run.end = error
        # A slot is free for every owner.
        for each in self._owners.values():
            each.note(ended=run.run_id if each is owner else None)

    def _hear(self, event: Event) -> None:
        """Tell a run's owner what happens to it; other events are everybody's."""
        if isinstance(event, SessionChanged):
            run = self._runs.get(event.session_id)
            if run is not None:
                self._owner(run.owner).note(event)
            return
        if isinstance(event, SessionEnded):
            return  # the owner gets the result itself
        for each in self._owners.values():
            each.note(event)

    def result(self, run_id: str) -> End | None:
        """Return the end of a run; `None` = it still runs, or is not known here."""
        run = self._runs.get(run_id)
        return None if run is None else run.end

    def ack(self, owner: str, run_ids: Sequence[str]) -> None:
        """Let go of what has ended; capture has it still."""
        for run_id in run_ids:
            run = self._runs.get(run_id)
            if run is not None and run.owner == owner and run.end is not None:
                del self._runs[run_id]
                self._owner(owner).ended.pop(run_id, None)
                self._gateway.forget(run_id)

    def cancel(self, run_id: str) -> bool:
        """End a run, whose result will be CANCELLED; whether it went on."""
        run = self._runs.get(run_id)
        if run is None or run.end is not None:
            return False
        return self._node.cancel(run_id)

    async def recall(self, run_ids: Sequence[str]) -> dict[str, SessionResult]:
        """The results of those that ended here, also under an earlier process; see `recalled`."""
        found: dict[str, SessionResult] = {}
        for run_id in run_ids:
            run = self._runs.get(run_id)
            if run is None:
                result = await recalled(run_id, self._gateway, self._store)
                if result is not None:
                    found[run_id] = replace(result, node_id=self.node_id)
            elif isinstance(run.end, SessionResult):
                found[run_id] = run.end
        return found

    # ---- what is kept

    async def artifact(self, run_id: str, name: str) -> bytes | None:
        """A log or kept file of a run, or its capture (`CAPTURE`); `None` = there is none of that
        name, or it is too large.
        """
        if name == CAPTURE:
            found = await captured(self._store, run_id)
            return found if found and len(found) <= ARTIFACT_BYTES else None
        path = artifact_path(self._node, run_id, name)
        return path.read_bytes() if path and path.stat().st_size <= ARTIFACT_BYTES else None

    async def metrics(self) -> str:
        """The numbers of this machine's gateway, as Prometheus text."""
        return self._gateway.metrics()

    # ---- the machine

    def drain(self, *, draining: bool = True) -> None:
        """Take no further run (or take some again); those that live go on."""
        self._draining = draining
        for each in self._owners.values():
            each.note()

    async def set_policy(self, wanted: SetPolicy) -> JSON:
        """Steer this node's engines; what the policy is then. `EngineError`."""
        await self._gateway.set_policy(wanted)
        return self._gateway.policy()

    async def add_replica(self, engine: str) -> JSON:
        """A server joins this node's engines; nothing changes if it is there. `EngineError`."""
        if engine not in self._gateway.policy()["replicas"]:
            await self._gateway.add_replica(engine)
        return self._gateway.policy()

    async def remove_replica(self, name: str, drain_s: float) -> JSON:
        """A server leaves them, its calls after so many seconds; one that is not there has left."""
        if name in self._gateway.policy()["replicas"]:
            await self._gateway.remove_replica(name, drain_s)
        return self._gateway.policy()


async def recalled(run_id: str, gateway: Gateway, store: Store) -> SessionResult | None:
    """The result of a run that ended under an earlier process; `None` = it came to no end.

    What is left of one without an end is closed, so that its key is dead. One that a stopping
    process ended did not come to its end.
    """
    try:
        await gateway.seal(run_id)
    except KeyError:
        return None
    outcome = store.outcome(run_id)
    if outcome is None:
        ended = Outcome(
            session_id=run_id,
            status=SessionStatus.ERROR,
            ended_at=time.time(),
            reward=None,
            cause=Cause.INFRASTRUCTURE,
            error=KILLED,
        )
        await store.close_session(ended)
        return None
    if outcome.status == SessionStatus.CANCELLED or outcome.error == KILLED:
        return None
    capture = await asyncio.to_thread(store.read, run_id)
    return await asyncio.to_thread(result_from, capture)


async def captured(store: Store, run_id: str) -> bytes | None:
    """A capture file with one run alone; `None` = there is no such run, or the store has no file.

    Raises `StoreError`.
    """
    if not isinstance(store, SqliteStore):
        return None
    return await asyncio.to_thread(excerpt, store.path, run_id)


def artifact_path(node: Node, run_id: str, name: str) -> Path | None:
    """The path of a run's log or kept file; only what lies in the run's own folder."""
    folder = node.folder.session_folder(run_id).resolve()
    try:
        path = (folder / name).resolve()
        inside = path.is_relative_to(folder) and path.is_relative_to(node.folder.path.resolve())
        return path if inside and path.is_file() else None
    except (OSError, ValueError):  # no file has such a name
        return None


def bytes_in(folder: Path) -> int:
    """Size of all files below a folder; links are not followed, what goes meanwhile is nothing."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(Path(path, name)).st_size
    return total


def node_name(folder: Path) -> str:
    """Return the name of the node of this folder, the same in every process."""
    path = folder / "node.id"
    if not path.exists():
        private_folder(path.parent)
        private_file(path).write_text(f"{socket.gethostname()}-{token_hex(3)}")
    return path.read_text()


def _log_lost(error: BaseException) -> None:
    log.error("a run was lost", error=repr(error))
