"""How many callbacks may be under way, and to whom: a slow receiver holds up none but itself. Pure.

A receiver (scheme, host and port) is tried one callback at a time until it has taken one, then
`EACH` at once. One that failed or was slow gets one at a time again, and all such share
`DOUBTFUL` of the `AT_ONCE` places, so those who answer always find room.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

AT_ONCE: Final = 32
"""Callbacks under way at once."""

EACH: Final = 4
"""To one receiver that does well."""

DOUBTFUL: Final = 8
"""To all receivers together that failed or were slow at their last try."""

SLOW_S: Final = 5.0
"""A receiver that takes longer to answer is slow."""

KNOWN: Final = 1000
"""Receivers that are remembered; beyond, those with nothing under way are strangers again."""


class Standing(Enum):
    """What is known of a receiver."""

    STRANGER = auto()
    WELL = auto()
    DOUBTFUL = auto()


@dataclass(slots=True)
class _Receiver:
    standing: Standing = Standing.STRANGER
    under_way: int = 0


class Receivers:
    """Counts what is under way."""

    def __init__(self) -> None:
        self._known: dict[str, _Receiver] = {}

    @property
    def room(self) -> int:
        """How many more may be under way."""
        return AT_ONCE - sum(one.under_way for one in self._known.values())

    def full(self) -> list[str]:
        """The receivers that are to get no further one now."""
        return [name for name in self._known if not self.has_room(name)]

    def has_room(self, name: str) -> bool:
        """Whether this receiver may get one more, where there is room at all."""
        known = self._known.get(name, _Receiver())
        if known.standing is Standing.DOUBTFUL:
            return not known.under_way and self._doubtful() < DOUBTFUL
        return known.under_way < (EACH if known.standing is Standing.WELL else 1)

    def begin(self, name: str) -> None:
        self._known.setdefault(name, _Receiver()).under_way += 1

    def leave(self, name: str) -> None:
        """It was not begun after all."""
        self._known[name].under_way -= 1

    def end(self, name: str, *, taken: bool, seconds: float) -> None:
        """It was answered, or not, after so long."""
        known = self._known[name]
        known.under_way -= 1
        known.standing = Standing.WELL if taken and seconds <= SLOW_S else Standing.DOUBTFUL
        if len(self._known) > KNOWN:
            self._known = {name: one for name, one in self._known.items() if one.under_way}

    def _doubtful(self) -> int:
        known = self._known.values()
        return sum(one.under_way for one in known if one.standing is Standing.DOUBTFUL)
