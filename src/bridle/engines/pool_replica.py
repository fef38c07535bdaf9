"""Replicas of a pool: the state and calls of each, and the choice of the replica for a call."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import ceil
from typing import Generic, Protocol, TypeVar

import structlog
from pydantic import Field

from bridle.config import Settings
from bridle.engines.base import (
    Engine,
    EngineInfo,
    GenerateChunk,
    GenerateRequest,
    Immediate,
    Pausable,
    PauseMode,
)
from bridle.errors import EngineError, boundary
from bridle.types import JSON, FinishReason, VersionSpan

log = structlog.get_logger()

RESUME_S = 30.0
"""How long a server may take to go on after a hold; then it counts as dead."""


class RoutingSettings(Settings):
    """Routing of calls over the replicas of an engine. Times are seconds."""

    sticky: bool = True
    """Keep a session on one replica, for its prefix cache."""
    load_factor: float = Field(default=1.25, ge=1)
    """A replica may have so many times an even share of all running calls."""
    slack: int = Field(default=8, ge=0)
    """So many calls it may have in any case."""
    patience_s: float = Field(default=60, ge=0)
    """How long a call waits for a replica while none is to be had; then it fails."""
    hold_patience_s: float = Field(default=600, ge=0)
    """How long a call waits for the end of a weight update."""
    attempts: int = Field(default=5, ge=1)
    """Failures after which a call fails, and deaths of replicas around it: a prompt that kills
    engines ends here."""
    health_every_s: float = Field(default=10, gt=0)
    """How often a replica that works is asked for its health."""
    health_timeout_s: float = Field(default=5, gt=0)
    health_failures: int = Field(default=3, ge=1)
    """Failed health checks in a row after which a replica counts as dead; its calls move."""
    backoff_s: float = Field(default=0.5, gt=0)
    """Wait between looks at a dead replica; doubles."""
    max_backoff_s: float = Field(default=1, gt=0)
    start_timeout_s: float = Field(default=600, gt=0)
    """How long loading or probing one replica may take."""
    max_version_lag: int | None = Field(default=None, ge=0)
    """Replicas whose weights are more versions old get no calls; `None` = any age will do."""
    keep_tokens: bool = False
    """Have every reply streamed by the engine, so that none of its tokens is lost when a replica
    dies; else only replies that the harness streams go on from the tokens so far, and others are
    sampled anew. Costs a message per token."""


class ReplicaState(StrEnum):
    """Health of a replica."""

    STARTING = "starting"
    LIVE = "live"
    DOWN = "down"
    """It failed; it is looked at until it answers."""
    QUARANTINED = "quarantined"
    """It answers for its health, but fails calls; others get them until it is looked at again."""
    DRAINING = "draining"
    """It gets no new calls; those it has go on."""
    RELEASED = "released"
    """Its trainer has its memory: nothing is sent to it, no health check either."""

    @property
    def out(self) -> bool:
        """Return whether the replica gets no calls until a health check passes."""
        return self in {ReplicaState.DOWN, ReplicaState.QUARANTINED}


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of a pool."""

    name: str
    """Unique in the pool; the URL of a server."""
    engine: Engine
    reopen: Callable[[], Engine] | None = None
    """Makes the engine's adapter anew, for a server that may be another one after it was gone;
    `None` = the engine lives in this process."""
    state: ReplicaState = ReplicaState.STARTING
    info: EngineInfo | None = None
    """What it said when it last started; `None` = it never did."""
    version: int = 0
    """Policy version of its weights, as far as is known."""
    running: dict[str, RoutedCall] = field(default_factory=dict)
    """Calls by request id."""
    unwell: int = 0
    """Failed health checks in a row."""
    gone: bool = False
    """Whether it did not answer since it failed, so that it may have been started anew."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to have it looked at now."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it has no calls."""
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is asked for its health or started anew."""
    since: float = field(default_factory=time.monotonic)
    """When its state last changed."""
    error: str | None = None
    """Why it failed last."""
    suspects: set[RoutedCall] = field(default_factory=set)
    """Calls that run apart here, or that did when it died (`bridle.engines.pool_blame`)."""
    breaks: int = 0
    """Calls in a row that it failed and survived."""
    broke: set[str | None] = field(default_factory=set)
    """The sessions of those."""
    quarantines: int = 0
    """How often it was quarantined since it last served a call."""
    calls: int = 0
    failures: int = 0
    """Calls that it failed."""
    losses: int = 0
    """How often it went down."""
    prompt_tokens: int = 0
    """Of calls that it ended."""
    cached_tokens: int = 0
    """Of those, the ones that came from its prefix cache."""

    @property
    def load(self) -> int:
        return len(self.running)

    def enter(self, state: ReplicaState) -> None:
        """Be in `state` from now on."""
        if state is not self.state:
            self.state, self.since = state, time.monotonic()

    def begin(self, call: RoutedCall) -> None:
        """A call is given to it."""
        self.calls += 1
        self.running[call.request.request_id] = call
        call.version, call.moved = self.version, False
        self.idle.clear()

    def end(self, call: RoutedCall) -> None:
        """A call is no longer its own."""
        self.running.pop(call.request.request_id, None)
        if not self.running:
            self.idle.set()

    async def abort(self, request_id: str) -> None:
        """Have a call ended by the engine, whatever state that is in; its caller did not ask."""
        if self.state is ReplicaState.RELEASED:
            return
        if (call := self.running.get(request_id)) is not None:
            call.moved = True
        try:
            with boundary(EngineError, "ending a call"):
                await self.engine.abort(request_id)
        except EngineError as error:
            log.warning("abort_failed", replica=self.name, error=str(error))

    async def well(self, timeout_s: float) -> EngineError | None:
        """Ask for its health; the error if it cannot sample."""
        try:
            with boundary(EngineError, f"asking {self.name} for its health"):
                async with asyncio.timeout(timeout_s):
                    await self.engine.health()
        except EngineError as error:
            return error
        return None

    async def abort_all(self) -> None:
        for request_id in list(self.running):
            await self.abort(request_id)

    async def hold(self, mode: PauseMode) -> None:
        """Return when it samples nothing; see `EnginePool.hold`."""
        if mode == "abort":
            for call in self.running.values():
                call.moved = True
        if isinstance(self.engine, Pausable) and await self.engine.pause(mode):
            return
        if mode == "abort":
            await self.abort_all()
        if mode != "keep":
            await self.idle.wait()

    async def release(self) -> EngineError | None:
        """Let it go on; the error if it could not be told."""
        if isinstance(self.engine, Pausable):
            try:
                with boundary(EngineError, f"resuming {self.name}"):
                    async with asyncio.timeout(RESUME_S):
                        await self.engine.resume()
            except EngineError as error:
                return error
        return None

    def status(self, sessions: int) -> JSON:
        """A snapshot for operators; `sessions` = how many live there."""
        return {
            "name": self.name,
            "state": self.state.value,
            "for_s": round(time.monotonic() - self.since, 3),
            "version": self.version,
            "model": None if self.info is None else self.info.model,
            "calls_in_flight": self.load,
            "sessions": sessions,
            "calls": self.calls,
            "failures": self.failures,
            "losses": self.losses,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "error": self.error,
        }


@dataclass(slots=True, eq=False)
class RoutedCall:
    """One call on its way through a pool."""

    request: GenerateRequest
    begun: tuple[Replica, Immediate] | None = None
    """The replica, and its engine, that were called outside of a task; `None` = it has a task."""
    aborted: bool = False
    """Whether its caller ended it."""
    _changed: asyncio.Event | None = None
    attempts: int = 0
    """Failures of its own: the replica lived on."""
    deaths: int = 0
    """Replicas that died while they had it, where it may be the reason."""
    moved: bool = False
    """Whether a replica was made to end it for a reason that is not its own."""
    refused: set[Replica] = field(default_factory=set)
    """Replicas that live and did not take it."""
    refusal: EngineError | None = None
    """What the last of them said."""
    given: int = 0
    """Tokens that were given out."""
    cached: int = 0
    spans: list[VersionSpan] = field(default_factory=list)
    """By the version that the replica had when each chunk began: when the one before it came."""
    version: int | None = None
    """The replica's when the last chunk came, or the call began there; `None` = not yet begun."""
    mixed: bool = False
    """Whether the weights changed during some chunk."""

    @property
    def changed(self) -> asyncio.Event:
        """Set when a call that waits for a replica should look again."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

    def took(self, chunk: GenerateChunk, replica: Replica) -> GenerateChunk:
        """Note a chunk; the last one gets the versions that are known.

        The engine's own are believed but where weights changed during the call: an engine that
        knows only its last version would tell that of all tokens.
        """
        count = len(chunk.output_ids)
        version = replica.version if self.version is None else self.version
        if count:
            first = count if chunk.first is None else chunk.first
            self.mixed |= version != replica.version
            self._sampled(first, version)
            if first < count:
                self._sampled(count - first, replica.version)
        self.version = replica.version
        self.cached = max(self.cached, chunk.cached_tokens)
        if chunk.finish_reason is None:
            return chunk
        if self.moved:
            chunk = replace(chunk, moved=chunk.finish_reason is FinishReason.ABORT)
        replica.prompt_tokens += len(self.request.prompt)
        replica.cached_tokens += self.cached
        if chunk.versions:
            replica.version = max(replica.version, chunk.versions[-1].version)
            if len(chunk.versions) > 1 or not (self.mixed or len(self.spans) > 1):
                return chunk
        if not self.spans:
            return chunk
        return replace(chunk, versions=tuple(self.spans), mixed_versions=self.mixed)

    def _sampled(self, count: int, version: int) -> None:
        """Add `count` tokens of `version` to the spans."""
        start, self.given = self.given, self.given + count
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(version, self.spans[-1].start, self.given)
        else:
            self.spans.append(VersionSpan(version, start, self.given))

    def cut(self) -> GenerateChunk:
        """The last chunk of a call whose replica was lost, or that its caller ended."""
        last = GenerateChunk.aborted(tuple(self.spans), self.cached)
        return replace(last, mixed_versions=self.mixed, moved=self.moved)


def check_fit(name: str, its: EngineInfo | None, ours: EngineInfo | None) -> None:
    """Raise `EngineError` if replica `name` is not the same engine as the others (`ours`)."""
    if its is None or ours is None:
        return
    for what in ("model", "logprob_mode", "token_in"):
        known, found = getattr(ours, what), getattr(its, what)
        if known != found:
            raise EngineError(
                f"replica {name} has {what} {found}, the others {known}; replicas must serve "
                "one model in one way (other models have a name of their own in [models])"
            )
    if ours.pictures and not its.pictures:
        raise EngineError(f"replica {name} takes no images with ids, the others do")
    if its.context_length < ours.context_length:
        raise EngineError(
            f"replica {name} has a context of {its.context_length} tokens, the others "
            f"{ours.context_length}"
        )


def make_replica(spec: str, make: Callable[[str], Engine]) -> Replica:
    """The replica that `spec` names, as `make` opens it; only servers are ever opened anew."""
    served = "://" in spec
    return Replica(spec, make(spec), (lambda: make(spec)) if served else None)


class Loaded(Protocol):
    """Replica with a load. Compared by identity."""

    @property
    def load(self) -> int:
        """Calls that run there now."""


PlaceT = TypeVar("PlaceT", bound=Loaded)


class How(StrEnum):
    """Why a call went where it went."""

    FIRST = "first"
    """The session's first call, or a call of no session."""
    STUCK = "stuck"
    """To the session's own replica."""
    SPILLED = "spilled"
    """Away from it: its load was at the bound."""
    MOVED = "moved"
    """Away from it: it was not to be had."""


class Choice(Generic[PlaceT]):
    """Chooses among replicas, and remembers which session lives where."""

    def __init__(
        self,
        *,
        sticky: bool = True,
        load_factor: float = 1.25,
        slack: int = 8,
        remembered: int = 100_000,
    ) -> None:
        """`remembered` is how many sessions are kept; the one that called longest ago goes first.

        Not `sticky`: every call goes where the fewest run.
        """
        self._sticky = sticky
        self._load_factor = load_factor
        self._slack = slack
        self._remembered = remembered
        self._homes: OrderedDict[str, PlaceT] = OrderedDict()
        self._living: dict[PlaceT, int] = {}
        self._turn = 0

    def bound(self, places: Sequence[PlaceT]) -> int:
        """The most calls that a replica may have when one more call is given to `places`."""
        calls = 1 + sum([place.load for place in places])
        return max(self._slack, ceil(self._load_factor * calls / len(places)))

    def pick(self, session_id: str | None, places: Sequence[PlaceT]) -> tuple[PlaceT, How]:
        """The replica for a call, of `places`, which are those to be had; at least one."""
        home = self._homes.get(session_id) if session_id is not None else None
        if home is None:
            how = How.FIRST
        elif home not in places:
            how = How.MOVED
        elif (load := home.load) < self._slack or load < self.bound(places):
            assert session_id is not None
            self._homes.move_to_end(session_id)
            return home, How.STUCK
        else:
            how = How.SPILLED
        place = self._least(places)
        if session_id is not None and self._sticky:
            self._settle(session_id, place)
        return place, how

    def sessions(self, place: PlaceT) -> int:
        """Count the remembered sessions of a replica."""
        return self._living.get(place, 0)

    def forget(self, session_id: str) -> None:
        """A session has ended; unknown ones are left alone."""
        place = self._homes.pop(session_id, None)
        if place is not None:
            self._living[place] -= 1

    def drop(self, place: PlaceT) -> None:
        """A replica has left for good; its sessions have no home."""
        self._homes = OrderedDict(
            (session_id, home) for session_id, home in self._homes.items() if home is not place
        )
        self._living.pop(place, None)

    def _least(self, places: Sequence[PlaceT]) -> PlaceT:
        """Fewest calls, then fewest sessions; equal ones take turns."""
        self._turn += 1
        turned = [*places[self._turn % len(places) :], *places[: self._turn % len(places)]]
        return min(turned, key=lambda place: (place.load, self.sessions(place)))

    def _settle(self, session_id: str, place: PlaceT) -> None:
        self.forget(session_id)
        self._homes[session_id] = place
        self._living[place] = self.sessions(place) + 1
        if len(self._homes) > self._remembered:
            self.forget(next(iter(self._homes)))
