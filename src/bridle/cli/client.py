"""`bridle submit`, `status`, `watch` and `cancel`: the verbs that talk to a rollout server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.output import console, notes, print_json, print_table, table
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.client import Client
    from bridle.types import JSON


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
    from bridle.server.submission_policy import names_files

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
