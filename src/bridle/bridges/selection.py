"""Selection of training examples by quality, with counts of the rejected ones.

Rejection sampling in two steps: every example is judged by itself (`Rules`), then the examples of a
task against each other: what says the same as an earlier one goes, and of the rest the best `keep`
stay. Nothing is dropped without a reason that the statistics count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pydantic import Field

from bridle.bridges.examples import Example, examples_of
from bridle.capture.records import SessionCapture
from bridle.config import Settings
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON, SessionStatus


class Rules(Settings):
    """Conditions that an example must meet. A rule that is not given accepts everything."""

    statuses: tuple[SessionStatus, ...] = (SessionStatus.COMPLETED,)
    """The end that its session must have had."""
    min_reward: float | None = None
    """Least reward; an unknown reward does not do."""
    max_reward: float | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens, prompt and response together; says nothing about text without ids."""
    min_turns: int | None = Field(default=None, ge=1)
    """Least number of turns of the model."""
    max_turns: int | None = Field(default=None, ge=1)
    rejected: bool = False
    """True if replies are taken that the harness read and did not continue from."""
    finish: tuple[str, ...] = ()
    """Finish reasons of the last turn that will do, e.g. `stop`."""
    max_repetition: float | None = Field(default=None, ge=0, le=1)
    """Most repetition: the share of runs of 8 sampled tokens that stood there before."""
    unique: bool = False
    """Of a task's examples in which the model said the same, take one."""
    keep: int | None = Field(default=None, ge=1)
    """Most sessions of a task, those with the highest reward first, then those with fewer
    tokens."""

    def against(self, example: Example) -> str | None:
        """Return the first reason why an example is refused; `None` = it is taken."""
        return next((reason for reason, fails in self._checks(example) if fails), None)

    def _checks(self, example: Example) -> Iterator[tuple[str, bool]]:
        """Yield every rule that an example can fail."""
        reward = example.reward
        judged = self.min_reward is not None or self.max_reward is not None
        yield "status", example.trajectory.status not in self.statuses
        yield "reward_unknown", judged and reward is None
        yield "reward", not _within(reward, self.min_reward, self.max_reward)
        yield "length", not _within(example.tokens, None, self.max_tokens)
        yield "turns", not _within(example.turns, self.min_turns, self.max_turns)
        yield "rejected", example.rejected and not self.rejected
        yield "finish", bool(self.finish) and example.finish_reason not in self.finish
        most = self.max_repetition
        yield "repetition", most is not None and example.repetition > most


def _within(value: float | None, least: float | None, most: float | None) -> bool:
    return value is None or not (
        (least is not None and value < least) or (most is not None and value > most)
    )


@dataclass(slots=True)
class SourceCounts:
    """The sessions of one source (repository or task set, and harness)."""

    attempted: int = 0
    accepted: int = 0
    turns: int = 0
    """Of accepted sessions."""
    tokens: int = 0
    """Tokens that train, in accepted examples."""
    hours: float = 0.0
    """Of all sessions, one after the other."""
    engine_s: float = 0.0
    """Seconds of model calls of all sessions, one after the other."""

    def json(self) -> JSON:
        """Return the counts as JSON, with the shares that people ask for."""
        return {
            "attempted": self.attempted,
            "accepted": self.accepted,
            "acceptance": self.accepted / self.attempted if self.attempted else None,
            "turns": self.turns,
            "turns_mean": self.turns / self.accepted if self.accepted else None,
            "tokens": self.tokens,
            "hours": round(self.hours, 4),
            "engine_s": round(self.engine_s, 2),
        }


@dataclass(slots=True)
class Survey:
    """Accepted and rejected examples of many sessions."""

    accepted: dict[str, frozenset[str]] = field(default_factory=dict)
    """Session id -> its examples (`trace_id`) that were taken."""
    sources: dict[str, SourceCounts] = field(default_factory=dict)
    """`repository / harness` -> counts, sorted; a task of none counts under its task set."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Reason -> sessions of which nothing was taken; the reason of the first example."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> examples that were not taken, of all sessions."""
    tasks: int = 0
    solved: int = 0
    """Tasks of which something was taken."""
    wall_hours: float = 0.0
    """In which at least one session ran."""
    examples: int = 0

    def json(self) -> JSON:
        """Return the object of `statistics.json` and `--json`."""
        whole = SourceCounts()
        for tally in self.sources.values():
            for name in SourceCounts.__dataclass_fields__:
                setattr(whole, name, getattr(whole, name) + getattr(tally, name))
        return {
            **whole.json(),
            "wall_hours": round(self.wall_hours, 4),
            "examples": self.examples,
            "tasks": self.tasks,
            "tasks_accepted": self.solved,
            "rejected": dict(sorted(self.rejected.items())),
            "examples_left_out": dict(sorted(self.left_out.items())),
            "sources": {name: tally.json() for name, tally in self.sources.items()},
        }


@dataclass(frozen=True, slots=True)
class _Light:
    """Facts about an example that are kept between the two steps."""

    session_id: str
    trace_id: str
    reward: float
    tokens: int
    trained: int
    turns: int
    digest: bytes


def survey(sessions: Iterable[tuple[SessionCapture, Trajectory]], rules: Rules) -> Survey:
    """Judge all sessions, one at a time; memory grows with their number, not with their tokens."""
    found = Survey()
    by_task: defaultdict[str, list[_Light]] = defaultdict(list)
    why: dict[str, str] = {}
    source_of: dict[str, str] = {}
    spans: list[tuple[float, float]] = []
    for capture, trajectory in sessions:
        record, outcome = capture.session, capture.outcome
        source = source_of[record.session_id] = _source(capture)
        tally = found.sources.setdefault(source, SourceCounts())
        tally.attempted += 1
        tally.engine_s += sum(exchange.duration_s for exchange in capture.exchanges)
        by_task[record.task_id or ""] += []
        if outcome is not None:
            tally.hours += max(0.0, outcome.ended_at - record.opened_at) / 3600
            spans.append((record.opened_at, outcome.ended_at))
        for example in (offered := examples_of(trajectory, capture)):
            if (reason := rules.against(example)) is not None:
                found.left_out[reason] += 1
                why.setdefault(record.session_id, reason)
            else:
                by_task[record.task_id or ""].append(_light(example, record.session_id, rules))
        if not offered:
            good = trajectory.status in rules.statuses
            why[record.session_id] = "nothing_sampled" if good else "status"
    for offers in by_task.values():
        _choose(offers, rules, found, why, source_of)
    found.tasks = len(by_task)
    found.rejected = Counter(why[name] for name in why if name not in found.accepted)
    found.sources = dict(sorted(found.sources.items()))
    found.wall_hours = _covered(spans) / 3600
    return found


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return seconds that at least one of the spans covers: a pause before a resume is not
    counted.
    """
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _source(capture: SessionCapture) -> str:
    kept = capture.session.metadata
    facts = kept.get("task_metadata") or {}
    origin = next((facts[key] for key in ("repo", "package", "task_set") if facts.get(key)), None)
    return " / ".join(str(name) for name in (origin, kept.get("harness")) if name) or "unnamed"


def _light(example: Example, session_id: str, rules: Rules) -> _Light:
    return _Light(
        session_id,
        example.trace_id,
        float("-inf") if example.reward is None else example.reward,
        example.tokens or 0,
        example.trained,
        example.turns,
        example.digest if rules.unique else b"",
    )


def _choose(
    offers: list[_Light],
    rules: Rules,
    found: Survey,
    why: dict[str, str],
    source_of: Mapping[str, str],
) -> None:
    """Take of one task's examples what `unique` and `keep` leave."""
    best = {
        name: (-max(o.reward for o in of), min(o.tokens for o in of))
        for name, of in _by_session(offers).items()
    }
    kept: set[str] = set()
    seen: set[bytes] = set()
    taken: dict[str, list[_Light]] = {}
    for offer in sorted(offers, key=lambda o: best[o.session_id]):
        if rules.unique and offer.digest in seen:
            reason = "duplicate"
        elif rules.keep is not None and offer.session_id not in kept and len(kept) == rules.keep:
            reason = "surplus"
        else:
            seen.add(offer.digest)
            kept.add(offer.session_id)
            taken.setdefault(offer.session_id, []).append(offer)
            continue
        found.left_out[reason] += 1
        why.setdefault(offer.session_id, reason)
    found.solved += bool(taken)
    for session_id, of in taken.items():
        tally = found.sources[source_of[session_id]]
        tally.accepted += 1
        tally.turns += sum(offer.turns for offer in of)
        tally.tokens += sum(offer.trained for offer in of)
        found.examples += len(of)
        found.accepted[session_id] = frozenset(offer.trace_id for offer in of)


def _by_session(offers: Iterable[_Light]) -> dict[str, list[_Light]]:
    found: dict[str, list[_Light]] = {}
    for offer in offers:
        found.setdefault(offer.session_id, []).append(offer)
    return found


def select_examples(
    sessions: Iterable[tuple[SessionCapture, Trajectory]],
    accepted: Mapping[str, Collection[str]],
) -> Iterator[tuple[SessionCapture, Trajectory, list[Example]]]:
    """Yield the accepted sessions with their accepted examples, in order."""
    for capture, trajectory in sessions:
        names = accepted.get(capture.session.session_id)
        if names is not None:
            of = [e for e in examples_of(trajectory, capture) if e.trace_id in names]
            yield capture, trajectory, of
