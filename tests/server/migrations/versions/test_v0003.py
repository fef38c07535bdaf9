import sqlite3
from contextlib import closing

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import create_engine, inspect

from bridle.errors import ConfigError
from bridle.server.migrations.versions import v0003
from bridle.server.storage import Database


async def test_initial_values_of_the_numbers_table_are_0(tmp_path):
    async with await Database.open(tmp_path / "a.sqlite"):
        pass
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as connection:
        rows = connection.execute("SELECT name, value FROM numbers ORDER BY name").fetchall()
    assert rows == [("done_seq", 0), ("paused", 0), ("policy_version", 0)]


@pytest.mark.parametrize("revision", ["0002", "9999"])
async def test_a_database_of_an_unknown_revision_is_refused(tmp_path, revision):
    async with await Database.open(tmp_path / "a.sqlite"):
        pass
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        connection.commit()
    with pytest.raises(ConfigError, match=f"another version of bridle.*{revision}"):
        await Database.open(tmp_path / "a.sqlite")


def test_downgrade_of_migration_0003_drops_all_tables():
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        with Operations.context(MigrationContext.configure(connection)):
            v0003.upgrade()
            assert len(inspect(connection).get_table_names()) == 4
            v0003.downgrade()
        assert inspect(connection).get_table_names() == []
    engine.dispose()
