"""Disagreement of several scorers on the same sessions: where a checker may be wrong. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import mean

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
