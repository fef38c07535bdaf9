"""Gives sessions to the workers as slots become free, and writes what became of them.

Event-driven: a submit, an end, a new policy version wake it; the only timer is that of sessions
which wait to be run again. A run's task in this process owns it from its lease to its final row;
while the database cannot be used, it waits with the result in hand.

Held back are new groups, never the rest of a group that has begun: `max_inflight_groups` and
`max_unacked_groups` of each owner, and `max_version_lag` of all (`ServiceSettings`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import orjson
import structlog

from bridle.aio import Nursery, run_shielded
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
from bridle.server.claiming import Room
from bridle.server.database import until_done
from bridle.server.files import TrajectoryFiles, UnwritableError
from bridle.server.metrics import Metrics
from bridle.server.schemas import ServiceSettings
from bridle.server.state import State
from bridle.server.states import Claim, Closed, Ended, run_id
from bridle.server.telling import Pulse
from bridle.server.views import Views
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON, Cause, SessionStatus

UNSTORED: Final = 2
"""Runs per slot that may be under way or wait to be stored: beyond, slots stay empty."""

PUT_BACK_S: Final = 30.0
"""How long a stopping server tries to give its runs back; the next one finds them anyway."""

log = structlog.get_logger(__name__)


class Dispatcher:
    """Runs claimed sessions. `run` is its whole life; `cancel_runs` may be called at any time."""

    def __init__(
        self,
        *,
        state: State,
        views: Views,
        files: TrajectoryFiles,
        workers: SessionRunner,
        settings: ServiceSettings,
        owner: str,
        on_closed: Callable[[Closed], None],
        metrics: Metrics,
    ) -> None:
        self._state = state
        self._views = views
        self._files = files
        self._workers = workers
        self._settings = settings
        self._owner = owner
        self._on_closed = on_closed
        self._metrics = metrics
        self._running: dict[str, Claim] = {}
        """Runs whose results are not stored yet, by id."""
        self._computing: set[str] = set()
        """Those of them that have not ended: each has a slot."""
        self._doomed: set[str] = set()
        """Runs that were cancelled before the workers knew them."""
        self._adopted: list[Claim] = []
        self._closing = asyncio.Event()
        self.wake = Pulse()
        self.idle = Pulse()
        """A run has left."""
        self.draining = False
        """Nothing is started in this life of the server."""

    @property
    def running(self) -> tuple[Claim, ...]:
        """The runs that are under way."""
        return tuple(self._running.values())

    def claim_of(self, run_id: str) -> Claim | None:
        """Return the claim of a run in progress; `None` = no such run."""
        return self._running.get(run_id)

    # ---- starting

    async def run(self) -> None:
        """Dispatch until cancelled; then end the runs that are under way and put them back.

        Those that have ended and are not stored yet stay leased: the next server recalls them.
        """
        async with Nursery(_log_lost) as nursery:
            try:
                await self._dispatch(nursery)
            finally:
                self._closing.set()

    async def _dispatch(self, nursery: Nursery) -> None:
        while True:
            ticket = self.wake.ticket()
            adopted, self._adopted = self._adopted, []
            self._begin(adopted, nursery)
            slots = self._slots()
            wait_s = None
            if slots > 0 and not self.draining:
                claims = await until_done(lambda: self._claim(slots), "claiming sessions")  # noqa: B023 - awaited here
                self._begin(claims, nursery)
                wait_s = await until_done(self._until_due, "looking for sessions")
            await Pulse.after(ticket, wait_s)

    def _slots(self) -> int:
        """Return how many runs may start: the free slots, or fewer while results pile up."""
        capacity = self._workers.capacity
        unstored = UNSTORED * capacity - len(self._running)
        return min(capacity - len(self._computing), unstored)

    def _begin(self, claims: Sequence[Claim], nursery: Nursery) -> None:
        for claim in claims:
            self._running[claim.run_id] = claim
            self._computing.add(claim.run_id)
            nursery.start(self._one(claim), name=claim.run_id)

    async def _claim(self, slots: int) -> list[Claim]:
        await self._files.check()  # nothing is begun whose result has no room
        room = await self._room(slots)
        now = time.time()
        return await self._state.claim(
            room, owner=self._owner, now=now, lease_s=self._settings.lease_s
        )

    async def _until_due(self) -> float | None:
        due = await self._state.next_due()
        return None if due is None else max(0.05, due - time.time())

    async def _room(self, slots: int) -> Room:
        """Room for so many sessions, and for as many new groups as the settings allow now."""
        settings, groups = self._settings, None
        limits = list[tuple[int, Counter[str]]]()
        if settings.max_inflight_groups is not None:
            limits.append((settings.max_inflight_groups, await self._views.inflight_groups()))
        if settings.max_unacked_groups is not None:
            unstored = (one for one in self.running if one.run_id not in self._computing)
            ending = {(one.owner, one.task_id) for one in unstored}  # ended for all that we know
            unacked = await self._views.unacked_groups() + Counter(owner for owner, _ in ending)
            limits.append((settings.max_unacked_groups, unacked))
        if settings.max_version_lag is not None and settings.groups_per_version is not None:
            version = await self._state.number("policy_version")
            ever = settings.groups_per_version * (version + 1 + settings.max_version_lag)
            groups = max(0, ever - await self._views.started_groups())
        return Room(slots, groups, limits)

    # ---- ending

    def cancel_runs(self, run_ids: tuple[str, ...]) -> None:
        """End runs; their results will be CANCELLED."""
        for one in run_ids:
            if one in self._running and not self._workers.cancel(one):
                self._doomed.add(one)

    async def drained(self, timeout_s: float) -> int:
        """Return when nothing runs, or after `timeout_s`; how many runs are still under way."""
        deadline = time.monotonic() + timeout_s
        while self._running and (left_s := deadline - time.monotonic()) > 0:
            await Pulse.after(self.idle.ticket(), left_s)
        return len(self._running)

    # ---- one run

    async def _one(self, claim: Claim) -> None:
        try:
            if claim.run_id in self._doomed:
                raise _Doomed
            closed = await self._run(claim)
        except _Doomed:
            closed = await self._store(_not_run(claim, "cancelled", Cause.CANCELLED))
        except asyncio.CancelledError:
            # One whose result is in hand is recalled by the next server, not run again.
            if claim.run_id in self._computing and not self._workers.outlive:
                await run_shielded(self._give_back(claim), timeout_s=PUT_BACK_S)
            raise
        finally:
            self._workers.release(claim.run_id)
            self._computing.discard(claim.run_id)
            self._running.pop(claim.run_id, None)
            self._doomed.discard(claim.run_id)
            self.idle.beat()
            self.wake.beat()
        self._on_closed(closed)

    def adopt(self, claims: Sequence[Claim]) -> None:
        """Take up runs that go on without their server; they are ours in the database."""
        self._adopted += claims
        self.wake.beat()

    async def _run(self, claim: Claim) -> Closed:
        task = Task.model_validate_json(claim.spec).model_copy(update={"owner": claim.owner})
        try:
            with boundary(StoreError, f"running {claim.run_id}"):
                result = await self._workers.run(
                    task, claim.sample_index, claim.run_id, claim.avoid
                )
        except ConfigError as error:
            # What was found at submit is not there any more; another try would not find it either.
            return await self._store(_not_run(claim, str(error), None))
        except NodeLostError as error:
            return await self._again(claim, str(error))
        except BridleError as error:
            return await self._store(_not_run(claim, str(error), Cause.INFRASTRUCTURE))
        self._computing.discard(claim.run_id)
        self.wake.beat()  # its slot is free before its result is stored
        return await self.keep(claim, result)

    async def keep(self, claim: Claim, result: SessionResult) -> Closed:
        """Store a result: its trajectory first, then its row."""
        trajectory = replace(
            result.trajectory,
            session_id=claim.session_id,
            metadata=result.trajectory.metadata
            | {"attempt": claim.attempt, "run_id": claim.run_id},
        )
        name = self._files.name(claim.run_id)
        try:
            size = await self._written(name, trajectory)
        except StoreError as error:
            if self._closing.is_set() and not isinstance(error, UnwritableError):
                raise
            log.error("a trajectory was given up", run_id=claim.run_id, error=str(error))  # noqa: TRY400 - its text says all
            said = f"store_error: the trajectory could not be written: {root_cause(error)}"
            return await self._store(_not_run(claim, said, Cause.INFRASTRUCTURE))
        low, high = versions_of(trajectory)
        head = result.json()
        del head["trajectory"]
        ended = Ended(
            session_id=claim.session_id,
            attempt=claim.attempt,
            status=result.status,
            cause=result.cause,
            usable=is_usable(result),
            result=head | {"session_id": claim.session_id, "run_id": claim.run_id},
            file=name,
            file_bytes=size,
            version_min=low,
            version_max=high,
        )
        closed = await self._store(ended)
        if closed.what == "final":
            self._metrics.kept(trajectory)
        if closed.what == "again" or (closed.what == "lost" and not await self._names(name, claim)):
            await self._files.remove(name)
        return closed

    async def _names(self, name: str, claim: Claim) -> bool:
        """Return whether the session's row names this file, so that only the reply was lost."""
        row = await until_done(
            lambda: self._views.session(claim.session_id),
            "looking for a row",
            closing=self._closing,
        )
        return row is not None and row["file"] == name

    async def _written(self, name: str, trajectory: Trajectory) -> int:
        """Write a trajectory, waiting `store_patience_s` at most for room, or a way to its place.

        Returns its size in bytes. `StoreError` if it was not written.
        """
        wait_s, until = 0.1, time.monotonic() + self._settings.store_patience_s
        while True:
            try:
                return await self._files.write(name, trajectory)
            except UnwritableError:
                raise
            except StoreError as error:
                if self._closing.is_set() or time.monotonic() + wait_s > until:
                    raise
                log.warning("a trajectory cannot be written; trying again", error=str(error))
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, 5.0)

    async def _store(self, ended: Ended) -> Closed:
        closed = await until_done(
            lambda: self._state.finish(ended, owner=self._owner, now=time.time()),
            f"storing {ended.session_id}",
            closing=self._closing,
        )
        self._metrics.run_ended(ended, closed.what)
        return closed

    async def _again(self, claim: Claim, why: str) -> Closed:
        """The machine of a run was lost: another run of the session, without waiting."""
        log.warning("a run was lost with its node", run_id=claim.run_id, why=why)
        closed = await until_done(
            lambda: self._state.put_back(
                claim.session_id,
                claim.attempt,
                owner=self._owner,
                why="interrupted",
                now=time.time(),
            ),
            f"putting {claim.session_id} back",
            closing=self._closing,
        )
        self._metrics.run_lost(closed.what)
        return closed

    async def _give_back(self, claim: Claim) -> None:
        """The server stops: the session is run again by the next one."""
        try:
            await self._state.put_back(
                claim.session_id, claim.attempt, owner=self._owner, why="stopped", now=time.time()
            )
        except BridleError as error:
            log.warning("a session was not put back", session=claim.session_id, error=str(error))


class _Doomed(Exception):
    """The run was cancelled before it began."""


def is_usable(result: SessionResult) -> bool:
    """Return whether a session counts for its group: it completed, or has a reward and traces."""
    if result.status is SessionStatus.COMPLETED:
        return True
    return result.reward is not None and bool(result.trajectory.traces)


def versions_of(trajectory: Trajectory) -> tuple[int | None, int | None]:
    """The least and the greatest policy version of a trajectory's sampled tokens."""
    sampled = [trace.versions[trace.versions >= 0] for trace in trajectory.traces]
    every = np.concatenate(sampled) if sampled else np.empty(0, dtype=np.int32)
    return (int(every.min()), int(every.max())) if len(every) else (None, None)


def _not_run(claim: Claim, error: str, cause: Cause | None) -> Ended:
    """The end of a session whose run could not begin."""
    cancelled = cause is Cause.CANCELLED
    status = SessionStatus.CANCELLED if cancelled else SessionStatus.ERROR
    result: JSON = {
        "session_id": claim.session_id,
        "task_id": orjson.loads(claim.spec)["task_id"],
        "status": str(status),
        "timing": {},
        "node_id": None,
        "error": error,
        "metadata": {},
        "reward": None,
        "sample_index": claim.sample_index,
        "cause": str(cause or Cause.INFRASTRUCTURE),
        "logs": {},
        "run_id": run_id(claim.session_id, claim.attempt),
    }
    return Ended(claim.session_id, claim.attempt, str(status), cause, usable=False, result=result)


def _log_lost(error: BaseException) -> None:
    log.error("a run was lost", trace=trace_of(error))
