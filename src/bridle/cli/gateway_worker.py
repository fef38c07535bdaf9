"""One worker of `bridle gateway --workers N`: `python -m bridle.cli.gateway_worker CHANNEL`.

Reads what it is to be from standard input, writes where it listens, takes connections from the
channel (a file descriptor), and ends when the channel does. Not for people.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import uvloop

from bridle.cli.config import FileConfig
from bridle.cli.output import log_to_stderr
from bridle.cli.serving import long_running
from bridle.errors import BridleError

if TYPE_CHECKING:
    from bridle.gateway.front import Front

MODULE = "bridle.cli.gateway_worker"


def told(config: FileConfig, data: Path, front: Front, *, fsync: bool) -> bytes:
    """What a worker of `front` reads: it serves `config` and captures in `data`."""
    whole = config.model_dump(mode="json", exclude_unset=True)
    whole["gateway"] = {
        **whole.get("gateway", {}),
        "host": "127.0.0.1",
        "port": 0,
        "control_port": None,
        "public_url": front.url,
        "control_token": front.control_token,
        "data_dir": str(data),
    }
    data.mkdir(parents=True, exist_ok=True)
    spec = {"config": whole, "data": str(data), "fsync": fsync, "front": front.own_url}
    return orjson.dumps(spec)


async def serve(spec: dict[str, Any], channel: socket.socket) -> None:
    """Serve until the channel ends. `BridleError` says why it cannot."""
    from bridle.aio import Nursery
    from bridle.capture.sqlite import SqliteStore
    from bridle.cli.parts import open_all
    from bridle.gateway.app import Gateway
    from bridle.gateway.forward import Forwarder
    from bridle.gateway.front import CAPTURE
    from bridle.gateway.handover import Taker

    config = FileConfig.model_validate(spec["config"])
    parts = open_all(config)
    ended = asyncio.Event()
    fsync = "group" if spec["fsync"] else "off"
    async with (
        Nursery(_log_lost) as nursery,
        Forwarder(keep=False) as again,
        await SqliteStore.open(Path(spec["data"], CAPTURE), fsync=fsync) as store,  # type: ignore[arg-type]
        Gateway(
            engine=parts.engine,
            renderer=parts.renderer,
            store=store,
            settings=config.gateway,
            models=parts.models,
            elsewhere=lambda http: again.forward(http, spec["front"]),
        ) as gateway,
    ):

        def taken(connection: socket.socket) -> None:
            nursery.start(gateway.adopt(connection), name="adopt")

        taker = Taker(channel, taken, ended.set)
        _say({"url": gateway.control_url})
        with long_running():
            await ended.wait()
        taker.close()


def _say(said: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(said).decode() + "\n")
    sys.stdout.flush()


def _log_lost(error: BaseException) -> None:
    import structlog

    structlog.get_logger().error("worker_task_failed", error=f"{type(error).__name__}: {error}")


def main() -> int:
    """Be a worker; returns the exit code."""
    log_to_stderr()
    channel = socket.socket(fileno=int(sys.argv[1]))
    spec = orjson.loads(sys.stdin.buffer.read())
    try:
        uvloop.run(serve(spec, channel))
    except BridleError as error:
        _say({"error": str(error), "kind": type(error).__name__})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
