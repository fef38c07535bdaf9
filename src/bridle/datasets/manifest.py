"""Manifests of verified tasks: JSON Lines, each the verdict on one content of one task.

A line has `task`, `digest`, `image`, `verdict` (`sound`, or what failed), `detail` and `seconds`. A
task whose statement, runtime, evaluator or files changed has another digest, so another line.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from bridle.config import Task, read_text
from bridle.datasets.harbor import folder_digest
from bridle.errors import ConfigError
from bridle.types import JSON

TASK_FILES = ("task.toml", "task.json")
SOUND = "sound"


def task_digest(task: Task) -> str:
    """Return the hex digest of what decides a task's reward; the same wherever its folder lies."""
    decides = task.model_dump(mode="json", include={"instruction", "runtime", "evaluator"})
    text = json.dumps(decides, sort_keys=True)
    folder = Path(task.task_dir or ".")
    if any((folder / name).is_file() for name in TASK_FILES):
        text = text.replace(json.dumps(str(folder))[1:-1], ".") + folder_digest(folder)
    else:
        text += "".join(map(_digest_of, _files_of(task, folder)))
    return sha256(text.encode(errors="backslashreplace")).hexdigest()


def _files_of(task: Task, folder: Path) -> Iterator[Path]:
    """Yield the files and folders that are uploaded or score, of a task without a folder of its
    own.
    """
    for action in (*task.runtime.prepare, *task.runtime.eval_prepare):
        if action.source is not None:
            yield folder / action.source
    for text in re.findall(r'"([^"\\\\]+\.py)[:"]', json.dumps(task.evaluator.config)):
        yield folder / text
    if task.evaluator.strategy == "harbor":
        yield folder / str(task.evaluator.config.get("tests", "tests"))


def _digest_of(path: Path) -> str:
    if path.is_dir():
        return folder_digest(path)
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def read_manifest(path: Path) -> dict[str, JSON]:
    """Return the lines by digest, the last of each. `ConfigError` names a line that is none."""
    found: dict[str, JSON] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            row = json.loads(line)
            found[row["digest"]] = {name: str(row[name]) for name in ("task", "verdict")} | row
        except (ValueError, KeyError, TypeError):
            message = f"{path}:{number}: is no line of `bridle tasks verify --manifest`"
            raise ConfigError(message) from None
    return found


@lru_cache(maxsize=8)
def _lines_of(path: Path, changed_ns: int) -> dict[str, JSON]:  # noqa: ARG001 - a key of the cache
    return read_manifest(path)


def unsound(tasks: Sequence[Task], path: Path) -> dict[str, str]:
    """Return ids of the tasks that a manifest does not call sound, with the cause of each.

    A file that has not changed is read once. `ConfigError` if it cannot be read.
    """
    changed_ns = path.stat().st_mtime_ns if path.exists() else 0
    known = _lines_of(path, changed_ns)
    verdicts = {task.task_id: known.get(task_digest(task), {}).get("verdict") for task in tasks}
    return {
        name: verdict or "not verified" for name, verdict in verdicts.items() if verdict != SOUND
    }


def require_verified(tasks: Sequence[Task], path: Path) -> None:
    """Raise `ConfigError` with all tasks that a manifest does not call sound, by cause."""
    if bad := unsound(tasks, path):
        causes = ", ".join(f"{cause}: {count}" for cause, count in Counter(bad.values()).items())
        shown = "; ".join(f"{name} ({cause})" for name, cause in list(bad.items())[:5])
        message = (
            f"{path}: {len(bad)} of {len(tasks)} tasks are not verified as they are ({causes})"
        )
        raise ConfigError(f"{message}: {shown}; run `bridle tasks verify --manifest {path}`")
