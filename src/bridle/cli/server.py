"""Parts of `bridle serve`: its nodes, here or on Ray, and its dashboard.

The dashboard reads the server's API with the token of whoever looks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from starlette.routing import Mount

from bridle import telemetry
from bridle.capture.sqlite import SqliteStore
from bridle.cli.config import FileConfig
from bridle.cli.parts import open_all
from bridle.client import Client
from bridle.dashboard.app import Guard, make_app
from bridle.dashboard.folder import FolderSource
from bridle.dashboard.server import ServerSource
from bridle.errors import ConfigError, install_extra
from bridle.executors.hosting import Hosted
from bridle.gateway.app import Gateway
from bridle.lifecycle.manager import Node, NodeSettings
from bridle.server.auth import Auth, Caller, Role
from bridle.server.workers import NodeWorkers, ServerFolder, Workers

PATH: Final = "/ui"


@contextmanager
def mounted(url: Callable[[], str], auth: Auth, data: Path) -> Iterator[Mount]:
    """The dashboard under `PATH` for every token that may read; it reads the server's own API.

    `url` returns the server's address once it listens. `data` is the folder with the capture of a
    node of this process, if there is one.
    """
    with ExitStack() as opened:
        folder = None
        with suppress(ConfigError):
            folder = opened.enter_context(closing(FolderSource(data / "capture.sqlite")))

        @cache
        def source_of(token: str) -> ServerSource:
            # The folder's capture is everybody's: only an admin's pages are made from it.
            own = folder if owner_of(auth, token) is None else None
            # An empty token would be replaced by the one that this user's clients find.
            client = opened.enter_context(Client(url(), token=token or "none", patience_s=1.0))
            return ServerSource(client, "rollout server", own)

        yield Mount(PATH, make_app(source_of, Guard(lambda token: may_read(auth, token))))


def may_read(auth: Auth, token: str) -> bool:
    """Return whether a token opens the dashboard."""
    caller = _caller(auth, token)
    return caller is not None and caller.may(Role.READ)


def owner_of(auth: Auth, token: str) -> str | None:
    """Return the owner whose tasks a token sees; `None` = all (an admin's), "" = none (unknown)."""
    caller = _caller(auth, token)
    return "" if caller is None else caller.tenant


def _caller(auth: Auth, token: str) -> Caller | None:
    return auth.caller([(b"authorization", b"Bearer " + token.encode())])


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
    """Open the workers that run a server's sessions; `owner` is the server's name.

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


@contextmanager
def tracked(config: FileConfig, data: Path, workers: Workers) -> Iterator[None]:
    """Feed what happens to runs inside to the trackers that `config` names."""
    facts = config.model_dump(mode="json", include={"engines", "tokenizer", "telemetry"})
    with (
        telemetry.opened(config.telemetry, data, facts) as trackers,
        workers.listening(trackers.hear),
    ):
        yield
