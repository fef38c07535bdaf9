"""Scores of a batch: pass@k, mean reward with its interval, failures by cause. Pure.

Law 5 holds here too. A session counts as an attempt if its end is the agent's own doing: it was
scored, or it crashed, timed out, reached a limit or never used the model, which is an attempt
without success. What failed on our side (infrastructure, evaluator, a cancelled session) is no
attempt; it is counted and named, and changes no number.

pass@k is the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), averaged over the tasks
with at least k attempts. Intervals are 95 % by the normal approximation, over tasks: samples of one
task are not independent.

`disagreement_of` compares several scorers on the same sessions: where a checker may be wrong.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import mean

from bridle.types import JSON, Cause, SessionStatus

PASS = 1.0
"""The reward from which on an attempt is a success."""
Z = 1.959963985
"""97.5 % quantile of the normal distribution."""
AGENTS_OWN = frozenset(
    {Cause.HARNESS_CRASH, Cause.HARNESS_NO_CALL, Cause.HARNESS_MODEL_ERROR, Cause.LIMIT}
)


@dataclass(frozen=True, slots=True)
class Attempted:
    """One session, as a report needs it."""

    task_set: str
    harness: str
    task_id: str
    status: str
    cause: str | None
    reward: float | None

    @property
    def is_attempt(self) -> bool:
        """Return whether the session counts as an attempt of the agent."""
        return (
            self.reward is not None
            or self.cause in AGENTS_OWN
            or (self.cause == Cause.TIMEOUT and self.status == SessionStatus.TIMEOUT)
        )

    @property
    def is_pass(self) -> bool:
        return self.reward is not None and self.reward >= PASS


@dataclass(frozen=True, slots=True)
class HarnessScore:
    """The sessions of one harness on one task set."""

    task_set: str
    harness: str
    tasks: int
    sessions: int
    attempts: int
    scored: int
    mean: float | None
    """Mean reward of what was scored; `None` = nothing was."""
    half_width: float | None
    """Of the mean's 95 % interval; `None` = fewer than two tasks were scored."""
    pass_at: dict[int, float]
    """k -> pass@k."""
    tasks_at: dict[int, int]
    """k -> tasks with at least k attempts, which pass@k is averaged over."""
    causes: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> JSON:
        """Return the same numbers; `interval` is `[low, high]`."""
        interval = None
        if self.mean is not None and self.half_width is not None:
            interval = [self.mean - self.half_width, self.mean + self.half_width]
        return {
            "task_set": self.task_set,
            "harness": self.harness,
            "tasks": self.tasks,
            "sessions": self.sessions,
            "attempts": self.attempts,
            "scored": self.scored,
            "reward_mean": self.mean,
            "interval": interval,
            "pass_at": {str(k): value for k, value in self.pass_at.items()},
            "tasks_at": {str(k): count for k, count in self.tasks_at.items()},
            "causes": self.causes,
        }


def pass_at_k(attempts: int, passes: int, k: int) -> float:
    """Return the chance that at least one of `k` attempts, drawn from those made, is a success."""
    return 1.0 - math.comb(attempts - passes, k) / math.comb(attempts, k)


def scores_of(sessions: Iterable[Attempted]) -> list[HarnessScore]:
    """Return one score for each harness on each task set, by name."""
    groups: defaultdict[tuple[str, str], list[Attempted]] = defaultdict(list)
    for session in sessions:
        groups[session.task_set, session.harness].append(session)
    return [_score(*names, group) for names, group in sorted(groups.items())]


def from_summaries(lines: Iterable[JSON]) -> Iterator[Attempted]:
    """Yield sessions from the lines of a run's summary."""
    for line in lines:
        yield Attempted(
            task_set=line.get("task_set") or "-",
            harness=line["harness"] or "-",
            task_id=line["task_id"],
            status=line["status"],
            cause=line["cause"],
            reward=line["reward"],
        )


def _score(task_set: str, harness: str, group: Sequence[Attempted]) -> HarnessScore:
    by_task: defaultdict[str, list[Attempted]] = defaultdict(list)
    for session in group:
        by_task[session.task_id].append(session)
    counts = [
        (sum(one.is_attempt for one in sessions), sum(one.is_pass for one in sessions))
        for sessions in by_task.values()
    ]
    most = max(attempts for attempts, _ in counts)
    pass_at, tasks_at = {}, {}
    for k in (1 << power for power in range(most.bit_length())):
        able = [pass_at_k(attempts, passes, k) for attempts, passes in counts if attempts >= k]
        pass_at[k], tasks_at[k] = sum(able) / len(able), len(able)
    rewards = [
        [one.reward for one in sessions if one.reward is not None] for sessions in by_task.values()
    ]
    mean, half_width = clustered_mean([some for some in rewards if some])
    return HarnessScore(
        task_set=task_set,
        harness=harness,
        tasks=len(by_task),
        sessions=len(group),
        attempts=sum(attempts for attempts, _ in counts),
        scored=sum(map(len, rewards)),
        mean=mean,
        half_width=half_width,
        pass_at=pass_at,
        tasks_at=tasks_at,
        causes=dict(Counter(str(one.cause) for one in group if one.cause is not None)),
    )


def clustered_mean(clusters: Sequence[Sequence[float]]) -> tuple[float | None, float | None]:
    """Mean of all values, and half the width of its 95 % interval with errors clustered.

    `None` for the mean without values, and for the width with fewer than two clusters.
    """
    count = sum(map(len, clusters))
    if count == 0:
        return None, None
    mean = math.fsum(value for values in clusters for value in values) / count
    if len(clusters) < 2:
        return mean, None
    squares = math.fsum(math.fsum(value - mean for value in values) ** 2 for values in clusters)
    error = math.sqrt(squares * len(clusters) / (len(clusters) - 1)) / count
    return mean, Z * error


CLOSE = 1e-6
"""Rewards that differ by no more are the same."""


@dataclass(frozen=True, slots=True)
class ScoredSession:
    """The rewards that several scorers gave one session."""

    session_id: str
    task_id: str
    rewards: Mapping[str, float | None]
    """Scorer -> reward; `None` = it failed, or the session has none."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Scorer -> why it failed."""

    @property
    def spread(self) -> float:
        """Return the difference of the largest and the smallest reward."""
        known = [reward for reward in self.rewards.values() if reward is not None]
        return max(known) - min(known) if known else 0.0


@dataclass(frozen=True, slots=True)
class PairAgreement:
    """The share of sessions on which two scorers differ."""

    scorers: tuple[str, str]
    compared: int
    """Sessions to which both gave a reward."""
    differing: int
    difference: float | None
    """Mean of the absolute differences over all compared sessions; `None` = there are none."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Several scorers on the same stored sessions."""

    made_at: float
    """Unix time, seconds."""
    scorers: Sequence[str]
    sessions: Sequence[ScoredSession]
    """Those with the largest spread first."""
    pairs: Sequence[PairAgreement]
    """Those that differ in the largest share of their sessions first."""

    @property
    def differing(self) -> Sequence[ScoredSession]:
        return [one for one in self.sessions if one.spread > CLOSE]


def disagreement_of(
    scorers: Sequence[str], sessions: Sequence[ScoredSession], made_at: float
) -> Disagreement:
    """Order sessions and pairs of scorers by how much they differ."""
    pairs = [_pair(one, two, sessions) for one, two in combinations(scorers, 2)]
    pairs.sort(key=lambda pair: -pair.differing / max(1, pair.compared))
    ordered = sorted(sessions, key=lambda session: -session.spread)
    return Disagreement(made_at, scorers, ordered, pairs)


def _pair(one: str, two: str, sessions: Sequence[ScoredSession]) -> PairAgreement:
    both = [(session.rewards.get(one), session.rewards.get(two)) for session in sessions]
    apart = [abs(left - right) for left, right in both if left is not None and right is not None]
    differing = sum(value > CLOSE for value in apart)
    return PairAgreement((one, two), len(apart), differing, mean(apart) if apart else None)
