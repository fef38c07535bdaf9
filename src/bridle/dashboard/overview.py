"""Data of the first page (runs, results, failures, data quality) and of a training's curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bridle.dashboard.lines import (
    ENDED,
    Failure,
    Line,
    ends_over_time,
    failures_of,
    groups_of,
    statuses_of,
)
from bridle.dashboard.runs import Facts
from bridle.trajectory.report import Report, report_of
from bridle.trajectory.scores import Attempted, Score, scores_of
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


RECENT_S = 600.0
"""A rate is that of this last time, if something ended in it."""

NEWEST = 12
"""Sessions that the first page lists."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Throughput of sessions."""

    sessions_per_minute: float
    tokens_per_second: float
    """Sampled tokens of the sessions that ended."""
    live: bool
    """Over the last `RECENT_S`; else over all of the run."""


@dataclass(frozen=True, slots=True)
class Overview:
    """Content of the overview page."""

    runs: Sequence[Facts]
    total: int
    """Sessions."""
    statuses: dict[str, int]
    expected: int | None
    """Sessions that there will be; `None` = not known."""
    failures: Sequence[Failure]
    report: Report | None
    """The laws over all that is measured; `None` = they are not known here."""
    unmeasured: int
    """Sessions that have ended and are not in the report yet."""
    scores: Sequence[Score]
    rate: Rate | None
    ends: Sequence[tuple[float, int, int]]
    groups: dict[str, int]
    """How many groups have ended, have begun..."""
    sampled: int
    """Tokens."""
    exchanges: int
    newest: Sequence[Line]
    trainings: Sequence[Training]
    versions: tuple[int, int] | None = None
    """Oldest and newest policy version of the newest sessions."""
    server: JSON | None = None
    """`/v1/status` of a rollout server."""
    nodes: Sequence[JSON] = field(default_factory=list)


def overview_of(
    lines: Sequence[Line],
    runs: Sequence[Facts],
    trainings: Sequence[Training],
    *,
    now: float,
    unmeasured: int = 0,
) -> Overview:
    """The page over these sessions; `now` is Unix time."""
    measured = [line for line in lines if line.measured is not None]
    latest = newest(lines)
    counts = [run.expected for run in runs]
    known = [count for count in counts if count is not None]
    spans = [line.measured.versions for line in latest if line.measured and line.measured.versions]
    return Overview(
        runs=runs,
        total=len(lines),
        statuses=statuses_of(lines),
        expected=sum(known) if counts and len(known) == len(counts) else None,
        failures=failures_of(lines),
        report=_report(measured) if measured else None,
        unmeasured=unmeasured,
        scores=_scores(lines),
        rate=_rate(lines, now),
        ends=ends_over_time(lines),
        groups=_groups(lines),
        sampled=sum(line.sampled or 0 for line in lines),
        exchanges=sum(line.exchanges or 0 for line in lines),
        newest=latest,
        trainings=trainings,
        versions=(min(s[0] for s in spans), max(s[1] for s in spans)) if spans else None,
    )


def newest(lines: Sequence[Line]) -> list[Line]:
    """Those that the first page lists."""
    return sorted(lines, key=lambda line: -(line.ended_at or line.opened_at or 0.0))[:NEWEST]


def _report(lines: Sequence[Line]) -> Report:
    return report_of(
        (line.session_id, line.harness or "-", line.status, line.measured.stats)
        for line in lines
        if line.measured is not None and "tokens_captured" in line.measured.stats
    )


def _scores(lines: Sequence[Line]) -> list[Score]:
    return scores_of(
        Attempted(
            line.task_set or line.run, line.harness, line.task_id, line.status, line.cause,
            line.reward,
        )
        for line in lines
        if line.status in ENDED
    )  # fmt: skip


def _groups(lines: Sequence[Line]) -> dict[str, int]:
    found = {"ended": 0, "under way": 0}
    for group in groups_of(lines):
        found["ended" if group.ended == len(group.lines) else "under way"] += 1
    return found


def _rate(lines: Sequence[Line], now: float) -> Rate | None:
    """Compute the current throughput, or that of the whole run if no session ended lately."""
    ended = [line for line in lines if line.ended_at is not None]
    if not ended:
        return None
    last = max(line.ended_at or 0.0 for line in ended)
    first = min(line.opened_at or last for line in ended)
    live = now - last < RECENT_S
    if live and now - first > RECENT_S:
        first = now - RECENT_S
        ended = [line for line in ended if (line.ended_at or 0.0) >= first]
    span = max(last - first, 1e-3)
    tokens = sum(line.sampled or 0 for line in ended)
    return Rate(60 * len(ended) / span, tokens / span, live)
