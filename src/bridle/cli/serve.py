"""`bridle serve`: the rollout server, with a node in its process or nodes on a Ray cluster."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bridle.cli.dashboard import AllowHostOption
from bridle.cli.gateway import (
    ConfigOption,
    EnginesOption,
    PromptOption,
    StreamOption,
    TelemetryOption,
    TokenizerOption,
)
from bridle.cli.output import check_folder, check_storage, notes
from bridle.cli.serving import Stop, long_running, run_until_signal
from bridle.folders import FolderLock, private_file

if TYPE_CHECKING:
    from bridle.cli.config import FileConfig
    from bridle.server.service import Service
    from bridle.server.settings import ServerSettings

EnginesFromOption = Annotated[
    str | None, typer.Option(help="File or URL that names engines, read again and again.")
]
ExecutorOption = Annotated[
    str | None, typer.Option(help="Where sessions are computed: local (the default) or ray.")
]
DatabaseOption = Annotated[
    str | None, typer.Option(help="postgresql://... or a file; SQLite in the data folder.")
]
DashboardOption = Annotated[
    bool, typer.Option("--dashboard", help="Serve the dashboard too, under /ui.")
]


def serve(  # noqa: PLR0913 - one parameter per flag
    engine: EnginesOption = None,
    config: ConfigOption = None,
    engines_from: EnginesFromOption = None,
    tokenizer: TokenizerOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the server; 0 takes a free one. [8080]")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of all that is kept. [runs/server]")
    ] = None,
    database: DatabaseOption = None,
    trajectories: Annotated[
        str | None, typer.Option(help="Folder or URL (s3://...) of trajectories.")
    ] = None,
    tokens: Annotated[Path | None, typer.Option(help="TOML file with others' [[tokens]].")] = None,
    allow_host: AllowHostOption = None,
    executor: ExecutorOption = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Harnesses running at once on a node; twice the cores."),
    ] = None,
    allow_path: Annotated[
        list[Path] | None, typer.Option(help="Folder that tasks may name files in; repeatable.")
    ] = None,
    callback_to: Annotated[
        list[str] | None,
        typer.Option(help="Name or network that callbacks may go to; repeatable."),
    ] = None,
    telemetry: TelemetryOption = None,
    dashboard: DashboardOption = False,
    stream: StreamOption = None,
    prompt: PromptOption = None,
) -> None:
    """Serve rollouts over HTTP until Ctrl-C; what was accepted is kept over any restart."""
    from bridle.cli.config import load_config

    permits = {"host_paths": allow_path, "callbacks": callback_to}
    flags = {
        "engines_from": engines_from,
        "host": host,
        "port": port,
        "data": data,
        "database": database,
        "trajectories": trajectories,
        "tokens": tokens,
        "hosts": tuple(allow_host) if allow_host else None,
        "permits": {name: tuple(value) for name, value in permits.items() if value},
    }
    loaded = load_config(
        config,
        engines=engine or (),
        tokenizer=tokenizer,
        gateway={"stream": stream, "prompt": prompt},
        server={name: value for name, value in flags.items() if value not in (None, {})},
        executor=executor_flags(executor, concurrency),
        telemetry=telemetry,
    )
    _check_output(loaded.server)
    run_until_signal(lambda stop: _serve(loaded, stop, dashboard=dashboard))


def _check_output(server: ServerSettings) -> None:
    check_folder(server.data, "--data")
    if server.trajectories and "://" in server.trajectories:
        check_storage(server.trajectories, "--trajectories")
    elif server.trajectories:
        check_folder(Path(server.trajectories), "--trajectories")


def executor_flags(kind: str | None, concurrency: int | None) -> dict[str, Any]:
    """Return the values of the `[executor]` table that flags set."""
    slots = {} if concurrency is None else {"node": {"run_slots": concurrency}}
    return slots if kind is None else {"kind": kind, **slots}


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """A server that is up."""

    service: Service
    url: str
    token_file: Path
    """The operator's token."""


async def _serve(config: FileConfig, stop: Stop, *, dashboard: bool) -> None:
    from bridle.server.discovery import first_named

    if config.server.engines_from and not config.engines:
        found = await first_named(config.server.engines_from)
        config = config.model_copy(update={"engines": tuple(found)})
    async with server_of(config, dashboard=dashboard) as served:
        where = f", on the Ray cluster {ray}" if (ray := _cluster(config)) else ""
        notes.print(f"rollout server at {served.url}, data in {config.server.data}{where}")
        notes.print(f"its token is in {served.token_file}; clients of this user find it")
        if dashboard:
            notes.print(f"its dashboard is at {served.url}/ui/")
        with long_running():
            await stop.wait()
            if left := await served.service.drain():
                what = "go on without it" if ray else "still run; the next server runs them again"
                notes.print(f"{left} sessions {what}")


def _cluster(config: FileConfig) -> str | None:
    """The address of the cluster that a server computes on; `None` = it does so by itself."""
    if config.executor.kind == "local":
        return None
    from bridle.node.ray import address

    return address()


@asynccontextmanager
async def server_of(config: FileConfig, *, dashboard: bool = False) -> AsyncIterator[ServerSetup]:
    """A whole server inside: engines, gateways, nodes, state, HTTP, and the dashboard if wanted.

    `ConfigError` or `EngineError` if it cannot be had; nothing is left behind.
    """
    from bridle.aio import Nursery
    from bridle.bridges import parquet
    from bridle.cli.server import mounted, tracked, workers_of
    from bridle.credentials import announced
    from bridle.server.app import serving
    from bridle.server.auth import TOKEN_FILE, Auth, callback_secrets, load_tokens, own_token
    from bridle.server.callbacks import CallbackAddresses, CallbackSender, callback_secret
    from bridle.server.database import Database
    from bridle.server.discovery import follow
    from bridle.server.files import TrajectoryFiles
    from bridle.server.http import ServerContext
    from bridle.server.service import Service

    settings = config.server.checked()
    data = settings.data
    async with AsyncExitStack() as stack:
        stack.enter_context(FolderLock(data))
        tokens = load_tokens(settings.tokens, own=own_token(data))
        signing = callback_secrets(tokens)
        auth = Auth(tokens)
        owner = _owner(data)
        workers = await stack.enter_async_context(workers_of(config, data, owner))
        stack.enter_context(tracked(config, data, workers))
        database = await Database.open(settings.database or str(data / "server.sqlite"))
        await stack.enter_async_context(database)
        service = Service(
            database=database,
            files=TrajectoryFiles(settings.trajectories or data / "trajectories", parquet),
            workers=workers,
            settings=settings,
            owner=owner,
        )
        await stack.enter_async_context(service)
        await workers.settle()
        addresses = CallbackAddresses(settings.permits.callbacks)
        nursery = await stack.enter_async_context(Nursery(service.failed))
        deliverer = CallbackSender(service, addresses, callback_secret(data), secrets=signing)
        nursery.start(deliverer.run(), name="deliverer")
        if settings.engines_from:
            nursery.start(follow(settings.engines_from, workers, config.engines), name="engines")
        served = ServerContext(service, settings.permits, auth, addresses)
        mounts = []
        if dashboard:
            mounts.append(stack.enter_context(mounted(lambda: url, auth, data)))
        url = await stack.enter_async_context(
            serving(
                served,
                host=settings.host,
                port=settings.port,
                mounts=mounts,
                allowed=settings.hosts,
            )
        )
        try:
            stack.enter_context(announced(url, data / TOKEN_FILE))
        except OSError as error:
            notes.print(f"clients do not find the token by themselves: {error}", markup=False)
        yield ServerSetup(service, url, data / TOKEN_FILE)


def _owner(data: Path) -> str:
    """Return the owner name of this server's leases: the same at every start on this folder."""
    path = data / "server.id"
    if not path.exists():
        private_file(path).write_text(secrets.token_hex(8))
    return path.read_text()
