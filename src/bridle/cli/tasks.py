"""`bridle tasks from-releases|verify`: makes tasks of packages, and proves that tasks are sound."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bridle.cli.output import console, notes, print_json, print_table
from bridle.errors import RuntimeFailure
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.datasets.releases import Maker

app = typer.Typer(help="Make task sets, and verify them.", no_args_is_help=True)
Runtime = Annotated[
    str, typer.Option(help="auto, bubblewrap or local; auto refuses to run uncontained.")
]
EXPECTED = {"oracle": 1.0, "empty": 0.0}
"""The reward of each proof: with the task's own solution, and with nothing done."""
COLUMNS = ("task", "verdict", "detail")
TIMES = 2


@app.command("from-releases")
def from_releases(
    packages: Annotated[
        list[str], typer.Argument(metavar="PACKAGE[==A..B]...", help="Releases to make tasks of.")
    ],
    out: Annotated[Path, typer.Option(help="Folder that gets a folder per task.")],
    hint: Annotated[
        Literal["none", "tests", "notes"],
        typer.Option(help="What the statement tells: versions; failing tests; change notes too."),
    ] = "notes",
    most: Annotated[
        int, typer.Option(min=1, help="Tasks per package, of its newest releases.")
    ] = 3,
    runtime: Runtime = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make verified SWE tasks of following releases of Python packages on your package index.

    Ends with code 0 if at least one task was kept, else 1.
    """
    from bridle.datasets.environments import Bench, safe_backend
    from bridle.datasets.releases import Maker, parse_wanted

    for each in packages:
        parse_wanted(each)
    bench = Bench(safe_backend(runtime))
    out.mkdir(parents=True, exist_ok=True)
    rows: list[JSON] = []
    for each in packages:
        maker = Maker(out, hint, bench, notes.print)
        rows += _make(maker, each, most)
    _print(rows, "from releases", json=json)
    raise typer.Exit(0 if any(row["verdict"] == "kept" for row in rows) else 1)


def _make(maker: Maker, wanted: str, most: int) -> list[JSON]:
    """Make and verify the tasks of one package, newest releases first."""
    import asyncio

    from bridle.datasets.environments import Refused
    from bridle.datasets.releases import pairs

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
        (row,) = verified(made.folder)
        if row["verdict"] == "sound":
            config = made.task["evaluator"]["config"]
            counts = [len(config[name]) for name in ("fail_to_pass", "pass_to_pass")]
            licence = made.task["metadata"]["licence"]
            detail = f"{counts[0]} tests to fix, {counts[1]} to keep; licence: {licence}"
            row = {"task": row["task"], "verdict": "kept", "detail": detail}
        else:
            shutil.rmtree(made.folder)
        rows.append(row)
        if sum(row["verdict"] == "kept" for row in rows) == most:
            break
    return rows


@app.command()
def verify(
    tasks: Annotated[
        Path, typer.Argument(help="Task folder with a solution, or a folder of them.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prove tasks: twice, its own solution has reward 1 and doing nothing has reward 0.

    Ends with code 0 if every task is sound, else 1.
    """
    rows = verified(tasks)
    _print(rows, str(tasks), json=json)
    raise typer.Exit(0 if all(row["verdict"] == "sound" for row in rows) else 1)


def verified(path: Path) -> list[JSON]:
    """The verdict on each task: `sound`, or the first proof that failed, with its reason."""
    from bridle.cli.batch import Batch, run_batch
    from bridle.config import assets_dir
    from bridle.datasets.jsonl import load_tasks

    verdicts: dict[str, JSON] = {}
    for harness, expected in EXPECTED.items():
        overrides = {"agent": {"harness": harness}, "num_samples": TIMES}
        loaded = load_tasks(path, overrides=overrides)
        engine = f"scripted:{assets_dir() / 'silent.json'}"
        with tempfile.TemporaryDirectory(prefix="bridle-verify-") as folder:
            lines = run_batch(Batch(loaded, engine, None, Path(folder), None, title=harness))
        for line in lines:
            name = line["task_id"]
            row = verdicts.setdefault(name, {"task": name, "verdict": "sound", "detail": ""})
            if line["reward"] != expected and row["verdict"] == "sound":
                row["verdict"] = f"{harness} is not {expected:.0f}"
                row["detail"] = f"reward {line['reward']}, {line['status']} {line['error'] or ''}"
    return list(verdicts.values())


def _print(rows: list[JSON], title: str, *, json: bool) -> None:
    if json:
        print_json(rows)
        return
    print_table(title, COLUMNS, ([row[name] for name in COLUMNS] for row in rows))
    counts = Counter(row["verdict"] for row in rows)
    console.print(", ".join(f"{cause}: {count}" for cause, count in counts.most_common()))
