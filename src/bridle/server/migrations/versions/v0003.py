"""Owners: tasks have a name that is unique per owner; sessions and callbacks have their owner.

Tasks that were accepted without a token belong to nobody: only admins see them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

NOBODY_BEFORE = "anyone"
"""The owner of tasks on a server without tokens, until now."""


def upgrade() -> None:
    """Add the columns; sessions and callbacks get their task's owner."""
    with op.batch_alter_table("tasks") as table:
        table.add_column(sa.Column("name", sa.String(200), nullable=False, server_default=""))
    for name in ("sessions", "callbacks"):
        with op.batch_alter_table(name) as table:
            table.add_column(sa.Column("owner", sa.String(200), nullable=False, server_default=""))
    nobodys = sa.text("UPDATE tasks SET owner = '' WHERE owner = :before")
    op.execute(nobodys.bindparams(before=NOBODY_BEFORE))
    op.execute("UPDATE tasks SET name = task_id")
    for name in ("sessions", "callbacks"):
        its = f"SELECT owner FROM tasks WHERE tasks.seq = {name}.task_seq"  # noqa: S608 - two names of ours
        op.execute(f"UPDATE {name} SET owner = ({its})")  # noqa: S608 - as above
    op.drop_index("ix_tasks_open", "tasks")
    op.drop_index("ix_sessions_state", "sessions")
    op.create_index("ix_tasks_name", "tasks", ["owner", "name"], unique=True)
    opened = ["open", "owner", "priority", "seq", "target", "expanded"]
    op.create_index("ix_tasks_open", "tasks", opened)
    counted = ["seq", "state", "open", "target", "expanded", "done_seq", "acked_at"]
    op.create_index("ix_tasks_owner", "tasks", ["owner", *counted])
    op.create_index("ix_tasks_groups", "tasks", ["owner", "acked_at", "done_seq"])
    states = ["state", "owner", "priority", "task_seq"]
    op.create_index("ix_sessions_state", "sessions", states)
    samples = ["owner", "task_seq", "sample_index", "state"]
    op.create_index("ix_sessions_owner", "sessions", samples)
    op.create_index("ix_callbacks_owner", "callbacks", ["owner", "seq", "state"])


def downgrade() -> None:
    """Remove the columns; what belongs to nobody stays so."""
    for name, table in (
        ("ix_callbacks_owner", "callbacks"),
        ("ix_sessions_owner", "sessions"),
        ("ix_sessions_state", "sessions"),
        ("ix_tasks_groups", "tasks"),
        ("ix_tasks_owner", "tasks"),
        ("ix_tasks_open", "tasks"),
        ("ix_tasks_name", "tasks"),
    ):
        op.drop_index(name, table)
    op.create_index("ix_tasks_open", "tasks", ["open", "priority", "seq"])
    op.create_index("ix_sessions_state", "sessions", ["state", "priority", "task_seq"])
    for name, column in (("callbacks", "owner"), ("sessions", "owner"), ("tasks", "name")):
        with op.batch_alter_table(name) as batch:
            batch.drop_column(column)
