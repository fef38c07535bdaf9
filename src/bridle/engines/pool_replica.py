"""Replicas of a pool: the state and the calls of each, and new weights for all of them.

Sessions continue during an update. A replica that is down is skipped; it gets the weights before it
serves again.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import structlog
from pydantic import Field

from bridle.config import Settings
from bridle.engines.base import (
    Engine,
    EngineInfo,
    GenerateChunk,
    GenerateRequest,
    Pausable,
    PauseMode,
    Updatable,
    Weights,
    WeightsLostError,
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
    """Calls that run apart here, or that did when it died (`bridle.engines.pool_routing`)."""
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
    aborted: bool = False
    """Whether its caller ended it."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a call that waits for a replica should look again."""
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


class WeightUpdates(ABC):
    """Holds and updates of something that has replicas of one model.

    `bridle.engines.pool.EnginePool` says what the abstract methods do.
    """

    _latest: tuple[Weights, int] | None = None
    """The weights that were loaded last, and their version."""

    @abstractmethod
    def each(self) -> list[Replica]:
        """Replicas that have started."""

    @property
    @abstractmethod
    def held(self) -> PauseMode | None:
        """Return how sampling is paused; `None` = it is not."""

    @abstractmethod
    def held_as(self, mode: PauseMode | None) -> None:
        """Give no calls out until `None`."""

    @abstractmethod
    async def drain(self, name: str, *, timeout_s: float | None = None) -> None: ...

    @abstractmethod
    def readmit(self, name: str) -> None:
        """Calls for it again."""

    @abstractmethod
    def published(self, version: int) -> None:
        """Some replica has these weights."""

    @abstractmethod
    def lost(self, one: Replica, error: EngineError) -> None:
        """A replica cannot sample."""

    async def hold(self, mode: PauseMode, *, timeout_s: float = 60.0) -> None:
        """Stop all sampling; returns when nothing samples. New calls wait for `release`.

        `abort` ends running calls, which go on from their tokens after `release`; `wait` lets them
        end; `keep` holds them where they are, on engines that can. `EngineError` if it takes more
        than `timeout_s`; nothing is held then.
        """
        self.held_as(mode)
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for one in self._up():
                    group.create_task(one.hold(mode))
        except BaseException as error:
            await self.release()
            if isinstance(error, TimeoutError):
                raise EngineError(f"calls still ran {timeout_s:g} s after the hold") from None
            raise

    async def release(self) -> None:
        """Sampling goes on; idempotent."""
        if self.held is not None:
            up = self._up()
            async with asyncio.TaskGroup() as group:
                releases = [group.create_task(one.release()) for one in up]
            for one, release in zip(up, releases, strict=True):
                if (error := release.result()) is not None:
                    self.lost(one, error)
        self.held_as(None)

    async def update_weights(
        self,
        source: Weights,
        version: int,
        *,
        mode: PauseMode = "abort",
        rolling: bool = False,
        timeout_s: float = 60.0,
        only: Collection[str] | None = None,
        only_older: bool = False,
    ) -> None:
        """Load the weights of `source` into all replicas, or those named in `only`; with
        `only_older`, those whose weights are of an earlier version.

        Sessions go on. All at once under a `hold` of `mode`, which is taken over if there is one
        already; or `rolling`: one replica after the other, while the rest samples under the old
        weights. `EngineError` names replicas that did not take them.
        """
        if not self._up():
            raise EngineError("no replica is there to take weights", retryable=True)
        failed: list[str] = []
        logged: set[str] = set()
        # Again for those that came back meanwhile, with weights that were the newest then.
        while todo := [
            one
            for one in self._up()
            if one.name not in logged
            and (only is None or one.name in only)
            and not (only_older and one.version >= version)
        ]:
            logged.update(one.name for one in todo)
            if rolling and self.held is None:
                failed += await self._in_turn(todo, source, version, wait=mode == "wait")
            else:
                failed += await self._at_once(todo, source, version, mode, timeout_s)
        if failed:
            raise EngineError(f"weights {version} are not everywhere: " + "; ".join(failed))
        if only_older:
            self.remember(source, version)

    def remember(self, source: Weights, version: int) -> None:
        """Replicas with older weights get these before they serve."""
        self._latest = source, version

    def _up(self) -> list[Replica]:
        away = {ReplicaState.DOWN, ReplicaState.RELEASED}
        return [one for one in self.each() if one.state not in away]

    async def caught_up(self, engine: Engine, info: EngineInfo) -> EngineInfo:
        """Give a replica that comes (back) the weights that the others have got meanwhile."""
        if self._latest is None:
            return info
        source, version = self._latest
        if info.version >= version or isinstance(source, Mapping):
            return info
        if isinstance(engine, Updatable):
            await engine.update_weights(source, version)
            return replace(info, version=version)
        return info

    async def catch_up(self, one: Replica) -> EngineError | None:
        """The same for one that was down and is the same server as before; what went wrong."""
        if one.info is None:
            return None
        try:
            with boundary(EngineError, f"updating {one.name}"):
                one.info = await self.caught_up(one.engine, replace(one.info, version=one.version))
        except EngineError as error:
            return error
        one.version = one.info.version
        return None

    async def _at_once(
        self,
        replicas: list[Replica],
        source: Weights,
        version: int,
        mode: PauseMode,
        timeout_s: float,
    ) -> list[str]:
        """Put the weights into all while nothing samples; what went wrong."""
        holds = self.held is None
        if holds:
            await self.hold(mode, timeout_s=timeout_s)
        try:
            async with asyncio.TaskGroup() as group:
                loads = [group.create_task(self._load(one, source, version)) for one in replicas]
            return [text for load in loads for text in load.result()]
        finally:
            if holds:
                await self.release()

    async def _in_turn(
        self, replicas: list[Replica], source: Weights, version: int, *, wait: bool
    ) -> list[str]:
        """Put them into one after the other, its calls having ended or gone elsewhere.

        The only replica is not drained: its calls would have nowhere to go.
        """
        failed: list[str] = []
        for one in replicas:
            alone = len(self.each()) == 1
            if not alone:
                await self.drain(one.name, timeout_s=None if wait else 0)
            try:
                failed += await self._load(one, source, version)
            finally:
                if not alone:
                    self.readmit(one.name)
        return failed

    async def _load(self, one: Replica, source: Weights, version: int) -> list[str]:
        """Load the weights into one replica; what went wrong."""
        if not isinstance(one.engine, Updatable):
            return [f"{one.name} takes no weights from a folder"]
        if isinstance(source, Mapping) and one.reopen is not None:
            return [f"{one.name} is in another process and takes weights from a folder"]
        try:
            with boundary(EngineError, "loading"):
                await one.engine.update_weights(source, version)
        except EngineError as error:
            if isinstance(error, WeightsLostError):
                self.lost(one, error)
            return [f"{one.name}: {error}"]
        one.version = version
        self._latest = source, version
        self.published(version)
        return []
