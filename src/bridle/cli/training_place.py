"""Where a training's sessions run: in this process, or on a rollout server.

Either gives groups and takes weights. Here, engine, gateway and node live as long as the training;
a server lives on its own, keeps what a trainer that died had begun, and loads weights from a folder
that it must see under the same path.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bridle.aio import run_shielded
from bridle.capture.sqlite import SqliteStore
from bridle.cli.config import load_config
from bridle.cli.parts import Parts, open_all
from bridle.cli.serving import long_running
from bridle.client import AsyncClient
from bridle.config import Task
from bridle.errors import ConfigError
from bridle.executors.local import LocalExecutor
from bridle.gateway.app import Gateway
from bridle.lifecycle.manager import Node, NodeSettings
from bridle.lifecycle.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridle.cli.training import TrainSettings
    from bridle.executors.base import Executor
    from bridle.training.groups import GroupSource
    from bridle.training.grpo import Learner
    from bridle.training.tasks import TaskDraws
    from bridle.types import JSON

FINISH_S = 120.0
"""How long writing the last files may take once a training is being ended."""

PUBLISH_S = 300.0
"""How long engines may take to load new weights."""

PATIENCE_S = 900.0
"""How long a training waits for a server that cannot be reached."""

NAME = "training.name"
"""File that keeps what a training is called on its server."""


class Place(Protocol):
    """Where sessions run."""

    @property
    def rollouts(self) -> str:
        """Where they can be looked at."""

    @property
    def begins_with(self) -> bool:
        """Whether it samples from the model that it was opened with; else that is published."""

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
    """What the training in a folder is called on a server: the same in each of its lives."""
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
        node = Node(gateway=gateway, store=store, folder=folder, settings=kept)
        await stack.enter_async_context(node)
        try:
            yield LocalPlace(gateway, LocalExecutor(node), path, embedded, weights)
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
