"""One session: from a task to a result, through an explicit table of states.

    REGISTERED -> INITIALIZING -> READY -> RUNNING -> BUILDING -> EVALUATING -> final

Each stage has a budget of its own and is a file of its own (`opening`, `running`, `scoring`). A
failure ends in a status with a cause, never in an exception; whatever happens, the key is dead, the
processes are ended, and the outcome is recorded. What is recorded suffices to build the same result
again at any later time.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import structlog

from bridle.aio import run_shielded
from bridle.capture.records import Outcome
from bridle.config import Task
from bridle.errors import BridleError, StoreError
from bridle.evaluators.base import Evaluation, Evaluator
from bridle.gateway.replay import Replay
from bridle.harnesses.base import Harness
from bridle.lifecycle.artifacts import keep_files
from bridle.lifecycle.ending import COMPLETED, Ending, Facts, failed, is_scored
from bridle.lifecycle.events import SessionChanged, SessionEnded
from bridle.lifecycle.opening import Opened, open_session
from bridle.lifecycle.preparing import Prewarmed
from bridle.lifecycle.results import SessionResult, result_of, trajectory_of, unrecorded
from bridle.lifecycle.running import prewarm, run_harness
from bridle.lifecycle.scoring import build, evaluate
from bridle.runtimes.base import ExecResult, Runtime
from bridle.trajectory import with_outcome
from bridle.trajectory.result import writable
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON, Cause, SessionStatus

if TYPE_CHECKING:
    from bridle.lifecycle.manager import Node

T = TypeVar("T")

_S = SessionStatus
FINAL: Final = frozenset({_S.COMPLETED, _S.TIMEOUT, _S.ERROR, _S.CANCELLED})
BROKEN_OFF: Final = frozenset({_S.ERROR, _S.CANCELLED})

TRANSITIONS: Final[Mapping[SessionStatus, frozenset[SessionStatus]]] = {
    _S.REGISTERED: frozenset({_S.INITIALIZING}) | BROKEN_OFF,
    _S.INITIALIZING: frozenset({_S.READY}) | BROKEN_OFF,
    _S.READY: frozenset({_S.RUNNING}) | BROKEN_OFF,
    _S.RUNNING: frozenset({_S.BUILDING}) | BROKEN_OFF,
    _S.BUILDING: frozenset({_S.EVALUATING}) | FINAL,
    _S.EVALUATING: FINAL,
    **{status: frozenset() for status in FINAL},
}
"""Where a session can go from each status; final ones lead nowhere."""

CONCLUDE_S = 90.0
"""How long the last commits and the record of the outcome may take when all is being ended."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """A task with everything that it names found and checked."""

    task: Task
    harness: Harness
    evaluator: Evaluator


class Session:
    """One run of one harness; `run` is its whole life."""

    def __init__(
        self, plan: Plan, sample_index: int, node: Node, session_id: str | None = None
    ) -> None:
        self.plan = plan
        self.task = plan.task
        self.sample_index = sample_index
        self.node = node
        # 180: a session id has at most 200 characters.
        made = f"{plan.task.task_id[:180]}.{sample_index}.{secrets.token_hex(3)}"
        self.session_id = session_id or made
        self.status = _S.REGISTERED
        self.facts: Facts | None = None
        """The gateway's, once it is sealed."""
        self.harness_result: ExecResult | None = None
        self.replay: Replay | None = None
        self.trajectory: Trajectory | None = None
        """As built before evaluation."""
        self.evaluation: Evaluation | None = None
        self._ending: Ending | None = None
        self._outcome: Outcome | None = None
        self._timing: dict[str, float] = {}
        self._files: dict[str, str] = {}
        self._left_out: dict[str, str] = {}
        self._limits: str | None = None
        """`Contained.limits` of a runtime that has it."""
        self._work: asyncio.Task[None] | None = None

    async def run(self) -> SessionResult:
        """Live. Failures are in the result; a cancelled caller leaves a recorded end behind."""
        self._tell()
        try:
            async with asyncio.TaskGroup() as group:
                self._work = group.create_task(self._live(group), name=self.session_id)
        finally:
            if self._outcome is None:
                self._ending = self._broken_off()
                await run_shielded(self._conclude(), timeout_s=CONCLUDE_S)
        return await self._result()

    def cancel(self) -> None:
        """End it; its result is CANCELLED, unless its outcome is recorded already."""
        if self._work is not None and self._outcome is None:
            self._work.cancel()

    # ---- stages

    async def _live(self, group: asyncio.TaskGroup) -> None:
        async with AsyncExitStack() as stack:
            fresh = None
            opened = await self._until_slot(stack)
            if isinstance(opened, Ending):
                self._ending = opened
            else:
                try:
                    self.go(_S.RUNNING)
                    fresh = prewarm(self, group, stack)
                    self._ending = await self.timed("run", run_harness(self, opened))
                finally:
                    self.node.pools.run.release()
                self.go(_S.BUILDING)
            async with self.node.pools.post:
                if not isinstance(opened, Ending):
                    await self._score(opened, fresh)
                await self._conclude()
                await stack.aclose()

    async def _until_slot(self, stack: AsyncExitStack) -> Opened | Ending:
        """A session ready to run, which holds a run slot; or how it ended before, without one."""
        pools = self.node.pools
        began = time.monotonic()
        if pools.ahead is None:
            return await self._in_its_slot(began, stack)
        async with pools.ahead:
            opened = await self._made_ready(began, stack)
            if not isinstance(opened, Ending):
                await self.timed("ready", pools.run.acquire())
        return opened

    async def _in_its_slot(self, began: float, stack: AsyncExitStack) -> Opened | Ending:
        run = self.node.pools.run
        async with AsyncExitStack() as slot:
            await run.acquire()
            slot.callback(run.release)
            opened = await self._made_ready(began, stack)
            if not isinstance(opened, Ending):
                slot.pop_all()
        return opened

    async def _made_ready(self, began: float, stack: AsyncExitStack) -> Opened | Ending:
        async with self.node.pools.init:
            self._timing["queue"] = time.monotonic() - began
            self.go(_S.INITIALIZING)
            opened = await open_session(self, stack)
        if not isinstance(opened, Ending):
            self._limits = getattr(opened.runtime, "limits", None)
            self.go(_S.READY)
        return opened

    async def _score(self, opened: Opened, fresh: Prewarmed | None) -> None:
        """BUILDING and, where the ending has a reward, EVALUATING."""
        self._files, self._left_out = await keep_files(self, opened)
        self.trajectory, fault = await self.timed("build", build(self))
        self._also(fault)
        if self.trajectory is None or not self._is_scored():
            return
        self.go(_S.EVALUATING)
        work = evaluate(self, opened, fresh, self.trajectory)
        self.evaluation, fault = await self.timed("evaluate", work)
        self._also(fault)

    def _is_scored(self) -> bool:
        ending, facts = self._ending, self.facts
        replied = facts is not None and facts.delivered > 0
        return ending is not None and is_scored(ending.status, ending.cause, replied=replied)

    def _also(self, fault: Ending | None) -> None:
        """Take a later fault in: it ends what was COMPLETED, and is added to any other ending."""
        if fault is None:
            return
        if self._ending == COMPLETED or self._ending is None:
            self._ending = fault
        else:
            error = f"{self._ending.error}; {fault.error}"
            self._ending = Ending(self._ending.status, self._ending.cause, error)

    # ---- the end

    def _broken_off(self) -> Ending:
        work = self._work
        if work is not None and work.done() and not work.cancelled():
            return failed(Cause.INFRASTRUCTURE, f"{self.status}: {work.exception()!r}")
        return Ending(_S.CANCELLED, Cause.CANCELLED, f"cancelled while {self.status}")

    async def _conclude(self) -> None:
        """Make the key dead and record the outcome; the status is final afterwards."""
        await self.seal()
        ending = self._ending
        assert ending is not None
        outcome = self._outcome_of(ending)
        if self.facts is not None:
            try:
                await self.node.store.close_session(outcome)
            except StoreError as error:
                before = "" if ending.error is None else f"{ending.error}; "
                said = f"{before}the outcome could not be recorded: {error}"
                ending = failed(Cause.INFRASTRUCTURE, said)
                outcome = self._outcome_of(ending)
        self._ending, self._outcome = ending, outcome
        self.go(ending.status)

    async def seal(self) -> Facts | None:
        """Make the key dead and bring the last commits home; idempotent. `None` = never opened."""
        with suppress(KeyError):
            self.facts = await self.node.gateway.seal(self.session_id)
        return self.facts

    async def stop(self, runtime: Runtime) -> None:
        """Stop a runtime within the teardown budget; a failure is logged, for the reaper."""
        try:
            await run_shielded(runtime.stop(), timeout_s=self.task.budgets.teardown_s)
        except (TimeoutError, BridleError) as error:
            log.warning("a runtime was not stopped", session=self.session_id, error=str(error))

    def _outcome_of(self, ending: Ending) -> Outcome:
        evaluation, result = self.evaluation, self.harness_result
        metadata: JSON = {
            "timing": {stage: round(seconds, 6) for stage, seconds in self._timing.items()},
            "exit_code": None if result is None else result.exit_code,
            "signal": None if result is None else result.signal,
            "logs": self._kept_logs(ending),
        }
        if self.replay is not None:
            metadata["fork"] = self.replay.facts()
        if self._left_out:
            metadata["left_out"] = writable(self._left_out)
        if self._limits is not None:
            metadata["limits"] = self._limits
        if evaluation is not None and evaluation.metadata:
            metadata["evaluation"] = evaluation.metadata
        return Outcome(
            session_id=self.session_id,
            status=ending.status,
            ended_at=time.time(),
            reward=None if evaluation is None else evaluation.reward,
            trace_rewards=None if evaluation is None else evaluation.trace_rewards,
            cause=ending.cause,
            error=ending.error,
            metadata=metadata,
        )

    async def _result(self) -> SessionResult:
        """The result, as it could be read from capture at any later time."""
        outcome = self._outcome
        assert outcome is not None
        try:
            capture = await asyncio.to_thread(self.node.store.read, self.session_id)
        except StoreError:
            return unrecorded(self.task, self.sample_index, self.plan.harness, outcome)
        if self.trajectory is None:
            trajectory = await asyncio.to_thread(trajectory_of, capture)
        else:
            trajectory = with_outcome(self.trajectory, outcome)
        result = result_of(capture.session, outcome, trajectory)
        self.node.events.tell(SessionEnded(result, capture))
        return result

    # ---- small things

    @property
    def completed(self) -> bool:
        """Return whether the harness ended well."""
        return self._ending == COMPLETED

    @property
    def folder(self) -> Path:
        """Return the folder of its logs; it may not exist."""
        return self.node.folder.session_folder(self.session_id)

    @property
    def base(self) -> Path:
        """Return the folder that relative paths of the task begin at."""
        return Path(self.task.task_dir or ".").absolute()

    def log(self, name: str) -> Path:
        """The log file of that name."""
        return self.folder / f"{name}.log"

    @property
    def keep(self) -> Literal["always", "failed", "never"]:
        """Of which endings its logs and files stay."""
        return self.task.artifacts.keep or self.node.settings.keep_logs

    def _kept_logs(self, ending: Ending) -> dict[str, str]:
        """Name -> path in the run folder of what is kept, after dropping what is not."""
        if self.keep == "never" or (self.keep == "failed" and ending == COMPLETED):
            self.node.folder.drop_logs(self.session_id)
            return {}
        found = sorted(self.folder.glob("*.log"))
        logs = {path.stem: str(path.relative_to(self.node.folder.path)) for path in found}
        return {**logs, **self._files}

    async def timed(self, stage: str, work: Awaitable[T]) -> T:
        """Await `work` and note how long it took, whatever comes of it."""
        began = time.monotonic()
        try:
            return await work
        finally:
            self._timing[stage] = time.monotonic() - began

    def go(self, status: SessionStatus) -> None:
        """Enter a status and tell it; the table says from where."""
        assert status in TRANSITIONS[self.status], f"{self.status} does not lead to {status}"
        self.status = status
        self._tell()

    def _tell(self) -> None:
        ending = self._ending if self.status in FINAL else None
        self.node.events.tell(
            SessionChanged(
                session_id=self.session_id,
                task_id=self.task.task_id,
                sample_index=self.sample_index,
                harness=self.plan.harness.name,
                status=self.status,
                at=time.time(),
                cause=None if ending is None else ending.cause,
                reward=None if ending is None or not self.evaluation else self.evaluation.reward,
                error=None if ending is None else ending.error,
            )
        )
