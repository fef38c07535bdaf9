"""`bridle status`: what a rollout server, or one of its tasks, is doing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.asking import COLUMNS, SERVER, JsonOption, ServerOption, TokenOption, client, row
from bridle.cli.output import console, print_json, print_table, table

if TYPE_CHECKING:
    from bridle.types import JSON


def status(
    task: Annotated[str | None, typer.Argument(help="A task; the whole server without.")] = None,
    server: ServerOption = SERVER,
    token: TokenOption = None,
    json: JsonOption = False,
) -> None:
    """Show a server's counts, or a task with its sessions."""
    with client(server, token) as open_client:
        if task is None:
            _show_server(open_client.status(), json=json)
            return
        found, sessions = open_client.task(task), open_client.sessions(task)
    if json:
        print_json(found | {"sessions": sessions})
        return
    print_table(task, COLUMNS, [row(found)])
    columns = ("session", "status", "cause", "#reward", "#attempt", "error")
    names = ("session_id", "status", "cause", "reward", "attempt", "error")
    rows = [[one[name] for name in names] for one in sessions]
    print_table(f"{len(sessions)} sessions", columns, rows)


def _show_server(told: JSON, *, json: bool) -> None:
    if json:
        print_json(told)
        return
    groups = ("tasks", "sessions", "callbacks")
    rows = [[name, state, count] for name in groups for state, count in told[name].items()]
    rows.append(["sessions", "waiting", told["sessions_waiting"]])
    rows.append(["groups", "not acknowledged", told["groups_unacked"]])
    for owner, counts in told.get("owners", {}).items():
        rows += [[f"owner {owner or 'nobody'}", what, count] for what, count in counts.items()]
    console.print(table("rollout server", ("what", "state", "#count"), rows))
    paused = ", paused" if told["paused"] else ""
    version = told["policy"]["version"]
    console.print(
        f"{told['running']} of {told['slots']} slots in use{paused}; policy version {version}"
    )
