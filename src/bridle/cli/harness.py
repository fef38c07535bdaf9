"""`bridle harness list|check`: which agents can be run, and whether one works here."""

from __future__ import annotations

from typing import Annotated

import typer

from bridle.cli.output import console, print_json, table

app = typer.Typer(help="The harnesses that Bridle can run.", no_args_is_help=True)


@app.command("list")
def list_harnesses(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the harnesses, their pinned versions and their dialects."""
    from bridle.harnesses import HARNESSES, open_harness

    rows = [
        {"harness": name, "version": harness.version, "dialect": str(harness.dialect)}
        for name in sorted(HARNESSES)
        for harness in [open_harness(name)]
    ]
    if json:
        print_json(rows)
        return
    console.print(
        table("harnesses", ("harness", "version", "dialect"), (tuple(r.values()) for r in rows))
    )


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="Short name of the harness.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Install a harness, let it make one tool call against the scripted engine, and report."""
    from bridle.cli.check import check_harness

    report = check_harness(name)
    if json:
        print_json(report)
    else:
        console.print(table(f"harness {name}", ("what", "result"), report.items()))
    raise typer.Exit(0 if report["status"] == "COMPLETED" else 1)
