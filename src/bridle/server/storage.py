"""The server's storage: the files of trajectories, and the database of all else.

A trajectory file belongs to one run: in a folder, or in any file system of fsspec (`s3://...`). It
is complete before its session's row names it: in a folder it is written under another name and
renamed, and object stores show only complete objects. The caller passes the codec
(`bridle.bridges.parquet`).

The database is SQLite in a file, or PostgreSQL; it is opened at the newest migration. Every failure
of it is raised as `StateError`, which is temporary: a request answers 503, and code that must not
lose anything retries (`until_done`).

SQLite has one writer. A write transaction takes the file's lock when it begins, so it never fails
because a reader became a writer. Writers of this process queue on a lock of their own, because
SQLite waits by sleeping.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar

import aiosqlite
import structlog
from sqlalchemy import Connection, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DBAPIError,
    InterfaceError,
    InternalError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from bridle.aio import Checkup, run_shielded
from bridle.errors import (
    BridleError,
    ConfigError,
    StateError,
    StoreError,
    boundary,
    install_extra,
)
from bridle.folders import check_room, private_file, private_folder
from bridle.trajectory.sample import Trajectory


class Codec(Protocol):
    """Serialization of trajectories."""

    def pack(self, trajectory: Trajectory) -> bytes:
        """Return a trajectory as bytes for a file."""

    def unpack(self, packed: bytes) -> Trajectory:
        """Return the trajectory that the bytes of a file contain."""

    def arrow(self, trajectory: Trajectory) -> bytes:
        """Return an Arrow stream of a trajectory's traces, one row each."""


class UnwritableError(StoreError):
    """A trajectory cannot be written, and a retry would fail too."""


LASTING: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR})
"""Errors of a file system that are not temporary."""


class TrajectoryFiles:
    """Trajectory files below a root. All failures are `StoreError`; threads do the I/O."""

    def __init__(self, root: str | Path, codec: Codec) -> None:
        self.root = str(root)
        self.codec = codec
        self._local = None if "://" in self.root else Path(self.root)
        self.check = Checkup(self._check)
        """Raises `StoreError` while a local root has less than 1 MiB of free disk."""

    def name(self, run_id: str) -> str:
        """Return the file name of a run's trajectory, relative to the folder of trajectories."""
        return f"{hashlib.sha256(run_id.encode()).hexdigest()[:2]}/{run_id}.parquet"

    async def write(self, name: str, trajectory: Trajectory) -> int:
        """Write a trajectory, and return its size in bytes."""
        return await asyncio.to_thread(self._write, name, trajectory)

    async def read(self, name: str) -> Trajectory:
        return await asyncio.to_thread(self._read, name)

    async def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        await asyncio.to_thread(self._remove, name)

    async def _check(self) -> None:
        if self._local is not None:
            with boundary(StoreError, f"{self.root}: cannot write"):
                await asyncio.to_thread(check_room, private_folder(self._local))

    def _write(self, name: str, trajectory: Trajectory) -> int:
        doing = f"{self.root}/{name}: cannot write"
        try:
            packed = self.codec.pack(trajectory)
        except Exception as error:  # a codec may raise any error
            raise UnwritableError(
                f"{self.root}/{name}: cannot write the trajectory: {type(error).__name__}: {error}"
            ) from error
        try:
            with boundary(StoreError, doing):
                self._put(name, packed)
        except StoreError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in LASTING:
                raise UnwritableError(str(error)) from cause
            raise
        return len(packed)

    def _put(self, name: str, packed: bytes) -> None:
        if self._local is None:
            import fsspec

            with fsspec.open(f"{self.root}/{name}", "wb") as file:
                file.write(packed)
            return
        path = self._local / name
        private_folder(path.parent)
        aside = private_file(path.with_name(f"{path.name}.part"))
        try:
            aside.write_bytes(packed)
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)  # it takes space
            raise

    def _read(self, name: str) -> Trajectory:
        doing = f"{self.root}/{name}: cannot read"
        with boundary(StoreError, doing):
            packed = self._get(name)
        try:
            return self.codec.unpack(packed)
        except BridleError as error:
            raise StoreError(f"{doing}: {error}") from error

    def _get(self, name: str) -> bytes:
        if self._local is not None:
            return (self._local / name).read_bytes()
        import fsspec

        with fsspec.open(f"{self.root}/{name}", "rb") as file:
            packed: bytes = file.read()
        return packed

    def _remove(self, name: str) -> None:
        with boundary(StoreError, f"{self.root}/{name}: cannot remove"):
            if self._local is not None:
                (self._local / name).unlink(missing_ok=True)
                return
            import fsspec

            system, path = fsspec.core.url_to_fs(f"{self.root}/{name}")
            if system.exists(path):
                system.rm(path)


T = TypeVar("T")

BUSY_S = 10.0
"""Time that another process may hold SQLite's write lock before that is a failure."""

CONNECT_S = 10.0
"""Time that PostgreSQL may take to open a connection."""

COMMAND_S = 30.0
"""Time that PostgreSQL may take for a statement, unless its URL has `command_timeout`."""

MIGRATING = 0x627269646C65
"""Key of the advisory lock that a migration of PostgreSQL holds."""

CLOSE_S = 10.0
"""Time that closing a connection may take."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 5.0
"""Backoff of `until_done` before the first retry, and its limit."""

log = structlog.get_logger(__name__)


def database_url(given: str) -> str:
    """Return SQLAlchemy's URL for a SQLite file's path or a `postgresql://` URL.

    Raises `ConfigError` for anything else.
    """
    if "://" not in given:
        return f"sqlite+aiosqlite:///{given}"
    try:
        url = make_url(given)
    except (ArgumentError, ValueError) as error:
        raise ConfigError(f"database: {error}") from error
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
    kind = url.get_backend_name()
    if kind not in drivers:
        raise ConfigError(
            f"database: unknown kind {kind!r}; give a file, sqlite:///FILE or postgresql://..."
        )
    return url.set(drivername=drivers[kind]).render_as_string(hide_password=False)


class Database:
    """Read and write transactions. Use as an async context manager."""

    def __init__(self, url: str, *, patient: bool = False) -> None:
        """`patient` connections have no time limit for statements."""
        self._threads: list[threading.Thread] = []
        """Threads of SQLite's connections."""
        sqlite = url.startswith("sqlite")
        self._engine: AsyncEngine = (
            create_async_engine(url, async_creator=partial(self._connected, url))
            if sqlite
            else _postgres(url, patient=patient)
        )
        engine = self._engine
        self.is_sqlite = sqlite
        self._folder = Path(make_url(url).database or "").parent if sqlite else None
        if sqlite:
            event.listen(engine.sync_engine, "connect", _on_connect)
            event.listen(engine.sync_engine, "begin", _on_begin)
        self._writer = asyncio.Lock() if self.is_sqlite else None

    @classmethod
    async def open(cls, given: str | Path) -> Self:
        """Connect to the database, and apply all migrations.

        Raises `ConfigError` for an unusable URL, a missing driver or a database of another version
        of Bridle, `StateError` if no database answers there.
        """
        url = database_url(str(given))
        if "://" not in str(given):
            with suppress(OSError):  # the connection reports what is wrong
                private_file(Path(given))  # SQLite gives its -wal and -shm files the same mode
        try:
            migrating = cls(url, patient=True)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"database: its driver is missing ({error}); run {install_extra('postgres')}"
            ) from error
        async with migrating, migrating.write() as connection:
            await connection.run_sync(_migrate)
        return cls(url)

    async def check_room(self) -> None:
        """Raise `StateError` if SQLite's folder has less than 1 MiB of free disk."""
        if self._folder is not None:
            with _as_state_error():
                await asyncio.to_thread(check_room, self._folder)

    async def _connected(self, url: str) -> aiosqlite.Connection:
        """Open a connection to SQLite, and remember its thread."""
        connection = aiosqlite.connect(make_url(url).database or "", factory=_Connection)
        self._threads = [one for one in self._threads if one.is_alive()]
        self._threads.append(connection._thread)  # noqa: SLF001 - nothing public says when it ends

        async def connect() -> aiosqlite.Connection:
            return await connection

        try:
            # The thread opens the file even if the caller was cancelled.
            return await run_shielded(connect(), timeout_s=CLOSE_S)
        except asyncio.CancelledError:
            await run_shielded(connection.close(), timeout_s=CLOSE_S)
            raise

    async def aclose(self) -> None:
        """Close all connections, and wait for those whose caller was cancelled."""
        await self._engine.dispose()
        for thread in self._threads:
            await asyncio.to_thread(thread.join, CLOSE_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection in a read transaction. `StateError` if the database cannot be used."""
        with _as_state_error():
            async with self._engine.connect() as connection:
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection in a transaction; commits unless left by an exception.

        Raises `StateError` if the database cannot be used.
        """
        if self._writer is None:
            with _as_state_error():
                async with self._engine.begin() as connection:
                    yield connection
            return
        async with self._writer:
            with _as_state_error():
                async with self._engine.connect() as connection:
                    await connection.execution_options(begin="BEGIN IMMEDIATE")
                    async with connection.begin():
                        yield connection


def _postgres(url: str, *, patient: bool) -> AsyncEngine:
    parsed = make_url(url)
    waits: dict[str, float | None] = {"timeout": CONNECT_S}
    if patient:
        waits["command_timeout"] = None
    elif "command_timeout" not in parsed.query:
        waits["command_timeout"] = COMMAND_S
    return create_async_engine(parsed, pool_pre_ping=True, connect_args=waits)


class _Connection(sqlite3.Connection):
    """A connection whose open transaction ends when it is closed.

    SQLite keeps the transaction and its lock while anything has a cursor, such as the error of a
    call that was cancelled while it read.
    """

    def close(self) -> None:
        """Roll back, and close."""
        try:
            if self.in_transaction:
                self.rollback()
        finally:
            super().close()


async def until_done(
    attempt: Callable[[], Awaitable[T]],
    doing: str,
    *,
    closing: asyncio.Event | None = None,
    patience_s: float = math.inf,
) -> T:
    """Retry `attempt()` with backoff while it raises `StateError` or `StoreError`, and return its
    result.

    Once `closing` is set, or after `patience_s`, the next failure is raised; an `UnwritableError`
    at once.
    """
    wait_s, until = FIRST_WAIT_S, time.monotonic() + patience_s
    while True:
        try:
            return await attempt()
        except (StateError, StoreError) as error:
            if closing is not None and closing.is_set():
                raise
            if isinstance(error, UnwritableError) or time.monotonic() + wait_s > until:
                raise
            log.warning("nothing can be stored; retrying", doing=doing, error=str(error))
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)


@contextmanager
def _as_state_error() -> Iterator[None]:
    """Raise the driver's failures inside as `StateError`; other errors pass."""
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeoutError, OSError) as error:
        raise StateError(f"the database cannot be used: {_short(error)}") from error
    except (DBAPIError, sqlite3.DatabaseError) as error:
        # DatabaseError itself, not one of its kinds: the file is not a database.
        is_no_database = type(error) in (DatabaseError, sqlite3.DatabaseError)
        if is_no_database or (isinstance(error, DBAPIError) and _is_down(error)):
            raise StateError(f"the database cannot be used: {_short(error)}") from error
        raise


_DOWN = ("08", "25006", "40", "53", "57", "58")
"""SQLSTATE classes of temporary failures: connection, standby that is not promoted yet, deadlock,
resources, shutdown or start, system."""


def _is_down(error: DBAPIError) -> bool:
    """Return whether the failure is temporary."""
    state = getattr(error.orig, "sqlstate", None)
    if state is None and isinstance(error, InternalError):  # of the driver: no host is a primary
        return True
    return error.connection_invalidated or (isinstance(state, str) and state.startswith(_DOWN))


def _short(error: BaseException | None) -> str:
    """Return the driver's message without the statement."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return str(error.orig if isinstance(error, DBAPIError) else error)


def _on_connect(connection: Any, _: object) -> None:  # noqa: ANN401 - the driver's own
    connection.isolation_level = None  # `_on_begin` begins transactions
    connection.run_async(_set_up)


async def _set_up(connection: aiosqlite.Connection) -> None:
    for pragma in (
        f"busy_timeout={int(BUSY_S * 1000)}",
        "synchronous=NORMAL",
        "foreign_keys=ON",
    ):
        await connection.execute(f"PRAGMA {pragma}")
    async with asyncio.timeout(BUSY_S):
        # SQLite ignores busy_timeout while several connections turn a new file to WAL.
        while True:
            try:
                await connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise
            await asyncio.sleep(FIRST_WAIT_S)


def _on_begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))


def _migrate(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    if connection.dialect.name == "postgresql":
        # Of several starting servers one migrates at a time.
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MIGRATING})")
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        message = (
            f"database: another version of bridle made it, and this one cannot migrate it ({error})"
        )
        raise ConfigError(message) from error
