"""A data source over a rollout server's API: everything that its token may read.

Lists hold the newest sessions that were started (`NEWEST`). A session's conversation tree comes
from its capture: from the data folder if the node runs in the server's process, else from the node
that has it. A session without a capture is shown by its traces.
"""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from bridle.dashboard.folder import FolderSource
from bridle.dashboard.source import (
    AttemptTree,
    RunReport,
    SessionPage,
    SessionView,
    attempts_of,
    place_of,
)
from bridle.dashboard.summaries import (
    AGAIN,
    FAILED,
    Overview,
    SampleGroup,
    SessionFilter,
    SessionRow,
    SessionSet,
    groups_of,
    measured_of,
    newest,
    origin_of,
    overview_of,
    sort_rows,
)
from bridle.errors import ServerError
from bridle.node.results import CAPTURE
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.client import Client

T = TypeVar("T")

NEWEST: Final = 1000
"""Sessions that lists cover."""

FETCHED: Final = 4
"""Captures of ended sessions that stay in memory: readers open several pages of a session."""


class ServerSource:
    """Implementation of `DataSource`."""

    def __init__(
        self,
        rollouts: Client,
        title: str,
        folder: FolderSource | None = None,
        *,
        may_submit: bool = True,
    ) -> None:
        self._rollouts = rollouts
        self._title = title
        self._may_submit = may_submit
        self._folder = folder
        """Source of captures on this machine, if any."""
        self._fetched: OrderedDict[str, SessionView] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def title(self) -> str:
        return self._title

    @property
    def fork(self) -> Callable[[str, int, int], str] | None:
        """Function that submits forks of a session; `None` = the reader's token may not submit."""
        return self._fork if self._may_submit else None

    def _fork(self, session_id: str, at: int, samples: int) -> str:
        name = f"{session_id}.at{at}.{secrets.token_hex(3)}"  # as often as a person asks
        return self._rollouts.fork(session_id, at=at, samples=samples, task_id=name)

    def overview(self) -> Overview:
        status = self._rollouts.status()
        seen = None if self._folder is None else self._folder.overview()
        sessions = self._newest()
        lines = [line_of(one) for one in sessions]
        latest = {line.session_id for line in newest(lines)}
        own = overview_of(lines, [], [], now=time.time())
        shown = self._lines([one for one in sessions if one["session_id"] in latest])
        counts: dict[str, int] = dict(status["sessions"])
        waiting = int(status["sessions_waiting"])
        return replace(
            own,
            total=sum(counts.values()),
            statuses=counts,
            expected=sum(counts.values()) + waiting if waiting else None,
            report=None if seen is None else seen.report,
            unmeasured=0 if seen is None else seen.unmeasured,
            rate=own.rate if seen is None else seen.rate,
            exchanges=0 if seen is None else seen.exchanges,
            sampled=0 if seen is None else seen.sampled,
            server=status,
            nodes=self._rollouts.nodes(),
            newest=newest(shown),
        )

    def sessions(self, wanted: SessionFilter, start: int, count: int) -> SessionPage:
        state = wanted.status if wanted.status in FAILED | {"COMPLETED"} else None
        sessions = {one["session_id"]: one for one in self._newest(state)}
        lines = [line_of(one) for one in sessions.values()]
        said: set[str] = set()
        left = 0
        if self._folder is not None:
            captured, left = self._folder.search(wanted.text)
            ids = {session_id for _, session_id in captured}
            said = {name for name, one in sessions.items() if _run_id(one) in ids}
        taken = (line for line in lines if wanted.takes(line, said=line.session_id in said))
        matching = sort_rows(list(taken), wanted.sort)
        found = [sessions[line.session_id] for line in matching]
        choices = {
            "status": sorted({*FAILED, "COMPLETED", "RUNNING", "QUEUED"}),
            "cause": sorted({line.cause for line in lines if line.cause}),
            "harness": sorted({line.harness for line in lines if line.harness}),
        }
        return SessionPage(self._lines(found[start : start + count]), len(found), choices, left)

    def groups(self, run: str, start: int, count: int) -> tuple[Sequence[SampleGroup], int]:  # noqa: ARG002 - it has no runs
        groups = groups_of(line_of(one) for one in self._newest())
        return groups[start : start + count], len(groups)

    def session_set(self, run: str, version: int | None) -> SessionSet | None:  # noqa: ARG002 - it has no runs
        """Return `None`: a server's sessions belong to no run."""
        return None

    def group(self, task_id: str, run: str) -> SampleGroup | None:  # noqa: ARG002 - it has no runs
        """Return the sessions of a task; `None` = the server has no such task."""
        task = _found(lambda: self._rollouts.task(task_id))
        if task is None:
            return None
        sessions = [one | {"task_id": task_id} for one in self._rollouts.sessions(task_id)]
        lines = self._lines(sessions)
        return SampleGroup(task_id, lines, state=task["state"], total=task["total_sessions"])

    def session(self, session_id: str, run: str) -> SessionView | None:  # noqa: ARG002 - it has no runs
        """Return a session; `None` = the server has no such session."""
        session = _found(lambda: self._rollouts.session(session_id))
        if session is None:
            return None
        line, facts = line_of(session), {"earlier": session.get("earlier") or None}
        logs = {name: name for name in session.get("artifacts") or ()}
        known = {name: value for name, value in facts.items() if value is not None}
        found = None if self._folder is None else self._folder.session(_run_id(session), "")
        found = found or self._fetch(session)
        if found is not None:
            line = replace(found.line, session_id=line.session_id, status=line.status, run=".")
            return replace(found, line=line, logs=logs, facts=found.facts | known)
        if not session.get("has_trajectory"):
            return SessionView(line, logs=logs, facts=known)
        trajectory = self._rollouts.trajectory(session_id)
        measured = measured_of(trajectory)
        line = replace(
            line,
            exchanges=measured.stats.get("exchanges"),
            sampled=measured.stats.get("tokens_captured"),
            measured=measured,
        )
        return SessionView(line, trajectory, None, logs, known)

    def attempts(self, session_id: str, run: str) -> AttemptTree | None:
        shown = self.session(session_id, run)
        if shown is None:
            return None
        lines = {line.session_id: line for line in map(line_of, self._newest())}
        lines[session_id] = shown.line
        origins = {
            place_of(line): ((line.run, _session_id(line.origin.session_id)), line.origin.at)
            for line in lines.values()
            if line.origin is not None
        }
        replies: list[int] = []
        if shown.session is not None:
            with shown.session.lock:
                replies += shown.session.fork_points.values()
        return attempts_of(place_of(shown.line), [*lines.values()], origins, replies)

    def report(self, kind: RunReport[T], run: str) -> T | None:  # noqa: ARG002 - it has no runs
        """Return `None`: a server has no reports."""
        return None

    def file(self, session_id: str, run: str, name: str) -> Path | bytes | None:
        shown = self.session(session_id, run)
        if shown is None or name not in shown.logs:
            return None
        return _found(lambda: self._rollouts.artifact(session_id, name))

    def _fetch(self, session: JSON) -> SessionView | None:
        """Read a session from the capture that the server sends; `None` = it has none."""
        run_id = _run_id(session)
        with self._lock:
            if run_id in self._fetched:
                return self._fetched[run_id]
        content = _found(lambda: self._rollouts.artifact(session["session_id"], CAPTURE))
        if content is None:
            return None
        with tempfile.TemporaryDirectory(prefix="bridle-") as place:
            path = Path(place, CAPTURE)
            path.write_bytes(content)
            with closing(FolderSource(path)) as folder:
                shown = folder.session(run_id, "")
        if shown is not None and session.get("ended_at") is not None:
            with self._lock:
                self._fetched[run_id] = shown
                while len(self._fetched) > FETCHED:
                    self._fetched.popitem(last=False)
        return shown

    def _newest(self, state: str | None = None) -> list[JSON]:
        return self._rollouts.newest_sessions(limit=NEWEST, state=state)

    def _lines(self, sessions: Sequence[JSON]) -> list[SessionRow]:
        """Return the rows of sessions, with facts of their capture where it is on this machine."""
        names = {one["session_id"]: _run_id(one) for one in sessions}
        known = {} if self._folder is None else self._folder.known(names.values())
        return [_with(line_of(one), known.get(names[one["session_id"]])) for one in sessions]


def _found(request: Callable[[], T]) -> T | None:
    """Return the result of a request; `None` = the server has no such thing."""
    try:
        return request()
    except ServerError as error:
        if error.status == 404:
            return None
        raise


def _with(line: SessionRow, mine: SessionRow | None) -> SessionRow:
    if mine is None:
        return line
    return replace(
        line,
        harness=line.harness or mine.harness,
        exchanges=mine.exchanges,
        sampled=mine.sampled,
        measured=mine.measured,
    )


def _run_id(session: JSON) -> str:
    """Return the id under which the last attempt of a session was captured."""
    attempt = int(session.get("attempt") or 1)
    session_id: str = session["session_id"]
    return session_id if attempt <= 1 else f"{session_id}.r{attempt}"


def _session_id(run_id: str) -> str:
    """Return the session whose attempt was captured under an id."""
    again = AGAIN.fullmatch(run_id)
    return again[1] if again else run_id


def line_of(session: JSON) -> SessionRow:
    """Return the server's JSON of a session as a row of the dashboard."""
    fork: JSON = session.get("fork") or {}
    return SessionRow(
        session_id=session["session_id"],
        run=".",
        task_id=session.get("task_id") or "",
        sample_index=session["sample_index"],
        harness=session.get("harness") or "",
        harness_version=session.get("harness_version") or "",
        status=session["status"],
        cause=session.get("cause"),
        error=session.get("error"),
        reward=session.get("reward"),
        opened_at=session.get("started_at"),
        ended_at=session.get("ended_at"),
        last_at=session.get("ended_at"),
        timing=session.get("timing") or {},
        origin=origin_of(fork, fork.get("verdict")),
    )
