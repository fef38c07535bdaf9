"""Small values that are made of the state's rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from bridle.types import JSON, Cause


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
