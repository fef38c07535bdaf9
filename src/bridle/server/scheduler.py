"""Scheduler: starts sessions on the workers as slots become free, and stores their results.

It is event-driven: a submission, an end or a new policy version wakes it; the only timer is for
sessions that wait to be run again. One asyncio task owns a run from its lease to its final row; it
keeps the result while the database cannot be used.

Limits hold back new groups, never the rest of a group that has started: `max_inflight_groups` and
`max_unacked_groups` for each owner, `max_version_lag` for all (`ServiceSettings`).

`follow` adds and removes the workers' engines while the server runs, as a file or a URL names them.
That source has lines, JSON, the Prometheus file that verl writes for its servers, or is a router's
list of its workers. `KIND:` before it is the kind of servers that it names without one.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
import numpy as np
import structlog

from bridle.aio import Condition, Nursery, run_shielded
from bridle.config import Task
from bridle.errors import (
    BridleError,
    ConfigError,
    NodeLostError,
    StoreError,
    boundary,
    root_cause,
)
from bridle.gateway.faults import trace_of
from bridle.node.base import SessionRunner
from bridle.node.results import SessionResult
from bridle.server.finalize import without_run
from bridle.server.schemas import Claim, EndedRun, FinalizeResult
from bridle.server.storage import UnwritableError, until_done
from bridle.server.store import ClaimLimits
from bridle.trajectory.sample import Trajectory
from bridle.types import Cause, SessionStatus, without_user_info

if TYPE_CHECKING:
    from bridle.server.service import Service

UNSTORED: Final = 2
"""Runs per slot that may run or wait to be stored; beyond, slots stay empty."""

PUT_BACK_S: Final = 30.0
"""Time that a stopping server tries to requeue its runs; the next one finds them in any case."""

log = structlog.get_logger(__name__)


class Scheduler:
    """Runs claimed sessions while `run` runs; `cancel_runs` may be called at any time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store, self._queries = service.store, service.queries
        self._files, self._workers = service.files, service.workers
        self._settings, self._owner = service.settings, service.owner
        self._running: dict[str, Claim] = {}
        """Runs whose results are not stored yet, by id."""
        self._computing: set[str] = set()
        """Those of them that have not ended; each has a slot."""
        self._cancelled_early: set[str] = set()
        """Runs that were cancelled before they were given to the workers."""
        self._adopted: list[Claim] = []
        self._closing = asyncio.Event()
        self.wake = Condition()
        self.idle = Condition()
        """A run was stored or requeued."""
        self.draining = False
        """True if this process starts no further session."""

    @property
    def running(self) -> tuple[Claim, ...]:
        """Claims of the runs whose results are not stored yet."""
        return tuple(self._running.values())

    def claim_of(self, run_id: str) -> Claim | None:
        """Return the claim of a run in progress; `None` = no such run."""
        return self._running.get(run_id)

    # ---- starting

    async def run(self) -> None:
        """Start queued sessions until cancelled; then cancel the runs in progress and queue them
        again.

        Runs that have ended and are not stored yet stay leased: the next server takes them over.
        """
        async with Nursery(
            lambda error: log.error("a run was lost", trace=trace_of(error))
        ) as nursery:
            try:
                await self._start_sessions(nursery)
            finally:
                self._closing.set()

    async def _start_sessions(self, nursery: Nursery) -> None:
        while True:
            ticket = self.wake.ticket()
            adopted, self._adopted = self._adopted, []
            self._start(adopted, nursery)
            slots = self._slots()
            wait_s = None
            if slots > 0 and not self.draining:
                claims = await until_done(lambda: self._claim(slots), "claiming sessions")  # noqa: B023 - awaited here
                self._start(claims, nursery)
                wait_s = await until_done(self._until_due, "reading when the next session is due")
            await Condition.wait(ticket, wait_s)

    def _slots(self) -> int:
        """Return how many runs may start: the free slots, or fewer while results pile up."""
        capacity = self._workers.capacity
        unstored = UNSTORED * capacity - len(self._running)
        return min(capacity - len(self._computing), unstored)

    def _start(self, claims: Sequence[Claim], nursery: Nursery) -> None:
        for claim in claims:
            self._running[claim.run_id] = claim
            self._computing.add(claim.run_id)
            nursery.start(self._own(claim), name=claim.run_id)

    async def _claim(self, slots: int) -> list[Claim]:
        await self._files.check()  # no session starts while its result could not be written
        limits = await self._limits(slots)
        now = time.time()
        return await self._store.claim(
            limits, owner=self._owner, now=now, lease_s=self._settings.lease_s
        )

    async def _until_due(self) -> float | None:
        due = await self._store.next_due()
        return None if due is None else max(0.05, due - time.time())

    async def _limits(self, slots: int) -> ClaimLimits:
        """Return the limits for so many slots: how many new groups the settings allow now."""
        settings, groups = self._settings, None
        limits = list[tuple[int, Counter[str]]]()
        if settings.max_inflight_groups is not None:
            limits.append((settings.max_inflight_groups, await self._queries.inflight_groups()))
        if settings.max_unacked_groups is not None:
            unstored = (one for one in self.running if one.run_id not in self._computing)
            ending = {(one.owner, one.task_id) for one in unstored}  # they may have ended
            unacked = await self._queries.unacked_groups() + Counter(owner for owner, _ in ending)
            limits.append((settings.max_unacked_groups, unacked))
        if (left := await self._left()) is not None:
            groups = max(0, left)
        return ClaimLimits(slots, groups, limits)

    async def _left(self) -> int | None:
        """Return how many groups may still start under this policy version; `None` = any number."""
        lag, size = self._settings.max_version_lag, self._settings.groups_per_version
        if lag is None or size is None:
            return None
        version = await self._store.number("policy_version")
        return size * (version + 1 + lag) - await self._queries.started_groups()

    async def held_until(self) -> int | None:
        """Return the policy version that `max_version_lag` holds new groups back until; `None` = it
        holds none back.
        """
        left, size = await self._left(), self._settings.groups_per_version
        if left is None or size is None or left > 0:
            return None
        return await self._store.number("policy_version") + 1 + -left // size

    # ---- ending

    def cancel_runs(self, run_ids: tuple[str, ...]) -> None:
        """Cancel runs in progress; their results will be CANCELLED."""
        for one in run_ids:
            if one in self._running and not self._workers.cancel(one):
                self._cancelled_early.add(one)

    async def drained(self, timeout_s: float) -> int:
        """Wait until nothing runs, at most `timeout_s`; return how many runs are left."""
        deadline = time.monotonic() + timeout_s
        while self._running and (left_s := deadline - time.monotonic()) > 0:
            await Condition.wait(self.idle.ticket(), left_s)
        return len(self._running)

    # ---- one run

    async def _own(self, claim: Claim) -> None:
        try:
            if claim.run_id in self._cancelled_early:
                outcome = await self._finish(_not_run(claim, "cancelled", Cause.CANCELLED))
            else:
                outcome = await self._run(claim)
        except asyncio.CancelledError:
            # A run that has ended is recalled by the next server, not run again.
            if claim.run_id in self._computing and not self._workers.outlive:
                await run_shielded(self._requeue(claim), timeout_s=PUT_BACK_S)
            raise
        finally:
            self._workers.release(claim.run_id)
            self._computing.discard(claim.run_id)
            self._running.pop(claim.run_id, None)
            self._cancelled_early.discard(claim.run_id)
            self.idle.notify_all()
            self.wake.notify_all()
        self._service.finalized(outcome)

    def adopt(self, claims: Sequence[Claim]) -> None:
        """Take over runs that an earlier process started and that still continue.

        Their leases belong to this server already.
        """
        self._adopted += claims
        self.wake.notify_all()

    async def _run(self, claim: Claim) -> FinalizeResult:
        task = Task.model_validate_json(claim.spec).model_copy(update={"owner": claim.owner})
        try:
            with boundary(StoreError, f"running {claim.run_id}"):
                result = await self._workers.run(
                    task, claim.sample_index, claim.run_id, claim.avoid
                )
        except ConfigError as error:
            # Something that existed at submission does not exist any more; a retry would fail too.
            return await self._finish(_not_run(claim, str(error), None))
        except NodeLostError as error:
            return await self._requeue_lost(claim, str(error))
        except BridleError as error:
            return await self._finish(_not_run(claim, str(error), Cause.INFRASTRUCTURE))
        self._computing.discard(claim.run_id)
        self.wake.notify_all()  # its slot is free before its result is stored
        return await self.store_result(claim, result)

    async def store_result(self, claim: Claim, result: SessionResult) -> FinalizeResult:
        """Store a run's result: the trajectory's file first, then the database row."""
        trajectory = replace(
            result.trajectory,
            session_id=claim.session_id,
            metadata=result.trajectory.metadata
            | {"attempt": claim.attempt, "run_id": claim.run_id},
        )
        name = self._files.name(claim.run_id)
        try:
            size = await until_done(
                lambda: self._files.write(name, trajectory),
                "writing a trajectory",
                closing=self._closing,
                patience_s=self._settings.store_patience_s,
            )
        except StoreError as error:
            if self._closing.is_set() and not isinstance(error, UnwritableError):
                raise
            log.error("a trajectory could not be written", run_id=claim.run_id, error=str(error))  # noqa: TRY400 - its text says all
            failure = f"store_error: the trajectory could not be written: {root_cause(error)}"
            return await self._finish(_not_run(claim, failure, Cause.INFRASTRUCTURE))
        low, high = versions_of(trajectory)
        ended = EndedRun(
            session_id=claim.session_id,
            attempt=claim.attempt,
            status=result.status,
            cause=result.cause,
            usable=is_usable(result),
            result=result.head() | {"session_id": claim.session_id, "run_id": claim.run_id},
            file=name,
            file_bytes=size,
            version_min=low,
            version_max=high,
        )
        outcome = await self._finish(ended)
        if outcome.what == "final":
            self._service.metrics.kept(trajectory)
        if outcome.what == "again" or (
            outcome.what == "lost" and not await self._names(name, claim)
        ):
            await self._files.remove(name)
        return outcome

    async def _names(self, name: str, claim: Claim) -> bool:
        """Return whether the session's row names this file: then only the reply was lost."""
        row = await until_done(
            lambda: self._queries.session(claim.session_id),
            "reading a session",
            closing=self._closing,
        )
        return row is not None and row["file"] == name

    async def _finish(self, ended: EndedRun) -> FinalizeResult:
        outcome = await until_done(
            lambda: self._store.finish(ended, owner=self._owner, now=time.time()),
            f"storing {ended.session_id}",
            closing=self._closing,
        )
        self._service.metrics.run_ended(ended, outcome.what)
        return outcome

    async def put_back(self, claim: Claim, why: str) -> FinalizeResult:
        """Queue a session again; `why` says whether its run was `interrupted` or `stopped`."""
        return await self._store.put_back(
            claim.session_id, claim.attempt, owner=self._owner, why=why, now=time.time()
        )

    async def _requeue_lost(self, claim: Claim, why: str) -> FinalizeResult:
        """Queue a session again whose node was lost, without backoff."""
        log.warning("a run was lost with its node", run_id=claim.run_id, why=why)
        outcome = await until_done(
            lambda: self.put_back(claim, "interrupted"),
            f"requeueing {claim.session_id}",
            closing=self._closing,
        )
        self._service.metrics.run_lost(outcome.what)
        return outcome

    async def _requeue(self, claim: Claim) -> None:
        """Queue a session again because this server stops."""
        try:
            await self.put_back(claim, "stopped")
        except BridleError as error:
            log.warning("a session was not requeued", session=claim.session_id, error=str(error))


def is_usable(result: SessionResult) -> bool:
    """Return whether a session can be trained: it completed, or has a reward and traces."""
    if result.status is SessionStatus.COMPLETED:
        return True
    return result.reward is not None and bool(result.trajectory.traces)


def versions_of(trajectory: Trajectory) -> tuple[int | None, int | None]:
    """Return the lowest and the highest policy version of a trajectory's sampled tokens."""
    sampled = [trace.versions[trace.versions >= 0] for trace in trajectory.traces]
    every = np.concatenate(sampled) if sampled else np.empty(0, dtype=np.int32)
    return (int(every.min()), int(every.max())) if len(every) else (None, None)


def _not_run(claim: Claim, error: str, cause: Cause | None) -> EndedRun:
    """Return the end of a run that could not start or be stored."""
    ended = without_run(claim, error, cause)
    ended.result["run_id"] = claim.run_id
    return ended


READ_EVERY_S = 5.0
PATIENCE_S = 1800.0
"""Time that a server waits for the first engine: a trainer may load its model first."""
DRAIN_S = 30.0
"""Time that the calls of an engine that leaves may continue there."""
MOST_BYTES = 1 << 20
"""Limit of the file or answer that names engines; a longer one names none."""

ENGINE = re.compile(
    r"""(?:(?<![a-z])[a-z]+:)?https?://[^\s"',{}]+"""
    r"|(?<![\w./:-])(?:\[[0-9a-fA-F:]+\]|\w[\w.-]*):\d{1,5}(?![\w:])"
)

KIND = re.compile(r"sglang:(?=https?://|/|\.)")
"""Kind of a source's servers; `http://` alone means vLLM."""


def engines_in(text: str) -> list[str]:
    """Return the engines that a text lists, each once, in the form of the option `--engine`."""
    found = [one if "://" in one else f"http://{one}" for one in ENGINE.findall(text)]
    return list(dict.fromkeys(found))


async def engines_named(source: str) -> list[str]:
    """Return the engines that a file or an `http(s)://` URL lists now; none where it cannot be
    read.
    """
    if kind := KIND.match(source):
        found = await engines_named(source[kind.end() :])
        return [kind[0] + one if one.startswith("http") else one for one in found]
    try:
        if "://" not in source:
            return engines_in(await asyncio.to_thread(_read, Path(source)))
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as http,
            http.get(source) as answer,
        ):
            content = b""
            async for part in answer.content.iter_any():
                content = _short(content + part)
            return engines_in(content.decode())
    except (OSError, ValueError, TimeoutError, aiohttp.ClientError):
        return []


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return _short(file.read(MOST_BYTES + 1)).decode()


def _short(content: bytes) -> bytes:
    if len(content) > MOST_BYTES:
        raise ValueError(f"the list of engines has more than {MOST_BYTES} bytes")
    return content


async def first_named(source: str, stop: asyncio.Event) -> list[str]:
    """Wait until a file or URL lists engines, and return them; none if `stop` is set before.

    `ConfigError` if none is listed for half an hour.
    """
    log.info("waiting_for_engines", source=source)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not stop.is_set():
                if found := await engines_named(source):
                    return found
                with suppress(TimeoutError):
                    async with asyncio.timeout(READ_EVERY_S):
                        await stop.wait()
            return []
    except TimeoutError:
        raise ConfigError(
            f"the list of engines {source} named no engine for {PATIENCE_S:g} s; is it there, and "
            "not empty?"
        ) from None


async def follow(
    source: str, workers: SessionRunner, there: Iterable[str], *, every_s: float = READ_EVERY_S
) -> None:
    """Add and remove engines as the list in the file or URL `source` changes; runs until cancelled.

    `there` are the engines in use at the start. A list that is empty, or cannot be read, changes
    nothing. An engine that cannot be added, or cannot be removed because it is the only one, is
    tried again each time.
    """
    joined, failing = set(there), set[str]()
    # Of the joined ones, those that a policy has listed since, and those in use at the start.
    listed = {without_user_info(one) for one in joined}
    while True:
        await asyncio.sleep(every_s)
        listed |= _names(workers)
        if not (wanted := await engines_named(source)):
            continue
        failing -= joined.intersection(wanted)
        for engine in [one for one in wanted if one not in joined]:
            try:
                await workers.add_replica(engine)
            except BridleError as error:
                _note("engine_cannot_join", engine, error, failing)
                continue
            failing.discard(engine)
            joined.add(engine)
            listed.discard(without_user_info(engine))
        for engine in joined - set(wanted):
            try:
                await workers.remove_replica(engine, DRAIN_S)
            except BridleError as error:
                # One that was removed by hand is missing; a node's policy may be an older one.
                known = _names(workers)
                if not known or without_user_info(engine) not in listed - known:
                    _note("engine_cannot_leave", engine, error, failing)
                    continue
            failing.discard(engine)
            joined.discard(engine)


def _names(workers: SessionRunner) -> set[str]:
    """Return the names of the engines that the nodes' policies list."""
    return {one["name"] for one in workers.policy()["engines"]}


def _note(event: str, engine: str, error: BridleError, failing: set[str]) -> None:
    """Log the first of an engine's failures in a row."""
    if engine not in failing:
        log.warning(event, engine=without_user_info(engine), error=str(error))
    failing.add(engine)
