"""`bridle submit`, `status`, `watch` and `cancel`: clients of a rollout server."""

from __future__ import annotations

from typing import Annotated

import typer

from bridle.cli.terminal import (
    FirstOption,
    JsonOption,
    SamplesOption,
    TasksArgument,
    console,
    notes,
    print_json,
    print_table,
    table,
)
from bridle.client import Client
from bridle.types import JSON

ServerOption = Annotated[
    str, typer.Option("--server", envvar="BRIDLE_SERVER", help="URL of the rollout server.")
]
TokenOption = Annotated[
    str | None,
    typer.Option("--token", envvar="BRIDLE_SERVER_TOKEN", help="Token of the rollout server."),
]

SERVER = "http://127.0.0.1:8080"

COLUMNS = ("task", "owner", "state", "#ended", "#usable", "#of", "#priority", "why")
"""Columns of a table of tasks."""


def client(server: str, token: str | None, *, patience_s: float = 1.0) -> Client:
    """Return a client of the rollout server that fails soon if the server cannot be reached."""
    return Client(server, token=token, patience_s=patience_s)


def row(task: dict[str, object]) -> list[object]:
    """Return a task's status as a row of the table of tasks."""
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
    """Cancel tasks and their sessions; ended sessions stay as they are.

    Exit code 1 if a task is unknown.
    """
    with client(server, token) as open_client:
        unknown = open_client.cancel(*tasks)
    if json:
        print_json({"unknown": unknown})
    else:
        console.print(f"{len(tasks) - len(unknown)} tasks cancelled")
        for name in unknown:
            console.print(f"unknown: {name}", markup=False)
    raise typer.Exit(1 if unknown else 0)


def status(
    task: Annotated[str | None, typer.Argument(help="Task id; default: the whole server.")] = None,
    server: ServerOption = SERVER,
    token: TokenOption = None,
    json: JsonOption = False,
) -> None:
    """Show a server's state, or a task with its sessions."""
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


def _show_server(state: JSON, *, json: bool) -> None:
    if json:
        print_json(state)
        return
    groups = ("tasks", "sessions", "callbacks")
    rows = [[name, label, count] for name in groups for label, count in state[name].items()]
    rows.append(["sessions", "waiting", state["sessions_waiting"]])
    rows.append(["groups", "not acknowledged", state["groups_unacked"]])
    for owner, counts in state.get("owners", {}).items():
        rows += [[f"owner {owner or 'nobody'}", what, count] for what, count in counts.items()]
    console.print(table("rollout server", ("what", "state", "#count"), rows))
    paused = ", paused" if state["paused"] else ""
    version = state["policy"]["version"]
    console.print(
        f"{state['running']} of {state['slots']} slots in use{paused}; policy version {version}"
    )
    if (until := state.get("groups_held_until")) is not None:
        console.print(f"max_version_lag holds new groups back until policy version {until}")


def submit(  # noqa: PLR0913 - one parameter per flag
    tasks: TasksArgument,
    server: ServerOption = SERVER,
    token: TokenOption = None,
    samples: SamplesOption = None,
    first: FirstOption = None,
    priority: Annotated[
        int, typer.Option(min=0, max=100, help="Tasks of higher priority start first.")
    ] = 0,
    callback_url: Annotated[
        str | None, typer.Option(help="URL that gets each session's result.")
    ] = None,
    early_stop: Annotated[
        int | None, typer.Option(min=1, help="End a group after so many usable sessions.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Submit tasks; a task that was submitted before is not run again.

    Files that tasks name must be in folders that the server allows (`serve --allow-path`).
    """
    from bridle.datasets.jsonl import load_tasks
    from bridle.server.settings import names_files

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
    if json:
        pairs = zip(loaded, fresh, strict=True)
        print_json({"tasks": [{"task_id": task.task_id, "new": new} for task, new in pairs]})
        return
    console.print(f"{sum(fresh)} tasks submitted, {len(fresh) - sum(fresh)} were known already")


RESTART_S = 300.0
"""Time for which a watched server may be unreachable."""

OPEN_STATES = ("queued", "running", "ending")


def watch(
    tasks: Annotated[
        list[str] | None, typer.Argument(help="Task ids; default: all that have not ended.")
    ] = None,
    server: ServerOption = SERVER,
    token: TokenOption = None,
    json: JsonOption = False,
) -> None:
    """Wait until tasks have ended and show their results.

    Exit code 0 if all were completed, else 1.
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
