"""The rollout service: accepts tasks, runs their sessions and keeps the results.

`async with Service(...)` first takes over what this server was running when it ended, then starts
sessions. Leaving it cancels running sessions and queues them again; `drain` lets them end before.

Several servers share one database (`Peers`). Each renews its leases three times per `lease_s`, and
judges the others by its own monotonic clock: a server whose leases do not change for `lease_s` is
dead, whatever its wall clock says. Its runs and callbacks are taken over. Every `POLL_S` seconds a
server also checks what the others changed: new, ended and cancelled tasks, and a pause.

`Retention` keeps a group whole until it is acknowledged. Then `keep_days` and `keep_gb` remove its
files (trajectories, capture, logs and artifacts of every run; oldest groups first), and
`keep_rows_days` its rows; its task's name, digest and counts stay, so that a second submission is
still recognised. Groups that nobody acknowledges count as acknowledged after `keep_unacked_days`.
Nothing of a group is removed while one of its callbacks is pending.

`EventBus` is the event stream of `GET /events`. A subscriber that reads too slowly loses its oldest
events and gets their number; it delays nobody.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Final, NamedTuple, Self

import structlog

from bridle.aio import Checkup, Condition, Nursery, Stacked
from bridle.config import Task
from bridle.errors import BridleError, ConfigError
from bridle.gateway.faults import trace_of
from bridle.gateway.weights import SetPolicy
from bridle.node.base import Event, RoomChanged, SessionChanged, SessionRunner
from bridle.node.local import plan
from bridle.server.metrics import ServerMetrics
from bridle.server.queries import Queries
from bridle.server.scheduler import Scheduler
from bridle.server.schemas import (
    FinalizeResult,
    RetentionLevel,
    Reward,
    Row,
    Submission,
    run_id,
    task_key,
)
from bridle.server.settings import ServiceSettings
from bridle.server.storage import Database, TrajectoryFiles, until_done
from bridle.server.store import FairShares, TaskStore
from bridle.types import JSON

LONGEST_FAULT: Final = 2000
"""Characters of the reason for which a task is refused; it may repeat the input."""

log = structlog.get_logger(__name__)


class Service(Stacked):
    """One server's tasks, sessions and results. Use as an async context manager.

    Enter it inside the context managers of the database and of the workers.
    """

    def __init__(
        self,
        *,
        database: Database,
        files: TrajectoryFiles,
        workers: SessionRunner,
        settings: ServiceSettings | None = None,
        owner: str = "server",
    ) -> None:
        super().__init__()
        self.settings = settings or ServiceSettings()
        weights = {name: one.weight for name, one in self.settings.owners.items()}
        self.store = TaskStore(database, FairShares(weights))
        self.queries = Queries(database)
        self.files = files
        self.workers = workers
        self.owner = owner
        """Name of this server in its leases, the same after a restart."""
        self.metrics = ServerMetrics()
        self.events = EventBus()
        self.group_ended = Condition()
        self.callback_due = Condition()
        """Notified when a session or group has ended, so a callback may be due."""
        self.scheduler = Scheduler(self)
        self.retention = Retention(self)
        self.peers = Peers(self)
        self._stages: dict[str, str] = {}
        """Run id -> stage."""
        self._plans: dict[bytes, str | None] = {}
        """Digest of a task's parts -> why they are refused; `None` = they are accepted."""
        self._steering = asyncio.Lock()
        """Held while the nodes change their policy: they hold and go on together."""
        self.stopping = asyncio.Event()
        """Set when the server is asked to stop; long polls and event streams end then."""
        self.check_stores = Checkup(self._check_stores)
        """Raises `StateError` or `StoreError` while nothing can be stored."""
        self.failure: str | None = None
        """The error that ended a part of the service; `None` = all parts run."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(self.workers.events.listening(self._on_event))
            await self._agree_on_version()
            await self.peers.take_over([self.owner])
            nursery = await stack.enter_async_context(Nursery(self.failed))
            nursery.start(self.scheduler.run(), name="scheduler")
            nursery.start(self.peers.keep_leases(), name="leases")
            nursery.start(self.peers.run(), name="peers")
            nursery.start(self.retention.run(), name="retention")
            self._stack = stack.pop_all()
        return self

    async def _check_stores(self) -> None:
        await self.store.check()
        await self.files.check()

    # ---- tasks

    async def submit(
        self, submissions: Sequence[Submission], *, owner: str, tenant: bool = False
    ) -> list[bool]:
        """Store checked tasks to be run, all or none; return whether each is new.

        Owners that are a `tenant` have task ids of their own. Raises `ConflictError` for an id with
        another body, `QuotaError` beyond the owner's quota.
        """
        fresh = await self.store.submit(
            submissions,
            owner=owner,
            tenant=tenant,
            now=time.time(),
            quota=self.settings.quota_of(owner),
        )
        if any(fresh):
            self.scheduler.wake.notify_all()
            for one, new in zip(submissions, fresh, strict=True):
                if new:
                    key = task_key(one.task_id, owner if tenant else None)
                    self._publish_task(one.task_id, "queued", owner=owner, key=key)
        return fresh

    def check(self, task: Task) -> None:
        """Raise the `ConfigError` that running the task would raise; results of checks are
        cached.
        """
        text = task.model_dump_json(include={"runtime", "agent", "builder", "evaluator"})
        kind = hashlib.sha256(text.encode()).digest()
        if kind not in self._plans:
            if len(self._plans) >= 1000:
                self._plans.clear()
            try:
                plan(task)
                self._plans[kind] = None
            except ConfigError as error:
                self._plans[kind] = str(error).removeprefix(f"task {task.task_id!r}: ")[
                    :LONGEST_FAULT
                ]
        if (fault := self._plans[kind]) is not None:
            raise ConfigError(fault)

    async def cancel_task(self, task_id: str) -> bool:
        """Cancel a task and its sessions; return whether a task has this key. Idempotent."""
        outcome = await self.store.stop_task(task_id, "cancelled", now=time.time())
        if outcome is None:
            return False
        self.finalized(outcome)
        return True

    async def cancel_session(self, session_id: str) -> bool | None:
        """Cancel one session; return whether it was still running or queued, `None` = it is
        unknown.
        """
        if await self.queries.session(session_id) is None:
            return None
        outcome = await self.store.stop_session(session_id, "cancelled", now=time.time())
        self.finalized(outcome)
        return outcome.what == "final" or bool(outcome.run_ids)

    async def give_reward(self, session_id: str, given: Reward) -> None:
        """Append a reward to an ended session; the last one counts."""
        self.finalized(await self.store.give_reward(session_id, given, now=time.time()))

    async def reserve(self, task_id: str, *, owner: str, tenant: bool = False) -> None:
        """Reserve an unused task id, so that a later submission with it is refused."""
        await self.store.reserve(task_id, owner=owner, tenant=tenant, now=time.time())

    async def status(self, tenant: str | None = None) -> JSON:
        """Return counts of tasks, sessions and callbacks by state: of one `tenant`, or of all and
        by owner.
        """
        counts = await self.queries.of(tenant).counts()
        running = [one for one in self.scheduler.running if tenant in (None, one.owner)]
        version = await self.store.number("policy_version")
        owners = {} if tenant is not None else {"owners": await self.queries.owners()}
        return owners | {
            "tasks": counts.tasks,
            "sessions": counts.sessions,
            "sessions_waiting": counts.waiting,
            "groups_unacked": counts.unacked,
            "callbacks": counts.callbacks,
            "slots": self.workers.capacity,
            "running": len(running),
            "paused": bool(await self.store.number("paused")),
            "groups_held_until": await self.scheduler.held_until(),
            "policy": self.workers.policy() | {"version": version},
        }

    async def ack(
        self, *, cursor: int | None, task_ids: Sequence[str], tenant: str | None = None
    ) -> int:
        """Acknowledge groups, and start the groups that waited for that; returns how many
        are new.
        """
        count = await self.store.ack(
            cursor=cursor, task_ids=task_ids, tenant=tenant, now=time.time()
        )
        self.scheduler.wake.notify_all()
        return count

    async def replay(self, delivery_id: str | None) -> int:
        """Send a dead callback again at once (`None` = all dead ones); returns how many."""
        count = await self.store.replay(delivery_id, now=time.time())
        self.callback_due.notify_all()
        return count

    def stage(self, session_id: str, attempt: int) -> str | None:
        """Return the stage of a running session; `None` = unknown on this server."""
        return self._stages.get(run_id(session_id, attempt))

    # ---- pace

    async def pause(self) -> None:
        """Start no session on any server until `resume`; a restart does not end the pause."""
        await self.store.set_number("paused", 1)

    async def drain(self) -> int:
        """Start no further session in this process, and wait at most `drain_s` for running ones.

        Returns how many still run. Tasks are accepted meanwhile. Runs that outlive the server are
        not waited for.
        """
        self.scheduler.draining = True
        patience_s = 0.0 if self.workers.outlive else self.settings.drain_s
        return await self.scheduler.drained(patience_s)

    async def resume(self) -> None:
        """End the pause on all servers: queued sessions start again."""
        await self.store.set_number("paused", 0)
        self.scheduler.wake.notify_all()

    async def set_policy(self, wanted: SetPolicy) -> None:
        """Update the engines' policy, and start sessions under its version.

        With `on_stale = "cancel"`, running sessions that are too far behind are cancelled. Raises
        `EngineError` if the engines failed; the version is then unchanged.
        """
        async with self._steering:
            await self.workers.set_policy(wanted)
            if wanted.version is not None:
                await self.store.set_number("policy_version", wanted.version)
        if wanted.version is not None:
            await self._drop_stale(wanted.version)
            self.scheduler.wake.notify_all()
            self.events.publish({"type": "policy", "version": wanted.version})

    async def _drop_stale(self, version: int) -> None:
        lag = self.settings.max_version_lag
        if self.settings.on_stale == "cancel" and lag is not None:
            rows = await self.queries.running_since(version - lag)
            runs = tuple(run_id(row["session_id"], row["attempt"]) for row in rows)
            self.scheduler.cancel_runs(runs)

    async def _agree_on_version(self) -> None:
        """Set the stored version and the engines' to the greater one, after a restart of either."""
        kept = await self.store.number("policy_version")
        sampled = int(self.workers.policy().get("version") or 0)
        if kept > sampled:
            await self.workers.set_policy(SetPolicy(version=kept))
        elif sampled > kept:
            await self.store.set_number("policy_version", sampled)

    # ---- events

    def finalized(self, ended: FinalizeResult) -> None:
        """Notify waiting requests and subscribers of the end of a run or task."""
        self.scheduler.cancel_runs(ended.run_ids)
        self.callback_due.notify_all()
        if ended.task_id is not None:
            self.group_ended.notify_all()
            self._publish_task(ended.name, "ended", owner=ended.owner, key=ended.task_id)
            self.scheduler.wake.notify_all()

    def _publish_task(self, name: str, status: str, *, owner: str, key: str) -> None:
        event = {"type": "task", "task_id": name, "status": status}
        self.events.publish(event, owner=owner, key=key)

    def _on_event(self, event: Event) -> None:
        """Note a run's stage, and publish it."""
        if isinstance(event, RoomChanged):
            self.scheduler.wake.notify_all()
        if not isinstance(event, SessionChanged):
            return
        status = str(event.status)
        if status in ("COMPLETED", "TIMEOUT", "ERROR", "CANCELLED"):
            self._stages.pop(event.session_id, None)
        else:
            self._stages[event.session_id] = status
        claim = self.scheduler.claim_of(event.session_id)
        names = ("task_id", "sample_index", "at", "reward", "error")
        published = {
            "type": "session",
            "run_id": event.session_id,
            "status": status,
            "cause": event.cause and str(event.cause),
            **{name: getattr(event, name) for name in names},
        }
        self.events.publish(
            published,
            owner=claim.owner if claim else "",
            key=claim.task_id if claim else event.task_id,
        )

    def failed(self, error: BaseException) -> None:
        """Record that a part of the server has ended with an error; `GET /health` reports it."""
        self.failure = repr(error)
        log.error("a part of the server has failed", trace=trace_of(error))


POLL_S: Final = 2.0
"""Interval of `Peers.check`."""


class LeaseSighting(NamedTuple):
    """The latest lease seen of another server."""

    until: float
    """End of the lease."""
    at: float
    """Monotonic time at which it was first seen."""


class Peers:
    """Other servers on the same database; `run` and `keep_leases` run until cancelled."""

    def __init__(self, service: Service, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self.clock = clock
        self._seen: dict[str, LeaseSighting] = {}

    async def keep_leases(self) -> None:
        """Renew this server's leases on its running sessions until cancelled."""
        service = self._service
        lease_s = service.settings.lease_s
        while True:
            await asyncio.sleep(lease_s / 3)
            await until_done(
                lambda: service.store.renew(owner=service.owner, until=time.time() + lease_s),
                "renewing leases",
            )

    async def run(self) -> None:
        """Check the other servers on the database at intervals, until cancelled."""
        while True:
            await asyncio.sleep(min(POLL_S, self._service.settings.lease_s / 4))
            await until_done(self.check, "checking other servers")

    async def check(self) -> None:
        """Take over the sessions of dead servers, and cancel the runs of this one whose lease was
        lost.
        """
        service = self._service
        if dead := self._dead(await service.queries.leases()):
            log.warning("took over from dead servers", servers=dead)
            await self.take_over(dead)
        # Read before `held`: a run that starts meanwhile is not gone.
        running = service.scheduler.running
        held = await service.queries.held_by(service.owner)
        gone = tuple(one.run_id for one in running if not held.get(one.run_id, False))
        service.scheduler.cancel_runs(gone)
        for condition in (service.scheduler.wake, service.callback_due, service.group_ended):
            condition.notify_all()

    def _dead(self, leases: dict[str, float]) -> list[str]:
        now, lease_s = self.clock(), self._service.settings.lease_s
        others = {name: until for name, until in leases.items() if name != self._service.owner}
        self._seen = {
            name: seen
            if (seen := self._seen.get(name)) is not None and seen.until == until
            else LeaseSighting(until, now)
            for name, until in others.items()
        }
        return [name for name, seen in self._seen.items() if now - seen.at > lease_s]

    async def take_over(self, dead: Sequence[str]) -> None:
        """Store the ended runs of the dead servers `dead`, and queue their other sessions again.

        `dead` may name this server, whose earlier process died.
        """
        service = self._service
        claims = await service.store.take_over(
            dead, owner=service.owner, now=time.time(), lease_s=service.settings.lease_s
        )
        await service.store.release_callbacks(dead, now=time.time())
        living = [claim for claim in claims if service.workers.expect(claim.run_id)]
        service.scheduler.adopt(living)
        for claim in claims:
            if claim in living:
                continue
            result = await service.workers.recall(claim.run_id)
            if result is not None:
                service.finalized(await service.scheduler.store_result(claim, result))
                service.workers.release(claim.run_id)
                continue
            service.finalized(await service.scheduler.put_back(claim, "interrupted"))
        if claims:
            service.scheduler.wake.notify_all()
            log.info("took over what a server was running", sessions=len(claims))


RETENTION_S: Final = 300.0
"""Interval of `Retention.remove_old`."""

PAGE: Final = 100
"""Groups that are removed between two queries."""

DAY_S: Final = 86_400.0


class Retention:
    """Removes old files and rows of acknowledged groups while `run` runs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def run(self) -> None:
        """Remove old groups at intervals, until cancelled; failures are logged."""
        while True:
            try:
                await self.remove_old()
            except BridleError as error:
                log.warning("old groups were not removed", error=str(error))
            await asyncio.sleep(RETENTION_S)

    async def remove_old(self) -> int:
        """Remove the groups' files and rows that the retention settings do not keep.

        Returns how many groups' files were removed.
        """
        settings, now, removed = self._service.settings, time.time(), 0
        if settings.keep_unacked_days is not None:
            await self._service.store.ack_abandoned(
                before=now - settings.keep_unacked_days * DAY_S, now=now
            )
        if settings.keep_days is not None:
            removed += await self._files_before(now - settings.keep_days * DAY_S)
        if settings.keep_rows_days is not None:
            before = now - settings.keep_rows_days * DAY_S
            removed += await self._files_before(before)
            async for group in self._removable(RetentionLevel.ROWS, before):
                await self._service.store.forget_rows(group["seq"])
        if settings.keep_gb is not None:
            removed += await self._files_beyond(settings.keep_gb * 1e9)
        return removed

    async def _files_before(self, before: float) -> int:
        removed = 0
        async for group in self._removable(RetentionLevel.ALL, before):
            await self._remove_files(group)
            removed += 1
        return removed

    async def _removable(self, kept: RetentionLevel, before: float) -> AsyncIterator[Row]:
        """Yield the groups of a level until there are none; each is to be removed at once."""
        removable = self._service.queries.removable
        while groups := await removable(kept, before=before, limit=PAGE):
            for group in groups:
                yield group

    async def _files_beyond(self, limit: float) -> int:
        """Remove the oldest groups' files until all of them take at most `limit` bytes."""
        removed = 0
        while (size := await self.size()) > limit:
            # As many groups as would be enough if all had one size; then the size is read again.
            share = (size - limit) / size * await self._service.queries.kept_groups()
            count = min(PAGE, max(1, math.floor(share)))
            groups = await self._service.queries.removable(
                RetentionLevel.ALL, before=None, limit=count
            )
            for group in groups:
                await self._remove_files(group)
            removed += len(groups)
            if not groups:
                break
        return removed

    async def size(self) -> int:
        """Return the size in bytes of all files of trajectories and sessions that are kept."""
        return await self._service.queries.file_bytes() + await self._service.workers.kept_bytes()

    async def _remove_files(self, group: Row) -> None:
        for session in await self._service.queries.sessions(group["seq"]):
            if session["file"] is not None:
                await self._service.files.remove(session["file"])
            for attempt in range(1, session["attempt"] + 1):
                await self._service.workers.remove(run_id(session["session_id"], attempt))
        await self._service.store.forget_files(group["seq"])


BACKLOG: Final = 1000
"""Unread events that are kept for one subscriber of `GET /events`."""


class EventSubscriber:
    """The queue of one reader of the event stream."""

    def __init__(self, owner: str | None) -> None:
        self.owner = owner
        """Only events of this owner's tasks; `None` = of all."""
        self._events: deque[JSON] = deque(maxlen=BACKLOG)
        self._lost = 0
        self._ready = asyncio.Event()

    def push(self, event: JSON) -> None:
        """Queue an event; a full queue drops its oldest one."""
        self._lost += len(self._events) == BACKLOG
        self._events.append(event)
        self._ready.set()

    async def next(self, timeout_s: float) -> JSON | None:
        """Return the next event, or `None` after `timeout_s` without one.

        Before it comes `{"type": "lost", "count": n}` if events were dropped.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return None
        if self._lost:
            lost, self._lost = self._lost, 0
            return {"type": "lost", "count": lost}
        event = self._events.popleft()
        if not self._events:
            self._ready.clear()
        return event


class EventBus:
    """Publishes events to all subscribers."""

    def __init__(self) -> None:
        self.subscribers: set[EventSubscriber] = set()

    def publish(self, event: JSON, *, owner: str | None = None, key: str | None = None) -> None:
        """Send an event to the subscribers of `owner` and to those of all owners.

        Subscribers of all owners get `owner` too, and the task's `key` as `task_id`, because two
        owners may use the same id. `owner=None` = the event is for every subscriber.
        """
        for subscriber in self.subscribers:
            if owner is None or subscriber.owner == owner:
                subscriber.push(event)
            elif subscriber.owner is None:
                subscriber.push(event | {"owner": owner, "task_id": key})

    @contextmanager
    def subscribe(self, owner: str | None = None) -> Iterator[EventSubscriber]:
        """Receive, within the context, the events of `owner`; `None` = of all owners."""
        subscriber = EventSubscriber(owner)
        self.subscribers.add(subscriber)
        try:
            yield subscriber
        finally:
            self.subscribers.discard(subscriber)
