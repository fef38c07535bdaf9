"""A gateway's worker process: `Worker` starts it, restarts it when it dies, and stops it.

The process inherits its listening sockets, reads its settings from standard input as one line of
JSON and reports on standard output that it serves, or why it cannot. It stops when its standard
input is closed, which also happens when the supervisor is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Final

import orjson
import structlog

from bridle.aio import run_shielded
from bridle.errors import BridleError, ConfigError, EngineError, RenderError, StoreError
from bridle.types import JSON

log = structlog.get_logger()

START_ERRORS: Final[dict[str, type[BridleError]]] = {
    kind.__name__: kind for kind in (ConfigError, EngineError, RenderError, StoreError)
}
"""Errors that a worker reports by name when it cannot start; others become `BridleError`."""

SPAWN_S: Final = 30.0
"""Time limit for creating a process."""

END_S: Final = 20.0
"""Time that a worker gets to stop before it is killed."""

BACKOFF_S: Final = 0.1
"""Wait after the first failed restart; doubles up to `MAX_BACKOFF_S`."""

MAX_BACKOFF_S: Final = 30.0


class Worker:
    """A worker process and the sessions it serves."""

    def __init__(
        self,
        name: str,
        *,
        command: Sequence[str],
        spec: Callable[[], JSON],
        sockets: Sequence[socket.socket],
    ) -> None:
        """Nothing is started. `spec` is asked for what the process reads, at every start."""
        self.name = name
        self.sockets = sockets
        """Listening sockets that the process inherits; the caller closes them."""
        self.ready = asyncio.Event()
        """Set while the process serves."""
        self.live: set[str] = set()
        """Ids of its sessions that have not ended."""
        self.restarts = 0
        self.pid: int | None = None
        """Id of the newest process; `None` before the first start."""
        self._command = command
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process and return when it serves.

        Raises the `BridleError` that the process reports if it cannot start.
        """
        try:
            # Shielded, so that a cancellation leaves no unknown process behind.
            process = await run_shielded(self._spawn(), timeout_s=SPAWN_S)
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(ConnectionError):
                process.stdin.write(orjson.dumps(self._spec()) + b"\n")
                await process.stdin.drain()
            line = await process.stdout.readline()
            if not line:
                raise BridleError(f"{self.name} ended before it served")
            if "error" in (said := orjson.loads(line)):
                raise START_ERRORS.get(said["kind"], BridleError)(said["error"])
        except BaseException:
            await self.stop()
            raise
        self.ready.set()

    async def _spawn(self) -> asyncio.subprocess.Process:
        numbers = [one.fileno() for one in self.sockets]
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            *map(str, numbers),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=numbers,
            start_new_session=True,  # Ctrl-C reaches the supervisor only
        )
        self.pid = self._process.pid
        return self._process

    async def keep_running(self) -> None:
        """Restart the process whenever it ends, until cancelled."""
        failures = 0
        while True:
            if self._process is not None:
                code = await self._process.wait()
                self.ready.clear()
                log.warning("worker_died", worker=self.name, code=code)
            if failures:
                await asyncio.sleep(min(BACKOFF_S * 2 ** (failures - 1), MAX_BACKOFF_S))
            self.restarts += 1
            try:
                await self.start()
                failures = 0
            except (BridleError, OSError) as error:
                failures = min(failures + 1, 10)
                log.error("worker_did_not_start", worker=self.name, error=str(error))  # noqa: TRY400 - the text says all

    async def stop(self) -> None:
        """Ask the process to stop, and kill it if it has not after `END_S`; idempotent.

        `keep_running` is to be cancelled before.
        """
        self.ready.clear()
        await run_shielded(self._end(), timeout_s=2 * END_S)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            log.warning("worker_killed", worker=self.name)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
