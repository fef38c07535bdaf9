"""`bridle watch`: follow tasks of a rollout server until they have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.asking import COLUMNS, SERVER, JsonOption, ServerOption, TokenOption, client, row
from bridle.cli.output import notes, print_json, print_table

if TYPE_CHECKING:
    from bridle.types import JSON

RESTART_S = 300.0
"""How long a server that was there may be away while it is watched."""

OPEN_STATES = ("queued", "running", "ending")


def watch(
    tasks: Annotated[
        list[str] | None, typer.Argument(help="Task ids; all that have not ended without.")
    ] = None,
    server: ServerOption = SERVER,
    token: TokenOption = None,
    json: JsonOption = False,
) -> None:
    """Wait until tasks have ended and show what came of them.

    Ends with code 0 if all of them were completed, else 1.
    """
    with client(server, token) as quick:
        quick.status()
    with client(server, token, patience_s=RESTART_S) as open_client:
        names = tasks or [
            one["task_id"] for state in OPEN_STATES for one in open_client.tasks(state=state)
        ]
        ended: list[JSON] = []
        for name in names:
            one = open_client.wait(name)
            ended.append(one)
            notes.print(f"{len(ended)} of {len(names)}: {name} {one['state']}", markup=False)
    if json:
        print_json({"tasks": ended})
    else:
        print_table(f"{len(ended)} tasks", COLUMNS, map(row, ended))
    raise typer.Exit(0 if all(one["state"] == "completed" for one in ended) else 1)
