"""The first tables: tasks, their sessions, their callbacks, and the server's numbers.

Revisions 0001 and 0002 were in no release and cannot be upgraded.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = None

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the tables of the server's database."""
    _tasks()
    _sessions()
    _callbacks()
    op.create_table(
        "numbers",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
    )
    for name in ("done_seq", "policy_version", "paused"):
        op.execute(sa.text("INSERT INTO numbers VALUES (:name, 0)").bindparams(name=name))


def downgrade() -> None:
    """Drop the tables of the server's database."""
    for name in ("numbers", "callbacks", "sessions", "tasks"):
        op.drop_table(name)


def _tasks() -> None:
    op.create_table(
        "tasks",
        sa.Column("seq", KEY, primary_key=True, autoincrement=True),
        sa.Column("task_id", sa.String(200), nullable=False, unique=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("terms", sa.Text, nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("open", sa.Integer, nullable=False),
        sa.Column("samples", sa.Integer, nullable=False),
        sa.Column("target", sa.Integer, nullable=False),
        sa.Column("expanded", sa.Integer, nullable=False),
        sa.Column("ended", sa.Integer, nullable=False),
        sa.Column("usable", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("submitted_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("stopped", sa.String(64)),
        sa.Column("done_seq", sa.BigInteger, unique=True),
        sa.Column("acked_at", sa.Float),
        sa.Column("kept", sa.Integer, nullable=False, server_default="2"),
        sa.Column("name", sa.String(200), nullable=False, server_default=""),
    )
    counted = ["seq", "state", "open", "target", "expanded", "done_seq", "acked_at"]
    op.create_index("ix_tasks_name", "tasks", ["owner", "name"], unique=True)
    opened = ["open", "owner", "priority", "seq", "target", "expanded"]
    op.create_index("ix_tasks_open", "tasks", opened)
    by_state = ["state", "seq", *counted[2:]]
    op.create_index("ix_tasks_state", "tasks", by_state)
    op.create_index("ix_tasks_owner", "tasks", ["owner", *counted])
    op.create_index("ix_tasks_acked", "tasks", ["acked_at", "done_seq"])
    op.create_index("ix_tasks_groups", "tasks", ["owner", "acked_at", "done_seq"])
    op.create_index("ix_tasks_kept", "tasks", ["kept", "acked_at", "ended_at"])


def _sessions() -> None:
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(220), primary_key=True),
        sa.Column("task_seq", KEY, sa.ForeignKey("tasks.seq"), nullable=False),
        sa.Column("sample_index", sa.Integer, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("not_before", sa.Float, nullable=False),
        sa.Column("leased_by", sa.String(64)),
        sa.Column("leased_until", sa.Float),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("version_started", sa.Integer),
        sa.Column("version_min", sa.Integer),
        sa.Column("version_max", sa.Integer),
        sa.Column("usable", sa.Integer, nullable=False),
        sa.Column("result", sa.Text),
        sa.Column("file", sa.String(300)),
        sa.Column("file_bytes", sa.BigInteger),
        sa.Column("stopped", sa.String(64)),
        sa.Column("earlier", sa.Text),
        sa.Column("owner", sa.String(200), nullable=False, server_default=""),
        sa.UniqueConstraint("task_seq", "sample_index"),
    )
    states = ["state", "owner", "priority", "task_seq"]
    op.create_index("ix_sessions_state", "sessions", states)
    samples = ["owner", "task_seq", "sample_index", "state"]
    op.create_index("ix_sessions_owner", "sessions", samples)


def _callbacks() -> None:
    op.create_table(
        "callbacks",
        sa.Column("seq", KEY, primary_key=True, autoincrement=True),
        sa.Column("delivery_id", sa.String(64), nullable=False, unique=True),
        sa.Column("task_seq", KEY, sa.ForeignKey("tasks.seq"), nullable=False),
        sa.Column("session_id", sa.String(220)),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("next_at", sa.Float, nullable=False),
        sa.Column("made_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float),
        sa.Column("error", sa.Text),
        sa.Column("receiver", sa.String(300), nullable=False, server_default=""),
        sa.Column("sent_by", sa.String(64)),
        sa.Column("owner", sa.String(200), nullable=False, server_default=""),
    )
    op.create_index("ix_callbacks_due", "callbacks", ["state", "next_at"])
    op.create_index("ix_callbacks_task", "callbacks", ["task_seq"])
    op.create_index("ix_callbacks_owner", "callbacks", ["owner", "seq", "state"])
