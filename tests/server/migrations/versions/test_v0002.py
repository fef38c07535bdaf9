import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations

from bridle.server.migrations.versions import v0001, v0002


def made(connection):
    """A database of the first migration with two callbacks."""
    v0001.upgrade()
    connection.execute(
        sa.text(
            "INSERT INTO tasks (task_id, digest, spec, terms, owner, priority, state, open,"
            " samples, target, expanded, ended, usable, version, submitted_at)"
            " VALUES ('a', '', '', '', 'o', 0, 'completed', 0, 1, 1, 1, 1, 1, 0, 1.0)"
        )
    )
    for number, state in enumerate(("pending", "delivered")):
        connection.execute(
            sa.text(
                "INSERT INTO callbacks (delivery_id, task_seq, url, state, tries, next_at, made_at)"
                " VALUES (:id, 1, :url, :state, 0, 0, 0)"
            ),
            {"id": f"d{number}", "url": f"http://Host:{number}/x", "state": state},
        )


def test_callbacks_of_before_get_their_receiver_and_it_can_be_taken_back():
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection:
        with Operations.context(MigrationContext.configure(connection)):
            made(connection)
            v0002.upgrade()
            rows = connection.execute(sa.text("SELECT receiver, sent_by FROM callbacks"))
            assert rows.all() == [("http://host:0", None), ("", None)]
            assert connection.execute(sa.text("SELECT kept FROM tasks")).all() == [(2,)]
            v0002.downgrade()
        columns = {one["name"] for one in sa.inspect(connection).get_columns("callbacks")}
        assert not columns & {"receiver", "sent_by"}
    engine.dispose()
