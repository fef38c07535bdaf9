"""`bridle gateway`: only the model API, with sessions over HTTP."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import orjson
import typer

from bridle.cli.output import check_folder, notes
from bridle.cli.serving import Stop, long_running, run_until_signal
from bridle.errors import ConfigError
from bridle.folders import FolderLock

if TYPE_CHECKING:
    from socket import socket

    from bridle.cli.config import FileConfig
    from bridle.gateway.app import Gateway
    from bridle.types import JSON

EnginesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        help="URL of a vLLM server, embedded:DIR or scripted:FILE; once for each replica.",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(help="TOML file with engines, routing, models, gateway; flags come first."),
]
UntokenizedOption: TypeAlias = Annotated[
    bool | None, typer.Option(help="Serve an engine that gives no ids: text only, no training.")
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(help="Tokenizer folder or 'builtin'; the engine's own where it has one."),
]
Streaming: TypeAlias = Literal["live", "whole"]
StreamOption = Annotated[
    Streaming | None,
    typer.Option(help="Streamed replies leave as they are sampled (live) or when committed."),
]
HarnessOption = Annotated[
    str | None, typer.Option(help="Run all tasks with this harness instead of their own.")
]
ConcurrencyOption = Annotated[
    int | None, typer.Option(min=1, help="Harnesses running at once; twice the cores.")
]
TelemetryOption = Annotated[
    str | None,
    typer.Option(help="Trackers, by comma: wandb, mlflow, tensorboard, trackio, otel."),
]
Rendering: TypeAlias = Literal["renderer", "engine"]
PromptOption = Annotated[
    Rendering | None,
    typer.Option(help="Who renders where a conversation begins: Bridle or the engine's template."),
]


CAPTURE = "capture.sqlite"

END_S = 15.0
"""Time that a gateway gets to stop before it is ended; what was committed is kept either way."""

WORKERS_END_S = 30.0
"""The same where it stops workers, which it kills after 20 s."""

PORT = 8100
"""Of the model API, where nothing else is said."""


def gateway(  # noqa: PLR0913 - one parameter per flag
    engine: EnginesOption = None,
    config: ConfigOption = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the model API; 0 takes a free one. [8100]")
    ] = None,
    data: Annotated[Path, typer.Option(help="Folder for capture and the control token.")] = Path(
        "runs/gateway"
    ),
    tokenizer: TokenizerOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None,
    stream: StreamOption = None,
    prompt: PromptOption = None,
    control_port: Annotated[
        int | None, typer.Option(help="A listener of their own for the control routes.")
    ] = None,
    fsync: Annotated[
        bool, typer.Option("--fsync", help="Survive power loss too, not only kill -9.")
    ] = False,
    allow_untokenized: UntokenizedOption = None,
    workers: Annotated[
        int,
        typer.Option(
            min=1, max=64, help="Processes that sessions are spread over, each with its own port."
        ),
    ] = 1,
    json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON when it listens: where.")
    ] = False,
) -> None:
    """Serve the model API until Ctrl-C; sessions are opened over HTTP."""
    from bridle.cli.config import load_config
    from bridle.gateway.workers import check_folder as check_workers

    flags = {
        "host": host,
        "port": port,
        "control_port": control_port,
        "data_dir": data,
        "stream": stream,
        "prompt": prompt,
        "allow_untokenized": allow_untokenized,
    }
    loaded = load_config(config, engines=engine or (), tokenizer=tokenizer, gateway=flags)
    if "port" not in loaded.gateway.model_fields_set:
        served = loaded.gateway.model_copy(update={"port": PORT})
        loaded = loaded.model_copy(update={"gateway": served})
    check_folder(data, "--data")
    check_workers(data, workers)
    if workers == 1:
        run_until_signal(lambda stop: _serve(loaded, data, fsync, json, stop), end_s=END_S)
    else:
        run_until_signal(
            lambda stop: _serve_workers(loaded, data, fsync, json, workers, stop),
            end_s=WORKERS_END_S,
        )


async def _serve(config: FileConfig, data: Path, fsync: bool, as_json: bool, stop: Stop) -> None:
    async with opened(config, data, fsync=fsync) as served:
        _tell(served.url, str(served.control_url), [data / CAPTURE], data, as_json=as_json)
        with long_running():
            await stop.wait()


@asynccontextmanager
async def opened(
    config: FileConfig,
    data: Path,
    *,
    fsync: bool,
    sockets: Sequence[socket] = (),
    prepare: Callable[[Gateway], Awaitable[None]] | None = None,
    patience_s: float = 0.0,
) -> AsyncIterator[Gateway]:
    """Serve a gateway that captures in the folder `data`; see `Gateway` for the rest.

    `ConfigError` if another process owns the folder and still does after `patience_s`.
    """
    from bridle.capture.sqlite import SqliteStore
    from bridle.cli.parts import open_all
    from bridle.gateway.app import Gateway

    with FolderLock(data, patience_s=patience_s):
        parts = open_all(config)
        async with (
            await SqliteStore.open(data / CAPTURE, fsync="group" if fsync else "off") as store,
            Gateway(
                engine=parts.engine,
                renderer=parts.renderer,
                store=store,
                settings=config.gateway,
                models=parts.models,
                sockets=sockets,
                prepare=prepare,
            ) as served,
        ):
            yield served


async def _serve_workers(
    config: FileConfig, data: Path, fsync: bool, as_json: bool, workers: int, stop: Stop
) -> None:
    """Serve with worker processes, which this one supervises."""
    from bridle.gateway.workers import Supervisor, worker_folder

    embedded = [spec for spec in config.engines if spec.startswith("embedded:")]
    if embedded:
        message = f"{embedded[0]} lives in one process: serve it with `bridle engine`, and name its"
        raise ConfigError(f"{message} URL, or leave --workers at 1")
    supervisor = Supervisor(
        settings=config.gateway,
        data=data,
        workers=workers,
        command=(sys.executable, "-m", "bridle.cli.gateway_worker"),
        spec={"config": config.model_dump(mode="json", exclude_unset=True), "fsync": fsync},
    )
    async with supervisor as served:
        files = [worker_folder(data, number) / CAPTURE for number in range(workers)]
        _tell(served.url, served.control_url, files, data, as_json=as_json, ports=served.ports)
        await stop.wait()


def _tell(
    url: str,
    control_url: str,
    files: list[Path],
    data: Path,
    *,
    as_json: bool,
    ports: Sequence[int] = (),
) -> None:
    """Print where everything is; `ports` are the data ports of workers."""
    token = data / "control.token"
    if as_json:
        said: JSON = {"url": url, "control_url": control_url, "workers": len(files)}
        said |= {"capture": [str(file) for file in files], "control_token": str(token)}
        said |= {"worker_ports": list(ports)} if ports else {}
        sys.stdout.write(orjson.dumps(said).decode() + "\n")  # a line that can be waited for
        sys.stdout.flush()
        return
    if ports:
        api = f"{len(ports)} workers on ports {', '.join(map(str, ports))}"
        where = f"{len(files)} files {data}/worker-*/"
    else:
        api, where = url, str(files[0])
    notes.print(f"model API at {api}, control routes at {control_url}")
    notes.print(f"capture in {where}; control token in {token}")
