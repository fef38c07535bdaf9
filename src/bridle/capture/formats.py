"""The capture file: its tables, its versions, and the conversion of records to rows and back.

One SQLite file (WAL) holds the records of many sessions. It can be read with `sqlite3` and numpy:
ids are little-endian int32 blobs, logprobs float32 blobs, small structures JSON text. The suffix
ids of a long prompt are compressed with zlib where `suffix_zlib` is 1. Texts are packed in one blob
per exchange (`bridle.capture.texts`).

SQLite's `application_id` identifies the file and `user_version` its format. A newer version is
refused. An older one is converted step by step, in place when it is opened for writing and in
memory when it is only read; one file of every version stays in `tests/capture/files`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from bridle.capture.records import (
    Damaged,
    Delivery,
    Exchange,
    Outcome,
    RequestRecord,
    Score,
    SessionRecord,
)
from bridle.capture.texts import COMPRESS_LEVEL, DIGEST_BYTES, SessionTexts, StoredExchange
from bridle.errors import StoreError, boundary
from bridle.folders import private_file
from bridle.types import (
    DeliveryState,
    Dialect,
    FinishReason,
    Kind,
    LogprobMode,
    Sampling,
    VersionSpan,
)

APPLICATION_ID = 0x42524431
"""`BRD1` in ASCII: marks the file as a Bridle capture."""

PAGE_BYTES = 1024
"""Page size of a new file; an older file keeps its own. A row larger than a page fills its pages
but for one. Rows of 3.2 KB, as many turns have, fill 4.1 KB with pages of 2 or 4 KiB, and 3.3 with
these, in the same time; a row of 150 KB takes 0.1 ms longer.
"""

SCHEMA = """
CREATE TABLE sessions (
    n INTEGER PRIMARY KEY, session_id TEXT NOT NULL, opened_at REAL NOT NULL, task_id TEXT,
    metadata TEXT NOT NULL, scores TEXT);
CREATE UNIQUE INDEX sessions_by_id ON sessions (session_id);
CREATE TABLE exchanges (
    n INTEGER PRIMARY KEY, session INTEGER NOT NULL, exchange_id TEXT NOT NULL,
    idx INTEGER NOT NULL, dialect TEXT NOT NULL, kind TEXT NOT NULL, parent_id TEXT,
    continues TEXT, root_reason TEXT, kept INTEGER NOT NULL, prompt_length INTEGER NOT NULL,
    prompt_digest BLOB NOT NULL, suffix_ids BLOB NOT NULL, output_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL, logprob_mode TEXT NOT NULL, versions TEXT NOT NULL,
    finish_reason TEXT NOT NULL, sampling TEXT NOT NULL, constrained INTEGER NOT NULL,
    head BLOB NOT NULL, base TEXT, kept_spans INTEGER NOT NULL, spans BLOB NOT NULL, tools BLOB,
    started_at REAL NOT NULL, first_token_s REAL, duration_s REAL NOT NULL, extra TEXT NOT NULL,
    texts BLOB NOT NULL, experts BLOB, suffix_zlib INTEGER NOT NULL DEFAULT 0);
CREATE INDEX exchanges_of ON exchanges (session);
CREATE TABLE deliveries (
    session INTEGER NOT NULL, n INTEGER NOT NULL, exchange_id TEXT NOT NULL, state TEXT NOT NULL,
    at REAL NOT NULL, detail TEXT NOT NULL, joined_by TEXT NOT NULL,
    PRIMARY KEY (session, n)) WITHOUT ROWID;
CREATE TABLE outcomes (
    session INTEGER PRIMARY KEY, status TEXT NOT NULL, ended_at REAL NOT NULL, reward REAL,
    trace_rewards TEXT, cause TEXT, error TEXT, metadata TEXT NOT NULL);
"""

INSERT_EXCHANGE = (
    "INSERT INTO exchanges VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?,"
    " ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
"""Takes an `exchange_row`."""

COMPRESS_IDS_FROM_BYTES = 2048
"""Of a real vocabulary (131,072 tokens) level 1 keeps 0.34 to 0.42 of the bytes, at 80 MB/s. Below
this it saves less than its time is worth: of a turn with 300 new ids 12 us each time it is read."""

FORGET = (
    "DELETE FROM exchanges WHERE session = ?",
    "DELETE FROM deliveries WHERE session = ?",
    "DELETE FROM outcomes WHERE session = ?",
    "DELETE FROM sessions WHERE n = ?",
)
"""Each takes a session's number."""


VERSION = 6
"""Of the schema that this code writes."""

CONVERSIONS: dict[int, Sequence[str]] = {
    1: (),  # the data of a body may be a separate entry; existing bodies stay as they are
    2: ("ALTER TABLE deliveries ADD COLUMN joined_by TEXT NOT NULL DEFAULT '[]'",),
    3: ("ALTER TABLE sessions ADD COLUMN scores TEXT",),
    4: ("ALTER TABLE exchanges ADD COLUMN experts BLOB",),
    5: ("ALTER TABLE exchanges ADD COLUMN suffix_zlib INTEGER NOT NULL DEFAULT 0",),
}
"""Version -> statements that convert a file to the next version, in one transaction."""


# ---- files


def open_for_writing(path: Path, *, fsync: bool) -> sqlite3.Connection:
    """Open or make the capture file at `path`; an older version is converted in place.

    The connection may be used from any one thread at a time. `fsync` makes every transaction
    durable against power loss; without it a killed process still loses nothing, and a power loss
    costs the last seconds but never the file. Raises `StoreError`.
    """
    with boundary(StoreError, f"{path}: cannot open for writing"):
        private_file(path)  # SQLite gives its -wal and -shm files the same mode
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA busy_timeout = 5000")
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            if _version_of(connection, path) is None:
                _create(connection)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            _bring_forward(connection)
        except BaseException:
            connection.close()
            raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open a capture file without changing it, also while another process writes.

    An older version is converted in a copy in memory. Raises `StoreError`.
    """
    with boundary(StoreError, f"{path}: cannot open for reading"):
        if not path.is_file():
            raise StoreError(f"{path}: no such capture file")
        connection = _connect_to_read(path)
        try:
            version = _version_of(connection, path)
            if version is None:
                raise StoreError(f"{path}: not a Bridle capture file: it is empty")
            if version < VERSION:
                copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
                connection.backup(copy)
                connection.close()
                connection = copy
                _bring_forward(connection)
        except BaseException:
            connection.close()
            raise
    return connection


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Open a connection that changes nothing, also in a read-only folder.

    In a writable folder it is a full connection limited to queries, so that the last one to close
    removes the WAL. In a read-only one SQLite cannot make the shared-memory file of WAL readers; a
    file without pending WAL can then be read as immutable.
    """
    uri = path.absolute().as_uri()
    connection = sqlite3.connect(
        f"{uri}?mode=rw", uri=True, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA busy_timeout = 5000")
    try:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.Error as error:
        connection.close()
        wal = path.with_name(path.name + "-wal")
        pending = wal.exists() and wal.stat().st_size > 0
        if pending or not isinstance(error, sqlite3.OperationalError):
            raise
        connection = sqlite3.connect(
            f"{uri}?mode=ro&immutable=1", uri=True, isolation_level=None, check_same_thread=False
        )
    return connection


def _version_of(connection: sqlite3.Connection, path: Path) -> int | None:
    """Return the file's format version, `None` if it is empty; refuses foreign and newer files."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if tables == 0 and application == 0:
        return None
    if application != APPLICATION_ID:
        raise StoreError(f"{path}: not a Bridle capture file (application id {application:#x})")
    if version > VERSION:
        raise StoreError(
            f"{path}: written by a newer Bridle (format {version}; this one knows up to "
            f"{VERSION}); upgrade to read it"
        )
    return int(version)


def _create(connection: sqlite3.Connection) -> None:
    """Create the tables of the current version, all or none."""
    connection.executescript(
        f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA application_id = {APPLICATION_ID};"
        f" PRAGMA user_version = {VERSION}; COMMIT;"
    )


def _bring_forward(connection: sqlite3.Connection) -> None:
    """Convert step by step to the current version, each step all or nothing."""
    while (version := connection.execute("PRAGMA user_version").fetchone()[0]) < VERSION:
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in CONVERSIONS[version]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {version + 1}")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")


# ---- rows

# Looking a member up by value through the enum takes ten times as long.
_DIALECTS = {str(member): member for member in Dialect}
_KINDS = {str(member): member for member in Kind}
_MODES = {str(member): member for member in LogprobMode}
_FINISHES = {str(member): member for member in FinishReason}
_IDS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f4")
_STATES = {str(member): member for member in DeliveryState}


def _json(value: object) -> str:
    """Write JSON text; lone surrogates (undecodable output of a harness) survive as escapes."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except orjson.JSONEncodeError:
        return json.dumps(value, allow_nan=False)


def _of_json(text: str) -> Any:  # noqa: ANN401 - JSON as decoded
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def _text(value: str | None) -> str | None:
    """Escape characters that UTF-8 in SQLite cannot hold."""
    return None if value is None else value.encode("utf-8", "backslashreplace").decode()


_SAMPLING_DEFAULTS = dataclasses.asdict(Sampling())
_SAMPLING_FIELDS = tuple(_SAMPLING_DEFAULTS.items())
_SAMPLING_VALUES = attrgetter(*_SAMPLING_DEFAULTS)


def sampling_json(sampling: Sampling) -> str:
    """Return sampling parameters as JSON text, only those that are set."""
    given: dict[str, Any] = {}
    for (field, default), value in zip(_SAMPLING_FIELDS, _SAMPLING_VALUES(sampling), strict=True):
        if value != default:
            given[field] = value
    return _json(given)


def _sampling_of(text: str) -> Sampling:
    given = _of_json(text)
    for field in ("stop", "stop_token_ids"):
        if field in given:
            given[field] = tuple(given[field])
    return Sampling(**given)


def exchange_row(
    session: int, exchange: Exchange, texts: bytes, head: bytes, sampling: str
) -> tuple[Any, ...]:
    """Return the values of a row of the table `exchanges`, without its number.

    `head` is the digest of the request's head, `sampling` the JSON text of its sampling parameters.
    """
    request, versions = exchange.request, exchange.versions
    blobs: list[bytearray] = []
    for array, dtype in (
        (exchange.suffix_ids, _IDS),
        (exchange.output_ids, _IDS),
        (exchange.logprobs, _LOGPROBS),
    ):
        given = array if array.dtype == dtype else array.astype(dtype)
        flat = given if given.size and given.flags.c_contiguous else given.tobytes()
        blobs += (bytearray(flat),)
    suffix, output, logprobs = blobs
    if len(versions) == 1:
        spans = f"[[{versions[0].version},{versions[0].start},{versions[0].end}]]"
    else:
        spans = _json([(span.version, span.start, span.end) for span in versions])
    if compressed := exchange.suffix_ids.nbytes >= COMPRESS_IDS_FROM_BYTES:
        suffix = bytearray(zlib.compress(suffix, COMPRESS_LEVEL))
    # `sqlite3` looks for an adapter of every value but those that are exactly int, float, str or
    # bytearray: with enums and bytes an insert takes 10 us, with these 6.
    return (
        session,
        exchange.exchange_id,
        exchange.index,
        exchange.dialect._value_,
        exchange.kind._value_,
        exchange.parent_id,
        exchange.continues,
        exchange.root_reason,
        exchange.kept,
        exchange.prompt_length,
        bytearray(exchange.prompt_digest),
        suffix,
        output,
        logprobs,
        exchange.logprob_mode._value_,
        spans,
        exchange.finish_reason._value_,
        sampling,
        int(exchange.constrained),
        bytearray(head),
        request.base,
        request.kept_spans,
        bytearray(b"".join(request.spans)),
        request.tools,
        exchange.started_at,
        exchange.first_token_s,
        exchange.duration_s,
        _json(exchange.extra),
        bytearray(texts),
        exchange.experts,
        int(compressed),
    )


def exchanges_of(session_id: str, rows: Iterable[tuple[Any, ...]]) -> SessionRows:
    """Return a session's exchanges from their rows, in commit order, and their texts, still packed.

    A row that cannot be decoded (an array of half a number, an unknown kind) is returned as
    `damaged`.
    """
    found = SessionRows([], SessionTexts(), [])
    # The same text again and again, row after row.
    samplings: dict[str, Sampling] = {}
    spans: dict[str, tuple[VersionSpan, ...]] = {}
    for row in rows:
        head = found.texts.add(row[29], row[20])
        try:
            if (sampling := samplings.get(row[18])) is None:
                sampling = samplings[row[18]] = _sampling_of(row[18])
            if (versions := spans.get(row[16])) is None:
                versions = tuple(VersionSpan(*span) for span in _of_json(row[16]))
                spans[row[16]] = versions
            exchange = _exchange_of(session_id, row, found.texts, head, sampling, versions)
        except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
            sampled = len(row[13]) // 4 if isinstance(row[13], bytes) else 0
            found.damaged.append(Damaged(str(row[2]), sampled, f"{type(error).__name__}: {error}"))
        else:
            found.exchanges.append(exchange)
    return found


class SessionRows(NamedTuple):
    """Decoded rows of a session."""

    exchanges: list[Exchange]
    texts: SessionTexts
    damaged: list[Damaged]


def _exchange_of(
    session_id: str,
    row: tuple[Any, ...],
    texts: SessionTexts,
    head: bytes,
    sampling: Sampling,
    versions: tuple[VersionSpan, ...],
) -> StoredExchange:
    spans = memoryview(row[23])  # here, so that a damaged one is found here

    def request() -> RequestRecord:
        digests = (spans[at : at + DIGEST_BYTES] for at in range(0, len(spans), DIGEST_BYTES))
        return RequestRecord(
            head=head,
            base=row[21],
            kept_spans=row[22],
            spans=tuple(digest.tobytes() for digest in digests),
            tools=row[24],
        )

    return StoredExchange.of(
        texts,
        request,
        row[2],
        session_id,
        row[3],
        _DIALECTS[row[4]],
        _KINDS[row[5]],
        row[6],
        row[7],
        row[8],
        row[9],
        np.frombuffer(zlib.decompress(row[12]) if row[31] else row[12], _IDS),
        np.frombuffer(row[13], _IDS),
        np.frombuffer(row[14], _LOGPROBS),
        _MODES[row[15]],
        versions,
        _FINISHES[row[17]],
        sampling,
        bool(row[19]),
        row[10],
        row[11],
        row[25],
        row[26],
        row[27],
        _of_json(row[28]) if row[28] != "{}" else {},
        row[30],
    )


def delivery_row(session: int, n: int, delivery: Delivery) -> tuple[Any, ...]:
    """Return the values of a row of the table `deliveries`."""
    detail = _text(delivery.detail) if delivery.detail else ""
    joined_by = _json(delivery.joined_by) if delivery.joined_by else "[]"
    state = delivery.state._value_  # see `exchange_row`
    return session, n, delivery.exchange_id, state, delivery.at, detail, joined_by


def session_row(session: SessionRecord) -> tuple[Any, ...]:
    """Return the values of a row of the table `sessions`, without its number."""
    return session.session_id, session.opened_at, session.task_id, _json(session.metadata)


def session_of(row: tuple[Any, ...]) -> SessionRecord:
    """Return the session that a row of the table `sessions` describes."""
    return SessionRecord(row[1], row[2], row[3], _of_json(row[4]))


def delivery_of(session_id: str, row: tuple[Any, ...]) -> Delivery:
    """Return the delivery that a row of the table `deliveries` describes."""
    joined_by = () if row[6] == "[]" else tuple(_of_json(row[6]))
    return Delivery(row[2], session_id, _STATES[row[3]], row[4], row[5], joined_by)


def outcome_row(session: int, outcome: Outcome) -> tuple[Any, ...]:
    """Return the values of a row of the table `outcomes`."""
    rewards = None if outcome.trace_rewards is None else _json(outcome.trace_rewards)
    return (
        session,
        outcome.status,
        outcome.ended_at,
        outcome.reward,
        rewards,
        outcome.cause,
        _text(outcome.error),
        _json(outcome.metadata),
    )


def outcome_of(session_id: str, row: tuple[Any, ...]) -> Outcome:
    """Return the outcome that a row of the table `outcomes` describes."""
    return Outcome(
        session_id=session_id,
        status=row[1],
        ended_at=row[2],
        reward=row[3],
        trace_rewards=None if row[4] is None else tuple(_of_json(row[4])),
        cause=row[5],
        error=row[6],
        metadata=_of_json(row[7]),
    )


def score_json(score: Score) -> str:
    """Return a reward that was given later as one entry of the column `sessions.scores`."""
    facts = dataclasses.asdict(score)
    return _json(facts | {"by": _text(score.by), "why": _text(score.why)})


def scores_of(text: str | None) -> Sequence[Score]:
    """Return the rewards in the column `sessions.scores`, oldest first."""
    entries = () if text is None else _of_json(text)
    return [
        Score(**entry | {"trace_rewards": rewards and tuple(rewards)})
        for entry in entries
        for rewards in (entry["trace_rewards"],)
    ]


def sync_file(file: Path) -> None:
    """Flush a write-ahead log file to the disk.

    Never for the database file: closing it here would drop SQLite's own locks on it. Records that a
    checkpoint moved out of the log were synced by the checkpoint.
    """
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
