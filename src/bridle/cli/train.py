"""`bridle train`: GRPO on sessions of the tasks' own harnesses, on this machine.

The verb reads the settings and shows the course; `train_here` runs the training from its settings
to its last checkpoint, also for the demo. Sessions run on a `RolloutBackend`: in this process, or
on a rollout server. In this process, engine, gateway and node live as long as the training. A
server outlives it, keeps the groups that a killed trainer had begun, and loads weights from a
folder with the same path on both machines.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field, field_serializer
from rich.progress import Progress
from rich.table import Table

from bridle import telemetry
from bridle.aio import run_shielded
from bridle.capture.sqlite import SqliteStore
from bridle.cli.config import EngineSetup, load_config, open_setup
from bridle.cli.process import long_running, run_to_end
from bridle.cli.run import task_overrides
from bridle.cli.show import counts_of
from bridle.cli.terminal import (
    ConcurrencyOption,
    EnginesOption,
    HarnessOption,
    JsonOption,
    TelemetryOption,
    VerifiedOption,
    check_folder,
    console,
    notes,
    number,
    print_json,
    progress,
)
from bridle.client import AsyncClient
from bridle.config import AgentSpec, Settings, Task, load_toml, validated, with_flags
from bridle.credentials import split_token
from bridle.datasets.jsonl import load_tasks, require_verified
from bridle.engines import check_model_folder
from bridle.engines.base import is_adapter
from bridle.errors import ConfigError, TrainingError
from bridle.folders import FolderLock
from bridle.gateway.app import GatewayServer
from bridle.node.base import Events
from bridle.node.local import Executor, LocalExecutor, LocalNode, NodeSettings, check
from bridle.node.results import RunFolder
from bridle.telemetry.base import Telemetry
from bridle.training.groups import (
    LABEL,
    Curriculum,
    GroupSource,
    HeldOutEvaluation,
    History,
    TaskDraws,
    local_groups,
    server_groups,
)
from bridle.training.settings import GrpoSettings, LoopSettings, LoraSettings
from bridle.types import JSON, SHAPING

if TYPE_CHECKING:
    from bridle.training.grpo import Learner
    from bridle.training.loop import Course, Tell

CHECKPOINTS = "checkpoints"
COURSE = "course.json"


class TrainSettings(Settings):
    """Settings of `bridle train`, from a TOML file, flags, or both."""

    model: str
    """Folder of the initial model."""
    tasks: str
    """Task file, Harbor task folder, or a folder of them."""
    held_out: str | None = None
    """Tasks for evaluation only; `None` = no evaluation."""
    verified: Path | None = None
    """Manifest of `bridle tasks verify` that must call all tasks sound, held-out ones too."""
    out: str = "runs/train"
    """Folder of checkpoints, rollouts and curve."""
    engines: tuple[str, ...] = ()
    """An engine as for `--engine` of `bridle run`; empty = the embedded engine on `model`."""
    server: str | None = None
    """URL of a rollout server that runs the sessions instead; `BRIDLE_SERVER_TOKEN` must be an
    admin's token, because weights are loaded."""
    harness: str | None = None
    """Harness of all tasks instead of their own."""
    evaluate_with: dict[str, AgentSpec] = Field(default_factory=dict)
    """Other harnesses by label, which run the held-out tasks too, to measure transfer."""
    samples: int = Field(default=8, ge=2)
    """Sessions of a group."""
    held_out_samples: int = Field(default=1, ge=1)
    """Sessions per held-out task and evaluation."""
    curriculum: Curriculum = "epochs"
    concurrency: int | None = Field(default=None, ge=1)
    """Harnesses running at once; `None` = twice the cores."""
    seed: int = 0
    """Seed of the task order."""
    grpo: GrpoSettings = GrpoSettings()
    loop: LoopSettings = LoopSettings()
    lora: LoraSettings | None = None
    """Train an adapter of the model; `None` = all its weights."""
    telemetry: tuple[str, ...] = ()
    """Value as in the config file of `bridle run`."""

    @field_serializer("server")
    def _without_token(self, url: str | None) -> str | None:
        """Keep a token in the URL out of files."""
        return None if url is None else split_token(url)[0]


def with_other_harnesses(
    held_out: Sequence[Task], harnesses: Mapping[str, AgentSpec]
) -> list[Task]:
    """Return the held-out tasks, and a copy of each for each further harness, under its label.

    `ConfigError` for harnesses without held-out tasks.
    """
    if harnesses and not held_out:
        raise ConfigError(
            "evaluate_with: there are no held-out tasks to evaluate with; set held_out, or "
            "remove evaluate_with"
        )
    copies = [
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
    return [*held_out, *copies]


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a training."""

    course: Course
    checkpoint: Path
    """Model folder of the last checkpoint."""
    rollouts: str
    """Folder or URL by which the sessions can be viewed."""


FINISH_S = 120.0
"""Timeout of writing the last files."""

PUBLISH_S = 300.0
"""Timeout of a weight update."""

PATIENCE_S = 900.0
"""Time for which a training waits for an unreachable server."""

NAME = "training.name"
"""File with the name of a training on its server."""


@dataclass(frozen=True, slots=True)
class WeightFolders:
    """Model folders for engines of other processes, which read them under the same path."""

    folder: Path
    """Folder of the model folders."""
    model: Path
    """The initial model, whose tokenizer is copied to each folder."""

    def write(self, learner: Learner) -> Path:
        """Write the learner's weights as a new model folder."""
        from bridle.embedded.model import load_tokenizer
        from bridle.training.loop import write_model

        folder = (self.folder / f"{learner.version:06d}").resolve()
        shutil.rmtree(folder, ignore_errors=True)
        write_model(folder, learner, load_tokenizer(self.model))
        return folder

    def remove_others(self, folder: Path) -> None:
        """Remove the weight folders that no engine reads any more: all but `folder`, and of
        adapters the one before it, which running calls still use.
        """
        others = (one for one in self.folder.iterdir() if one.resolve() != folder)
        by_age = sorted(others, key=lambda one: one.stat().st_mtime_ns)
        for old in by_age[:-1] if is_adapter(folder) else by_age:
            shutil.rmtree(old)


@dataclass(frozen=True, slots=True)
class LocalBackend:
    """Engine, gateway and node of this process, which run sessions and take weights."""

    gateway: GatewayServer
    executor: Executor
    folder: Path
    """The run folder."""
    embedded: bool
    """True if the engine is in this process and takes weights from memory."""
    weights: WeightFolders
    events: Events | None = None

    @property
    def begins_with(self) -> bool:
        """Return whether the engine already has the model's weights at the beginning."""
        return self.embedded

    @property
    def rollouts(self) -> str:
        """Place of the sessions, for messages: the run folder."""
        return str(self.folder)

    def groups(
        self,
        draws: TaskDraws,
        held_out: Sequence[Task],
        *,
        version: int,  # noqa: ARG002 - for servers
        cursor: JSON | None,
    ) -> AbstractAsyncContextManager[GroupSource]:
        """Return a context that yields the groups of sessions of this machine's node."""
        return local_groups(self.executor, draws, held_out=held_out, cursor=cursor)

    async def publish(self, learner: Learner) -> None:
        """Load the learner's weights into the engine as its new version."""
        if self.embedded:
            weights = await asyncio.to_thread(learner.weights)
            await self.gateway.update_weights(weights, learner.version, timeout_s=PUBLISH_S)
            return
        folder = await asyncio.to_thread(self.weights.write, learner)
        await self.gateway.update_weights(folder, learner.version, timeout_s=PUBLISH_S)
        self.weights.remove_others(folder)


@dataclass(frozen=True, slots=True)
class ServerBackend:
    """A rollout server, which runs sessions and takes weights."""

    client: AsyncClient
    training: str
    """Name of this training on the server."""
    weights: WeightFolders
    begins_with = False
    events = None

    @property
    def rollouts(self) -> str:
        """Place of the sessions, for messages: the server and the names of their tasks."""
        return f"{self.client.url}, tasks {self.training}.*"

    def groups(
        self, draws: TaskDraws, held_out: Sequence[Task], *, version: int, cursor: JSON | None
    ) -> AbstractAsyncContextManager[GroupSource]:
        """Return a context that yields the groups of sessions that the server runs."""
        return server_groups(
            self.client,
            draws,
            training=self.training,
            version=version,
            held_out=held_out,
            cursor=cursor,
        )

    async def publish(self, learner: Learner) -> None:
        """Write the learner's weights to a folder and let the server's engines load them as a new
        version.
        """
        folder = await asyncio.to_thread(self.weights.write, learner)
        await self.client.set_policy(
            weights=str(folder), version=learner.version, timeout_s=PUBLISH_S
        )
        self.weights.remove_others(folder)


RolloutBackend = LocalBackend | ServerBackend


@asynccontextmanager
async def open_backend(settings: TrainSettings, model: Path) -> AsyncIterator[RolloutBackend]:
    """Open the backend that `settings` name: a rollout server, or engines of this machine.

    `ConfigError` if they name both.
    """
    if settings.server is None:
        async with local_backend(settings, model) as local:
            yield local
        return
    if settings.engines:
        raise ConfigError("give a training either `server` or `engines`, not both")
    async with AsyncClient(settings.server, patience_s=PATIENCE_S) as client:
        out = Path(settings.out)
        yield ServerBackend(
            client, _name(out), WeightFolders(out / "weights", Path(settings.model))
        )


def _name(out: Path) -> str:
    """Return the name of a folder's training on a server, the same at every start."""
    path = out / NAME
    if not path.is_file() or not path.read_text():  # empty: the process died while it wrote
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(f"train-{secrets.token_hex(4)}")
    return path.read_text().strip()


@asynccontextmanager
async def local_backend(
    settings: TrainSettings,
    model: Path,
    *,
    change: Callable[[EngineSetup], EngineSetup] = lambda setup: setup,
) -> AsyncIterator[LocalBackend]:
    """Open engine, gateway and node of this machine, with a run folder that is complete after
    closing.

    `change` may replace the engine or the renderer that the settings name.
    """
    engines = settings.engines or (f"embedded:{model}",)
    config = load_config(None, engines=engines, tokenizer=str(model))
    embedded = all(spec.startswith("embedded:") for spec in engines)
    out = Path(settings.out)
    weights = WeightFolders(out / "weights", Path(settings.model))
    async with AsyncExitStack() as stack:
        setup = change(open_setup(config))
        starts = (out / "rollouts" / f"{number:03d}" for number in itertools.count())
        path = next(one for one in starts if not one.exists())
        folder = stack.enter_context(
            RunFolder.create(path, config=settings.model_dump(mode="json"))
        )
        stack.callback(folder.discard_if_unused)
        store = await stack.enter_async_context(await SqliteStore.open(folder.capture))
        gateway = setup.gateway(store, config.gateway)
        await stack.enter_async_context(gateway)
        _check_tokenizer(gateway.info.tokenizer_dir, model)
        stack.enter_context(long_running())
        given = {"run_slots": settings.concurrency} if settings.concurrency else {}
        kept = NodeSettings.model_validate({"keep_logs": "failed", **given})
        node = LocalNode(gateway=gateway, store=store, folder=folder, settings=kept)
        await stack.enter_async_context(node)
        try:
            yield LocalBackend(gateway, LocalExecutor(node), path, embedded, weights, node.events)
        finally:
            await run_shielded(asyncio.to_thread(folder.finish, store), timeout_s=FINISH_S)


def _check_tokenizer(of_engine: str | None, model: Path) -> None:
    """Refuse an engine whose tokenizer is known to differ from the model's."""
    from bridle.embedded.model import load_tokenizer

    if of_engine is None or Path(of_engine) == model:
        return
    engine, own = (load_tokenizer(folder).get_vocab() for folder in (Path(of_engine), model))
    if engine != own:
        raise ConfigError(
            f"the engine has another tokenizer than the model that is trained: {of_engine} has "
            f"{len(engine)} tokens, {model} has {len(own)}, and {len(set(engine) ^ set(own))} are "
            "in only one of them"
        )


Opener = Callable[[TrainSettings, Path], AbstractAsyncContextManager[RolloutBackend]]


async def train_here(
    settings: TrainSettings,
    tasks: Sequence[Task],
    held_out: Sequence[Task] = (),
    *,
    before: HeldOutEvaluation | None = None,
    resume: bool = False,
    tell: Tell = lambda _: None,
    opener: Opener = open_backend,
) -> Trained:
    """Train on `tasks`, whose `num_samples` are the group sizes.

    `held_out` is run with the harnesses of `evaluate_with` too. `before` = its result with the
    initial model, if known.

    `ConfigError` for a mistake, before anything runs: a folder that holds a training that is not
    resumed or that still runs, another tokenizer than the engine's, other sampling.
    `TrainingError` if the training cannot continue; the last checkpoint stays.
    """
    from bridle.embedded.model import load_tokenizer
    from bridle.training.loop import Course, Loop, checkpoints

    held_out = with_other_harnesses(held_out, settings.evaluate_with)
    _check_tasks(settings, tasks, held_out)
    out = Path(settings.out)
    learner, model, state = await asyncio.to_thread(_load_start, settings, resume=resume)
    history = History.of(state.get("history", {}))
    draws = TaskDraws(tasks, history, seed=settings.seed, curriculum=settings.curriculum)
    initial = [] if before is None else [{"step": 0, **before.json()}]
    async with AsyncExitStack() as stack:
        stack.enter_context(FolderLock(out))
        _write_settings(settings, out)
        given = settings.model_dump(mode="json")
        tracked = stack.enter_context(telemetry.open_trackers(settings.telemetry, out, given))
        backend = await stack.enter_async_context(opener(settings, model))
        if backend.events is not None:
            stack.enter_context(backend.events.listening(tracked.on_event))
        groups = backend.groups(
            draws, held_out, version=learner.version, cursor=state.get("cursor")
        )
        source = await stack.enter_async_context(groups)
        if state or not backend.begins_with:
            await backend.publish(learner)
        loop = Loop(
            learner=learner,
            source=source,
            publish=backend.publish,
            settings=settings.loop,
            tokenizer=load_tokenizer(model),
            checkpoints=out / CHECKPOINTS,
            history=history,
            course=Course(**state.get("course", {"evaluations": initial})),
            tell=partial(_report, out, tracked, tell),
        )
        course = await loop.run()
    return Trained(course, checkpoints(out / CHECKPOINTS)[-1], backend.rollouts)


def _load_start(settings: TrainSettings, *, resume: bool) -> tuple[Learner, Path, JSON]:
    """Load the learner from the last checkpoint or the initial model.

    Returns the folder of the weights that the engine begins with, the initial model's for an
    adapter, and the checkpoint's state too; {} = a new training.
    """
    from bridle.training.grpo import Learner
    from bridle.training.loop import checkpoints, restore

    out = Path(settings.out)
    found = checkpoints(out / CHECKPOINTS)
    if found and not resume:
        raise ConfigError(
            f"{settings.out} holds a training; resume it with --resume, or give another"
            " folder with --out"
        )
    last = found[-1] if found else None
    if last is not None and is_adapter(last) != (settings.lora is not None):
        held = "an adapter: give --lora" if is_adapter(last) else "all weights: give no [lora]"
        message = f"{settings.out} holds a training of {held}, or another folder with --out"
        raise ConfigError(message)
    check_model_folder(settings.model)
    initial = Path(settings.model)
    adapter, model = (last, initial) if settings.lora else (None, last or initial)
    reference = initial if settings.grpo.kl else None
    learner = Learner.load(model, settings.grpo, reference, lora=settings.lora, adapter=adapter)
    return learner, model, restore(learner, last) if last else {}


def _write_settings(settings: TrainSettings, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "train.json").write_text(settings.model_dump_json(indent=2) + "\n")


def _check_tasks(settings: TrainSettings, tasks: Sequence[Task], held_out: Sequence[Task]) -> None:
    """Refuse tasks whose sampling distribution is not the one that is trained, and any that name
    what this machine lacks.
    """
    from bridle.training.samples import unfit_setting

    for task in tasks:
        for field in SHAPING:
            policy = getattr(task.sampling, field)
            fault = unfit_setting(field, policy.value, settings.grpo.temperature)
            if policy.mode == "override" and fault is not None:
                raise ConfigError(f"task {task.task_id!r} {fault}")
    if settings.server is None:
        check([*tasks, *held_out])


def _report(out: Path, tracked: Telemetry, tell: Tell, course: Course) -> None:
    """Keep the course so far in its file, and show it."""
    (out / COURSE).write_text(json.dumps(asdict(course)))
    tracked.training(course.steps, course.evaluations)
    tell(course)


def train(  # noqa: PLR0913 - one parameter per flag
    config: Annotated[Path | None, typer.Argument(help="TOML settings; flags come first.")] = None,
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
        return run_to_end(train_here(settings, chosen, held, resume=resume, tell=tell))


def load_settings(config: Path | None, flags: JSON) -> TrainSettings:
    """Return the training's settings from a file; flags override it, and `None` = not given."""
    given = with_flags({} if config is None else load_toml(config), flags)
    return validated(TrainSettings, given, "the command" if config is None else str(config))


def load(path: str | None, settings: TrainSettings, samples: int) -> list[Task]:
    """Return the tasks of a path with the training's overrides; none for `None`."""
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
    """Return a line on what was trained and how well trainer and engine agree."""
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
