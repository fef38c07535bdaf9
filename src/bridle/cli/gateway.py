"""`bridle gateway` and `bridle engine`: the model API and an engine, served over HTTP.

A gateway with `--workers N` supervises N processes `python -m bridle.cli.gateway SOCKETS`. The
arguments are the file descriptors of a worker's listening sockets. Its settings come as one line of
JSON on standard input (`Supervisor._spec_of`); it stops when that is closed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from socket import socket
from typing import Annotated

import orjson
import structlog
import typer
import uvloop

from bridle.capture.sqlite import SqliteStore
from bridle.cli.config import FileConfig, open_setup
from bridle.cli.process import Stop, long_running, run_until_signal
from bridle.cli.terminal import (
    EngineOptions,
    JsonOption,
    PromptOption,
    StreamOption,
    UntokenizedOption,
    check_folder,
    log_to_stderr,
    notes,
    print_json_line,
    with_option_groups,
)
from bridle.engines import open_engine
from bridle.errors import BridleError, ConfigError
from bridle.folders import FolderLock
from bridle.gateway.app import GatewayServer
from bridle.gateway.weights import SetPolicy
from bridle.gateway.workers import END_S as KILLED_S
from bridle.gateway.workers import Supervisor, worker_folder
from bridle.gateway.workers import check_folder as check_workers
from bridle.node.results import CAPTURE
from bridle.scripted.server import EngineServer
from bridle.types import JSON

END_S = 15.0
"""Time for a gateway to stop before its process ends; committed exchanges are kept either way."""

WORKERS_END_S = 30.0
"""The same for a gateway with workers, which it kills after 20 s."""

PORT = 8100
"""Default port of the model API."""


@with_option_groups
def gateway(  # noqa: PLR0913 - one parameter per flag
    engines: EngineOptions,
    port: Annotated[
        int | None, typer.Option(help="Port of the model API; 0 takes a free one. [8100]")
    ] = None,
    data: Annotated[Path, typer.Option(help="Folder for capture and the control token.")] = Path(
        "runs/gateway"
    ),
    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None,
    stream: StreamOption = None,
    prompt: PromptOption = None,
    control_port: Annotated[
        int | None, typer.Option(help="Separate port for the control routes.")
    ] = None,
    fsync: Annotated[
        bool, typer.Option("--fsync", help="Survive power loss, not only kill -9.")
    ] = False,
    allow_untokenized: UntokenizedOption = None,
    workers: Annotated[
        int,
        typer.Option(
            min=1, max=64, help="Processes that sessions are spread over, each with its own port."
        ),
    ] = 1,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print the addresses as one line of JSON once it listens."),
    ] = False,
) -> None:
    """Serve the model API until Ctrl-C; sessions are opened over HTTP."""
    flags = {
        "host": host,
        "port": port,
        "control_port": control_port,
        "data_dir": data,
        "stream": stream,
        "prompt": prompt,
        "allow_untokenized": allow_untokenized,
    }
    loaded = engines.load(gateway=flags)
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
    async with open_gateway(config, data, fsync=fsync) as served:
        _print_addresses(
            served.url, str(served.control_url), [data / CAPTURE], data, as_json=as_json
        )
        with long_running():
            await stop.wait()


@asynccontextmanager
async def open_gateway(
    config: FileConfig,
    data: Path,
    *,
    fsync: bool,
    sockets: Sequence[socket] = (),
    prepare: Callable[[GatewayServer], Awaitable[None]] | None = None,
    patience_s: float = 0.0,
) -> AsyncIterator[GatewayServer]:
    """Serve a gateway within the context that captures into the folder `data`.

    `prepare` is called before it serves. `ConfigError` if another process locks the folder for
    longer than `patience_s`.
    """
    with FolderLock(data, patience_s=patience_s):
        setup = open_setup(config)
        async with (
            await SqliteStore.open(data / CAPTURE, fsync="group" if fsync else "off") as store,
            setup.gateway(store, config.gateway, sockets=sockets, prepare=prepare) as served,
        ):
            yield served


async def _serve_workers(
    config: FileConfig, data: Path, fsync: bool, as_json: bool, workers: int, stop: Stop
) -> None:
    """Serve by worker processes under the supervision of this one."""
    embedded = [spec for spec in config.engines if spec.startswith("embedded:")]
    if embedded:
        raise ConfigError(
            f"{embedded[0]} cannot be shared by workers: serve it with `bridle engine` and give"
            " its URL, or leave --workers at 1"
        )
    supervisor = Supervisor(
        settings=config.gateway,
        data=data,
        workers=workers,
        command=(sys.executable, "-m", "bridle.cli.gateway"),
        spec={"config": config.model_dump(mode="json", exclude_unset=True), "fsync": fsync},
    )
    async with supervisor as served:
        files = [worker_folder(data, number) / CAPTURE for number in range(workers)]
        _print_addresses(
            served.url, served.control_url, files, data, as_json=as_json, ports=served.ports
        )
        await stop.wait()


def _print_addresses(
    url: str,
    control_url: str,
    files: list[Path],
    data: Path,
    *,
    as_json: bool,
    ports: Sequence[int] = (),
) -> None:
    """Print the addresses and files; `ports` are the data ports of workers."""
    token = data / "control.token"
    if as_json:
        said: JSON = {"url": url, "control_url": control_url, "workers": len(files)}
        said |= {"capture": [str(file) for file in files], "control_token": str(token)}
        said |= {"worker_ports": list(ports)} if ports else {}
        print_json_line(said)
        return
    if ports:
        api = f"{len(ports)} workers on ports {', '.join(map(str, ports))}"
        where = f"{len(files)} files {data}/worker-*/"
    else:
        api, where = url, str(files[0])
    notes.print(f"model API at {api}, control routes at {control_url}")
    notes.print(f"capture in {where}; control token in {token}")


def worker_config(spec: JSON) -> FileConfig:
    """Return the configuration of a gateway's worker: the gateway's with the worker's own
    settings.
    """
    config = spec["config"]
    gateway = {**config.get("gateway", {}), **spec["gateway"]}
    return FileConfig.model_validate({**config, "gateway": gateway})


async def _serve_worker(spec: JSON, sockets: list[socket]) -> None:
    """Serve until standard input is closed. `BridleError` if the worker cannot start."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def stdin_closed() -> None:
        loop.remove_reader(sys.stdin.fileno())
        stop.set()

    async def restore(gateway: GatewayServer) -> None:
        """Apply the changes that were made while an earlier process was this worker."""
        for change, name in spec["replicas"]:
            try:
                if change == "add":
                    await gateway.add_replica(name)
                else:
                    await gateway.remove_replica(name, 0)
            except BridleError as error:
                structlog.get_logger().warning("replica_not_restored", name=name, error=str(error))
        await gateway.set_policy(SetPolicy.model_validate(spec["policy"]))

    loop.add_reader(sys.stdin.fileno(), stdin_closed)
    data = Path(spec["gateway"]["data_dir"])
    async with open_gateway(
        worker_config(spec),
        data,
        fsync=spec["fsync"],
        sockets=sockets,
        prepare=restore,
        patience_s=KILLED_S,  # workers of a killed supervisor may still be stopping
    ):
        print_json_line({"ready": True})
        with long_running():
            await stop.wait()


def run_worker() -> int:
    """Run a worker process of the gateway; return its exit code."""
    log_to_stderr()
    sockets = [socket(fileno=int(number)) for number in sys.argv[1:]]
    spec = orjson.loads(sys.stdin.buffer.readline())
    try:
        uvloop.run(_serve_worker(spec, sockets))
    except BridleError as error:
        print_json_line({"error": str(error), "kind": type(error).__name__})
        return 1
    return 0


def engine(
    spec: Annotated[str, typer.Argument(help="scripted:FILE or embedded:DIR.")],
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer folder or 'builtin'.")] = None,
    json: JsonOption = False,
) -> None:
    """Serve an engine over HTTP until Ctrl-C."""
    run_until_signal(lambda stop: _serve_engine(spec, port, host, tokenizer, json, stop))


async def _serve_engine(
    spec: str, port: int, host: str, tokenizer: str | None, as_json: bool, stop: Stop
) -> None:
    served = open_engine(spec, tokenizer=tokenizer)
    async with EngineServer(served, tokenizer=tokenizer, host=host, port=port) as server:
        if as_json:
            print_json_line({"url": server.url, "model": server.info.model})
        notes.print(f"engine {server.info.model} at {server.url}; Ctrl-C ends it")
        await stop.wait()


if __name__ == "__main__":
    sys.exit(run_worker())
