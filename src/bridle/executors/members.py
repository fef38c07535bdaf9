"""Client side of a cluster: links to nodes, members, runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import Field

from bridle.capture.records import Outcome
from bridle.config import Settings, Task
from bridle.executors.hosting import End, Hello, News, Start
from bridle.executors.placing import Place
from bridle.gateway.weights import SetPolicy
from bridle.lifecycle.manager import plan
from bridle.lifecycle.results import SessionResult, unrecorded
from bridle.types import JSON, Cause, SessionStatus


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
