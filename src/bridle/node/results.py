"""Results of sessions, and the folder of a run that keeps them.

A result is read from capture, live and at any later time, and says how the run of a session ended
(law 5). A harness's end is a status and a cause, decided in one place. COMPLETED needs a true exit,
at least one delivered turn, and no failed model call as the last word. A harness that calls no
model (`bridle.harnesses.base.needs_model`) needs the true exit alone. A harness that fails because
the model behind it failed is not to blame: that is infrastructure, and the session may be run again
(`blame`).

The folder says what the run was, what was captured, what came out:

```
RUN/run.json              configuration and versions
    capture.sqlite        the facts; all else can be rebuilt from them
    trajectories.jsonl    one trajectory a line
    trajectories.parquet  the same, as arrays (written by the command line)
    summary.json          one entry per session, and totals
    sessions/<id>/        logs and kept files of each session
    certificate.json      what `bridle certify` found last
    scorers.json          what `bridle score` found last when it compared several scorers
```

Results are appended as sessions end, so SIGKILL takes none of those. `finish` puts the lines into
the order in which the sessions were opened and adds those of sessions that did not come to their
end, so the file is byte for byte what rebuilding from capture gives.

Runs and sessions are found by a folder, a capture file or a session id (`capture_files`,
`find_session`).
"""

from __future__ import annotations

import json
import platform
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from bridle import __version__
from bridle.capture.reader import SqliteReader
from bridle.capture.records import Outcome, SessionCapture, SessionRecord, Store
from bridle.config import BuilderSpec, Task
from bridle.errors import ConfigError, StoreError
from bridle.folders import FolderLock, private_file, private_folder
from bridle.prompting.texts import decoder_of
from bridle.trajectory import rebuild
from bridle.trajectory.result import trajectory_bytes, trajectory_json
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON, Cause, SessionStatus

if TYPE_CHECKING:
    from bridle.gateway.registry import SessionFacts
    from bridle.harnesses.base import Harness
    from bridle.runtimes.base import ExecResult


ENGINE_CODES = frozenset(
    {"overloaded", "rate_limit", "paused", "engine_error", "store_error"}
    | {"engine_cut", "engine_reset", "engine_silent", "engine_500", "engine_garbled"}
    | {"replay_differs"}
)
"""Kinds of refusal (`RequestError.code`) that say nothing about the harness or the policy."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A final status with its cause."""

    status: SessionStatus
    cause: Cause | None = None
    """`None` exactly when COMPLETED."""
    error: str | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` unless exactly COMPLETED has no cause."""
        if (self.cause is None) != (self.status is SessionStatus.COMPLETED):
            raise ValueError(
                f"a session of status {self.status} cannot have cause {self.cause}: all but "
                "COMPLETED need one"
            )


COMPLETED = Ending(SessionStatus.COMPLETED)


def failed(cause: Cause, error: str) -> Ending:
    """Return the ending of a session with status ERROR, this cause and this error text."""
    return Ending(SessionStatus.ERROR, cause, error)


def out_of_time(budget_s: float, facts: SessionFacts) -> Ending:
    """Return the ending of a session whose agent used up its budget of seconds."""
    calls = "without one model call" if facts.calls == 0 else f"after {facts.calls} model calls"
    error = f"the agent's budget of {budget_s:g} s ran out, {calls}"
    return Ending(SessionStatus.TIMEOUT, Cause.TIMEOUT, error)


def judge(result: ExecResult, facts: SessionFacts, harness_cause: Cause | None) -> Ending:
    """Return the ending of a session whose harness exited by itself, within its budget.

    `harness_cause` is the cause that the harness's `exit_cause` found in its exit.
    """
    if facts.limit is not None:
        error = f"the session's limit of {facts.limit} was reached"
        return Ending(SessionStatus.TIMEOUT, Cause.LIMIT, error)
    last_call = f"its last model call failed: {facts.last_error}"
    if facts.failed_last and facts.last_error_code in ENGINE_CODES:
        return failed(Cause.INFRASTRUCTURE, f"the harness {_how(result)}; {last_call}")
    if result.limit is not None and not result.ok:
        error = f"the runtime's limit of {result.limit} was reached: the harness {_how(result)}"
        return failed(Cause.LIMIT, error)
    if harness_cause is not None or facts.failed_last:
        said = f"; {last_call}" if facts.failed_last else _said(result)
        cause = harness_cause or Cause.HARNESS_MODEL_ERROR
        return failed(cause, f"the harness {_how(result)}{said}")
    if facts.delivered == 0:
        called = "called the model" if facts.calls == 0 else "received a reply from the model"
        error = f"the harness {_how(result)}, but never {called}{_said(result)}"
        return failed(Cause.HARNESS_NO_CALL, error)
    return COMPLETED


def without_a_model(ending: Ending) -> Ending:
    """Return the same ending, or COMPLETED if its only fault is that the harness called no
    model.
    """
    return COMPLETED if ending.cause is Cause.HARNESS_NO_CALL else ending


def _how(result: ExecResult) -> str:
    if result.signal is not None:
        return f"was ended by signal {result.signal}"
    return f"exited with code {result.exit_code}"


def _said(result: ExecResult) -> str:
    """Return the last line of the output, for people."""
    lines = (result.stderr.strip() or result.stdout.strip()).decode(errors="replace").splitlines()
    return f": {lines[-1].strip()[:300]}" if lines else ""


class Fault(StrEnum):
    """The party responsible for an ending; policies for running sessions again use it."""

    INFRASTRUCTURE = "infrastructure"
    """The machine, a runtime, the engine, the store, or a stage of ours that took too long: it says
    nothing about the policy, and another run may well do better."""
    EVALUATOR = "evaluator"
    """The session is complete but not scored: the evaluator may fail again."""
    HARNESS = "harness"
    """The harness crashed, called nothing, ended on an error, or broke a limit of its runtime."""
    TIMEOUT = "timeout"
    """The agent reached its time budget or a limit of its session, which is a result."""
    CANCELLED = "cancelled"
    """A caller cancelled the session."""


_BLAMES: Final[Mapping[Cause, Fault]] = {
    Cause.INFRASTRUCTURE: Fault.INFRASTRUCTURE,
    Cause.HARNESS_CRASH: Fault.HARNESS,
    Cause.HARNESS_NO_CALL: Fault.HARNESS,
    Cause.HARNESS_MODEL_ERROR: Fault.HARNESS,
    Cause.EVALUATOR: Fault.EVALUATOR,
    Cause.CANCELLED: Fault.CANCELLED,
}


def blame(status: SessionStatus, cause: Cause | None) -> Fault | None:
    """Return who is responsible for a session's final status with its cause; `None` = COMPLETED.

    A budget that ran out is the agent's fault where the status is TIMEOUT; where it is ERROR, a
    stage of Bridle (INITIALIZING, BUILDING) was too slow. A limit is the session's with TIMEOUT,
    and its runtime's (memory, processes, storage) with ERROR.
    """
    match cause:
        case None:
            return None
        case Cause.TIMEOUT | Cause.LIMIT if status is SessionStatus.TIMEOUT:
            return Fault.TIMEOUT
        case Cause.TIMEOUT:
            return Fault.INFRASTRUCTURE
        case Cause.LIMIT:
            return Fault.HARNESS
        case _:
            return _BLAMES[cause]


def is_scored(status: SessionStatus, cause: Cause | None, *, replied: bool) -> bool:
    """Return whether a session with this ending has a reward.

    `replied` says whether its harness received a reply of the model. Every completed session has a
    reward, and every one with a reply that its agent ended: an agent that kills its harness, or
    uses up its time or turns, stays in its group.
    """
    by_agent = blame(status, cause) in (Fault.HARNESS, Fault.TIMEOUT)
    return cause is None or (by_agent and replied)


@dataclass(frozen=True, slots=True, eq=False)
class SessionResult:
    """A session that has ended, or (from capture) one whose process was killed."""

    session_id: str
    task_id: str
    sample_index: int
    status: SessionStatus
    """Final, or RUNNING for one whose process was killed."""
    cause: Cause | None
    """`None` when COMPLETED."""
    error: str | None
    trajectory: Trajectory
    reward: float | None
    """`None` = not scored."""
    timing: dict[str, float]
    """Seconds per stage: `queue`, `init`, `ready`, `run`, `build`, `evaluate`."""
    harness: str
    harness_version: str
    exit_code: int | None
    signal: int | None
    logs: dict[str, str]
    """Name -> path relative to the run folder."""
    metadata: JSON
    """The task's own metadata; under `evaluation` the evaluator's, under `scores` the rewards of
    later scorings, under `left_out` the files that were not kept, with the reason, under `limits`
    what enforced the runtime's limits, under `fork` how much of a captured session was replayed."""
    node_id: str | None = None
    """The node that ran it; `None` = there is only one."""
    runtime: str | None = None
    """Name of its runtime; `None` = it ended before it had one."""
    contains: bool | None = None
    """True if the runtime contains what the agent does (law 7); `None` = as above."""

    def head(self) -> JSON:
        """Return the result as JSON (Polar's `SessionResult` with Bridle's fields) without the
        trajectory.
        """
        names = (
            *("session_id", "task_id", "timing", "node_id", "error", "metadata", "reward"),
            *("sample_index", "harness", "harness_version", "exit_code", "signal", "logs"),
            *("runtime", "contains"),
        )
        ending = {"status": str(self.status), "cause": self.cause and str(self.cause)}
        return {name: getattr(self, name) for name in names} | ending

    def json(self) -> JSON:
        """Return the result with its trajectory as JSON, as the rollout API returns it."""
        return self.head() | {"trajectory": trajectory_json(self.trajectory)}

    def summary(self) -> JSON:
        """Return one line of JSON about the session: ids, ending, reward, and its build
        statistics.
        """
        stats = self.trajectory.metadata.get("stats", {})
        numbers = (
            *("exchanges", "roots", "branches", "traces", "tokens_captured", "tokens_trained"),
            *("tokens_excluded", "turns_shown", "turns_verbatim", "tokens_rerendered", "habits"),
            *("merge_ratio", "unknown", "unenforced"),
        )
        left = ("node_id", "metadata", "exit_code", "signal")
        return {
            **{name: value for name, value in self.head().items() if name not in left},
            "task_set": self.metadata.get("task_set"),
            **{name: stats.get(name) for name in numbers},
            "fork": self.metadata.get("fork"),
        }


def result_of(
    session: SessionRecord, outcome: Outcome | None, trajectory: Trajectory
) -> SessionResult:
    """Make the result of a session from its records; `trajectory` has its outcome already."""
    kept = session.metadata
    ended = outcome.metadata if outcome is not None else {}
    ours = ("evaluation", "scores", "left_out", "limits", "fork")
    more: JSON = {name: ended[name] for name in ours if name in ended}
    return SessionResult(
        session_id=session.session_id,
        task_id=session.task_id or "",
        sample_index=kept.get("sample_index", 0),
        status=SessionStatus(trajectory.status),
        cause=Cause(outcome.cause) if outcome is not None and outcome.cause is not None else None,
        error=trajectory.error,
        trajectory=trajectory,
        reward=trajectory.reward,
        timing=ended.get("timing", {}),
        harness=kept.get("harness", ""),
        harness_version=kept.get("harness_version", ""),
        exit_code=ended.get("exit_code"),
        signal=ended.get("signal"),
        logs=ended.get("logs", {}),
        metadata={**kept.get("task_metadata", {}), **more},
        runtime=kept.get("runtime"),
        contains=kept.get("contains"),
    )


def uncaptured_result(
    task: Task, sample_index: int, harness: Harness, outcome: Outcome
) -> SessionResult:
    """Make the result of a session that could not be captured."""
    record = SessionRecord(
        outcome.session_id,
        outcome.ended_at,
        task.task_id,
        {
            "sample_index": sample_index,
            "harness": harness.name,
            "harness_version": harness.version,
            "task_metadata": task.metadata,
        },
    )
    return result_of(record, outcome, rebuild(SessionCapture(record, (), {}, {}, outcome)))


def result_from(capture: SessionCapture) -> SessionResult:
    """Make the result of a captured session; its trajectory is rebuilt."""
    return result_of(capture.session, capture.outcome, trajectory_of(capture))


def trajectory_of(capture: SessionCapture, builder: BuilderSpec | None = None) -> Trajectory:
    """Build a captured session's trajectory again, with the texts of its breaks if its tokenizer
    exists.
    """
    return rebuild(capture, builder=builder, decode=decoder_of(capture.session.metadata))


def rebuild_facts(task: Task) -> JSON:
    """Return the fields of a task that are stored with its capture, to rebuild its trajectories
    later.
    """
    return {
        "builder": task.builder.model_dump(mode="json"),
        "train": [str(kind) for kind in task.train],
        "rejected": task.rejected,
        "rejected_reward": task.rejected_reward,
        "task_metadata": task.metadata,
    }


RUN = "run.json"
CAPTURE = "capture.sqlite"
TRAJECTORIES = "trajectories.jsonl"
TRAJECTORIES_PARQUET = "trajectories.parquet"
SUMMARY = "summary.json"
CERTIFICATE = "certificate.json"
SCORERS = "scorers.json"
SESSIONS = "sessions"


class RunFolder:
    """One run's folder, held by one process while it is open. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Lock the folder until `close`. `ConfigError` names the process that holds it."""
        self.path = path
        self.capture = path / CAPTURE
        self.trajectories = path / TRAJECTORIES
        self.trajectories_parquet = path / TRAJECTORIES_PARQUET
        self._lock = FolderLock(path)
        self._lines: dict[str, tuple[int, int]] = {}
        self._summaries: dict[str, JSON] = {}
        self._end = 0

    @classmethod
    def create(cls, path: Path, *, config: JSON) -> Self:
        """Make a run folder and write its `run.json`.

        Raises `ConfigError` if the folder holds a run already or cannot be written.
        """
        try:
            private_folder(path)
            if any((path / name).exists() for name in (RUN, CAPTURE, TRAJECTORIES)):
                raise ConfigError(f"{path} holds a run already; give another folder")
            folder = cls(path)
            facts = {"bridle": __version__, "python": platform.python_version(), "config": config}
            private_file(path / RUN).write_text(json.dumps(facts, indent=2) + "\n")
            private_folder(path / SESSIONS)
        except OSError as error:
            raise ConfigError(f"{path} cannot be used as a run folder: {error}") from error
        return folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock on the run folder."""
        self._lock.close()

    def session_folder(self, session_id: str) -> Path:
        """Return a session's folder for logs and kept files; it may not exist."""
        return self.path / SESSIONS / session_id

    def append(self, result: SessionResult) -> None:
        """Append one session's result to the run folder. `StoreError` if it cannot be written."""
        line = trajectory_bytes(result.trajectory) + b"\n"
        try:
            with private_file(self.trajectories).open("ab") as file:
                # What a failed write left of a line goes first.
                file.truncate(self._end)
                file.write(line)
        except OSError as error:
            raise StoreError(
                f"{self.trajectories}: cannot write a session's result: {error}"
            ) from error
        self._lines[result.session_id] = (self._end, len(line))
        self._summaries[result.session_id] = result.summary()
        self._end += len(line)

    def finish(self, captures: Store) -> JSON:
        """Write trajectories and summary of all sessions in their order; returns the summary.

        Sessions that ended without a record (because the store failed) come last. Can be repeated.
        `StoreError` if something cannot be written or read.
        """
        aside = self.trajectories.with_suffix(".part")
        lines: dict[str, tuple[int, int]] = {}
        end = 0
        try:
            with private_file(aside).open("wb") as file:
                recorded = [each.session_id for each in captures.sessions() if not each.is_aside]
                # Those that no store took have nothing but their line.
                unrecorded = [name for name in self._lines if name not in set(recorded)]
                for session_id in (*recorded, *unrecorded):
                    line = self._line(session_id, captures)
                    file.write(line)
                    lines[session_id] = (end, len(line))
                    end += len(line)
            aside.replace(self.trajectories)
            self._lines, self._end = lines, end
            summary = summarise([self._summaries[session_id] for session_id in lines])
            private_file(self.path / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            raise StoreError(
                f"{self.path}: cannot write the results of the run: {error}"
            ) from error
        return summary

    def _line(self, session_id: str, captures: Store) -> bytes:
        if session_id in self._lines:
            start, length = self._lines[session_id]
            with self.trajectories.open("rb") as file:
                file.seek(start)
                return file.read(length)
        result = result_from(captures.read(session_id))
        self._summaries[session_id] = result.summary()
        return trajectory_bytes(result.trajectory) + b"\n"

    def discard_if_unused(self) -> None:
        """Empty the run folder if no session was ever opened, so that a second try can use it.

        For a run that could not begin; what cannot be read is left alone.
        """
        try:
            if self.capture.exists():
                with SqliteReader(self.capture) as reader:
                    if reader.sessions():
                        return
        except StoreError:
            return
        for name in (RUN, CAPTURE, f"{CAPTURE}-wal", f"{CAPTURE}-shm"):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / SESSIONS, ignore_errors=True)

    def drop_logs(self, session_id: str) -> None:
        """Delete a session's logs and kept files."""
        shutil.rmtree(self.session_folder(session_id), ignore_errors=True)


class ServerFolder(RunFolder):
    """A node's folder under a server: logs and kept files of runs; results are the server's."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """Make the server's folder, or take an existing one. `ConfigError` if another process uses
        it.
        """
        private_folder(path / SESSIONS)
        return cls(path)

    def append(self, result: SessionResult) -> None:
        """Write nothing: the server keeps results in its own files."""


def summarise(sessions: list[JSON]) -> JSON:
    """Return `{"sessions": [...], "totals": {...}}` of `SessionResult.summary` entries."""
    rewards = [entry["reward"] for entry in sessions if entry["reward"] is not None]
    excluded: Counter[str] = Counter()
    for entry in sessions:
        excluded.update(entry["tokens_excluded"] or {})
    return {
        "sessions": sessions,
        "totals": {
            "sessions": len(sessions),
            "status": dict(Counter(entry["status"] for entry in sessions)),
            "cause": dict(Counter(entry["cause"] for entry in sessions if entry["cause"])),
            "scored": len(rewards),
            "reward_mean": sum(rewards) / len(rewards) if rewards else None,
            **{
                name: sum(entry[name] or 0 for entry in sessions)
                for name in ("exchanges", "traces", "tokens_captured", "tokens_trained")
            },
            "tokens_excluded": dict(excluded),
        },
    }


BY_WORKER = f"worker-*/{CAPTURE}"
"""Capture files of a gateway with several workers, in its data folder."""


def capture_files(target: Path) -> list[Path]:
    """Return the capture files of a run folder or of a gateway's workers, or `target` if it is one.

    `ConfigError` if there is none.
    """
    path = target / CAPTURE if target.is_dir() else target
    if target.is_file() and target.name != CAPTURE and not _is_sqlite(target):
        raise ConfigError(f"{target} is not a run: give its folder, or its {CAPTURE}")
    if path.is_file():
        return [path]
    found = sorted(target.glob(BY_WORKER), key=lambda file: (len(file.parent.name), file))
    if not found:
        raise ConfigError(f"{target} is not a run: {path} does not exist")
    return found


def _is_sqlite(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def sessions(target: Path) -> Iterator[SessionCapture]:
    """Yield the captured sessions of harnesses in a run, in the order of their opening in each
    file.
    """
    for path in capture_files(target):
        with SqliteReader(path) as reader:
            for session in reader.sessions():
                if not session.is_aside:
                    yield reader.read(session.session_id)


def find_session(name: str, runs: Path) -> tuple[Path, SessionCapture]:
    """Return the session whose id begins with `name`, and its capture file.

    `runs` is a run folder or a folder of runs. `ConfigError` for no such session or several.
    """
    files = [runs / CAPTURE]
    if not files[0].is_file():
        files = sorted([*runs.glob(f"*/{CAPTURE}"), *runs.glob(f"*/{BY_WORKER}")])
    begin: list[tuple[Path, str]] = []
    for path in files:
        with SqliteReader(path) as reader:
            ids = (session.session_id for session in reader.sessions())
            begin += [(path, session_id) for session_id in ids if session_id.startswith(name)]
    exact = [one for one in begin if one[1] == name]
    found = exact or begin
    if not found:
        held = {0: " (no run there)", 1: ""}.get(len(files), f" ({len(files)} runs)")
        raise ConfigError(
            f"there is no session {name!r}; looked in {runs}{held}; --run names another run"
        )
    if len(exact) > 1:
        places = ", ".join(str(path.parent) for path, _ in exact[:5])
        raise ConfigError(
            f"session {name!r} is in {len(exact)} runs: {places}; name one of them by --run"
        )
    if len(found) > 1:
        names = ", ".join(session_id for _, session_id in found[:5])
        raise ConfigError(
            f"{name!r} is the beginning of {len(found)} session ids: {names}...; give more of the "
            "id"
        )
    path, session_id = found[0]
    with SqliteReader(path) as reader:
        return path, reader.read(session_id)


def config_of(base: Path) -> JSON:
    """Read the config of a run; empty if the folder holds none."""
    path = base / RUN
    found: JSON = json.loads(path.read_bytes())["config"] if path.exists() else {}
    return found


def tasks_of(base: Path) -> dict[str, Task]:
    """Return the tasks in a run's config, by id."""
    return {one["task_id"]: Task.model_validate(one) for one in config_of(base).get("tasks", [])}
