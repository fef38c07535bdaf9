"""Interface of the data that pages show: a run folder or a rollout server. Called from worker
threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bridle.dashboard.lines import Group, Line, Wanted
from bridle.dashboard.overview import Overview
from bridle.dashboard.session import Session
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON


@dataclass(frozen=True, slots=True)
class Listed:
    """A page of a list of sessions."""

    lines: Sequence[Line]
    total: int
    """Of all that are wanted."""
    choices: Mapping[str, Sequence[str]]
    """What can be asked for: `status`, `cause`, `harness`, `run`."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A session that is looked at."""

    line: Line
    trajectory: Trajectory | None = None
    """`None` = there is none yet, or not any more."""
    session: Session | None = None
    """All that was captured of it; `None` = that is not at hand here."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """Name -> what `Source.file` is asked for."""
    facts: JSON = field(default_factory=dict)
    """What else is known: exit code, evaluation, attempts."""


class Source(Protocol):
    """Data of the pages. Methods raise `BridleError` when the source cannot be read."""

    @property
    def title(self) -> str: ...

    def overview(self) -> Overview:
        """The first page."""

    def sessions(self, wanted: Wanted, start: int, count: int) -> Listed:
        """A page of sessions, newest first."""

    def groups(self, run: str, start: int, count: int) -> tuple[Sequence[Group], int]:
        """A page of groups, newest first, and how many there are; `run` may be empty."""

    def group(self, task_id: str, run: str) -> Group | None:
        """The sessions of a task; `run` empty = of all runs."""

    def session(self, session_id: str, run: str) -> Shown | None:
        """A session; `run` empty = whichever has it."""

    def file(self, session_id: str, run: str, name: str) -> Path | bytes | None:
        """A log or kept file of a session, by a name of `Shown.logs`."""
