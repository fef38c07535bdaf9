"""Entry point of alembic; `bridle.server.storage` provides the connection."""

from __future__ import annotations

from alembic import context

from bridle.server.schemas import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
