"""Trees against flat groups in a table of choices: what sampling only the decisive turn can gain.

The walk of `benchmarks.trees` without a model: each turn is a choice of its own between two ways,
the decisive one between four doors, and the reward comes at the end. GRPO with Adam trains the
table from flat groups of four sessions or from trees of one session and four forks at the decisive
turn. Every pair of update size and learning rate is tried for both, over 48 seeds; the best of each
is shown, and both with updates of about as many turns and the same rate.

    python -m benchmarks.choices
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SEEDS, SIBLINGS, DOORS = 48, 4, 4
GOAL = 0.9
"""Mean probability of the right door that counts as learned."""
MOST = 9_000
"""Sampled turns after which a training ends."""
GROUPS, RATES = (1, 2, 3, 6, 9), (0.03, 0.1, 0.2, 0.4, 0.8)


@dataclass(frozen=True, slots=True)
class Table:
    """A walk of so many turns, of which number `decisive` decides, counted from 0."""

    turns: int
    decisive: int

    def size(self, way: str) -> int:
        """Turns that a group samples."""
        rest = self.turns - self.decisive
        return SIBLINGS * self.turns if way == "flat" else self.turns + SIBLINGS * rest

    def turns_to_goal(self, way: str, groups: int, rate: float) -> float:
        """Sampled turns until the right door has the probability `GOAL`; inf = never."""
        rng = np.random.default_rng(0)
        sessions = SIBLINGS if way == "flat" else SIBLINGS + 1
        first = 0 if way == "flat" else self.decisive + 1
        tables = np.zeros((SEEDS, self.turns, 2)), np.zeros((SEEDS, DOORS))
        moments = [(np.zeros_like(table), np.zeros_like(table)) for table in tables]
        for step in range(MOST // (groups * self.size(way))):
            ways, doors = map(_softmax, tables)
            if doors[:, 0].mean() >= GOAL:
                return step * groups * self.size(way)
            taken = _drawn(rng, doors[:, None, None], (SEEDS, groups, sessions))
            advantages = _advantages(taken[..., 0])
            varied = np.maximum(1, (advantages != 0).any(-1).sum(-1))  # others are left out
            units = varied * (sessions if way == "flat" else 1)
            of_unit = self.turns if way == "flat" else self.size(way)
            weighed = advantages / (units * of_unit)[:, None, None]
            slopes = np.zeros_like(ways), ((taken - doors[:, None, None]) * weighed[..., None])
            for turn in range(first, self.turns):
                if turn != self.decisive:
                    own = ways[:, turn][:, None, None]
                    gone = _drawn(rng, own, (SEEDS, groups, sessions)) - own
                    slopes[0][:, turn] = (gone * weighed[..., None]).sum((1, 2))
            for table, slope, moment in zip(
                tables, (slopes[0], slopes[1].sum((1, 2))), moments, strict=True
            ):
                _adam(table, slope, moment, rate, step + 1)
        return float("inf")


def _adam(
    table: Floats, slope: Floats, moment: tuple[Floats, Floats], rate: float, step: int
) -> None:
    mean, square = moment
    mean += 0.1 * (slope - mean)
    square += 0.001 * (slope**2 - square)
    down = np.sqrt(square / (1 - 0.999**step)) + 1e-8
    table += rate * mean / (1 - 0.9**step) / down


def _softmax(table: Floats) -> Floats:
    powers = np.exp(table - table.max(-1, keepdims=True))
    shares: Floats = powers / powers.sum(-1, keepdims=True)
    return shares


def _drawn(rng: np.random.Generator, chances: Floats, shape: tuple[int, ...]) -> Floats:
    """Draw choices by their chances; one-hot."""
    ends = np.broadcast_to(chances.cumsum(-1), (*shape, chances.shape[-1]))[..., :-1]
    drawn: Floats = np.eye(chances.shape[-1])[(rng.random((*shape, 1)) > ends).sum(-1)]
    return drawn


def _advantages(rewards: Floats) -> Floats:
    """GRPO's, over the last axis; 0 where nothing varies."""
    spread = rewards.std(-1, keepdims=True)
    found: Floats = (rewards - rewards.mean(-1, keepdims=True)) / np.where(spread > 0, spread, 1)
    return found


def lines() -> Iterator[str]:
    """The table of the page."""
    yield "| walk | compared | `flat`, turns | `decisive`, turns | of `flat` |"
    yield "|---|---|---|---|---|"
    for table in (Table(9, 5), Table(13, 10)):
        walk = f"{table.turns} turns, number {table.decisive + 1} decides"
        best = []
        for way in ("flat", "decisive"):
            tried = product(GROUPS, RATES)
            best.append(min(table.turns_to_goal(way, groups, rate) for groups, rate in tried))
        alike = [table.turns_to_goal("flat", 6, 0.1)]
        alike.append(
            table.turns_to_goal("decisive", round(6 * 4 * table.turns / table.size("")), 0.1)
        )
        for name, (flat, tree) in (("the best of each", best), ("updates of as many turns", alike)):
            yield f"| {walk} | {name} | {flat:,.0f} | {tree:,.0f} | {tree / flat:.2f} |"


if __name__ == "__main__":
    print("\n".join(lines()))
