"""`bridle run`: a batch of tasks, everything in one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.gateway import (
    ConcurrencyOption,
    ConfigOption,
    EnginesOption,
    HarnessOption,
    PromptOption,
    StreamOption,
    TelemetryOption,
    TokenizerOption,
    UntokenizedOption,
)
from bridle.cli.output import console, print_json, print_table
from bridle.errors import Problems
from bridle.types import JSON

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridle.cli.config import FileConfig
    from bridle.config import Task

TasksArgument = Annotated[
    Path, typer.Argument(help="Task file or folder, or a set on the hub (hf://datasets/ORG/NAME).")
]
RuntimeOption = Annotated[
    str | None, typer.Option(help="auto, bubblewrap, docker or local, for all tasks.")
]
NetworkOption = Annotated[
    str | None, typer.Option(help="gateway_only, open or none, for all tasks.")
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Refuse a task set with a row that is wrong.")
]

ManifestOption = Annotated[
    Path | None,
    typer.Option("--verified", help="Manifest of `bridle tasks verify` that must have all tasks."),
]


def run(  # noqa: PLR0913 - one parameter per flag
    tasks: TasksArgument,
    engine: EnginesOption = None,
    config: ConfigOption = None,
    tokenizer: TokenizerOption = None,
    harness: HarnessOption = None,
    runtime: RuntimeOption = None,
    network: NetworkOption = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Sessions per task instead of its own number.")
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option(help="Text around every instruction, with {{ instruction }} in it."),
    ] = None,
    first: Annotated[int | None, typer.Option(min=1, help="Only the first N tasks.")] = None,
    strict: StrictOption = False,
    manifest: ManifestOption = None,
    builder: Annotated[
        str | None, typer.Option(help="per_request or prefix_merging, for all tasks.")
    ] = None,
    concurrency: ConcurrencyOption = None,
    stream: StreamOption = None,
    prompt: PromptOption = None,
    allow_untokenized: UntokenizedOption = None,
    telemetry: TelemetryOption = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/<date> if not given.")] = None,
    scores: Annotated[
        bool, typer.Option("--report", help="Print pass@k, mean rewards and failures by cause.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run tasks with real harnesses and write their trajectories.

    Ends with code 0 if every session COMPLETED, 1 if some did not; rewards do not matter for it.
    """
    from bridle.api import new_run_folder
    from bridle.cli.batch import Batch, run_batch
    from bridle.cli.config import load_config
    from bridle.config import assets_dir
    from bridle.harnesses import CHECKS

    where = _given({"backend": runtime, "network": network})
    overrides = {"agent": _agent(harness), "runtime": where, "num_samples": samples}
    over = _given(overrides | {"builder": builder and {"strategy": builder}}) or {}
    if harness in CHECKS and not engine and config is None:
        engine = [f"scripted:{assets_dir() / 'silent.json'}"]
    folder = out or new_run_folder(Path("runs"))
    gateway = {"stream": stream, "prompt": prompt, "allow_untokenized": allow_untokenized}
    loaded, setup = _checked(
        lambda: _required(_load(tasks, over, template, strict=strict)[:first], manifest),
        lambda: load_config(
            config,
            engines=engine or (),
            tokenizer=tokenizer,
            gateway=gateway,
            telemetry=telemetry,
        ),
        folder,
    )
    lines = run_batch(Batch(loaded, setup, None, folder, concurrency))
    report(lines, folder, scores=scores, json=json)
    raise typer.Exit(0 if all(line["status"] == "COMPLETED" for line in lines) else 1)


def _checked(
    load: Callable[[], list[Task]], configure: Callable[[], FileConfig], folder: Path
) -> tuple[list[Task], FileConfig]:
    """The tasks and the config; where one is wrong, the error names all else that is, too."""
    from bridle.api import Gateway
    from bridle.cli.batch import preflight

    problems = Problems()
    loaded, setup = problems.tried(load), problems.tried(configure)
    if loaded is None or setup is None:
        gateway = None if setup is None else Gateway(setup, data=folder)
        preflight(problems, loaded or (), gateway)
        problems.raise_any()
    assert loaded is not None
    assert setup is not None
    return loaded, setup


def _agent(harness: str | None) -> JSON | None:
    """Another harness for a task, whose own command line belongs to its own."""
    return None if harness is None else {"harness": harness, "command": None, "import_path": None}


def _required(tasks: list[Task], manifest: Path | None) -> list[Task]:
    """The tasks, which the manifest has as sound. `ConfigError` if it has not."""
    from bridle.datasets.manifest import require_verified

    if manifest is not None:
        require_verified(tasks, manifest)
    return tasks


def _given(values: JSON) -> JSON | None:
    """Return the values that were given; `None` = none."""
    return {name: value for name, value in values.items() if value is not None} or None


def _load(path: Path, overrides: JSON, template: Path | None, *, strict: bool) -> list[Task]:
    """The tasks of a path, which know the name of their set."""
    from bridle.datasets.jsonl import load_tasks, read_template, with_template

    named = {"task_set": path.resolve().stem}
    loaded = [
        task.model_copy(update={"metadata": {**named, **task.metadata}})
        for task in load_tasks(path, overrides=overrides, strict=strict)
    ]
    if template is None:
        return loaded
    text = read_template(template)
    return [with_template(task, text) for task in loaded]


def report(lines: list[JSON], folder: Path, *, json: bool, scores: bool = False) -> None:
    """Print what came of a batch; with `scores`, what it was worth."""
    from bridle.cli.show import COLUMNS, print_scores, row
    from bridle.trajectory.scores import from_summaries, scores_of

    found = scores_of(from_summaries(lines)) if scores else []
    if json:
        told = {"report": [score.as_json() for score in found]} if scores else {}
        print_json({"folder": str(folder), "sessions": lines, **told})
        return
    print_table(f"{folder}: {len(lines)} sessions", COLUMNS, map(row, lines))
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "unknown"
    console.print(f"mean reward {mean} over {len(rewards)} scored of {len(lines)} sessions")
    print_scores(found)
    closer = f"written to {folder}; look closer with: bridle show SESSION --run {folder}"
    console.print(closer, soft_wrap=True)
