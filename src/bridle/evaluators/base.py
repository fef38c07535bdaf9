"""The evaluator contract: session -> reward, after the harness is dead.

An evaluator's own failure is an exception (classified as `EvaluatorError`), never a reward of 0.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from pydantic import ValidationError

from bridle.config import Settings, Task, explain
from bridle.runtimes.base import ExecResult, Runtime
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """A gateway session of an evaluator's own; its calls are captured and never train."""

    session_id: str
    base_url: str
    """OpenAI's, as seen from this process."""
    key: str


OpenModel: TypeAlias = Callable[[], AbstractAsyncContextManager[ModelAccess]]
"""Opens such a session; its key is dead when the block is left."""


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
    session_runtime: Runtime | None = None
    """Where the harness ran, if `runtime` is a fresh one (what it left can be taken from here);
    `None` = `runtime` itself."""
    open_model: OpenModel | None = None
    """For evaluators that ask a model; `None` = there is no gateway."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a session was worth."""

    reward: float
    trace_rewards: tuple[float, ...] | None = None
    metadata: JSON = field(default_factory=dict)


class Evaluator(Protocol):
    """Scores sessions. Built from `EvaluatorSpec.config` by `EvaluatorClass.from_config`."""

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Score one session; may run commands in `context.runtime`."""


class EvaluatorClass(Protocol):
    """What `EVALUATORS` entries are: classes with this class method."""

    def from_config(self, config: JSON) -> Evaluator:
        """Raises `ConfigError` naming the field of `config` that is wrong."""


SettingsT = TypeVar("SettingsT", bound=Settings)


def parse_config(config: JSON, kind: type[SettingsT], name: str) -> SettingsT:
    """`EvaluatorSpec.config` as an evaluator's own settings; `ConfigError` names the field."""
    try:
        return kind.model_validate(config)
    except ValidationError as error:
        raise explain(error, f"evaluator.config of {name!r}") from None
