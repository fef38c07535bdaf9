"""Notification of waiting callers and of readers of the event stream.

A reader that is slow loses its oldest events and is told how many; nobody else waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from bridle.types import JSON

BACKLOG = 1000
"""Events that one slow reader may be behind."""


class Pulse:
    """Something happened: everyone who waits goes on, and looks for himself."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """The next beat; to be taken before one looks, so that none is missed."""
        return self._event

    @staticmethod
    async def after(ticket: asyncio.Event, timeout_s: float | None) -> None:
        """Return when the beat of `ticket` came, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await ticket.wait()
        except TimeoutError:
            return


class Reader:
    """One reader's events."""

    def __init__(self, owner: str | None) -> None:
        self.owner = owner
        """Whose events it gets; `None` = everybody's."""
        self._events: deque[JSON] = deque()
        self._lost = 0
        self._ready = asyncio.Event()

    def give(self, event: JSON) -> None:
        """Keep an event; drops the oldest one if there are too many."""
        if len(self._events) == BACKLOG:
            self._events.popleft()
            self._lost += 1
        self._events.append(event)
        self._ready.set()

    async def next(self, timeout_s: float) -> JSON | None:
        """The next event; `{"type": "lost", "count": n}` where some were dropped before it; `None`
        after `timeout_s` without one.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return None
        if self._lost:
            lost, self._lost = self._lost, 0
            return {"type": "lost", "count": lost}
        event = self._events.popleft()
        if not self._events:
            self._ready.clear()
        return event


class Broadcast:
    """Events to all readers."""

    def __init__(self) -> None:
        self._readers: set[Reader] = set()

    def tell(self, event: JSON, *, owner: str | None = None, key: str | None = None) -> None:
        """Give an event to the readers of its `owner` and to those of all owners.

        The latter get it with `owner`, and under the task's `key`, as ids of different owners may
        be equal. `None` = an event for every reader.
        """
        for reader in self._readers:
            if owner is None or reader.owner == owner:
                reader.give(event)
            elif reader.owner is None:
                reader.give(event | {"owner": owner, "task_id": key})

    @contextmanager
    def reading(self, owner: str | None = None) -> Iterator[Reader]:
        """A reader of the events of `owner`, `None` = of all, that are told inside."""
        reader = Reader(owner)
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)
