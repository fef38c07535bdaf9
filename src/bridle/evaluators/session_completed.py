"""The `session_completed` evaluator: reward 1.0 for a harness that ended well.

For data generation and for trying things: it says nothing about the work. A session whose harness
crashed or used up its time or a limit has reward 0.0, if it got a reply of the model.
"""

from __future__ import annotations

from typing import Self

from bridle.config import Settings
from bridle.evaluators.base import Evaluation, EvaluationContext, parse_config
from bridle.types import JSON


class SessionCompletedSettings(Settings):
    """Config of evaluator `session_completed`."""

    reward: float = 1.0
    """Reward of a session whose harness ended by itself with exit code 0."""


class SessionCompleted:
    """Reward for a harness that ended by itself with exit code 0. Implements `base.Evaluator`."""

    def __init__(self, reward: float = 1.0) -> None:
        self._reward = reward

    @classmethod
    def from_config(cls, config: JSON) -> Self:
        """Make one from its config, such as `{"reward": 1.0}`; raises `ConfigError`."""
        return cls(parse_config(config, SessionCompletedSettings, "session_completed").reward)

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Return the reward if the harness ended well, else 0.0."""
        ended_well = context.completed and context.harness is not None and context.harness.ok
        return Evaluation(self._reward if ended_well else 0.0)
