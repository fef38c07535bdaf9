"""Reader of capture files, also of those that another process writes or left when killed; copies of
single sessions.
"""

from __future__ import annotations

import sqlite3
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bridle.capture import formats
from bridle.capture.records import (
    Delivery,
    Exchange,
    Outcome,
    SessionCapture,
    SessionRecord,
    Totals,
    with_scores,
)
from bridle.capture.texts import body_digests
from bridle.errors import StoreError, boundary
from bridle.types import Sampling

_TOTALS = """
SELECT s.session_id, max(e.n), count(*), sum(length(e.output_ids)) / 4,
       max(e.started_at + e.duration_s)
FROM exchanges e JOIN sessions s ON s.n = e.session WHERE e.n > ? GROUP BY e.session
"""
_TEXTS = """
SELECT e.n, s.session_id, e.texts FROM exchanges e JOIN sessions s ON s.n = e.session
WHERE e.n > ? ORDER BY e.n LIMIT ?
"""
_EXTENT = """
SELECT (SELECT count(*) FROM exchanges e JOIN sessions s ON s.n = e.session WHERE session_id = ?),
       (SELECT count(*) FROM deliveries d JOIN sessions s ON s.n = d.session WHERE session_id = ?),
       (SELECT count(*) FROM outcomes o JOIN sessions s ON s.n = o.session WHERE session_id = ?),
       coalesce((SELECT json_array_length(scores) FROM sessions WHERE session_id = ?), 0)
"""


_CAPTURED = """
SELECT coalesce(sum(4 * (prompt_length - kept) + length(output_ids) + length(logprobs)
       + length(spans) + length(head) + length(extra) + length(texts)
       + coalesce(length(experts), 0)), 0)
       FROM exchanges WHERE session = ?
"""


class SqliteReader:
    """Reader of a capture file, also of one that another process writes or left when killed.

    Usable from any thread. All failures are `StoreError` with the file's path.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._connection = formats.open_for_reading(self.path)
        # One connection, so one thread at a time; sqlite3 objects are not to be shared.
        self._lock = threading.Lock()

    def sessions(self) -> Sequence[SessionRecord]:
        """Return all sessions in the order they were opened."""
        with self._reading():
            rows = self._rows("SELECT * FROM sessions ORDER BY n")
            return [formats.session_of(row) for row in rows]

    def change(self) -> int:
        """Return a number that changes when another connection writes to the file."""
        with self._reading():
            return int(self._rows("PRAGMA data_version")[0][0])

    def outcomes(self) -> Mapping[str, Outcome]:
        """Return the outcomes of ended sessions by id."""
        query = "SELECT session_id, scores, o.* FROM outcomes o JOIN sessions s ON n = session"
        with self._reading():
            return {
                session_id: with_scores(
                    formats.outcome_of(session_id, tuple(row)), formats.scores_of(scores)
                )
                for session_id, scores, *row in self._rows(query)
            }

    def totals(self, after: int = 0) -> tuple[Mapping[str, Totals], int]:
        """Return sums over the exchanges after row `after`, by session id, and the last row's
        number.

        Add the result to that of earlier rows: so a refresh costs only the new rows.
        """
        with self._reading():
            found: dict[str, Totals] = {}
            for session_id, last, *values in self._rows(_TOTALS, (after,)):
                after = max(after, last)
                found[session_id] = Totals(*values)
            return found, after

    def texts(self, after: int, count: int) -> Sequence[tuple[int, str, bytes]]:
        """Return (row, session id, packed texts) of `count` exchanges after row `after`.

        The texts are those that no earlier exchange of the session has (see
        `bridle.capture.texts`).
        """
        with self._reading():
            return self._rows(_TEXTS, (after, count))

    def exchanges_after(self, after: int) -> int:
        """Return how many exchanges were written after row `after`."""
        with self._reading():
            return int(self._rows("SELECT count(*) FROM exchanges WHERE n > ?", (after,))[0][0])

    def extent(self, session_id: str) -> tuple[int, ...]:
        """Return the row counts of a session, which change exactly when a record is added."""
        with self._reading():
            ((*counts,),) = self._rows(_EXTENT, (session_id,) * 4)
            return tuple(counts)

    def size(self) -> int:
        """Return how many bytes of the file hold records, without freed pages."""
        with self._reading():
            ((pages,), (free,), (each,)) = (
                self._rows(f"PRAGMA {name}")[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
            return int((pages - free) * each)

    def captured(self, session_id: str) -> int:
        """Return the size in bytes of a session's exchanges without reading them; 0 = unknown."""
        with self._reading():
            return sum(number for (number,) in self._session_rows(_CAPTURED, session_id))

    def session(self, session_id: str) -> SessionRecord:
        """Return the session as it was opened. Raises `StoreError` if it never was."""
        with self._reading():
            for row in self._session_rows("SELECT * FROM sessions WHERE n = ?", session_id):
                return formats.session_of(row)
        raise self.never_opened(session_id)

    def never_opened(self, session_id: str) -> StoreError:
        """Return the error for a session that the file does not have."""
        return StoreError(f"{self.path}: session {session_id!r} was never opened")

    def exchanges(self, session_id: str) -> Sequence[Exchange]:
        """Return a session's exchanges in commit order; empty if it is unknown.

        Raises `StoreError` for a damaged row; `read` returns the rest of its session.
        """
        rows = self._exchange_rows(session_id)
        for damaged in rows.damaged:
            raise StoreError(
                f"{self.path}: cannot read exchange {damaged.exchange_id}: {damaged.why}"
            )
        return rows.exchanges

    def bodies(self, session_id: str) -> Mapping[bytes, bytes]:
        """Return all content-addressed bodies of a session; those of damaged rows are missing."""
        return self._exchange_rows(session_id).texts

    def deliveries(self, session_id: str) -> Mapping[str, Delivery]:
        """Return the last delivery record of each exchange of a session, by exchange id."""
        with self._reading():
            rows = self._session_rows(
                "SELECT * FROM deliveries WHERE session = ? ORDER BY n",
                session_id,
            )
            return {row[2]: formats.delivery_of(session_id, row) for row in rows}

    def outcome(self, session_id: str) -> Outcome | None:
        """Return a session's outcome, with rewards that were added after its end.

        `None` = it still runs, or was killed.
        """
        with self._reading():
            query = "SELECT scores, o.* FROM outcomes o JOIN sessions ON n = session WHERE n = ?"
            for scores, *row in self._session_rows(query, session_id):
                return with_scores(
                    formats.outcome_of(session_id, tuple(row)), formats.scores_of(scores)
                )
            return None

    def read(self, session_id: str) -> SessionCapture:
        """Return all records of one session; texts are unpacked on demand.

        Damaged rows are listed in `damaged`. Raises `StoreError` if the session was never opened.
        """
        record = self.session(session_id)
        outcome = self.outcome(session_id)
        found = self._exchange_rows(session_id)
        return SessionCapture(
            record,
            found.exchanges,
            self.deliveries(session_id),
            found.texts,
            outcome,
            found.damaged,
        )

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reading(self) -> AbstractContextManager[None]:
        return boundary(StoreError, f"{self.path}: cannot read")

    def _exchange_rows(self, session_id: str) -> formats.SessionRows:
        with self._reading():
            rows = self._session_rows(
                "SELECT * FROM exchanges WHERE session = ? ORDER BY n",
                session_id,
            )
            return formats.exchanges_of(session_id, rows)

    def _session_rows(self, query: str, session_id: str) -> list[tuple[Any, ...]]:
        """Return the rows of `query` for a session; none if it is unknown."""
        found = self._rows("SELECT n FROM sessions WHERE session_id = ?", (session_id,))
        return self._rows(query, found[0]) if found else []

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()


_ROWS = {
    "sessions": "SELECT * FROM sessions WHERE n = ?",
    "exchanges": "SELECT * FROM exchanges WHERE session = ? ORDER BY n",
    "deliveries": "SELECT * FROM deliveries WHERE session = ? ORDER BY n",
    "outcomes": "SELECT * FROM outcomes WHERE session = ?",
}
"""Table -> query of a session's rows by its number."""


def excerpt(source: Path, session_id: str) -> bytes | None:
    """Return a capture file with one session of the file `source`, as it is at this moment.

    `None` = it has no such session. Others may write to `source` meanwhile. Raises `StoreError`.
    """
    with closing(formats.open_for_reading(source)) as rows:
        rows.execute("BEGIN")  # all of it at one moment
        query = "SELECT n FROM sessions WHERE session_id = ?"
        number = rows.execute(query, (session_id,)).fetchone()
        if number is None:
            return None
        with (
            boundary(StoreError, f"{source}: cannot copy session {session_id!r}"),
            tempfile.TemporaryDirectory(prefix="bridle-") as folder,
        ):
            target = Path(folder, "capture.sqlite")
            with closing(formats.open_for_writing(target, fsync=False)) as made:
                made.execute("BEGIN")
                for table, select in _ROWS.items():
                    found = rows.execute(select, number)
                    values = ", ".join("?" for _ in found.description)
                    made.executemany(f"INSERT INTO {table} VALUES ({values})", found)  # noqa: S608 - a name of ours
                made.execute("COMMIT")
            return target.read_bytes()


@dataclass(slots=True)
class WrittenSession:
    """The part of a session's records that its writer keeps, so that nothing is stored twice."""

    number: int
    exchange_ids: set[str] = field(default_factory=set)
    heads: set[bytes] = field(default_factory=set)
    head: tuple[bytes, bytes] = (b"", b"")
    """The last one that was written, and its digest."""
    sampling: tuple[Sampling | None, str] = (None, "")
    """The last one that was written, and its JSON."""
    bodies: set[bytes] = field(default_factory=set)
    """Digests of the stored bodies and of their data."""
    deliveries: int = 0
    closed: bool = False

    @classmethod
    def read(cls, connection: sqlite3.Connection, session_id: str) -> Self | None:
        """Return the state of a session that the file has; `None` = it does not have it."""

        def rows(query: str, value: object) -> list[tuple[Any, ...]]:
            return connection.execute(query, (value,)).fetchall()

        found = rows("SELECT n FROM sessions WHERE session_id = ?", session_id)
        if not found:
            return None
        state = cls(number=found[0][0])
        query = "SELECT exchange_id, head, texts FROM exchanges WHERE session = ?"
        for exchange_id, head, texts in rows(query, state.number):
            state.exchange_ids.add(exchange_id)
            state.heads.add(head)
            state.bodies.update(body_digests(texts))
        query = "SELECT count(*) FROM deliveries WHERE session = ?"
        state.deliveries = rows(query, state.number)[0][0]
        state.closed = bool(rows("SELECT 1 FROM outcomes WHERE session = ?", state.number))
        return state
