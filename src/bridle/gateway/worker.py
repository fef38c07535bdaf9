"""A gateway in a process of its own, kept alive: started, asked to end, started again when it died.

The process is told what to be on its standard input, and tells where it listens (or why it cannot
start) in one line of JSON. It ends when its channel does, so also when its parent was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import orjson
import structlog

from bridle.aio import run_shielded
from bridle.errors import BridleError, ConfigError, EngineError, RenderError, StoreError
from bridle.gateway.handover import Giver

log = structlog.get_logger()

ERRORS: Final[dict[str, type[BridleError]]] = {
    kind.__name__: kind for kind in (ConfigError, EngineError, RenderError, StoreError)
}
"""What a process may say that it cannot start for; anything else is a `BridleError`."""

SPAWN_S: Final = 30.0
"""How long the system may take to begin a process."""

END_S: Final = 20.0
"""How long a process may take to end when it is asked to."""

BACKOFF_S: Final = 0.1
"""Wait before one that did not come up is started once more; doubles."""

MAX_BACKOFF_S: Final = 30.0

READY_S: Final = 30.0
"""How long a request waits for a worker that is being started again."""


class Worker:
    """One process of a gateway. `restarts` counts how often it was started again."""

    def __init__(self, name: str, command: Sequence[str], told: bytes) -> None:
        """Nothing is started; `told` is what the process reads."""
        self.name = name
        self.giver = Giver()
        self.url = ""
        """Where it listens for its parent; known when it is ready."""
        self.restarts = 0
        self._command = command
        self._told = told
        self._process: asyncio.subprocess.Process | None = None
        self._ready = asyncio.Event()
        self._ending = False

    @property
    def ready(self) -> bool:
        """Whether it serves."""
        return self._ready.is_set()

    @property
    def pid(self) -> int | None:
        """Of its process; `None` = there is none."""
        return None if self._process is None else self._process.pid

    async def wait_until_ready(self) -> None:
        """Return when it serves. `TimeoutError` if it does not come up soon."""
        async with asyncio.timeout(READY_S):
            await self._ready.wait()

    async def start(self, prepare: Callable[[Worker], Awaitable[None]] | None = None) -> None:
        """Start the process; returns when it serves. `BridleError` is its own account.

        `prepare` is done when it can be asked, before it gets connections.
        """
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with its:  # shielded, so that no process is begun and not known
                process = await run_shielded(self._spawned(its.fileno()), timeout_s=SPAWN_S)
            self.url = await self._introduced(process)
            if prepare is not None:
                await prepare(self)
        except BaseException:
            ours.close()
            await self._end()
            raise
        self.giver.connect(ours)
        self._ready.set()

    async def _spawned(self, channel: int) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            str(channel),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[channel],
            start_new_session=True,  # a Ctrl-C is its parent's affair
        )
        return self._process

    async def _introduced(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(self._told)
            await process.stdin.drain()
            process.stdin.close()
        line = await process.stdout.readline()
        if not line:
            raise BridleError(f"{self.name} ended before it served")
        said = orjson.loads(line)
        if "error" in said:
            raise ERRORS.get(said["kind"], BridleError)(said["error"])
        return str(said["url"])

    async def keep(self, prepare: Callable[[Worker], Awaitable[None]]) -> None:
        """Start the process again whenever it ends, until `stop`."""
        failed = 0
        while not self._ending:
            process = self._process
            if process is not None:
                code = await process.wait()
                self._ready.clear()
                self.giver.disconnect()
                if self._ending:
                    return
                log.warning("worker_died", worker=self.name, code=code)
            if failed:
                await asyncio.sleep(min(BACKOFF_S * 2 ** (failed - 1), MAX_BACKOFF_S))
            self.restarts += 1
            try:
                await self.start(prepare)
                failed = 0
            except (BridleError, OSError) as error:
                failed = min(failed + 1, 10)
                log.error("worker_did_not_start", worker=self.name, error=str(error))  # noqa: TRY400 - the text says all

    async def stop(self) -> None:
        """Ask the process to end and wait for it; idempotent."""
        self._ending = True
        self._ready.clear()
        self.giver.close()
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            log.warning("worker_killed", worker=self.name)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
