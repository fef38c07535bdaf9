"""`bridle tasks from-releases|verify`: make tasks from package releases, and verify tasks."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

import typer

from bridle.cli.run import BatchRun, run_batch, task_overrides
from bridle.cli.terminal import JsonOption, console, notes, print_json, print_table
from bridle.config import Task, assets_dir
from bridle.datasets.environments import Bench, Refused, safe_backend
from bridle.datasets.jsonl import load_tasks, read_manifest, task_digest
from bridle.datasets.releases import Maker, pairs, parse_wanted
from bridle.errors import ConfigError, RuntimeFailure
from bridle.evaluators.base import LATE
from bridle.node.results import result_from, sessions
from bridle.types import JSON, Cause

app = typer.Typer(add_completion=False, no_args_is_help=True)
EXPECTED = {"oracle": 1.0, "empty": 0.0}
"""Expected reward of the task's own solution, and of doing nothing."""
COLUMNS = ("task", "verdict", "detail")
TIMES = 2
CHUNK = 16
"""Tasks that are verified together, before their verdicts are written."""


@app.callback()
def tasks() -> None:
    """Make task sets, and verify them."""


@app.command("from-releases")
def from_releases(
    packages: Annotated[
        list[str], typer.Argument(metavar="PACKAGE[==A..B]...", help="Releases to make tasks from.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the tasks, one folder each.")],
    hint: Annotated[
        Literal["none", "tests", "notes"],
        typer.Option(
            help="Content of the instruction: versions; failing tests; also change notes."
        ),
    ] = "notes",
    most: Annotated[
        int, typer.Option(min=1, help="Tasks per package, from its newest releases.")
    ] = 3,
    runtime: Annotated[
        str, typer.Option(help="auto, bubblewrap or local; auto refuses to run uncontained.")
    ] = "auto",
    harbor: Annotated[
        Path | None,
        typer.Option(help="Folder for the same tasks in Harbor's format, one folder each."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make verified SWE tasks from consecutive releases of Python packages on your package index.

    Exit code 0 if at least one task was kept, else 1.
    """
    for each in packages:
        parse_wanted(each)
    if harbor is not None and harbor.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"--harbor {harbor}: must lie outside of --out {out}")
    bench = Bench(safe_backend(runtime))
    out.mkdir(parents=True, exist_ok=True)
    rows: list[JSON] = []
    for each in packages:
        maker = Maker(out, hint, bench, notes.print, harbor)
        rows += _make(maker, each, most)
    _print(rows, "from releases", json=json)
    raise typer.Exit(0 if any(row["verdict"] == "kept" for row in rows) else 1)


def _make(maker: Maker, wanted: str, most: int) -> list[JSON]:
    """Make and verify the tasks of one package, newest releases first."""
    rows: list[JSON] = []
    for older, newer in asyncio.run(pairs(wanted)):
        pair = f"{older.package} {older.version}..{newer.version}"
        try:
            made = asyncio.run(maker.make(older, newer))
        except Refused as error:
            rows.append({"task": pair, "verdict": error.cause, "detail": error.detail})
            continue
        except RuntimeFailure as error:
            rows.append({"task": pair, "verdict": "sandbox", "detail": str(error)})
            continue
        (row,) = verify_tasks(made.folder)
        if row["verdict"] == "sound":
            config = made.task["evaluator"]["config"]
            counts = [len(config[name]) for name in ("fail_to_pass", "pass_to_pass")]
            licence = made.task["metadata"]["licence"]
            detail = f"{counts[0]} tests to fix, {counts[1]} to keep; licence: {licence}"
            row = {"task": row["task"], "verdict": "kept", "detail": detail}
        else:
            shutil.rmtree(made.folder)
            if maker.harbor is not None:
                shutil.rmtree(maker.harbor / made.folder.name)
        rows.append(row)
        if sum(row["verdict"] == "kept" for row in rows) == most:
            break
    return rows


@app.command()
def verify(
    tasks: Annotated[
        Path, typer.Argument(help="Tasks with their solution: a folder, or a SWE set.")
    ],
    manifest: Annotated[
        Path | None,
        typer.Option(help="File with a line per task; tasks in it are not run again."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Verify tasks: run twice, the solution has reward 1 and doing nothing has reward 0.

    Exit code 0 if every task is sound, else 1.
    """
    rows = verify_tasks(tasks, manifest)
    _print(rows, str(tasks), json=json)
    raise typer.Exit(0 if all(row["verdict"] == "sound" for row in rows) else 1)


def verify_tasks(path: Path, manifest: Path | None = None) -> list[JSON]:
    """Return each task's verdict: `sound`, or the first proof that failed, with the reason.

    Verdicts in the manifest are reused; new ones are appended as they become known.
    """
    known = read_manifest(manifest) if manifest is not None and manifest.exists() else {}
    loaded = {
        harness: load_tasks(path, overrides=task_overrides(harness=harness, samples=TIMES))
        for harness in EXPECTED
    }
    digests = [task_digest(task) for task in loaded["empty"]]
    rows = [known[digest] for digest in digests if digest in known]
    left = [place for place, digest in enumerate(digests) if digest not in known]
    for first in range(0, len(left), CHUNK):
        places = left[first : first + CHUNK]
        proofs = {name: [each[place] for place in places] for name, each in loaded.items()}
        verdicts = _proved(proofs)
        for place in places:
            task = loaded["empty"][place]
            more = {"digest": digests[place], "image": task.runtime.image}
            rows.append(verdicts[task.task_id] | more)
            if manifest is not None:
                with manifest.open("a", encoding="utf-8") as file:
                    file.write(dumps(rows[-1]) + "\n")
    return rows


def _proved(proofs: Mapping[str, list[Task]]) -> dict[str, JSON]:
    """Run tasks with each harness; return the verdict on each task."""
    verdicts: dict[str, JSON] = {}
    for harness, tasks in proofs.items():
        engine = f"scripted:{assets_dir() / 'silent.json'}"
        with tempfile.TemporaryDirectory(prefix="bridle-verify-") as folder:
            lines = run_batch(BatchRun(tasks, engine, Path(folder), title=harness))
            results = [result_from(capture) for capture in sessions(Path(folder))]
        found = {each.session_id: each.metadata.get("evaluation") or {} for each in results}
        for task in tasks:
            own = [line for line in lines if line["task_id"] == task.task_id]
            row = verdicts.setdefault(task.task_id, {"task": task.task_id, "verdict": "sound"})
            row.setdefault("detail", "")
            stages = [stage for line in own for stage in line["timing"].items()]
            seconds = sum(spent for stage, spent in stages if stage != "queue")
            row["seconds"] = round(row.get("seconds", 0.0) + seconds, 1)
            bad = [line for line in own if line["reward"] != EXPECTED[harness]]
            if bad and row["verdict"] == "sound":
                details = [_detail(line, found.get(line["session_id"], {})) for line in bad]
                row["verdict"] = f"{harness} is not {EXPECTED[harness]:.0f}"
                row["verdict"] += " each time" if len(bad) < len(own) else ""
                if all(map(_is_late, bad, details)):
                    row["verdict"] = "out of time"
                row["detail"] = details[0]
    return verdicts


def _detail(line: JSON, evaluation: JSON) -> str:
    """Describe a session with an unexpected reward."""
    reason = f"reward {line['reward']}, {line['status']} {line['error'] or ''}".strip()
    tests = ", ".join(_failed(evaluation))
    return f"{reason}{': ' if tests else ''}{tests}"


def _is_late(line: JSON, detail: str) -> bool:
    """Return whether a stage of the session, or its checker, did not end in time."""
    return line["cause"] == Cause.TIMEOUT or LATE in detail


def _failed(evaluation: JSON) -> list[str]:
    """Return the names of the failed tests, or what kept the evaluator from running them."""
    if "unscorable" in evaluation:
        return [evaluation["unscorable"].partition("\n")[0]]
    groups = (evaluation.get("tests_status") or {}).values()
    return [*(evaluation.get("not_passed") or ()), *(n for each in groups for n in each["failure"])]


def _print(rows: list[JSON], title: str, *, json: bool) -> None:
    if json:
        print_json(rows)
        return
    print_table(title, COLUMNS, ([row[name] for name in COLUMNS] for row in rows))
    counts = Counter(row["verdict"] for row in rows)
    console.print(", ".join(f"{cause}: {count}" for cause, count in counts.most_common()))
