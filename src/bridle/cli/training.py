"""A training from its settings to its last checkpoint, as `bridle train` and `demo` run it.

Sessions run in this process or on a rollout server; either gives groups and takes weights. In this
process, engine, gateway and node live as long as the training. A server lives on its own, keeps
what a trainer that died had begun, and loads weights from a folder with the same path on both.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import Field, field_serializer

from bridle import telemetry
from bridle.aio import run_shielded
from bridle.capture.sqlite import SqliteStore
from bridle.cli.config import load_config
from bridle.cli.parts import Parts, open_all
from bridle.cli.serving import long_running
from bridle.client import AsyncClient
from bridle.config import AgentSpec, Settings, Task
from bridle.credentials import split_token
from bridle.errors import ConfigError
from bridle.gateway.app import Gateway
from bridle.node.batch import LocalExecutor
from bridle.node.events import Events
from bridle.node.local import LocalNode, NodeSettings, check
from bridle.node.run_folder import RunFolder
from bridle.training.groups import LABEL, Curriculum
from bridle.training.settings import GrpoSettings, LoopSettings
from bridle.types import JSON

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridle.node.batch import Executor
    from bridle.training.groups import Evaluation, GroupSource, TaskDraws
    from bridle.training.grpo import Learner
    from bridle.training.loop import Course, Tell
    from bridle.types import JSON


CHECKPOINTS = "checkpoints"
COURSE = "course.json"
CURVE = "curve.png"


class TrainSettings(Settings):
    """Settings of `bridle train`, from a TOML file, flags, or both."""

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
    telemetry: tuple[str, ...] = ()
    """As in the config file of `bridle run`."""

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
    """Result of a training."""

    course: Course
    checkpoint: Path
    """The last one; a model folder."""
    rollouts: str
    """Where this training's sessions can be looked at."""


@dataclass(frozen=True, slots=True)
class Start:
    """State that a training starts or resumes from."""

    learner: Learner
    model: Path
    """Folder of its weights: the first model, or a checkpoint."""
    state: JSON
    """Of the checkpoint; empty = this is the beginning."""


FINISH_S = 120.0
"""How long writing the last files may take once a training is being ended."""

PUBLISH_S = 300.0
"""How long engines may take to load new weights."""

PATIENCE_S = 900.0
"""How long a training waits for a server that cannot be reached."""

NAME = "training.name"
"""File that keeps what a training is called on its server."""


class Place(Protocol):
    """A place that runs sessions."""

    @property
    def events(self) -> Events | None:
        """Events of its sessions; `None` = they are told elsewhere."""

    @property
    def rollouts(self) -> str:
        """Return where the sessions can be viewed."""

    @property
    def begins_with(self) -> bool:
        """Return whether it samples from the opened model; else that model is published."""

    def groups(
        self, draws: TaskDraws, held_out: Sequence[Task], *, version: int, cursor: JSON | None
    ) -> AbstractAsyncContextManager[GroupSource]:
        """A source of groups; see `local_groups` and `server_groups`."""

    async def publish(self, learner: Learner) -> None:
        """Have it sample from the learner's weights."""


@asynccontextmanager
async def open_place(settings: TrainSettings, model: Path) -> AsyncIterator[Place]:
    """The place that `settings` name. `ConfigError` for two at once."""
    if settings.server is None:
        async with local_place(settings, model) as here:
            yield here
        return
    if settings.engines:
        raise ConfigError("a training has its sessions on a server or on engines, not on both")
    async with AsyncClient(settings.server, patience_s=PATIENCE_S) as client:
        out = Path(settings.out)
        yield ServerPlace(client, _name(out), Weights(out / "weights", Path(settings.model)))


@dataclass(frozen=True, slots=True)
class Weights:
    """Model folders for engines of other processes, which see them under the same path."""

    folder: Path
    """Of all of them."""
    model: Path
    """The model that the training began with; its tokenizer goes with the weights."""

    def write(self, learner: Learner) -> Path:
        """The learner's weights as a model folder of their own."""
        from bridle.training.checkpoint import load_tokenizer, write_model

        folder = (self.folder / f"{learner.version:06d}").resolve()
        write_model(folder, learner, load_tokenizer(self.model))
        return folder

    def keep(self, folder: Path) -> None:
        """Remove all others: no engine reads them any more."""
        for old in self.folder.iterdir():
            if old.resolve() != folder:
                shutil.rmtree(old)


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """Engine, gateway and node of this process; implements `Place`."""

    gateway: Gateway
    executor: Executor
    folder: Path
    """The run folder."""
    embedded: bool
    """Whether the engine is in this process and takes weights from memory."""
    weights: Weights
    events: Events | None = None

    @property
    def begins_with(self) -> bool:
        """See `Place.begins_with`. A server may have other weights, or take none."""
        return self.embedded

    @property
    def rollouts(self) -> str:
        return str(self.folder)

    def groups(
        self,
        draws: TaskDraws,
        held_out: Sequence[Task],
        *,
        version: int,  # noqa: ARG002 - of no use here
        cursor: JSON | None,
    ) -> AbstractAsyncContextManager[GroupSource]:
        from bridle.training.groups import local_groups

        return local_groups(self.executor, draws, held_out=held_out, cursor=cursor)

    async def publish(self, learner: Learner) -> None:
        """From memory, or through a folder that servers read."""
        if self.embedded:
            held = learner.model.state_dict()
            await self.gateway.update_weights(held, learner.version, timeout_s=PUBLISH_S)
            return
        folder = await asyncio.to_thread(self.weights.write, learner)
        await self.gateway.update_weights(folder, learner.version, timeout_s=PUBLISH_S)
        self.weights.keep(folder)


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """A rollout server; implements `Place`."""

    client: AsyncClient
    training: str
    """Name of this training there."""
    weights: Weights
    begins_with = False
    events = None

    @property
    def rollouts(self) -> str:
        return f"{self.client.url}, tasks {self.training}.*"

    def groups(
        self, draws: TaskDraws, held_out: Sequence[Task], *, version: int, cursor: JSON | None
    ) -> AbstractAsyncContextManager[GroupSource]:
        from bridle.training.served import server_groups

        return server_groups(
            self.client,
            draws,
            training=self.training,
            version=version,
            held_out=held_out,
            cursor=cursor,
        )

    async def publish(self, learner: Learner) -> None:
        """Through a folder that the server's engines read."""
        folder = await asyncio.to_thread(self.weights.write, learner)
        await self.client.set_policy(
            weights=str(folder), version=learner.version, timeout_s=PUBLISH_S
        )
        self.weights.keep(folder)


def _name(out: Path) -> str:
    """Return the name of a folder's training on a server: the same at every start."""
    path = out / NAME
    if not path.is_file():
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(f"train-{secrets.token_hex(4)}")
    return path.read_text().strip()


@asynccontextmanager
async def local_place(
    settings: TrainSettings, model: Path, *, change: Callable[[Parts], Parts] = lambda parts: parts
) -> AsyncIterator[LocalPlace]:
    """Engine, gateway and node, with a run folder that is complete when all is closed.

    `change` may put other parts in place of those that the settings name.
    """
    engines = settings.engines or (f"embedded:{model}",)
    setup = load_config(None, engines=engines, tokenizer=str(model))
    embedded = all(spec.startswith("embedded:") for spec in engines)
    out = Path(settings.out)
    weights = Weights(out / "weights", Path(settings.model))
    async with AsyncExitStack() as stack:
        parts = change(open_all(setup))
        path = _next_folder(out / "rollouts")
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
        node = LocalNode(gateway=gateway, store=store, folder=folder, settings=kept)
        await stack.enter_async_context(node)
        try:
            yield LocalPlace(gateway, LocalExecutor(node), path, embedded, weights, node.events)
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
    from bridle.training.groups import History, TaskDraws
    from bridle.training.loop import Course, Loop

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
        tracked.training(course.steps, course.evaluations)
        tell(course)

    async with AsyncExitStack() as stack:
        given = settings.model_dump(mode="json")
        tracked = stack.enter_context(telemetry.opened(settings.telemetry, out, given))
        place = await stack.enter_async_context(opener(settings, start.model))
        if place.events is not None:
            stack.enter_context(place.events.listening(tracked.on_event))
        groups = place.groups(draws, held_out, version=learner.version, cursor=state.get("cursor"))
        source = await stack.enter_async_context(groups)
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
