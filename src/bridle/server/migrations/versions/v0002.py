"""Callbacks know their receiver and who is sending them; running sessions that they are to end;
groups what of them is kept.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from bridle.server.addresses import receiver_of

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the columns; callbacks of before get their receiver."""
    with op.batch_alter_table("callbacks") as table:
        table.add_column(sa.Column("receiver", sa.String(300), nullable=False, server_default=""))
        table.add_column(sa.Column("sent_by", sa.String(64)))
    with op.batch_alter_table("sessions") as table:
        table.add_column(sa.Column("stopped", sa.String(64)))
    with op.batch_alter_table("tasks") as table:
        table.add_column(sa.Column("kept", sa.Integer, nullable=False, server_default="2"))
        table.create_index("ix_tasks_kept", ["kept", "acked_at", "ended_at"])
    connection = op.get_bind()
    pending = sa.text("SELECT DISTINCT url FROM callbacks WHERE state <> 'delivered'")
    for (url,) in connection.execute(pending).all():
        given = {"url": url, "receiver": receiver_of(url)}
        connection.execute(
            sa.text("UPDATE callbacks SET receiver = :receiver WHERE url = :url"), given
        )


def downgrade() -> None:
    """Remove the columns."""
    with op.batch_alter_table("tasks") as table:
        table.drop_index("ix_tasks_kept")
        table.drop_column("kept")
    with op.batch_alter_table("sessions") as table:
        table.drop_column("stopped")
    with op.batch_alter_table("callbacks") as table:
        table.drop_column("sent_by")
        table.drop_column("receiver")
