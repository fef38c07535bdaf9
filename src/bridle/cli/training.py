"""A training on this machine: engine, gateway, node, source and learner, opened and taken down.

`train` and `demo` are this with different tasks.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from bridle.aio import run_shielded
from bridle.capture.sqlite import SqliteStore
from bridle.cli.config import load_config
from bridle.cli.parts import open_all
from bridle.cli.serving import long_running
from bridle.config import Settings, Task
from bridle.errors import ConfigError
from bridle.executors.local import LocalExecutor
from bridle.gateway.app import Gateway
from bridle.lifecycle.events import Events
from bridle.lifecycle.manager import Node, NodeSettings, check
from bridle.lifecycle.run_folder import RunFolder
from bridle.training.settings import GrpoSettings, LoopSettings
from bridle.training.tasks import Curriculum
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.executors.base import Executor
    from bridle.training.groups import Evaluation
    from bridle.training.grpo import Learner
    from bridle.training.loop import Course, Tell

FINISH_S = 120.0
"""How long writing the last files may take once a training is being ended."""

PUBLISH_S = 300.0
"""How long engines may take to load new weights."""

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
    harness: str | None = None
    """For all tasks instead of their own."""
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


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of a training."""

    course: Course
    checkpoint: Path
    """The last one; a model folder."""
    rollouts: Path
    """Run folder of this training's sessions."""


async def train_here(
    settings: TrainSettings,
    tasks: Sequence[Task],
    held_out: Sequence[Task] = (),
    *,
    before: Evaluation | None = None,
    resume: bool = False,
    tell: Tell = lambda _: None,
) -> Trained:
    """Train on `tasks`, whose `num_samples` are the groups' sizes.

    `before` = what `held_out` came to with the model of the beginning, if that is known.

    `ConfigError` for a mistake, before anything runs: a folder that holds a training and is not to
    be resumed, another tokenizer than the engine's. `TrainingError` when it cannot go on; what was
    learned until then is in the last checkpoint.
    """
    from bridle.training.checkpoint import checkpoints, load_tokenizer, restore
    from bridle.training.groups import local_groups
    from bridle.training.grpo import Learner
    from bridle.training.loop import Course, Loop
    from bridle.training.tasks import History, TaskDraws

    check([*tasks, *held_out])
    out = Path(settings.out)
    found = checkpoints(out / CHECKPOINTS)
    if found and not resume:
        raise ConfigError(f"{out} holds a training; go on with it by --resume, or give another")
    start = found[-1] if found else Path(settings.model)
    reference = Path(settings.model) if settings.grpo.kl else None
    learner = await asyncio.to_thread(Learner.load, start, settings.grpo, reference)
    state: JSON = restore(learner, start) if found else {}
    history = History.of(state.get("history", {}))
    draws = TaskDraws(tasks, history, seed=settings.seed, curriculum=settings.curriculum)
    _write_settings(settings, out)

    def told(course: Course) -> None:
        (out / COURSE).write_text(json.dumps(asdict(course)))
        tell(course)

    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(_opened(settings, start))
        publish = _publisher(place, learner, out)
        if found:
            await publish(learner)
        source = await stack.enter_async_context(
            local_groups(place.executor, draws, held_out=held_out, cursor=state.get("cursor"))
        )
        loop = Loop(
            learner=learner,
            source=source,
            publish=publish,
            settings=settings.loop,
            tokenizer=load_tokenizer(start),
            checkpoints=out / CHECKPOINTS,
            history=history,
            course=Course(**state["course"]) if found else _course(before),
            tell=told,
        )
        course = await loop.run()
    return Trained(course, checkpoints(out / CHECKPOINTS)[-1], place.folder)


def _course(before: Evaluation | None) -> Course:
    from bridle.training.loop import Course

    return Course(evaluations=[] if before is None else [{"step": 0, **before.json()}])


def _write_settings(settings: TrainSettings, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "train.json").write_text(settings.model_dump_json(indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a training's sessions run."""

    gateway: Gateway
    executor: Executor
    events: Events
    folder: Path
    """The run folder."""
    embedded: bool
    """Whether the engine is in this process and takes weights from memory."""


@asynccontextmanager
async def _opened(settings: TrainSettings, model: Path) -> AsyncIterator[Place]:
    """Engine, gateway and node, with a run folder that is complete when all is closed."""
    engines = settings.engines or (f"embedded:{model}",)
    setup = load_config(None, engines=engines, tokenizer=str(model))
    embedded = all(spec.startswith("embedded:") for spec in engines)
    async with AsyncExitStack() as stack:
        parts = open_all(setup)
        path = _next_folder(Path(settings.out) / "rollouts")
        folder = stack.enter_context(
            RunFolder.create(path, config=settings.model_dump(mode="json"))
        )
        stack.callback(folder.discard_if_unused)
        store = await stack.enter_async_context(await SqliteStore.open(folder.capture))
        gateway = Gateway(
            engine=parts.engine, renderer=parts.renderer, store=store, settings=setup.gateway
        )
        await stack.enter_async_context(gateway)
        _check_tokenizer(gateway.info.tokenizer_dir, model)
        stack.enter_context(long_running())
        given = {"run_slots": settings.concurrency} if settings.concurrency else {}
        kept = NodeSettings.model_validate({"keep_logs": "failed", **given})
        node = Node(gateway=gateway, store=store, folder=folder, settings=kept)
        await stack.enter_async_context(node)
        try:
            yield Place(gateway, LocalExecutor(node), node.events, path, embedded)
        finally:
            await run_shielded(asyncio.to_thread(folder.finish, store), timeout_s=FINISH_S)


def _check_tokenizer(of_engine: str | None, model: Path) -> None:
    """Refuse an engine whose tokenizer is known to be another one than the model's."""
    from bridle.training.checkpoint import load_tokenizer

    if of_engine is None or Path(of_engine) == model:
        return
    engine, own = (load_tokenizer(folder).get_vocab() for folder in (Path(of_engine), model))
    if engine != own:
        raise ConfigError(
            f"the engine has another tokenizer than the model that is trained: {of_engine} has "
            f"{len(engine)} tokens, {model} {len(own)}, {len(set(engine) ^ set(own))} of them in "
            "one only"
        )


def _next_folder(runs: Path) -> Path:
    """A run folder of its own for each start of a training."""
    return next(path for n in range(1000) if not (path := runs / f"{n:03d}").exists())


def _publisher(place: Place, learner: Learner, out: Path) -> Callable[[Learner], Awaitable[None]]:
    """Puts weights into the engine: from memory, or through a folder that servers read."""
    from bridle.training.checkpoint import load_tokenizer, write_model

    async def from_memory(learner: Learner) -> None:
        weights = learner.model.state_dict()
        await place.gateway.update_weights(weights, learner.version, timeout_s=PUBLISH_S)

    async def through_folder(learner: Learner) -> None:
        folder = (out / "weights" / f"{learner.version:06d}").resolve()
        await asyncio.to_thread(write_model, folder, learner, tokenizer)
        await place.gateway.update_weights(folder, learner.version, timeout_s=PUBLISH_S)
        for old in folder.parent.iterdir():
            if old != folder:
                shutil.rmtree(old)

    if place.embedded:
        return from_memory
    tokenizer = load_tokenizer(Path(learner.model.name_or_path))
    return through_folder
