"""States of tasks, sessions and deliveries, and the transitions between them.

These are the rows' states in the database. What a session does while it is RUNNING (its stages) is
`bridle.lifecycle.session`'s and is told, not stored. Guarded by `tests/server/test_states.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Final, TypeVar

State = TypeVar("State", bound=StrEnum)


class TaskState(StrEnum):
    """State of a task."""

    QUEUED = "queued"
    """Accepted; none of its sessions has been started."""
    RUNNING = "running"
    """Some session has been started."""
    ENDING = "ending"
    """No further session starts; those that run are being ended."""
    COMPLETED = "completed"
    """All sessions have ended, and enough of them are usable."""
    FAILED = "failed"
    """All sessions have ended, and too few of them are usable."""
    CANCELLED = "cancelled"
    """Somebody asked for its end, and all sessions have ended."""


class SessionState(StrEnum):
    """State of an accepted session."""

    QUEUED = "QUEUED"
    """Waits for its first run, or to be run again."""
    RUNNING = "RUNNING"
    """Leased to a run."""
    COMPLETED = "COMPLETED"
    TIMEOUT = "TIMEOUT"
    ERROR = "ERROR"
    CANCELLED = "CANCELLED"


class DeliveryState(StrEnum):
    """State of a callback."""

    PENDING = "pending"
    """To be sent, or to be tried again."""
    DELIVERED = "delivered"
    """Acknowledged with 2xx."""
    DEAD = "dead"
    """Given up; can be replayed."""


class Kept(IntEnum):
    """Extent to which a group's data are kept."""

    NAME = 0
    """Its task's id and digest, and what became of it in counts."""
    ROWS = 1
    """And its sessions, without what lies in files."""
    ALL = 2


_T, _S, _D = TaskState, SessionState, DeliveryState

FINAL_TASKS: Final = frozenset({_T.COMPLETED, _T.FAILED, _T.CANCELLED})
FINAL_SESSIONS: Final = frozenset({_S.COMPLETED, _S.TIMEOUT, _S.ERROR, _S.CANCELLED})

TASKS: Final[Mapping[TaskState, frozenset[TaskState]]] = {
    _T.QUEUED: frozenset({_T.RUNNING, _T.CANCELLED, _T.FAILED}),
    _T.RUNNING: frozenset({_T.ENDING}) | FINAL_TASKS,
    _T.ENDING: FINAL_TASKS,
    **{state: frozenset() for state in FINAL_TASKS},
    _T.FAILED: frozenset({_T.COMPLETED}),
}
"""Where a task can go from each state; from FAILED by rewards that are given later."""

SESSIONS: Final[Mapping[SessionState, frozenset[SessionState]]] = {
    _S.QUEUED: frozenset({_S.RUNNING, _S.CANCELLED}),
    _S.RUNNING: frozenset({_S.QUEUED}) | FINAL_SESSIONS,
    **{state: frozenset() for state in FINAL_SESSIONS},
    _S.ERROR: frozenset({_S.COMPLETED}),
}
"""Where a session can go from each state; RUNNING leads back to QUEUED when it is run again, and a
session whose evaluator failed is completed by a reward."""

DELIVERIES: Final[Mapping[DeliveryState, frozenset[DeliveryState]]] = {
    _D.PENDING: frozenset({_D.DELIVERED, _D.DEAD}),
    _D.DELIVERED: frozenset(),
    _D.DEAD: frozenset({_D.PENDING}),
}
"""Where a callback can go from each state; a dead one goes back when it is replayed."""


def step(table: Mapping[State, frozenset[State]], before: State, after: State) -> State:
    """`after`, which the table must allow from `before`; staying where one is is no step."""
    assert after is before or after in table[before], f"{before} does not lead to {after}"
    return after
