"""The first page: what runs, what came of it, what failed, and whether the data can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bridle.dashboard.course import Training
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
