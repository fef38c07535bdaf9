"""The folder of one run: what it was, what was captured, what came out.

```
RUN/run.json              configuration and versions
    capture.sqlite        the facts; all else can be rebuilt from them
    trajectories.jsonl    one trajectory a line
    trajectories.parquet  the same, as arrays (written by the command line)
    summary.json          one entry per session, and totals
    sessions/<id>/        logs and kept files of each session
    certificate.json      what `bridle certify` found last
    scorers.json          what `bridle score` found last when it compared several scorers
```

Results are appended as sessions end, so SIGKILL takes none of those. `finish` puts the lines into
the order in which the sessions were opened and adds those of sessions that did not come to their
end, so the file is byte for byte what rebuilding from capture gives.

Runs and sessions are found by a folder, a capture file or a session id (`capture_files`,
`find_session`).
"""

from __future__ import annotations

import json
import platform
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from bridle import __version__
from bridle.capture.reader import SqliteReader
from bridle.capture.records import SessionCapture, Store
from bridle.config import Task
from bridle.errors import ConfigError, StoreError
from bridle.folders import FolderLock, private_file, private_folder
from bridle.node.results import SessionResult, result_from
from bridle.trajectory.result import trajectory_bytes
from bridle.types import JSON

RUN = "run.json"
CAPTURE = "capture.sqlite"
TRAJECTORIES = "trajectories.jsonl"
TRAJECTORIES_PARQUET = "trajectories.parquet"
SUMMARY = "summary.json"
CERTIFICATE = "certificate.json"
SCORERS = "scorers.json"
SESSIONS = "sessions"


class RunFolder:
    """One run's folder, held by one process while it is open. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Lock the folder until `close`. `ConfigError` names the process that holds it."""
        self.path = path
        self.capture = path / CAPTURE
        self.trajectories = path / TRAJECTORIES
        self.trajectories_parquet = path / TRAJECTORIES_PARQUET
        self._lock = FolderLock(path)
        self._lines: dict[str, tuple[int, int]] = {}
        self._summaries: dict[str, JSON] = {}
        self._end = 0

    @classmethod
    def create(cls, path: Path, *, config: JSON) -> Self:
        """Make the folder and write `run.json`.

        Raises `ConfigError` if it holds a run already or cannot be written.
        """
        try:
            private_folder(path)
            if any((path / name).exists() for name in (RUN, CAPTURE, TRAJECTORIES)):
                raise ConfigError(f"{path} holds a run already; give another folder")
            folder = cls(path)
            facts = {"bridle": __version__, "python": platform.python_version(), "config": config}
            private_file(path / RUN).write_text(json.dumps(facts, indent=2) + "\n")
            private_folder(path / SESSIONS)
        except OSError as error:
            raise ConfigError(f"{path} cannot be used as a run folder: {error}") from error
        return folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._lock.close()

    def session_folder(self, session_id: str) -> Path:
        """Return a session's folder for logs and kept files; it may not exist."""
        return self.path / SESSIONS / session_id

    def append(self, result: SessionResult) -> None:
        """Write one result. `StoreError` if it cannot be written."""
        line = trajectory_bytes(result.trajectory) + b"\n"
        try:
            with private_file(self.trajectories).open("ab") as file:
                # What a failed write left of a line goes first.
                file.truncate(self._end)
                file.write(line)
        except OSError as error:
            raise StoreError(f"{self.trajectories}: cannot write: {error}") from error
        self._lines[result.session_id] = (self._end, len(line))
        self._summaries[result.session_id] = result.summary()
        self._end += len(line)

    def finish(self, captures: Store) -> JSON:
        """Write trajectories and summary of all sessions in their order; returns the summary.

        Sessions that ended without a record (a store that failed) come last.
        Can be repeated. `StoreError` if something cannot be written or read.
        """
        aside = self.trajectories.with_suffix(".part")
        lines: dict[str, tuple[int, int]] = {}
        end = 0
        try:
            with private_file(aside).open("wb") as file:
                recorded = [each.session_id for each in captures.sessions() if not each.is_aside]
                # Those that no store took have nothing but their line.
                unrecorded = [name for name in self._lines if name not in set(recorded)]
                for session_id in (*recorded, *unrecorded):
                    line = self._line(session_id, captures)
                    file.write(line)
                    lines[session_id] = (end, len(line))
                    end += len(line)
            aside.replace(self.trajectories)
            self._lines, self._end = lines, end
            summary = summarise([self._summaries[session_id] for session_id in lines])
            private_file(self.path / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            raise StoreError(f"{self.path}: cannot write: {error}") from error
        return summary

    def _line(self, session_id: str, captures: Store) -> bytes:
        if session_id in self._lines:
            start, length = self._lines[session_id]
            with self.trajectories.open("rb") as file:
                file.seek(start)
                return file.read(length)
        result = result_from(captures.read(session_id))
        self._summaries[session_id] = result.summary()
        return trajectory_bytes(result.trajectory) + b"\n"

    def discard_if_unused(self) -> None:
        """Empty the folder again if no session was ever opened, so that a second try can use it.

        For a run that could not begin; what cannot be read is left alone.
        """
        try:
            if self.capture.exists():
                with SqliteReader(self.capture) as reader:
                    if reader.sessions():
                        return
        except StoreError:
            return
        for name in (RUN, CAPTURE, f"{CAPTURE}-wal", f"{CAPTURE}-shm"):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / SESSIONS, ignore_errors=True)

    def drop_logs(self, session_id: str) -> None:
        shutil.rmtree(self.session_folder(session_id), ignore_errors=True)


class ServerFolder(RunFolder):
    """A node's folder under a server: logs and kept files of runs; results are the server's."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """Make the folder, or take an existing one. `ConfigError` if another process has it."""
        private_folder(path / SESSIONS)
        return cls(path)

    def append(self, result: SessionResult) -> None:
        """Write nothing: the server keeps results in its own files."""


def summarise(sessions: list[JSON]) -> JSON:
    """Return `{"sessions": [...], "totals": {...}}` of `SessionResult.summary` entries."""
    rewards = [entry["reward"] for entry in sessions if entry["reward"] is not None]
    excluded: Counter[str] = Counter()
    for entry in sessions:
        excluded.update(entry["tokens_excluded"] or {})
    return {
        "sessions": sessions,
        "totals": {
            "sessions": len(sessions),
            "status": dict(Counter(entry["status"] for entry in sessions)),
            "cause": dict(Counter(entry["cause"] for entry in sessions if entry["cause"])),
            "scored": len(rewards),
            "reward_mean": sum(rewards) / len(rewards) if rewards else None,
            **{
                name: sum(entry[name] or 0 for entry in sessions)
                for name in ("exchanges", "traces", "tokens_captured", "tokens_trained")
            },
            "tokens_excluded": dict(excluded),
        },
    }


BY_WORKER = f"worker-*/{CAPTURE}"
"""Capture files of a gateway with several workers, in its data folder."""


def capture_files(target: Path) -> list[Path]:
    """Return the capture file of a run, those of a gateway's workers, or the file itself.

    `ConfigError` if there is none.
    """
    path = target / CAPTURE if target.is_dir() else target
    if path.is_file():
        return [path]
    found = sorted(target.glob(BY_WORKER), key=lambda file: (len(file.parent.name), file))
    if not found:
        raise ConfigError(f"{target} is not a run: {path} does not exist")
    return found


def sessions(target: Path) -> Iterator[SessionCapture]:
    """Yield the harness sessions of a run, each file's in the order of opening."""
    for path in capture_files(target):
        with SqliteReader(path) as reader:
            for session in reader.sessions():
                if not session.is_aside:
                    yield reader.read(session.session_id)


def find_session(name: str, runs: Path) -> tuple[Path, SessionCapture]:
    """Return the session whose id begins with `name`, and its capture file.

    `runs` is a run folder or a folder of runs. `ConfigError` for no such session or several.
    """
    files = [runs / CAPTURE]
    if not files[0].is_file():
        files = sorted([*runs.glob(f"*/{CAPTURE}"), *runs.glob(f"*/{BY_WORKER}")])
    found: list[tuple[Path, str]] = []
    for path in files:
        with SqliteReader(path) as reader:
            ids = [session.session_id for session in reader.sessions()]
        exact = [session_id for session_id in ids if session_id == name]
        found += [(path, i) for i in exact or (i for i in ids if i.startswith(name))]
    if not found:
        held = {0: " (no run there)", 1: ""}.get(len(files), f" ({len(files)} runs)")
        raise ConfigError(f"no session {name!r}; looked in {runs}{held}")
    if len(found) > 1:
        names = ", ".join(session_id for _, session_id in found[:5])
        raise ConfigError(f"{name!r} is the beginning of {len(found)} sessions: {names}...")
    path, session_id = found[0]
    with SqliteReader(path) as reader:
        return path, reader.read(session_id)


def config_of(base: Path) -> JSON:
    """Read the config of a run; empty if the folder holds none."""
    path = base / RUN
    found: JSON = json.loads(path.read_bytes())["config"] if path.exists() else {}
    return found


def tasks_of(base: Path) -> dict[str, Task]:
    return {one["task_id"]: Task.model_validate(one) for one in config_of(base).get("tasks", [])}
