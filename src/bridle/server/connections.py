"""Client connections of the server: half a request is ended, and keeps nobody out.

The limits are those of `bridle.gateway.listener`, here on uvicorn.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from bridle.gateway.listener import most_connections

HEAD_S: Final = 20.0
"""Seconds from the first byte of a request, or from the connection, to the end of its head."""


class Connection(H11Protocol):
    """One client connection with a deadline for each request's head."""

    most: ClassVar[int | None] = None
    """Connections at a time; `None` = `most_connections()`."""
    head_s: ClassVar[float] = HEAD_S

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - uvicorn's own, passed through
        super().__init__(*args, **settings)
        self._deadline: asyncio.TimerHandle | None = None
        self.made_at = self.loop.time()

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        # `None` before the first request, whatever its type says.
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """Make room, then take the client in; it has the time of a head to send one."""
        if len(self.connections) >= (self.most or most_connections()):
            self._make_room()
        super().connection_made(transport)
        self._watch()

    def _make_room(self) -> None:
        """Close an eighth of those that wait: who never sent a whole head, then the oldest."""
        held = [one for one in self.connections if isinstance(one, Connection)]
        waiting = [one for one in held if one.is_waiting]
        waiting.sort(key=lambda one: (one.cycle is not None, one.made_at))
        for one in waiting[: 1 + len(waiting) // 8]:
            one.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Time the head that these bytes may begin, and stop at its end."""
        if self.is_waiting:
            self._watch()
        super().data_received(data)
        if not self.is_waiting:
            self._unwatch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_s, self.transport.abort)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
