"""Results of sessions: everything in them is read from capture, live and at any later time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridle.capture.records import Outcome, SessionCapture, SessionRecord
from bridle.config import BuilderSpec, Task
from bridle.prompting.texts import decoder_of
from bridle.trajectory import rebuild
from bridle.trajectory.result import session_result_json
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON, Cause, SessionStatus

if TYPE_CHECKING:
    from bridle.harnesses.base import Harness


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

    def json(self) -> JSON:
        """Return the rollout API's form (Polar's `SessionResult` and our additions)."""
        return session_result_json(
            self.trajectory,
            task_id=self.task_id,
            status=self.status,
            timing=self.timing,
            error=self.error,
            metadata=self.metadata,
            sample_index=self.sample_index,
            cause=self.cause,
            harness=self.harness,
            harness_version=self.harness_version,
            exit_code=self.exit_code,
            signal=self.signal,
            logs=self.logs,
            node_id=self.node_id,
            runtime=self.runtime,
            contains=self.contains,
        )

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
