"""One capture file as the dashboard reads it: what is new since the last look, and no more.

A file may be written while it is read, be replaced by a new run, or be no capture file at all; what
cannot be read is told on the page, never raised past `Run`. Sessions are listed from their records;
what a session is worth to a trainer (`Measured`) is built once per session, when somebody looks.

May be used from any thread: a lock makes it one at a time, as SQLite wants it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from bridle.capture.reader import SqliteReader
from bridle.capture.records import Outcome, SessionRecord, Totals
from bridle.dashboard.lines import Line, Measured, measured_of
from bridle.dashboard.session import Session
from bridle.errors import BridleError
from bridle.node.results import result_of, trajectory_of
from bridle.node.run_folder import CAPTURE, RUN, SESSIONS, SUMMARY
from bridle.types import JSON

COURSE = "course.json"
"""What a training leaves of its course."""

DEPTH = 4
"""How far below the given folder runs are looked for."""

NOT_RUNS = frozenset({SESSIONS, "checkpoints", "trajectories", "weights", "node", "tasks", "files"})
"""Folders in which no run lies, however much else does."""

KEPT_OPEN = 4
"""Sessions of a run that are kept as they were read."""


def find(root: Path) -> tuple[list[Path], list[Path]]:
    """The capture files and the courses of trainings in a folder and below it, by path."""
    if root.is_file():
        return [root], []
    captures, courses = [], []
    for folder, below, files in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        below[:] = sorted(
            name for name in below if depth < DEPTH and name not in NOT_RUNS and name[0] != "."
        )
        captures += [Path(folder, CAPTURE)] if CAPTURE in files else []
        courses += [Path(folder, COURSE)] if COURSE in files else []
    return captures, courses


def read_json(path: Path) -> JSON | None:
    """A JSON object; `None` where there is none, or only a part of one yet."""
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a run from its folder, without its sessions."""

    name: str
    finished: bool
    expected: int | None = None
    """Sessions that it is to have; `None` = not known."""
    engines: tuple[str, ...] = ()
    error: str | None = None
    """Why it cannot be read."""


class Run:
    """A capture file with the folder that it lies in."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.reads = 0
        """How often sessions were read whole; tests count on it."""
        self._lock = threading.RLock()
        self._reader: SqliteReader | None = None
        self._file: tuple[int, int] | None = None
        self._settings_read: tuple[tuple[int, int], JSON] | None = None
        self._forget()

    def _forget(self) -> None:
        self._change: int | None = None
        self._records: dict[str, tuple[SessionRecord, Outcome | None]] = {}
        self._totals: dict[str, Totals] = {}
        self._seen = 0
        self._measured: dict[str, Measured] = {}
        self._open: OrderedDict[tuple[str, tuple[int, ...]], Session] = OrderedDict()

    @property
    def folder(self) -> Path:
        return self.path.parent

    def close(self) -> None:
        """Release the file; it is opened again when somebody looks."""
        with self._lock:
            if self._reader is not None:
                self._reader.close()
            self._reader = None

    @property
    def change(self) -> tuple[object, ...]:
        """Return a value that changes whenever a refresh found something new."""
        return self._file, self._change

    def facts(self) -> Facts:
        """Read the run's settings and state from its folder; missing files leave fields at
        `None`.
        """
        settings = self._settings()
        config = settings.get("config") if isinstance(settings.get("config"), dict) else {}
        tasks = config.get("tasks")  # type: ignore[union-attr]  # a dict
        expected = None
        if isinstance(tasks, list):
            expected = sum(int(one.get("num_samples", 1)) for one in tasks)
        engines = [
            str(one.get("url") or one.get("engine") or one) if isinstance(one, dict) else str(one)
            for one in config.get("engines") or ()  # type: ignore[union-attr]  # a dict
        ]
        finished = (self.folder / SUMMARY).is_file()
        return Facts(self.name, finished, expected, tuple(engines), self.fault())

    def _settings(self) -> JSON:
        """The run's settings, read again only when they were written again: they name all tasks."""
        path = self.folder / RUN
        try:
            facts = path.stat()
        except OSError:
            return {}
        stamp = (facts.st_mtime_ns, facts.st_size)
        with self._lock:
            if self._settings_read is None or self._settings_read[0] != stamp:
                self._settings_read = (stamp, read_json(path) or {})
            return self._settings_read[1]

    def fault(self) -> str | None:
        """Why the file cannot be read; `None` = it can."""
        try:
            self._look()
        except BridleError as error:
            return str(error)
        return None

    def lines(self) -> list[Line]:
        """All sessions of harnesses, in the order of opening; none of a file that is unreadable."""
        with self._lock:
            try:
                self._look()
            except BridleError:
                return []
            finished = (self.folder / SUMMARY).is_file()
            return [self._line(session_id, finished) for session_id in self._records]

    def line(self, session_id: str) -> Line | None:
        with self._lock:
            try:
                self._look()
            except BridleError:
                return None
            if session_id not in self._records:
                return None
            self.measure(session_id)
            return self._line(session_id, (self.folder / SUMMARY).is_file())

    def measure(self, session_id: str) -> None:
        """Build a session, if it was not or has not ended: its line tells its law numbers then."""
        with self._lock:
            if session_id not in self._records:
                return  # another file lies there by now
            _, outcome = self._records[session_id]
            if session_id in self._measured and outcome is not None:
                return
            try:
                self._measured[session_id] = measured_of(self._session(session_id).trajectory)
            except BridleError:
                self._measured.pop(session_id, None)

    def unmeasured(self) -> Iterator[str]:
        """Sessions that have ended and were not built yet, newest first."""
        with self._lock:
            records = list(self._records.items())
        for session_id, (_, outcome) in reversed(records):
            if outcome is not None and session_id not in self._measured:
                yield session_id

    def session(self, session_id: str) -> Session | None:
        """A session with all that was captured of it; `None` = there is none of that id.

        Raises `BridleError` if what is there cannot be read.
        """
        with self._lock:
            self._look()
            return self._session(session_id) if session_id in self._records else None

    def _session(self, session_id: str) -> Session:
        reader = self._opened()
        key = (session_id, reader.extent(session_id))
        known = self._open.get(key)
        if known is None:
            self.reads += 1
            capture = reader.read(session_id)
            trajectory = trajectory_of(capture)
            result = result_of(capture.session, capture.outcome, trajectory)
            known = Session(capture, result, self.folder)
            self._open[key] = known
            while len(self._open) > KEPT_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        return known

    def _line(self, session_id: str, finished: bool) -> Line:  # noqa: FBT001 - a fact of the run
        record, outcome = self._records[session_id]
        kept, totals = record.metadata, self._totals.get(session_id)
        line = Line(
            session_id=session_id,
            run=self.name,
            task_id=record.task_id or "",
            sample_index=int(kept.get("sample_index") or 0),
            task_set=str((kept.get("task_metadata") or {}).get("task_set") or ""),
            harness=str(kept.get("harness") or ""),
            harness_version=str(kept.get("harness_version") or ""),
            runtime=str(kept.get("runtime") or ""),
            opened_at=record.opened_at,
            last_at=None if totals is None else totals.last_at,
            exchanges=0 if totals is None else totals.exchanges,
            sampled=0 if totals is None else totals.sampled,
            measured=self._measured.get(session_id),
            abandoned=finished and outcome is None,
        )
        if outcome is None:
            return line
        return replace(
            line,
            status=outcome.status,
            cause=outcome.cause,
            error=outcome.error,
            reward=outcome.reward,
            ended_at=outcome.ended_at,
            timing=outcome.metadata.get("timing") or {},
        )

    def _opened(self) -> SqliteReader:
        """The reader of the file that is there now."""
        try:
            facts = self.path.stat()
            file = (facts.st_dev, facts.st_ino)
        except OSError:
            file = None
        if self._reader is not None and file == self._file:
            return self._reader
        self.close()
        self._forget()
        self._reader, self._file = SqliteReader(self.path), file
        return self._reader

    def _look(self) -> None:
        """Read what is new. `StoreError` if the file cannot be read."""
        with self._lock:
            reader = self._opened()
            change = reader.change()
            if change == self._change:
                return
            outcomes = reader.outcomes()
            self._records = {
                record.session_id: (record, outcomes.get(record.session_id))
                for record in reader.sessions()
                if not record.is_aside
            }
            new, self._seen = reader.totals(self._seen)
            for session_id, totals in new.items():
                self._totals[session_id] = _sum(self._totals.get(session_id), totals)
            self._change = change


def _sum(one: Totals | None, two: Totals) -> Totals:
    if one is None:
        return two
    return Totals(
        one.exchanges + two.exchanges,
        one.sampled + two.sampled,
        max(one.last_at, two.last_at),
    )


def measure_some(runs: list[Run], budget_s: float) -> int:
    """Build sessions that have ended until the time is over; how many are left."""
    until = time.monotonic() + budget_s
    left = 0
    for run in runs:
        for session_id in run.unmeasured():
            if time.monotonic() < until:
                run.measure(session_id)
            else:
                left += 1
    return left
