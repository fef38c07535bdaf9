"""Runs something that serves until a signal asks it to end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

import uvloop

Stop = asyncio.Event
"""Set at the first SIGINT or SIGTERM; a second one ends the process at once."""


def run_until_signal(serve: Callable[[Stop], Awaitable[None]]) -> None:
    """Run `serve(stop)` on a fresh event loop; `stop` is set when the process is asked to end.

    What `serve` opened it closes after `stop`. Its errors escape as they are.
    """

    async def guarded() -> None:
        stop = Stop()
        loop = asyncio.get_running_loop()

        def asked() -> None:
            stop.set()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, asked)
        await serve(stop)

    uvloop.run(guarded())
