"""The store contract: writing and reading of capture records, and a store in memory.

`commit` returns when `kill -9` of this process cannot lose the exchange; only then does the gateway
send the last event of a reply (law 4). Implementations: `MemoryStore` (here) and
`bridle.capture.sqlite.SqliteStore`; both pass `tests/conformance/stores.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bridle.capture.records import (
    Delivery,
    Exchange,
    Outcome,
    Score,
    SessionCapture,
    SessionRecord,
    scored,
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
        """Record as `deliver` does, without a wait; `failed` is told the error, if it fails."""

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


@dataclass(slots=True)
class _Session:
    """Session in memory."""

    record: SessionRecord
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    deliveries: dict[str, Delivery] = field(default_factory=dict)
    bodies: dict[bytes, bytes] = field(default_factory=dict)
    outcome: Outcome | None = None
    scores: list[Score] = field(default_factory=list)


class MemoryStore:
    """Store that loses everything with the process: for tests, and for runs that keep only their
    trajectories.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._closed = False

    async def open_session(self, session: SessionRecord) -> None:
        self._check_open()
        if session.session_id in self._sessions:
            raise StoreError(f"memory: session {session.session_id!r} is recorded already")
        self._sessions[session.session_id] = _Session(session)

    async def commit(self, exchange: Exchange, bodies: Mapping[bytes, bytes]) -> None:
        """Record an exchange with the `bodies` that are new to its session."""
        self.commit_now(exchange, bodies)

    def commit_now(self, exchange: Exchange, bodies: Mapping[bytes, bytes]) -> None:
        """Record an exchange; it is durable at once."""
        session = self._session(exchange.session_id)
        if exchange.exchange_id in session.exchanges:
            raise StoreError(f"memory: exchange {exchange.exchange_id!r} is recorded already")
        session.exchanges[exchange.exchange_id] = exchange
        for digest, body in bodies.items():
            session.bodies.setdefault(digest, body)

    async def deliver(self, delivery: Delivery) -> None:
        self._deliver(delivery)

    def deliver_soon(self, delivery: Delivery, failed: Callable[[StoreError], object]) -> None:
        try:
            self._deliver(delivery)
        except StoreError as error:
            asyncio.get_running_loop().call_soon(failed, error)

    def _deliver(self, delivery: Delivery) -> None:
        self._session(delivery.session_id).deliveries[delivery.exchange_id] = delivery

    async def close_session(self, outcome: Outcome) -> None:
        session = self._session(outcome.session_id)
        if session.outcome is not None:
            raise StoreError(f"memory: session {outcome.session_id!r} has an outcome already")
        session.outcome = outcome

    async def score(self, score: Score) -> None:
        self._session(score.session_id).scores.append(score)

    async def forget(self, session_id: str) -> None:
        self._check_open()
        self._sessions.pop(session_id, None)

    async def written(self) -> None:
        """Do nothing: all is written."""

    async def flush(self) -> None:
        """Do nothing: memory is as durable as it gets."""
        self._check_open()

    async def check(self) -> None:
        self._check_open()

    async def aclose(self) -> None:
        self._closed = True

    def sessions(self) -> Sequence[SessionRecord]:
        self._check_open()
        return [session.record for session in self._sessions.values()]

    def exchanges(self, session_id: str) -> Sequence[Exchange]:
        session = self._find(session_id)
        return [] if session is None else list(session.exchanges.values())

    def deliveries(self, session_id: str) -> Mapping[str, Delivery]:
        session = self._find(session_id)
        return {} if session is None else dict(session.deliveries)

    def bodies(self, session_id: str) -> Mapping[bytes, bytes]:
        session = self._find(session_id)
        return {} if session is None else dict(session.bodies)

    def outcome(self, session_id: str) -> Outcome | None:
        session = self._find(session_id)
        if session is None or session.outcome is None:
            return None
        return scored(session.outcome, session.scores)

    def read(self, session_id: str) -> SessionCapture:
        session = self._session(session_id)
        return SessionCapture(
            session.record,
            list(session.exchanges.values()),
            dict(session.deliveries),
            dict(session.bodies),
            self.outcome(session_id),
        )

    def size(self) -> int:
        """Return 0: memory is not kept."""
        return 0

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("memory: the store is closed")

    def _find(self, session_id: str) -> _Session | None:
        self._check_open()
        return self._sessions.get(session_id)

    def _session(self, session_id: str) -> _Session:
        session = self._find(session_id)
        if session is None:
            raise StoreError(f"memory: session {session_id!r} was never opened")
        return session
