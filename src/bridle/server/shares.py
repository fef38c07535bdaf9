"""Run slots are divided among owners by weight: who starts a session next. Pure.

An owner is due as many of the slots as its weight says, of those that the owners with waiting
sessions have; the one that is furthest below what it is due comes first. A fraction of a slot is
kept as credit, so an owner that is due less than one slot gets one from time to time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping


class Shares:
    """Chooses owners for free slots, and remembers who got less than its share."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights` of owners; any other has 1."""
        self._weights = weights or {}
        self._credits: dict[str, float] = {}
        """In slots, from -1 to 1."""
        self._turns: dict[str, int] = {}
        """When an owner got its last slot."""

    def divide(
        self, slots: int, waiting: Collection[str], running: Mapping[str, int]
    ) -> dict[str, int]:
        """Return the free `slots` that each owner with `waiting` sessions may take, given its
        `running` ones.
        """
        due = self._due(slots + sum(running.get(owner, 0) for owner in waiting), waiting)
        owners, given = sorted(waiting), Counter[str]()

        def short(owner: str) -> tuple[float, int, int]:
            has = running.get(owner, 0) + given[owner]
            below = due[owner] + self._credits.get(owner, 0.0) - has
            return round(below, 6), -given[owner], -self._turns.get(owner, 0)

        for _ in range(slots if owners else 0):
            given[max(owners, key=short)] += 1
        return dict(given)

    def started(self, waiting: Collection[str], started: Mapping[str, int]) -> None:
        """So many sessions of the owners that had `waiting` ones have started."""
        due = self._due(sum(started.values()), waiting)
        self._credits = {
            owner: max(-1.0, min(1.0, self._credits.get(owner, 0.0) + much - started.get(owner, 0)))
            for owner, much in due.items()
        }
        turn = max(self._turns.values(), default=0) + 1
        self._turns = {owner: self._turns.get(owner, 0) for owner in waiting}
        self._turns |= dict.fromkeys(started, turn)

    def _due(self, slots: int, owners: Collection[str]) -> dict[str, float]:
        weights = {owner: self._weights.get(owner, 1.0) for owner in owners}
        whole = sum(weights.values())
        return {owner: slots * weight / whole for owner, weight in weights.items()}
