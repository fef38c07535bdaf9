"""The course of a training, as `bridle train` keeps it in `course.json`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bridle.types import JSON

Number = float | int | None


@dataclass(frozen=True, slots=True)
class Curve:
    """One number over steps; gaps are `None`."""

    name: str
    label: str
    values: Sequence[Number]


@dataclass(frozen=True, slots=True)
class Training:
    """A training so far."""

    name: str
    """Its folder, relative to what is shown."""
    steps: Sequence[int]
    curves: Sequence[Sequence[Curve]]
    """Charts: the curves of each share an axis."""
    last: JSON
    """The last step; empty = there was none."""
    held_out: Sequence[tuple[int, float]]
    """(Step, mean reward) of each evaluation with one."""

    @property
    def charts(self) -> list[JSON]:
        """Return the charts in the form that the page's script draws."""
        return [
            {
                "steps": list(self.steps),
                "curves": [
                    {"label": curve.label, "name": curve.name, "values": list(curve.values)}
                    for curve in chart
                ],
            }
            for chart in self.curves
            if any(value is not None for curve in chart for value in curve.values)
        ]

    @property
    def rows(self) -> list[tuple[int, list[Number]]]:
        """(Step, value of each curve), newest first: the same numbers as a table."""
        flat = [curve for chart in self.curves for curve in chart]
        return [(step, [curve.values[n] for curve in flat]) for n, step in enumerate(self.steps)][
            ::-1
        ]

    @property
    def labels(self) -> list[str]:
        return [curve.label for chart in self.curves for curve in chart]


def training_of(name: str, course: JSON) -> Training | None:
    """A training from its course; `None` for what is not one."""
    recorded, evaluations = course.get("steps"), course.get("evaluations")
    if not isinstance(recorded, list) or not isinstance(evaluations, list):
        return None
    by_step: dict[int, JSON] = {int(one["step"]): one for one in recorded if "step" in one}
    held = {
        int(one["step"]): float(one["reward"])
        for one in evaluations
        if "step" in one and one.get("reward") is not None
    }
    steps = sorted({*by_step, *held})

    def values(*path: str) -> list[Number]:
        return [_at(by_step.get(step), path) for step in steps]

    curves = (
        (
            Curve("reward", "reward of the step", values("reward")),
            Curve("held_out", "held-out tasks", [held.get(step) for step in steps]),
        ),
        (Curve("logprob_error", "largest logprob error, nats", values("update", "logprob_error")),),
        (Curve("lag", "mean staleness, versions", [_lag(by_step.get(step)) for step in steps]),),
        (
            Curve("waited", "waited for groups, s", values("waited_s")),
            Curve("update", "update, s", values("update", "seconds")),
            Curve("published", "weights to engines, s", values("published_s")),
        ),
        (Curve("norm", "gradient norm", values("update", "norm")),),
    )
    last = by_step[max(by_step)] if by_step else {}
    return Training(name, steps, curves, last, sorted(held.items()))


def _at(step: JSON | None, path: Sequence[str]) -> Number:
    value: object = step
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int | float) else None


def _lag(step: JSON | None) -> float | None:
    """Mean lag of the tokens of an update, in policy versions."""
    update = (step or {}).get("update")
    lags = update.get("lags") if isinstance(update, dict) else None
    if not isinstance(lags, dict) or not (tokens := sum(lags.values())):
        return None
    return float(sum(int(lag) * count for lag, count in lags.items()) / tokens)
