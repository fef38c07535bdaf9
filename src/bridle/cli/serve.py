"""`bridle serve`: the rollout server, with a node in its process."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.gateway import (
    ConfigOption,
    EnginesOption,
    PromptOption,
    StreamOption,
    TokenizerOption,
)
from bridle.cli.output import notes
from bridle.cli.serving import Stop, long_running, run_until_signal

if TYPE_CHECKING:
    from bridle.cli.config import FileConfig
    from bridle.server.service import Service


def serve(  # noqa: PLR0913 - one parameter per flag
    engine: EnginesOption = None,
    config: ConfigOption = None,
    tokenizer: TokenizerOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the server; 0 takes a free one. [8080]")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of all that is kept. [runs/server]")
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="postgresql://... or a file; SQLite in the data folder.")
    ] = None,
    trajectories: Annotated[
        str | None, typer.Option(help="Folder or URL (s3://...) of trajectories.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="TOML file with [[tokens]]; needed off loopback.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Harnesses running at once; twice the cores.")
    ] = None,
    allow_path: Annotated[
        list[Path] | None, typer.Option(help="Folder that tasks may name files in; repeatable.")
    ] = None,
    callback_to: Annotated[
        list[str] | None,
        typer.Option(help="Name or network that callbacks may go to; repeatable."),
    ] = None,
    stream: StreamOption = None,
    prompt: PromptOption = None,
) -> None:
    """Serve rollouts over HTTP until Ctrl-C; what was accepted is kept over any restart."""
    from bridle.cli.config import load_config

    permits = {"host_paths": allow_path, "callbacks": callback_to}
    flags = {
        "host": host,
        "port": port,
        "data": data,
        "database": database,
        "trajectories": trajectories,
        "tokens": tokens,
        "permits": {name: tuple(value) for name, value in permits.items() if value},
    }
    loaded = load_config(
        config,
        engines=engine or (),
        tokenizer=tokenizer,
        gateway={"stream": stream, "prompt": prompt},
        server={name: value for name, value in flags.items() if value not in (None, {})},
    )
    run_until_signal(lambda stop: _serve(loaded, concurrency, stop))


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is up."""

    service: Service
    url: str


async def _serve(config: FileConfig, concurrency: int | None, stop: Stop) -> None:
    async with server_of(config, concurrency=concurrency) as served:
        notes.print(f"rollout server at {served.url}, data in {config.server.data}")
        with long_running():
            await stop.wait()
            if left := await served.service.drain():
                notes.print(f"{left} sessions still run; the next server runs them again")


@asynccontextmanager
async def server_of(config: FileConfig, *, concurrency: int | None = None) -> AsyncIterator[Served]:
    """A whole server inside: engines, gateway, node, state, HTTP.

    `ConfigError` or `EngineError` if it cannot be had; nothing is left behind.
    """
    from bridle.aio import Nursery
    from bridle.bridges import parquet
    from bridle.capture.sqlite import SqliteStore
    from bridle.cli.parts import open_all
    from bridle.gateway.app import Gateway
    from bridle.lifecycle.manager import Node, NodeSettings
    from bridle.server import answering
    from bridle.server.addresses import Addresses
    from bridle.server.app import serving
    from bridle.server.auth import Auth, load_tokens
    from bridle.server.database import Database
    from bridle.server.delivery import Deliverer, callback_secret
    from bridle.server.files import TrajectoryFiles
    from bridle.server.service import Service
    from bridle.server.workers import NodeWorkers, ServerFolder

    tokens = load_tokens(config.server.tokens)
    settings = config.server.checked(has_tokens=bool(tokens))
    data = settings.data
    parts = open_all(config)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(ServerFolder.open(data / "node"))
        store = await stack.enter_async_context(await SqliteStore.open(data / "capture.sqlite"))
        database = await Database.open(settings.database or str(data / "server.sqlite"))
        await stack.enter_async_context(database)
        gateway = Gateway(
            engine=parts.engine,
            renderer=parts.renderer,
            store=store,
            settings=config.gateway.model_copy(update={"data_dir": data}),
            models=parts.models,
        )
        await stack.enter_async_context(gateway)
        slots = NodeSettings() if concurrency is None else NodeSettings(run_slots=concurrency)
        node = Node(gateway=gateway, store=store, folder=folder, settings=slots)
        await stack.enter_async_context(node)
        root = settings.trajectories or data / "trajectories"
        workers = NodeWorkers(node, gateway, store)
        service = Service(
            database=database,
            files=TrajectoryFiles(root, parquet),
            workers=workers,
            settings=settings,
            owner=_owner(data),
        )
        await stack.enter_async_context(service)
        workers.settle()
        addresses = Addresses(settings.permits.callbacks)
        nursery = await stack.enter_async_context(Nursery(service.lost))
        deliverer = Deliverer(service, addresses, callback_secret(data))
        nursery.start(deliverer.run(), name="deliverer")
        served = answering.Served(service, settings.permits, Auth(tokens), addresses)
        url = await stack.enter_async_context(
            serving(served, host=settings.host, port=settings.port)
        )
        yield Served(service, url)


def _owner(data: Path) -> str:
    """Whose leases these are: the same name in every life of a server on this folder."""
    path = data / "server.id"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text()
