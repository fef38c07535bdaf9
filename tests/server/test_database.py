import asyncio
import sqlite3
import threading
from typing import Any

import pytest
from sqlalchemy import insert, select
from sqlalchemy.exc import DBAPIError
from tests.server.house import database_of

from bridle.errors import ConfigError, StateError
from bridle.server import schemas as t
from bridle.server.storage import Database, database_url, until_done
from bridle.server.store import TaskStore


def test_a_path_is_a_sqlite_file_and_urls_get_their_async_driver():
    assert database_url("/tmp/x.sqlite") == "sqlite+aiosqlite:////tmp/x.sqlite"
    assert database_url("postgresql://u:p@h/d") == "postgresql+asyncpg://u:p@h/d"
    with pytest.raises(ConfigError, match="unknown kind 'mysql'"):
        database_url("mysql://h/d")
    with pytest.raises(ConfigError, match="database: "):
        database_url("postgresql://h:port/d")


async def test_a_reopened_database_has_the_written_rows(tmp_path):
    for _ in range(2):
        async with await Database.open(tmp_path / "a.sqlite") as database:
            async with database.write() as connection:
                await connection.execute(t.numbers.update().values(value=7))
            async with database.read() as connection:
                values = (await connection.execute(select(t.numbers.c.value))).scalars().all()
            assert set(values) == {7}


async def test_servers_that_create_a_database_together_all_see_it_migrated(tmp_path):
    async def opened():
        async with await Database.open(database_of(tmp_path)) as database:
            return await TaskStore(database).number("done_seq")

    async with asyncio.TaskGroup() as group:
        opening = [group.create_task(opened()) for _ in range(4)]
    assert [one.result() for one in opening] == [0, 0, 0, 0]


async def test_concurrent_connections_to_a_new_database_file_all_use_wal_mode(tmp_path):
    for number in range(20):
        databases = [Database(database_url(f"{tmp_path}/{number}.sqlite")) for _ in range(4)]

        async def mode(database):
            async with database, database.read() as connection:
                found = await connection.exec_driver_sql("PRAGMA journal_mode")
                return found.scalar_one()

        async with asyncio.TaskGroup() as group:
            modes = [group.create_task(mode(database)) for database in databases]
        assert [one.result() for one in modes] == ["wal"] * 4


async def test_a_failed_transaction_is_rolled_back(tmp_path):
    async with await Database.open(tmp_path / "a.sqlite") as database:

        async def fail():
            async with database.write() as connection:
                await connection.execute(insert(t.numbers).values(name="new", value=1))
                raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await fail()
        async with database.read() as connection:
            assert "new" not in (await connection.execute(select(t.numbers.c.name))).scalars()


async def test_concurrent_writers_of_one_process_lose_nothing(tmp_path):
    async with await Database.open(tmp_path / "a.sqlite") as database:

        async def add():
            async with database.write() as connection:
                row = select(t.numbers.c.value).where(t.numbers.c.name == "paused")
                value = (await connection.execute(row)).scalar_one()
                await asyncio.sleep(0)
                change = t.numbers.update().where(t.numbers.c.name == "paused")
                await connection.execute(change.values(value=value + 1))

        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(add())
        async with database.read() as connection:
            row = select(t.numbers.c.value).where(t.numbers.c.name == "paused")
            assert (await connection.execute(row)).scalar_one() == 20


async def test_a_database_that_cannot_be_opened_is_a_state_error(tmp_path):
    with pytest.raises(StateError, match="cannot be used: unable to open"):
        await Database.open(tmp_path / "no-folder" / "a.sqlite")


async def test_file_that_is_not_a_database_is_refused(tmp_path):
    (tmp_path / "a.sqlite").write_bytes(b"something else" * 100)
    with pytest.raises(StateError, match="not a database"):
        await Database.open(tmp_path / "a.sqlite")


async def test_a_writer_waits_for_another_process_that_holds_the_lock(tmp_path):
    async with await Database.open(tmp_path / "a.sqlite") as database:
        other = sqlite3.connect(tmp_path / "a.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")

        async def write():
            async with database.write() as connection:
                await connection.execute(insert(t.numbers).values(name="late", value=1))

        async with asyncio.TaskGroup() as group:
            writing = group.create_task(write())
            await asyncio.sleep(0.05)
            assert not writing.done()
            other.execute("COMMIT")
        other.close()


async def test_writer_cancelled_during_a_read_leaves_no_lock(tmp_path):
    reads, goes_on = threading.Event(), threading.Event()

    def held():
        reads.set()
        goes_on.wait(30)
        return 1

    async with await Database.open(tmp_path / "a.sqlite") as database:

        async def write():
            async with database.write() as connection:
                driver: Any = (await connection.get_raw_connection()).driver_connection
                await driver.create_function("held", 0, held)
                await connection.exec_driver_sql("SELECT held() UNION ALL SELECT 2")

        writing = asyncio.get_running_loop().create_task(write())
        await asyncio.to_thread(reads.wait, 30)
        writing.cancel()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await writing
        other = sqlite3.connect(tmp_path / "a.sqlite", isolation_level=None, timeout=0)
        other.execute("BEGIN IMMEDIATE")  # though the error still has the cursor
        other.close()
        assert cancelled.tb is not None


async def test_until_done_retries_until_success():
    left = [StateError("locked"), StateError("full")]

    async def attempt():
        if left:
            raise left.pop()
        return "done"

    assert await until_done(attempt, "testing") == "done"


async def test_stopping_server_ends_its_retries():
    async def attempt():
        raise StateError("gone")

    closing = asyncio.Event()
    closing.set()
    with pytest.raises(StateError, match="gone"):
        await until_done(attempt, "testing", closing=closing)


class Said(Exception):
    """A driver's error with PostgreSQL's state."""

    def __init__(self, sqlstate):
        super().__init__(f"state {sqlstate}")
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("57P03", StateError),  # the database system is starting up
        ("57P01", StateError),  # terminating connection due to administrator command
        ("53300", StateError),  # too many connections
        ("40P01", StateError),  # deadlock detected
        ("23505", DBAPIError),  # unique violation: a mistake of ours
        (None, DBAPIError),
    ],
)
async def test_only_temporary_database_errors_become_state_errors(tmp_path, state, expected):
    async with await Database.open(tmp_path / "a.sqlite") as database:
        with pytest.raises(expected):
            async with database.write():
                raise DBAPIError("UPDATE", {}, Said(state))


async def test_connection_opened_for_a_cancelled_caller_is_closed(tmp_path, monkeypatch):
    begun, go_on, threads, connect = threading.Event(), threading.Event(), [], sqlite3.connect

    def slowly(*given, **named):
        """Open when it is let."""
        threads.append(threading.current_thread())
        begun.set()
        go_on.wait(20)
        return connect(*given, **named)

    async with await Database.open(tmp_path / "a.sqlite") as database, database.read():
        monkeypatch.setattr(sqlite3, "connect", slowly)

        async def read():
            async with database.read():
                raise AssertionError("it was cancelled before")

        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read())
            await asyncio.to_thread(begun.wait, 20)
            reading.cancel()
            await asyncio.sleep(0)
            go_on.set()
        assert reading.cancelled()
        [thread] = threads  # that of the connection, which ends when it is closed
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()
