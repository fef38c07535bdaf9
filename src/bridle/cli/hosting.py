"""Nodes as a config describes them: gateway, capture and sessions in one folder, here or on Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bridle.capture.sqlite import SqliteStore
from bridle.cli.config import FileConfig
from bridle.cli.parts import open_all
from bridle.errors import ConfigError, install_extra
from bridle.executors.hosting import Hosted
from bridle.gateway.app import Gateway
from bridle.lifecycle.manager import Node, NodeSettings
from bridle.server.workers import NodeWorkers, ServerFolder, Workers


@dataclass(frozen=True, slots=True)
class OpensNode:
    """Opens the node of a config on any machine (`bridle.executors.hosting.Opens`)."""

    config: FileConfig

    def __call__(
        self, folder: Path, cpus: float | None = None
    ) -> AbstractAsyncContextManager[Hosted]:
        """A node whose run slots follow `cpus` where the config gives none."""
        return _opened(self.config, folder, cpus)


@asynccontextmanager
async def _opened(config: FileConfig, folder: Path, cpus: float | None) -> AsyncIterator[Hosted]:
    given = config.executor.node.model_dump(exclude_unset=True)
    if cpus is not None:
        given.setdefault("run_slots", max(1, round(2 * cpus)))
    parts = open_all(config)
    async with AsyncExitStack() as stack:
        logs = stack.enter_context(ServerFolder.open(folder / "node"))
        store = await stack.enter_async_context(await SqliteStore.open(folder / "capture.sqlite"))
        gateway = Gateway(
            engine=parts.engine,
            renderer=parts.renderer,
            store=store,
            settings=config.gateway.model_copy(update={"data_dir": folder}),
            models=parts.models,
        )
        await stack.enter_async_context(gateway)
        settings = NodeSettings.model_validate(given)
        node = Node(gateway=gateway, store=store, folder=logs, settings=settings)
        await stack.enter_async_context(node)
        yield Hosted(node, gateway, store)


@asynccontextmanager
async def workers_of(config: FileConfig, data: Path, owner: str) -> AsyncIterator[Workers]:
    """Where the sessions of a server are computed; `owner` is the server's name.

    `ConfigError` or `EngineError` if it cannot be had.
    """
    if config.executor.kind == "local":
        async with OpensNode(config)(data) as hosted:
            yield NodeWorkers(hosted.node, hosted.gateway, hosted.store)
        return
    from bridle.executors.cluster import ClusterRunner
    from bridle.server.cluster_workers import ClusterWorkers

    try:
        from bridle.executors.ray import RayCluster
    except ModuleNotFoundError as error:
        raise ConfigError(f"executor ray: {error}; run {install_extra('ray')}") from error
    settings = config.executor.ray
    async with (
        ClusterRunner(owner, outlive=True, patience=settings) as runner,
        RayCluster(runner, settings, opens=OpensNode(config), folder=data / "nodes"),
    ):
        yield ClusterWorkers(runner)
