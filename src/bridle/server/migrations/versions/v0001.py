"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Make the tables."""
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
    """Remove the tables."""
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
    )
    op.create_index("ix_tasks_open", "tasks", ["open", "priority", "seq"])
    counted = ["state", "seq", "open", "target", "expanded", "done_seq", "acked_at"]
    op.create_index("ix_tasks_state", "tasks", counted)
    op.create_index("ix_tasks_acked", "tasks", ["acked_at", "done_seq"])


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
        sa.Column("earlier", sa.Text),
        sa.UniqueConstraint("task_seq", "sample_index"),
    )
    op.create_index("ix_sessions_state", "sessions", ["state", "priority", "task_seq"])


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
    )
    op.create_index("ix_callbacks_due", "callbacks", ["state", "next_at"])
    op.create_index("ix_callbacks_task", "callbacks", ["task_seq"])
