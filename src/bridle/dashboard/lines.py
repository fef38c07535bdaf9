"""Rows of session lists, their groups and totals. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bridle.trajectory.credit import grpo_advantages
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON

FAILED = frozenset({"TIMEOUT", "ERROR", "CANCELLED"})
ENDED = FAILED | {"COMPLETED"}

AGAIN = re.compile(r"(.+\.\d+)\.r(\d+)")
"""The id of a run of a server's session that is not its first: the session's id, which run."""

STATUSES = (
    *("COMPLETED", "TIMEOUT", "ERROR", "CANCELLED", "EVALUATING", "BUILDING", "RUNNING"),
    *("READY", "INITIALIZING", "REGISTERED", "QUEUED"),
)
"""In the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Facts that a session's trajectory adds to its row."""

    stats: JSON
    """`metadata["stats"]`: the law numbers."""
    versions: tuple[int, int] | None
    """Oldest and newest policy version that sampled; `None` = nothing was sampled."""
    turns: int
    """Exchanges that lie on a trace."""

    @property
    def trained(self) -> int:
        return int(self.stats.get("tokens_trained") or 0)

    @property
    def excluded(self) -> dict[str, int]:
        """Sampled tokens that do not, by reason."""
        return dict(self.stats.get("tokens_excluded") or {})


def measured_of(trajectory: Trajectory) -> Measured:
    """Extract the facts for a row from a trajectory."""
    spans = [trace.metadata.get("policy_versions") for trace in trajectory.traces]
    known = [span for span in spans if span]
    return Measured(
        stats=trajectory.metadata.get("stats") or {},
        versions=(min(one[0] for one in known), max(one[1] for one in known)) if known else None,
        turns=len({name for trace in trajectory.traces for name in trace.exchange_ids}),
    )


@dataclass(frozen=True, slots=True)
class Line:
    """A session as lists show it."""

    session_id: str
    run: str
    """Name of the run that it belongs to."""
    task_id: str = ""
    sample_index: int = 0
    task_set: str = ""
    harness: str = ""
    harness_version: str = ""
    runtime: str = ""
    status: str = "RUNNING"
    """RUNNING where it has no outcome."""
    cause: str | None = None
    error: str | None = None
    reward: float | None = None
    opened_at: float | None = None
    """Unix time, seconds."""
    ended_at: float | None = None
    last_at: float | None = None
    """When it was last heard of."""
    exchanges: int | None = None
    """`None` = not known."""
    sampled: int | None = None
    """Tokens."""
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds per stage."""
    measured: Measured | None = None
    """`None` = not built yet."""
    abandoned: bool = False
    """Whether its run is over although it has no outcome: its process was killed."""

    @property
    def seconds(self) -> float | None:
        """From opening to end, or to what was last heard of it."""
        last = self.ended_at or self.last_at
        return None if last is None or self.opened_at is None else max(0.0, last - self.opened_at)


@dataclass(frozen=True, slots=True)
class Sample:
    """A session of a group."""

    line: Line
    advantage: float | None
    """Against its group, as GRPO has it; `None` = its reward is not known."""


@dataclass(frozen=True, slots=True)
class Group:
    """The sessions of one task."""

    task_id: str
    lines: Sequence[Line]
    run: str | None = None
    """`None` = of all runs."""
    state: str | None = None
    """What a server says of it."""
    total: int | None = None
    """Sessions that it is to have; `None` = not known."""
    instruction: str | None = None

    @property
    def rewards(self) -> list[float]:
        return [line.reward for line in self.lines if line.reward is not None]

    @property
    def mean(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def deviation(self) -> float | None:
        """Of the known rewards, population form; `None` = fewer than two."""
        return float(np.std(self.rewards)) if len(self.rewards) > 1 else None

    @property
    def is_flat(self) -> bool:
        """Return whether all rewards of the group are equal, so that no sample gets an
        advantage.
        """
        return len(self.rewards) > 1 and not any(grpo_advantages(self.rewards))

    @property
    def ended(self) -> int:
        return sum(line.status in ENDED for line in self.lines)

    @property
    def samples(self) -> list[Sample]:
        """The sessions with their advantages, in the order of samples."""
        lines = sorted(self.lines, key=lambda line: (line.run, line.sample_index, line.session_id))
        rewards = [float("nan") if line.reward is None else line.reward for line in lines]
        advantages = grpo_advantages(rewards)
        return [
            Sample(line, None if line.reward is None else float(advantage))
            for line, advantage in zip(lines, advantages, strict=True)
        ]


def last_attempts(lines: Iterable[Line]) -> list[Line]:
    """Without the runs of a session that a server ran again: the last one of each counts."""
    found: dict[tuple[str, str], tuple[int, Line]] = {}
    for line in lines:
        again = AGAIN.fullmatch(line.session_id)
        name, attempt = (again[1], int(again[2])) if again else (line.session_id, 1)
        if found.get((line.run, name), (0, line))[0] < attempt:
            found[line.run, name] = (attempt, line)
    return [line for _, line in found.values()]


def groups_of(lines: Iterable[Line]) -> list[Group]:
    """The groups in which sessions belong, those of the newest session first."""
    found: defaultdict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in last_attempts(lines):
        found[line.run, line.task_id].append(line)
    groups = [Group(task_id, tuple(own), run) for (run, task_id), own in found.items()]
    return sorted(groups, key=lambda group: -max(line.opened_at or 0.0 for line in group.lines))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Filter of a session list; an empty field matches all."""

    status: str = ""
    """A status, or `failed` for all that did not complete."""
    cause: str = ""
    harness: str = ""
    task: str = ""
    run: str = ""
    text: str = ""
    """Part of a session id, task id or error."""

    def takes(self, line: Line) -> bool:
        """Return whether the session matches every field."""
        return (
            (not self.status or self._status(line))
            and (not self.cause or line.cause == self.cause)
            and (not self.harness or line.harness == self.harness)
            and (not self.task or line.task_id == self.task)
            and (not self.run or line.run == self.run)
            and (not self.text or self._text(line))
        )

    def _status(self, line: Line) -> bool:
        return line.status in FAILED if self.status == "failed" else line.status == self.status

    def _text(self, line: Line) -> bool:
        whole = f"{line.session_id} {line.task_id} {line.error or ''}".lower()
        return self.text.lower() in whole


@dataclass(frozen=True, slots=True)
class Failure:
    """Sessions that failed of one cause."""

    cause: str
    count: int
    latest: Sequence[Line]
    """The newest of them."""


def failures_of(lines: Iterable[Line], latest: int = 3) -> list[Failure]:
    """Group the sessions that did not complete by cause, the most frequent first."""
    found: defaultdict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if line.status in FAILED:
            found[line.cause or line.status.lower()].append(line)
    counts = Counter({cause: len(own) for cause, own in found.items()})
    return [
        Failure(cause, count, sorted(found[cause], key=lambda one: -(one.ended_at or 0.0))[:latest])
        for cause, count in counts.most_common()
    ]


def statuses_of(lines: Iterable[Line]) -> dict[str, int]:
    """Count the sessions per status, in the order in which pages show them."""
    counts = Counter(line.status for line in lines)
    return {status: counts.pop(status) for status in STATUSES if status in counts} | dict(counts)


def ends_over_time(lines: Iterable[Line], columns: int = 60) -> list[tuple[float, int, int]]:
    """Count the ended sessions in each of `columns` equal intervals from the first to the last end.

    `(start of the span, completed, others)`; nothing for fewer than two ends.
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
