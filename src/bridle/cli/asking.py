"""What the verbs that talk to a rollout server have in common: where it is, and who asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bridle.client import Client

ServerOption = Annotated[
    str, typer.Option("--server", envvar="BRIDLE_SERVER", help="URL of the rollout server.")
]
TokenOption = Annotated[
    str | None,
    typer.Option("--token", envvar="BRIDLE_SERVER_TOKEN", help="Token of the rollout server."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

SERVER = "http://127.0.0.1:8080"

COLUMNS = ("task", "owner", "state", "#ended", "#usable", "#of", "#priority", "why")
"""Of a table of tasks."""


def client(server: str, token: str | None, *, patience_s: float = 1.0) -> Client:
    """A client that soon says when the server is not there."""
    from bridle.client import Client

    return Client(server, token=token, patience_s=patience_s)


def row(task: dict[str, object]) -> list[object]:
    """A task in a table."""
    names = (
        *("task_id", "owner", "state", "ended_sessions", "usable_sessions", "total_sessions"),
        *("priority", "stopped"),
    )
    return [task[name] for name in names]
