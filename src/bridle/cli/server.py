"""Parts of `bridle serve`: its nodes, here or on Ray, and its dashboard.

The dashboard shows the server's own state, behind its tokens. Pages are made on worker threads;
what they ask of the service is done on its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
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
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.routing import Mount

from bridle.capture.sqlite import SqliteStore
from bridle.cli.config import FileConfig
from bridle.cli.parts import open_all
from bridle.dashboard.app import make_app
from bridle.dashboard.folder import Folder
from bridle.dashboard.guard import Guard
from bridle.dashboard.served import Served
from bridle.errors import ConfigError, ServerError, install_extra
from bridle.executors.hosting import Hosted
from bridle.gateway.app import Gateway
from bridle.lifecycle.manager import Node, NodeSettings
from bridle.server import results, wire
from bridle.server.auth import Auth, Caller, Role
from bridle.server.rows import run_id
from bridle.server.states import SessionState
from bridle.server.workers import NodeWorkers, ServerFolder, Workers

if TYPE_CHECKING:
    from bridle.server.service import Service
    from bridle.server.views import Views
    from bridle.server.wire import Row
    from bridle.trajectory.sample import Trajectory
    from bridle.types import JSON


T = TypeVar("T")

PATH: Final = "/ui"

ANSWER_S: Final = 60.0
"""How long the service may take for one answer."""


@contextmanager
def mounted(service: Service, auth: Auth, data: Path) -> Iterator[Mount]:
    """The dashboard under `PATH`, for whoever's token may read. In the service's event loop.

    `data` is the folder with the capture of a node of this process, if there is one.
    """
    with ExitStack() as opened:
        folder = None
        with suppress(ConfigError):
            folder = opened.enter_context(closing(Folder(data / "capture.sqlite")))
        loop = asyncio.get_running_loop()

        @cache
        def source_of(owner: str | None) -> Served:
            # The folder's capture is everybody's: only an admin's pages are made from it.
            rollouts = ServiceRollouts(service, loop, owner)
            return Served(rollouts, "rollout server", folder if owner is None else None)

        guard = Guard(lambda token: may_read(auth, token))
        yield Mount(PATH, make_app(lambda token: source_of(owner_of(auth, token)), guard))


def may_read(auth: Auth, token: str) -> bool:
    """Whether a token opens the dashboard."""
    caller = _caller(auth, token)
    return caller is not None and caller.may(Role.READ)


def owner_of(auth: Auth, token: str) -> str | None:
    """Whose tasks a token sees: its own, `None` = an admin's, all. Nobody's if it is not known."""
    caller = _caller(auth, token)
    return "" if caller is None else caller.tenant


def _caller(auth: Auth, token: str) -> Caller | None:
    return auth.caller([(b"authorization", b"Bearer " + token.encode())])


class ServiceRollouts:
    """A service as `bridle.dashboard.served.Rollouts`, to be asked from threads.

    It shows the tasks of one `owner`, `None` = of all.
    """

    def __init__(
        self,
        service: Service,
        loop: asyncio.AbstractEventLoop,
        owner: str | None,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._service = service
        self._owner = owner
        self._loop = loop
        self._answer_s = answer_s

    @property
    def _views(self) -> Views:
        return self._service.views.of(self._owner)

    def status(self) -> JSON:
        return self._wait(self._service.status(self._owner))

    def nodes(self) -> list[JSON]:
        async def nodes() -> list[JSON]:
            return self._service.workers.nodes()

        return self._wait(nodes())

    def newest_sessions(
        self, *, limit: int = 100, offset: int = 0, state: str | None = None
    ) -> list[JSON]:
        wanted = None if state is None else SessionState(state)
        asked = self._views.newest(limit=limit, offset=offset, state=wanted)
        return [self._told(row) | {"task_id": row["task_id"]} for row in self._wait(asked)]

    def task(self, task_id: str) -> JSON:
        return wire.task_json(self._task(task_id))

    def sessions(self, task_id: str) -> list[JSON]:
        rows = self._wait(self._views.sessions(self._task(task_id)["seq"]))
        return [self._told(row) for row in rows]

    def session(self, session_id: str) -> JSON:
        row = self._session(session_id)
        return self._told(row) | {"task_id": row["task_id"]}

    def trajectory(self, session_id: str) -> Trajectory:
        found = self._wait(results.trajectory(self._service, self._session(session_id)))
        if found is None:
            raise ServerError(f"session {session_id!r} has no trajectory any more", status=404)
        return found

    def artifact(self, session_id: str, name: str) -> bytes | Path:
        row = self._session(session_id)
        run = run_id(session_id, max(1, row["attempt"]))
        found = self._wait(self._service.workers.artifact(run, name))
        if found is None:
            raise ServerError(f"no artifact {name[:200]!r}", status=404)
        return found

    def _told(self, row: Row) -> JSON:
        running = row["state"] == SessionState.RUNNING
        stage = self._service.stage(row["session_id"], row["attempt"]) if running else None
        return wire.session_json(row, stage)

    def _task(self, task_id: str) -> Row:
        return _there(self._wait(self._views.task(task_id)), f"task {task_id[:200]!r}")

    def _session(self, session_id: str) -> Row:
        row = self._wait(self._views.session(session_id))
        return _there(row, f"session {session_id[:200]!r}")

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self._answer_s)
        except TimeoutError:
            future.cancel()
            raise ServerError(f"no answer in {self._answer_s:g} s", status=503) from None


def _there(row: Row | None, what: str) -> Row:
    if row is None:
        raise ServerError(f"no {what}", status=404)
    return row


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
