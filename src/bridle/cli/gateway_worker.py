"""A worker of `bridle gateway --workers N`: `python -m bridle.cli.gateway_worker DATA CONTROL`.

The arguments are the file descriptors of its listening sockets. Its settings come as one line of
JSON on standard input (`Supervisor._spec_of`); it stops when that is closed. Started by the
supervisor only.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

import orjson
import uvloop

from bridle.cli.config import FileConfig
from bridle.cli.gateway import opened
from bridle.cli.output import log_to_stderr
from bridle.cli.serving import long_running
from bridle.errors import BridleError
from bridle.gateway.worker import END_S
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.gateway.app import Gateway


def config_of(spec: JSON) -> FileConfig:
    """Read the configuration of a worker: that of the whole gateway, with its own settings."""
    config = spec["config"]
    gateway = {**config.get("gateway", {}), **spec["gateway"]}
    return FileConfig.model_validate({**config, "gateway": gateway})


async def serve(spec: JSON, sockets: list[socket]) -> None:
    """Serve until standard input is closed. `BridleError` if that is not possible."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def stdin_closed() -> None:
        loop.remove_reader(sys.stdin.fileno())
        stop.set()

    async def steer(gateway: Gateway) -> None:
        """Catch up with what was set while another process was this worker."""
        import structlog

        from bridle.gateway.weights import SetPolicy

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
    async with opened(
        config_of(spec),
        data,
        fsync=spec["fsync"],
        sockets=sockets,
        prepare=steer,
        patience_s=END_S,  # workers of a supervisor that was killed are still ending
    ):
        _say({"ready": True})
        with long_running():
            await stop.wait()


def _say(said: JSON) -> None:
    sys.stdout.write(orjson.dumps(said).decode() + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run a worker; return its exit code."""
    log_to_stderr()
    sockets = [socket(fileno=int(number)) for number in sys.argv[1:]]
    spec = orjson.loads(sys.stdin.buffer.readline())
    try:
        uvloop.run(serve(spec, sockets))
    except BridleError as error:
        _say({"error": str(error), "kind": type(error).__name__})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
