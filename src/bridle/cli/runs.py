"""Finds runs and sessions by a folder, a capture file or a session id."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.capture.reader import SqliteReader
from bridle.capture.records import SessionCapture
from bridle.errors import ConfigError
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.config import Task

CAPTURE = "capture.sqlite"


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
    import orjson

    from bridle.node.run_folder import RUN

    path = base / RUN
    found: JSON = orjson.loads(path.read_bytes())["config"] if path.exists() else {}
    return found


def tasks_of(base: Path) -> dict[str, Task]:
    from bridle.config import Task

    return {one["task_id"]: Task.model_validate(one) for one in config_of(base).get("tasks", [])}
