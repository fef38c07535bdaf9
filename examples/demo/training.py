"""The third part of the demo: the small model learns through the light script harness.

It is the model that the second part has measured, and it is measured again on the same fresh tasks;
it trains on others. Tasks, model and order are fixed by seeds; what is sampled is not, because
sessions share batches as they come. Whatever came of it is printed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.cli.terminal import console, progress
from bridle.cli.train import (
    CourseBar,
    Trained,
    TrainSettings,
    numbers_line,
    show_course,
    show_picture,
    train_here,
)
from bridle.training.groups import HeldOutEvaluation
from bridle.training.settings import GrpoSettings, LoopSettings
from bridle.types import JSON

from .lookups import lookups
from .main import FRESH_SEED, Part
from .policy import lookup_task

if TYPE_CHECKING:
    from bridle.config import Task

TRAIN_SEED = 30_000
"""Seed of the lookup tasks that are trained on; no demonstration and no fresh task has it."""

SAMPLES = 8

GRPO = GrpoSettings(learning_rate=4e-4, warmup_steps=10)
"""Without the warm-up AdamW's first steps follow the noise, and some seeds lose their few successes
first; at 5e-4 the success comes sooner and goes again."""

LOOP = LoopSettings(groups_per_step=8, max_lag=0, checkpoint_every=0, keep_checkpoints=1)
"""Rollouts and updates alternate: an update takes a tenth of a step's time here, and so every step
can compare the trainer's logprobs with the rollout's."""

AT_ONCE = 16
"""Harnesses running at once: they mostly wait, and the engine is the faster the more do."""


def training_part(
    folder: Path,
    model: Path,
    steps: int,
    before: Part,
    *,
    loop: LoopSettings = LOOP,
    samples: int = SAMPLES,
) -> JSON:
    """Train `model` for `steps` updates and measure it again on the tasks of `before`.

    Prints the curve; returns what the demo's summary says of it.
    """
    import uvloop

    count = steps * loop.groups_per_step
    settings = TrainSettings(
        model=str(model),
        tasks=f"{count} lookups drawn with seed {TRAIN_SEED}",
        held_out=f"{len(before.sessions)} lookups drawn with seed {FRESH_SEED}",
        out=str(folder),
        samples=samples,
        concurrency=AT_ONCE,
        grpo=GRPO,
        loop=loop.model_copy(update={"steps": steps}),
    )
    began = time.monotonic()
    train = _tasks(count, TRAIN_SEED, folder / "tasks", "train", samples)
    fresh = _tasks(len(before.sessions), FRESH_SEED, folder / "tasks", "fresh", 1)
    with progress() as bars:
        training = train_here(
            settings, train, fresh, before=_evaluation(before), tell=CourseBar(bars, steps)
        )
        trained = uvloop.run(training)
    return _shown(trained, folder, time.monotonic() - began)


def _tasks(count: int, seed: int, folder: Path, name: str, samples: int) -> list[Task]:
    made = (lookup_task(task, folder / name) for task in lookups(count, seed=seed))
    return [
        task.model_copy(update={"task_id": f"{name}-{task.task_id}", "num_samples": samples})
        for task in made
    ]


def _evaluation(part: Part) -> HeldOutEvaluation:
    """Return the rewards of a part's sessions as an evaluation."""
    rewards = {line["task_id"]: [line["reward"]] for line in part.sessions}
    known = [one for of in rewards.values() for one in of if one is not None]
    mean = sum(known) / len(known) if known else None
    return HeldOutEvaluation(mean, len(part.sessions), len(part.sessions) - len(known), rewards)


def _shown(trained: Trained, folder: Path, seconds: float) -> JSON:
    """Print the course; what the summary says of it."""
    course = trained.course
    show_course(course)
    curve = folder / "curve.png"
    title = "a 0.93M-parameter model through an unmodified script harness"
    drawn = show_picture(trained, curve, title=title)
    console.print(f"the trained model: {trained.checkpoint}", markup=False)
    first, last = course.evaluations[0], course.evaluations[-1]
    updates = [one["update"] for one in course.steps if one["update"]]
    errors = [one["logprob_error"] for one in updates if one["logprob_error"] is not None]
    rise = None
    if first["reward"] is not None and last["reward"] is not None:
        rise = last["reward"] - first["reward"]
    return {
        "before": first["reward"],
        "after": last["reward"],
        "rise": rise,
        "fresh_tasks": last["sessions"],
        "steps": course.step,
        "updates": len(updates),
        "sessions": sum(one["sessions"] for one in course.steps),
        "rewards": [one["reward"] for one in course.steps],
        "logprob_error": max(errors, default=None),
        "learning_rate": GRPO.learning_rate,
        "seeds": {"train": TRAIN_SEED, "fresh": FRESH_SEED},
        "curve": str(curve) if drawn else None,
        "model": str(trained.checkpoint),
        "line": numbers_line(course),
        "seconds": round(seconds, 1),
    }
