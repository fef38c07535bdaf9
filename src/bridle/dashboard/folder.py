"""A data source over a folder: a run, a data set's rounds, a training, or a data folder.

All runs in the folder and below it are shown together. They may change at any time: each call reads
what is new, and nothing is ever written.

A capture file may be written while it is read, be replaced by a new run, or be unreadable; the
reason is shown on the page and never escapes `CapturedRun`. Session lists come from the records of
the sessions. `TrajectoryFacts` are built once per session, when a page first needs them. A lock
serialises access, because SQLite connections need it.

`TextSearch` looks for a text in the messages of a capture file. Texts are unpacked and looked
through in the order of capture, a little per request: a large file is searched over several
refreshes of the page, which says how much is left. What was found is kept, so a refresh costs only
the calls that are new. ASCII letters match in either case.
"""

from __future__ import annotations

import json
import os
import shlex
import struct
import threading
import time
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import orjson

from bridle.capture.reader import SqliteReader
from bridle.capture.records import Outcome, SessionRecord, Totals
from bridle.capture.texts import unpack
from bridle.dashboard.session import CapturedSession
from bridle.dashboard.source import (
    CERTIFIED,
    COMPARED_SCORERS,
    AttemptTree,
    Place,
    RunReport,
    SessionPage,
    SessionView,
    attempts_of,
    place_of,
)
from bridle.dashboard.summaries import (
    Overview,
    RunFacts,
    SampleGroup,
    SessionFilter,
    SessionRow,
    SessionSet,
    TrainingProgress,
    TrajectoryFacts,
    groups_of,
    last_attempts,
    measured_of,
    newest,
    origin_of,
    overview_of,
    set_of,
    sort_rows,
    training_of,
)
from bridle.errors import BridleError, ConfigError
from bridle.node.results import (
    CAPTURE,
    RUN,
    SESSIONS,
    SUMMARY,
    result_of,
    trajectory_of,
)
from bridle.types import JSON

T = TypeVar("T")

SEARCHED_ROWS = 50
"""Calls that a search reads at once."""


class TextSearch:
    """A text, and the sessions whose messages or sampled replies have it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found: set[str] = set()
        """Ids of the sessions found so far."""
        self._forms = tuple({form.lower() for form in _forms(text)})
        self._after = 0

    def go_on(self, reader: SqliteReader, until: float) -> int:
        """Continue a text search until a time of `time.monotonic`; return how many model calls are
        left.
        """
        while time.monotonic() < until:
            rows = reader.texts(self._after, SEARCHED_ROWS)
            for number, session_id, texts in rows:
                self._after = number
                if session_id not in self.found and self._has(texts):
                    self.found.add(session_id)
            if len(rows) < SEARCHED_ROWS:
                return 0
        return reader.exchanges_after(self._after)

    def _has(self, texts: bytes) -> bool:
        try:
            found = (entry.text.lower() for entry in unpack(texts))
            return any(form in text for text in found for form in self._forms)
        except (ValueError, zlib.error, struct.error):
            return False  # damaged: its session says so


def _forms(text: str) -> Iterator[bytes]:
    """Yield a text as it stands in JSON and in JSON within JSON, with ASCII escapes and without."""
    for ascii_only in (False, True):
        once = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        for form in (once, json.dumps(once, ensure_ascii=ascii_only)[1:-1]):
            yield form.encode(errors="surrogatepass")


COURSE = "course.json"
"""File in which a training records its steps and evaluations."""

DEPTH = 4
"""Levels below the given folder that are searched for runs."""

NOT_RUNS = frozenset({SESSIONS, "checkpoints", "trajectories", "weights", "node", "tasks", "files"})
"""Folders that are not searched: they hold many files and no run."""

KEPT_OPEN = 4
"""Sessions of a run that stay in memory."""


def find(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the capture files and the trainings' course files in and below a folder, by path.

    `root` may be a capture file itself.
    """
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
    """Return the JSON object in a file; `None` if it is missing, incomplete or something else."""
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


class CapturedRun:
    """A capture file and its run folder, read incrementally."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.reads = 0
        """Number of sessions that were read in full, for tests."""
        self._lock = threading.RLock()
        self._reader: SqliteReader | None = None
        self._file: tuple[int, int] | None = None
        self._files: dict[str, tuple[tuple[int, int], JSON]] = {}
        self._forget()

    def _forget(self) -> None:
        self._change: int | None = None
        self._records: dict[str, tuple[SessionRecord, Outcome | None]] = {}
        self._totals: dict[str, Totals] = {}
        self._seen = 0
        self._measured: dict[str, TrajectoryFacts] = {}
        self._open: OrderedDict[tuple[str, tuple[int, ...]], CapturedSession] = OrderedDict()
        self._search = TextSearch("")

    @property
    def folder(self) -> Path:
        return self.path.parent

    def close(self) -> None:
        """Close the capture file; the next access opens it again."""
        with self._lock:
            if self._reader is not None:
                self._reader.close()
            self._reader = None

    @property
    def change(self) -> tuple[object, ...]:
        """Value that changes whenever a refresh of the run found something new."""
        return self._file, self._change

    def facts(self) -> RunFacts:
        """Return the run's settings and state from the files in its folder; missing files leave
        `None`.
        """
        settings = self._json(RUN)
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
        certificate = self.report(CERTIFIED)
        certified = None if certificate is None else certificate.faithful
        found = self.report(COMPARED_SCORERS)
        scored = None if found is None else (len(found.differing), len(found.sessions))
        return RunFacts(
            self.name, finished, expected, tuple(engines), self.fault(), certified, scored
        )

    def report(self, kind: RunReport[T]) -> T | None:
        """Return the run's last report of a kind; `None` = there is none that can be read."""
        return kind.read(self._json(kind.file))

    def fork_command(self, line: SessionRow) -> str | None:
        """Return the beginning of the command that forks a session, up to `--at`.

        `None` = the run does not hold the session's task.
        """
        config = self._json(RUN).get("config")
        tasks = config.get("tasks") if isinstance(config, dict) else None
        ids = [one.get("task_id") for one in tasks or () if isinstance(one, dict)]
        if line.task_id not in ids or line.session_id.startswith("-"):
            return None
        folder, session = shlex.quote(str(self.folder)), shlex.quote(line.session_id)
        return f"bridle fork {session} --run {folder} --at"

    def _json(self, name: str) -> JSON:
        """Return a file of the folder, parsed again only after a change: it may be large."""
        path = self.folder / name
        try:
            facts = path.stat()
        except OSError:
            return {}
        stamp = (facts.st_mtime_ns, facts.st_size)
        with self._lock:
            if name not in self._files or self._files[name][0] != stamp:
                self._files[name] = (stamp, read_json(path) or {})
            return self._files[name][1]

    def fault(self) -> str | None:
        """Return why the capture file cannot be read; `None` = it can."""
        try:
            self._look()
        except BridleError as error:
            return str(error)
        return None

    def lines(self) -> list[SessionRow]:
        """Return a row for each session of the run in the order of opening; empty if it is
        unreadable.
        """
        with self._lock:
            try:
                self._look()
            except BridleError:
                return []
            finished = (self.folder / SUMMARY).is_file()
            return [self._line(session_id, finished) for session_id in self._records]

    def search(self, text: str, until: float) -> tuple[AbstractSet[str], int]:
        """Search the run's messages for a text until a time of `time.monotonic`.

        Returns the ids of the sessions that have it, and how many model calls are left to search.
        Later calls with the same text continue.
        """
        with self._lock:
            try:
                reader = self._opened()
                if self._search.text != text:
                    self._search = TextSearch(text)
                left = self._search.go_on(reader, until)
            except BridleError:
                return frozenset(), 0
            return frozenset(self._search.found), left

    def line(self, session_id: str) -> SessionRow | None:
        """Return the row of one session with its token counts; `None` = it is not in the run."""
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
        """Compute a session's token counts and versions, unless they are known and the session
        ended.
        """
        with self._lock:
            if session_id not in self._records:
                return  # the file was replaced meanwhile
            _, outcome = self._records[session_id]
            if session_id in self._measured and outcome is not None:
                return
            try:
                self._measured[session_id] = measured_of(self._session(session_id).trajectory)
            except BridleError:
                self._measured.pop(session_id, None)

    def unmeasured(self) -> Iterator[str]:
        """Yield the ended sessions whose token counts are not computed yet, newest first."""
        with self._lock:
            records = list(self._records.items())
        for session_id, (_, outcome) in reversed(records):
            if outcome is not None and session_id not in self._measured:
                yield session_id

    def session(self, session_id: str) -> CapturedSession | None:
        """Return a captured session; `None` = no session has that id.

        Raises `BridleError` if it cannot be read.
        """
        with self._lock:
            self._look()
            return self._session(session_id) if session_id in self._records else None

    def _session(self, session_id: str) -> CapturedSession:
        reader = self._opened()
        key = (session_id, reader.extent(session_id))
        known = self._open.get(key)
        if known is None:
            self.reads += 1
            capture = reader.read(session_id)
            trajectory = trajectory_of(capture)
            result = result_of(capture.session, capture.outcome, trajectory)
            known = CapturedSession(capture, result, self.folder)
            self._open[key] = known
            while len(self._open) > KEPT_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        return known

    def _line(self, session_id: str, finished: bool) -> SessionRow:  # noqa: FBT001 - a fact of the run
        record, outcome = self._records[session_id]
        kept, totals = record.metadata, self._totals.get(session_id)
        line = SessionRow(
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
            origin=origin_of(kept.get("fork")),
        )
        if outcome is None:
            return line
        verdict = (outcome.metadata.get("fork") or {}).get("verdict")
        return replace(
            line,
            status=outcome.status,
            cause=outcome.cause,
            error=outcome.error,
            reward=outcome.reward,
            ended_at=outcome.ended_at,
            timing=outcome.metadata.get("timing") or {},
            origin=origin_of(kept.get("fork"), verdict),
        )

    def _opened(self) -> SqliteReader:
        """Return a reader of the current file, opened again after a replacement."""
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
        """Read the changes since the last call. `StoreError` if the file cannot be read."""
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


def measure_some(runs: list[CapturedRun], budget_s: float) -> int:
    """Compute token counts and versions of ended sessions within a time; return how many
    are left.
    """
    until = time.monotonic() + budget_s
    left = 0
    for run in runs:
        for session_id in run.unmeasured():
            if time.monotonic() < until:
                run.measure(session_id)
            else:
                left += 1
    return left


MEASURE_S = 0.4
"""Time that one request of the overview may spend on building trajectory facts."""

SEARCH_S = 1.0
"""Time that one request may spend on searching messages."""

SAME_S = 60.0
"""Time for which an unchanged overview is cached; its throughput is of the recent past."""


class FolderSource:
    """Implementation of `DataSource`. `ConfigError` if `root` holds nothing to show."""

    def __init__(self, root: Path, *, measure_s: float = MEASURE_S) -> None:
        self.root = root
        self._measure_s = measure_s
        self._lock = threading.Lock()
        self._runs: dict[Path, CapturedRun] = {}
        self._courses: dict[Path, JSON] = {}
        self._trained: list[Path] = []
        self._shown: tuple[float, object, Overview] | None = None
        self._look()
        if not self._runs and not self._courses:
            raise ConfigError(f"{root} has nothing to show: no capture.sqlite in or below it")

    @property
    def title(self) -> str:
        """Title of the page: the folder's path."""
        return str(self.root)

    @property
    def fork(self) -> None:
        """`None`: forks cannot be submitted without a server."""
        return None

    def close(self) -> None:
        for run in self._runs.values():
            run.close()

    def overview(self) -> Overview:
        runs = self._look()
        # First, because this reads the sessions of all runs.
        facts = [run.facts() for run in runs]
        now, state = (
            time.time(),
            (facts, [run.change for run in runs], list(self._courses.values())),
        )
        if self._shown is not None:
            then, before, shown = self._shown
            if not shown.unmeasured and before == state and now - then < SAME_S:
                return shown
        lines = [line for run in runs for line in run.lines()]
        for line in newest(lines):
            self._measured(line)
        left = measure_some(runs, self._measure_s)
        lines = [line for run in runs for line in run.lines()]
        shown = overview_of(lines, facts, self._trainings(), now=now, unmeasured=left)
        self._shown = (now, state, shown)
        return shown

    def sessions(self, wanted: SessionFilter, start: int, count: int) -> SessionPage:
        runs = self._look()
        lines = [line for run in runs for line in run.lines()]
        said, unsearched = self.search(wanted.text)
        taken = (one for one in lines if wanted.takes(one, said=(one.run, one.session_id) in said))
        found = sort_rows(list(taken), wanted.sort)
        page = [self._measured(line) for line in found[start : start + count]]
        choices = {
            "status": sorted({line.status for line in lines}),
            "cause": sorted({line.cause for line in lines if line.cause}),
            "harness": sorted({line.harness for line in lines if line.harness}),
            "run": [run.name for run in runs] if len(runs) > 1 else [],
        }
        return SessionPage(page, len(found), choices, unsearched)

    def search(self, text: str) -> tuple[AbstractSet[tuple[str, str]], int]:
        """Search the messages of all runs for a text, for at most `SEARCH_S` seconds.

        Returns (run, session id) of the sessions that have it, and how many model calls are left to
        search.
        """
        if not text:
            return frozenset(), 0
        found, left, until = set(), 0, time.monotonic() + SEARCH_S
        for run in self._look():
            ids, more = run.search(text, until)
            found |= {(run.name, session_id) for session_id in ids}
            left += more
        return found, left

    def groups(self, run: str, start: int, count: int) -> tuple[Sequence[SampleGroup], int]:
        lines = (line for one in self._look() if run in ("", one.name) for line in one.lines())
        groups = groups_of(lines)
        return groups[start : start + count], len(groups)

    def session_set(self, run: str, version: int | None) -> SessionSet | None:
        found = next((one for one in self._look() if one.name == run), None)
        if found is None:
            return None
        found.lines()  # `measure_some` needs the sessions to be read
        left = measure_some([found], self._measure_s)
        return set_of(run, found.lines(), version, left)

    def group(self, task_id: str, run: str) -> SampleGroup | None:
        runs = [one for one in self._look() if run in ("", one.name)]
        lines = last_attempts(
            line for one in runs for line in one.lines() if line.task_id == task_id
        )
        if not lines:
            return None
        measured = tuple(self._measured(line) for line in lines)
        return SampleGroup(task_id, measured, run or None, instruction=_instruction(runs, task_id))

    def session(self, session_id: str, run: str) -> SessionView | None:
        for one in self._look():
            if run not in ("", one.name) or (line := one.line(session_id)) is None:
                continue
            found = one.session(session_id)
            if found is None:
                return None
            result = found.result
            facts: JSON = {
                "exit_code": result.exit_code,
                "signal": result.signal,
                "contained": found.capture.session.metadata.get("contains"),
                **{
                    name: result.metadata.get(name) for name in ("evaluation", "scores", "left_out")
                },
            }
            known = {name: value for name, value in facts.items() if value is not None}
            command = one.fork_command(line)
            return SessionView(line, found.trajectory, found, result.logs, known, command)
        return None

    def attempts(self, session_id: str, run: str) -> AttemptTree | None:
        shown = self.session(session_id, run)
        if shown is None or shown.session is None:
            return None
        runs = self._look()
        lines = [line for one in runs for line in one.lines()]
        with shown.session.lock:
            replies = shown.session.fork_points.values()
        return attempts_of(place_of(shown.line), lines, _origins(runs, lines), replies)

    def report(self, kind: RunReport[T], run: str) -> T | None:
        found = (one.report(kind) for one in self._look() if run in ("", one.name))
        return next((one for one in found if one is not None), None)

    def known(self, session_ids: Iterable[str]) -> dict[str, SessionRow]:
        """Return the rows, with token counts, of those sessions that are in the folder."""
        runs = self._look()
        found = ((name, one.line(name)) for name in session_ids for one in runs)
        return {name: line for name, line in found if line is not None}

    def file(self, session_id: str, run: str, name: str) -> Path | None:
        """Return the path of a log or kept file of a session; `None` = none lies in the run
        folder.
        """
        shown = self.session(session_id, run)
        if shown is None or shown.session is None or name not in shown.logs:
            return None
        for root in (shown.session.folder, shown.session.folder / "node"):
            path = (root / shown.logs[name]).resolve()
            if path.is_file() and path.is_relative_to(root.resolve()):
                return path
        return None

    def _look(self) -> list[CapturedRun]:
        """Refresh the runs and trainings; return the runs."""
        with self._lock:
            captures, self._trained = find(self.root)
            for path in captures:
                if path not in self._runs:
                    self._runs[path] = CapturedRun(path, _name(path.parent, self.root))
            for path in set(self._runs) - set(captures):
                self._runs.pop(path).close()
            for path in self._trained:
                # A course is rewritten in place: keep the last one while it is incomplete.
                if (course := read_json(path)) is not None:
                    self._courses[path] = course
            return [self._runs[path] for path in captures]

    def _trainings(self) -> list[TrainingProgress]:
        found = (
            training_of(_name(path.parent, self.root), self._courses[path])
            for path in self._trained
            if path in self._courses
        )
        return [one for one in found if one is not None]

    def _measured(self, line: SessionRow) -> SessionRow:
        if line.measured is not None:
            return line
        with self._lock:
            run = next((one for one in self._runs.values() if one.name == line.run), None)
        return (run and run.line(line.session_id)) or line


def _origins(
    runs: Sequence[CapturedRun], lines: Sequence[SessionRow]
) -> dict[Place, tuple[Place, int]]:
    """Find, for each fork, the session that it was made of: by the path of its capture file, or by
    its id where only one session has that, for folders may have been moved.
    """
    names = {str(one.path.resolve()): one.name for one in runs}
    named: defaultdict[str, list[Place]] = defaultdict(list)
    for line in lines:
        named[line.session_id].append(place_of(line))
    found: dict[Place, tuple[Place, int]] = {}
    for line in lines:
        if (origin := line.origin) is None:
            continue
        run = names.get(origin.capture) if origin.capture else line.run
        places = named[origin.session_id]
        same = [place for place in places if place[0] == run] or (
            places if len(places) == 1 else []
        )
        if same:
            found[place_of(line)] = (same[0], origin.at)
    return found


def _name(folder: Path, root: Path) -> str:
    inside = folder.relative_to(root).as_posix() if folder.is_relative_to(root) else folder.name
    return "." if inside == "." else inside


def _instruction(runs: Sequence[CapturedRun], task_id: str) -> str | None:
    """Return a task's instruction from the runs' settings; `None` = no run has it."""
    for run in runs:
        config = (read_json(run.folder / "run.json") or {}).get("config") or {}
        for task in config.get("tasks") or () if isinstance(config, dict) else ():
            if isinstance(task, dict) and task.get("task_id") == task_id:
                return str(task.get("instruction") or "") or None
    return None
