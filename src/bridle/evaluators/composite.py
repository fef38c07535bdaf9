"""The `composite` evaluator: several evaluators, weighted, with gates.

    [evaluator.config]
    parts = [
      {strategy = "command", config = {command = "make -s test"}, gate = 1.0, weight = 0},
      {strategy = "judge", config = {rubric = "...", model = "grader"}, weight = 1},
    ]

The reward is the mean of the parts' rewards by weight. Parts are done in order; one whose reward is
below its `gate` ends it: the reward is then `otherwise`, and later parts are not run. A part that
fails is the whole's failure. Trace rewards are those of the parts that give any, added by weight.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
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
from bridle.types import JSON


class Part(Settings):
    """One evaluator of a composite."""

    strategy: str
    config: JSON = Field(default_factory=dict)
    name: str | None = None
    """Its name in the metadata; `None` = its strategy."""
    weight: float = Field(default=1.0, ge=0)
    gate: float | None = None
    """The least reward with which the next part is reached; `None` = any."""


class CompositeSettings(Settings):
    """Config of evaluator `composite`."""

    parts: tuple[Part, ...] = Field(min_length=1)
    otherwise: float = 0.0
    """The reward of a session that does not pass a gate."""

    @field_validator("parts")
    @classmethod
    def _weighed(cls, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        if not any(part.weight for part in parts):
            message = "at least one part needs a weight above 0"
            raise ValueError(message)
        names = [part.name or part.strategy for part in parts]
        if len(set(names)) < len(names):
            message = f"parts need different names: {names}"
            raise ValueError(message)
        return parts


@dataclass(frozen=True, slots=True)
class _Opened:
    part: Part
    name: str
    evaluator: Evaluator


class CompositeEvaluator:
    """Implements `base.Evaluator`."""

    control = "parts"

    def __init__(self, settings: CompositeSettings, parts: list[_Opened]) -> None:
        self._otherwise = settings.otherwise
        self._parts = parts
        self.prewarm = any(getattr(one.evaluator, "prewarm", False) for one in parts)

    @classmethod
    def from_config(cls, config: JSON) -> Self:
        """Config as `CompositeSettings`, all parts opened; `ConfigError` names the part."""
        from bridle.evaluators import open_evaluator

        settings = parse_config(config, CompositeSettings, "composite")
        opened = []
        for part in settings.parts:
            name = part.name or part.strategy
            try:
                spec = EvaluatorSpec(strategy=part.strategy, config=part.config)
                opened.append(_Opened(part, name, open_evaluator(spec)))
            except ConfigError as error:
                raise ConfigError(f"part {name!r} of 'composite': {error}") from error
        return cls(settings, opened)

    def check(self, task: Task) -> None:
        """Check every part that can be. Raises `ConfigError` naming the part."""
        for one in self._parts:
            try:
                check_evaluator(one.evaluator, task)
            except ConfigError as error:
                raise ConfigError(f"part {one.name!r} of 'composite': {error}") from error

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Every part in order, up to a closed gate. Raises `EvaluatorError` naming the part."""
        found: dict[str, Evaluation] = {}
        began = time.monotonic()
        for one in self._parts:
            spent = time.monotonic() - began
            left = None if context.budget_s is None else max(0.0, context.budget_s - spent)
            try:
                found[one.name] = await evaluate_with_control(
                    one.evaluator, replace(context, budget_s=left)
                )
            except EvaluatorError as error:
                raise type(error)(f"part {one.name!r}: {error}") from error
            if one.part.gate is not None and found[one.name].reward < one.part.gate:
                metadata = {"parts": _parts_json(found), "gate": one.name}
                return Evaluation(self._otherwise, metadata=metadata)
        weights = {one.name: one.part.weight for one in self._parts}
        total = sum(weights.values())
        reward = sum(weights[name] * each.reward for name, each in found.items()) / total
        traces = [
            [weights[name] / total * value for value in each.trace_rewards]
            for name, each in found.items()
            if each.trace_rewards is not None
        ]
        if len({len(values) for values in traces}) > 1:
            message = f"parts reward different numbers of traces: {sorted(map(len, traces))}"
            raise EvaluatorError(message)
        added = tuple(map(sum, zip(*traces, strict=True))) if traces else None
        return Evaluation(reward, added, {"parts": _parts_json(found)})


def _parts_json(found: dict[str, Evaluation]) -> JSON:
    return {name: {"reward": each.reward, **each.metadata} for name, each in found.items()}
