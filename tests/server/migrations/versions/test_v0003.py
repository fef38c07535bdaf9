import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from tests.server.migrations.versions.test_v0002 import made

from bridle.server.migrations.versions import v0002, v0003


def test_tasks_keep_their_owner_and_those_of_no_token_are_nobodys():
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection:
        with Operations.context(MigrationContext.configure(connection)):
            made(connection)
            v0002.upgrade()
            copied = "SELECT 'b', digest, spec, terms, 'anyone', priority, state, open, samples,"
            columns = "digest, spec, terms, owner, priority, state, open, samples, target, expanded"
            columns += ", ended, usable, version, submitted_at"
            copied += " target, expanded, ended, usable, version, submitted_at FROM tasks"
            connection.execute(sa.text(f"INSERT INTO tasks (task_id, {columns}) {copied}"))
            v0003.upgrade()
            rows = connection.execute(sa.text("SELECT task_id, name, owner FROM tasks"))
            assert rows.all() == [("a", "a", "o"), ("b", "b", "")]
            assert connection.execute(sa.text("SELECT owner FROM callbacks")).all() == [("o",)] * 2
            v0003.downgrade()
        left = {one["name"] for one in sa.inspect(connection).get_columns("callbacks")}
        assert "owner" not in left
    engine.dispose()
