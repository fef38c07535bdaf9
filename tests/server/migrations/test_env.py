import sqlite3
from contextlib import closing

from bridle.server.storage import Database


async def test_an_opened_database_records_the_latest_migration(tmp_path):
    for _ in range(2):
        async with await Database.open(tmp_path / "a.sqlite"):
            pass
        with closing(sqlite3.connect(tmp_path / "a.sqlite")) as connection:
            rows = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        assert rows == [("0003",)]
