"""Structured-concurrency helpers: the one file that may create bare asyncio tasks.

Everything else starts tasks in an `asyncio.TaskGroup` whose `async with` is visible. What cannot
(a call that must outlive the request that began it) is owned by a `Nursery`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, Self, TypeVar

T = TypeVar("T")


async def run_shielded(
    work: Coroutine[Any, Any, T],
    *,
    timeout_s: float | None,
    on_cancel: Callable[[], None] = lambda: None,
) -> T:
    """Run `work` to its end even if the caller is cancelled, for at most `timeout_s`.

    A cancellation that arrives meanwhile calls `on_cancel` and is raised again afterwards.
    Raises `TimeoutError` when the work did not end in time (it is cancelled then).
    """

    async def bounded() -> T:
        async with asyncio.timeout(timeout_s):
            return await work

    task = asyncio.ensure_future(bounded())
    cancelled: asyncio.CancelledError | None = None
    try:
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                if not task.cancelled():  # else the error may be the task's own, raised below
                    cancelled = error
                    on_cancel()
            except BaseException:  # noqa: BLE001 - raised below, from task.result()
                break
        if cancelled is not None:
            task.exception() if not task.cancelled() else None
            raise cancelled
        return task.result()
    finally:
        # The traceback of the error that leaves has this frame, and all frames above it.
        del task, cancelled


class Nursery:
    """Owns tasks that outlive the call that starts them; leaving it cancels and awaits them all.

    `on_error` is called with a task's exception (not with its cancellation).
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self.on_error = on_error
        self._tasks: set[asyncio.Future[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cancel()

    def start(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Start `work` as a task, to which the nursery keeps a reference until it ends."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.own(task)
        return task

    def own(self, task: asyncio.Future[Any]) -> None:
        """Keep a reference to a task or future, and cancel it when the nursery ends."""
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_error(error)

    async def ended(self) -> None:
        """Wait until all of the nursery's tasks have ended."""
        while tasks := list(self._tasks):
            await asyncio.wait(tasks)

    async def cancel(self) -> None:
        """Cancel the nursery's tasks that still run and wait until all have ended."""
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


class Stacked:
    """A context manager that closes what is on its stack when it is left, the last first."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


class Checkup:
    """A check that runs at most every `every_s` seconds, whoever asks; its error is remembered."""

    def __init__(self, check: Callable[[], Awaitable[None]], *, every_s: float = 1.0) -> None:
        self._check = check
        self._every_s = every_s
        self._lock = asyncio.Lock()
        self._due = float("-inf")
        self._error: Exception | None = None

    async def __call__(self) -> None:
        """Run the check if it is due; raise what the last one raised."""
        async with self._lock:
            if time.monotonic() >= self._due:
                self._error = None
                try:
                    await self._check()
                except Exception as error:  # noqa: BLE001 - raised to everyone who asks
                    self._error = error
                self._due = time.monotonic() + self._every_s
        if self._error is not None:
            raise self._error.with_traceback(None)


class LoopClock:
    """Seconds in which the event loop ran, for judging the silence of others by.

    While the loop stands still (it computes, the machine swaps) no message arrives. Such a pause
    counts as at most `most_s`. `run` has to run for as long as the clock is read.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._counted_s = 0.0
        self._last = time.monotonic()

    def __call__(self) -> float:
        """Return the seconds counted since the clock was made."""
        return self._counted_s + min(time.monotonic() - self._last, self._most_s)

    async def run(self) -> None:
        """Count the time in which the event loop runs, until cancelled."""
        while True:
            self._counted_s, self._last = self(), time.monotonic()
            await asyncio.sleep(self._most_s / 5)


class Turnstile:
    """Lets so many through per round of the event loop, in the order in which they came.

    Where many come in one moment, each with work to do, a loop would take them all one step further
    before it looks at the network again: the first would be answered when the last is. Behind a
    turnstile a few continue while the others wait, and what arrives for those few is seen to in
    between. Who comes when nobody waits and the round has room goes through at once.
    """

    def __init__(self, per_round: int) -> None:
        self._per_round = per_round
        self._free = per_round
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def enter(self) -> None:
        """Wait in a queue of callers, and return when it is the caller's turn."""
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn, loop)
        if self._free and not self._waiting:
            self._free -= 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin a new round: as many as it takes go through."""
        self._free = self._per_round
        while self._free and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its client has gone
                turn.set_result(None)
                self._free -= 1
        self._turning = self._free < self._per_round
        if self._turning:
            loop.call_soon(self._turn, loop)


async def retry(
    attempt: Callable[[], Awaitable[T]],
    *,
    attempts: int,
    backoff_s: float,
    retry_on: tuple[type[BaseException], ...],
) -> T:
    """Await `attempt()` up to `attempts` times, waiting `backoff_s * 2**k` between tries.

    The last failure is raised as it is; anything not in `retry_on` is raised at once.
    """
    for k in range(attempts):
        try:
            return await attempt()
        except retry_on:
            if k == attempts - 1:
                raise
            await asyncio.sleep(backoff_s * 2**k)
    raise ValueError(f"attempts must be at least 1, not {attempts}")


class Condition:
    """A broadcast that wakes every waiter, which then checks its condition again.

    A waiter takes a `ticket` before it checks, so that it misses no notification.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify_all(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """Return the event that the next notification sets."""
        return self._event

    @staticmethod
    async def wait(ticket: asyncio.Event, timeout_s: float | None) -> None:
        """Return once `ticket` is notified, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await ticket.wait()
