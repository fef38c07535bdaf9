"""The `session_completed` evaluator: reward 1.0 for a harness that ended well.

For data generation and for trying things: it says nothing about the work. Sessions that did not
complete have their status and cause, and no reward.
"""

from __future__ import annotations

from typing import Self

from bridle.config import Settings
from bridle.evaluators.base import Evaluation, EvaluationContext, parse_config
from bridle.types import JSON


class SessionCompletedSettings(Settings):
    """Config of evaluator `session_completed`."""

    reward: float = 1.0
    """What a session is worth whose harness ended by itself with exit code 0."""


class SessionCompleted:
    """Implements `base.Evaluator`."""

    def __init__(self, reward: float = 1.0) -> None:
        self._reward = reward

    @classmethod
    def from_config(cls, config: JSON) -> Self:
        """`{"reward": 1.0}`; raises `ConfigError`."""
        return cls(parse_config(config, SessionCompletedSettings, "session_completed").reward)

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """The reward if the harness ended well; 0.0 if it ran out of its budget."""
        ended_well = context.harness is not None and context.harness.ok
        return Evaluation(self._reward if ended_well else 0.0)
