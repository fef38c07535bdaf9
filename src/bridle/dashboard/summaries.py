"""Session rows, groups, filters, totals, the overview page and training curves. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np

from bridle.trajectory.credit import grpo_advantages
from bridle.trajectory.sample import Trajectory
from bridle.trajectory.scores import Attempted, HarnessScore, Report, report_of, scores_of
from bridle.types import JSON

FAILED = frozenset({"TIMEOUT", "ERROR", "CANCELLED"})
ENDED = FAILED | {"COMPLETED"}

AGAIN = re.compile(r"(.+\.\d+)\.r(\d+)")
"""Id of a later attempt of a server's session: the session's id and the attempt."""

STATUSES = (
    *("COMPLETED", "TIMEOUT", "ERROR", "CANCELLED", "EVALUATING", "BUILDING", "RUNNING"),
    *("READY", "INITIALIZING", "REGISTERED", "QUEUED"),
)
"""Session states in display order."""


@dataclass(frozen=True, slots=True)
class TrajectoryFacts:
    """Facts that a session's trajectory adds to its row."""

    stats: JSON
    """The trajectory's `metadata["stats"]`: token and turn counts."""
    versions: tuple[int, int] | None
    """Oldest and newest policy version that sampled; `None` = nothing was sampled."""
    turns: int
    """Exchanges that are part of a trace."""

    @property
    def trained(self) -> int:
        """Number of tokens that train."""
        return int(self.stats.get("tokens_trained") or 0)

    @property
    def excluded(self) -> dict[str, int]:
        """Return the number of sampled tokens that do not train, by reason."""
        return dict(self.stats.get("tokens_excluded") or {})


def measured_of(trajectory: Trajectory) -> TrajectoryFacts:
    spans = [trace.metadata.get("policy_versions") for trace in trajectory.traces]
    known = [span for span in spans if span]
    return TrajectoryFacts(
        stats=trajectory.metadata.get("stats") or {},
        versions=(min(one[0] for one in known), max(one[1] for one in known)) if known else None,
        turns=len({name for trace in trajectory.traces for name in trace.exchange_ids}),
    )


@dataclass(frozen=True, slots=True)
class Origin:
    """The beginning of a fork."""

    session_id: str
    """Id under which the session that was forked is captured."""
    at: int
    """Number of its replies that the fork began with."""
    capture: str = ""
    """Path of its capture file; empty = not known."""
    verdict: str | None = None
    """`exact`, `equivalent` or `refused`; `None` = the fork has not ended."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A row of a session list."""

    session_id: str
    run: str
    task_id: str = ""
    sample_index: int = 0
    task_set: str = ""
    harness: str = ""
    harness_version: str = ""
    runtime: str = ""
    status: str = "RUNNING"
    """RUNNING without an outcome."""
    cause: str | None = None
    error: str | None = None
    reward: float | None = None
    opened_at: float | None = None
    """Unix time, seconds."""
    ended_at: float | None = None
    last_at: float | None = None
    """Time of the last exchange."""
    exchanges: int | None = None
    """`None` = not known."""
    sampled: int | None = None
    """Sampled tokens."""
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds per stage."""
    measured: TrajectoryFacts | None = None
    """`None` = not built yet."""
    abandoned: bool = False
    """True if the run ended without an outcome of this session: its process was killed."""
    origin: Origin | None = None
    """`None` = not a fork."""

    @property
    def begun(self) -> int | None:
        """Return the policy version of the session's oldest token; `None` = not known."""
        versions = None if self.measured is None else self.measured.versions
        return None if versions is None else versions[0]

    @property
    def trained(self) -> int | None:
        """Number of the session's tokens that train; `None` = not known."""
        return None if self.measured is None else self.measured.trained

    @property
    def turns(self) -> int | None:
        """Number of the session's turns that are in its traces; `None` = not known."""
        return None if self.measured is None else self.measured.turns

    @property
    def seconds(self) -> float | None:
        """Return the seconds from the session's opening to its end, or to its last exchange."""
        last = self.ended_at or self.last_at
        return None if last is None or self.opened_at is None else max(0.0, last - self.opened_at)


@dataclass(frozen=True, slots=True)
class GroupSample:
    """A session of a group."""

    line: SessionRow
    advantage: float | None
    """Advantage in its group as GRPO computes it; `None` = its reward is not known, or its group
    has forks, which are compared branch by branch."""


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The sessions of one task, which are compared with each other."""

    task_id: str
    lines: Sequence[SessionRow]
    run: str | None = None
    """`None` = of all runs."""
    state: str | None = None
    """State of the task on a server."""
    total: int | None = None
    """Sessions that the group will have; `None` = not known."""
    instruction: str | None = None

    @property
    def rewards(self) -> list[float]:
        """Known rewards of the group's sessions."""
        return [line.reward for line in self.lines if line.reward is not None]

    @property
    def mean(self) -> float | None:
        """Mean of the group's known rewards; `None` = there is none."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def deviation(self) -> float | None:
        """Return the population standard deviation of the rewards; `None` = fewer than two."""
        return float(np.std(self.rewards)) if len(self.rewards) > 1 else None

    @property
    def is_flat(self) -> bool:
        """Return whether all rewards of the group are equal, so that no sample gets an
        advantage.
        """
        return len(self.rewards) > 1 and not any(grpo_advantages(self.rewards))

    @property
    def has_forks(self) -> bool:
        """Return whether the group has forks of its own sessions."""
        ids = {line.session_id for line in self.lines}
        return any(line.origin is not None and line.origin.session_id in ids for line in self.lines)

    @property
    def ended(self) -> int:
        """Number of the group's sessions that have ended."""
        return sum(line.status in ENDED for line in self.lines)

    def counterpart(self, row: SessionRow) -> SessionRow | None:
        """Return the session of the group whose reward differs most from that of `row`; `None` =
        there is no other.
        """
        others = (other for other in self.lines if other is not row)
        return max(
            others, key=lambda other: abs((other.reward or 0.0) - (row.reward or 0.0)), default=None
        )

    @property
    def samples(self) -> list[GroupSample]:
        """Return the group's sessions with their advantages, by sample index."""
        lines = sorted(self.lines, key=lambda line: (line.run, line.sample_index, line.session_id))
        rewards = [float("nan") if line.reward is None else line.reward for line in lines]
        advantages = grpo_advantages(rewards)
        has_forks = self.has_forks
        return [
            GroupSample(line, None if has_forks or line.reward is None else float(advantage))
            for line, advantage in zip(lines, advantages, strict=True)
        ]


def origin_of(fork: object, verdict: object = None) -> Origin | None:
    """Return the session and reply that a session was forked from; `None` = it is no fork."""
    if not isinstance(fork, dict):
        return None
    session_id, at, capture = fork.get("session"), fork.get("at"), fork.get("capture") or ""
    if not isinstance(session_id, str) or not isinstance(at, int):
        return None
    known = str(verdict) if verdict else None
    return Origin(session_id, at, str(capture), known)


def last_attempts(lines: Iterable[SessionRow]) -> list[SessionRow]:
    """Return only the last attempt of each session that a server ran again."""
    found: dict[tuple[str, str], tuple[int, SessionRow]] = {}
    for line in lines:
        again = AGAIN.fullmatch(line.session_id)
        name, attempt = (again[1], int(again[2])) if again else (line.session_id, 1)
        if found.get((line.run, name), (0, line))[0] < attempt:
            found[line.run, name] = (attempt, line)
    return [line for _, line in found.values()]


def groups_of(lines: Iterable[SessionRow]) -> list[SampleGroup]:
    """Return sessions grouped by run and task, the group with the newest session first."""
    found: defaultdict[tuple[str, str], list[SessionRow]] = defaultdict(list)
    for line in last_attempts(lines):
        found[line.run, line.task_id].append(line)
    groups = [SampleGroup(task_id, tuple(own), run) for (run, task_id), own in found.items()]
    return sorted(groups, key=lambda group: -max(line.opened_at or 0.0 for line in group.lines))


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Filter of a session list; an empty field matches all."""

    status: str = ""
    """A status, or `failed` = TIMEOUT, ERROR or CANCELLED."""
    cause: str = ""
    harness: str = ""
    task: str = ""
    run: str = ""
    text: str = ""
    """Substring of a session id, task id or error, or of a message."""
    sort: str = ""
    """Order of the list, see `sort_rows`."""

    def takes(self, line: SessionRow, *, said: bool = False) -> bool:
        """Return whether a session matches every field of the filter.

        `said` says whether one of its messages has the text that is searched for.
        """
        return (
            (not self.status or self._status(line))
            and (not self.cause or line.cause == self.cause)
            and (not self.harness or line.harness == self.harness)
            and (not self.task or line.task_id == self.task)
            and (not self.run or line.run == self.run)
            and (not self.text or said or self._text(line))
        )

    def _status(self, line: SessionRow) -> bool:
        return line.status in FAILED if self.status == "failed" else line.status == self.status

    def _text(self, line: SessionRow) -> bool:
        whole = f"{line.session_id} {line.task_id} {line.error or ''}".lower()
        return self.text.lower() in whole


SORT_KEYS: dict[str, Callable[[SessionRow], Any]] = {
    "session": lambda row: row.session_id,
    "task": lambda row: (row.task_id, row.sample_index),
    "harness": lambda row: row.harness,
    "status": lambda row: (row.status, row.cause or ""),
    "reward": lambda row: row.reward,
    "calls": lambda row: row.exchanges,
    "sampled": lambda row: row.sampled,
    "duration": lambda row: row.seconds,
    "opened": lambda row: row.opened_at,
}


def sort_rows(rows: Sequence[SessionRow], sort: str) -> list[SessionRow]:
    """Return rows sorted by a key of `SORT_KEYS`, descending after `-`; any other `sort` = newest
    first.

    Rows whose value is not known come last.
    """
    key = SORT_KEYS.get(sort.removeprefix("-"))
    if key is None:
        return sort_rows(rows, "-opened")
    known = [row for row in rows if key(row) is not None]
    known.sort(key=key, reverse=sort.startswith("-"))
    return [*known, *(row for row in rows if key(row) is None)]


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Sessions that failed for one cause."""

    cause: str
    count: int
    latest: Sequence[SessionRow]
    """The newest sessions."""


def failures_of(lines: Iterable[SessionRow]) -> list[FailureCause]:
    """Return the failed sessions grouped by cause, the most frequent first."""
    found: defaultdict[str, list[SessionRow]] = defaultdict(list)
    for line in lines:
        if line.status in FAILED:
            found[line.cause or line.status.lower()].append(line)
    return [
        FailureCause(cause, len(own), sorted(own, key=lambda one: -(one.ended_at or 0.0))[:3])
        for cause, own in sorted(found.items(), key=lambda item: -len(item[1]))
    ]


@dataclass(frozen=True, slots=True)
class SessionSet:
    """Sessions that are compared with others: those of a run, or of a step of a training."""

    run: str
    version: int | None
    """Policy version that sampled their first token: a training's step begins with the one before
    it. `None` = all sessions of the run."""
    lines: Sequence[SessionRow]
    """The last attempt of each."""
    versions: Sequence[int] = ()
    """Versions of the run's sessions, to choose from."""
    unmeasured: int = 0
    """Ended sessions of the run whose trajectory is not built yet, so that they are left out."""

    @property
    def rewards(self) -> list[float]:
        """Known rewards of the set's sessions."""
        return [line.reward for line in self.lines if line.reward is not None]

    @property
    def failures(self) -> list[FailureCause]:
        """Failed sessions of the set, grouped by cause."""
        return failures_of(self.lines)

    def mean(self, value: str) -> float | None:
        """Return the mean of an attribute (named `value`) over the sessions that have it."""
        known = [one for line in self.lines if (one := getattr(line, value)) is not None]
        return sum(known) / len(known) if known else None


def set_of(
    run: str, lines: Iterable[SessionRow], version: int | None = None, unmeasured: int = 0
) -> SessionSet:
    """Return the sessions of a run, or those of one policy version, as a set to compare."""
    last = last_attempts(lines)
    versions = sorted({line.begun for line in last if line.begun is not None})
    taken = [line for line in last if version is None or line.begun == version]
    return SessionSet(run, version, taken, versions, unmeasured)


def most_different(one: SessionSet, two: SessionSet) -> tuple[str, SessionRow, SessionRow] | None:
    """Return the task whose mean reward differs most between two sets, with a session of each.

    The sessions are the ones with the lowest and the highest reward, in the direction of the
    difference. Sessions without a reward do not count. `None` = no task has rewards in both sets.
    """
    own, other = _rewarded(one.lines), _rewarded(two.lines)
    common = sorted(own.keys() & other.keys())
    if not common:
        return None

    def difference(task_id: str) -> float:
        means = [fmean(reward for reward, _ in side[task_id]) for side in (own, other)]
        return means[1] - means[0]

    task_id = max(common, key=lambda name: abs(difference(name)))
    one_end, other_end = (min, max) if difference(task_id) >= 0 else (max, min)
    reward = itemgetter(0)
    return task_id, one_end(own[task_id], key=reward)[1], other_end(other[task_id], key=reward)[1]


def _rewarded(lines: Iterable[SessionRow]) -> dict[str, list[tuple[float, SessionRow]]]:
    """Return rewards with their sessions, by task."""
    found = defaultdict(list)
    for line in lines:
        if line.reward is not None:
            found[line.task_id].append((line.reward, line))
    return found


def statuses_of(lines: Iterable[SessionRow]) -> dict[str, int]:
    """Return the number of sessions per status, in the order in which pages show them."""
    counts = Counter(line.status for line in lines)
    return {status: counts.pop(status) for status in STATUSES if status in counts} | dict(counts)


def ends_over_time(lines: Iterable[SessionRow], columns: int = 60) -> list[tuple[float, int, int]]:
    """Return how many sessions ended in each of `columns` equal intervals, as `(start of the
    interval, completed, others)`.

    The intervals go from the first to the last end; nothing for fewer than two ends.
    """
    ends = [(line.ended_at, line.status) for line in lines if line.ended_at is not None]
    if len(ends) < 2:
        return []
    times = [at for at, _ in ends]
    first, span = min(times), max(max(times) - min(times), 1e-6)
    done, other = [0] * columns, [0] * columns
    for at, status in ends:
        place = min(columns - 1, int((at - first) / span * columns))
        (done if status == "COMPLETED" else other)[place] += 1
    return [(first + n * span / columns, done[n], other[n]) for n in range(columns)]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run from its folder, without its sessions."""

    name: str
    finished: bool
    expected: int | None = None
    """Sessions that the run will have; `None` = not known."""
    engines: tuple[str, ...] = ()
    error: str | None = None
    """The reason why the run cannot be read."""
    certified: bool | None = None
    """Verdict of its certificate, `True` = trainer and rollout agree; `None` = it has none."""
    scored: tuple[int, int] | None = None
    """Sessions on which several scorers differ, and all that they scored; `None` = they were not
    compared."""


Number = float | int | None


@dataclass(frozen=True, slots=True)
class TrainingCurve:
    """A value over the steps; `None` = a gap."""

    name: str
    label: str
    values: Sequence[Number]


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The course of a training so far."""

    name: str
    """Its folder, relative to the folder that is shown."""
    steps: Sequence[int]
    curves: Mapping[str, Sequence[TrainingCurve]]
    """Charts by title, which has their unit; the curves of a chart share an axis."""
    last: JSON
    """The last step; empty = no step yet."""
    held_out: Sequence[tuple[int, float]]
    """(Step, mean reward) of each evaluation with a reward."""

    @property
    def charts(self) -> list[JSON]:
        """Return the charts in the form that the page's script draws."""
        return [
            {
                "title": title,
                "steps": list(self.steps),
                "curves": [
                    {"label": curve.label, "name": curve.name, "values": list(curve.values)}
                    for curve in chart
                ],
            }
            for title, chart in self.curves.items()
            if any(value is not None for curve in chart for value in curve.values)
        ]

    @property
    def rows(self) -> list[tuple[int, list[Number]]]:
        """Return (step, value of each curve), newest first, for the table below the charts."""
        flat = [curve for chart in self.curves.values() for curve in chart]
        return [(step, [curve.values[n] for curve in flat]) for n, step in enumerate(self.steps)][
            ::-1
        ]

    @property
    def labels(self) -> list[str]:
        """Labels of all curves in the order of the charts."""
        return [curve.label for chart in self.curves.values() for curve in chart]


def training_of(name: str, course: JSON) -> TrainingProgress | None:
    """Return the progress of a training from its course file; `None` = the file is malformed."""
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

    curves = {
        "Reward": (
            TrainingCurve("reward", "reward of the step", values("reward")),
            TrainingCurve("held_out", "held-out tasks", [held.get(step) for step in steps]),
        ),
        "Trainer against rollout, nats": (
            TrainingCurve(
                "logprob_error", "largest logprob error, nats", values("update", "logprob_error")
            ),
        ),
        "Staleness, policy versions": (
            TrainingCurve(
                "lag", "mean staleness, versions", [_lag(by_step.get(step)) for step in steps]
            ),
        ),
        "Times, seconds": (
            TrainingCurve("waited", "waited for groups, s", values("waited_s")),
            TrainingCurve("update", "update, s", values("update", "seconds")),
            TrainingCurve("published", "weights to engines, s", values("published_s")),
        ),
        "Gradient norm": (TrainingCurve("norm", "gradient norm", values("update", "norm")),),
    }
    last = by_step[max(by_step)] if by_step else {}
    return TrainingProgress(name, steps, curves, last, sorted(held.items()))


def _at(step: JSON | None, path: Sequence[str]) -> Number:
    value: object = step
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int | float) else None


def _lag(step: JSON | None) -> float | None:
    """Return the mean staleness of an update's tokens, in policy versions."""
    update = (step or {}).get("update")
    lags = update.get("lags") if isinstance(update, dict) else None
    if not isinstance(lags, dict) or not (tokens := sum(lags.values())):
        return None
    return float(sum(int(lag) * count for lag, count in lags.items()) / tokens)


RECENT_S = 600.0
"""Window of the throughput, if a session ended in it."""

NEWEST = 12
"""Sessions on the overview page."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Throughput of sessions."""

    sessions_per_minute: float
    tokens_per_second: float
    """Sampled tokens of the sessions that ended."""
    live: bool
    """True if it is of the last `RECENT_S`; else of the whole run."""


@dataclass(frozen=True, slots=True)
class Overview:
    """Content of the overview page."""

    runs: Sequence[RunFacts]
    total: int
    """Number of sessions."""
    statuses: dict[str, int]
    expected: int | None
    """Sessions that there will be in all; `None` = not known."""
    failures: Sequence[FailureCause]
    report: Report | None
    """Data quality over all sessions with trajectory facts; `None` = not known."""
    unmeasured: int
    """Ended sessions that are not in the report yet."""
    scores: Sequence[HarnessScore]
    rate: Rate | None
    ends: Sequence[tuple[float, int, int]]
    groups: dict[str, int]
    """Number of groups by state."""
    sampled: int
    """Sampled tokens."""
    exchanges: int
    newest: Sequence[SessionRow]
    trainings: Sequence[TrainingProgress]
    versions: tuple[int, int] | None = None
    """Oldest and newest policy version of the newest sessions."""
    server: JSON | None = None
    """Reply of a rollout server's `/v1/status`."""
    nodes: Sequence[JSON] = field(default_factory=list)


def overview_of(
    lines: Sequence[SessionRow],
    runs: Sequence[RunFacts],
    trainings: Sequence[TrainingProgress],
    *,
    now: float,
    unmeasured: int = 0,
) -> Overview:
    """Return the summary of sessions, runs and trainings for the overview page; `now` is
    Unix time.
    """
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


def newest(lines: Sequence[SessionRow]) -> list[SessionRow]:
    """Return the newest sessions, as many as the overview page lists."""
    return sorted(lines, key=lambda line: -(line.ended_at or line.opened_at or 0.0))[:NEWEST]


def _report(lines: Sequence[SessionRow]) -> Report:
    return report_of(
        (line.session_id, line.harness or "-", line.status, line.measured.stats)
        for line in lines
        if line.measured is not None and "tokens_captured" in line.measured.stats
    )


def _scores(lines: Sequence[SessionRow]) -> list[HarnessScore]:
    return scores_of(
        Attempted(
            line.task_set or line.run, line.harness, line.task_id, line.status, line.cause,
            line.reward,
        )
        for line in lines
        if line.status in ENDED
    )  # fmt: skip


def _groups(lines: Sequence[SessionRow]) -> dict[str, int]:
    found = {"ended": 0, "running": 0}
    for group in groups_of(lines):
        found["ended" if group.ended == len(group.lines) else "running"] += 1
    return found


def _rate(lines: Sequence[SessionRow], now: float) -> Rate | None:
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
