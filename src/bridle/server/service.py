"""The service: one entry to everything in this room, in one process with its workers.

`async with Service(...)` begins where the last server stopped (`recover`), then dispatches. Leaving
it ends what runs and puts it back, to be run again by the next one; `drain` before that gives it
the time to end.

Several servers share one database: a server renews its leases three times per `lease_s`. Others
judge by their own monotonic clock whether its leases change, so no wrong clock makes a living
server look dead. They take over the runs of a dead one and send its callbacks that are due. Every
`LOOK_S` seconds each looks for what the others did (tasks that came, ended or were cancelled, a
pause).

`Retention` keeps a group whole until it was acknowledged. Then `keep_days` and `keep_gb` remove its
files (trajectories, capture, logs and artifacts of every run; oldest groups first), and
`keep_rows_days` its rows, all but its name with what became of it, so that a second submit of it is
still the same task. Groups that nobody ever acknowledges count as acknowledged after
`keep_unacked_days`. Nothing of a group is removed while a callback of it is to be tried.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Final, NamedTuple, Self

import structlog

from bridle.aio import Checkup, Nursery
from bridle.config import Task
from bridle.errors import BridleError, ConfigError
from bridle.gateway.faults import trace_of
from bridle.gateway.weights import SetPolicy
from bridle.node.base import SessionRunner
from bridle.node.events import Event, RoomChanged, SessionChanged
from bridle.node.local import plan
from bridle.server.claiming import Shares
from bridle.server.database import Database, until_done
from bridle.server.dispatch import Dispatcher
from bridle.server.files import TrajectoryFiles
from bridle.server.metrics import Metrics
from bridle.server.schemas import Reward, ServiceSettings, Submission
from bridle.server.state import State
from bridle.server.states import Closed, Kept, run_id, task_key
from bridle.server.telling import Broadcast, Pulse
from bridle.server.views import Views
from bridle.server.wire import Row
from bridle.types import JSON

LONGEST_FAULT: Final = 2000
"""Characters of why a task is refused; it may repeat what was given."""

log = structlog.get_logger(__name__)


class Service:
    """Takes tasks, runs their sessions, keeps what comes of them. Use as an async context manager.

    Inside the database's and the workers' own.
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
        self.settings = settings or ServiceSettings()
        weights = {name: one.weight for name, one in self.settings.owners.items()}
        self.state = State(database, Shares(weights))
        self.views = Views(database)
        self.files = files
        self.workers = workers
        self.owner = owner
        """Whose leases these are: the same in every life of one server."""
        self.metrics = Metrics()
        self.events = Broadcast()
        self.groups = Pulse()
        """A group has ended."""
        self.ended = Pulse()
        """A session or group has ended, so a callback may be due."""
        self.dispatcher = Dispatcher(
            state=self.state,
            views=self.views,
            files=files,
            workers=workers,
            settings=self.settings,
            owner=owner,
            on_closed=self.closed,
            metrics=self.metrics,
        )
        self.retention = Retention(self.state, self.views, files, workers, self.settings)
        self.neighbours = Neighbours(self)
        self._stages: dict[str, str] = {}
        """Run id -> what it is doing."""
        self._plans: dict[bytes, str | None] = {}
        """Digest of what is looked up -> why it is refused; `None` = it is not."""
        self._stack = AsyncExitStack()
        self.stopping = asyncio.Event()
        """Set when the server is asked to end: long answers end then."""
        self.storing = Checkup(self._check_stores)
        """Raises `StateError` or `StoreError` while nothing can be stored."""
        self.broken: str | None = None
        """What of the service has failed and does not come back; `None` = all is well."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(self.workers.events.listening(self._hear))
            await self._agree_on_version()
            await self.neighbours.take_over([self.owner])
            nursery = await stack.enter_async_context(Nursery(self.lost))
            nursery.start(self.dispatcher.run(), name="dispatcher")
            nursery.start(self.neighbours.keep_leases(), name="leases")
            nursery.start(self.neighbours.run(), name="neighbours")
            nursery.start(self.retention.run(), name="retention")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _check_stores(self) -> None:
        await self.state.check()
        await self.files.check()

    # ---- tasks

    async def submit(
        self, submissions: Sequence[Submission], *, owner: str, tenant: bool = False
    ) -> list[bool]:
        """Accept tasks that were checked; as `State.submit`."""
        fresh = await self.state.submit(
            submissions,
            owner=owner,
            tenant=tenant,
            now=time.time(),
            quota=self.settings.quota_of(owner),
        )
        if any(fresh):
            self.dispatcher.wake.beat()
            for one, new in zip(submissions, fresh, strict=True):
                if new:
                    key = task_key(one.task_id, owner if tenant else None)
                    self._tell_task(one.task_id, "queued", owner=owner, key=key)
        return fresh

    def check(self, task: Task) -> None:
        """Raise the `ConfigError` that running the task would raise; looked up once per kind."""
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
        """End a task and its sessions; whether there is one of that key. Idempotent."""
        closed = await self.state.stop_task(task_id, "cancelled", now=time.time())
        if closed is None:
            return False
        self.closed(closed)
        return True

    async def cancel_session(self, session_id: str) -> bool | None:
        """End one session; whether it had not ended yet, `None` = it is not known."""
        if await self.views.session(session_id) is None:
            return None
        closed = await self.state.stop_session(session_id, "cancelled", now=time.time())
        self.closed(closed)
        return closed.what == "final" or bool(closed.run_ids)

    async def give_reward(self, session_id: str, given: Reward) -> None:
        """Give a session its reward; see `State.give_reward`."""
        self.closed(await self.state.give_reward(session_id, given, now=time.time()))

    async def bar(self, task_id: str, *, owner: str, tenant: bool = False) -> None:
        """Take an id that no task of the owner has: a later submit of it is refused."""
        await self.state.bar(task_id, owner=owner, tenant=tenant, now=time.time())

    async def status(self, tenant: str | None = None) -> JSON:
        """Return counts by state: of one `tenant`, or of all tenants and of each owner."""
        counts = await self.views.of(tenant).counts()
        running = [one for one in self.dispatcher.running if tenant in (None, one.owner)]
        version = await self.state.number("policy_version")
        owners = {} if tenant is not None else {"owners": await self.views.owners()}
        return owners | {
            "tasks": counts.tasks,
            "sessions": counts.sessions,
            "sessions_waiting": counts.waiting,
            "groups_unacked": counts.unacked,
            "callbacks": counts.callbacks,
            "slots": self.workers.capacity,
            "running": len(running),
            "paused": bool(await self.state.number("paused")),
            "policy": self.workers.policy() | {"version": version},
        }

    async def ack(
        self, *, cursor: int | None, task_ids: Sequence[str], tenant: str | None = None
    ) -> int:
        """Acknowledge groups (`State.ack`), so that groups held back by them may start."""
        count = await self.state.ack(
            cursor=cursor, task_ids=task_ids, tenant=tenant, now=time.time()
        )
        self.dispatcher.wake.beat()
        return count

    async def replay(self, delivery_id: str | None) -> int:
        """Send callbacks again (`State.replay`), at once."""
        count = await self.state.replay(delivery_id, now=time.time())
        self.ended.beat()
        return count

    def stage(self, session_id: str, attempt: int) -> str | None:
        """Return the stage of a running session; `None` = unknown on this server."""
        return self._stages.get(run_id(session_id, attempt))

    # ---- pace

    async def pause(self) -> None:
        """Start no session on any server until `resume`, also after a restart."""
        await self.state.set_number("paused", 1)

    async def drain(self) -> int:
        """Start no session in this life of the server, and return when nothing runs or `drain_s`
        are over; how many sessions still run. Tasks are accepted meanwhile.
        """
        self.dispatcher.draining = True
        patience_s = 0.0 if self.workers.outlive else self.settings.drain_s
        return await self.dispatcher.drained(patience_s)

    async def resume(self) -> None:
        await self.state.set_number("paused", 0)
        self.dispatcher.wake.beat()

    async def set_policy(self, wanted: SetPolicy) -> None:
        """Steer the engines, and start sessions under the new version.

        Running sessions that are too far behind are cancelled where the settings say so.
        `EngineError` if the engines did not do their part; the version is then as it was.
        """
        await self.workers.set_policy(wanted)
        if wanted.version is not None:
            await self.state.set_number("policy_version", wanted.version)
            await self._drop_stale(wanted.version)
            self.dispatcher.wake.beat()
            self.events.tell({"type": "policy", "version": wanted.version})

    async def _drop_stale(self, version: int) -> None:
        lag = self.settings.max_version_lag
        if self.settings.on_stale == "cancel" and lag is not None:
            rows = await self.views.running_since(version - lag)
            runs = tuple(run_id(row["session_id"], row["attempt"]) for row in rows)
            self.dispatcher.cancel_runs(runs)

    async def _agree_on_version(self) -> None:
        """The greater of what the state and the engines know; engines may have been restarted."""
        kept = await self.state.number("policy_version")
        sampled = int(self.workers.policy().get("version") or 0)
        if kept > sampled:
            await self.workers.set_policy(SetPolicy(version=kept))
        elif sampled > kept:
            await self.state.set_number("policy_version", sampled)

    # ---- telling

    def closed(self, closed: Closed) -> None:
        """Tell what the end of a run, or of a task, led to."""
        self.dispatcher.cancel_runs(closed.run_ids)
        self.ended.beat()
        if closed.task_id is not None:
            self.groups.beat()
            self._tell_task(closed.name, "ended", owner=closed.owner, key=closed.task_id)
            self.dispatcher.wake.beat()

    def _tell_task(self, name: str, status: str, *, owner: str, key: str) -> None:
        event = {"type": "task", "task_id": name, "status": status}
        self.events.tell(event, owner=owner, key=key)

    def _hear(self, event: Event) -> None:
        """Note a run's stage, and tell it under its session's id."""
        if isinstance(event, RoomChanged):
            self.dispatcher.wake.beat()
        if not isinstance(event, SessionChanged):
            return
        status = str(event.status)
        if status in ("COMPLETED", "TIMEOUT", "ERROR", "CANCELLED"):
            self._stages.pop(event.session_id, None)
        else:
            self._stages[event.session_id] = status
        claim = self.dispatcher.claim_of(event.session_id)
        self.events.tell(
            {
                "type": "session",
                "run_id": event.session_id,
                "task_id": event.task_id,
                "sample_index": event.sample_index,
                "status": status,
                "at": event.at,
                "cause": event.cause and str(event.cause),
                "reward": event.reward,
                "error": event.error,
            },
            owner=claim.owner if claim else "",
            key=claim.task_id if claim else event.task_id,
        )

    def lost(self, error: BaseException) -> None:
        """A part of the server has failed and does not come back; health tells it."""
        self.broken = repr(error)
        log.error("a part of the server has failed", trace=trace_of(error))


LOOK_S: Final = 2.0


class Heard(NamedTuple):
    """The last sign of life of another server."""

    until: float
    """Its latest lease."""
    at: float
    """When we saw that for the first time."""


class Neighbours:
    """Watches the other servers for `service`. `run` and `keep_leases` are its whole life."""

    def __init__(self, service: Service, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._heard: dict[str, Heard] = {}

    async def keep_leases(self) -> None:
        """Renew our own leases until cancelled."""
        service = self._service
        lease_s = service.settings.lease_s
        while True:
            await asyncio.sleep(lease_s / 3)
            await until_done(
                lambda: service.state.renew(owner=service.owner, until=time.time() + lease_s),
                "renewing leases",
            )

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_S, self._service.settings.lease_s / 4))
            await until_done(self.look, "looking for other servers")

    async def look(self) -> None:
        """See what the others did, and take over what a dead one was running."""
        service = self._service
        if dead := self._dead(await service.views.leases()):
            log.warning("took over from servers that are not heard of", servers=dead)
            await self.take_over(dead)
        running = service.dispatcher.running  # first: one that starts meanwhile is not gone
        held = await service.views.held_by(service.owner)
        gone = tuple(one.run_id for one in running if not held.get(one.run_id, False))
        service.dispatcher.cancel_runs(gone)
        for pulse in (service.dispatcher.wake, service.ended, service.groups):
            pulse.beat()

    def _dead(self, leases: dict[str, float]) -> list[str]:
        now, lease_s = self._clock(), self._service.settings.lease_s
        others = {name: until for name, until in leases.items() if name != self._service.owner}
        self._heard = {
            name: heard
            if (heard := self._heard.get(name)) is not None and heard.until == until
            else Heard(until, now)
            for name, until in others.items()
        }
        return [name for name, heard in self._heard.items() if now - heard.at > lease_s]

    async def take_over(self, dead: Sequence[str]) -> None:
        """Store what had ended of what the servers `dead` were running, and run the rest again.

        Our own earlier life may be one of them.
        """
        service = self._service
        claims = await service.state.take_over(
            dead, owner=service.owner, now=time.time(), lease_s=service.settings.lease_s
        )
        await service.state.leave_callbacks(dead, now=time.time())
        living = [claim for claim in claims if service.workers.expect(claim.run_id)]
        service.dispatcher.adopt(living)
        for claim in claims:
            if claim in living:
                continue
            result = await service.workers.recall(claim.run_id)
            if result is not None:
                service.closed(await service.dispatcher.keep(claim, result))
                service.workers.release(claim.run_id)
                continue
            closed = await service.state.put_back(
                claim.session_id,
                claim.attempt,
                owner=service.owner,
                why="interrupted",
                now=time.time(),
            )
            service.closed(closed)
        if claims:
            service.dispatcher.wake.beat()
            log.info("took over what a server was running", sessions=len(claims))


EVERY_S: Final = 300.0
"""How often there is a look."""

PAGE: Final = 100
"""Groups that are removed between two looks at how many there are."""

DAY_S: Final = 86_400.0


class Retention:
    """Removes what need not be kept. `run` is its whole life."""

    def __init__(
        self,
        state: State,
        views: Views,
        files: TrajectoryFiles,
        workers: SessionRunner,
        settings: ServiceSettings,
    ) -> None:
        self._state = state
        self._views = views
        self._files = files
        self._workers = workers
        self._settings = settings

    async def run(self) -> None:
        while True:
            try:
                await self.remove_old()
            except BridleError as error:
                log.warning("what is old was not removed", error=str(error))
            await asyncio.sleep(EVERY_S)

    async def remove_old(self) -> int:
        """Remove what is too old, and the oldest of what is too much; how many groups' files."""
        settings, now, removed = self._settings, time.time(), 0
        if settings.keep_unacked_days is not None:
            await self._state.give_up_groups(
                before=now - settings.keep_unacked_days * DAY_S, now=now
            )
        if settings.keep_days is not None:
            removed += await self._files_before(now - settings.keep_days * DAY_S)
        if settings.keep_rows_days is not None:
            before = now - settings.keep_rows_days * DAY_S
            removed += await self._files_before(before)
            while groups := await self._views.removable(Kept.ROWS, before=before, limit=PAGE):
                for group in groups:
                    await self._state.forget_rows(group["seq"])
        if settings.keep_gb is not None:
            removed += await self._files_beyond(settings.keep_gb * 1e9)
        return removed

    async def _files_before(self, before: float) -> int:
        removed = 0
        while groups := await self._views.removable(Kept.ALL, before=before, limit=PAGE):
            for group in groups:
                await self._remove_files(group)
            removed += len(groups)
        return removed

    async def _files_beyond(self, limit: float) -> int:
        """Remove the oldest groups' files until all of them take at most `limit` bytes."""
        removed = 0
        while (size := await self.size()) > limit:
            # As many as would do if all were of one size; then there is another look.
            share = (size - limit) / size * await self._views.kept_groups()
            count = min(PAGE, max(1, math.floor(share)))
            groups = await self._views.removable(Kept.ALL, before=None, limit=count)
            for group in groups:
                await self._remove_files(group)
            removed += len(groups)
            if not groups:
                break
        return removed

    async def size(self) -> int:
        """Bytes of all files that are kept."""
        return await self._views.file_bytes() + await self._workers.kept_bytes()

    async def _remove_files(self, group: Row) -> None:
        for session in await self._views.sessions(group["seq"]):
            if session["file"] is not None:
                await self._files.remove(session["file"])
            for attempt in range(1, session["attempt"] + 1):
                await self._workers.remove(run_id(session["session_id"], attempt))
        await self._state.forget_files(group["seq"])
