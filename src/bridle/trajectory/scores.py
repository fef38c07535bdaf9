"""Scores of a batch: pass@k, mean reward with its interval, failures by cause. Pure.

Law 5 holds here too. A session counts as an attempt if its end is the agent's own doing: it was
scored, or it crashed, timed out, reached a limit or never used the model, which is an attempt
without success. What failed on our side (infrastructure, evaluator, a cancelled session) is no
attempt; it is counted and named, and changes no number.

pass@k is the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), averaged over the tasks
with at least k attempts. Intervals are 95 % by the normal approximation, over tasks: samples of one
task are not independent.

`disagreement_of` compares several scorers on the same sessions: where a checker may be wrong.

`report_of` answers whether the data of a batch is right, from the law numbers of its sessions: it
adds up `metadata.stats` of many trajectories, `lines` writes the page, `as_json` the same numbers.
What a reader should act on begins with `!`.
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
        """Return whether the session counts as an attempt of the agent, unlike one that failed by
        no fault of it.
        """
        return (
            self.reward is not None
            or self.cause in AGENTS_OWN
            or (self.cause == Cause.TIMEOUT and self.status == SessionStatus.TIMEOUT)
        )

    @property
    def is_pass(self) -> bool:
        """Return whether the session's reward counts as a success."""
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
        """Return the score's numbers as JSON; `interval` is `[low, high]`."""
        interval = None
        if self.mean is not None and self.half_width is not None:
            interval = [self.mean - self.half_width, self.mean + self.half_width]
        names = ("task_set", "harness", "tasks", "sessions", "attempts", "scored")
        return {
            **{name: getattr(self, name) for name in names},
            "reward_mean": self.mean,
            "interval": interval,
            "pass_at": {str(k): value for k, value in self.pass_at.items()},
            "tasks_at": {str(k): count for k, count in self.tasks_at.items()},
            "causes": self.causes,
        }


def pass_at_k(attempts: int, passes: int, k: int) -> float:
    """Return pass@k: the chance that at least one of `k` of the `attempts` passes, drawn at
    random.
    """
    return 1.0 - math.comb(attempts - passes, k) / math.comb(attempts, k)


def scores_of(sessions: Iterable[Attempted]) -> list[HarnessScore]:
    """Return one score for each pair of task set and harness, sorted by these names."""
    groups: defaultdict[tuple[str, str], list[Attempted]] = defaultdict(list)
    for session in sessions:
        groups[session.task_set, session.harness].append(session)
    return [_score(*names, group) for names, group in sorted(groups.items())]


def from_summaries(lines: Iterable[JSON]) -> Iterator[Attempted]:
    """Yield a session for each line of a run's summary."""
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
    """Return the mean of all values, and half the width of its 95 % interval by clustered errors.

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
        """Difference between the largest and the smallest reward that scorers gave the session."""
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
        """Sessions to which the scorers gave different rewards."""
        return [one for one in self.sessions if one.spread > CLOSE]


def disagreement_of(
    scorers: Sequence[str], sessions: Sequence[ScoredSession], made_at: float
) -> Disagreement:
    """Compare the rewards of several scorers on the same sessions.

    Sessions and pairs of scorers with the largest differences come first.
    """
    pairs = [_pair(one, two, sessions) for one, two in combinations(scorers, 2)]
    pairs.sort(key=lambda pair: -pair.differing / max(1, pair.compared))
    ordered = sorted(sessions, key=lambda session: -session.spread)
    return Disagreement(made_at, scorers, ordered, pairs)


def _pair(one: str, two: str, sessions: Sequence[ScoredSession]) -> PairAgreement:
    both = [(session.rewards.get(one), session.rewards.get(two)) for session in sessions]
    apart = [abs(left - right) for left, right in both if left is not None and right is not None]
    differing = sum(value > CLOSE for value in apart)
    return PairAgreement((one, two), len(apart), differing, mean(apart) if apart else None)


# ---- the page over a batch


IDENTITY = frozenset(
    {"digest_mismatch", "unknown_parent", "parent_lost", "no_parent", "cycle", "duplicate",
     "kept_beyond_parent", "foreign_session", "missing_exchange", "damaged_row"}
)  # fmt: skip
"""Breaks that mean an exchange could not be proved to be what the engine was given."""

LINES_OF_FORKS = 12
"""Kinds of fork that the page shows; the rest are one line."""

LOW_MERGE_RATIO = 0.9
"""Below this a batch costs its trainer many times its tokens."""

TURNS = ("shown", "verbatim", "rerendered", "foreign", "given")
"""Counts of assistant turns, as `metadata.stats` has them behind `turns_`."""


@dataclass(slots=True)
class Report:
    """A batch in numbers; all tokens are sampled ones."""

    sessions: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    exchanges: int = 0
    traces: int = 0
    captured: int = 0
    trained: int = 0
    excluded: Counter[str] = field(default_factory=Counter)
    """Tokens by reason."""
    unequal: list[str] = field(default_factory=list)
    """Sessions in which captured is not trained + excluded."""
    unproved: Counter[str] = field(default_factory=Counter)
    """Failed checks of token identity, by name."""
    forks: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Places where a conversation continued and its ids did not, by harness and reason."""
    showing: int = 0
    """Agent exchanges that show a turn that was sampled."""
    extending: int = 0
    """Those of them whose prompt extends its parent's ids."""
    turns: Counter[str] = field(default_factory=Counter)
    """Assistant turns that requests showed, by `TURNS`."""
    rerendered: int = 0
    """Sampled tokens that a prompt showed as other ids."""
    uncounted: int = 0
    """Sessions whose statistics do not say how turns were shown: of older versions."""
    drift: Counter[str] = field(default_factory=Counter)
    spliced: int = 0
    """Tokens in spliced spans: the exceptions to law 1 that were asked for."""
    overlong: int = 0
    cut: Counter[str] = field(default_factory=Counter)
    """Sessions that count as truncated, by why."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Fields, betas and blocks of requests that the gateway did not know, by name."""
    unenforced: Counter[str] = field(default_factory=Counter)
    """Fields of requests that were not complied with, by name."""
    rejected: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Harness and status -> sampled tokens of rejected replies, and of all; statuses without
    rejected ones too."""
    malformed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls whose arguments are no JSON object, by harness and status."""
    untrained: list[str] = field(default_factory=list)
    """Sessions of which nothing trains."""

    @property
    def merge_ratio(self) -> float | None:
        """Share of the agent's exchanges with earlier replies in their prompt that extend such an
        exchange token by token; `None` = there are none.
        """
        return self.extending / self.showing if self.showing else None

    def add(self, session_id: str, harness: str, status: str, stats: JSON) -> None:
        """Add the status and the build statistics of one session to the report's totals."""
        self.sessions += 1
        self.statuses[status] += 1
        captured, trained = stats["tokens_captured"], stats["tokens_trained"]
        excluded = stats["tokens_excluded"]
        self.exchanges += stats["exchanges"]
        self.traces += stats["traces"]
        self.captured += captured
        self.trained += trained
        self.excluded.update(excluded)
        if captured != trained + sum(excluded.values()):
            self.unequal.append(session_id)
        if not trained:
            self.untrained.append(session_id)
        passed_over, of = self.rejected.get((harness, status), (0, 0))
        passed_over += stats.get("rejected", {}).get("tokens", 0)
        self.rejected[harness, status] = passed_over, of + captured
        if malformed := stats.get("malformed_calls", 0):
            self.malformed[harness, status] += malformed
        for found in stats["breaks"]:
            if found["reason"] in IDENTITY:
                self.unproved[found["reason"]] += 1
            else:
                self.forks[harness, found["reason"]] += 1
        self._add_lineage(stats)
        self.drift.update(stats["drift"])
        self.spliced += stats.get("spliced", {}).get("tokens", 0)
        self.unknown.update(stats.get("unknown", {}))
        self.unenforced.update(stats.get("unenforced", {}))
        self.overlong += stats.get("overlong", 0)
        if (cut := stats.get("truncated")) is not None:
            self.cut[cut] += 1

    def _add_lineage(self, stats: JSON) -> None:
        if (merging := stats.get("merging")) is not None:
            self.showing += merging["showing"]
            self.extending += merging["extending"]
        if stats.get("turns_shown") is None:
            self.uncounted += 1
            return
        self.turns.update({name: stats[f"turns_{name}"] for name in TURNS})
        self.rerendered += stats["tokens_rerendered"]

    @property
    def counted(self) -> bool:
        """Return whether any session recorded how its turns came back in later prompts."""
        return self.uncounted < self.sessions

    def as_json(self) -> JSON:
        return {
            "sessions": self.sessions,
            "statuses": dict(sorted(self.statuses.items())),
            "exchanges": self.exchanges,
            "traces": self.traces,
            "tokens_captured": self.captured,
            "tokens_trained": self.trained,
            "tokens_excluded": dict(sorted(self.excluded.items())),
            "law_1_unproved": dict(sorted(self.unproved.items())),
            "law_2_unequal": self.unequal,
            **{f"turns_{name}": self.turns[name] if self.counted else None for name in TURNS},
            "tokens_rerendered": self.rerendered if self.counted else None,
            "sessions_uncounted": self.uncounted,
            "merge_ratio": self.merge_ratio,
            "forks": [
                {"harness": harness, "reason": reason, "count": count}
                for (harness, reason), count in _ranked(self.forks)
            ],
            "drift": dict(sorted(self.drift.items())),
            "tokens_spliced": self.spliced,
            "overlong_traces": self.overlong,
            "truncated_sessions": dict(sorted(self.cut.items())),
            "unknown": dict(sorted(self.unknown.items())),
            "unenforced": dict(sorted(self.unenforced.items())),
            "rejected": [
                {"harness": harness, "status": status, "tokens": passed_over, "of": of}
                for (harness, status), (passed_over, of) in sorted(self.rejected.items())
            ],
            "malformed_calls": [
                {"harness": harness, "status": status, "calls": count}
                for (harness, status), count in sorted(self.malformed.items())
            ],
            "untrained_sessions": self.untrained,
        }

    def lines(self) -> Iterator[str]:
        yield f"sessions  {self.sessions} ({_listed(self.statuses)})"
        yield f"calls     {self.exchanges} in {self.traces} traces"
        yield from self._lineage()
        yield ""
        yield from self._laws()
        yield ""
        yield f"excluded  {share(sum(self.excluded.values()), self.captured)} of sampled tokens"
        for reason, count in self.excluded.most_common():
            yield f"  {reason:<14} {count:>10}  {share(count, self.captured)}"
        for (harness, status), (passed_over, of) in sorted(self.rejected.items()):
            if passed_over:
                part = share(passed_over, of)
                yield f"rejected  {part} of what {harness} sampled in {status} sessions"
        for (harness, status), count in sorted(self.malformed.items()):
            yield f"malformed {count} tool calls of {harness} in {status} sessions"
        yield ""
        yield f"drift     {_listed(self.drift)}"
        yield f"forks     {sum(self.forks.values())}"
        ranked = _ranked(self.forks)
        for (harness, reason), count in ranked[:LINES_OF_FORKS]:
            yield f"  {harness:<18} {reason:<22} {count:>6}"
        if rest := ranked[LINES_OF_FORKS:]:
            yield f"  {len(rest)} other kinds {sum(count for _, count in rest):>33}"
        yield from self._limits()

    def _lineage(self) -> Iterator[str]:
        """Write the lineage of the assistant turns that requests showed."""
        turns = self.turns
        if self.counted:
            shown = turns["shown"]
            bad = "! " if turns["verbatim"] < LOW_MERGE_RATIO * shown else ""
            yield (
                f"{bad}turns     {shown} shown: {turns['verbatim']} verbatim"
                f" ({share(turns['verbatim'], shown)}), {turns['rerendered']} rerendered"
                f" ({self.rerendered} tokens), {turns['foreign']} foreign"
                f"; {turns['given']} given"
            )
        if self.uncounted:
            yield f"turns     - in {self.uncounted} sessions, which were not counted when captured"
        ratio = self.merge_ratio
        if ratio is None:
            yield "merge ratio  - (no call of an agent is known to show a turn that was sampled)"
            return
        low = "! " if ratio < LOW_MERGE_RATIO else ""
        yield (
            f"{low}merge ratio  {ratio:.3f} ({self.extending} of {self.showing} agent calls"
            " that show a sampled turn extend its ids)"
        )

    def _laws(self) -> Iterator[str]:
        failed = sum(self.unproved.values())
        if failed:
            yield f"! law 1   {failed} calls are not proved: {_listed(self.unproved)}"
        else:
            yield "law 1     holds: every trace is what the engine was given and sampled"
        if self.spliced:
            yield f"          but for {self.spliced} tokens in spans that were spliced on demand"
        held = f"captured {self.captured} = trained {self.trained} + excluded "
        held += str(sum(self.excluded.values()))
        if self.unequal:
            yield f"! law 2   DOES NOT HOLD in {', '.join(self.unequal[:3])}: {held}"
        else:
            yield f"law 2     holds: {held}"

    def _limits(self) -> Iterator[str]:
        yield from without_effect(self.unknown, self.unenforced)
        if self.overlong:
            yield f"overlong  {self.overlong} traces"
        if self.cut:
            yield f"cut       {sum(self.cut.values())} sessions ({_listed(self.cut)})"
        if self.untrained:
            shown = ", ".join(self.untrained[:3]) + (", ..." if len(self.untrained) > 3 else "")
            yield f"! nothing trains in {len(self.untrained)} sessions: {shown}"


def without_effect(unknown: Counter[str], unenforced: Counter[str]) -> Iterator[str]:
    """Yield report lines on the parts of requests that the gateway did not know or did not
    enforce.
    """
    if unknown:
        yield f"! unknown to the gateway, not acted on: {_listed(unknown)}"
    if unenforced:
        yield f"asked for and not enforced: {_listed(unenforced)}"


def report_of(sessions: Iterable[tuple[str, str, str, JSON]]) -> Report:
    """Return a batch's report from `(session id, harness, status, stats)` of each session."""
    report = Report()
    for session_id, harness, status, stats in sessions:
        report.add(session_id, harness, status, stats)
    return report


def _ranked(forks: Counter[tuple[str, str]]) -> list[tuple[tuple[str, str], int]]:
    return sorted(forks.items(), key=lambda item: (-item[1], item[0]))


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"


def share(part: float, whole: float) -> str:
    """Return `part` of `whole` in percent, as text."""
    return f"{100 * part / whole if whole else 0:.1f} %"
