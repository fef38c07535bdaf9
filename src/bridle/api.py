"""The Python API: a gateway in this process, and rollouts of an agent over tasks.

    async with Gateway("http://127.0.0.1:8000", tokenizer="path/to/model") as gateway:
        async with gateway.session(task="sum-1") as session:
            await my_agent(base_url=session.openai_url, api_key=session.key)
            session.reward = 1.0
    trajectories = gateway.trajectories()

    trajectories = rollout(my_agent, tasks, scorer=score, engine=..., samples=8)

Everything is captured in a run folder, which `bridle show`, `export` and `dashboard` can read.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import os
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsFloat

import structlog

from bridle import telemetry as trackers
from bridle.aio import Stacked, run_shielded
from bridle.bridges.parquet import TrajectoryWriter
from bridle.capture.records import Outcome, SessionCapture
from bridle.capture.sqlite import SqliteReader, SqliteStore
from bridle.cli.config import EngineSetup, FileConfig, load_config, open_setup
from bridle.cli.terminal import log_to_stderr, progress
from bridle.config import AgentSpec, EvaluatorSpec, Limits, SamplingPolicy, Task, validated
from bridle.errors import ConfigError, EvaluatorError
from bridle.evaluators.base import Evaluation
from bridle.evaluators.function import evaluation_of
from bridle.evaluators.function_runner import (
    IMPORTS,
    Attempt,
    ScorerError,
    check_argument,
    returned_json,
)
from bridle.gateway import app
from bridle.gateway.replay import replay_of
from bridle.harnesses import HARNESSES
from bridle.harnesses.function import import_path
from bridle.node.base import SessionEnded
from bridle.node.results import RunFolder, rebuild_facts, result_from, sessions, trajectory_of
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON, Cause, SessionStatus

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from bridle.gateway.registry import SessionHandle
    from bridle.gateway.replay import Replay
    from bridle.telemetry.base import Telemetry

FINISH_S = 120.0
"""Timeout of writing the last files of a run."""

Agent = Callable[["Session"], object]
"""Function that does an open session's `task` through the session's base URL and key."""

Scorer = Callable[[Attempt], float | JSON | Awaitable[float | JSON]]
"""Function that returns a reward (`True` is 1), or an object with `reward` and optionally
`trace_rewards`."""


def new_run_folder(runs: Path = Path("runs")) -> Path:
    """Return the path of a run folder that does not exist yet: the time, and a number if needed."""
    stem = time.strftime("%Y-%m-%d-%H%M%S")
    names = (stem, *(f"{stem}-{number}" for number in range(2, 100)))
    return next(runs / name for name in names if not (runs / name).exists())


def write_results(folder: RunFolder, store: SqliteStore) -> JSON:
    """Write the result files of all sessions of a run; return the summary."""
    with TrajectoryWriter(folder.trajectories_parquet) as parquet:
        for session in store.sessions():
            if not session.is_aside:
                parquet.write(trajectory_of(store.read(session.session_id)))
    return folder.finish(store)


class Gateway(Stacked):
    """A gateway, its engine and a run folder. Use it as an async context manager, once."""

    def __init__(
        self,
        engine: str | Sequence[str] | FileConfig,
        *,
        tokenizer: str | None = None,
        data: str | Path | None = None,
        settings: JSON | None = None,
        telemetry: str | Sequence[str] = (),
        facts: JSON | None = None,
    ) -> None:
        """Keep the settings; start nothing yet. `ConfigError` for settings that are wrong.

        Args:
            engine: URL of a served engine, `embedded:DIR` or `scripted:FILE`; several are replicas.
            tokenizer: Folder, hub id or `builtin`; `None` = the engine's own, if it has one.
            data: New run folder; `None` = one in `runs`.
            settings: Table `[gateway]` of a config file, e.g. `{"port": 8100}`.
            telemetry: A tracker or several, e.g. `["wandb"]`.
            facts: Added to the folder's `run.json`.
        """
        super().__init__()
        if not isinstance(engine, FileConfig):
            engine = load_config(
                None, engines=_listed(engine), tokenizer=tokenizer, gateway=settings
            )
        if telemetry:
            engine = engine.model_copy(update={"telemetry": _listed(telemetry)})
        self.config = engine
        self._facts = facts or {}
        self.path = new_run_folder() if data is None else Path(data)
        """The run folder."""
        self._started = False
        self._setup: EngineSetup | None = None
        self.summary: JSON = {}
        """Content of `summary.json`; empty before the end."""
        self.folder: RunFolder
        self.store: SqliteStore
        self.telemetry: Telemetry
        self.app: app.GatewayServer
        """The running gateway, for a node, a trainer or tests."""

    def prepare(self) -> EngineSetup:
        """Load the files of engine and tokenizer once; starting the gateway does so, too."""
        if self._setup is None:
            self._setup = open_setup(self.config)
        return self._setup

    async def __aenter__(self) -> Self:
        """Start; `ConfigError` or `EngineError` if that fails.

        In a program that does not configure structlog, log lines go to stderr.
        """
        if not structlog.is_configured():
            log_to_stderr()
        config = self.config
        async with AsyncExitStack() as stack:
            setup = self.prepare()
            names = {"engines", "tokenizer", "rendering", "models"}
            kept = config.model_dump(mode="json", include=names)
            kept |= {"stream": config.gateway.stream, "prompt": config.gateway.prompt}
            created = RunFolder.create(self.path, config={**kept, **self._facts})
            self.folder = stack.enter_context(created)
            stack.callback(self.folder.discard_if_unused)
            fed = trackers.open_trackers(config.telemetry, self.path, kept)
            self.telemetry = stack.enter_context(fed)
            opened = await SqliteStore.open(self.folder.capture)
            self.store = await stack.enter_async_context(opened)
            stack.push_async_callback(self._finish)
            gateway = setup.gateway(self.store, config.gateway)
            self.app = await stack.enter_async_context(gateway)
            self._stack, self._started = stack.pop_all(), True
        return self

    @asynccontextmanager
    async def session(
        self,
        task: str | Task | None = None,
        *,
        session_id: str | None = None,
        sampling: SamplingPolicy | None = None,
        limits: Limits | None = None,
        replay: Replay | None = None,
        **metadata: object,
    ) -> AsyncIterator[Session]:
        """Open a session; its end revokes the key and records its reward and outcome.

        `replay` holds the session's first replies (`Session.fork`). An exception in the block of
        `async with` ends the session as ERROR without a reward (CANCELLED if the asyncio task was
        cancelled) and escapes.
        """
        if not self._started:
            raise ConfigError(
                "the gateway is not running: open its sessions inside its `async with` block"
            )
        whole = task if isinstance(task, Task) else None
        opened = await self.app.open_session(
            session_id,
            task_id=whole.task_id if whole else str(task) if task else None,
            metadata={"harness": "python", **(rebuild_facts(whole) if whole else {}), **metadata},
            sampling=sampling or (whole.sampling if whole else None),
            limits=limits or (whole.limits if whole else None),
            replay=replay,
        )
        session = Session(self, opened, whole)
        session.replay = replay
        try:
            yield session
        except BaseException as error:
            await run_shielded(self._close(session, *_ending(error)), timeout_s=FINISH_S)
            raise
        await run_shielded(self._close(session), timeout_s=FINISH_S)

    async def _close(
        self,
        session: Session,
        status: SessionStatus = SessionStatus.COMPLETED,
        cause: Cause | None = None,
        error: str | None = None,
    ) -> None:
        facts = await self.app.seal(session.session_id)
        session.ended = True
        if cause is None and not facts.turns:
            status, cause = SessionStatus.ERROR, Cause.HARNESS_NO_CALL
            error = "the agent ended without one delivered turn"
        outcome = Outcome(
            session_id=session.session_id,
            status=status,
            ended_at=time.time(),
            reward=session.reward if cause is None else None,
            trace_rewards=session.trace_rewards if cause is None else None,
            cause=cause,
            error=error,
            metadata={
                **({"evaluation": session.evaluation} if session.evaluation else {}),
                **({"fork": session.replay.facts()} if session.replay else {}),
            },
        )
        await self.store.close_session(outcome)
        self.app.forget(session.session_id)
        capture = await asyncio.to_thread(self.store.read, session.session_id)
        result = await asyncio.to_thread(result_from, capture)
        await asyncio.to_thread(self.folder.append, result)
        self.telemetry.on_event(SessionEnded(result, capture))

    async def _finish(self) -> None:
        if self._started:
            self._started = False
            writing = asyncio.to_thread(write_results, self.folder, self.store)
            self.summary = await run_shielded(writing, timeout_s=FINISH_S)

    def captured(self, session_id: str) -> SessionCapture:
        """Return the records of a session, also after the end."""
        if self._started:
            return self.store.read(session_id)
        with SqliteReader(self.folder.capture) as reader:
            return reader.read(session_id)

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories of all sessions in the order of opening, also after the end."""
        return [trajectory_of(capture) for capture in sessions(self.path)]


class Session:
    """An open session of `Gateway.session`."""

    def __init__(self, gateway: Gateway, handle: SessionHandle, task: Task | None) -> None:
        self._gateway = gateway
        self.session_id = handle.session_id
        self.key = handle.key
        """The session's own API key."""
        self.task = task
        """`None` = opened without a `Task`."""
        self.openai_url = handle.base_urls["openai"]
        """Base URL for clients of OpenAI (Chat Completions and Responses)."""
        self.anthropic_url = handle.base_urls["anthropic"]
        self.google_url = handle.base_urls["google"]
        self.evaluation: JSON = {}
        """Recorded beside the reward."""
        self.replay: Replay | None = None
        """Captured replies that it gets first; `None` = not a fork."""
        self.ended = False
        self._reward: float | None = None
        self._trace_rewards: tuple[float, ...] | None = None

    @property
    def reward(self) -> float | None:
        """Return the reward, which is recorded at the end of the block; `None` = not known."""
        return self._reward

    @reward.setter
    def reward(self, value: float | None) -> None:
        """Set the session's reward, which is recorded at the end of the block; `None` = not
        known.
        """
        self._check_open("reward")
        self._reward = None if value is None else _finite(value, "reward")

    @property
    def trace_rewards(self) -> tuple[float, ...] | None:
        """Return the rewards of the traces in their order; `None` = each has the session's."""
        return self._trace_rewards

    @trace_rewards.setter
    def trace_rewards(self, values: Iterable[float] | None) -> None:
        """Set the rewards of the session's traces, one number for each; `None` = each has the
        session's.
        """
        self._check_open("trace_rewards")
        if values is not None:
            try:
                listed = tuple(values)
            except TypeError:
                message = f"trace_rewards: give one number for each trace; given: {values!r}"
                raise ConfigError(message) from None
            values = tuple(_finite(value, "trace_rewards") for value in listed)
        self._trace_rewards = values

    def _check_open(self, name: str) -> None:
        if self.ended:
            raise ConfigError(
                f"session {self.session_id} has ended, and its {name} stays "
                f"{getattr(self, name)}: set it before the end"
            )

    def trajectory(self) -> Trajectory:
        """Return the trajectory of the exchanges captured so far, also after the gateway's end."""
        return trajectory_of(self._gateway.captured(self.session_id))

    @asynccontextmanager
    async def fork(self, *, at: int) -> AsyncIterator[Session]:
        """Open a session of the same task that replays the first `at` replies of this one.

        The engine is not called for the replayed replies. A prompt that differs from the captured
        one is refused with HTTP 400. `ConfigError` if this session has fewer replies.
        """
        capture = await asyncio.to_thread(self._gateway.captured, self.session_id)
        origin = {"session": self.session_id, "at": at}
        async with self._gateway.session(
            self.task or capture.session.task_id, replay=replay_of(capture, at), fork=origin
        ) as session:
            yield session


def _listed(given: Any) -> tuple[str, ...]:  # noqa: ANN401 - its type is checked later
    """Return the values of an argument that takes one or several."""
    several = isinstance(given, Iterable) and not isinstance(given, str)
    return tuple(given) if several else (given,)


def _finite(value: object, name: str) -> float:
    """Return a reward. `ConfigError` if it is no finite number."""
    if isinstance(value, SupportsFloat):
        with suppress(TypeError):  # an array
            if math.isfinite(value):
                return float(value)
    raise ConfigError(f"{name}: a reward must be a finite number, not {value!r}")


def fork(
    session: str,
    *,
    at: int,
    samples: int = 1,
    run: str | Path = "runs",
    engine: str | Sequence[str] | None = None,
    tokenizer: str | None = None,
    concurrency: int | None = None,
    data: str | Path | None = None,
) -> list[Trajectory]:
    """Sample a session of `bridle run` or of a harness's `rollout` again from one of its turns on.

    A fork whose harness sends other prompts than before is a trajectory with status ERROR.

    Args:
        session: Session id, or its beginning.
        at: Number of replies that are replayed without an engine.
        samples: Number of forks.
        run: Run folder, or folder of runs, that holds the session.
        engine: As for `Gateway`; `None` = the run's.
        tokenizer: As for `Gateway`.
        concurrency: Harnesses at once; `None` = twice the cores.
        data: As for `Gateway`.

    Raises:
        ConfigError: The session, the turn or the session's task is missing.
    """
    from bridle.cli.run import BatchRun, forked_task, run_batch, setup_of
    from bridle.cli.terminal import EngineOptions

    task, base = forked_task(session, Path(run), at, samples)
    engines = [] if engine is None else list(_listed(engine))
    folder = new_run_folder() if data is None else Path(data)
    setup = setup_of(base, EngineOptions(engine=engines, tokenizer=tokenizer))
    batch = BatchRun([task], setup, folder, concurrency)
    _in_thread(lambda: run_batch(batch))
    return _by_task(folder, [task])


def rollout(
    agent: Agent | str | AgentSpec,
    tasks: Iterable[Task | JSON | str],
    *,
    engine: str | Sequence[str],
    scorer: Scorer | EvaluatorSpec | None = None,
    tokenizer: str | None = None,
    samples: int | None = None,
    concurrency: int | None = None,
    data: str | Path | None = None,
) -> list[Trajectory]:
    """Run an agent on tasks and return one trajectory per session, by task, then by sample.

    In a running event loop (a notebook) the rollout runs in a thread with its own loop. A session
    that fails is a trajectory with its status and error, never an exception.

    Args:
        agent: A function that gets a `Session` and runs in this process without a sandbox, in a
            thread unless it is async; or, in a sandbox, the name of a packaged harness, a command
            line or an `AgentSpec`.
        tasks: `Task`s, their fields, or plain instructions.
        engine: As for `Gateway`.
        scorer: Called with an `Attempt` of each session that completed. For an agent in a sandbox
            a function of a module or of the script that runs, which is imported in a process of
            its own, or an `EvaluatorSpec`; `None` = the tasks' own.
        tokenizer: As for `Gateway`.
        samples: Sessions per task; `None` = each task's `num_samples`.
        concurrency: Sessions at once; `None` = 16 for a function, else twice the cores.
        data: As for `Gateway`.

    Raises:
        ConfigError: A task, the agent or the scorer is invalid; nothing was sampled.
    """
    if IMPORTS in os.environ:
        message = (
            "rollout: the file of a scorer was imported; put the call of rollout under"
            " `if __name__ == '__main__':`"
        )
        raise ConfigError(message)
    counts: dict[str, object] = {"samples": samples, "concurrency": concurrency}
    for name, value in counts.items():
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
    given = _tasks(tasks, samples)
    if not isinstance(agent, (str, AgentSpec)):
        if isinstance(scorer, EvaluatorSpec):
            message = "scorer: give a function for an agent that is a function, not an evaluator"
            raise ConfigError(message)
        _check(agent, given, scorer)
        facts = {"tasks": [task.model_dump(mode="json") for task in given]}
        gateway = Gateway(engine, tokenizer=tokenizer, data=data, facts=facts)
        _in_thread(lambda: asyncio.run(_play(agent, given, scorer, gateway, concurrency or 16)))
        return _by_task(gateway.path, given)
    return _in_sandbox(agent, given, scorer, engine, tokenizer, concurrency, data)


def _in_sandbox(
    agent: str | AgentSpec,
    tasks: Sequence[Task],
    scorer: Scorer | EvaluatorSpec | None,
    engine: str | Sequence[str],
    tokenizer: str | None,
    concurrency: int | None,
    data: str | Path | None,
) -> list[Trajectory]:
    """Run an agent that is a program, as `bridle run` does; for the arguments see `rollout`."""
    from bridle.cli.run import BatchRun, run_batch

    update: dict[str, object] = {"agent": _agent(agent) if isinstance(agent, str) else agent}
    if scorer is not None:
        if not isinstance(scorer, EvaluatorSpec):
            function = {"function": import_path(scorer, "scorer")}
            scorer = EvaluatorSpec(strategy="function", config=function)
        update["evaluator"] = scorer
    folder = new_run_folder() if data is None else Path(data)
    config = load_config(None, engines=_listed(engine), tokenizer=tokenizer)
    changed = [task.model_copy(update=update) for task in tasks]
    _in_thread(lambda: run_batch(BatchRun(changed, config, folder, concurrency)))
    return _by_task(folder, tasks)


def _check(agent: Agent, tasks: Sequence[Task], scorer: Scorer | None) -> None:
    """Raise `ConfigError` for what an agent that is a function cannot be used with."""
    if not callable(agent):
        raise ConfigError(f"agent: {agent!r} is not a function, harness name, command or AgentSpec")
    if any(task.branching for task in tasks):
        message = (
            "branching: only tasks of a harness can branch; use `session.fork` in an agent function"
        )
        raise ConfigError(message)
    try:
        check_argument(agent, "agent", "the session")
        if scorer is not None:
            check_argument(scorer, "scorer", "the attempt")
    except ScorerError as error:
        raise ConfigError(str(error)) from None


async def _play(
    agent: Agent, tasks: Sequence[Task], scorer: Scorer | None, gateway: Gateway, concurrency: int
) -> None:
    """Run an agent that is a function on all samples of the tasks."""
    slots = asyncio.Semaphore(concurrency)
    rewards: list[float] = []

    async def one(task: Task, sample: int, threads: Executor) -> None:
        async with slots, gateway.session(task, sample_index=sample) as session:
            returned = await _called(agent, session, threads)
            if scorer is not None:
                await _score(scorer, session, returned)
        if session.reward is not None:
            rewards.append(session.reward)

    async def shown(bars: Progress, bar: TaskID, *of: Any) -> None:  # noqa: ANN401 - those of `one`
        with suppress(Exception):  # it is recorded as the session's outcome
            await one(*of)
        note = f"mean reward {statistics.fmean(rewards):.2f} over {len(rewards)}" if rewards else ""
        bars.update(bar, advance=1, note=note)

    with progress() as bars, ThreadPoolExecutor(concurrency) as threads:
        bar = bars.add_task("sessions", total=sum(task.num_samples for task in tasks), note="")
        async with gateway, asyncio.TaskGroup() as group:
            for task in tasks:
                for sample in range(task.num_samples):
                    group.create_task(shown(bars, bar, task, sample, threads))


async def _called(agent: Agent, session: Session, threads: Executor) -> object:
    """Call an agent, in a thread unless it is async."""
    if any(map(inspect.iscoroutinefunction, (agent, type(agent).__call__))):
        returned = agent(session)
    else:
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        returned = await loop.run_in_executor(threads, context.run, agent, session)
    return await returned if inspect.isawaitable(returned) else returned


async def _score(scorer: Scorer, session: Session, returned: object) -> None:
    """Set the session's reward. `EvaluatorError` if the scorer raises or returns no reward."""
    task, trajectory = session.task, await asyncio.to_thread(session.trajectory)
    assert task is not None
    attempt = attempt_of(
        trajectory,
        task_id=task.task_id,
        instruction=task.instruction,
        metadata=task.metadata,
        exit_code=0,
        returned=returned,
    )
    found = await call_scorer(scorer, attempt)
    session.reward, session.trace_rewards = found.reward, found.trace_rewards
    session.evaluation = found.metadata


def attempt_of(trajectory: Trajectory, **facts: object) -> Attempt:
    """Return a scorer's argument, made from a trajectory; `facts` set its other fields."""
    messages = ([*trace.prompt_messages, *trace.response_messages] for trace in trajectory.traces)
    empty = {"exit_code": None, "stdout": "", "stderr": "", "folder": None}
    traces = [{"messages": each} for each in messages]
    return Attempt({"session_id": trajectory.session_id, **empty, **facts, "traces": traces})


async def call_scorer(scorer: Scorer, attempt: Attempt) -> Evaluation:
    """Return a scorer's evaluation of an attempt.

    `EvaluatorError` if the scorer raises or returns no reward.
    """
    name = getattr(scorer, "__qualname__", repr(scorer))
    try:
        found = scorer(attempt)
        if inspect.isawaitable(found):
            found = await found
        return evaluation_of(returned_json(found).encode(), name)
    except EvaluatorError:
        raise
    except Exception as error:
        raise EvaluatorError(f"the scorer raised {type(error).__name__}: {error}") from error


def _by_task(folder: Path, tasks: Sequence[Task]) -> list[Trajectory]:
    order = {task.task_id: index for index, task in enumerate(tasks)}
    results = map(result_from, sessions(folder))
    in_order = sorted(results, key=lambda one: (order[one.task_id], one.sample_index))
    return [result.trajectory for result in in_order]


def _tasks(tasks: Iterable[Task | JSON | str], samples: int | None) -> list[Task]:
    """Make tasks of instructions and fields. `ConfigError` names the first that is none."""
    if isinstance(tasks, (str, Mapping, Task)) or not hasattr(tasks, "__iter__"):
        raise ConfigError(f"tasks: give a list, also of one task; given: {tasks!r}")
    made: dict[str, Task] = {}
    for number, given in enumerate(tasks):
        task = _task(given, number)
        if task.task_id in made:
            raise ConfigError(
                f"tasks[{number}]: another task has task_id {task.task_id!r} too; give each task "
                "its own"
            )
        made[task.task_id] = task
    if not made:
        raise ConfigError("tasks: the list is empty; give at least one task")
    if samples is None:
        return list(made.values())
    return [task.model_copy(update={"num_samples": samples}) for task in made.values()]


def _task(given: Task | JSON | str, number: int) -> Task:
    if isinstance(given, Task):
        return given
    fields = {"instruction": given} if isinstance(given, str) else given
    if not isinstance(fields, Mapping):
        raise ConfigError(f"tasks[{number}]: {given!r} is not an instruction, a Task or its fields")
    return validated(Task, {"task_id": f"task-{number}", **fields}, f"tasks[{number}]")


def _agent(words: str) -> AgentSpec:
    if words in HARNESSES:
        return AgentSpec(harness=words)
    if (meant := get_close_matches(words, HARNESSES, 1)) and shutil.which(words) is None:
        raise ConfigError(
            f"agent: {words!r} is no harness and no command; did you mean {meant[0]!r}?"
        )
    return AgentSpec(harness="command", command=words)


def _ending(error: BaseException) -> tuple[SessionStatus, Cause, str | None]:
    """Return the outcome of a session whose `async with` block raised `error`."""
    if isinstance(error, asyncio.CancelledError):
        return SessionStatus.CANCELLED, Cause.CANCELLED, None
    scorer = isinstance(error, EvaluatorError)
    cause = Cause.EVALUATOR if scorer else Cause.HARNESS_CRASH
    return SessionStatus.ERROR, cause, str(error) if scorer else f"{type(error).__name__}: {error}"


def _in_thread(work: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever `work` returns
    """Do `work` here, or in a thread where this thread's event loop is running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    threads = ThreadPoolExecutor(1, "bridle-rollout")
    try:
        return threads.submit(work).result()
    finally:
        threads.shutdown(wait=False)
