"""A folder as a source: a run, a data set's rounds, a training, a gateway's or a server's data.

All runs in it and below it are shown together. It may change while it is looked at: what is new is
seen at the next look. Nothing is ever written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from bridle.dashboard.lines import Group, Line, Wanted, groups_of, last_attempts
from bridle.dashboard.overview import Overview, Training, newest, overview_of, training_of
from bridle.dashboard.runs import Run, find, measure_some, read_json
from bridle.dashboard.source import Listed, Shown
from bridle.errors import ConfigError
from bridle.types import JSON

MEASURE_S = 0.4
"""How long a look at the first page may build sessions that were not built before."""

SAME_S = 60.0
"""How long the first page is good while nothing is written; its rate is that of the last time."""


class Folder:
    """Implements `Source`. `ConfigError` if there is nothing to show in `root`."""

    def __init__(self, root: Path, *, measure_s: float = MEASURE_S) -> None:
        self.root = root
        self._measure_s = measure_s
        self._lock = threading.Lock()
        self._runs: dict[Path, Run] = {}
        self._courses: dict[Path, JSON] = {}
        self._trained: list[Path] = []
        self._shown: tuple[float, object, Overview] | None = None
        self._look()
        if not self._runs and not self._courses:
            raise ConfigError(f"{root} has nothing to show: no capture.sqlite in it or below it")

    @property
    def title(self) -> str:
        return str(self.root)

    def close(self) -> None:
        for run in self._runs.values():
            run.close()

    def overview(self) -> Overview:
        runs = self._look()
        # Looked at first, so that all their sessions are known.
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

    def sessions(self, wanted: Wanted, start: int, count: int) -> Listed:
        runs = self._look()
        lines = [line for run in runs for line in run.lines()]
        found = sorted(filter(wanted.takes, lines), key=lambda line: -(line.opened_at or 0.0))
        page = [self._measured(line) for line in found[start : start + count]]
        choices = {
            "status": sorted({line.status for line in lines}),
            "cause": sorted({line.cause for line in lines if line.cause}),
            "harness": sorted({line.harness for line in lines if line.harness}),
            "run": [run.name for run in runs] if len(runs) > 1 else [],
        }
        return Listed(page, len(found), choices)

    def groups(self, run: str, start: int, count: int) -> tuple[Sequence[Group], int]:
        lines = (line for one in self._look() if run in ("", one.name) for line in one.lines())
        groups = groups_of(lines)
        return groups[start : start + count], len(groups)

    def group(self, task_id: str, run: str) -> Group | None:
        runs = [one for one in self._look() if run in ("", one.name)]
        lines = last_attempts(
            line for one in runs for line in one.lines() if line.task_id == task_id
        )
        if not lines:
            return None
        measured = tuple(self._measured(line) for line in lines)
        return Group(task_id, measured, run or None, instruction=_instruction(runs, task_id))

    def session(self, session_id: str, run: str) -> Shown | None:
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
            return Shown(line, found.trajectory, found, result.logs, known)
        return None

    def known(self, session_ids: Iterable[str]) -> dict[str, Line]:
        """Those of these sessions that are there, measured."""
        runs = self._look()
        found = ((name, one.line(name)) for name in session_ids for one in runs)
        return {name: line for name, line in found if line is not None}

    def file(self, session_id: str, run: str, name: str) -> Path | None:
        """See `Source.file`. Never a path that leads out of the run's folder."""
        shown = self.session(session_id, run)
        if shown is None or shown.session is None or name not in shown.logs:
            return None
        for root in (shown.session.folder, shown.session.folder / "node"):
            path = (root / shown.logs[name]).resolve()
            if path.is_file() and path.is_relative_to(root.resolve()):
                return path
        return None

    def _look(self) -> list[Run]:
        """The runs that are there now."""
        with self._lock:
            captures, self._trained = find(self.root)
            for path in captures:
                if path not in self._runs:
                    self._runs[path] = Run(path, _name(path.parent, self.root))
            for path in set(self._runs) - set(captures):
                self._runs.pop(path).close()
            for path in self._trained:
                # A course is rewritten in place: half of one is no reason to forget the last.
                if (course := read_json(path)) is not None:
                    self._courses[path] = course
            return [self._runs[path] for path in captures]

    def _trainings(self) -> list[Training]:
        found = (
            training_of(_name(path.parent, self.root), self._courses[path])
            for path in self._trained
            if path in self._courses
        )
        return [one for one in found if one is not None]

    def _measured(self, line: Line) -> Line:
        """The line with its law numbers."""
        if line.measured is not None:
            return line
        with self._lock:
            run = next((one for one in self._runs.values() if one.name == line.run), None)
        return (run and run.line(line.session_id)) or line


def _name(folder: Path, root: Path) -> str:
    inside = folder.relative_to(root).as_posix() if folder.is_relative_to(root) else folder.name
    return "." if inside == "." else inside


def _instruction(runs: Sequence[Run], task_id: str) -> str | None:
    """Return a task's instruction from the runs' settings; `None` = no run has it."""
    for run in runs:
        config = (read_json(run.folder / "run.json") or {}).get("config") or {}
        for task in config.get("tasks") or () if isinstance(config, dict) else ():
            if isinstance(task, dict) and task.get("task_id") == task_id:
                return str(task.get("instruction") or "") or None
    return None
