"""`bridle cancel`: end tasks of a rollout server."""

from __future__ import annotations

from typing import Annotated

import typer

from bridle.cli.asking import SERVER, JsonOption, ServerOption, TokenOption, client
from bridle.cli.output import console, print_json


def cancel(
    tasks: Annotated[list[str], typer.Argument(help="Task ids.")],
    server: ServerOption = SERVER,
    token: TokenOption = None,
    json: JsonOption = False,
) -> None:
    """End tasks with all their sessions; what has ended stays as it is.

    Ends with code 1 if one of them is not known.
    """
    with client(server, token) as open_client:
        unknown = open_client.cancel(*tasks)
    if json:
        print_json({"unknown": unknown})
    else:
        console.print(f"{len(tasks) - len(unknown)} tasks cancelled")
        for name in unknown:
            console.print(f"not known: {name}", markup=False)
    raise typer.Exit(1 if unknown else 0)
