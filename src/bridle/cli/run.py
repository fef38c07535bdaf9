"""`bridle run` and `bridle fork`: batches of sessions, everything in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bridle.api import Gateway, new_run_folder
from bridle.cli.batch import BatchRun, preflight, run_batch
from bridle.cli.config import FileConfig
from bridle.cli.options import (
    ConcurrencyOption,
    EngineOptions,
    FirstOption,
    HarnessOption,
    JsonOption,
    PromptOption,
    RuntimeOption,
    SamplesOption,
    StreamOption,
    TasksArgument,
    TelemetryOption,
    UntokenizedOption,
    VerifiedOption,
    with_option_groups,
)
from bridle.cli.output import check_folder, console, print_json, print_table
from bridle.cli.show import COLUMNS, print_scores, row
from bridle.config import ForkSpec, Task, assets_dir, read_text
from bridle.datasets.harbor import SET
from bridle.datasets.jsonl import load_tasks, require_verified, with_template
from bridle.errors import ConfigError, Problems
from bridle.harnesses import CHECKS
from bridle.node.run_folder import config_of, find_session, tasks_of
from bridle.trajectory.scores import from_summaries, scores_of
from bridle.types import JSON


@with_option_groups
def run(  # noqa: PLR0913 - one parameter per flag
    tasks: TasksArgument,
    engines: EngineOptions,
    harness: HarnessOption = None,
    runtime: RuntimeOption = None,
    network: Annotated[
        str | None, typer.Option(help="gateway_only, open or none, for all tasks.")
    ] = None,
    samples: SamplesOption = None,
    template: Annotated[
        Path | None,
        typer.Option(help="File with a text that contains {{ instruction }}, for all tasks."),
    ] = None,
    first: FirstOption = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a task set with an invalid row.")
    ] = False,
    manifest: VerifiedOption = None,
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
    json: JsonOption = False,
) -> None:
    """Run tasks with real harnesses and write their trajectories.

    Exit code 0 if every session COMPLETED, else 1; rewards do not count.
    """
    overrides = task_overrides(
        harness=harness, runtime=runtime, network=network, samples=samples, builder=builder
    )
    if harness in CHECKS and not engines.engine and engines.config is None:
        engines = replace(engines, engine=[f"scripted:{assets_dir() / 'silent.json'}"])
    folder = out or new_run_folder(Path("runs"))
    gateway = {"stream": stream, "prompt": prompt, "allow_untokenized": allow_untokenized}
    loaded, setup = _checked(
        lambda: _selected(tasks, overrides, template, first, manifest, strict=strict),
        lambda: engines.load(gateway=gateway, telemetry=telemetry),
        folder,
    )
    lines = run_batch(BatchRun(loaded, setup, folder, concurrency))
    report(lines, folder, scores=scores, json=json)
    raise typer.Exit(0 if all(line["status"] == "COMPLETED" for line in lines) else 1)


def _checked(
    load: Callable[[], list[Task]], configure: Callable[[], FileConfig], folder: Path
) -> tuple[list[Task], FileConfig]:
    """Return the tasks and the config; the error for a wrong one names all other mistakes too."""
    problems = Problems()
    loaded, setup = problems.tried(load), problems.tried(configure)
    if loaded is None or setup is None:
        gateway = None if setup is None else Gateway(setup, data=folder)
        preflight(problems, loaded or (), gateway)
        problems.raise_any()
    assert loaded is not None
    assert setup is not None
    return loaded, setup


def task_overrides(
    *,
    harness: str | None = None,
    runtime: str | None = None,
    network: str | None = None,
    samples: int | None = None,
    builder: str | None = None,
) -> JSON:
    """Return the fields of all tasks that flags override; `None` = not given."""
    overrides: JSON = {}
    if harness is not None:  # a command belongs to the task's own harness
        overrides["agent"] = {"harness": harness, "command": None, "import_path": None}
    where = {"backend": runtime, "network": network}
    if where := {name: value for name, value in where.items() if value is not None}:
        overrides["runtime"] = where
    if samples is not None:
        overrides["num_samples"] = samples
    if builder is not None:
        overrides["builder"] = {"strategy": builder}
    return overrides


def load_task_set(path: Path, overrides: JSON, *, strict: bool = False) -> list[Task]:
    """Load the tasks of a path with the name of their set in their metadata."""
    of_registry = not path.exists() and SET.fullmatch(str(path))
    named = {"task_set": path.name.rpartition(":")[2] if of_registry else path.resolve().stem}
    return [
        task.model_copy(update={"metadata": {**named, **task.metadata}})
        for task in load_tasks(path, overrides=overrides, strict=strict)
    ]


def _selected(
    path: Path,
    overrides: JSON,
    template: Path | None,
    first: int | None,
    manifest: Path | None,
    *,
    strict: bool,
) -> list[Task]:
    """Load the tasks to run. `ConfigError` if the manifest does not list one as sound."""
    loaded = load_task_set(path, overrides, strict=strict)[:first]
    if template is not None:
        text = read_text(template)
        loaded = [with_template(task, text) for task in loaded]
    if manifest is not None:
        require_verified(loaded, manifest)
    return loaded


def report(lines: list[JSON], folder: Path, *, json: bool, scores: bool = False) -> None:
    """Print the sessions of a batch and, with `scores`, its pass@k and failures."""
    found = scores_of(from_summaries(lines)) if scores else []
    if json:
        shown = {"report": [score.as_json() for score in found]} if scores else {}
        print_json({"folder": str(folder), "sessions": lines, **shown})
        return
    print_table(f"{folder}: {len(lines)} sessions", COLUMNS, map(row, lines))
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "unknown"
    console.print(f"mean reward {mean} over {len(rewards)} scored of {len(lines)} sessions")
    print_scores(found)
    written = f"written to {folder}; details: bridle show SESSION --run {folder}"
    console.print(written, soft_wrap=True)


@with_option_groups
def fork(
    session: Annotated[str, typer.Argument(help="Session id, or its beginning.")],
    at: Annotated[
        int,
        typer.Option(min=1, help="Number of captured replies that are replayed without a model."),
    ],
    engines: EngineOptions,
    run: Annotated[
        Path, typer.Option(help="Run folder, or folder of runs, that holds the session.")
    ] = Path("runs"),
    samples: Annotated[int, typer.Option(min=1, help="Forks of the session.")] = 1,
    concurrency: ConcurrencyOption = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/<date> if not given.")] = None,
    json: JsonOption = False,
) -> None:
    """Sample a captured session again from one of its turns on.

    The task's harness starts in a fresh runtime. Its first --at calls get the captured replies, as
    long as each prompt equals the captured one; then the model samples. Without --engine the run's
    own engine is used. Exit code 0 if every fork was exact, or equivalent (its prompts differed
    only in known noise, such as a random id), else 1.
    """
    task, base = forked_task(session, run, at, samples)
    folder = check_folder(out or new_run_folder(Path("runs")), "--out")
    setup = setup_of(base, engines)
    lines = run_batch(BatchRun([task], setup, folder, concurrency))
    verdicts = Counter(line["fork"]["verdict"] for line in lines if line["fork"])
    exact, equivalent = verdicts["exact"], verdicts["equivalent"]
    if json:
        counts = {"exact": exact, "equivalent": equivalent}
        print_json({"folder": str(folder), **counts, "sessions": lines})
    else:
        report(lines, folder, json=False)
        names = sorted({name for line in lines for name in (line["fork"] or {}).get("noise", ())})
        noise = f", {equivalent} but for {', '.join(names)}" if equivalent else ""
        console.print(f"{exact} of {len(lines)} sessions forked exactly at call {at}{noise}")
    raise typer.Exit(0 if exact + equivalent == len(lines) else 1)


def forked_task(session: str, run: Path, at: int, samples: int) -> tuple[Task, Path]:
    """Return the task of a session's forks, and the session's run folder.

    `ConfigError` if the run does not hold the session's task.
    """
    path, capture = find_session(session, run)
    base, task_id = path.parent, capture.session.task_id
    tasks = tasks_of(base)
    if task_id not in tasks:
        raise ConfigError(
            f"{base} does not hold the task {task_id!r}: only sessions of bridle run can be forked"
        )
    spec = ForkSpec(capture=str(path.resolve()), session=capture.session.session_id, at=at)
    return tasks[task_id].model_copy(update={"num_samples": samples, "fork": spec}), base


def setup_of(base: Path, engines: EngineOptions) -> FileConfig:
    """Load the config that flags name; without one and without engines, that of the run."""
    facts = config_of(base)
    if engines.config is None and not engines.engine:
        tokenizer = engines.tokenizer or facts.get("tokenizer")
        engines = EngineOptions(engine=facts.get("engines"), tokenizer=tokenizer)
    return engines.load(gateway={name: facts.get(name) for name in ("stream", "prompt")})
