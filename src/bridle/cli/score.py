"""`bridle score`: rewards for sessions that have ended, without the model."""

from __future__ import annotations

import getpass
import time
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bridle.cli.output import number, print_json, print_table
from bridle.errors import ConfigError, EvaluatorError

if TYPE_CHECKING:
    from bridle.capture.records import SessionCapture
    from bridle.capture.sqlite import SqliteStore
    from bridle.config import EvaluatorSpec, Task
    from bridle.evaluators.base import Evaluation
    from bridle.types import JSON

Scorer = Callable[["SessionCapture"], Awaitable["Evaluation"]]


def score(
    target: Annotated[Path, typer.Argument(help="Run folder, gateway's data folder or capture.")],
    sessions: Annotated[
        list[str] | None, typer.Argument(help="Session ids; all without any.")
    ] = None,
    function: Annotated[
        str | None, typer.Option(help="Scorer: package.module:name or path/to/file.py:name.")
    ] = None,
    evaluator: Annotated[
        str | None, typer.Option(help="Evaluator's name, or a TOML file with [evaluator].")
    ] = None,
    reward: Annotated[float | None, typer.Option(help="The same reward for each session.")] = None,
    why: Annotated[str, typer.Option(help="Recorded with each reward.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score ended sessions again; the last reward of a session counts, earlier ones are kept.

    Without --function, --evaluator and --reward each task's own evaluator scores. Sessions that
    were cancelled, failed for reasons of the system, or got no reply are left out. Ends with code 1
    if scoring failed for some, such as by an evaluator that needs the work folder; these keep what
    they had.
    """
    import asyncio

    from bridle.cli.captured import capture_files

    scorer = _scorer(target, function, evaluator, reward)
    why = why or function or evaluator or ("" if reward is not None else "the task's evaluator")
    rows: list[JSON] = []
    for path in capture_files(target):
        rows += asyncio.run(_score(path, scorer, set(sessions or ()), why))
    if missing := set(sessions or ()) - {row["session_id"] for row in rows}:
        raise ConfigError(f"{target}: no session {', '.join(sorted(missing))} that can be scored")
    if json:
        print_json({"sessions": rows})
    else:
        columns = ("session", "#before", "#reward", "error")
        table = [
            [row["session_id"], number(row["before"]), number(row["reward"]), row["error"]]
            for row in rows
        ]
        print_table(f"{len(rows)} sessions scored", columns, table)
    raise typer.Exit(1 if any(row["error"] for row in rows) else 0)


async def _score(path: Path, scorer: Scorer, wanted: set[str], why: str) -> list[JSON]:
    """Score the sessions of one capture file and write its run's other files again."""
    from bridle.api import write_results
    from bridle.capture.sqlite import SqliteStore
    from bridle.node.run_folder import RUN, RunFolder

    rows: list[JSON] = []
    with RunFolder(path.parent) as folder:
        async with await SqliteStore.open(path) as store:
            rows += [await _one(store, each, scorer, why) for each in _ended(store, wanted)]
            if (path.parent / RUN).exists():
                write_results(folder, store)
    return rows


def _ended(store: SqliteStore, wanted: set[str]) -> Iterator[SessionCapture]:
    """Sessions that have a reward by their ending, or whose evaluator failed."""
    from bridle.node.ending import is_scored
    from bridle.types import Cause, DeliveryState, SessionStatus

    for session in store.sessions():
        if session.is_aside or (wanted and session.session_id not in wanted):
            continue
        outcome = store.outcome(session.session_id)
        if outcome is None:
            continue
        capture = store.read(session.session_id)
        deliveries = capture.deliveries.values()
        replied = any(one.state is DeliveryState.DELIVERED for one in deliveries)
        cause = None if outcome.cause is None else Cause(outcome.cause)
        scored = is_scored(SessionStatus(outcome.status), cause, replied=replied)
        if scored or cause is Cause.EVALUATOR:
            yield capture


async def _one(store: SqliteStore, capture: SessionCapture, scorer: Scorer, why: str) -> JSON:
    from bridle.capture.records import Score

    assert capture.outcome is not None
    row: JSON = {
        "session_id": capture.session.session_id,
        "before": capture.outcome.reward,
        "reward": capture.outcome.reward,
        "error": None,
    }
    try:
        found = await scorer(capture)
    except EvaluatorError as error:
        return row | {"error": str(error)}
    given = Score(
        session_id=capture.session.session_id,
        at=time.time(),
        reward=found.reward,
        trace_rewards=found.trace_rewards,
        by=getpass.getuser(),
        why=why,
        metadata=found.metadata,
    )
    await store.score(given)
    return row | {"reward": given.reward}


def _scorer(
    target: Path, function: str | None, evaluator: str | None, reward: float | None
) -> Scorer:
    """Load and check what was asked for. `ConfigError` says what is wrong."""
    from bridle.cli.captured import tasks_of

    if sum(one is not None for one in (function, evaluator, reward)) > 1:
        raise ConfigError("give one of --function, --evaluator and --reward")
    base = target if target.is_dir() else target.parent
    if reward is not None:
        return _constant(reward)
    tasks = tasks_of(base)
    return (
        _evaluator(evaluator, base, tasks) if function is None else _function(function, base, tasks)
    )


def _constant(reward: float) -> Scorer:
    from bridle.evaluators.base import Evaluation
    from bridle.evaluators.function import is_number

    if not is_number(reward):
        raise ConfigError(f"--reward: {reward!r} is not a finite number")

    async def scorer(_: SessionCapture) -> Evaluation:
        return Evaluation(reward)

    return scorer


def _function(function: str, base: Path, tasks: dict[str, Task]) -> Scorer:
    """A function, called in this process."""
    from bridle.api import attempt_of, call_scorer
    from bridle.evaluators.function_runner import ScorerError, load_scorer
    from bridle.node.results import trajectory_of

    try:
        called = load_scorer(function)
    except ScorerError as error:
        raise ConfigError(f"--function: {error}") from error

    async def scorer(capture: SessionCapture) -> Evaluation:
        assert capture.outcome is not None
        record, folder = capture.session, base / "sessions" / capture.session.session_id
        task = tasks.get(record.task_id or "")
        attempt = attempt_of(
            trajectory_of(capture),
            task_id=record.task_id or "",
            instruction=task.instruction if task else "",
            metadata=record.metadata.get("task_metadata", {}),
            exit_code=capture.outcome.metadata.get("exit_code"),
            **{name: text.decode("utf-8", "replace") for name, text in _output(folder).items()},
            folder=str(folder) if folder.is_dir() else None,
        )
        return await call_scorer(called, attempt)

    return scorer


def _evaluator(given: str | None, base: Path, tasks: dict[str, Task]) -> Scorer:
    """An evaluator on what is stored; `given` `None` = each task's own."""
    from bridle.evaluators import open_evaluator
    from bridle.evaluators.base import (
        Evaluation,
        EvaluationContext,
        NoPlaces,
        Unscorable,
        check_evaluator,
        controlled,
    )
    from bridle.node.results import trajectory_of
    from bridle.runtimes.base import ExecResult
    from bridle.types import SessionStatus

    if given is not None:
        spec = _spec(given)
        tasks = {name: task.model_copy(update={"evaluator": spec}) for name, task in tasks.items()}
    opened = {name: open_evaluator(task.evaluator) for name, task in tasks.items()}
    for name, one in opened.items():
        check_evaluator(one, tasks[name])

    async def scorer(capture: SessionCapture) -> Evaluation:
        assert capture.outcome is not None
        name, session_id = capture.session.task_id or "", capture.session.session_id
        if name not in tasks:
            raise EvaluatorError(f"{base} holds no task {name!r}: give --function")
        task, folder = tasks[name], base / "sessions" / session_id
        exit_code = capture.outcome.metadata.get("exit_code")
        context = EvaluationContext(
            task=task,
            session_id=session_id,
            places=NoPlaces(),
            harness=ExecResult(
                exit_code, None, False, truncated=False, duration_s=0, **_output(folder)
            ),
            trajectory=trajectory_of(capture),
            logs=folder,
            task_dir=Path(task.task_dir or ""),
            budget_s=task.budgets.evaluate_s,
            completed=capture.outcome.status == SessionStatus.COMPLETED,
        )
        try:
            return await controlled(opened[name], context)
        except Unscorable as error:
            return Evaluation(0.0, metadata={"unscorable": str(error)})

    return scorer


def _spec(given: str) -> EvaluatorSpec:
    """The evaluator of a TOML file, or of that name. `ConfigError` says what is wrong."""
    from pydantic import ValidationError

    from bridle.config import EvaluatorSpec, explain

    if not given.endswith(".toml"):
        return EvaluatorSpec(strategy=given)
    try:
        whole = tomllib.loads(Path(given).read_text())
        return EvaluatorSpec.model_validate(whole.get("evaluator", whole))
    except ValidationError as error:
        raise explain(error, f"{given}: evaluator") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--evaluator {given}: {error}") from error


def _output(folder: Path) -> dict[str, Any]:
    """The ends of a session's stdout and stderr, as far as they are kept."""
    logs = {name: folder / f"{name}.log" for name in ("stdout", "stderr")}
    return {name: log.read_bytes() if log.exists() else b"" for name, log in logs.items()}
