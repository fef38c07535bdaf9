"""Scheduling on a cluster: its settings, the nodes and their free slots, the choice of a node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from bridle.capture.records import Outcome
from bridle.config import AUTO, RuntimeSpec, Settings, Task
from bridle.errors import EngineError, NodeLostError
from bridle.gateway.weights import SetPolicy
from bridle.node.base import RemoteNode, RunEnd
from bridle.node.local import NodeSettings, plan
from bridle.node.results import SessionResult, uncaptured_result
from bridle.types import JSON, Cause, SessionStatus

CPU: Final = "CPU"
MEMORY: Final = "memory"
"""In bytes."""
GPU: Final = "GPU"

SLACK_S: Final = 30.0
"""Time of an answer beyond the time that a hold of engines may take."""

_LEAST: Final = 1e-6
"""Amounts that differ by less are equal; sums of floats are not exact."""


def needs_of(runtime: RuntimeSpec) -> dict[str, float]:
    """Return the resources that a session needs beside a slot.

    The name of its runtime counts too (`docker`: 1): it matters where some node offers a resource
    of that name, and says then how many such sandboxes a node takes.
    """
    needs = dict(runtime.resources)
    if runtime.cpus is not None:
        needs[CPU] = runtime.cpus
    if runtime.memory_mb is not None:
        needs[MEMORY] = runtime.memory_mb * 2.0**20
    if runtime.gpus is not None:
        needs[GPU] = float(runtime.gpus)
    if runtime.backend != AUTO:
        needs.setdefault(runtime.backend, 1.0)
    return needs


@dataclass(eq=False, slots=True)
class NodeSlots:
    """Slots and resources of a node, by which one is chosen."""

    name: str
    """Unique among the nodes."""
    offers: Mapping[str, float] = field(default_factory=dict)
    """The amount of each resource that it has."""
    node_id: str = ""
    """Its name in results; known after its first answer."""
    capacity: int = 0
    """Sessions that it runs at once."""
    open: bool = False
    """True if it takes new sessions."""
    used: dict[str, float] = field(default_factory=dict)
    """The amount of each resource that its sessions use."""
    placed: int = 0
    """Sessions that were ever placed here."""
    reported_free: int = 0
    """Free slots in its last report."""
    reported_placed: int = 0
    """Sessions of ours that it had started by then."""

    @property
    def free(self) -> int:
        """Return the slots that are free, as far as is known: runs on their way count as taken."""
        return max(0, self.reported_free - (self.placed - self.reported_placed)) if self.open else 0

    def has(self, needs: Mapping[str, float]) -> bool:
        """Return whether the node has these resources when it is empty."""
        return all(self.offers.get(name, 0.0) >= much - _LEAST for name, much in needs.items())

    def fits(self, needs: Mapping[str, float]) -> bool:
        """Return whether the node has these resources free now."""
        return all(
            self.offers.get(name, 0.0) - self.used.get(name, 0.0) >= much - _LEAST
            for name, much in needs.items()
        )

    def take(self, needs: Mapping[str, float]) -> None:
        """Count the resources of a session that was placed here."""
        for name, much in needs.items():
            self.used[name] = self.used.get(name, 0.0) + much

    def release(self, needs: Mapping[str, float]) -> None:
        for name, much in needs.items():
            self.used[name] = max(0.0, self.used.get(name, 0.0) - much)


def relevant(runtime: RuntimeSpec, offered: Collection[str]) -> dict[str, float]:
    """Return the needs that count: GPUs, what a task names itself, and what some node offers."""
    named = {GPU, *runtime.resources}
    needs = needs_of(runtime)
    return {name: much for name, much in needs.items() if name in named or name in offered}


def choose(
    needs: Mapping[str, float], avoid: frozenset[str], nodes: Iterable[NodeSlots]
) -> NodeSlots | None:
    """Choose the node for a session; `None` = no node is free.

    One of `avoid` (by `node_id`) is taken only where no other node could ever do it. Of those that
    can, the one with the greatest share of free slots.
    """
    able = [node for node in nodes if node.open and node.has(needs)]
    others = [node for node in able if node.node_id not in avoid]
    ready = [node for node in others or able if node.free > 0 and node.fits(needs)]
    return max(ready, key=lambda node: (node.free / node.capacity, node.name), default=None)


class NodeTimeouts(Settings):
    """Timeouts for a node, in seconds."""

    lost_after_s: float = Field(default=5, gt=0)
    """A node that does not answer for so long is lost, and its sessions are run again.

    A pause of the server's own event loop counts as a fifth of it at most.
    """
    tell_s: float = Field(default=1, gt=0)
    """Longest wait of a poll without events."""
    open_s: float = Field(default=600, gt=0)
    """Time limit for opening a node: its engines, its tokenizer."""
    again_s: float = Field(default=0.2, gt=0)
    """Wait between two attempts to reach a node that does not answer."""


class RaySettings(NodeTimeouts):
    """Address of the cluster, and the machines that run sessions."""

    address: str | None = None
    """`HOST:PORT` of the cluster's head, or `local` for a new cluster of this machine alone;
    `None` = `RAY_ADDRESS`, else the cluster that this machine belongs to, else a new one."""
    namespace: str = "bridle"
    """Ray's namespace of the node actors; servers that share nodes share it."""
    resource: str = "bridle_node"
    """Machines that offer it compute sessions; `CPU` = every one that offers processors."""
    folder: Path | None = None
    """Folder on each machine's own disk for captures and logs; `None` = `nodes` in the server's
    data folder, by the same path on each."""
    engines_from: str | None = None
    """Source of further engines, with a method `engines()` that returns their URLs: the name of an
    actor of the cluster (`NAME`, or `NAMESPACE/NAME`), or `serve:APP`, a Ray Serve application."""
    engines_s: float = Field(default=10, gt=0)
    """Seconds between two calls of it; the calls of an engine that is listed no more may continue
    for `engines_drain_s`."""
    engines_drain_s: float = Field(default=60, ge=0)
    watch_s: float = Field(default=1, gt=0)
    """Seconds between two checks for machines that have joined or left."""


class ExecutorSettings(Settings):
    """Choice of the executor."""

    kind: Literal["local", "ray"] = "local"
    """`local`: in the server's process; `ray`: on the machines of a Ray cluster."""
    node: NodeSettings = NodeSettings()
    """Settings of each node; the defaults depend on its machine."""
    ray: RaySettings = RaySettings()
    """Used where `kind` is `ray`."""


@dataclass(eq=False, slots=True)
class Member:
    """A node of the cluster and its state."""

    node: RemoteNode
    slots: NodeSlots
    clock: Callable[[], float] = time.monotonic
    """Clock by which its silence is measured."""
    runs: dict[str, PendingRun] = field(default_factory=dict)
    """Runs that are on the node, or on their way to it."""
    epoch: str = ""
    after: int = 0
    last_contact: float = field(init=False)
    """Time of its last answer, by `clock`."""
    state: str = "opening"
    """`opening`, `live`, `draining`, `away` (it does not answer), `lost`."""
    error: str | None = None
    stages: Mapping[str, int] = field(default_factory=dict)
    policy: JSON = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is live, or has failed to open."""

    def __post_init__(self) -> None:
        self.last_contact = self.clock()

    @property
    def name(self) -> str:
        return f"node {self.slots.node_id}"

    async def steer(self, wanted: SetPolicy) -> JSON:
        """Implement `fleet.Steered.steer`."""
        try:
            async with asyncio.timeout(wanted.timeout_s + SLACK_S):
                self.policy = await self.node.set_policy(wanted)
        except (NodeLostError, TimeoutError) as error:
            raise EngineError(f"it does not answer: {error}") from error
        return dict(self.policy)

    @property
    def silent_s(self) -> float:
        return self.clock() - self.last_contact

    @property
    def idle(self) -> bool:
        """Return whether the node runs no session of any owner."""
        return not self.runs and self.slots.reported_free >= self.slots.capacity

    def json(self) -> JSON:
        return {
            "name": self.slots.name,
            "node_id": self.slots.node_id or None,
            "state": self.state,
            "slots": self.slots.capacity,
            "free": self.slots.free,
            "sessions": len(self.runs),
            "stages": dict(self.stages),
            "offers": dict(self.slots.offers),
            "used": {name: much for name, much in self.slots.used.items() if much},
            "silent_s": round(self.silent_s, 3),
            "policy": self.policy,
            "error": self.error,
        }


def earlier_runs(run_id: str) -> tuple[str, ...]:
    """Return the ids of the same session's runs before this one, which were lost.

    Should one of them turn out to have ended, its result counts. A server names the runs of a
    session SESSION, SESSION.r2, SESSION.r3, ...
    """
    session, _, attempt = run_id.rpartition(".r")
    if not session or not attempt.isdigit():
        return ()
    return (session, *(f"{session}.r{number}" for number in range(2, int(attempt))))


@dataclass(eq=False, slots=True)
class PendingRun:
    """One run that a caller waits for."""

    run_id: str
    task: Task
    sample_index: int
    avoid: frozenset[str]
    done: asyncio.Future[SessionResult]
    needs: Mapping[str, float] = field(default_factory=dict)
    member: Member | None = None
    fetching: bool = False
    """True if its end is being fetched."""
    ended: bool = False
    """True if its node has reported its end."""

    def finish(self, end: RunEnd) -> None:
        if not self.done.done():
            if isinstance(end, BaseException):
                self.done.set_exception(end)
            else:
                self.done.set_result(end)

    def never_began(self) -> SessionResult:
        """Return the result of a run that was cancelled while it waited for a node."""
        outcome = Outcome(
            self.run_id,
            SessionStatus.CANCELLED,
            time.time(),
            reward=None,
            cause=Cause.CANCELLED,
            error="cancelled while it waited for a node",
        )
        return uncaptured_result(self.task, self.sample_index, plan(self.task).harness, outcome)
