"""The service: one entry to everything in this room, in one process with its workers.

`async with Service(...)` begins where the last server stopped (`recover`), then dispatches. Leaving
it ends what runs and puts it back, to be run again by the next one; `drain` before that gives it
the time to end.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final, Self

import structlog

from bridle.aio import Checkup, Nursery
from bridle.config import Task
from bridle.errors import ConfigError
from bridle.gateway.faults import trace_of
from bridle.gateway.weights import SetPolicy
from bridle.lifecycle.events import Event, RoomChanged, SessionChanged
from bridle.lifecycle.manager import plan
from bridle.server.database import Database
from bridle.server.dispatch import Dispatcher
from bridle.server.files import TrajectoryFiles
from bridle.server.metrics import Metrics
from bridle.server.neighbours import Neighbours
from bridle.server.retention import Retention
from bridle.server.rows import Closed, run_id, task_key
from bridle.server.schemas import Reward, ServiceSettings, Submission
from bridle.server.shares import Shares
from bridle.server.state import State
from bridle.server.telling import Broadcast, Pulse
from bridle.server.views import Views
from bridle.server.workers import Workers
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
        workers: Workers,
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
            stack.enter_context(self.workers.listening(self._hear))
            self.dispatcher.paused = bool(await self.state.number("paused"))
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
        """As `State.give_reward`."""
        self.closed(await self.state.give_reward(session_id, given, now=time.time()))

    async def bar(self, task_id: str, *, owner: str, tenant: bool = False) -> None:
        """Take an id that no task of the owner has: a later submit of it is refused."""
        await self.state.bar(task_id, owner=owner, tenant=tenant, now=time.time())

    async def status(self, tenant: str | None = None) -> JSON:
        """How much there is of what, in counts: of one `tenant`, or of all and each owner."""
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
            "paused": self.dispatcher.paused,
            "policy": self.workers.policy() | {"version": version},
        }

    async def ack(
        self, *, cursor: int | None, task_ids: Sequence[str], tenant: str | None = None
    ) -> int:
        """As `State.ack`; groups that were held back may start."""
        count = await self.state.ack(
            cursor=cursor, task_ids=task_ids, tenant=tenant, now=time.time()
        )
        self.dispatcher.wake.beat()
        return count

    async def replay(self, delivery_id: str | None) -> int:
        """As `State.replay`; they are sent at once."""
        count = await self.state.replay(delivery_id, now=time.time())
        self.ended.beat()
        return count

    def stage(self, session_id: str, attempt: int) -> str | None:
        """What a running session is doing; `None` = not known here."""
        return self._stages.get(run_id(session_id, attempt))

    # ---- pace

    async def pause(self) -> None:
        """Start no session until `resume`, also after a restart."""
        await self.state.set_number("paused", 1)
        self.dispatcher.paused = True

    async def drain(self) -> int:
        """Start no session in this life of the server, and return when nothing runs or `drain_s`
        are over; how many sessions still run. Tasks are accepted meanwhile.
        """
        self.dispatcher.draining = True
        patience_s = 0.0 if self.workers.outlive else self.settings.drain_s
        return await self.dispatcher.drained(patience_s)

    async def resume(self) -> None:
        await self.state.set_number("paused", 0)
        self.dispatcher.paused = False
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
