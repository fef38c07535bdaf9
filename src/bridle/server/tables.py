"""The tables of the server's database, the same on SQLite and PostgreSQL.

What is asked for and how it ended are JSON texts that only their owners read; what the server
decides by is a column. `migrations` makes these tables; a test holds the two against each other.
Times are Unix seconds.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

Key = BigInteger().with_variant(Integer, "sqlite")
"""A number that the database counts up; SQLite only counts INTEGER."""

metadata = MetaData()

tasks = Table(
    "tasks",
    metadata,
    Column("seq", Key, primary_key=True, autoincrement=True),  # order of acceptance
    Column("task_id", String(200), nullable=False, unique=True),  # `rows.task_key`
    Column("digest", String(64), nullable=False),  # of the body, for a second submit
    Column("spec", Text, nullable=False),  # `bridle.config.Task`
    Column("terms", Text, nullable=False),  # `schemas.Terms`
    Column("owner", String(200), nullable=False),  # name of the token; empty = from before tokens
    Column("priority", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("open", Integer, nullable=False),  # 1 = sessions are still to be started
    Column("samples", Integer, nullable=False),  # as asked for
    Column("target", Integer, nullable=False),  # with refills
    Column("expanded", Integer, nullable=False),  # rows in `sessions`
    Column("ended", Integer, nullable=False),
    Column("usable", Integer, nullable=False),
    Column("version", Integer, nullable=False),  # policy version at submit
    Column("submitted_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("stopped", String(64)),  # why no further session starts
    Column("done_seq", BigInteger, unique=True),  # order in which groups became final
    Column("acked_at", Float),
    Column("kept", Integer, nullable=False, server_default="2"),  # `states.Kept`
    Column("name", String(200), nullable=False, server_default=""),  # its id in its owner's words
    Index("ix_tasks_name", "owner", "name", unique=True),
    # With what is counted, so that counting does not read the tasks themselves.
    Index("ix_tasks_open", "open", "owner", "priority", "seq", "target", "expanded"),
    Index("ix_tasks_state", "state", "seq", "open", "target", "expanded", "done_seq", "acked_at"),
    Index(
        "ix_tasks_owner",
        *("owner", "seq", "state", "open", "target", "expanded", "done_seq", "acked_at"),
    ),
    Index("ix_tasks_acked", "acked_at", "done_seq"),
    Index("ix_tasks_groups", "owner", "acked_at", "done_seq"),
    Index("ix_tasks_kept", "kept", "acked_at", "ended_at"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", String(220), primary_key=True),
    Column("task_seq", Key, ForeignKey("tasks.seq"), nullable=False),
    Column("sample_index", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),  # of the run that counts, from 1
    Column("state", String(16), nullable=False),
    Column("not_before", Float, nullable=False),
    Column("leased_by", String(64)),
    Column("leased_until", Float),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("version_started", Integer),  # policy version when its run began
    Column("version_min", Integer),  # over its sampled tokens
    Column("version_max", Integer),
    Column("usable", Integer, nullable=False),
    Column("result", Text),  # the session's result without its trajectory
    Column("file", String(300)),  # of its trajectory
    Column("file_bytes", BigInteger),
    Column("stopped", String(64)),  # why its run is to end, and no other begins
    Column("earlier", Text),  # JSON list: runs that did not count, and why
    Column("owner", String(200), nullable=False, server_default=""),  # the task's
    UniqueConstraint("task_seq", "sample_index"),
    Index("ix_sessions_state", "state", "owner", "priority", "task_seq"),
    Index("ix_sessions_owner", "owner", "task_seq", "sample_index", "state"),
)

callbacks = Table(
    "callbacks",
    metadata,
    Column("seq", Key, primary_key=True, autoincrement=True),
    Column("delivery_id", String(64), nullable=False, unique=True),
    Column("task_seq", Key, ForeignKey("tasks.seq"), nullable=False),
    Column("session_id", String(220)),  # null = the task's own result
    Column("url", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("tries", Integer, nullable=False),
    Column("next_at", Float, nullable=False),
    Column("made_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("error", Text),  # of the last try
    Column("receiver", String(300), nullable=False, server_default=""),  # `addresses.receiver_of`
    Column("sent_by", String(64)),  # the server that is trying it now
    Column("owner", String(200), nullable=False, server_default=""),  # the task's
    Index("ix_callbacks_due", "state", "next_at"),
    Index("ix_callbacks_task", "task_seq"),
    Index("ix_callbacks_owner", "owner", "seq", "state"),
)

numbers = Table(
    "numbers",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", BigInteger, nullable=False),
)
"""`done_seq` (groups that became final), `policy_version`, `paused` (1 = no session starts)."""
