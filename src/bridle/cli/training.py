"""A training from its settings to its last checkpoint; `train` and `demo` are this.

Where the sessions run is `bridle.cli.training_place`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, field_serializer

from bridle.cli.training_place import Place, open_place
from bridle.config import AgentSpec, Settings, Task
from bridle.credentials import split_token
from bridle.errors import ConfigError
from bridle.lifecycle.manager import check
from bridle.training.groups import LABEL
from bridle.training.settings import GrpoSettings, LoopSettings
from bridle.training.tasks import Curriculum
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.training.groups import Evaluation
    from bridle.training.grpo import Learner
    from bridle.training.loop import Course, Tell

CHECKPOINTS = "checkpoints"
COURSE = "course.json"
CURVE = "curve.png"


class TrainSettings(Settings):
    """What `bridle train` is told, by a TOML file, by flags, or both."""

    model: str
    """Folder of the model to begin with."""
    tasks: str
    """Task file, Harbor task folder, or a folder of them."""
    held_out: str | None = None
    """Tasks of the evaluations; `None` = no evaluation."""
    out: str = "runs/train"
    """Folder of checkpoints, rollouts and curve."""
    engines: tuple[str, ...] = ()
    """As `--engine` of `bridle run`; none = the embedded engine on `model`."""
    server: str | None = None
    """URL of a rollout server that runs the sessions instead; `BRIDLE_SERVER_TOKEN` is an admin's
    token there, because weights are loaded."""
    harness: str | None = None
    """For all tasks instead of their own."""
    evaluate_with: dict[str, AgentSpec] = Field(default_factory=dict)
    """By label, other harnesses that play the held-out tasks too: does what was learned through one
    harness hold in others?"""
    samples: int = Field(default=8, ge=2)
    """Sessions of a group."""
    held_out_samples: int = Field(default=1, ge=1)
    """Sessions per held-out task and evaluation."""
    curriculum: Curriculum = "epochs"
    concurrency: int | None = Field(default=None, ge=1)
    """Harnesses at once; `None` = twice the cores."""
    seed: int = 0
    """Of the order of tasks."""
    grpo: GrpoSettings = GrpoSettings()
    loop: LoopSettings = LoopSettings()

    @field_serializer("server")
    def _without_token(self, url: str | None) -> str | None:
        """Keep a token that is part of the URL out of files."""
        return None if url is None else split_token(url)[0]


def with_other_harnesses(
    held_out: Sequence[Task], harnesses: Mapping[str, AgentSpec]
) -> list[Task]:
    """The held-out tasks, and each of them once more for each other harness, under its label.

    `ConfigError` if there is nothing to play with them.
    """
    if harnesses and not held_out:
        raise ConfigError("evaluate_with: there are no held-out tasks to evaluate with")
    again = [
        task.model_copy(
            update={
                "task_id": f"{label}:{task.task_id}",
                "agent": agent,
                "metadata": {**task.metadata, LABEL: label},
            }
        )
        for label, agent in harnesses.items()
        for task in held_out
    ]
    return [*held_out, *again]


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of a training."""

    course: Course
    checkpoint: Path
    """The last one; a model folder."""
    rollouts: str
    """Where this training's sessions can be looked at."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a training begins or goes on with."""

    learner: Learner
    model: Path
    """Folder of its weights: the first model, or a checkpoint."""
    state: JSON
    """Of the checkpoint; empty = this is the beginning."""


Opener = Callable[[TrainSettings, Path], AbstractAsyncContextManager[Place]]


async def train_here(
    settings: TrainSettings,
    tasks: Sequence[Task],
    held_out: Sequence[Task] = (),
    *,
    before: Evaluation | None = None,
    resume: bool = False,
    tell: Tell = lambda _: None,
    opener: Opener = open_place,
) -> Trained:
    """Train on `tasks`, whose `num_samples` are the groups' sizes.

    `held_out` is played with the harnesses of `evaluate_with` too. `before` = what it came to with
    the model of the beginning, if that is known.

    `ConfigError` for a mistake, before anything runs: a folder that holds a training and is not to
    be resumed, another tokenizer than the engine's, another sampling. `TrainingError` when it
    cannot go on; what was learned until then is in the last checkpoint.
    """
    from bridle.training.checkpoint import checkpoints, load_tokenizer
    from bridle.training.loop import Course, Loop
    from bridle.training.tasks import History, TaskDraws

    _check_sampling(tasks, settings.grpo.temperature)
    held_out = with_other_harnesses(held_out, settings.evaluate_with)
    if settings.server is None:
        check([*tasks, *held_out])
    out = Path(settings.out)
    start = await asyncio.to_thread(_start, settings, resume=resume)
    learner, state = start.learner, start.state
    history = History.of(state.get("history", {}))
    draws = TaskDraws(tasks, history, seed=settings.seed, curriculum=settings.curriculum)
    _write_settings(settings, out)

    def told(course: Course) -> None:
        (out / COURSE).write_text(json.dumps(asdict(course)))
        tell(course)

    async with (
        opener(settings, start.model) as place,
        place.groups(
            draws, held_out, version=learner.version, cursor=state.get("cursor")
        ) as source,
    ):
        if state or not place.begins_with:
            await place.publish(learner)
        loop = Loop(
            learner=learner,
            source=source,
            publish=place.publish,
            settings=settings.loop,
            tokenizer=load_tokenizer(start.model),
            checkpoints=out / CHECKPOINTS,
            history=history,
            course=Course(**state["course"]) if state else _course(before),
            tell=told,
        )
        course = await loop.run()
    return Trained(course, checkpoints(out / CHECKPOINTS)[-1], place.rollouts)


def _start(settings: TrainSettings, *, resume: bool) -> Start:
    """The learner, as the first model or the last checkpoint has it."""
    from bridle.training.checkpoint import checkpoints, restore
    from bridle.training.grpo import Learner

    found = checkpoints(Path(settings.out) / CHECKPOINTS)
    if found and not resume:
        message = f"{settings.out} holds a training; go on with it by --resume, or give another"
        raise ConfigError(message)
    model = found[-1] if found else Path(settings.model)
    reference = Path(settings.model) if settings.grpo.kl else None
    learner = Learner.load(model, settings.grpo, reference)
    return Start(learner, model, restore(learner, model) if found else {})


def _check_sampling(tasks: Sequence[Task], temperature: float) -> None:
    """Refuse tasks that are sampled from another distribution than the one that is trained."""
    from bridle.training.samples import unfit_setting
    from bridle.trajectory.sample import SHAPING

    for task in tasks:
        for field in SHAPING:
            policy = getattr(task.sampling, field)
            fault = unfit_setting(field, policy.value, temperature)
            if policy.mode == "override" and fault is not None:
                raise ConfigError(f"task {task.task_id} {fault}")


def _course(before: Evaluation | None) -> Course:
    from bridle.training.loop import Course

    return Course(evaluations=[] if before is None else [{"step": 0, **before.json()}])


def _write_settings(settings: TrainSettings, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "train.json").write_text(settings.model_dump_json(indent=2) + "\n")
