from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine

from bridle.server.database import Database
from bridle.server.tables import metadata


async def test_the_migrations_make_the_tables_that_the_code_reads(tmp_path):
    """Compared by alembic, both ways: nothing is missing, nothing is left over."""
    async with await Database.open(tmp_path / "a.sqlite"):
        pass
    engine = create_engine(f"sqlite:///{tmp_path / 'a.sqlite'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()
