"""`bridle train`: GRPO through the tasks' own harnesses, on this machine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.gateway import ConcurrencyOption, EnginesOption, HarnessOption, TelemetryOption
from bridle.cli.output import check_folder, console, notes, number, print_json, progress
from bridle.types import JSON

if TYPE_CHECKING:
    from rich.progress import Progress

    from bridle.cli.training import Trained, TrainSettings
    from bridle.config import Task
    from bridle.training.loop import Course


def train(  # noqa: PLR0913 - one parameter per flag
    config: Annotated[
        Path | None, typer.Argument(help="TOML file with any of the settings; flags come first.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder of the model to begin with.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Task file, Harbor task folder, or a folder of them.")
    ] = None,
    held_out: Annotated[str | None, typer.Option(help="Tasks that are only evaluated.")] = None,
    engine: EnginesOption = None,
    server: Annotated[
        str | None, typer.Option(help="URL of a rollout server that runs the sessions instead.")
    ] = None,
    harness: HarnessOption = None,
    evaluate_with: Annotated[
        list[str] | None,
        typer.Option(help="Play the held-out tasks with this harness too; repeatable."),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=2, help="Sessions of a group. [8]")] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="Groups of an update. [8]")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Updates in all. [40]")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of AdamW. [1e-6]")] = None,
    max_lag: Annotated[
        int | None, typer.Option(min=0, help="Updates between sampling and training. [1]")
    ] = None,
    concurrency: ConcurrencyOption = None,
    telemetry: TelemetryOption = None,
    out: Annotated[
        str | None, typer.Option(help="Folder of the training; runs/train if not given.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the course as JSON.")] = False,
) -> None:
    """Train a model on what harnesses do with it: sessions in, updates, new weights out.

    Ends with code 0 when all steps are done. Ctrl-C keeps what the last checkpoint has; so does an
    error, which says what is wrong.
    """
    flags: JSON = {
        "model": model,
        "tasks": tasks,
        "held_out": held_out,
        "out": out,
        "engines": engine and tuple(engine),
        "telemetry": telemetry and tuple(telemetry.split(",")),
        "server": server,
        "harness": harness,
        "evaluate_with": {name: {"harness": name} for name in evaluate_with or ()},
        "samples": samples,
        "concurrency": concurrency,
        "grpo": {"learning_rate": learning_rate},
        "loop": {"steps": steps, "groups_per_step": groups, "max_lag": max_lag},
    }
    settings = load_settings(config, flags)
    trained = _trained(settings, resume=resume)
    if json:
        print_json({"checkpoint": str(trained.checkpoint), **as_json(trained.course)})
    else:
        show_course(trained.course)
        show_picture(trained, Path(settings.out) / "curve.png", title=settings.model)
        console.print(f"the model: {trained.checkpoint}; its sessions: {trained.rollouts}")


def _trained(settings: TrainSettings, *, resume: bool) -> Trained:
    """All of a training, with its progress."""
    import uvloop

    from bridle.cli.training import train_here

    check_folder(Path(settings.out), "--out")
    chosen = load(settings.tasks, settings, settings.samples)
    held = load(settings.held_out, settings, settings.held_out_samples)
    with progress() as bars:
        tell = CourseBar(bars, settings.loop.steps)
        return uvloop.run(train_here(settings, chosen, held, resume=resume, tell=tell))


def load_settings(config: Path | None, flags: JSON) -> TrainSettings:
    """A file's settings under those of the flags; `None` = not given. `ConfigError` says what."""
    from pydantic import ValidationError

    from bridle.cli.training import TrainSettings
    from bridle.config import explain, load_toml

    given = {} if config is None else load_toml(config)
    for name, value in flags.items():
        if isinstance(value, dict):
            told = {key: one for key, one in value.items() if one is not None}
            table = given.get(name, {})
            given[name] = {**table, **told} if isinstance(table, dict) else table
        elif value is not None:
            given[name] = value
    try:
        return TrainSettings.model_validate(given)
    except ValidationError as error:
        raise explain(error, "the command" if config is None else str(config)) from error


def load(path: str | None, settings: TrainSettings, samples: int) -> list[Task]:
    """The tasks of a path, as this training runs them; none for `None`."""
    from bridle.datasets.jsonl import load_tasks

    if path is None:
        return []
    overrides: JSON = {"num_samples": samples}
    if settings.harness is not None:
        overrides["agent"] = {"harness": settings.harness, "command": None, "import_path": None}
    return load_tasks(Path(path), overrides=overrides)


class CourseBar:
    """The progress bar of a training."""

    def __init__(self, bars: Progress, steps: int) -> None:
        self._bars = bars
        self._bar = bars.add_task("updates", total=steps, note="starting the engine")

    def __call__(self, course: Course) -> None:
        note = ""
        if course.evaluations:
            last = course.evaluations[-1]
            note += f"held out {number(last['reward'])} at step {last['step']}; "
        if course.steps:
            last = course.steps[-1]
            note += f"reward {number(last['reward'])}"
            if last["unknown"]:
                note += f", {last['unknown']} of {last['sessions']} sessions without one"
        self._bars.update(self._bar, completed=course.step, note=note)


def show_course(course: Course) -> None:
    """Print the learning curve and its numbers."""
    from bridle.training.curve import draw_text, rewards_of

    console.print("mean reward of each step's sessions:")
    for line in draw_text([reward for _, reward in rewards_of(course)]):
        console.print(line, markup=False, highlight=False)
    told = [one for one in course.evaluations if one["reward"] is not None]
    if told:
        first, last = told[0], told[-1]
        console.print(
            f"held-out tasks: {first['reward']:.1%} at step {first['step']}, "
            f"{last['reward']:.1%} at step {last['step']} ({last['sessions']} sessions)"
        )
    show_transfer(course)
    console.print(numbers_line(course), markup=False)


def show_transfer(course: Course) -> None:
    """Print what the held-out tasks came to with each harness, where there are several."""
    from rich.table import Table

    told = [one for one in course.evaluations if "others" in one]
    if not told:
        return
    table = Table("harness", *(f"step {one['step']}" for one in told), "rise", "sessions")
    trained = "the trained one"
    for label in (trained, *told[-1]["others"]):
        rows = [one if label == trained else one["others"].get(label, {}) for one in told]
        rewards = [row.get("reward") for row in rows]
        first, last = rewards[0], rewards[-1]
        rise = "" if first is None or last is None else f"{last - first:+.1%}"
        shown = ["" if reward is None else f"{reward:.1%}" for reward in rewards]
        table.add_row(label, *shown, rise, str(rows[-1]["sessions"]))
    console.print(table)


def numbers_line(course: Course) -> str:
    """Summarise in one line what was trained and how well trainer and engine agree."""
    updates = [one["update"] for one in course.steps if one["update"]]
    errors = [one["logprob_error"] for one in updates if one["logprob_error"] is not None]
    sessions = sum(one["sessions"] for one in course.steps)
    tokens = sum(one["tokens"] for one in updates)
    left = Counter[str]()
    for one in course.steps:
        left.update(one.get("left_out", {}))
    told = {
        "stale": "sessions older than max_lag",
        "unversioned": "sessions of which the engine did not say the policy version",
    }
    out = "".join(f"; left out: {left[key]} {what}" for key, what in told.items() if left[key])
    apart = f"; trainer and rollout logprobs differ by at most {max(errors):.1e}" if errors else ""
    return (
        f"{len(updates)} updates from {sessions} sessions and {tokens} tokens that trained"
        f"{apart}{out}"
    )


def show_picture(trained: Trained, path: Path, *, title: str) -> bool:
    """Write the curve as PNG; without matplotlib say so. Whether it was written."""
    from bridle.errors import TrainingError
    from bridle.training.curve import draw_png

    try:
        draw_png(path, trained.course, title=title)
    except TrainingError as error:
        notes.print(str(error), markup=False)
        return False
    console.print(f"the curve: {path}", markup=False)
    return True


def as_json(course: Course) -> JSON:
    """A course as it is printed and kept."""
    return {"steps": course.steps, "evaluations": course.evaluations}
