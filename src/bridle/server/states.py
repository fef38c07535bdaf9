"""States of tasks, sessions and deliveries, their transitions, and small values made of their rows.

These are the rows' states in the database. The stages of a RUNNING session are those of
`bridle.node.session`: they are reported, not stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, Literal, TypeVar

from bridle.types import JSON, Cause

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


@dataclass(frozen=True, slots=True)
class Claim:
    """A session that was leased to a run."""

    session_id: str
    task_id: str
    sample_index: int
    attempt: int
    """From 1."""
    spec: str
    """The task's JSON."""
    avoid: frozenset[str] = frozenset()
    """Nodes on which earlier runs of it failed."""
    owner: str = ""

    @property
    def run_id(self) -> str:
        """The session's id at the node: every attempt has one of its own."""
        return run_id(self.session_id, self.attempt)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one run."""

    session_id: str
    attempt: int
    status: str
    """`COMPLETED`, `TIMEOUT`, `ERROR` or `CANCELLED`."""
    cause: Cause | None
    usable: bool
    result: JSON
    """The session's result without its trajectory."""
    file: str | None = None
    """Name of the trajectory's file, which is written."""
    file_bytes: int | None = None
    version_min: int | None = None
    version_max: int | None = None

    @property
    def error(self) -> str | None:
        """Why it did not complete, in words."""
        error: str | None = self.result.get("error")
        return error


@dataclass(frozen=True, slots=True)
class Closed:
    """Consequences of the end of a run or a task."""

    what: Literal["final", "again", "lost"]
    """The session is final; it waits for another run; its lease was another's, nothing changed."""
    run_ids: tuple[str, ...] = ()
    """Runs that are to be ended, because the task ends early."""
    task_id: str | None = None
    """The task, where this was its last session."""
    name: str = ""
    """That task's id in its owner's words."""
    owner: str = ""
    """That task's owner."""


def task_key(name: str, owner: str | None) -> str:
    """The id of a task among those of all owners; its sessions' ids begin with it.

    A task of an operator (`owner` = `None`) has its name. A tenant's has a digest after it, always:
    nobody can tell from his own ids which ones others use.
    """
    if owner is None:
        return name
    digest = hashlib.sha256(f"{owner}\n{name}".encode()).hexdigest()[:12]
    return f"{name[:150]}-{digest}"


def session_id(task_id: str, sample_index: int) -> str:
    """The id of an accepted session, known before it runs; at most 190 characters."""
    if len(task_id) > 170:
        digest = hashlib.sha256(task_id.encode()).hexdigest()[:8]
        task_id = f"{task_id[:160]}-{digest}"
    return f"{task_id}.{sample_index}"


def run_id(session: str, attempt: int) -> str:
    """The id of one run of a session; the first one's is the session's own."""
    return session if attempt == 1 else f"{session}.r{attempt}"
