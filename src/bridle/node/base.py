"""The contracts of a node, and the values that are exchanged with one.

`Node` has the operations that every form of a node offers: a node in this process
(`local.LocalNode`), one on another machine (`RemoteNode`, of which `ray.RayNode` is a proxy), and
all nodes of a cluster together (`cluster.ClusterRunner`). `SessionRunner` is what a server runs
sessions on, in its own process or on a cluster.

Events tell progress bars, logs and dashboards of a node's sessions. Listeners are plain functions
that run on the event loop, so they must be quick. One that raises has a bug, which ends the session
that the event is about.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from bridle.capture.records import SessionCapture
from bridle.config import Task
from bridle.errors import BridleError
from bridle.gateway.weights import SetPolicy
from bridle.node.results import SessionResult
from bridle.types import JSON, Cause, SessionStatus

if TYPE_CHECKING:
    from bridle.node.local import LocalNode


@dataclass(frozen=True, slots=True)
class SessionChanged:
    """A session entered a status; exactly one of these is final (`cause` is then known)."""

    session_id: str
    task_id: str
    sample_index: int
    harness: str
    status: SessionStatus
    at: float
    """Unix time, seconds."""
    cause: Cause | None = None
    reward: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SessionEnded:
    """A session's result is known; follows its last `SessionChanged`."""

    result: SessionResult
    capture: SessionCapture | None
    """`None` = another node has it."""


@dataclass(frozen=True, slots=True)
class Installing:
    """One line of a harness's installation."""

    harness: str
    line: str


@dataclass(frozen=True, slots=True)
class RoomChanged:
    """The number of sessions that fit has changed: nodes joined, left, or changed their slots."""

    slots: int
    """Sessions that may be in progress at once."""


Event: TypeAlias = SessionChanged | SessionEnded | Installing | RoomChanged
Listener: TypeAlias = Callable[[Event], None]


class Events:
    """The listeners of one node."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Call `listener` with every event until the context ends."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def tell(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            listener(event)


class Node(Protocol):
    """Runs sessions on engines that it steers, and keeps what they leave."""

    async def set_policy(self, wanted: SetPolicy) -> JSON:
        """Change the policy of the node's engines (version, weights, pause); returns the policy
        then.

        `EngineError` if an engine could not do it.
        """

    async def add_replica(self, engine: str) -> JSON:
        """Add an inference server to the node's engines; returns the policy then.

        `EngineError` if it cannot serve.
        """

    async def remove_replica(self, name: str, drain_s: float) -> JSON:
        """Remove an inference server from the node's engines; its calls may continue for `drain_s`.

        Returns the policy then.
        """

    async def metrics(self) -> dict[str, str]:
        """Return the metrics of each node's gateway as Prometheus text, by the name of the node."""

    async def artifact(self, run_id: str, name: str) -> Path | bytes | None:
        """Return a log or a kept file of a run, as a path on this machine or as its content.

        The name `results.CAPTURE` stands for the exchanges captured so far. `None` = there is no
        file of that name.
        """

    async def remove(self, run_id: str) -> None:
        """Delete the capture, logs and files of a run that has ended. Raises `StoreError`."""

    async def kept_bytes(self) -> int:
        """Return the bytes that runs occupy on disk."""


class SessionRunner(Node, Protocol):
    """One node or a cluster, as a server uses it: one run in, one result out.

    What is captured of a run outlives the server, so a run that ended before its result could be
    stored is recalled, not run again.
    """

    events: Events
    """Reports every change of a run."""
    outlive: bool
    """True if runs continue when their caller is cancelled, for the server's next process."""

    @property
    def capture(self) -> Path | None:
        """Capture file of all runs; `None` = this process has none; on a cluster each node has
        one.
        """

    @property
    def capacity(self) -> int:
        """Number of runs that may be in progress at once."""

    async def run(
        self,
        task: Task,
        sample_index: int,
        run_id: str,
        avoid: frozenset[str],
    ) -> SessionResult:
        """Run one session to its end, on none of the nodes `avoid` while there is another.

        Raises `ConfigError` for a task that names something unknown and for an id that runs
        already, `StoreError` if the result could not be recorded, `NodeLostError` if its machine
        was lost. Cancelling the caller ends the run and leaves nothing of it behind; where runs
        outlive the server (`outlive`), the run continues.
        """

    def cancel(self, run_id: str) -> bool:
        """End a run with the result CANCELLED; returns whether there was one of this id."""

    def expect(self, run_id: str) -> bool:
        """Return whether a run that an earlier server process started still continues.

        `run` with its id then waits for its end.
        """

    async def settle(self) -> None:
        """End the runs of an earlier server process that were not expected, and revoke
        their keys.
        """

    async def recall(self, run_id: str) -> SessionResult | None:
        """Return the result of a run that ended under an earlier server process; `None` = it did
        not end.

        A run without an end is closed, so that its key is revoked.
        """

    def release(self, run_id: str) -> None:
        """Drop a run from memory, because its result is stored."""

    def policy(self) -> JSON:
        """Return the policy version that samples, and whether sampling is held."""

    def nodes(self) -> list[JSON]:
        """Return each node's name, state, slots, free slots, stages, policy and error."""

    async def drain_node(self, name: str) -> None:
        """Give a node no further run. `ConfigError` if there is no such node, or it is the one in
        the server's process.
        """


class RemoteNode(Node, Protocol):
    """A node on another machine, which runs sessions for several owners (`host.NodeHost`).

    Every call raises `NodeLostError` if the node cannot be reached.
    """

    @property
    def name(self) -> str:
        """Name of the node, unique among all nodes."""

    @property
    def offers(self) -> Mapping[str, float]:
        """Return the amount of each resource that the node's machine has."""

    async def connect(self, owner: str) -> Handshake:
        """Connect as a new process of `owner` (a server); the first call waits until the node is
        up.

        Raises the error that opening the node raised.
        """

    async def poll(self, owner: str, epoch: str, after: int, wait_s: float) -> EventBatch:
        """Return the node's events after number `after` (0 at first); wait up to `wait_s` for one.

        Polling again with the same `after` returns the same events again. `NodeLostError` if the
        node's process is not `epoch` any more.
        """

    async def start(self, owner: str, requests: Sequence[RunRequest]) -> list[str | None]:
        """Start runs; returns for each the reason why not, or `None`.

        A run that is known already counts as started.
        """

    async def result(self, run_id: str) -> RunEnd | None:
        """Return the end of a run; `None` = it still runs, or is not known."""

    async def recall_all(self, run_ids: Sequence[str]) -> dict[str, SessionResult]:
        """Return the results of those runs that ended on this node, also under an earlier
        process.
        """

    async def ack(self, owner: str, run_ids: Sequence[str]) -> None:
        """Drop runs that have ended from memory; their capture stays."""

    async def cancel(self, run_id: str) -> bool:
        """End a run with the result CANCELLED; returns whether it was running."""

    async def drain(self) -> None:
        """Start no further run; those in progress continue."""

    async def leave(self) -> None:
        """End the node's process."""


REMOTE_METHODS: Final = {
    name
    for protocol in (Node, RemoteNode)
    for name, member in vars(protocol).items()
    if not name.startswith("_") and inspect.iscoroutinefunction(member)
} - {"leave"}
"""Methods of a remote node that its proxy sends to `host.NodeHost.call`."""


class NodeOpener(Protocol):
    """Opens a node in a folder of its own; must be picklable."""

    def __call__(self, folder: Path, cpus: float | None) -> AbstractAsyncContextManager[LocalNode]:
        """`cpus` is what the machine offers to sessions; `None` = all of it."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run to be started."""

    run_id: str
    task: str
    """JSON."""
    sample_index: int


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """Capacity of a node as one owner sees it."""

    capacity: int
    free: int
    """Slots that no owner uses."""
    placed: int
    """Runs of this owner that were ever started here."""
    draining: bool
    stages: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Handshake:
    """A node's answer to an owner's first call."""

    node_id: str
    epoch: str
    """Unique per process; the next one on the same folder has another."""
    room: NodeCapacity
    living: tuple[str, ...]
    """Runs of the owner that continue."""
    ended: tuple[str, ...]
    """Runs of the owner whose end is not acknowledged."""
    policy: JSON


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events since the owner's last poll."""

    at: int
    """The `after` of the next poll."""
    room: NodeCapacity
    events: tuple[Event, ...]
    ended: tuple[str, ...]


RunEnd: TypeAlias = SessionResult | BridleError
"""A run's result, or the error of one that could not be run or recorded."""
