"""`bridle train`: GRPO on sessions of the tasks' own harnesses, on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import uvloop
from rich.progress import Progress
from rich.table import Table

from bridle.cli.options import (
    ConcurrencyOption,
    EnginesOption,
    HarnessOption,
    JsonOption,
    TelemetryOption,
    VerifiedOption,
)
from bridle.cli.output import check_folder, console, notes, number, print_json, progress
from bridle.cli.run import task_overrides
from bridle.cli.show import counts_of
from bridle.cli.training import Trained, TrainSettings, train_here
from bridle.config import Task, load_toml, validated, with_flags
from bridle.datasets.jsonl import load_tasks, require_verified
from bridle.errors import TrainingError
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.training.loop import Course


def train(  # noqa: PLR0913 - one parameter per flag
    config: Annotated[
        Path | None, typer.Argument(help="TOML file with settings; flags come first.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder of the initial model.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Task file, or a folder of tasks.")] = None,
    held_out: Annotated[str | None, typer.Option(help="Tasks for evaluation only.")] = None,
    verified: VerifiedOption = None,
    engine: EnginesOption = None,
    server: Annotated[
        str | None, typer.Option(help="URL of a rollout server that runs the sessions instead.")
    ] = None,
    harness: HarnessOption = None,
    evaluate_with: Annotated[
        list[str] | None,
        typer.Option(help="Run the held-out tasks with this harness too; repeatable."),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=2, help="Sessions per group. [8]")] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="Groups per update. [8]")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Updates in total. [40]")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate. [1e-6]")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter alone.")] = False,
    max_lag: Annotated[
        int | None,
        typer.Option(min=0, help="Most updates between sampling and training (staleness). [1]"),
    ] = None,
    concurrency: ConcurrencyOption = None,
    telemetry: TelemetryOption = None,
    out: Annotated[str | None, typer.Option(help="Folder of the training. [runs/train]")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the last checkpoint in the folder.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Train a model on sessions of harnesses.

    Exit code 0 when all steps are done. After Ctrl-C or an error the last checkpoint stays.
    """
    flags: JSON = {
        "model": model,
        "tasks": tasks,
        "held_out": held_out,
        "verified": verified,
        "out": out,
        "engines": engine and tuple(engine),
        "telemetry": telemetry and tuple(telemetry.split(",")),
        "server": server,
        "harness": harness,
        "evaluate_with": {name: {"harness": name} for name in evaluate_with or ()},
        "samples": samples,
        "concurrency": concurrency,
        "grpo": {"learning_rate": learning_rate},
        "lora": {} if lora else None,
        "loop": {"steps": steps, "groups_per_step": groups, "max_lag": max_lag},
    }
    settings = load_settings(config, flags)
    trained = _trained(settings, resume=resume)
    if json:
        print_json({"checkpoint": str(trained.checkpoint), **asdict(trained.course)})
    else:
        show_trained(trained, settings)


def show_trained(trained: Trained, settings: TrainSettings) -> None:
    """Print the course of a training, and where its model and its sessions are."""
    show_course(trained.course)
    show_picture(trained, Path(settings.out) / "curve.png", title=settings.model)
    console.print(f"the model: {trained.checkpoint}; its sessions: {trained.rollouts}")


def _trained(settings: TrainSettings, *, resume: bool) -> Trained:
    """Run a training with a progress display."""
    check_folder(Path(settings.out), "--out")
    chosen = load(settings.tasks, settings, settings.samples)
    held = load(settings.held_out, settings, settings.held_out_samples)
    with progress() as bars:
        tell = CourseBar(bars, settings.loop.steps)
        return uvloop.run(train_here(settings, chosen, held, resume=resume, tell=tell))


def load_settings(config: Path | None, flags: JSON) -> TrainSettings:
    """Read a settings file; flags override it, and `None` = not given."""
    given = with_flags({} if config is None else load_toml(config), flags)
    return validated(TrainSettings, given, "the command" if config is None else str(config))


def load(path: str | None, settings: TrainSettings, samples: int) -> list[Task]:
    """Load the tasks of a path with the training's overrides; none for `None`."""
    if path is None:
        return []
    overrides = task_overrides(harness=settings.harness, samples=samples)
    tasks = load_tasks(Path(path), overrides=overrides)
    if settings.verified is not None:
        require_verified(tasks, settings.verified)
    return tasks


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
    from bridle.training.loop import draw_text, rewards_of

    console.print("mean reward of each step's sessions:")
    for line in draw_text([reward for _, reward in rewards_of(course)]):
        console.print(line, markup=False, highlight=False)
    rewarded = [each for each in course.evaluations if each["reward"] is not None]
    if rewarded:
        first, last = rewarded[0], rewarded[-1]
        console.print(
            f"held-out tasks: {first['reward']:.1%} at step {first['step']}, "
            f"{last['reward']:.1%} at step {last['step']} ({last['sessions']} sessions)"
        )
        widths = [one["half_width"] for one in (first, last) if one.get("half_width") is not None]
        if widths:
            shown = " and ".join(f"± {100 * width:.1f}" for width in widths)
            console.print(f"95% intervals of these, in points: {shown}")
    show_transfer(course)
    console.print(numbers_line(course), markup=False)


def show_transfer(course: Course) -> None:
    """Print the held-out rewards of each harness, if there are several."""
    evaluations = [each for each in course.evaluations if "others" in each]
    if not evaluations:
        return
    table = Table("harness", *(f"step {each['step']}" for each in evaluations), "rise", "sessions")
    trained = "the trained one"
    for label in (trained, *evaluations[-1]["others"]):
        rows = [each if label == trained else each["others"].get(label, {}) for each in evaluations]
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
    left_out = counts_of(course.steps, "left_out")
    reasons = {
        "stale": "sessions older than max_lag",
        "unversioned": "sessions without a policy version from the engine",
    }
    out = "".join(
        f"; left out: {left_out[key]} {what}" for key, what in reasons.items() if left_out[key]
    )
    apart = f"; trainer and rollout logprobs differ by at most {max(errors):.1e}" if errors else ""
    return (
        f"{len(updates)} updates from {sessions} sessions and {tokens} tokens that trained"
        f"{apart}{out}"
    )


def show_picture(trained: Trained, path: Path, *, title: str) -> bool:
    """Write the curve as PNG; return whether matplotlib was there to do so."""
    from bridle.training.loop import draw_png

    try:
        draw_png(path, trained.course, title=title)
    except TrainingError as error:
        notes.print(str(error), markup=False)
        return False
    console.print(f"the curve: {path}", markup=False)
    return True
