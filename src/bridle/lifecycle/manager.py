"""A node: one gateway, one store, and the sessions of one machine in pools per stage.

Init workers make runtimes ready ahead of the run slots, up to a bounded READY buffer; a run slot is
held by nothing but a running harness; building and evaluating have workers of their own. A slow
stage holds up the ones before it, and memory stays bounded. How much sooner sessions end for it is
measured by `python -m benchmarks.sessions slots`.

Single event loop: the pools are plain semaphores, nothing else is shared.

Sessions live under one scratch folder in the system's temp folder. It names the process that owns
it, and the sessions in it, so that the next node can tell whether the owner still lives; if not,
the sessions' processes are ended and the folder goes (`reap`).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import structlog
from pydantic import Field

from bridle.aio import Nursery
from bridle.capture.records import SessionCapture, SessionRecord
from bridle.capture.store import Store
from bridle.config import AgentSpec, Limits, SamplingPolicy, Settings, Task
from bridle.engines.base import EngineInfo
from bridle.errors import ConfigError, HarnessError, RuntimeFailure
from bridle.evaluators import open_evaluator
from bridle.evaluators.base import check_evaluator
from bridle.gateway.registry import SessionFacts, SessionHandle
from bridle.gateway.replay import Replay
from bridle.harnesses import open_harness
from bridle.harnesses.base import Harness
from bridle.harnesses.bundles import bundles_dir
from bridle.lifecycle.events import Events, Installing
from bridle.lifecycle.results import SessionResult
from bridle.lifecycle.run_folder import RunFolder
from bridle.lifecycle.session import Plan, Session
from bridle.runtimes import chosen, make_runtime
from bridle.runtimes.cgroups import available_cores, remove_empty
from bridle.runtimes.docker import remove_left_behind
from bridle.runtimes.owner import remove_folders, started_at
from bridle.runtimes.proc import SESSION_MARK, Leaders, end_all, members
from bridle.trajectory import rebuild
from bridle.types import JSON, SessionStatus

log = structlog.get_logger(__name__)

_NOTHING = SessionCapture(SessionRecord("check", 0.0), (), {}, {}, None)
"""A session without a call: building it shows whether its builder is known and well configured."""


class ModelGateway(Protocol):
    """The part of a gateway that a node needs (`bridle.gateway.app.Gateway`)."""

    @property
    def info(self) -> EngineInfo: ...

    async def open_session(
        self,
        session_id: str | None = None,
        *,
        task_id: str | None = None,
        metadata: JSON | None = None,
        sampling: SamplingPolicy | None = None,
        limits: Limits | None = None,
        replay: Replay | None = None,
    ) -> SessionHandle:
        """Open a session; the handle has the only copy of its key."""

    async def seal(self, session_id: str) -> SessionFacts:
        """End a session: its key is dead at once. `KeyError` if there is none of that id."""

    def facts(self, session_id: str) -> SessionFacts:
        """Return the gateway's facts about a session so far."""


def _share(of: float) -> Any:  # noqa: ANN401 - pydantic's type of a default that reads others
    """A default: this share of the run slots, and at least 2."""
    return lambda given: max(2, math.ceil(of * given.get("run_slots", 1)))


class NodeSettings(Settings):
    """Settings of a node: how much it does at once, and what it keeps."""

    run_slots: int = Field(default_factory=lambda: 2 * available_cores(), ge=1)
    """Harnesses running at once; twice the cores that this process may use by default, because
    they mostly wait."""
    init_slots: int = Field(default_factory=_share(0.5), ge=1)
    """Runtimes being made ready at once; half the run slots by default."""
    ready_buffer: int = Field(default_factory=_share(0.5), ge=0)
    """Sessions being made ready, or ready and waiting for a run slot; half the run
    slots by default. 0 = nothing is made ahead: a session is made ready in its run slot."""
    post_slots: int = Field(default_factory=_share(0.5), ge=1)
    """Sessions being built, evaluated and torn down at once; half the run slots by default."""
    reap_s: float = Field(default=300, gt=0)
    """Seconds between looks for what killed processes left on this machine."""
    limit_grace_s: float = Field(default=15, ge=0)
    """How long a harness may go on after its session's limit is reached."""
    keep_logs: Literal["always", "failed", "never"] = "always"
    """Which sessions' logs and files stay in the run folder."""
    bundles: Path | None = None
    """Where harnesses are installed; `None` = the user's cache."""


@dataclass(frozen=True, slots=True)
class Pools:
    """The number of sessions that may be in each stage."""

    ahead: asyncio.Semaphore | None
    """INITIALIZING or READY: the READY buffer; `None` = there is none."""
    init: asyncio.Semaphore
    run: asyncio.Semaphore
    post: asyncio.Semaphore


@contextmanager
def naming(task: Task) -> Iterator[None]:
    """Say in every `ConfigError` which task it is about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"task {task.task_id!r}: {error}") from error


def _located(task: Task) -> AgentSpec:
    """The task's agent, with its skills and its function where they are for this process."""
    agent, base = task.agent, Path(task.task_dir or "")
    changes = {}
    if agent.skills_path is not None:
        changes["skills_path"] = str(base / agent.skills_path)
    if agent.function is not None and ".py:" in agent.function:
        changes["function"] = str(base / agent.function)
    return agent.model_copy(update=changes)


def check(tasks: Sequence[Task]) -> None:
    """Raise the `ConfigError` that running one of `tasks` would raise; nothing is started."""
    for task in tasks:
        planned = plan(task)
        with naming(task):
            check_evaluator(planned.evaluator, planned.task)


def plan(task: Task) -> Plan:
    """The task with all that it names found; `ConfigError` names the task and the field."""
    with naming(task):
        task = task.model_copy(update={"runtime": chosen(task.runtime)})
        make_runtime(task.runtime, "check", Path("check"))
        rebuild(_NOTHING, builder=task.builder)
        harness = open_harness(_located(task))
        return Plan(task, harness, open_evaluator(task.evaluator))


class Node:
    """Runs sessions. Use as an async context manager, inside the gateway's and the store's own."""

    def __init__(
        self,
        *,
        gateway: ModelGateway,
        store: Store,
        folder: RunFolder,
        settings: NodeSettings | None = None,
        scratch_base: Path | None = None,
    ) -> None:
        self.gateway = gateway
        self.store = store
        self.folder = folder
        self.settings = settings or NodeSettings()
        self.events = Events()
        self.pools = Pools(
            ahead=asyncio.Semaphore(ahead) if (ahead := self.settings.ready_buffer) else None,
            init=asyncio.Semaphore(self.settings.init_slots),
            run=asyncio.Semaphore(self.settings.run_slots),
            post=asyncio.Semaphore(self.settings.post_slots),
        )
        self.scratch: Scratch
        self._scratch_base = scratch_base
        self._sessions: dict[str, Session] = {}
        self._bundles: dict[tuple[str, str], Path | HarnessError | None] = {}
        self._installing: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._writing = asyncio.Lock()
        self._reaper = Nursery(lambda error: log.error("the reaper has ended", error=repr(error)))

    async def __aenter__(self) -> Self:
        """Remove what killed nodes left, and make a scratch folder; `RuntimeFailure` if not."""
        await reap(self._scratch_base)
        self.scratch = Scratch.make(self._scratch_base)
        self._reaper.start(self._reap_again(), name="reaper")
        return self

    async def _reap_again(self) -> None:
        while True:
            await asyncio.sleep(self.settings.reap_s)
            try:
                await reap(self._scratch_base)
            except RuntimeFailure as error:
                log.warning("what killed processes left does not go", error=str(error))

    async def __aexit__(self, *_: object) -> None:
        """Remove the scratch folder; sessions are ended by whoever runs them."""
        await self._reaper.cancel()
        await asyncio.to_thread(self.scratch.remove)

    @property
    def capacity(self) -> int:
        """Return how many sessions can be between INITIALIZING and their end."""
        settings = self.settings
        return settings.ready_buffer + settings.run_slots + 2 * settings.post_slots

    @property
    def free(self) -> int:
        """Return how many further sessions fit now; less than 0 if more were handed in than fit."""
        return self.capacity - len(self._sessions)

    def stages(self) -> Mapping[SessionStatus, int]:
        """Return how many living sessions are in each stage."""
        return Counter(session.status for session in self._sessions.values())

    async def install(self, harness: Harness) -> Path | None:
        """The harness's bundle, made now if it is not there; `HarnessError`, once found, stays."""
        name = (harness.name, harness.version)
        async with self._installing[name]:
            if name not in self._bundles:
                self._bundles[name] = await self._install(harness)
        bundle = self._bundles[name]
        if isinstance(bundle, HarnessError):
            raise bundle
        return bundle

    async def _install(self, harness: Harness) -> Path | HarnessError | None:
        def report(line: str) -> None:
            self.events.tell(Installing(harness.name, line))

        try:
            return await harness.install(self.settings.bundles or bundles_dir(), report)
        except HarnessError as error:
            return error

    async def run(
        self,
        task: Task,
        sample_index: int = 0,
        *,
        session_id: str | None = None,
        avoid: frozenset[str] = frozenset(),  # noqa: ARG002 - for runners of many nodes; this is one
    ) -> SessionResult:
        """Run one session of a task to its end and append its result to the run folder.

        `session_id` is the caller's own, else one is made. `avoid` names nodes that it is not to
        run on if there are others; here are none. Raises `ConfigError` for a task that names what
        is not there and for an id that lives already, before anything is done, and `StoreError` if
        the result cannot be written. A cancelled caller leaves a session that has ended and is
        recorded, and no result.
        """
        session = Session(plan(task), sample_index, self, session_id)
        if session.session_id in self._sessions:
            raise ConfigError(f"session {session.session_id!r} runs already")
        self._sessions[session.session_id] = session
        try:
            result = await session.run()
        finally:
            del self._sessions[session.session_id]
        async with self._writing:
            await asyncio.to_thread(self.folder.append, result)
        return result

    def cancel(self, session_id: str) -> bool:
        """End a living session, whose result will be CANCELLED; whether there was one."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.cancel()
        return session is not None

    def session_ids(self) -> tuple[str, ...]:
        return tuple(self._sessions)


PREFIX = "bridle-"
OWNER = "owner.json"
SESSIONS = "sessions"
GRACE_S = 1.0


class Scratch:
    """The scratch folder of one node; its sessions get folders of their own in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, base: Path | None = None) -> Scratch:
        """A new one in `base` (the system's temp folder). `RuntimeFailure` if it can't be made."""
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            owner = {"pid": os.getpid(), "started": started_at(os.getpid())}
            (folder / OWNER).write_text(json.dumps(owner))
        except OSError as error:
            where = base or tempfile.gettempdir()
            raise RuntimeFailure(f"cannot make a scratch folder in {where}: {error}") from error
        return cls(folder)

    def session(self, session_id: str) -> Path:
        """A new folder for a session; its name is short, because the model sees it."""
        with (self.folder / SESSIONS).open("a") as file:
            file.write(f"{session_id}\n")
        folder = self.folder / secrets.token_hex(4)
        folder.mkdir()
        return folder

    def remove(self) -> None:
        with suppress(RuntimeFailure):  # the next reaper tries again
            remove_folders([self.folder])


async def reap(base: Path | None = None) -> int:
    """End and remove what dead nodes left: containers, folders in `base` (the system's temp folder)
    with their sessions' processes, control groups.

    Mounts and namespaces end with the processes that hold them. Returns how many scratch folders
    were removed. Folders of other users are left alone.
    """
    if containers := await remove_left_behind():
        log.info("removed what a killed process left", containers=containers)
    removed = 0
    for folder in list(_abandoned(base or Path(tempfile.gettempdir()))):
        marks = [f"{SESSION_MARK}={name}".encode() for name in _sessions(folder)]

        def find(marks: list[bytes] = marks) -> set[int]:
            return {pid for mark in marks for pid in members((mark,), Leaders())}

        ended = await end_all(find, grace_s=GRACE_S) if marks else 0
        Scratch(folder).remove()
        removed += 1
        log.info("removed what a killed process left", folder=str(folder), processes=ended)
    await asyncio.to_thread(remove_empty)
    return removed


def _abandoned(base: Path) -> Iterator[Path]:
    for owner in base.glob(f"{PREFIX}*/{OWNER}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            facts = json.loads(owner.read_text())
            lives = started_at(facts["pid"])
            # Without /proc nobody can be proven dead.
            dead = lives is None or lives != facts["started"]
            if dead and facts["started"] is not None and os.access(owner.parent, os.W_OK):
                yield owner.parent


def _sessions(folder: Path) -> list[str]:
    try:
        return (folder / SESSIONS).read_text().split()
    except OSError:
        return []
