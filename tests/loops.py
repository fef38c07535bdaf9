"""An event loop of tests whose clock jumps."""

import asyncio
import selectors
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can jump to the next timer in place of waiting for it.

    Within `jumping` hours of waiting take as long as the work between them, and every run sees the
    same times. What would run in a thread runs at once, on the loop. Only for code that waits for
    timers alone: time would jump past the answer of another process or machine.

        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(simulation())
    """

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Seconds; stands still while code runs within `jumping`."""
        return self._jumps.now if self._jumps.on else super().time() + self._jumps.ahead

    @contextmanager
    def jumping(self) -> Iterator[None]:
        """Jump from timer to timer inside."""
        jumps, began = self._jumps, self.time()
        self.set_default_executor(_AtOnce())
        jumps.now, jumps.on = began, True
        try:
            yield
        finally:
            jumps.ahead += jumps.now - self._real()
            jumps.on = False

    def _real(self) -> float:
        return super().time() + self._jumps.ahead


class _Jumps(selectors.DefaultSelector):
    """Takes note of how long it would have waited, and does not wait."""

    on = False
    now = 0.0
    ahead = 0.0
    """How far the loop's clock is before the machine's, seconds."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self.on or timeout is None:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.now += max(timeout, 0)
        return ready


class _AtOnce(ThreadPoolExecutor):
    """Does what it is given before `submit` returns; starts no thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            done.set_exception(error)
        return done
