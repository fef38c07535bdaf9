"""The store contract: writing and reading of capture records.

`commit` returns when `kill -9` of this process cannot lose the exchange; only then does the gateway
send the last event of a reply (law 4). `bridle.capture.sqlite.SqliteStore` implements it and passes
`tests/conformance/stores.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from bridle.capture.records import (
    Delivery,
    Exchange,
    Outcome,
    Score,
    SessionCapture,
    SessionRecord,
)
from bridle.errors import StoreError


class Store(Protocol):
    """Append-only records of many sessions. All failures are `StoreError`."""

    async def open_session(self, session: SessionRecord) -> None:
        """Record a session; a second one of the same id is an error."""

    async def commit(self, exchange: Exchange, bodies: Mapping[bytes, bytes]) -> None:
        """Record an exchange and the message, tool and media `bodies` that are new to its session.

        `bodies` maps 16-byte content digests to raw bytes; known ones are ignored.
        """

    def commit_now(
        self, exchange: Exchange, bodies: Mapping[bytes, bytes]
    ) -> asyncio.Future[None] | None:
        """Record as `commit` does; `None` = it is durable, else it is when the future is done."""

    async def deliver(self, delivery: Delivery) -> None:
        """Record the state of a reply; readers in this process see it at once."""

    def deliver_soon(self, delivery: Delivery, failed: Callable[[StoreError], object]) -> None:
        """Record as `deliver` does, without a wait; `failed` gets the error of a failure."""

    async def close_session(self, outcome: Outcome) -> None:
        """Record the end of a session; a second outcome of the same session is an error."""

    async def score(self, score: Score) -> None:
        """Record a reward that is given later; outcomes read from then on have it."""

    async def forget(self, session_id: str) -> None:
        """Remove all records of a session; an unknown one is ignored."""

    async def written(self) -> None:
        """Return when all earlier records were written, or failed; never raises."""

    async def flush(self) -> None:
        """Return when all earlier records are durable."""

    async def check(self) -> None:
        """Raise the `StoreError` that a small record would meet now."""

    async def aclose(self) -> None:
        """Flush and release; idempotent."""

    # Reading: synchronous, from any thread, sees all that was given before in this process.

    def sessions(self) -> Sequence[SessionRecord]:
        """Return all sessions in the order they were opened."""

    def exchanges(self, session_id: str) -> Sequence[Exchange]:
        """Return a session's exchanges in commit order; empty if it is unknown."""

    def deliveries(self, session_id: str) -> Mapping[str, Delivery]:
        """Return the last delivery record per exchange id."""

    def bodies(self, session_id: str) -> Mapping[bytes, bytes]:
        """Return all content-addressed bodies of a session."""

    def outcome(self, session_id: str) -> Outcome | None:
        """Return the session's outcome; `None` = it still runs, or was killed."""

    def read(self, session_id: str) -> SessionCapture:
        """Return everything of one session. Raises `StoreError` if it was never opened."""

    def size(self) -> int:
        """Return the bytes that the records take, without freed space."""
