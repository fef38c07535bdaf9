"""Results of sessions, read from capture live and at any later time, and how a run ended (law 5).

A harness's end is a status and a cause, decided in one place. COMPLETED needs a true exit, at least
one delivered turn, and no failed model call as the last word. A harness that calls no model
(`bridle.harnesses.base.needs_model`) needs the true exit alone. A harness that fails because the
model behind it failed is not to blame: that is infrastructure, and the session may be run again
(`blame`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from bridle.capture.records import Outcome, SessionCapture, SessionRecord
from bridle.config import BuilderSpec, Task
from bridle.prompting.texts import decoder_of
from bridle.trajectory import rebuild
from bridle.trajectory.result import trajectory_json
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
            raise ValueError(f"{self.status} with cause {self.cause}")


COMPLETED = Ending(SessionStatus.COMPLETED)


def failed(cause: Cause, error: str) -> Ending:
    return Ending(SessionStatus.ERROR, cause, error)


def out_of_time(budget_s: float, facts: SessionFacts) -> Ending:
    """Return the ending of an agent whose budget of seconds ran out."""
    calls = "without one model call" if facts.calls == 0 else f"after {facts.calls} model calls"
    error = f"the agent's budget of {budget_s:g} s ran out, {calls}"
    return Ending(SessionStatus.TIMEOUT, Cause.TIMEOUT, error)


def judge(result: ExecResult, facts: SessionFacts, harness_cause: Cause | None) -> Ending:
    """Return the ending of a harness that was not stopped at its budget.

    `harness_cause` is what its own file reads from its exit (`Harness.exit_cause`).
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
    """Return the ending of a harness that calls no model, which may lack a turn."""
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
    """Return who is responsible for a final status with its cause; `None` = COMPLETED.

    A budget that ran out is the agent's where the session's status is TIMEOUT; where it is ERROR,
    a stage of ours (INITIALIZING, BUILDING) was too slow. A limit is the session's with TIMEOUT,
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

    `replied`: its harness received a reply.

    Every completed one has, and every one with a reply that its agent ended: an agent that kills
    its harness, or uses up its time or turns, stays in its group.
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
        """Return the rollout API's form (Polar's `SessionResult` and our additions) without the
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
        """Return the rollout API's form."""
        return self.head() | {"trajectory": trajectory_json(self.trajectory)}

    def summary(self) -> JSON:
        """Return one line about the session: ids, ending, reward, and its law numbers."""
        stats = self.trajectory.metadata.get("stats", {})
        numbers = (
            *("exchanges", "roots", "branches", "traces", "tokens_captured", "tokens_trained"),
            *("tokens_excluded", "turns_shown", "turns_verbatim", "tokens_rerendered", "habits"),
            *("merge_ratio", "unknown", "unenforced"),
        )
        return {
            "session_id": self.session_id,
            "task_id": self.task_id,
            "sample_index": self.sample_index,
            "task_set": self.metadata.get("task_set"),
            "harness": self.harness,
            "harness_version": self.harness_version,
            "runtime": self.runtime,
            "contains": self.contains,
            "status": str(self.status),
            "cause": self.cause and str(self.cause),
            "error": self.error,
            "reward": self.reward,
            **{name: stats.get(name) for name in numbers},
            "fork": self.metadata.get("fork"),
            "timing": self.timing,
            "logs": self.logs,
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
    """Rebuild a trajectory, with the texts of its breaks if the tokenizer still exists."""
    return rebuild(capture, builder=builder, decode=decoder_of(capture.session.metadata))


def rebuild_facts(task: Task) -> JSON:
    """Return the fields of a task that a rebuild of its trajectories needs, for the capture."""
    return {
        "builder": task.builder.model_dump(mode="json"),
        "train": [str(kind) for kind in task.train],
        "rejected": task.rejected,
        "rejected_reward": task.rejected_reward,
        "task_metadata": task.metadata,
    }
