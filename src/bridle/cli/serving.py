"""Runs something that serves until a signal asks it to end, in a process made ready for it."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import asyncio

Stop: TypeAlias = "asyncio.Event"
"""Set at the first SIGINT or SIGTERM; a second one ends the process at once."""


_THRESHOLDS = (50_000, 20, 100)
"""Allocations before the youngest objects are looked through, and how often older ones are."""

OPEN_FILES = 65_536
"""Files and connections that the process may have open, where the system lets it: a model call
holds two, and 1024, the usual number, would be the end of 500 calls at once."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's numbers for `mallopt` (malloc.h)."""


@contextmanager
def long_running() -> Iterator[None]:
    """Meanwhile the process keeps memory that it will need again, looks for garbage less often, and
    may have `OPEN_FILES` open.

    To be entered when all is loaded. Calls make and drop buffers of their prompt's size; given back
    to the system and taken again each time, they and the collector's passes over what never goes
    take an eighth of a call's time (`benchmarks/gateway.py`, 32 sessions at 16k tokens).
    """
    import ctypes

    before = gc.get_threshold()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (enough(*files), files[1]))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc; elsewhere the allocator does as it does
        mallopt(_TRIM_THRESHOLD, 256 << 20)
        mallopt(_MMAP_THRESHOLD, 32 << 20)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        gc.set_threshold(*before)
        gc.unfreeze()


def enough(soft: int, hard: int) -> int:
    """The soft limit of open files to have, under what the system set."""
    if resource.RLIM_INFINITY in (soft, hard):
        return soft if soft == resource.RLIM_INFINITY else max(soft, OPEN_FILES)
    return max(soft, min(hard, OPEN_FILES))


def run_until_signal(
    serve: Callable[[Stop], Awaitable[None]], *, end_s: float | None = None
) -> None:
    """Run `serve(stop)` on a fresh event loop; `stop` is set when the process is asked to end.

    What `serve` opened it closes after `stop`. Its errors escape as they are. A process that has
    not ended `end_s` after `stop` is ended with status 1, whatever it does; `None` = it is waited
    for.
    """
    import asyncio

    import uvloop

    def overdue() -> None:
        sys.stderr.write(f"not closed within {end_s:g} s of the signal; ending\n")
        sys.stderr.flush()
        os._exit(1)

    async def guarded() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def asked() -> None:
            stop.set()
            if end_s is not None:
                timer = threading.Timer(end_s, overdue)
                timer.daemon = True
                timer.start()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, asked)
        await serve(stop)

    uvloop.run(guarded())
