"""One session: from a task to a result, through an explicit table of states.

    REGISTERED -> INITIALIZING -> READY -> RUNNING -> BUILDING -> EVALUATING -> final

Each stage has a budget of its own. A stage that fails ends the session with a status and a cause;
it raises nothing. However a session ends, its key is revoked, its processes are killed and its
outcome is recorded. The records suffice to build the same result again at any later time.

When a limit is reached, the gateway refuses every further call with the provider's error for an
exhausted budget; most harnesses then stop. One that continues is killed after a grace period.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from bridle.aio import run_shielded
from bridle.capture.records import Outcome
from bridle.capture.sqlite import SqliteReader
from bridle.config import FieldPolicy, ForkSpec, SamplingPolicy, Task
from bridle.errors import (
    BridleError,
    ConfigError,
    EvaluatorError,
    RuntimeFailure,
    StoreError,
    boundary,
)
from bridle.evaluators.base import (
    Evaluation,
    EvaluationContext,
    Evaluator,
    ModelAccess,
    Unscorable,
    evaluate_with_control,
)
from bridle.gateway.registry import SessionFacts
from bridle.gateway.replay import Replay, replay_of
from bridle.harness_rules import Varying
from bridle.harnesses.base import Harness, Launch, LaunchContext, needs_model
from bridle.node.base import SessionChanged, SessionEnded
from bridle.node.results import (
    COMPLETED,
    Ending,
    SessionResult,
    failed,
    is_scored,
    judge,
    out_of_time,
    rebuild_facts,
    result_of,
    trajectory_of,
    uncaptured_result,
    without_a_model,
)
from bridle.node.workspace import (
    Prewarmed,
    SessionPlaces,
    base_commit,
    keep_files,
    prepare,
    put_harness_files,
)
from bridle.runtimes import make_runtime
from bridle.runtimes.base import ExecResult, Mount, Runtime, binds
from bridle.trajectory import with_outcome
from bridle.trajectory.result import writable
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON, Cause, SessionStatus

if TYPE_CHECKING:
    from bridle.node.local import LocalNode

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
"""Statuses that may follow each status; final ones have none."""

CONCLUDE_S = 90.0
"""Time limit of the last commits and of the outcome's record when everything is being stopped."""

MODEL_END_S = 30.0
"""Time limit of the last commits of an evaluator's own session."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """A task with everything that it names resolved and checked."""

    task: Task
    harness: Harness
    evaluator: Evaluator


@dataclass(frozen=True, slots=True)
class ReadySession:
    """A session's runtime and launch command, once both are ready."""

    runtime: Runtime
    launch: Launch
    base_commit: str | None = None
    """The commit that the kept patch is relative to (`workspace`)."""


class SessionRun:
    """One run of one harness; `run` is its whole life."""

    def __init__(
        self, plan: SessionPlan, sample_index: int, node: LocalNode, session_id: str | None = None
    ) -> None:
        self.task = plan.task
        # 180: a session id has at most 200 characters.
        made = f"{plan.task.task_id[:180]}.{sample_index}.{secrets.token_hex(3)}"
        self.session_id = session_id or made
        self.status = _S.REGISTERED
        self._harness = plan.harness
        self._evaluator = plan.evaluator
        self._sample_index = sample_index
        self._node = node
        self._facts: SessionFacts | None = None
        """The gateway's facts, once the session is sealed."""
        self._exit: ExecResult | None = None
        """The harness's own end."""
        self._replay: Replay | None = None
        self._trajectory: Trajectory | None = None
        """The trajectory as built before evaluation."""
        self._evaluation: Evaluation | None = None
        self._ending: Ending | None = None
        self._outcome: Outcome | None = None
        self._timing: dict[str, float] = {}
        self._files: dict[str, str] = {}
        self._left_out: dict[str, str] = {}
        self._limits: str | None = None
        """`Contained.limits` of a runtime that has it."""
        self._work: asyncio.Task[None] | None = None

    async def run(self) -> SessionResult:
        """Run all stages of the session, and return its result, failures included.

        If the caller is cancelled, the session's end is recorded.
        """
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
        """End the session with the result CANCELLED, unless its outcome is recorded already."""
        if self._work is not None and self._outcome is None:
            self._work.cancel()

    async def _live(self, group: asyncio.TaskGroup) -> None:
        async with AsyncExitStack() as stack:
            fresh = None
            ready = await self._until_slot(stack)
            if isinstance(ready, Ending):
                self._ending = ready
            else:
                try:
                    self._go(_S.RUNNING)
                    fresh = self._prewarm(group, stack)
                    self._ending = await self._timed("run", self._run_harness(ready))
                finally:
                    self._node.pools.run.release()
                self._go(_S.BUILDING)
            async with self._node.pools.post:
                if not isinstance(ready, Ending):
                    await self._build_and_score(ready, fresh)
                await self._conclude()
                await stack.aclose()

    # ---- INITIALIZING and READY: a key, a runtime that is ready, the harness in it

    async def _until_slot(self, stack: AsyncExitStack) -> ReadySession | Ending:
        """Return a session ready to run, holding a run slot; or its early end, holding none."""
        pools, began = self._node.pools, time.monotonic()
        async with AsyncExitStack() as held:
            if pools.ahead is None:
                await pools.run.acquire()
                held.callback(pools.run.release)
            else:
                await held.enter_async_context(pools.ahead)
            ready = await self._made_ready(began, stack)
            if isinstance(ready, Ending):
                return ready
            if pools.ahead is None:
                held.pop_all()
            else:
                await self._timed("ready", pools.run.acquire())
        return ready

    async def _made_ready(self, began: float, stack: AsyncExitStack) -> ReadySession | Ending:
        async with self._node.pools.init:
            self._timing["queue"] = time.monotonic() - began
            self._go(_S.INITIALIZING)
            ready = await self._initialize(stack)
        if not isinstance(ready, Ending):
            self._limits = getattr(ready.runtime, "limits", None)
            self._go(_S.READY)
        return ready

    async def _initialize(self, stack: AsyncExitStack) -> ReadySession | Ending:
        """Make the session ready to run; `stack` owns what is opened. Failures are endings.

        The harness's installation, once per machine, is not in the session's budget.
        """
        budget_s = self.task.budgets.init_s
        try:
            with boundary(RuntimeFailure, "installing the harness"):
                bundle = await self._node.install(self._harness)
            async with asyncio.timeout(budget_s):
                with boundary(RuntimeFailure, "starting the session"):
                    return await self._timed("init", self._open(stack, bundle))
        except TimeoutError:
            return failed(Cause.TIMEOUT, f"init: its budget of {budget_s:g} s ran out")
        except BridleError as error:
            return failed(Cause.INFRASTRUCTURE, f"init: {error}")

    async def _open(self, stack: AsyncExitStack, bundle: Path | None) -> ReadySession:
        task, gateway = self.task, self._node.gateway
        runtime = self._new_runtime(stack, bundle)
        stack.push_async_callback(self._seal)
        if task.fork is not None:
            noise = getattr(self._harness, "noise", ())
            self._replay = await asyncio.to_thread(read_replay, task.fork, self._base, noise)
        handle = await gateway.open_session(
            self.session_id,
            task_id=task.task_id,
            metadata=self._metadata(runtime),
            sampling=task.sampling,
            limits=task.limits,
            replay=self._replay,
        )
        await self._start(runtime)
        launch = self._harness.launch(
            LaunchContext(
                instruction=task.instruction,
                base_urls={
                    name: runtime.gateway_url(url) for name, url in handle.base_urls.items()
                },
                key=handle.key,
                model_name=task.agent.model_name,
                workdir=runtime.workdir,
                home=runtime.home,
                bundle="" if bundle is None else runtime.inside(bundle),
                session_id=self.session_id,
                context_length=gateway.info.context_length,
                task_id=task.task_id,
                sample_index=self._sample_index,
            )
        )
        await put_harness_files(runtime, launch)
        return ReadySession(runtime, launch, await base_commit(runtime, task.artifacts.patch))

    def _new_runtime(self, stack: AsyncExitStack, bundle: Path | None) -> Runtime:
        """Make a runtime that is not started yet; `stack` stops it."""
        scratch = self._node.scratch.session(self.session_id, stack)
        harness, spec = self._harness, self.task.runtime
        mounts = [] if bundle is None else [Mount(bundle, f"/opt/bridle/{harness.name}")]
        if spec.image is None:
            mounts += [Mount(folder, str(folder)) for folder in getattr(harness, "sees", ())]
        runtime = make_runtime(spec, self.session_id, scratch, mounts)
        stack.push_async_callback(self._stop, runtime)
        return runtime

    async def _fresh_runtime(self, stack: AsyncExitStack) -> Runtime:
        """Start a runtime prepared as the agent's was, without a harness; `stack` stops it."""
        runtime = self._new_runtime(stack, None)
        await self._start(runtime)
        return runtime

    async def _start(self, runtime: Runtime) -> None:
        """Start a runtime and do the task's prepare steps in it."""
        await runtime.start()
        await self._prepare(runtime, "prepare")

    async def _prepare(self, runtime: Runtime, stage: str) -> None:
        actions = getattr(self.task.runtime, stage)
        await prepare(runtime, actions, stage=stage, base=self._base, log=self._log(stage))

    def _metadata(self, runtime: Runtime) -> JSON:
        """Return the facts that capture needs to build the same result again."""
        task, harness = self.task, self._harness
        forked = {} if task.fork is None else {"fork": task.fork.model_dump(mode="json")}
        return {
            **forked,
            "sample_index": self._sample_index,
            "harness": harness.name,
            "harness_version": harness.version,
            "kind_rules": [
                rule.model_dump(mode="json", exclude_none=True) for rule in task.agent.kind_rules
            ],
            "runtime": task.runtime.backend,
            "contains": runtime.contains,
            **rebuild_facts(task),
            "owner": task.owner,
        }

    # ---- RUNNING: the harness, until all its processes are dead and its key is revoked

    def _prewarm(self, group: asyncio.TaskGroup, stack: AsyncExitStack) -> Prewarmed | None:
        """Start a fresh runtime for the evaluator while the harness runs; `None` = not needed."""
        wanted = getattr(self._evaluator, "prewarm", False)
        if self.task.evaluator.in_place or not wanted:
            return None
        fresh = Prewarmed(group, self._fresh_runtime)
        stack.push_async_callback(fresh.aclose)
        return fresh

    async def _run_harness(self, ready: ReadySession) -> Ending:
        """Run the harness to its own end, its limit, or the end of its budget. Failures are
        endings.

        Afterwards its key is revoked, `_exit` has the harness's end, and no process of it lives,
        unless it ended by itself and its evaluator is `shared`.
        """
        budget_s = self.task.budgets.agent_s
        try:
            with boundary(RuntimeFailure, "running the harness"):
                return await self._run_within(budget_s, ready)
        except BridleError as error:
            return failed(Cause.INFRASTRUCTURE, f"run: {error}")

    async def _run_within(self, budget_s: float, ready: ReadySession) -> Ending:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self._exec(ready))
            outstayed = group.create_task(self._over_limit())
            either = asyncio.FIRST_COMPLETED
            await asyncio.wait({running, outstayed}, timeout=budget_s, return_when=either)
            timed_out = not running.done() and not outstayed.done()
            outstayed.cancel()
            # Both at once: the key is revoked now, whatever a process does while it is killed.
            sealing = group.create_task(self._seal())
            if not (self.task.evaluator.shared and running.done()):
                await ready.runtime.kill()
        facts, result = sealing.result(), running.result()
        if isinstance(result, BridleError):
            raise result
        assert facts is not None
        self._exit = result
        if timed_out:
            return out_of_time(budget_s, facts)
        cause = self._harness.exit_cause(result.exit_code, result.signal, result.stdout)
        ending = judge(result, facts, cause)
        return ending if needs_model(self._harness) else without_a_model(ending)

    async def _exec(self, ready: ReadySession) -> ExecResult | BridleError:
        """Run the harness. An error is returned, not raised, so that no other task is ended."""
        try:
            with boundary(RuntimeFailure, "running the harness"):
                return await ready.runtime.exec(
                    ready.launch.command,
                    env={**ready.launch.env, **self.task.agent.env},
                    cwd=ready.runtime.workdir,
                    stdin=ready.launch.stdin,
                    log=self._log("stdout"),
                    error_log=self._log("stderr"),
                )
        except BridleError as error:
            return error

    # ---- BUILDING and EVALUATING: exchanges to a trajectory, the session to a reward

    async def _build_and_score(self, ready: ReadySession, fresh: Prewarmed | None) -> None:
        if self._keep != "never":
            artifacts, logs = self.task.artifacts, ready.launch.logs
            kept, self._left_out = await keep_files(
                ready.runtime, artifacts, logs, ready.base_commit, self._folder
            )
            top = self._node.folder.path
            self._files = {name: str(path.relative_to(top)) for name, path in kept.items()}
        fault = await self._timed("build", self._build())
        self._also(fault)
        if self._trajectory is None or not self._is_scored():
            return
        self._go(_S.EVALUATING)
        work = self._evaluate(ready, fresh, self._trajectory)
        self._also(await self._timed("evaluate", work))

    async def _build(self) -> Ending | None:
        """Build the trajectory of what was captured, in a thread of its own."""
        budget_s = self.task.budgets.build_s
        store, session_id = self._node.store, self.session_id
        try:
            async with asyncio.timeout(budget_s):
                with boundary(StoreError, "building the trajectory"):
                    self._trajectory = await asyncio.to_thread(
                        lambda: trajectory_of(store.read(session_id))
                    )
        except TimeoutError:
            return failed(Cause.TIMEOUT, f"build: its budget of {budget_s:g} s ran out")
        except BridleError as error:
            return failed(Cause.INFRASTRUCTURE, f"build: {error}")
        return None

    async def _evaluate(
        self, ready: ReadySession, fresh: Prewarmed | None, trajectory: Trajectory
    ) -> Ending | None:
        """Score the session. A failure is the evaluator's (law 5), unless only the agent's files
        can have caused it.
        """
        try:
            with boundary(EvaluatorError, "the evaluator"):
                self._evaluation = await self._evaluated(ready, fresh, trajectory)
        except BridleError as error:
            return failed(Cause.EVALUATOR, f"evaluate: {error}")
        return None

    async def _evaluated(
        self, ready: ReadySession, fresh: Prewarmed | None, trajectory: Trajectory
    ) -> Evaluation:
        async with AsyncExitStack() as resources:
            places = self._places(ready, fresh, resources)
            context = EvaluationContext(
                task=self.task,
                session_id=self.session_id,
                places=places,
                harness=self._exit,
                trajectory=trajectory,
                logs=self._folder,
                task_dir=self._base,
                open_model=self._evaluator_model,
                budget_s=self.task.budgets.evaluate_s,
                completed=self._ending == COMPLETED,
            )
            try:
                evaluation = await evaluate_with_control(self._evaluator, context)
            except Unscorable as error:
                evaluation = Evaluation(0.0, metadata={"unscorable": str(error)})
        return replace(evaluation, metadata=writable({**evaluation.metadata, **places.facts()}))

    def _places(
        self, ready: ReadySession, fresh: Prewarmed | None, resources: AsyncExitStack
    ) -> SessionPlaces:
        spec = self.task.runtime
        bound = [mount.target for mount in binds(spec)]
        return SessionPlaces(
            agents=ready.runtime,
            make=self._fresh_runtime,
            prepare=lambda runtime: self._prepare(runtime, "eval_prepare"),
            stop=self._stop,
            folder=self._node.scratch.session(self.session_id, resources),
            resources=resources,
            targets=[*(one.target for one in spec.eval_prepare if one.target), *bound],
            trusted=self.task.evaluator.in_place,
            shared=self.task.evaluator.shared,
            prewarmed=None if fresh is None else fresh.get,
        )

    @asynccontextmanager
    async def _evaluator_model(self) -> AsyncIterator[ModelAccess]:
        """Open a gateway session for the evaluator, with its own key; nothing of it is trained."""
        as_asked = FieldPolicy(mode="respect")
        name = f"{self.session_id[:185]}.judge-{secrets.token_hex(3)}"
        handle = await self._node.gateway.open_session(
            name,
            task_id=self.task.task_id,
            metadata={"judge_of": self.session_id, "train": [], "owner": self.task.owner},
            sampling=SamplingPolicy(temperature=as_asked, top_p=as_asked, top_k=as_asked),
        )
        try:
            yield ModelAccess(name, handle.base_urls["openai"], handle.key)
        finally:
            await run_shielded(self._end_model(name), timeout_s=MODEL_END_S)

    async def _end_model(self, name: str) -> None:
        await self._node.gateway.seal(name)
        ended = Outcome(name, SessionStatus.COMPLETED, time.time(), None)
        await self._node.store.close_session(ended)

    def _is_scored(self) -> bool:
        ending, facts = self._ending, self._facts
        replied = facts is not None and facts.delivered > 0
        return ending is not None and is_scored(ending.status, ending.cause, replied=replied)

    def _also(self, fault: Ending | None) -> None:
        """Add a later fault: it replaces COMPLETED and is appended to any other ending."""
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
        """Revoke the key and record the outcome; the status is final afterwards."""
        await self._seal()
        ending = self._ending
        assert ending is not None
        outcome = self._outcome_of(ending)
        if self._facts is not None:
            try:
                await self._node.store.close_session(outcome)
            except StoreError as error:
                before = "" if ending.error is None else f"{ending.error}; "
                said = f"{before}the outcome could not be recorded: {error}"
                ending = failed(Cause.INFRASTRUCTURE, said)
                outcome = self._outcome_of(ending)
        self._ending, self._outcome = ending, outcome
        self._go(ending.status)

    async def _over_limit(self) -> None:
        """Wait until the session exceeds a limit, then for the grace of a harness that goes on."""
        await self._node.gateway.limit_reached(self.session_id)
        await asyncio.sleep(self._node.settings.limit_grace_s)

    async def _seal(self) -> SessionFacts | None:
        """Revoke the key and await the last commits; idempotent. `None` = it was never opened."""
        with suppress(KeyError):
            self._facts = await self._node.gateway.seal(self.session_id)
        return self._facts

    async def _stop(self, runtime: Runtime) -> None:
        """Stop a runtime within the teardown budget; a failure is logged, for the reaper."""
        try:
            await run_shielded(runtime.stop(), timeout_s=self.task.budgets.teardown_s)
        except (TimeoutError, BridleError) as error:
            log.warning("a runtime was not stopped", session=self.session_id, error=str(error))

    def _outcome_of(self, ending: Ending) -> Outcome:
        evaluation, result = self._evaluation, self._exit
        metadata: JSON = {
            "timing": {stage: round(seconds, 6) for stage, seconds in self._timing.items()},
            "exit_code": None if result is None else result.exit_code,
            "signal": None if result is None else result.signal,
            "logs": self._kept_logs(ending),
        }
        if self._replay is not None:
            metadata["fork"] = self._replay.facts()
        if self._left_out:
            metadata["left_out"] = writable(self._left_out)
        if self._limits is not None:
            metadata["limits"] = self._limits
        if evaluation is not None and evaluation.metadata:
            metadata["evaluation"] = evaluation.metadata
        if evaluation is not None and evaluation.turn_rewards:
            metadata["turn_rewards"] = dict(evaluation.turn_rewards)
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
        """Return the result, as it could be read from capture at any later time."""
        outcome = self._outcome
        assert outcome is not None
        try:
            capture = await asyncio.to_thread(self._node.store.read, self.session_id)
        except StoreError:
            return uncaptured_result(self.task, self._sample_index, self._harness, outcome)
        if self._trajectory is None:
            trajectory = await asyncio.to_thread(trajectory_of, capture)
        else:
            trajectory = with_outcome(self._trajectory, outcome)
        result = result_of(capture.session, outcome, trajectory)
        self._node.events.tell(SessionEnded(result, capture))
        return result

    # ---- folders, logs, timing, status

    @property
    def _folder(self) -> Path:
        """Return the folder of the session's logs; it may not exist."""
        return self._node.folder.session_folder(self.session_id)

    @property
    def _base(self) -> Path:
        """Return the folder that relative paths of the task begin at."""
        return Path(self.task.task_dir or ".").absolute()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    @property
    def _keep(self) -> str:
        """Return which endings' logs and files are kept."""
        return self.task.artifacts.keep or self._node.settings.keep_logs

    def _kept_logs(self, ending: Ending) -> dict[str, str]:
        """Return name -> path in the run folder of the kept logs, after deleting all others."""
        if self._keep == "never" or (self._keep == "failed" and ending == COMPLETED):
            self._node.folder.drop_logs(self.session_id)
            return {}
        found = sorted(self._folder.glob("*.log"))
        logs = {path.stem: str(path.relative_to(self._node.folder.path)) for path in found}
        return {**logs, **self._files}

    async def _timed(self, stage: str, work: Awaitable[T]) -> T:
        """Await `work` and record its duration, also when it fails."""
        began = time.monotonic()
        try:
            return await work
        finally:
            self._timing[stage] = time.monotonic() - began

    def _go(self, status: SessionStatus) -> None:
        """Enter a status that `TRANSITIONS` allows, and report it."""
        assert status in TRANSITIONS[self.status], f"{self.status} does not lead to {status}"
        self.status = status
        self._tell()

    def _tell(self) -> None:
        ending = self._ending if self.status in FINAL else None
        self._node.events.tell(
            SessionChanged(
                session_id=self.session_id,
                task_id=self.task.task_id,
                sample_index=self._sample_index,
                harness=self._harness.name,
                status=self.status,
                at=time.time(),
                cause=None if ending is None else ending.cause,
                reward=None if ending is None or not self._evaluation else self._evaluation.reward,
                error=None if ending is None else ending.error,
            )
        )


FORK_BYTES: Final = 256 << 20
"""Limit of a session's capture for a fork: each of its forks keeps it in memory while it lives."""


def read_replay(fork: ForkSpec, base: Path, noise: Sequence[Varying] = ()) -> Replay:
    """Read the replies that a forked session begins with. Raises `StoreError` or `ConfigError`.

    `base` is the task's folder, to which `fork.capture` may be relative; `noise` is the harness's
    list of request parts that vary.
    """
    with SqliteReader(base / fork.capture) as reader:
        if (size := reader.captured(fork.session)) > FORK_BYTES:
            raise ConfigError(
                f"fork: session {fork.session} has {size >> 20} MiB of captured calls, and a fork "
                f"holds at most {FORK_BYTES >> 20} MiB in memory"
            )
        return replay_of(reader.read(fork.session), fork.at, noise)
