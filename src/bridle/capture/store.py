"""The store contract: where the facts of capture go, and how they are read back.

`commit` returns when the exchange is where `kill -9` of this process cannot take it; the gateway
lets the last event of a reply go only then (law 4). Implementations: `MemoryStore` (here) and
`bridle.capture.sqlite.SqliteStore`; both pass `tests/conformance/stores.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
    """Append-only facts of many sessions. All failures are `StoreError`."""

    async def open_session(self, session: SessionRecord) -> None:
        """Record a session; a second one of the same id is an error."""

    async def commit(self, exchange: Exchange, bodies: Mapping[bytes, bytes]) -> None:
        """Record an exchange and the message, tool and media `bodies` that are new to its session.

        `bodies` maps 16-byte content digests to raw bytes; one that is known already is ignored.
        """

    def commit_now(
        self, exchange: Exchange, bodies: Mapping[bytes, bytes]
    ) -> asyncio.Future[None] | None:
        """Record as `commit` does; `None` = it is durable, else it is when the future is done."""

    async def deliver(self, delivery: Delivery) -> None:
        """Record what became of a reply; readers in this process see it at once."""

    def deliver_soon(self, delivery: Delivery) -> asyncio.Future[None]:
        """Record as `deliver` does; the future is done, or has the `StoreError`, then."""

    async def close_session(self, outcome: Outcome) -> None:
        """Record how a session ended; a second outcome of the same session is an error."""

    async def score(self, score: Score) -> None:
        """Record a reward that is given later; every reading of the outcome has the last one."""

    async def forget(self, session_id: str) -> None:
        """Remove all that is recorded of a session; of one that is not known there is nothing."""

    async def flush(self) -> None:
        """Return when all that was given before is durable."""

    async def check(self) -> None:
        """Raise the `StoreError` that a record of some size would meet now."""

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
        """Return the session's outcome; `None` = it still runs, or was killed."""

    def read(self, session_id: str) -> SessionCapture:
        """Everything of one session, read once. `StoreError` if it was never opened."""

    def size(self) -> int:
        """Bytes that the records take where they are kept, without the room of removed ones."""


@dataclass(slots=True)
class _Session:
    """A session in memory."""

    record: SessionRecord
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    deliveries: dict[str, Delivery] = field(default_factory=dict)
    bodies: dict[bytes, bytes] = field(default_factory=dict)
    outcome: Outcome | None = None
    scores: list[Score] = field(default_factory=list)


class MemoryStore:
    """A store that forgets everything with the process: for tests, and for runs that keep only
    their trajectories.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._closed = False

    async def open_session(self, session: SessionRecord) -> None:
        """Record a session; a second one of the same id is an error."""
        self._check_open()
        if session.session_id in self._sessions:
            message = f"memory: session {session.session_id!r} is recorded already"
            raise StoreError(message)
        self._sessions[session.session_id] = _Session(session)

    async def commit(self, exchange: Exchange, bodies: Mapping[bytes, bytes]) -> None:
        """Record an exchange with the `bodies` that are new to its session."""
        self.commit_now(exchange, bodies)

    def commit_now(self, exchange: Exchange, bodies: Mapping[bytes, bytes]) -> None:
        """Record an exchange; it is durable at once."""
        session = self._session(exchange.session_id)
        if exchange.exchange_id in session.exchanges:
            message = f"memory: exchange {exchange.exchange_id!r} is recorded already"
            raise StoreError(message)
        session.exchanges[exchange.exchange_id] = exchange
        for digest, body in bodies.items():
            session.bodies.setdefault(digest, body)

    async def deliver(self, delivery: Delivery) -> None:
        """Record what became of a reply."""
        await self.deliver_soon(delivery)

    def deliver_soon(self, delivery: Delivery) -> asyncio.Future[None]:
        """Record what became of a reply now; the future has the error, if there is one."""
        return _tried(partial(self._deliver, delivery))

    def _deliver(self, delivery: Delivery) -> None:
        self._session(delivery.session_id).deliveries[delivery.exchange_id] = delivery

    async def close_session(self, outcome: Outcome) -> None:
        """Record how a session ended; a second outcome of the same session is an error."""
        session = self._session(outcome.session_id)
        if session.outcome is not None:
            message = f"memory: session {outcome.session_id!r} has an outcome already"
            raise StoreError(message)
        session.outcome = outcome

    async def score(self, score: Score) -> None:
        """Record a reward that is given later."""
        self._session(score.session_id).scores.append(score)

    async def forget(self, session_id: str) -> None:
        """Remove all that is recorded of a session; of one that is not known there is nothing."""
        self._check_open()
        self._sessions.pop(session_id, None)

    async def flush(self) -> None:
        """Nothing to do: memory is as durable as it gets."""
        self._check_open()

    async def check(self) -> None:
        """Raise `StoreError` if it is closed."""
        self._check_open()

    async def aclose(self) -> None:
        """Refuse everything from here on; idempotent."""
        self._closed = True

    def sessions(self) -> Sequence[SessionRecord]:
        """All sessions in the order they were opened."""
        self._check_open()
        return [session.record for session in self._sessions.values()]

    def exchanges(self, session_id: str) -> Sequence[Exchange]:
        """A session's exchanges in commit order; empty if there are none or it is unknown."""
        session = self._find(session_id)
        return [] if session is None else list(session.exchanges.values())

    def deliveries(self, session_id: str) -> Mapping[str, Delivery]:
        """The last delivery record per exchange id."""
        session = self._find(session_id)
        return {} if session is None else dict(session.deliveries)

    def bodies(self, session_id: str) -> Mapping[bytes, bytes]:
        """All content-addressed bodies of a session."""
        session = self._find(session_id)
        return {} if session is None else dict(session.bodies)

    def outcome(self, session_id: str) -> Outcome | None:
        session = self._find(session_id)
        if session is None or session.outcome is None:
            return None
        return scored(session.outcome, session.scores)

    def read(self, session_id: str) -> SessionCapture:
        """Everything of one session. `StoreError` if it was never opened."""
        session = self._session(session_id)
        return SessionCapture(
            session.record,
            list(session.exchanges.values()),
            dict(session.deliveries),
            dict(session.bodies),
            self.outcome(session_id),
        )

    def size(self) -> int:
        """Nothing: memory is not kept."""
        return 0

    def _check_open(self) -> None:
        if self._closed:
            message = "memory: the store is closed"
            raise StoreError(message)

    def _find(self, session_id: str) -> _Session | None:
        self._check_open()
        return self._sessions.get(session_id)

    def _session(self, session_id: str) -> _Session:
        session = self._find(session_id)
        if session is None:
            message = f"memory: session {session_id!r} was never opened"
            raise StoreError(message)
        return session


def _tried(work: Callable[[], None]) -> asyncio.Future[None]:
    """The outcome of `work`, which is done now."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        work()
    except StoreError as error:
        done.set_exception(error)
    else:
        done.set_result(None)
    return done
