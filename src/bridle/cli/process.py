"""A process that works or serves until a signal: signal handling, memory and file limits."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import uvloop

Stop: TypeAlias = "asyncio.Event"
"""Event that is set by the first SIGINT, SIGTERM or SIGHUP; a second one kills the process."""

T = TypeVar("T")


_THRESHOLDS = (50_000, 20, 100)
"""Thresholds of the garbage collector (`gc.set_threshold`)."""

OPEN_FILES = 65_536
"""Limit of open files and connections, if the system allows it: a model call holds two, so that the
usual limit of 1024 would allow 500 concurrent calls."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's numbers for `mallopt` (malloc.h)."""


@contextmanager
def long_running() -> Iterator[None]:
    """Tune the process for serving: keep freed memory, collect garbage rarely, allow `OPEN_FILES`.

    To be entered when everything is loaded. Each call allocates and frees buffers of its prompt's
    size. Returning them to the system, and collecting garbage among permanent objects, takes an
    eighth of a call's time (`benchmarks/gateway.py`, 32 sessions at 16k tokens).
    """
    before = gc.get_threshold()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files_limit(*files), files[1]))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc only
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


def open_files_limit(soft: int, hard: int) -> int:
    """Return the soft limit of open files to set, given the current limits."""
    if resource.RLIM_INFINITY in (soft, hard):
        return soft if soft == resource.RLIM_INFINITY else max(soft, OPEN_FILES)
    return max(soft, min(hard, OPEN_FILES))


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop; the first SIGTERM or SIGHUP ends it as Ctrl-C does.

    It is cancelled, and `KeyboardInterrupt` is raised when it has closed its resources. A second
    signal kills the process.
    """
    ended: list[bool] = []

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None
        _at_first((signal.SIGTERM, signal.SIGHUP), lambda: ended.append(task.cancel()))
        return await work

    try:
        return uvloop.run(guarded())
    except asyncio.CancelledError:
        if not ended:
            raise
        raise KeyboardInterrupt from None


def run_until_signal(
    serve: Callable[[Stop], Awaitable[None]], *, end_s: float | None = None
) -> None:
    """Run `serve(stop)` on a new event loop; the first SIGINT, SIGTERM or SIGHUP sets `stop`.

    `serve` closes its resources after `stop`; its errors escape. If it has not returned `end_s`
    after the signal, the process exits with status 1; `None` = no limit.
    """

    def overdue() -> None:
        sys.stderr.write(f"not closed within {end_s:g} s of the signal; ending\n")
        sys.stderr.flush()
        os._exit(1)

    async def guarded() -> None:
        stop = asyncio.Event()

        def asked() -> None:
            stop.set()
            if end_s is not None:
                timer = threading.Timer(end_s, overdue)
                timer.daemon = True
                timer.start()

        _at_first((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), asked)
        await serve(stop)

    uvloop.run(guarded())


def _at_first(numbers: Sequence[signal.Signals], act: Callable[[], object]) -> None:
    """Call `act` at the first of these signals; a second one kills the process.

    At SIGHUP the terminal has closed: what is still written to it goes to /dev/null. An ignored
    SIGHUP (`nohup`) stays ignored.
    """
    loop = asyncio.get_running_loop()
    terminal = [one.fileno() for one in (sys.stdout, sys.stderr) if one.isatty()]
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    handled = [one for one in numbers if one not in ignored]

    def arrived(number: signal.Signals) -> None:
        for one in handled:
            loop.remove_signal_handler(one)
        if number is signal.SIGHUP:
            for fileno in terminal:
                os.dup2(os.open(os.devnull, os.O_WRONLY), fileno)
        act()

    for one in handled:
        loop.add_signal_handler(one, arrived, one)
