"""Job queue of the writer's thread.

Callers on any loop and in any thread put jobs in; whoever writes takes what was left for later
along. A job that is queued comes after all that was left or queued before it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bridle.errors import StoreError


class Written(Enum):
    """Outcome of a caller's attempt to write a record itself."""

    HERE = "here"
    SOON = "soon"
    """The thread has something to write before it; then its caller can."""
    BY_THREAD = "by the thread"
    """It is to be queued."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Something to write and who waits for it."""

    work: Callable[[Any], None]
    """Called with the writer, inside a transaction."""
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]

    def finish(
        self, error: StoreError | None, here: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """Tell the waiting caller, whose loop may be gone; `here` is the loop of this thread."""

        def tell() -> None:
            if self.done.done():
                return
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)

        if self.loop is here:
            tell()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(tell)


class Jobs:
    """The jobs of one writer."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Job | threading.Event | None] = queue.SimpleQueue()
        self._left: deque[Job] = deque()
        self._counting = threading.Lock()
        self._given = 0
        self.finished = 0
        """Queued jobs that were done; counted by the writer's thread."""

    @property
    def busy(self) -> bool:
        """Return whether the thread has unfinished jobs."""
        return self._given != self.finished

    def is_left(self, job: Job) -> bool:
        """Return whether `job` is deferred and not yet taken."""
        return job in self._left

    @property
    def empty(self) -> bool:
        return self._queue.empty()

    def give(self, *jobs: Job) -> None:
        """Queue what was left for later, then `jobs`."""
        with self._counting:
            for job in (*self.take_left(), *jobs):
                self._given += 1
                self._queue.put(job)

    def put(self, event: threading.Event | None) -> None:
        """Queue what was left for later, then a mark: to be set, or (`None`) to end the thread."""
        self.give()
        self._queue.put(event)

    def get(self) -> Job | threading.Event | None:
        """Wait for the next in the queue."""
        return self._queue.get()

    def leave(self, job: Job) -> bool:
        """Leave a job for the next transaction; whether it is the first."""
        self._left.append(job)
        return len(self._left) == 1

    def take_left(self) -> list[Job]:
        """All that was left for later; it is the caller's now."""
        jobs: list[Job] = []
        if not self._left:
            return jobs
        with suppress(IndexError):  # another thread may take some
            while True:
                jobs.append(self._left.popleft())
        return jobs
