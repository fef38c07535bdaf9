"""The store contract: where the facts of capture go, and how they are read back.

`commit` returns when the exchange is where `kill -9` of this process cannot take it; the gateway
lets the last event of a reply go only then (law 4). Implementations: `MemoryStore` (here) and
`bridle.capture.sqlite.SqliteStore`; both pass `tests/conformance/stores.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from bridle.capture.records import Delivery, Exchange, Outcome, SessionRecord


class Store(Protocol):
    """Append-only facts of many sessions. All failures are `StoreError`."""

    async def open_session(self, session: SessionRecord) -> None:
        """Record a session; a second one of the same id is an error."""

    async def commit(self, exchange: Exchange, bodies: Mapping[bytes, bytes]) -> None:
        """Record an exchange and the message, tool and media `bodies` that are new to its session.

        `bodies` maps 16-byte content digests to raw bytes; one that is known already is ignored.
        """

    async def deliver(self, delivery: Delivery) -> None:
        """Record what became of a reply; readers in this process see it at once."""

    async def close_session(self, outcome: Outcome) -> None:
        """Record how a session ended; a second outcome of the same session is an error."""

    async def flush(self) -> None:
        """Return when all that was given before is durable."""

    async def aclose(self) -> None:
        """Flush and release; idempotent."""

    # Reading: synchronous, from any thread, sees all that was given before in this process.

    def sessions(self) -> Sequence[SessionRecord]:
        """All sessions in the order they were opened."""

    def exchanges(self, session_id: str) -> Sequence[Exchange]:
        """A session's exchanges in commit order; empty if there are none or it is unknown."""

    def deliveries(self, session_id: str) -> Mapping[str, Delivery]:
        """The last delivery record per exchange id."""

    def bodies(self, session_id: str) -> Mapping[bytes, bytes]:
        """All content-addressed bodies of a session."""

    def outcome(self, session_id: str) -> Outcome | None:
        """How the session ended; `None` = it has not, or was killed."""
