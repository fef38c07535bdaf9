"""The `composite` evaluator: several evaluators, weighted, with gates.

    [evaluator.config]
    parts = [
      {strategy = "command", config = {command = "make -s test"}, gate = 1.0, weight = 0},
      {strategy = "judge", config = {rubric = "...", model = "grader"}, weight = 1},
    ]

The reward is the mean of the parts' rewards by weight. Parts are done in order; one whose reward is
below its `gate` ends it: the reward is then `otherwise`, and later parts are not run. A part that
fails is the whole's failure. Where a part rewards traces or turns, these rewards are added by
weight; another part then gives each trace its reward, or the last turn of each.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Self

from pydantic import Field, field_validator

from bridle.config import EvaluatorSpec, Settings, Task
from bridle.errors import ConfigError, EvaluatorError
from bridle.evaluators.base import (
    Evaluation,
    EvaluationContext,
    Evaluator,
    check_evaluator,
    evaluate_with_control,
    parse_config,
)
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON


class Part(Settings):
    """One evaluator of a composite."""

    strategy: str
    config: JSON = Field(default_factory=dict)
    name: str | None = None
    """Its name in the metadata; `None` = its strategy."""
    weight: float = Field(default=1.0, ge=0)
    gate: float | None = Field(default=None, allow_inf_nan=False)
    """The least reward with which the next part is reached; `None` = any."""

    @property
    def title(self) -> str:
        """Name of the part; that of its evaluator where it has none."""
        return self.name or self.strategy


class CompositeSettings(Settings):
    """Config of evaluator `composite`."""

    parts: tuple[Part, ...] = Field(min_length=1)
    otherwise: float = 0.0
    """The reward of a session that does not pass a gate."""

    @field_validator("parts")
    @classmethod
    def _weighed(cls, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        if not any(part.weight for part in parts):
            raise ValueError("at least one part of evaluator 'composite' needs a weight above 0")
        names = [part.title for part in parts]
        if len(set(names)) < len(names):
            raise ValueError(f"the parts of evaluator 'composite' need different names: {names}")
        return parts


class CompositeEvaluator:
    """Implements `base.Evaluator`."""

    control = "parts"
    submittable = "parts:parts otherwise"

    def __init__(self, settings: CompositeSettings, evaluators: dict[str, Evaluator]) -> None:
        self._otherwise = settings.otherwise
        self._parts = {part.title: part for part in settings.parts}
        self._evaluators = evaluators
        self.prewarm = any(getattr(one, "prewarm", False) for one in evaluators.values())

    @classmethod
    def from_config(cls, config: JSON) -> Self:
        """Return an evaluator of all parts that `config` lists; `ConfigError` names a wrong
        part.
        """
        from bridle.evaluators import open_evaluator

        settings = parse_config(config, CompositeSettings, "composite")
        opened: dict[str, Evaluator] = {}
        for part in settings.parts:
            try:
                spec = EvaluatorSpec(strategy=part.strategy, config=part.config)
                opened[part.title] = open_evaluator(spec)
            except ConfigError as error:
                raise ConfigError(f"part {part.title!r} of 'composite': {error}") from error
        return cls(settings, opened)

    def check(self, task: Task) -> None:
        """Check the task with every part that has a check. Raises `ConfigError` naming the part."""
        for name, evaluator in self._evaluators.items():
            try:
                check_evaluator(evaluator, task)
            except ConfigError as error:
                raise ConfigError(f"part {name!r} of 'composite': {error}") from error

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Evaluate the parts in order and combine their rewards; a gate that fails ends the
        evaluation.

        Raises `EvaluatorError` naming the part.
        """
        found: dict[str, Evaluation] = {}
        began = time.monotonic()
        for name, part in self._parts.items():
            spent = time.monotonic() - began
            left = None if context.budget_s is None else max(0.0, context.budget_s - spent)
            try:
                found[name] = await evaluate_with_control(
                    self._evaluators[name], replace(context, budget_s=left)
                )
            except EvaluatorError as error:
                raise type(error)(f"part {name!r} of 'composite': {error}") from error
            if part.gate is not None and found[name].reward < part.gate:
                metadata = {"parts": _parts_json(found), "gate": name}
                return Evaluation(self._otherwise, metadata=metadata)
        weights = {name: part.weight for name, part in self._parts.items()}
        total = sum(weights.values())
        reward = sum(weights[name] * each.reward for name, each in found.items()) / total
        shares = {name: weight / total for name, weight in weights.items()}
        traces = _trace_rewards(found, shares)
        turns = None
        if any(each.turn_rewards for each in found.values()):
            turns = _turn_rewards(found, shares, context.trajectory)
        return Evaluation(reward, traces, {"parts": _parts_json(found)}, turns)


def _trace_rewards(
    found: Mapping[str, Evaluation], shares: Mapping[str, float]
) -> tuple[float, ...] | None:
    """Add up the rewards of traces; a part without them gives each trace its session's reward.

    `EvaluatorError` for parts that reward different numbers of traces.
    """
    counts = {len(one.trace_rewards) for one in found.values() if one.trace_rewards is not None}
    if len(counts) > 1:
        raise EvaluatorError(
            "the parts of 'composite' give rewards of different numbers of traces: "
            f"{sorted(counts)}"
        )
    if not counts:
        return None
    (count,) = counts
    rewards = [0.0] * count
    for name, one in found.items():
        own = [one.reward] * count if one.trace_rewards is None else one.trace_rewards
        rewards = [sum_ + shares[name] * value for sum_, value in zip(rewards, own, strict=True)]
    return tuple(rewards)


def _turn_rewards(
    found: Mapping[str, Evaluation], shares: Mapping[str, float], trajectory: Trajectory
) -> dict[str, float]:
    """Add up the rewards of turns; a part without them rewards the last turn of each trace."""
    rewards: dict[str, float] = defaultdict(float)
    for name, one in found.items():
        if one.turn_rewards is not None:
            for turn, reward in one.turn_rewards.items():
                rewards[turn] += shares[name] * reward
            continue
        own = one.trace_rewards or [one.reward] * len(trajectory.traces)
        for trace, reward in zip(trajectory.traces, own, strict=False):
            if turns := [*trace.trained_turns()]:
                rewards[trace.exchange_ids[turns[-1]]] += shares[name] * reward
    return dict(rewards)


def _parts_json(found: dict[str, Evaluation]) -> JSON:
    return {name: {"reward": each.reward, **each.metadata} for name, each in found.items()}
