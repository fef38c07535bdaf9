"""Replicas of a pool: the state and the calls of each, and new weights for all of them.

Sessions continue during an update. A replica that is down is skipped; it gets the weights before it
serves again.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum

import structlog
from pydantic import Field

from bridle.config import Settings
from bridle.engines.base import (
    Adaptable,
    Engine,
    EngineInfo,
    GenerateChunk,
    GenerateRequest,
    Immediate,
    Pausable,
    PauseMode,
    Updatable,
    Weights,
    WeightsLostError,
    is_adapter,
)
from bridle.errors import ConfigError, EngineError, boundary
from bridle.types import JSON, FinishReason, VersionSpan, without_user_info

log = structlog.get_logger()

RESUME_S = 30.0
"""Time that a server has to resume after a hold; then it counts as dead."""


class RoutingSettings(Settings):
    """Routing of calls over the replicas of an engine. Times are seconds."""

    sticky: bool = True
    """Keep a session on one replica, for its prefix cache."""
    load_factor: float = Field(default=1.25, ge=1)
    """Bound of a replica's running calls, as a multiple of an even share."""
    slack: int = Field(default=8, ge=0)
    """Running calls that are always within the bound."""
    patience_s: float = Field(default=60, ge=0)
    """Time that a call waits while no replica is available; then it fails."""
    hold_patience_s: float = Field(default=600, ge=0)
    """Time that a call waits for the end of a weight update, or for a released engine."""
    attempts: int = Field(default=5, ge=1)
    """Failures, or deaths of replicas, after which a call fails; a prompt that kills engines ends
    here."""
    health_every_s: float = Field(default=10, gt=0)
    """Interval of health checks of a live replica."""
    health_timeout_s: float = Field(default=5, gt=0)
    health_failures: int = Field(default=3, ge=1)
    """Failed health checks in a row after which a replica counts as dead; its calls move."""
    backoff_s: float = Field(default=0.5, gt=0)
    """Wait before a dead replica is checked again; doubles."""
    max_backoff_s: float = Field(default=1, gt=0)
    start_timeout_s: float = Field(default=600, gt=0)
    """Time that loading or probing one replica may take."""
    max_version_lag: int | None = Field(default=None, ge=0)
    """Replicas whose weights are older by more versions get no calls; `None` = no limit."""
    keep_tokens: bool = False
    """Stream every reply from the engine, so that none of its tokens is lost when a replica dies;
    otherwise only replies that the harness streams are resumed, and others are sampled anew. Costs
    a message per token."""


class ReplicaState(StrEnum):
    """Health of a replica."""

    STARTING = "starting"
    LIVE = "live"
    DOWN = "down"
    """It failed; it is checked until it answers."""
    QUARANTINED = "quarantined"
    """It is healthy but fails calls; others get them until its next check."""
    PAUSED = "paused"
    """Somebody else paused its server, which refuses calls; they wait until it is resumed."""
    DRAINING = "draining"
    """It gets no new calls; running ones continue."""
    RELEASED = "released"
    """Its trainer uses its memory: nothing is sent to it, no health check either."""
    LOADING = "loading"
    """Its trainer has given it back: it is checked, and gets the weights that it lacks, before it
    gets calls."""

    @property
    def away(self) -> bool:
        """Return whether the replica is released to its trainer, or is being resumed."""
        return self in {ReplicaState.RELEASED, ReplicaState.LOADING}

    @property
    def out(self) -> bool:
        """Return whether the replica gets no calls until a check passes."""
        return self in {ReplicaState.DOWN, ReplicaState.QUARANTINED, ReplicaState.PAUSED}


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of a pool."""

    name: str
    """Unique in the pool; the URL of a server."""
    engine: Engine
    immediate: Immediate | None = field(init=False)
    """The same, if it can be called without a task."""
    reopen: Callable[[], Engine] | None = None
    """Makes a fresh adapter, because a server that was gone may be another one; `None` = the engine
    runs in this process."""
    state: ReplicaState = ReplicaState.STARTING
    info: EngineInfo | None = None
    """Capabilities at its last start; `None` = it never started."""
    version: int = 0
    """Policy version of its weights, as far as is known."""
    running: dict[str, RoutedCall] = field(default_factory=dict)
    """Calls by request id."""
    load: int = 0
    """Number of them."""
    unwell: int = 0
    """Failed health checks in a row."""
    gone: bool = False
    """True if it has not answered since it failed, so that it may have been restarted."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to have it checked now."""
    touches: int = 0
    """Commands and questions that are being sent to it, health checks and starts apart."""
    resting: asyncio.Event | None = None
    """Set, and dropped, when it has no calls; made by the first who waits for that."""
    paused: bool = False
    """True if its server was paused and not yet resumed."""
    leaving: ReplicaState | None = None
    """Its state before a release that is under way; `None` = none is."""
    released_by: str = ""
    """Name of the trainer that has it; empty = it gave none."""
    cut: bool = False
    """True if calls fail while it is released, instead of waiting for it."""
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a health check or a start."""
    since: float = field(default_factory=time.monotonic)
    """Time when its state last changed."""
    error: str | None = None
    """Its last failure."""
    suspects: set[RoutedCall] = field(default_factory=set)
    """Calls that run apart here, or did when it died (`bridle.engines.pool_routing`)."""
    breaks: int = 0
    """Failed calls in a row that it survived."""
    broke: set[str | None] = field(default_factory=set)
    """Sessions of those calls."""
    quarantines: int = 0
    """Quarantines since it last served a call."""
    calls: int = 0
    failures: int = 0
    """Failed calls."""
    losses: int = 0
    """Number of times it went down."""
    prompt_tokens: int = 0
    """Prompt tokens of finished calls."""
    cached_tokens: int = 0
    """Those of them that came from its prefix cache."""

    def __post_init__(self) -> None:
        self.use(self.engine)

    def use(self, engine: Engine) -> None:
        """Send the replica's later calls to this engine."""
        self.engine = engine
        self.immediate = engine if isinstance(engine, Immediate) else None

    @property
    def id(self) -> str:
        """Short name for `POST /engines/{id}`: host and port of a server."""
        return engine_id(self.name)

    def named_in(self, names: Collection[str] | None) -> bool:
        """Return whether `names` contains the replica's name or id; `None` = all names."""
        return names is None or self.name in names or self.id in names

    def enter(self, state: ReplicaState) -> None:
        """Set the replica's state, and the time since when it is in it."""
        if state is not self.state:
            self.state, self.since = state, time.monotonic()

    def begin(self, call: RoutedCall) -> None:
        """Register a call that the replica runs."""
        self.calls += 1
        self.load += call.request.request_id not in self.running
        self.running[call.request.request_id] = call
        call.version, call.moved, call.pinned = self.version, False, False

    def end(self, call: RoutedCall) -> None:
        """Remove a call that the replica no longer runs."""
        if self.running.pop(call.request.request_id, None) is not None:
            self.load -= 1
        if self.resting is not None:
            self._wake_resting()

    def _wake_resting(self) -> None:
        if self.resting is not None and not self.running:
            self.resting.set()
            self.resting = None

    async def idle(self, *, quiet: bool = False) -> None:
        """Return when the replica has no calls; with `quiet`, when nothing else is sent to it,
        either.
        """
        while self.running or (quiet and self.touches):
            self.resting = self.resting or asyncio.Event()
            await self.resting.wait()

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Keep the replica from being released within the context. `EngineError` if it is
        released.
        """
        if self.state is ReplicaState.RELEASED:
            raise EngineError(
                f"replica {self.name} is released to its trainer, and answers no calls until it "
                "is resumed",
                retryable=True,
            )
        self.touches += 1
        try:
            yield
        finally:
            self.touches -= 1
            self._wake_resting()

    async def abort(self, request_id: str) -> None:
        """Tell the engine to end a call that its caller did not abort; errors are logged."""
        if self.state is ReplicaState.RELEASED:
            return
        if (call := self.running.get(request_id)) is not None:
            call.moved = True
        try:
            with boundary(EngineError, "ending a call"), self.touching():
                await self.engine.abort(request_id)
        except EngineError as error:
            log.warning("abort_failed", replica=self.name, error=str(error))

    async def well(self, timeout_s: float) -> EngineError | None:
        """Check the replica's health; return the error if it cannot sample."""
        try:
            with boundary(EngineError, f"asking {self.name} for its health"):
                async with asyncio.timeout(timeout_s):
                    await self.engine.health()
        except EngineError as error:
            return error
        return None

    async def is_paused(self, timeout_s: float) -> bool:
        """Return whether the replica's server is paused; `False` if it does not tell."""
        if not isinstance(self.engine, Pausable):
            return False
        with suppress(EngineError), boundary(EngineError, f"asking {self.name} for a pause"):
            async with asyncio.timeout(timeout_s):
                return await self.engine.is_paused()
        return False

    async def abort_all(self) -> None:
        """Tell the engine to end all calls of the replica."""
        for request_id in list(self.running):
            await self.abort(request_id)

    async def hold(self, mode: PauseMode) -> None:
        """Pause the replica; return when no call is sampled any more. `mode` is
        `EnginePool.hold`'s.
        """
        if self.state is ReplicaState.RELEASED:
            return
        if mode == "abort":
            for call in self.running.values():
                call.moved = True
        if isinstance(self.engine, Pausable):
            with self.touching():
                self.paused = await self.engine.pause(mode)
            if self.paused:
                return
        if mode == "abort":
            await self.abort_all()
        if mode != "keep":
            await self.idle()

    async def release(self) -> EngineError | None:
        """Resume the replica after a pause; return the error if that failed."""
        if isinstance(self.engine, Pausable) and self.state is not ReplicaState.RELEASED:
            try:
                with boundary(EngineError, f"resuming {self.name}"), self.touching():
                    async with asyncio.timeout(RESUME_S):
                        await self.engine.resume()
                self.paused = False
            except EngineError as error:
                return error
        return None

    def status(self, sessions: int) -> JSON:
        """Return the replica's state for operators; `sessions` is how many sessions use it."""
        names = (
            *("name", "id", "version", "calls", "failures", "losses"),
            *("prompt_tokens", "cached_tokens", "error", "released_by"),
        )
        return {
            **{name: getattr(self, name) for name in names},
            "state": self.state.value,
            "for_s": round(time.monotonic() - self.since, 3),
            "model": None if self.info is None else self.info.model,
            "calls_in_flight": self.load,
            "sessions": sessions,
        }


@dataclass(slots=True, eq=False)
class RoutedCall:
    """One call on its way through a pool."""

    request: GenerateRequest
    begun: tuple[Replica, Immediate] | None = None
    """The replica, and its engine, that were called outside of a task; `None` = it has a task."""
    aborted: bool = False
    """True if its caller ended it."""
    _changed: asyncio.Event | None = None
    attempts: int = 0
    """Failures that the replica survived."""
    deaths: int = 0
    """Replicas that died while they ran it, where it may be the cause."""
    moved: bool = False
    """True if it was ended for a reason that is not its own."""
    refused: tuple[Replica, ...] = ()
    """Live replicas that refused it."""
    refusal: EngineError | None = None
    """Error of the last of them."""
    given: int = 0
    """Tokens sent to the caller."""
    cached: int = 0
    spans: tuple[VersionSpan, ...] = ()
    """Each chunk has the version that the replica had when the chunk before it came."""
    version: int | None = None
    """The replica's version when the last chunk came or the call began; `None` = not begun."""
    mixed: bool = False
    """True if the weights changed during some chunk."""
    pinned: bool = False
    """True if it keeps its adapter, while calls begin with a newer one."""

    @property
    def changed(self) -> asyncio.Event:
        """Event that is set when a call that waits for a replica should check again."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

    def took(self, chunk: GenerateChunk, replica: Replica) -> GenerateChunk:
        """Record a chunk of the reply, and return it; the last one gets the versions that are
        known.

        The versions of an engine that knows each token's count. Those of another one count unless
        weights changed during the call: it would report its last version for all tokens.
        """
        count = chunk.output_ids.size
        version = replica.version if self.version is None else self.version
        now = version if self.pinned else replica.version
        if count:
            first = count if chunk.first is None else chunk.first
            self.mixed |= version != now
            self._sampled(first, version)
            if first < count:
                self._sampled(count - first, now)
        self.version = now
        self.cached = max(self.cached, chunk.cached_tokens)
        if chunk.finish_reason is None:
            return chunk
        if self.moved:
            chunk = replace(chunk, moved=chunk.finish_reason is FinishReason.ABORT)
        replica.prompt_tokens += len(self.request.prompt)
        replica.cached_tokens += self.cached
        if chunk.versions:
            if not self.pinned:
                replica.version = max(replica.version, chunk.versions[-1].version)
            knows = chunk.numbered or len(chunk.versions) > 1
            if knows or not (self.mixed or len(self.spans) > 1):
                return chunk
        if not self.spans:
            return chunk
        return replace(chunk, versions=self.spans, mixed_versions=self.mixed)

    def _sampled(self, count: int, version: int) -> None:
        """Add `count` tokens of `version` to the spans."""
        start, self.given = self.given, self.given + count
        if self.spans and self.spans[-1].version == version:
            start = self.spans[-1].start
            self.spans = self.spans[:-1]
        self.spans += (VersionSpan(version, start, self.given),)

    def cut(self) -> GenerateChunk:
        """Return the last chunk of a call whose replica was lost, or that its caller ended."""
        last = GenerateChunk.aborted(self.spans, self.cached)
        return replace(last, mixed_versions=self.mixed, moved=self.moved)


def check_fit(name: str, its: EngineInfo | None, ours: EngineInfo | None) -> None:
    """Raise `EngineError` if a replica's capabilities differ from those of the pool (`ours`)."""
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
        raise EngineError(
            f"replica {name} takes no images beside token ids, and the others do; a new replica "
            "must take what the others take"
        )
    if its.context_length < ours.context_length:
        raise EngineError(
            f"replica {name} has a context of {its.context_length} tokens, the others have "
            f"{ours.context_length}; a new replica's context must be at least as long"
        )


def engine_id(name: str) -> str:
    """Return the id under which `POST /engines/{id}` knows the replica of this name."""
    return name.partition("://")[2].partition("/")[0] or name


def make_replica(spec: str, make: Callable[[str], Engine]) -> Replica:
    """Return the replica that `spec` names, with the engine that `make` opens; only servers can be
    opened again later.
    """
    served = "://" in spec
    return Replica(without_user_info(spec), make(spec), (lambda: make(spec)) if served else None)


class WeightUpdates(ABC):
    """Holds and weight updates of a pool of replicas.

    `bridle.engines.pool.EnginePool` implements the abstract methods.
    """

    _turns: asyncio.Lock
    """Held while weights are loaded, and while replicas are released or resumed."""
    _latest: tuple[Weights, int] | None = None
    """The weights that were loaded last, and their version."""

    @abstractmethod
    def each(self) -> list[Replica]:
        """Return the replicas that have started."""

    @property
    @abstractmethod
    def held(self) -> PauseMode | None:
        """Mode in which sampling is paused; `None` = it is not."""

    @abstractmethod
    def held_as(self, mode: PauseMode | None) -> None:
        """Set how sampling is paused: calls wait until it is `None`."""

    @abstractmethod
    async def drain(self, name: str, *, timeout_s: float | None = None) -> None:
        """Give a replica no new calls, and wait until its calls have ended."""

    @abstractmethod
    def readmit(self, name: str) -> None:
        """Send calls to a drained replica again."""

    @abstractmethod
    def published(self, version: int) -> None:
        """Record that some replica now has the weights of `version`."""

    @abstractmethod
    def lost(self, one: Replica, error: EngineError) -> None:
        """Mark a replica as unable to sample."""

    async def hold(self, mode: PauseMode, *, timeout_s: float = 60.0) -> None:
        """Stop all sampling; return when nothing samples. New calls wait for `release`.

        `abort` ends running calls, which are resumed after `release`; `wait` lets them finish;
        `keep` holds them where they are, on engines that can. Raises `EngineError` after
        `timeout_s`; nothing is held then.
        """
        self.held_as(mode)
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for one in self._up():
                    group.create_task(one.hold(mode))
        except BaseException as error:
            await self.release()
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"sampling was not held: calls were still running after {timeout_s:g} s"
                ) from None
            raise

    async def release(self) -> None:
        """Resume sampling; idempotent."""
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

        Sessions continue, and updates take turns. All replicas are updated at once under a `hold`
        of `mode`, or under the hold that is already there; with `rolling`, one after the other,
        while the rest samples under the old weights. Engines that are `Adaptable` take an adapter
        without a hold; calls that are two adapters behind then are ended and resumed. Raises
        `EngineError` naming the replicas that failed.
        """
        async with self._turns:
            released = [one for one in self.each() if one.state is ReplicaState.RELEASED]
            for one in released:
                if only is not None and one.named_in(only):
                    raise EngineError(
                        f"replica {one.name} is released to its trainer: it loads weights when it"
                        " is resumed"
                    )
            if not self._up() and not (only_older and released):
                raise EngineError(
                    "no replica is live, so none can take weights; try again later", retryable=True
                )
            failed: list[str] = []
            logged: set[str] = set()
            # Again for those that came back meanwhile, with weights that were the newest then.
            while todo := [
                one
                for one in self._up()
                if one.name not in logged
                and one.named_in(only)
                and not (only_older and one.version >= version)
            ]:
                logged.update(one.name for one in todo)
                if rolling and self.held is None:
                    failed += await self._in_turn(todo, source, version, wait=mode == "wait")
                else:
                    failed += await self._at_once(todo, source, version, mode, timeout_s)
            if failed:
                errors = "; ".join(failed)
                raise EngineError(f"weights {version} did not load everywhere: {errors}")
            if only_older:
                self.remember(source, version)

    def remember(self, source: Weights, version: int) -> None:
        """Record the latest weights, which replicas with older ones load before they serve
        again.
        """
        self._latest = source, version

    def _up(self) -> list[Replica]:
        away = {ReplicaState.DOWN, ReplicaState.RELEASED}
        return [one for one in self.each() if one.state not in away]

    async def caught_up(self, engine: Engine, info: EngineInfo) -> EngineInfo:
        """Load the latest weights into a replica that starts or comes back, unless it has them.

        Returns its capabilities then.
        """
        if self._latest is None:
            return info
        source, version = self._latest
        if info.version >= version or isinstance(source, Mapping):
            return info
        if isinstance(engine, Updatable):
            await _put(engine, source, version)
            return replace(info, version=version)
        return info

    async def catch_up(self, one: Replica) -> EngineError | None:
        """Load the latest weights into the server of a replica that was down; return the error if
        any.
        """
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
        """Load the weights into all while nothing samples; return the errors."""
        holds = self.held is None and not all(_keeps_calls(one, source) for one in replicas)
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
        """Load the weights into one after the other, each drained first; return the errors.

        The only replica is not drained, because its calls could not move.
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
        """Load the weights into one replica; return the errors."""
        if not isinstance(one.engine, Updatable):
            return [f"{one.name} takes no weights from a folder"]
        if isinstance(source, Mapping) and one.reopen is not None:
            return [f"{one.name} is in another process and takes weights from a folder"]
        adapts = _keeps_calls(one, source)
        try:
            with boundary(EngineError, "loading"), one.touching():
                behind = [name for name, call in one.running.items() if call.pinned]
                await _put(one.engine, source, version)
        except EngineError as error:
            if isinstance(error, WeightsLostError):
                self.lost(one, error)
            return [f"{one.name}: {error}"]
        for call in one.running.values():
            call.pinned = adapts
        one.version = version
        self._latest = source, version
        self.published(version)
        for request_id in behind:  # now, so that they are resumed under what was loaded
            await one.abort(request_id)
        return []


def check_version(replicas: Collection[Replica], version: int | None) -> None:
    """Raise `ConfigError` if calls would report `version` and sample with another version's
    adapter.
    """
    for one in replicas:
        engine = one.engine
        if one.gone or version in {None, one.version} or not isinstance(engine, Adaptable):
            continue
        if engine.adapted():
            raise ConfigError(
                f"replica {one.name} samples with the LoRA adapter of version {one.version}, and "
                f"a version alone changes no adapter: give the folder of version {version} as "
                "`weights`"
            )


def _keeps_calls(one: Replica, source: Weights) -> bool:
    """Return whether a replica takes `source` beside what its running calls sample with."""
    return is_adapter(source) and isinstance(one.engine, Adaptable)


async def _put(engine: Updatable, source: Weights, version: int) -> None:
    """Load weights, or an adapter beside those that running calls have, if the engine can."""
    if isinstance(engine, Adaptable) and is_adapter(source):
        assert not isinstance(source, Mapping)
        await engine.load_adapter(source, version)
    else:
        await engine.update_weights(source, version)
