"""A store in memory, for tests and benchmarks that read the records and not the file."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bridle.capture.records import (
    Commit,
    Delivery,
    Exchange,
    Outcome,
    Score,
    SessionCapture,
    SessionRecord,
    with_scores,
)
from bridle.errors import StoreError


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
        self.commit_now([(exchange, bodies)])

    def commit_now(self, commits: Sequence[Commit]) -> None:
        """Record exchanges, all or none; they are durable at once."""
        for exchange, _ in commits:
            if exchange.exchange_id in self._session(exchange.session_id).exchanges:
                raise StoreError(f"memory: exchange {exchange.exchange_id!r} is recorded already")
        for exchange, bodies in commits:
            session = self._session(exchange.session_id)
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
        return with_scores(session.outcome, session.scores)

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
