"""`bridle score` and `bridle teach`: rewards, and logprobs of a teacher, for captured sessions."""

from __future__ import annotations

import asyncio
import getpass
import time
import tomllib
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from bridle.api import attempt_of, call_scorer, write_results
from bridle.capture.records import Score, SessionCapture
from bridle.capture.sqlite import SqliteReader, SqliteStore
from bridle.cli.terminal import (
    CaptureArgument,
    JsonOption,
    check_file,
    number,
    print_json,
    print_table,
)
from bridle.config import EvaluatorSpec, Task, validated
from bridle.engines.probe import compare_vocabulary
from bridle.engines.teachers import Scores, ServedTeacher, served_teacher
from bridle.errors import ConfigError, EvaluatorError, first_error
from bridle.evaluators import open_evaluator
from bridle.evaluators.base import (
    Evaluation,
    EvaluationContext,
    NoPlaces,
    Unscorable,
    check_evaluator,
    evaluate_with_control,
)
from bridle.evaluators.function import is_number
from bridle.evaluators.function_runner import ScorerError, load_scorer
from bridle.folders import private_file
from bridle.node.results import (
    RUN,
    SCORERS,
    RunFolder,
    capture_files,
    is_scored,
    sessions,
    tasks_of,
    trajectory_of,
)
from bridle.prompting.texts import KEY, encoder_of, tokenizer_record
from bridle.runtimes.base import ExecResult
from bridle.trajectory.sample import Trajectory
from bridle.trajectory.scores import Disagreement, ScoredSession, disagreement_of
from bridle.types import JSON, Cause, DeliveryState, Ids, SessionStatus

Scorer = Callable[["SessionCapture"], Awaitable["Evaluation"]]


def score(
    target: CaptureArgument,
    sessions: Annotated[list[str] | None, typer.Argument(help="Session ids; default: all.")] = None,
    function: Annotated[
        list[str] | None,
        typer.Option(help="Scorer: package.module:name or path/to/file.py:name; repeatable."),
    ] = None,
    evaluator: Annotated[
        list[str] | None,
        typer.Option(help="Evaluator's name, or a TOML file with [evaluator]; repeatable."),
    ] = None,
    reward: Annotated[float | None, typer.Option(help="The same reward for each session.")] = None,
    why: Annotated[str, typer.Option(help="Reason, recorded with each reward.")] = "",
    json: JsonOption = False,
) -> None:
    """Score ended sessions again; the last reward of a session counts, earlier ones are kept.

    Without --function, --evaluator and --reward each task's own evaluator scores. Sessions that
    were cancelled, failed because of the system, or got no reply are left out. Exit code 1 if
    scoring failed for some, for example because the evaluator needs the work folder; these keep
    their reward.

    Several scorers change no reward: their rewards are compared with each other and with the
    recorded ones. The sessions on which they differ are listed, the most different first, and the
    comparison is written into the run folder (scorers.json), for the dashboard.
    """
    names = [*(function or ()), *(evaluator or ())]
    if len(names) > 1:
        failed = _compare(target, function or (), evaluator or (), reward, sessions, json=json)
        raise typer.Exit(1 if failed else 0)
    scorer = _scorer(target, function, evaluator, reward)
    why = why or "".join(names) or ("" if reward is not None else "the task's evaluator")
    rows: list[JSON] = []
    for path in capture_files(target):
        rows += asyncio.run(_score(path, scorer, set(sessions or ()), why))
    _check_found(target, sessions, rows)
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


def _check_found(target: Path, wanted: Sequence[str] | None, rows: Sequence[JSON]) -> None:
    if missing := set(wanted or ()) - {row["session_id"] for row in rows}:
        raise ConfigError(
            f"{target}: there is no session {', '.join(sorted(missing))} that has ended and can "
            "be scored"
        )


RECORDED = "recorded"
"""Name, among scorers, of the rewards that the sessions have."""


def _compare(
    target: Path,
    functions: Sequence[str],
    evaluators: Sequence[str],
    reward: float | None,
    wanted: Sequence[str] | None,
    *,
    json: bool,
) -> bool:
    """Compare several scorers on stored sessions; return whether one of them failed."""
    names = [*functions, *evaluators]
    if reward is not None or len({RECORDED, *names}) <= len(names):
        raise ConfigError(
            f"to compare several scorers, name each once, and give no --reward; given: {names}"
        )
    scorers = {name: _scorer(target, [name], None, None) for name in functions}
    scorers |= {name: _scorer(target, None, [name], None) for name in evaluators}
    scored = [
        one
        for path in capture_files(target)
        for one in asyncio.run(_score_with(path, scorers, set(wanted or ())))
    ]
    found = disagreement_of([RECORDED, *names], scored, time.time())
    _check_found(target, wanted, [asdict(one) for one in scored])
    base = target if target.is_dir() else target.parent
    private_file(base / SCORERS).write_bytes(orjson.dumps(found))
    if json:
        print_json(asdict(found))
    else:
        _print_disagreement(found)
    return any(one.errors for one in found.sessions)


async def _score_with(
    path: Path, scorers: Mapping[str, Scorer], wanted: set[str]
) -> list[ScoredSession]:
    """Score the sessions of a capture file by each of several scorers; nothing is recorded."""
    found = []
    with SqliteReader(path) as reader:
        for capture in _ended(reader, wanted):
            assert capture.outcome is not None
            rewards: dict[str, float | None] = {RECORDED: capture.outcome.reward}
            errors = {}
            for name, scorer in scorers.items():
                try:
                    rewards[name] = (await scorer(capture)).reward
                except EvaluatorError as error:
                    rewards[name], errors[name] = None, str(error)
            record = capture.session
            found.append(ScoredSession(record.session_id, record.task_id or "", rewards, errors))
    return found


def _print_disagreement(found: Disagreement) -> None:
    differing = found.differing
    rows = [
        [one.session_id, *(number(one.rewards.get(name)) for name in found.scorers)]
        for one in differing
    ]
    title = f"{len(differing)} of {len(found.sessions)} sessions scored differently"
    print_table(title, ("session", *(f"#{name}" for name in found.scorers)), rows)
    pairs = [
        [" / ".join(pair.scorers), pair.differing, pair.compared, number(pair.difference)]
        for pair in found.pairs
    ]
    print_table("scorers", ("scorers", "#differ", "#of", "#mean difference"), pairs)
    failed = [
        [one.session_id, name, error]
        for one in found.sessions
        for name, error in one.errors.items()
    ]
    if failed:
        print_table("failed", ("session", "scorer", "error"), failed)


async def _score(path: Path, scorer: Scorer, wanted: set[str], why: str) -> list[JSON]:
    """Score the sessions of a capture file and rewrite the other files of its run."""
    rows: list[JSON] = []
    with RunFolder(path.parent) as folder:
        async with await SqliteStore.open(path) as store:
            rows += [await _one(store, each, scorer, why) for each in _ended(store, wanted)]
            if (path.parent / RUN).exists():
                write_results(folder, store)
    return rows


def _ended(store: SqliteStore | SqliteReader, wanted: set[str]) -> Iterator[SessionCapture]:
    """Yield the sessions whose outcome allows a reward, or whose evaluator failed."""
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
        turn_rewards=found.turn_rewards,
    )
    await store.score(given)
    return row | {"reward": given.reward}


def _scorer(
    target: Path,
    functions: Sequence[str] | None,
    evaluators: Sequence[str] | None,
    reward: float | None,
) -> Scorer:
    """Load the scorer that the flags name; `ConfigError` for a mistake."""
    if len([*(functions or ()), *(evaluators or ())]) + (reward is not None) > 1:
        raise ConfigError("give only one of --function, --evaluator and --reward")
    base = target if target.is_dir() else target.parent
    if reward is not None:
        return _constant(reward)
    tasks = tasks_of(base)
    if functions:
        return _function(functions[0], base, tasks)
    return _evaluator(evaluators[0] if evaluators else None, base, tasks)


def _constant(reward: float) -> Scorer:
    if not is_number(reward):
        raise ConfigError(f"--reward must be a finite number, not {reward!r}")

    async def scorer(_: SessionCapture) -> Evaluation:
        return Evaluation(reward)

    return scorer


def _function(function: str, base: Path, tasks: dict[str, Task]) -> Scorer:
    """Return a scorer that calls a function in this process. `ConfigError` if it is none."""
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
    """Return a scorer that asks an evaluator on the stored data; `None` as `given` = each task's
    own.

    `ConfigError` for an evaluator that cannot score it.
    """
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
            raise EvaluatorError(
                f"run folder {base} does not hold the session's task {name!r}, and so no "
                "evaluator: give --function"
            )
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
            return await evaluate_with_control(opened[name], context)
        except Unscorable as error:
            return Evaluation(0.0, metadata={"unscorable": str(error)})

    return scorer


def _spec(given: str) -> EvaluatorSpec:
    """Read the evaluator of a TOML file, or return that of a name."""
    if not given.endswith(".toml"):
        return EvaluatorSpec(strategy=given)
    try:
        whole = tomllib.loads(Path(given).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--evaluator: cannot read {given}: {error}") from error
    return validated(EvaluatorSpec, whole.get("evaluator", whole), f"{given}: evaluator")


def _output(folder: Path) -> dict[str, Any]:
    """Return the kept logs of a session's stdout and stderr; empty where there is none."""
    logs = {name: folder / f"{name}.log" for name in ("stdout", "stderr")}
    return {name: log.read_bytes() if log.exists() else b"" for name, log in logs.items()}


AT_ONCE = 16
"""Sessions whose traces a server scores at the same time."""

EMBEDDED = "embedded:"


def teach(
    target: CaptureArgument,
    teacher: Annotated[
        str,
        typer.Option(help="embedded:DIR, http://HOST:PORT (vLLM) or sglang:URL; same tokenizer."),
    ],
    top: Annotated[
        int, typer.Option(help="Also the so many likeliest ids at each position.", min=0)
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Parquet file; teacher.parquet in the run folder.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a teacher's logprob of each response id of a run's traces.

    The file has a row per trace: session_id, trace_id, and teacher_logprobs, one for each id of
    response_ids in trajectories.parquet. With --top K, teacher_topk_ids and teacher_topk_logprobs
    have the K likeliest ids in place of each, likeliest first. The table has the mean reverse KL of
    the trained tokens, the policy's logprob minus the teacher's. A teacher with another tokenizer
    is refused.

    BRIDLE_ENGINE_API_KEY is the key of a teacher behind HTTP.
    """
    capture_files(target)
    base = target if target.is_dir() else target.parent
    path = check_file(out or base / "teacher.parquet", "--out")
    rows = asyncio.run(_teach(target, teacher, top, path))
    if json:
        print_json({"file": str(path), "sessions": rows})
        return
    table = [[row["session_id"], row["tokens"], number(row["reverse_kl"])] for row in rows]
    print_table(f"{path}", ("session", "#tokens", "#reverse KL, nats"), table)


async def _teach(target: Path, spec: str, top: int, path: Path) -> list[JSON]:
    columns: dict[str, list[object]] = {"session_id": [], "trace_id": [], "teacher_logprobs": []}
    if top:
        columns |= {"teacher_topk_ids": [], "teacher_topk_logprobs": []}
    rows: list[JSON] = []
    async with _opened(spec) as given:
        left = sessions(target)
        while captures := list(islice(left, AT_ONCE)):
            for capture in captures:
                await given.check(capture)
            trajectories = [trajectory_of(capture) for capture in captures]
            works = (partial(score_traces, one, given.score, top) for one in trajectories)
            scored = await _all(works)
            for trajectory, scores in zip(trajectories, scored, strict=True):
                rows.append(_row(trajectory, scores))
                for trace, of in zip(trajectory.traces, scores, strict=True):
                    named = trajectory.session_id, trace.trace_id, of.logprobs
                    best = ([*of.top_ids], [*of.top_logprobs]) if top else ()
                    for values, value in zip(columns.values(), (*named, *best), strict=True):
                        values.append(value)
    pq.write_table(pa.table(columns), private_file(path), compression="zstd")
    return rows


async def _all(
    works: Iterable[Callable[[], Coroutine[None, None, list[Scores]]]],
) -> list[list[Scores]]:
    """Do all at once; the first failure ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(work()) for work in works]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    return [one.result() for one in running]


async def score_traces(
    trajectory: Trajectory, score: Callable[[Ids, int], Awaitable[Scores]], top: int
) -> list[Scores]:
    """Return the teacher's logprobs of the response ids of each trace, with the `top` likeliest
    ids.
    """
    found = []
    for trace in trajectory.traces:
        scores = await score(trace.ids, top)
        found.append(scores.after(len(trace.prompt_ids)))
    return found


def _row(trajectory: Trajectory, scores: Sequence[Scores]) -> JSON:
    divergence, tokens = 0.0, 0
    for trace, of in zip(trajectory.traces, scores, strict=True):
        trained = trace.loss_mask == 1
        divergence += float((trace.response_logprobs - of.logprobs)[trained].sum())
        tokens += int(trained.sum())
    mean = divergence / tokens if tokens else None
    return {"session_id": trajectory.session_id, "tokens": tokens, "reverse_kl": mean}


class _Teacher:
    """A teacher that is open, and its tokenizer: a folder here, or the server's own."""

    def __init__(
        self,
        spec: str,
        score: Callable[[Ids, int], Awaitable[Scores]],
        folder: Path | None,
        served: ServedTeacher | None = None,
    ) -> None:
        self.score = score
        self._spec, self._folder, self._served = spec, folder, served
        self._same: set[str] = set()
        """Digests of tokenizers that are the teacher's."""

    async def check(self, capture: SessionCapture) -> None:
        """Raise `ConfigError` unless a session ran with the teacher's tokenizer."""
        named = capture.session.metadata.get(KEY) or {}
        digest = str(named.get("digest"))
        if digest in self._same:
            return
        fault = await self._difference(named)
        if fault is not None:
            raise ConfigError(
                f"--teacher: {self._spec} has another tokenizer than session "
                f"{capture.session.session_id}, which ran with "
                f"{named.get('source', 'an unknown one')}: {fault}"
            )
        self._same.add(digest)

    async def _difference(self, named: JSON) -> str | None:
        """Return how the session's tokenizer differs; `None` = it is the same."""
        if self._folder is not None:
            same = tokenizer_record(str(self._folder))["digest"] == named.get("digest")
            return None if same else f"that of {self._folder} is another file"
        found = encoder_of(named)
        if found is None:
            return "it is no longer where it was, so nothing can be compared"
        assert self._served is not None
        encode, size = found
        finding = await compare_vocabulary(self._served, encode, size)
        return None if finding.ok and finding.needed else finding.found


@asynccontextmanager
async def _opened(spec: str) -> AsyncIterator[_Teacher]:
    if spec.startswith(EMBEDDED):
        from bridle.embedded.model import PlainModel

        folder = Path(spec.removeprefix(EMBEDDED))
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--teacher: {folder} is not a model folder: it has no config.json")
        model = PlainModel(folder)

        async def score(ids: Ids, top: int) -> Scores:
            return await asyncio.to_thread(model.scores, ids, top)

        yield _Teacher(spec, score, folder)
        return
    served = served_teacher(spec)
    try:
        yield _Teacher(spec, served.score, await served.folder(), served)
    finally:
        await served.aclose()
