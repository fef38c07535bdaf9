"""Several replicas of one engine as one engine.

A call goes to its session's replica (`pool_routing`). A call that fails before its first token is
retried on another replica; one that fails later ends as `FinishReason.ABORT` with the versions of
its tokens, and the caller resumes it with a new call. While no replica is available, a call waits,
within bounds; then it fails as a retryable `EngineError`.

A failure counts against its call alone until a health check of the replica fails. Calls of a dead
replica are sent elsewhere; `pool_routing` finds the call that killed it.

Replicas are polled for their health. A failed one is checked again with growing waits; a server
that was gone is probed anew before it gets calls, because it may be another one. Replicas can be
added and removed at run time. `hold` stops all sampling for a weight update.
`pool_handover` leaves replicas to their trainer and takes them back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import structlog

from bridle.aio import Nursery
from bridle.engines.adapter import ReplyCheck
from bridle.engines.base import (
    Adaptable,
    Engine,
    EngineInfo,
    GarbledError,
    GenerateChunk,
    GenerateRequest,
    PauseMode,
    Seeing,
    Seen,
    Templating,
    Versioned,
)
from bridle.engines.pool_handover import EngineHandover, Release
from bridle.engines.pool_replica import (
    Replica,
    ReplicaState,
    RoutedCall,
    RoutingSettings,
    check_fit,
    check_version,
)
from bridle.engines.pool_routing import FailureTracker, ReplicaRouter, RoutingReason
from bridle.errors import ConfigError, ContextOverflowError, EngineError, boundary
from bridle.types import JSON, FinishReason, Ids

log = structlog.get_logger()

BUSY = 429
"""Status of a live replica that is overloaded."""

UNAVAILABLE = 503
"""Status of a live replica that is overloaded, or (vLLM from 0.33 on) paused by somebody else."""


class EnginePool(EngineHandover):
    """Pool of replicas of one model, an `Engine` and `Versioned`; `add` and `remove` change it."""

    def __init__(
        self, replicas: Sequence[Replica], *, settings: RoutingSettings | None = None
    ) -> None:
        """Start nothing yet. Raises `ConfigError` if there is no replica, or two have one name."""
        self.settings = settings or RoutingSettings()
        self.vouch: Callable[[Engine, EngineInfo], Awaitable[None]] | None = None
        """Check of each replica before it serves; raises `EngineError`."""
        self.vocab_size: int | None = None
        """Number of ids that the tokenizer has, for engines that do not report their model's."""
        self.routed = dict.fromkeys(RoutingReason, 0)
        """Number of calls by the reason of their routing."""
        self._replicas: dict[str, Replica] = {}
        for one in replicas:
            self._know(one)
        if not self._replicas:
            raise ConfigError("an engine needs at least one replica")
        self._ready: list[Replica] = []
        """Replicas that may get calls now."""
        self._router: ReplicaRouter[Replica] = ReplicaRouter(
            sticky=self.settings.sticky,
            load_factor=self.settings.load_factor,
            slack=self.settings.slack,
        )
        self.calls: dict[str, RoutedCall] = {}
        """Calls under way, by the id of their request."""
        self._failures = FailureTracker(self.settings.attempts)
        self._held: PauseMode | None = None
        self._updated = False
        """True if weights were updated, or sampling was held for an update."""
        self._version = 0
        self._info: EngineInfo | None = None
        self._nursery = Nursery(_log_lost)
        self._turns = asyncio.Lock()
        self._absent: dict[str, Release] = {}

    def _know(self, one: Replica) -> None:
        if one.name.rstrip("/") in {name.rstrip("/") for name in self._replicas}:
            raise ConfigError(f"two replicas are named {one.name!r}; name each replica once")
        self._replicas[one.name] = one

    # ---- life

    async def start(self) -> EngineInfo:
        """Start all replicas at once; those that cannot be reached may join later.

        Raises `EngineError` if none starts, if one cannot give what training needs, or if their
        capabilities differ.
        """
        if self._info is None:
            replicas = list(self._replicas.values())
            ours = [one for one in replicas if one.state is not ReplicaState.RELEASED]
            async with asyncio.TaskGroup() as group:
                begun = [group.create_task(self._begun(one)) for one in ours]
            errors = [error for task in begun if (error := task.result()) is not None]
            infos = [one.info for one in replicas if one.info is not None]
            fatal = [error for error in errors if not error.retryable]
            if fatal or not infos:
                await self.aclose()
                raise (fatal or errors)[0]
            length = min(info.context_length for info in infos)
            self._version = max(info.version for info in infos)
            grammar = all(info.grammar for info in infos)
            pictures = all(info.pictures for info in infos)
            self._info = replace(
                infos[0], context_length=length, grammar=grammar, pictures=pictures
            )
            try:
                for one in self.each():
                    check_fit(one.name, one.info, self._info)
            except EngineError:
                await self.aclose()
                raise
            for one in replicas:
                if one in ours:
                    one.enter(ReplicaState.DOWN if one.info is None else ReplicaState.LIVE)
                self._nursery.start(self._watch(one), name=f"replica {one.name}")
            self._refresh()
        return replace(self._info, version=self._version)

    async def _begun(self, one: Replica, version: int | None = None) -> EngineError | None:
        """Start a replica; return the error if that failed."""
        try:
            await self._begin(one, version)
        except EngineError as error:
            one.error = str(error)
            return error
        return None

    async def _begin(self, one: Replica, version: int | None = None) -> None:
        """Start or probe a replica's engine, with a fresh adapter if it was gone; log a long wait.

        `version` is the version of its weights if it does not tell it; `None` = 0.
        """
        engine = one.reopen() if one.gone and one.reopen is not None else one.engine
        limit = asyncio.timeout(self.settings.start_timeout_s)
        late_s = self.settings.start_timeout_s / 20
        late = partial(log.warning, "replica_not_ready_yet", replica=one.name, after_s=late_s)
        note = asyncio.get_running_loop().call_later(late_s, late)
        try:
            with boundary(EngineError, f"starting {one.name}"):
                async with limit:
                    if version is not None and isinstance(engine, Versioned):
                        await engine.set_version(version)
                    info = await engine.start()
                    if self.vouch is not None:
                        await self.vouch(engine, info)
                    check_fit(one.name, info, self._info)
                    info = await self.caught_up(engine, info)
        except BaseException as error:
            if engine is not one.engine:
                await engine.aclose()
            if limit.expired():
                raise EngineError(
                    f"{one.name} was not ready within {self.settings.start_timeout_s:g} s "
                    "(routing.start_timeout_s): it is still loading, or hangs"
                ) from error
            raise
        finally:
            note.cancel()
        before = one.engine
        one.use(engine)
        one.info, one.version = info, info.version
        if before is not engine:
            await before.aclose()

    async def aclose(self) -> None:
        """End all calls and close all engines; idempotent."""
        await self._nursery.cancel()
        self._ready = []
        for call in self.calls.values():
            call.aborted = True
            call.changed.set()
        async with asyncio.TaskGroup() as group:
            for one in self._replicas.values():
                if one.state is ReplicaState.RELEASED and isinstance(one.engine, Adaptable):
                    one.engine.forget_adapters()
                group.create_task(one.engine.aclose())

    # ---- sampling

    def begin(self, request: GenerateRequest) -> asyncio.Future[Any] | None:
        """Send a call at once to a free replica; see `Immediate.begin`.

        `None` for a call that may have to wait: `generate` sends it.
        """
        keeps = (request.keeps or self.settings.keep_tokens) and not request.stream
        if self._held is not None or not self._ready or (keeps and self._must_stream(request)):
            return None
        failures, session_id = self._failures, request.session_id
        if session_id in failures.records or session_id in failures.offenders:
            return None  # it may have to wait, to run alone or to fail
        one, how = self._router.pick(session_id, self._ready)
        engine = one.immediate
        if engine is None or (waiting := engine.begin(request)) is None:
            return None
        self.routed[how] += 1
        call = RoutedCall(request, begun=(one, engine))
        self.calls[request.request_id] = call
        one.begin(call)
        return waiting

    def arrived(self, request: GenerateRequest) -> GenerateChunk | None:
        """Return the whole reply of a call that `begin` sent, and end the call; `None` = `generate`
        goes on.

        Only a reply that needs no repair: of one policy version, under the prompt that was sent,
        and of a call that was not moved to another replica.
        """
        call = self.calls[request.request_id]
        if call.begun is None or call.moved or call.aborted:
            return None
        one, engine = call.begun
        if call.version != one.version or (chunk := engine.arrived(request)) is None:
            return None
        check = ReplyCheck(request, one.info, self.vocab_size)
        check.take(chunk)
        is_plain = (
            check.is_ours
            and chunk.finish_reason is not FinishReason.ABORT
            and not chunk.extra
            and len(chunk.versions) == 1
            and chunk.output_ids.size == chunk.logprobs.size > 0
        )
        if not is_plain:
            return None
        engine.end(request)
        del self.calls[request.request_id]
        one.prompt_tokens += request.prompt.length
        one.cached_tokens += chunk.cached_tokens
        one.version = max(one.version, chunk.versions[0].version)
        self._failures.served(one, call)
        one.end(call)
        return chunk

    def drop(self, request_id: str) -> None:
        """Abort a call that `begin` sent, if nobody continues it."""
        call = self.calls.get(request_id)
        if call is not None and call.begun is not None:
            one, engine = call.begun
            del self.calls[request_id]
            engine.drop(call.request)
            one.end(call)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Sample one reply, or continue the call that `begin` sent; see `Engine.generate`.

        A call that fails before its first token is tried on other replicas; a reply whose replica
        was lost in mid-reply ends with `FinishReason.ABORT`.
        """
        begun: tuple[Replica, Any] | None = None
        if (call := self.calls.get(request.request_id)) is not None:
            begun, call.begun = call.begun, None
        if call is None or begun is None:
            keeps = request.keeps or self.settings.keep_tokens
            if keeps and not request.stream and self._must_stream(request):
                request = replace(request, stream=True)
            call = RoutedCall(request)
            self._failures.begin(call)
            self.calls[request.request_id] = call
        try:
            while (one := begun[0] if begun else await self._admit(call)) is not None:
                engine = begun[1] if begun else one.engine
                if begun is None:
                    one.begin(call)
                begun = None
                try:
                    chunks = cast("AsyncGenerator[GenerateChunk, None]", engine.generate(request))
                    check = ReplyCheck(request, one.info, self.vocab_size)
                    try:
                        async for chunk in chunks:
                            check.take(chunk)
                            yield call.took(chunk, one)
                    finally:
                        await chunks.aclose()
                    if not call.aborted and not call.moved:
                        self._failures.served(one, call)
                    return
                except EngineError as error:
                    failure = error
                finally:
                    one.end(call)
                await self._judge(one, call, failure)
                if call.given:
                    break
            yield call.cut()
        finally:
            self._failures.end(call)
            del self.calls[request.request_id]

    def _must_stream(self, request: GenerateRequest) -> bool:
        """Return whether an unstreamed reply could lose tokens or their versions, of a call that is
        to keep them.
        """
        if request.begins_again or self.settings.keep_tokens:
            return not request.begins_again
        infos = [one.info for one in self._replicas.values()]
        info = infos[0] if len(infos) == 1 else None
        if info is None or not info.remote:
            return True
        return not info.tells_versions and (self._updated or self._latest is not None)

    async def _admit(self, call: RoutedCall) -> Replica | None:
        """Choose a replica for a call, waiting within bounds; `None` = the caller ended the call.

        Raises `EngineError` if no replica is available in time, or if all live ones refuse the
        call.
        """
        await self._failures.apart(call)
        waiting: float | None = None
        since = 0.0
        while not call.aborted:
            if self._held is None:
                ready = [one for one in self._ready if one not in call.refused]
                if ready:
                    one, how = self._router.pick(call.request.session_id, ready)
                    self.routed[how] += 1
                    self._failures.tries(one, call)
                    return one
                if self._ready and call.refusal is not None:
                    raise call.refusal
            away = self._held is not None or self._away()
            limit = self.settings.hold_patience_s if away else self.settings.patience_s
            if self._held is None and any(one.cut for one in self._replicas.values()):
                limit = 0.0
            if waiting != limit:
                waiting, since = limit, asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout_at(since + limit):
                    await call.changed.wait()
            except TimeoutError:
                raise EngineError(self._nobody(limit), retryable=True) from None
            call.changed.clear()
        return None

    def _nobody(self, waited_s: float) -> str:
        if self._held is not None:
            return f"the weights are still being updated after {waited_s:g} s"
        replicas = "; ".join(
            f"{one.name} is {one.state}: {self._reason(one)}" for one in self._replicas.values()
        )
        return f"no engine was available within {waited_s:g} s: {replicas}"

    def _reason(self, one: Replica) -> str:
        if one.state is ReplicaState.RELEASED:
            return f"{one.released_by or 'its trainer'} has not resumed it"
        return one.error or "its weights are too old"

    async def _judge(self, one: Replica, call: RoutedCall, error: EngineError) -> None:
        """Handle a replica's failure; return if the call may be retried, or if its caller has
        tokens of it and resumes it.

        Otherwise raises the error: the call itself is the cause, or its attempts are spent.
        """
        status = error.status
        blames_call = status is not None and 400 <= status < 500 and not error.retryable
        if blames_call or isinstance(error, ContextOverflowError):
            raise error
        if status == UNAVAILABLE and await self._paused(one, call, error):
            return
        one.failures += 1
        if call.given and isinstance(error, GarbledError):
            raise error
        if call.moved:
            return
        if status != BUSY and one.state is not ReplicaState.DOWN:
            await self._look(one, failures=1)
        if one.state is not ReplicaState.DOWN and self._failures.broke(one, call, error):
            self._quarantine(one)
        if one.state is ReplicaState.DOWN:
            spent = self._failures.died(one, call)
        elif not error.retryable:
            raise error
        else:
            call.refused += (one,)
            call.refusal = error
            call.attempts += 1
            spent = call.attempts >= self.settings.attempts
        if spent and not call.given:
            raise error

    async def _paused(self, one: Replica, call: RoutedCall, error: EngineError) -> bool:
        """Return whether a replica refused a call because somebody else has paused its server.

        It gets no calls then until it is resumed.
        """
        async with one.checking:
            if one.state is ReplicaState.LIVE:
                if await one.is_paused(self.settings.health_timeout_s):
                    log.info("replica_paused", replica=one.name, calls=one.load)
                    one.enter(ReplicaState.PAUSED)
                    one.wake.set()
                    self._refresh()
                elif "paused" in str(error):  # it has been resumed since
                    call.attempts += 1
                    return call.attempts < self.settings.attempts
            return one.state is ReplicaState.PAUSED

    async def abort(self, request_id: str) -> None:
        """End a call; its iterator then yields a last chunk with `FinishReason.ABORT`."""
        call = self.calls.get(request_id)
        if call is None:
            return
        call.aborted = True
        call.changed.set()
        for one in self._replicas.values():
            if one.running.get(request_id) is call:
                with one.touching():
                    await one.engine.abort(request_id)

    # ---- health

    async def health(self) -> None:
        """Return if some replica can sample, or is released to its trainer; otherwise raise
        `EngineError`.
        """
        for one in list(self._ready):
            async with one.checking:
                if one.state is ReplicaState.RELEASED:
                    continue
                if (error := await one.well(self.settings.health_timeout_s)) is None:
                    return
                one.error = str(error)
        if self._away():
            return
        raise EngineError(self._nobody(0), retryable=True)

    async def _watch(self, one: Replica) -> None:
        settings, failed = self.settings, 0
        while self._replicas.get(one.name) is one:
            out = one.state.out
            tries = min(failed + one.quarantines, 30)
            wait_s = min(settings.backoff_s * 2**tries, settings.max_backoff_s)
            try:
                async with asyncio.timeout(wait_s if out else settings.health_every_s):
                    await one.wake.wait()
            except TimeoutError:
                pass
            one.wake.clear()
            if self._held is not None and not one.state.out:
                continue  # its trainer may be loading weights, which can take long
            if one.state is ReplicaState.QUARANTINED and not out:
                continue  # its first look waits as well: its health was good just now
            if one.state.out:
                async with one.checking:
                    failed = 0 if await self._revived(one) else min(failed + 1, 30)
            else:
                await self._look(one, failures=settings.health_failures)

    async def _look(self, one: Replica, *, failures: int) -> None:
        """Check its health; after `failures` failed checks in a row it is down."""
        async with one.checking:
            if one.state is ReplicaState.RELEASED:
                return
            error = await one.well(self.settings.health_timeout_s)
            one.unwell = 0 if error is None else one.unwell + 1
            if error is not None and one.unwell >= failures:
                self._lose(one, error)

    def _lose(self, one: Replica, error: EngineError) -> None:
        """Mark a replica as down: its calls move, and it is checked until it answers."""
        one.error = str(error)
        if one.state is ReplicaState.DOWN:
            return
        log.warning("replica_down", replica=one.name, calls=one.load, error=str(error))
        one.losses += 1
        one.unwell, one.gone = 0, False
        one.enter(ReplicaState.DOWN)
        one.wake.set()
        self._refresh()
        for request_id in list(one.running):
            self._nursery.start(one.abort(request_id), name="abort")

    def _quarantine(self, one: Replica) -> None:
        """Give a failing replica no new calls until its next good health check, if others serve."""
        if one.state is ReplicaState.LIVE and any(other is not one for other in self._ready):
            log.warning("replica_quarantined", replica=one.name, breaks=one.breaks)
            one.quarantines += 1
            one.enter(ReplicaState.QUARANTINED)
            one.wake.set()
            self._refresh()

    async def _revived(self, one: Replica) -> bool:
        """Check a replica that was down; return whether it is live again."""
        if one.state is ReplicaState.RELEASED:
            return False
        error = await one.well(self.settings.health_timeout_s) if one.info is not None else None
        if one.state is ReplicaState.PAUSED:
            if error is not None:
                self._lose(one, error)
            elif await one.is_paused(self.settings.health_timeout_s):
                return False
        if error is None and (one.info is None or (one.gone and one.reopen is not None)):
            error = await self._begun(one)
        elif error is None:
            error = await self.catch_up(one)
        return await self._serving(one, error)

    async def _serving(self, one: Replica, error: EngineError | None) -> bool:
        if error is None and one.paused and self._held is None:
            error = await one.release()
        if error is not None:
            one.gone, one.error = True, str(error)
            return False
        if one.state.out or one.state is ReplicaState.LOADING:
            log.info("replica_up", replica=one.name, version=one.version, policy=self._version)
            one.gone, one.unwell, one.error = False, 0, None
            one.suspects.clear()
            one.enter(ReplicaState.LIVE if one.leaving is None else ReplicaState.DRAINING)
            self._refresh()
        return True

    def _refresh(self) -> None:
        lag = self.settings.max_version_lag
        self._ready = [
            one
            for one in self._replicas.values()
            if one.state is ReplicaState.LIVE
            and (lag is None or one.version >= self._version - lag)
        ]
        for call in self.calls.values():
            call.changed.set()

    # ---- who belongs to it

    async def add(self, one: Replica) -> None:
        """Add a replica. Raises `ConfigError` for a taken name, `EngineError` if it fails."""
        self._know(one)
        try:
            async with one.checking:
                if not self._stays_released(one):
                    await self._begin(one)
                    one.enter(ReplicaState.LIVE if one.leaving is None else ReplicaState.DRAINING)
        except BaseException:
            del self._replicas[one.name]
            await one.engine.aclose()
            raise
        self._nursery.start(self._watch(one), name=f"replica {one.name}")
        self._refresh()

    async def drain(self, name: str, *, timeout_s: float | None = None) -> None:
        """Give a replica no new calls, and wait until its calls have ended.

        Calls that still run after `timeout_s` are ended there and continue elsewhere. Raises
        `KeyError` for an unknown name.
        """
        one = self._replicas[name]
        if one.state.away:
            return
        one.enter(ReplicaState.DRAINING)
        self._refresh()
        try:
            async with asyncio.timeout(timeout_s):
                await one.idle()
        except TimeoutError:
            await one.abort_all()
            await one.idle()

    def readmit(self, name: str) -> None:
        """Send calls to a drained replica again. Raises `KeyError` for an unknown name."""
        one = self._replicas[name]
        if one.leaving is not None:
            one.leaving = ReplicaState.LIVE
        elif one.state is ReplicaState.DRAINING:
            one.enter(ReplicaState.LIVE)
            self._refresh()

    async def remove(self, name: str, *, timeout_s: float | None = 0) -> None:
        """Remove a replica; its calls continue elsewhere after `timeout_s`.

        Raises `ConfigError` if it is the last one, `KeyError` for an unknown name.
        """
        one = self._replicas[name]
        if len(self._replicas) == 1:
            raise ConfigError(f"replica {name!r} is the only one; add another before you remove it")
        await self.drain(name, timeout_s=timeout_s)
        self._absent |= {one: kept for one, kept in self.released().items() if one == name}
        del self._replicas[name]
        one.wake.set()
        self._router.drop(one)
        await one.engine.aclose()

    def forget(self, session_id: str) -> None:
        """Drop all state of a session that has ended."""
        self._router.forget(session_id)
        self._failures.forget(session_id)

    def replicas(self) -> list[JSON]:
        """Return the status of each replica as JSON."""
        return [one.status(self._router.sessions(one)) for one in self._replicas.values()]

    # ---- weights

    async def set_version(self, version: int) -> None:
        """Set the policy version of all replicas' weights, for replies that do not report their
        own.

        `ConfigError` where a replica samples with an adapter of another version.
        """
        check_version(self.each(), version)
        for one in self._replicas.values():
            if isinstance(one.engine, Versioned) and one.info is not None:
                await one.engine.set_version(version)
            one.version = version
        self._version = version
        self._updated = True
        self._refresh()

    def held_as(self, mode: PauseMode | None) -> None:
        """Set how sampling is paused: calls wait until it is `None`."""
        self._held = mode
        self._updated |= mode is not None
        self._refresh()

    @property
    def held(self) -> PauseMode | None:
        """Mode in which sampling is paused; `None` = it is not."""
        return self._held

    def each(self) -> list[Replica]:
        return [one for one in self._replicas.values() if one.info is not None]

    async def see(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, arguments: JSON
    ) -> Seen | None:
        """Return the rendered prompt of messages with images; `None` = the model takes no images.

        Raises a retryable `EngineError` while no replica is live.
        """
        for one in self.each():
            if not isinstance(one.engine, Seeing):
                return None
            if one.state is ReplicaState.LIVE:
                with one.touching():
                    return await one.engine.see(messages, tools, arguments)
        raise EngineError("no replica of the engine is ready; try again later", retryable=True)

    async def template(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, arguments: JSON
    ) -> Ids:
        """Return the prompt ids that the engine's own template makes of messages; tries all live
        replicas.
        """
        failed: EngineError | None = None
        for one in self.each():
            if one.state is not ReplicaState.LIVE or not isinstance(one.engine, Templating):
                continue
            try:
                with one.touching():
                    return await one.engine.template(messages, tools, arguments)
            except EngineError as error:
                if not error.retryable:
                    raise
                failed = error
        raise failed or EngineError("no replica is ready", retryable=True)

    def published(self, version: int) -> None:
        self._version = max(self._version, version)
        self._updated = True
        self._refresh()

    def lost(self, one: Replica, error: EngineError) -> None:
        """Mark a replica as unable to sample until it is restarted."""
        self._lose(one, error)
        one.gone = True


def as_pool(engine: Engine) -> EnginePool:
    """Wrap an engine as a pool of one replica; a pool is returned as it is."""
    return engine if isinstance(engine, EnginePool) else EnginePool([Replica("engine", engine)])


def _log_lost(error: BaseException) -> None:
    """Log a watcher's failure, a bug in this file; its replica keeps its state."""
    log.error("replica_watch_failed", error=f"{type(error).__name__}: {error}")
