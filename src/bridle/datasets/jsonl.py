"""Task files -> tasks: JSON Lines, JSON and TOML, and folders of them.

A file holds one task, or a list of tasks with common `defaults`:

- `.jsonl`: one task a line; empty lines are passed over;
- `.json`: a task, an array of tasks, or `{"defaults": {...}, "tasks": [...]}`;
- `.toml`: a task, or `[defaults]` and `[[tasks]]`;
- `.parquet`: a task a row.

A line or row in the form of SWE-bench is made a task by `bridle.datasets.swe`. One that cannot be
graded is left out and logged with its line, field and fix, unless the load is strict: a set of a
thousand rows has some. A mistake in a task of one's own ends the load.

`hf://datasets/ORG/NAME[@REVISION][/FILES]` stands for the Parquet and JSONL files of a set on the
hub, or for those that match FILES; `FILE.json:NAME[@VERSION]` for a set of a Harbor registry
(`bridle.datasets.harbor`).

A folder with a `task.toml` or `task.json` is that one task, whatever else lies in it (its work
files); with an `instruction.md` beside it, it is a Harbor task (`bridle.datasets.harbor`). Any
other folder stands for the task files and folders in it, by name. Relative paths in a task are
relative to its file. Every error names the path, the line and the field.

A manifest of verified tasks is JSON Lines, each the verdict on one content of one task. A line has
`task`, `digest`, `image`, `verdict` (`sound`, or what failed), `detail` and `seconds`. A task whose
statement, runtime, evaluator or files changed has another digest, so another line.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from bridle.config import Action, Task, explain, merged, read_text
from bridle.datasets.harbor import (
    folder_digest,
    harbor_task,
    is_harbor,
    oracle_settings,
    registry_folders,
)
from bridle.datasets.swe import decode_field, is_swe, swe_oracle, swe_task
from bridle.errors import ConfigError
from bridle.types import JSON

SUFFIXES = (".jsonl", ".json", ".toml", ".parquet")
SPACE = re.compile(r"[ \t\r\n]*")
HUB = re.compile(r"hf:/+datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.+))?")
HUB_FILES = "*.parquet", "*.jsonl"
MOST_LOGGED = 20
"""Rows that are logged one by one."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RawTask:
    """One task as written, and where."""

    path: Path
    line: int
    """Line where it begins, from 1."""
    text: str
    """The file's lines from there on; where a field's own line is looked for."""
    value: Any
    """A `ConfigError` if the line could not be read."""


def load_tasks(
    path: Path,
    *,
    defaults: Mapping[str, Any] | None = None,
    overrides: JSON | None = None,
    strict: bool = False,
) -> list[Task]:
    """Return all tasks of a file or folder, in order.

    The file's own defaults and the tasks override `defaults`; `overrides` override them all; they
    are merged object by object. Raises `ConfigError`: no such path, no task in it, a syntax error,
    a wrong field, a file to upload that does not exist, one task id twice. Of a file with rows of a
    SWE set, rows that are wrong are left out and logged, unless `strict`.
    """
    tasks: dict[str, Task] = {}
    seen: dict[str, str] = {}
    wrong: list[ConfigError] = []
    hub = HUB.fullmatch(str(path))
    for file in _files(path) if hub is None else _hub_files(*hub.groups()):
        common, raws = _read(file, merged(dict(defaults or {}), overrides or {}))
        under = merged(dict(defaults or {}), common)
        is_set = not strict and any(is_swe(raw.value) for raw in raws)
        for raw in raws:
            where = f"{raw.path}:{raw.line}"
            try:
                task = _task(raw, under, overrides or {})
                if task.task_id in seen:
                    other = seen[task.task_id]
                    raise ConfigError(
                        f"{where}: task_id {task.task_id!r} is used at {other} too; give each "
                        "task its own"
                    )
            except ConfigError as error:
                if not is_set:
                    raise
                wrong.append(error)
                continue
            seen[task.task_id], tasks[task.task_id] = where, task
    for each in wrong[:MOST_LOGGED]:
        log.warning("row left out", why=str(each))
    if wrong:
        log.warning("rows left out", rows=len(wrong), tasks=len(tasks))
    if not tasks:
        raise wrong[0] if wrong else ConfigError(f"{path}: no tasks in it")
    return list(tasks.values())


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"{path}: the name of a task file must end in {', '.join(SUFFIXES)}")
        yield path
        return
    if not path.is_dir():
        yield from (file for folder in registry_folders(path) for file in _files(folder))
        return
    own = next((path / name for name in TASK_FILES if (path / name).is_file()), None)
    if own is not None:
        yield own
        return
    for entry in sorted(path.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _files(entry)
        elif entry.suffix in SUFFIXES:
            yield entry


def _hub_files(name: str, revision: str | None, files: str | None) -> list[Path]:
    """Files of a set on the hub, from its cache or, unless `HF_HUB_OFFLINE` is set, from there."""
    from huggingface_hub import snapshot_download

    wanted = HUB_FILES if files is None else (files,)
    terms: JSON = {"repo_type": "dataset", "revision": revision, "allow_patterns": list(wanted)}
    try:
        folder = Path(snapshot_download(name, **terms))
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).strip().splitlines()[0]
        raise ConfigError(f"hf://datasets/{name}: cannot be loaded from the hub: {why}") from error
    names = {each: each.relative_to(folder).as_posix() for each in folder.rglob("*")}
    kept = (each for each, name in names.items() if any(fnmatchcase(name, one) for one in wanted))
    return sorted(each for each in kept if each.is_file())


def _read(path: Path, wanted: JSON) -> tuple[JSON, list[RawTask]]:
    """Return a file's own defaults and its tasks. `wanted` is what stands for every task."""
    if is_harbor(path):
        task = harbor_task(path.parent, wanted)
        return {}, [RawTask(path, 1, path.read_text(encoding="utf-8"), task)]
    if path.suffix == ".parquet":
        return {}, list(_read_parquet(path))
    text = read_text(path)
    try:
        match path.suffix:
            case ".jsonl":
                return {}, list(_read_lines(path, text))
            case ".json":
                return _read_json(path, text)
            case _:
                return _read_toml(path, text)
    except RecursionError:
        raise ConfigError(f"{path}: values are nested too deeply to be read") from None


def _read_lines(path: Path, text: str) -> Iterator[RawTask]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                value = ConfigError(
                    f"{path}:{number}: not JSON at column {error.colno}: {error.msg}"
                )
            yield RawTask(path, number, line, value)


def _read_parquet(path: Path) -> Iterator[RawTask]:
    """Yield one task a row; empty cells are left out, objects may be written as JSON."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: the task file cannot be read: {error}") from error
    for number, row in enumerate(rows, 1):
        value = {name: _unpacked(name, cell) for name, cell in row.items() if cell is not None}
        yield RawTask(path, number, "", value)


def _unpacked(name: str, cell: object) -> object:
    """Return a cell of a Parquet file; a field of a task that is an object may be JSON text."""
    known = Task.model_fields.get(name)
    return cell if known is None or known.annotation is str else decode_field(cell)


def _read_json(path: Path, text: str) -> tuple[JSON, list[RawTask]]:
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}:{error.lineno}: not JSON at column {error.colno}: {error.msg}"
        ) from None
    start = _after_space(text, 0)
    if isinstance(whole, list):
        return {}, [_raw(path, text, offset, value) for _, offset, value in _parts(text, start)]
    if not isinstance(whole, dict) or "tasks" not in whole:
        return {}, [_raw(path, text, start, whole)]
    common = _common(path, whole)
    tasks = [offset for name, offset, _ in _parts(text, start) if name == "tasks"][-1]
    return common, [_raw(path, text, offset, value) for _, offset, value in _parts(text, tasks)]


def _read_toml(path: Path, text: str) -> tuple[JSON, list[RawTask]]:
    try:
        whole = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        line = found[1] if found else text.count("\n") + 1
        raise ConfigError(f"{path}:{line}: {error}") from None
    if "tasks" not in whole:
        return {}, [RawTask(path, 1, text, whole)]
    common = _common(path, whole)
    heads = [found.start() for found in re.finditer(r"^\s*\[\[\s*tasks\s*\]\]", text, re.MULTILINE)]
    heads += [0] * (len(whole["tasks"]) - len(heads))
    return common, [
        _raw(path, text, offset + len(text[offset:]) - len(text[offset:].lstrip()), value)
        for offset, value in zip(heads, whole["tasks"], strict=False)
    ]


def _common(path: Path, whole: JSON) -> JSON:
    """Return the `defaults` beside `tasks`."""
    strange = sorted(whole.keys() - {"defaults", "tasks"})
    if strange:
        raise ConfigError(
            f"{path}:1: unknown field {strange[0]!r}: beside 'tasks' only 'defaults' may stand"
        )
    common = whole.get("defaults", {})
    if not isinstance(common, dict):
        raise ConfigError(f"{path}:1: defaults: must be an object, not {common!r}")
    if not isinstance(whole["tasks"], list):
        raise ConfigError(f"{path}:1: tasks: must be a list, not {type(whole['tasks']).__name__}")
    return common


def _raw(path: Path, text: str, offset: int, value: object) -> RawTask:
    return RawTask(path, text.count("\n", 0, offset) + 1, text[offset:], value)


def _after_space(text: str, offset: int) -> int:
    found = SPACE.match(text, offset)
    return found.end() if found else offset


def _parts(text: str, start: int) -> Iterator[tuple[str, int, Any]]:
    """(name, offset, value) of each part of the valid JSON array or object that begins at `start`;
    the parts of an array have no name.
    """
    decoder, name, is_object = json.JSONDecoder(), "", text[start] == "{"
    offset = _after_space(text, start + 1)
    while text[offset] not in "]}":
        if is_object:
            name, offset = decoder.raw_decode(text, offset)
            offset = _after_space(text, _after_space(text, offset) + 1)
        value, end = decoder.raw_decode(text, offset)
        yield name, offset, value
        offset = _after_space(text, end)
        if text[offset] == ",":
            offset = _after_space(text, offset + 1)


def _task(raw: RawTask, under: JSON, over: JSON) -> Task:
    if isinstance(raw.value, ConfigError):
        raise raw.value
    if not isinstance(raw.value, dict):
        raise ConfigError(f"{raw.path}:{raw.line}: a task must be an object, not {raw.value!r:.80}")
    value, where = raw.value, f"{raw.path}:{raw.line}"
    is_row = is_swe(value)
    if is_row:
        value = swe_task(value, where)
    whole, folder = merged(merged(under, value), over), raw.path.parent
    agent = whole.get("agent")
    by_oracle = isinstance(agent, dict) and agent.get("harness") == "oracle"
    if by_oracle and is_row:
        whole["agent"] = {"settings": swe_oracle(raw.value, where)} | whole["agent"]
    elif by_oracle and (folder / "solution").is_dir():
        whole["agent"] = {"settings": oracle_settings(folder, None)} | whole["agent"]
    try:
        task = Task.model_validate(whole)
    except ValidationError as error:
        fields = [part for part in error.errors()[0]["loc"] if isinstance(part, str)]
        raise explain(error, f"{raw.path}:{_line_of(raw, fields)}") from None
    return _resolved(raw, task, raw.path.parent.resolve())


def _resolved(raw: RawTask, task: Task, folder: Path) -> Task:
    """Return the task with its paths made absolute, after a look at every file that it uploads."""
    stages = {
        stage: tuple(
            _action(raw, f"runtime.{stage}.{index}", action, folder)
            for index, action in enumerate(getattr(task.runtime, stage))
        )
        for stage in ("prepare", "eval_prepare")
    }
    changes: JSON = {
        "task_dir": str(folder),
        "runtime": task.runtime.model_copy(update=stages),
    }
    if task.agent.skills_path is not None:
        skills = {"skills_path": str(folder / task.agent.skills_path)}
        changes["agent"] = task.agent.model_copy(update=skills)
    return task.model_copy(update=changes)


def _action(raw: RawTask, field: str, action: Action, folder: Path) -> Action:
    needed = {"exec": ("command",), "scrub_git": ()}
    for name in needed.get(action.type, ("source", "target")):
        if getattr(action, name) is None:
            line = _line_of(raw, [field.split(".")[1]])
            raise ConfigError(
                f"{raw.path}:{line}: {field}.{name} is missing: an action of type {action.type!r} "
                "needs it"
            )
    if action.source is None:
        return action
    source = folder / action.source
    if not source.exists():
        line = _line_of(raw, ["source"])
        raise ConfigError(f"{raw.path}:{line}: {field}.source: no such file: {source}")
    return action.model_copy(update={"source": str(source)})


def _line_of(raw: RawTask, fields: list[str]) -> int:
    """Return the line where the innermost of `fields` that is written stands; else the task's
    own.
    """
    for name in reversed(fields):
        key = re.escape(name)
        written = rf"""(?m)(?:^\s*|[{{,]\s*)(?:"{key}"\s*:|"?{key}"?\s*=)|^\s*\[+[^\]]*\b{key}\]"""
        if (found := re.search(written, raw.text)) is not None:
            start = found.end() - 1
            return raw.line + raw.text.count("\n", 0, start)
    return raw.line


HOLE = re.compile(r"\{\{\s*([\w.-]+)\s*\}\}")


def with_template(task: Task, template: str) -> Task:
    """Return the task with its instruction put into `template`.

    `ConfigError` for a placeholder that cannot be filled, and for a template without the
    instruction.
    """
    known = {"instruction": task.instruction, "task_id": task.task_id}
    known |= {f"metadata.{name}": str(value) for name, value in task.metadata.items()}
    holes = HOLE.findall(template)
    if "instruction" not in holes:
        raise ConfigError(
            "the instruction template must contain {{ instruction }}, the place of the task's "
            "own text"
        )
    if missing := sorted(set(holes) - known.keys()):
        message = f"task {task.task_id!r}: the template wants {missing}; known: {sorted(known)}"
        raise ConfigError(message)
    text = HOLE.sub(lambda hole: known[hole[1]], template)
    return task.model_copy(update={"instruction": text})


# ---- manifests of verified tasks


TASK_FILES = ("task.toml", "task.json")
SOUND = "sound"


def task_digest(task: Task) -> str:
    """Return the hex digest of everything that decides a task's reward; its folder's path does not
    count.
    """
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
    """Return the entries of a manifest of verified tasks by task digest, the last of each.

    `ConfigError` names a line that is no entry.
    """
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
    """Return the ids of the tasks that a manifest does not call sound, each with the cause.

    A file that has not changed is read once. `ConfigError` if it cannot be read.
    """
    changed_ns = path.stat().st_mtime_ns if path.exists() else 0
    known = _lines_of(path, changed_ns)
    verdicts = {task.task_id: known.get(task_digest(task), {}).get("verdict") for task in tasks}
    return {
        name: verdict or "not verified" for name, verdict in verdicts.items() if verdict != SOUND
    }


def require_verified(tasks: Sequence[Task], path: Path) -> None:
    """Raise `ConfigError` if a manifest does not call all tasks sound; it lists the others by
    cause.
    """
    if bad := unsound(tasks, path):
        causes = ", ".join(f"{cause}: {count}" for cause, count in Counter(bad.values()).items())
        shown = "; ".join(f"{name} ({cause})" for name, cause in list(bad.items())[:5])
        raise ConfigError(
            f"{path}: {len(bad)} of {len(tasks)} tasks are not verified as they are ({causes}):"
            f" {shown}; run `bridle tasks verify --manifest {path}`"
        )
