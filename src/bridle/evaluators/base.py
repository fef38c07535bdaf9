"""The evaluator contract: session -> reward, after the harness is dead.

An evaluator's own failure is an exception (classified as `EvaluatorError`), never a reward of 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bridle.config import Task
from bridle.runtimes.base import ExecResult, Runtime
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON


@dataclass(frozen=True, slots=True)
class EvaluationContext:
    """What an evaluator may look at."""

    task: Task
    session_id: str
    runtime: Runtime
    """The session's runtime with no process left in it, or a fresh one (`refresh_runtime`)."""
    harness: ExecResult | None
    """How the harness ended; `None` = it was not started."""
    trajectory: Trajectory
    logs: Path
    """Host folder for what the evaluator wants kept."""
    task_dir: Path
    """Folder of the task file, for relative paths."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a session was worth."""

    reward: float
    trace_rewards: tuple[float, ...] | None = None
    metadata: JSON = field(default_factory=dict)


class Evaluator(Protocol):
    """Scores sessions. Built from `EvaluatorSpec.config` by `from_config`."""

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Score one session; may run commands in `context.runtime`."""
