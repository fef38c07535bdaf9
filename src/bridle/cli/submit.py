"""`bridle submit`: hand tasks to a rollout server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.asking import SERVER, JsonOption, ServerOption, TokenOption, client
from bridle.cli.output import console, print_json
from bridle.types import JSON


def submit(  # noqa: PLR0913 - one parameter per flag
    tasks: Annotated[
        Path, typer.Argument(help="Task file, Harbor task folder, or a folder of them.")
    ],
    server: ServerOption = SERVER,
    token: TokenOption = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Sessions per task instead of its own number.")
    ] = None,
    first: Annotated[int | None, typer.Option(min=1, help="Only the first N tasks.")] = None,
    priority: Annotated[
        int, typer.Option(min=0, max=100, help="Higher ones are started first.")
    ] = 0,
    callback_url: Annotated[
        str | None, typer.Option(help="Where results are sent as sessions end.")
    ] = None,
    early_stop: Annotated[
        int | None, typer.Option(min=1, help="Usable sessions after which a group ends.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Submit tasks; a task that was submitted before is not run again.

    Files that tasks name must lie where the server's operator permits it (`serve --allow-path`).
    """
    from bridle.datasets.jsonl import load_tasks
    from bridle.server.permits import names_files

    overrides: JSON = {} if samples is None else {"num_samples": samples}
    loaded = [
        task if names_files(task) else task.model_copy(update={"task_dir": None})
        for task in load_tasks(tasks, overrides=overrides)[:first]
    ]
    terms = {
        "dispatch_priority": priority,
        "callback_url": callback_url,
        "early_stop_min_usable_sessions": early_stop,
    }
    with client(server, token) as open_client:
        fresh = open_client.submit_many(loaded, **terms)
    told = [{"task_id": one.task_id, "new": new} for one, new in zip(loaded, fresh, strict=True)]
    if json:
        print_json({"tasks": told})
        return
    console.print(f"{sum(fresh)} tasks submitted, {len(fresh) - sum(fresh)} were there already")
