"""`bridle score`: rewards for sessions that have ended, without the model."""

from __future__ import annotations

import asyncio
import getpass
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.output import number, print_json, print_table
from bridle.errors import ConfigError, EvaluatorError

if TYPE_CHECKING:
    from bridle.capture.records import SessionCapture
    from bridle.capture.sqlite import SqliteStore
    from bridle.evaluators.base import Evaluation
    from bridle.types import JSON

Scorer = Callable[["SessionCapture"], "Evaluation"]


def score(
    target: Annotated[Path, typer.Argument(help="Run folder, gateway's data folder or capture.")],
    sessions: Annotated[
        list[str] | None, typer.Argument(help="Session ids; all without any.")
    ] = None,
    function: Annotated[
        str | None, typer.Option(help="Scorer: package.module:name or path/to/file.py:name.")
    ] = None,
    reward: Annotated[float | None, typer.Option(help="The same reward for each session.")] = None,
    why: Annotated[str, typer.Option(help="Recorded with each reward.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score ended sessions again; the last reward of a session counts, earlier ones are kept.

    The scorer runs in this process. Sessions that did not run to their end are left out. Ends with
    code 1 if the scorer failed for some; these keep what they had.
    """
    from bridle.cli.captured import capture_files

    if (function is None) == (reward is None):
        raise ConfigError("give either --function or --reward")
    scorer = _constant(reward) if function is None else _scorer(function, target)
    rows: list[JSON] = []
    for path in capture_files(target):
        rows += asyncio.run(_score(path, scorer, set(sessions or ()), why or (function or "")))
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
    from bridle.lifecycle.run_folder import RUN, RunFolder

    rows: list[JSON] = []
    with RunFolder(path.parent) as folder:
        async with await SqliteStore.open(path) as store:
            rows += [await _one(store, each, scorer, why) for each in _ended(store, wanted)]
            if (path.parent / RUN).exists():
                await asyncio.to_thread(write_results, folder, store)
    return rows


def _ended(store: SqliteStore, wanted: set[str]) -> Iterator[SessionCapture]:
    """Sessions that completed, or whose evaluator failed."""
    from bridle.types import Cause, SessionStatus

    for session in store.sessions():
        if session.is_aside or (wanted and session.session_id not in wanted):
            continue
        outcome = store.outcome(session.session_id)
        if outcome is not None and (
            outcome.status == SessionStatus.COMPLETED or outcome.cause == Cause.EVALUATOR
        ):
            yield store.read(session.session_id)


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
        found = await asyncio.to_thread(scorer, capture)
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


def _constant(reward: float | None) -> Scorer:
    from bridle.evaluators.base import Evaluation
    from bridle.evaluators.function import is_number

    if not is_number(reward):
        raise ConfigError(f"--reward: {reward!r} is not a finite number")
    return lambda _: Evaluation(reward)


def _scorer(function: str, target: Path) -> Scorer:
    """Load a scorer and check that it takes one argument. `ConfigError` says what is wrong."""
    from bridle.api import attempt_of, call_scorer
    from bridle.lifecycle.results import trajectory_of
    from bridle.plugins import load

    name, _, attribute = function.rpartition(":")
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"--function: there is no file {path}")
        sys.path.insert(0, str(path.parent.absolute()))
        function = f"{path.stem}:{attribute}"
    called = load(function, {}, what="scorer")
    try:
        inspect.signature(called).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--function {function}: it must take one argument: {error}") from None
    base = target if target.is_dir() else target.parent
    instructions = _instructions(base)

    def scorer(capture: SessionCapture) -> Evaluation:
        assert capture.outcome is not None
        record, folder = capture.session, base / "sessions" / capture.session.session_id
        logs = {name: folder / f"{name}.log" for name in ("stdout", "stderr")}
        texts = {n: log.read_text("utf-8", "replace") for n, log in logs.items() if log.exists()}
        attempt = attempt_of(
            trajectory_of(capture),
            task_id=record.task_id or "",
            instruction=instructions.get(record.task_id or "", ""),
            metadata=record.metadata.get("task_metadata", {}),
            exit_code=capture.outcome.metadata.get("exit_code"),
            **texts,
            folder=str(folder) if folder.is_dir() else None,
        )
        return asyncio.run(call_scorer(called, attempt))

    return scorer


def _instructions(base: Path) -> dict[str, str]:
    """Task id -> instruction, as far as the run folder holds its tasks."""
    from bridle.lifecycle.run_folder import RUN

    path = base / RUN
    tasks = loads(path.read_bytes())["config"].get("tasks", []) if path.exists() else []
    return {task["task_id"]: task["instruction"] for task in tasks}
