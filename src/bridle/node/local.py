"""A node in this process: one gateway, one store, and sessions in pools per stage.

Runtimes are made ready ahead of the run slots, up to a bounded READY buffer; a run slot is held by
nothing but a running harness; building and evaluating have slots of their own. A slow stage delays
the ones before it, and memory stays bounded. `python -m benchmarks.sessions slots` measures how
much sooner sessions end because of the pools.

All of it belongs to one event loop: the pools are plain semaphores, nothing else is shared.

Sessions have their files in one scratch folder in the system's temp folder. It names the process
that owns it, and the sessions in it, so that a later node can tell whether the owner still lives;
if not, the sessions' processes are killed and the folder is removed (`reap`).

`LocalExecutor` runs the sessions of many tasks on one node. A task with `branching` grows a tree:
when a session has ended, forks of it begin at the turns that the task names, and they are sessions
of the task like the others.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol, Self

import structlog
from pydantic import Field

from bridle.aio import Nursery
from bridle.capture.reader import excerpt
from bridle.capture.records import Outcome, SessionCapture, SessionRecord, Store
from bridle.capture.sqlite import SqliteStore
from bridle.config import AgentSpec, ForkSpec, Settings, Task
from bridle.errors import ConfigError, HarnessError, RuntimeFailure, first_error
from bridle.evaluators import open_evaluator
from bridle.evaluators.base import check_evaluator
from bridle.gateway.app import GatewayServer
from bridle.gateway.replay import replies_of
from bridle.gateway.weights import SetPolicy
from bridle.harnesses import open_harness
from bridle.harnesses.base import Harness
from bridle.harnesses.bundles import bundles_dir
from bridle.node.base import Events, Installing
from bridle.node.results import CAPTURE, SESSIONS, RunFolder, SessionResult, result_from
from bridle.node.session import SessionPlan, SessionRun
from bridle.runtimes import make_runtime, resolve_auto
from bridle.runtimes.confinement import available_cores, remove_empty
from bridle.runtimes.docker import remove_left_behind
from bridle.runtimes.files import remove_folders
from bridle.runtimes.process import SESSION_MARK, Leaders, end_all, is_dead, members, owner_mark
from bridle.trajectory import rebuild
from bridle.types import JSON, Cause, SessionStatus


class Executor(Protocol):
    """Computes the sessions of many tasks."""

    def run(
        self, tasks: Sequence[Task]
    ) -> AbstractAsyncContextManager[AsyncIterator[SessionResult]]:
        """Run `num_samples` sessions of each task; results come in the order in which they end.

            async with executor.run(tasks) as results:
                async for result in results: ...

        Tasks start in order, the samples of a task together. New sessions wait while results are
        not taken, so memory stays bounded. Leaving the block ends the sessions that still run.
        `ConfigError` before the first session if a task names something unknown.
        """


class LocalExecutor:
    """Implements `Executor` on a node of this process."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node

    @asynccontextmanager
    async def run(self, tasks: Sequence[Task]) -> AsyncIterator[AsyncIterator[SessionResult]]:
        """Run `num_samples` sessions of each task; yields their results in the order in which they
        end.
        """
        check(tasks)
        if any(task.branching for task in tasks) and not isinstance(self._node.store, SqliteStore):
            raise ConfigError(
                "branching: tasks that branch need a node that captures into a file, and this "
                "one has no file"
            )
        batch = _Batch(self._node, sum(task.num_samples for task in tasks))
        try:
            async with asyncio.TaskGroup() as group:
                feeder = group.create_task(batch.feed(tasks), name="feeder")
                try:
                    yield batch.results()
                finally:
                    feeder.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors


class _Batch:
    """The sessions of one `run`."""

    def __init__(self, node: LocalNode, total: int) -> None:
        self._node = node
        self._total = total
        """Sessions of the batch, forks that are known included."""
        self._ended: asyncio.Queue[SessionResult] = asyncio.Queue()
        self._room = asyncio.Semaphore(node.capacity)
        self._sampled: Counter[str] = Counter()
        """Sampled tokens by task."""

    async def results(self) -> AsyncIterator[SessionResult]:
        taken = 0
        while taken < self._total:
            result = await self._ended.get()
            taken += 1
            self._room.release()
            yield result

    async def feed(self, tasks: Sequence[Task]) -> None:
        """Start sessions as there is room; a cancellation ends all of them."""
        async with asyncio.TaskGroup() as sessions:
            for task in tasks:
                for sample_index in range(task.num_samples):
                    await self._room.acquire()
                    sessions.create_task(self._one(task, sample_index))

    async def _one(self, task: Task, sample_index: int, depth: int = 0) -> None:
        result = await self._node.run(task, sample_index)
        forks = await self._forks(task, result, depth)
        self._total += len(forks)
        self._ended.put_nowait(result)
        async with asyncio.TaskGroup() as sessions:
            for fork in forks:
                await self._room.acquire()
                sessions.create_task(self._one(fork, sample_index, depth + 1))

    async def _forks(self, task: Task, result: SessionResult, depth: int) -> list[Task]:
        """Return the forks of a session that has ended, each a task of one session."""
        spec, store = task.branching, self._node.store
        if spec is None or not isinstance(store, SqliteStore):
            return []
        stats = result.trajectory.metadata["stats"]
        again = stats["tokens_excluded"].get("replayed", 0)
        self._sampled[task.task_id] += stats["tokens_captured"] - again
        spent = spec.budget_tokens is not None and (
            self._sampled[task.task_id] >= spec.budget_tokens
        )
        if spent or depth == spec.max_depth or result.status is not SessionStatus.COMPLETED:
            return []
        capture = await asyncio.to_thread(store.read, result.session_id)
        replies, given = replies_of(capture)
        forks = [
            ForkSpec(capture=str(store.path.absolute()), session=result.session_id, at=at)
            for at in spec.points(given + 1, replies)
        ]
        return [
            task.model_copy(update={"fork": fork, "num_samples": 1})
            for fork in forks
            for _ in range(spec.samples)
        ]


log = structlog.get_logger(__name__)

NAME: Final = "local"
"""Name of the only node of a process."""

KILLED: Final = "its process was killed"
"""Error of a run whose process died before it ended."""

_NOTHING = SessionCapture(SessionRecord("check", 0.0), (), {}, {}, None)
"""A session without a call, which is built to check a task's builder."""


def _half(given: JSON) -> int:
    """Return a default: half the run slots, and at least 2."""
    return max(2, math.ceil(int(given.get("run_slots", 1)) / 2))


class NodeSettings(Settings):
    """Settings of a node: how much it does at once, and what it keeps."""

    run_slots: int = Field(default_factory=lambda: 2 * available_cores(), ge=1)
    """Harnesses running at once; twice the cores that this process may use by default, because
    they mostly wait."""
    init_slots: int = Field(default_factory=_half, ge=1)
    """Runtimes being made ready at once; half the run slots by default."""
    ready_buffer: int = Field(default_factory=_half, ge=0)
    """Sessions being made ready, or ready and waiting for a run slot; half the run
    slots by default. 0 = no buffer: a session is made ready in its run slot."""
    post_slots: int = Field(default_factory=_half, ge=1)
    """Sessions being built, evaluated and torn down at once; half the run slots by default."""
    reap_s: float = Field(default=300, gt=0)
    """Seconds between two searches for what killed processes left on this machine."""
    limit_grace_s: float = Field(default=15, ge=0)
    """Seconds that a harness may continue after its session's limit is reached."""
    keep_logs: Literal["always", "failed", "never"] = "always"
    """Sessions whose logs and files stay in the run folder."""
    bundles: Path | None = None
    """Folder of installed harnesses; `None` = the user's cache."""


@dataclass(frozen=True, slots=True)
class Pools:
    """The number of sessions that may be in each stage."""

    ahead: asyncio.Semaphore | None
    """INITIALIZING or READY: the READY buffer; `None` = there is none."""
    init: asyncio.Semaphore
    run: asyncio.Semaphore
    post: asyncio.Semaphore


@contextmanager
def task_in_errors(task: Task) -> Iterator[None]:
    """Within the context, add the task's id to the text of every `ConfigError`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"task {task.task_id!r}: {error}") from error


def _located(task: Task) -> AgentSpec:
    """Return the task's agent, its paths relative to this process."""
    agent, base = task.agent, Path(task.task_dir or "")
    changes = {}
    if agent.skills_path is not None:
        changes["skills_path"] = str(base / agent.skills_path)
    if agent.function is not None and ".py:" in agent.function:
        changes["function"] = str(base / agent.function)
    return agent.model_copy(update=changes)


def check(tasks: Sequence[Task]) -> None:
    """Raise the `ConfigError` that running one of `tasks` would raise; starts nothing."""
    for task in tasks:
        planned = plan(task)
        with task_in_errors(task):
            check_evaluator(planned.evaluator, planned.task)


def plan(task: Task) -> SessionPlan:
    """Return the plan of a session: the harness, runtime, evaluator and builder that the task
    names.

    `ConfigError` names the task and the wrong field.
    """
    with task_in_errors(task):
        task = task.model_copy(update={"runtime": resolve_auto(task.runtime)})
        make_runtime(task.runtime, "check", Path("check"))
        rebuild(_NOTHING, builder=task.builder)
        harness = open_harness(_located(task))
        return SessionPlan(task, harness, open_evaluator(task.evaluator))


class LocalNode:
    """A node in this process; implements `base.SessionRunner`.

    Use as an async context manager, inside the gateway's and the store's own.
    """

    outlive = False

    def __init__(
        self,
        *,
        gateway: GatewayServer,
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
        self._earlier: Sequence[str] = ()
        """Sessions of earlier processes that have not been settled."""
        self._sessions: dict[str, SessionRun] = {}
        self._bundles: dict[tuple[str, str], Path | HarnessError | None] = {}
        self._installing: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._writing = asyncio.Lock()
        self._reaper = Nursery(lambda error: log.error("the reaper has ended", error=repr(error)))

    async def __aenter__(self) -> Self:
        """Remove what killed nodes left, and make a scratch folder; `RuntimeFailure` if not."""
        await reap(self._scratch_base)
        self.scratch = Scratch.make(self._scratch_base)
        self._earlier = self.gateway.session_ids()
        self._reaper.start(self._reap_again(), name="reaper")
        return self

    async def _reap_again(self) -> None:
        while True:
            await asyncio.sleep(self.settings.reap_s)
            try:
                await reap(self._scratch_base)
            except RuntimeFailure as error:
                log.warning("what killed processes left cannot be removed", error=str(error))

    async def __aexit__(self, *_: object) -> None:
        """Remove the scratch folder; sessions are ended by their callers."""
        await self._reaper.cancel()
        await asyncio.to_thread(self.scratch.remove)

    # ---- runs

    @property
    def capacity(self) -> int:
        """Number of sessions that can be between INITIALIZING and their end."""
        settings = self.settings
        return settings.ready_buffer + settings.run_slots + 2 * settings.post_slots

    @property
    def free(self) -> int:
        """Number of further sessions that fit now; less than 0 if more were started than fit."""
        return self.capacity - len(self._sessions)

    def stages(self) -> Mapping[SessionStatus, int]:
        """Return how many of the node's sessions are in each stage."""
        return Counter(session.status for session in self._sessions.values())

    async def install(self, harness: Harness) -> Path | None:
        """Return the bundle of the harness, which the first call installs.

        A failed installation's `HarnessError` is raised again by each later call.
        """
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
        run_id: str | None = None,
        avoid: frozenset[str] = frozenset(),  # noqa: ARG002 - for runners of many nodes; this is one
    ) -> SessionResult:
        """Run one session of a task to its end and append its result to the run folder.

        A `run_id` is made where none is given. If the caller is cancelled, the session ends and its
        end is recorded in the capture, but no result is written.
        """
        session = SessionRun(plan(task), sample_index, self, run_id)
        if session.session_id in self._sessions:
            raise ConfigError(
                f"session {session.session_id!r} is running already; give the new run another id"
            )
        self._sessions[session.session_id] = session
        try:
            result = await session.run()
        finally:
            del self._sessions[session.session_id]
        async with self._writing:
            await asyncio.to_thread(self.folder.append, result)
        return result

    def cancel(self, run_id: str) -> bool:
        """End a session with the result CANCELLED; returns whether it was running."""
        session = self._sessions.get(run_id)
        if session is not None:
            session.cancel()
        return session is not None

    def session_ids(self) -> tuple[str, ...]:
        """Return the ids of the sessions in progress."""
        return tuple(self._sessions)

    # ---- runs of earlier processes

    def expect(self, run_id: str) -> bool:  # noqa: ARG002 - those of an earlier process died with it
        """Return False: sessions of this node end with its process, so none of an earlier one
        continues.
        """
        return False

    async def settle(self) -> None:
        """Close the sessions of an earlier process that have no end, and revoke their keys."""
        for run_id in self._earlier:
            if not self.gateway.forget(run_id):
                await self.recall(run_id)
                self.gateway.forget(run_id)
        self._earlier = ()

    async def recall(self, run_id: str) -> SessionResult | None:
        """Return the result of a session that ended under an earlier process; `None` = it did not
        end.

        A session that was cancelled because its process stopped counts as not ended.
        """
        try:
            await self.gateway.seal(run_id)
        except KeyError:
            return None
        outcome = self.store.outcome(run_id)
        if outcome is None:
            ended = Outcome(
                session_id=run_id,
                status=SessionStatus.ERROR,
                ended_at=time.time(),
                reward=None,
                cause=Cause.INFRASTRUCTURE,
                error=KILLED,
            )
            await self.store.close_session(ended)
            return None
        if outcome.status == SessionStatus.CANCELLED or outcome.error == KILLED:
            return None
        capture = await asyncio.to_thread(self.store.read, run_id)
        return await asyncio.to_thread(result_from, capture)

    # ---- what is kept of runs

    @property
    def capture(self) -> Path | None:
        """File with the captured exchanges of all sessions; `None` = they are kept in memory."""
        return self.store.path if isinstance(self.store, SqliteStore) else None

    async def artifact(self, run_id: str, name: str) -> Path | bytes | None:
        """Return the path of a log or kept file of a run, only if it lies in the run's own folder.

        `results.CAPTURE` stands for the exchanges captured so far. `None` = there is none of that
        name.
        """
        if name == CAPTURE:
            if self.capture is None:
                return None
            return await asyncio.to_thread(excerpt, self.capture, run_id)
        folder = self.folder.session_folder(run_id).resolve()
        try:
            path = (folder / name).resolve()
            inside = path.is_relative_to(folder) and path.is_relative_to(self.folder.path.resolve())
            return path if inside and path.is_file() else None
        except (OSError, ValueError):  # no file has such a name
            return None

    def release(self, run_id: str) -> None:
        """Drop a session from the gateway's memory, because its result is stored."""
        self.gateway.forget(run_id)

    async def remove(self, run_id: str) -> None:
        """Delete the capture, logs and files of a session that has ended."""
        self.gateway.forget(run_id)
        await self.store.forget(run_id)
        if "/" not in run_id:  # such an id never ran, and could lead out of the folder
            await asyncio.to_thread(self.folder.drop_logs, run_id)

    async def kept_bytes(self) -> int:
        """Return the bytes of captured exchanges and sessions' files on disk."""
        logs = self.folder.path / SESSIONS
        return await asyncio.to_thread(lambda: self.store.size() + _bytes_in(logs))

    # ---- its engines

    async def set_policy(self, wanted: SetPolicy) -> JSON:
        """Change the policy of the engines; returns the policy then."""
        await self.gateway.set_policy(wanted)
        return self.policy()

    def policy(self) -> JSON:
        return self.gateway.policy()

    async def add_replica(self, engine: str) -> JSON:
        """Add an inference server to the engines; returns the policy then."""
        await self.gateway.add_replica(engine)
        return self.policy()

    async def remove_replica(self, name: str, drain_s: float) -> JSON:
        """Remove an inference server from the engines; its calls may continue for `drain_s`."""
        await self.gateway.remove_replica(name, drain_s)
        return self.policy()

    async def metrics(self) -> dict[str, str]:
        """Return the gateway's metrics as Prometheus text, by the name of this node."""
        return {NAME: self.gateway.metrics()}

    def nodes(self) -> list[JSON]:
        """Return this one node's name, state, slots, stages and policy as JSON."""
        return [
            {
                "name": NAME,
                "node_id": None,
                "state": "live",
                "slots": self.capacity,
                "free": self.free,
                "stages": {str(status): count for status, count in self.stages().items()},
                "policy": self.policy(),
                "error": None,
            }
        ]

    async def drain_node(self, name: str) -> None:  # noqa: ARG002 - there is only one
        """Raise `ConfigError`: the only node is drained by draining the server."""
        raise ConfigError("the only node is the server's own: drain the server (POST /v1/drain)")


def _bytes_in(folder: Path) -> int:
    """Return the size of all files below a folder, without following links."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(Path(path, name)).st_size
    return total


PREFIX = "bridle-"
OWNER = "owner"
GRACE_S = 1.0


class Scratch:
    """The scratch folder of one node; its sessions get folders of their own in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, base: Path | None = None) -> Scratch:
        """Make a scratch folder in `base` (the system's temp folder). `RuntimeFailure` if it cannot
        be made.
        """
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            (folder / OWNER).write_text(owner_mark())
        except OSError as error:
            where = base or tempfile.gettempdir()
            raise RuntimeFailure(f"cannot make a scratch folder in {where}: {error}") from error
        return cls(folder)

    def session(self, session_id: str, stack: AsyncExitStack) -> Path:
        """Make a folder for a session in the scratch folder; its name is short, as the model sees
        it. `stack` removes it; users of the folder empty it before.
        """
        with (self.folder / SESSIONS).open("a") as file:
            file.write(f"{session_id}\n")
        folder = self.folder / secrets.token_hex(4)
        folder.mkdir()
        stack.callback(_remove_empty, folder)
        return folder

    def remove(self) -> None:
        """Delete the scratch folder; what cannot be deleted is left to a later cleaning."""
        with suppress(RuntimeFailure):  # the next reaper tries again
            remove_folders([self.folder])


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # what could not be removed is removed with the scratch folder
        folder.rmdir()


async def reap(base: Path | None = None) -> int:
    """End and remove what nodes whose process died left: containers, control groups, and scratch
    folders in `base` (the system's temp folder) with their sessions' processes.

    Mounts and namespaces end with the processes that hold them. Returns how many scratch folders
    were removed. Folders of other users are left alone.
    """
    if containers := await remove_left_behind():
        log.info("removed what a killed process left", containers=containers)
    removed = 0
    for folder in list(_abandoned(base or Path(tempfile.gettempdir()))):
        marks = [f"{SESSION_MARK}={name}".encode() for name in _session_ids(folder)]

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
        with suppress(OSError, ValueError):
            if is_dead(owner.read_text()) and os.access(owner.parent, os.W_OK):
                yield owner.parent


def _session_ids(folder: Path) -> list[str]:
    try:
        return (folder / SESSIONS).read_text().split()
    except OSError:
        return []
