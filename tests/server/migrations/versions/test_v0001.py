import sqlite3
from contextlib import closing

from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import create_engine, inspect

from bridle.server.database import Database
from bridle.server.migrations.versions import v0001


async def test_the_numbers_begin_at_nought(tmp_path):
    async with await Database.open(tmp_path / "a.sqlite"):
        pass
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as connection:
        rows = connection.execute("SELECT name, value FROM numbers ORDER BY name").fetchall()
    assert rows == [("done_seq", 0), ("paused", 0), ("policy_version", 0)]


def test_it_can_be_taken_back():
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        with Operations.context(MigrationContext.configure(connection)):
            v0001.upgrade()
            assert len(inspect(connection).get_table_names()) == 4
            v0001.downgrade()
        assert inspect(connection).get_table_names() == []
    engine.dispose()
