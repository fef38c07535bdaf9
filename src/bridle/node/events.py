"""Events of a node about its sessions: for progress bars, logs and dashboards.

Listeners are plain functions that run on the event loop, so they must be quick. One that raises has
a bug, which ends the session that the event is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from bridle.capture.records import SessionCapture
from bridle.node.results import SessionResult
from bridle.types import Cause, SessionStatus


@dataclass(frozen=True, slots=True)
class SessionChanged:
    """A session entered a status; exactly one of these is final (`cause` is then known)."""

    session_id: str
    task_id: str
    sample_index: int
    harness: str
    status: SessionStatus
    at: float
    """Unix time, seconds."""
    cause: Cause | None = None
    reward: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SessionEnded:
    """A session's result is known; follows its last `SessionChanged`."""

    result: SessionResult
    capture: SessionCapture | None
    """`None` = another node has it."""


@dataclass(frozen=True, slots=True)
class Installing:
    """One line of a harness's installation."""

    harness: str
    line: str


@dataclass(frozen=True, slots=True)
class RoomChanged:
    """The number of sessions that fit has changed: nodes joined, left, or changed their slots."""

    slots: int
    """Sessions that may be in progress at once."""


Event: TypeAlias = SessionChanged | SessionEnded | Installing | RoomChanged
Listener: TypeAlias = Callable[[Event], None]


class Events:
    """The listeners of one node."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Call `listener` with every event until the block ends."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def tell(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            listener(event)
