"""Client side of a cluster: its settings, links to nodes, members, runs, choice of a node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol

from pydantic import Field

from bridle.capture.records import Outcome
from bridle.config import AUTO, RuntimeSpec, Settings, Task
from bridle.executors.hosting import End, Hello, News, Start
from bridle.gateway.weights import SetPolicy
from bridle.lifecycle.manager import NodeSettings, plan
from bridle.lifecycle.results import SessionResult, unrecorded
from bridle.types import JSON, Cause, SessionStatus

CPU: Final = "CPU"
MEMORY: Final = "memory"
"""In bytes."""
GPU: Final = "GPU"

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
class Place:
    """A node as far as choosing goes."""

    name: str
    """Unique among the nodes."""
    offers: Mapping[str, float] = field(default_factory=dict)
    """How much it has of each resource."""
    node_id: str = ""
    """What results call it; known once it has answered."""
    capacity: int = 0
    """Sessions that it takes in all."""
    open: bool = False
    """Whether it takes new sessions."""
    used: dict[str, float] = field(default_factory=dict)
    """Of each resource, by the sessions that were placed here."""
    placed: int = 0
    """Sessions that were ever placed here."""
    told_free: int = 0
    """Free slots as it told last."""
    told_placed: int = 0
    """How many of ours it had taken in then."""

    @property
    def free(self) -> int:
        """Slots that are free now, as far as is known: what is on its way counts as taken."""
        return max(0, self.told_free - (self.placed - self.told_placed)) if self.open else 0

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
        """A session of these needs is here."""
        for name, much in needs.items():
            self.used[name] = self.used.get(name, 0.0) + much

    def give(self, needs: Mapping[str, float]) -> None:
        for name, much in needs.items():
            self.used[name] = max(0.0, self.used.get(name, 0.0) - much)


def relevant(runtime: RuntimeSpec, offered: Collection[str]) -> dict[str, float]:
    """The needs that count: what a task names itself, GPUs, and what some node offers."""
    named = {GPU, *runtime.resources}
    needs = needs_of(runtime)
    return {name: much for name, much in needs.items() if name in named or name in offered}


def choose(
    needs: Mapping[str, float], avoid: frozenset[str], places: Iterable[Place]
) -> Place | None:
    """The node for a session; `None` = there is none now.

    One of `avoid` (by `node_id`) is taken only where no other node could ever do it. Of those that
    can, the one with the greatest share of free slots.
    """
    able = [place for place in places if place.open and place.has(needs)]
    others = [place for place in able if place.node_id not in avoid]
    ready = [place for place in others or able if place.free > 0 and place.fits(needs)]
    return max(ready, key=lambda place: (place.free / place.capacity, place.name), default=None)


class Link(Protocol):
    """One node, over a network. Every call raises `NodeLostError` if it cannot be reached."""

    @property
    def name(self) -> str:
        """Unique among the nodes."""

    @property
    def offers(self) -> Mapping[str, float]:
        """Return the amount of each resource that the node's machine has."""

    async def hello(self, owner: str) -> Hello:
        """Call `NodeHost.hello`; the first call waits until the node is up.

        The error that opening it raised, if it cannot be.
        """

    async def news(self, owner: str, epoch: str, after: int, *, wait_s: float) -> News:
        """Call `NodeHost.news`. `NodeLostError` if the node's process is not `epoch` any more."""

    async def start(self, owner: str, starts: Sequence[Start]) -> list[str | None]: ...

    async def result(self, run_id: str) -> End | None: ...

    async def recall(self, run_ids: Sequence[str]) -> dict[str, SessionResult]: ...

    async def ack(self, owner: str, run_ids: Sequence[str]) -> None: ...

    async def cancel(self, run_id: str) -> bool: ...

    async def drain(self) -> None: ...

    async def set_policy(self, wanted: SetPolicy) -> JSON: ...

    async def add_replica(self, engine: str) -> JSON: ...

    async def remove_replica(self, name: str, drain_s: float) -> JSON: ...

    async def artifact(self, run_id: str, name: str) -> bytes | None: ...

    async def remove(self, run_id: str) -> None: ...

    async def metrics(self) -> str: ...

    async def kept_bytes(self) -> int: ...

    async def leave(self) -> None:
        """End the node's process."""


class Patience(Settings):
    """Timeouts for a node, in seconds."""

    lost_after_s: float = Field(default=5, gt=0)
    """A node that does not answer for so long is lost, and its sessions are run again.

    A pause in which the server's own event loop stands still counts as a fifth of it at most.
    """
    tell_s: float = Field(default=1, gt=0)
    """A node that has nothing to tell says so after this."""
    open_s: float = Field(default=600, gt=0)
    """How long a node may take to come up: its engines, its tokenizer."""
    again_s: float = Field(default=0.2, gt=0)
    """Between two tries to reach a node that is away."""


class RaySettings(Patience):
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
    """Who tells of further engines, by a method `engines()` that gives their URLs: the name of an
    actor of the cluster (`NAME`, or `NAMESPACE/NAME`), or `serve:APP`, a Ray Serve application."""
    engines_s: float = Field(default=10, gt=0)
    """Seconds between two times of asking it; an engine that is told no more has its calls for
    `engines_drain_s`."""
    engines_drain_s: float = Field(default=60, ge=0)
    watch_s: float = Field(default=1, gt=0)
    """Seconds between looks for machines that have joined or left."""


class ExecutorSettings(Settings):
    """Choice of the executor."""

    kind: Literal["local", "ray"] = "local"
    """`local`: in the server's process; `ray`: on the machines of a Ray cluster."""
    node: NodeSettings = NodeSettings()
    """How much each node does at once; what is not given follows the machine that it is on."""
    ray: RaySettings = RaySettings()
    """Looked at where `kind` is `ray`."""


@dataclass(eq=False, slots=True)
class Member:
    """A node that takes part."""

    link: Link
    place: Place
    clock: Callable[[], float] = time.monotonic
    """The time by which its silence is measured."""
    runs: dict[str, Run] = field(default_factory=dict)
    """Those that are here, or on their way."""
    epoch: str = ""
    after: int = 0
    heard: float = field(init=False)
    """When it last answered, by `clock`."""
    state: str = "opening"
    """`opening`, `live`, `draining`, `away` (it does not answer), `lost`."""
    error: str | None = None
    stages: Mapping[str, int] = field(default_factory=dict)
    policy: JSON = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is live, or has failed to be."""

    def __post_init__(self) -> None:
        self.heard = self.clock()

    @property
    def silent_s(self) -> float:
        return self.clock() - self.heard

    @property
    def idle(self) -> bool:
        """Return whether the node runs no session of any owner."""
        return not self.runs and self.place.told_free >= self.place.capacity

    def json(self) -> JSON:
        return {
            "name": self.place.name,
            "node_id": self.place.node_id or None,
            "state": self.state,
            "slots": self.place.capacity,
            "free": self.place.free,
            "sessions": len(self.runs),
            "stages": dict(self.stages),
            "offers": dict(self.place.offers),
            "used": {name: much for name, much in self.place.used.items() if much},
            "silent_s": round(self.silent_s, 3),
            "policy": self.policy,
            "error": self.error,
        }


@dataclass(eq=False, slots=True)
class Run:
    """One run that somebody waits for."""

    run_id: str
    task: Task
    sample_index: int
    avoid: frozenset[str]
    earlier: tuple[str, ...]
    """Run ids of the same session's runs that were lost; the end of one of them will do."""
    done: asyncio.Future[SessionResult]
    needs: Mapping[str, float] = field(default_factory=dict)
    member: Member | None = None
    fetching: bool = False
    """Whether its end is on its way here."""
    ended: bool = False
    """Whether its node has told its end."""

    def finish(self, end: End) -> None:
        if not self.done.done():
            if isinstance(end, BaseException):
                self.done.set_exception(end)
            else:
                self.done.set_result(end)

    def never_began(self) -> SessionResult:
        """The result of one that was cancelled while it waited for a node."""
        outcome = Outcome(
            self.run_id,
            SessionStatus.CANCELLED,
            time.time(),
            reward=None,
            cause=Cause.CANCELLED,
            error="cancelled while it waited for a node",
        )
        return unrecorded(self.task, self.sample_index, plan(self.task).harness, outcome)
