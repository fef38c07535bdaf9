"""Wake-ups for waiting tasks, and the event stream of `GET /events`.

A subscriber that reads too slowly loses its oldest events and gets their number; it delays nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from bridle.types import JSON

BACKLOG = 1000
"""Unread events that are kept for one subscriber."""


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
        try:
            async with asyncio.timeout(timeout_s):
                await ticket.wait()
        except TimeoutError:
            return


class EventSubscriber:
    """The queue of one reader of the event stream."""

    def __init__(self, owner: str | None) -> None:
        self.owner = owner
        """Only events of this owner's tasks; `None` = of all."""
        self._events: deque[JSON] = deque()
        self._lost = 0
        self._ready = asyncio.Event()

    def push(self, event: JSON) -> None:
        """Queue an event; a full queue drops its oldest one."""
        if len(self._events) == BACKLOG:
            self._events.popleft()
            self._lost += 1
        self._events.append(event)
        self._ready.set()

    async def next(self, timeout_s: float) -> JSON | None:
        """Return the next event, or `None` after `timeout_s` without one.

        Before it comes `{"type": "lost", "count": n}` if events were dropped.
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


class EventBus:
    """Publishes events to all subscribers."""

    def __init__(self) -> None:
        self.subscribers: set[EventSubscriber] = set()

    def publish(self, event: JSON, *, owner: str | None = None, key: str | None = None) -> None:
        """Send an event to the subscribers of `owner` and to those of all owners.

        The latter get `owner` too, and the task's `key` as `task_id`, because two owners may use
        the same id. `None` = the event is for every subscriber.
        """
        for subscriber in self.subscribers:
            if owner is None or subscriber.owner == owner:
                subscriber.push(event)
            elif subscriber.owner is None:
                subscriber.push(event | {"owner": owner, "task_id": key})

    @contextmanager
    def subscribe(self, owner: str | None = None) -> Iterator[EventSubscriber]:
        """Subscribe inside to the events of `owner`; `None` = of all owners."""
        subscriber = EventSubscriber(owner)
        self.subscribers.add(subscriber)
        try:
            yield subscriber
        finally:
            self.subscribers.discard(subscriber)
