"""`bridle harness list|check|prune`: which agents can be run, whether one works, what to remove."""

from __future__ import annotations

from typing import Annotated

import typer

from bridle.cli.output import console, print_json, table
from bridle.types import JSON

app = typer.Typer(help="The harnesses that Bridle can run.", no_args_is_help=True)


@app.command("list")
def list_harnesses(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the harnesses: pinned version, dialects (the default first), whether installed here."""
    from bridle.harnesses import ANY_PROGRAM, HARNESSES, dialects_of, open_harness
    from bridle.harnesses.bundles import bundles_dir, installed

    rows: list[JSON] = []
    for name in sorted(HARNESSES):
        version, needs_none = open_harness(name).version, name in ANY_PROGRAM
        rows.append(
            {
                "harness": name,
                "version": None if needs_none else version,
                "dialects": [str(dialect) for dialect in dialects_of(name)],
                "installed": needs_none or installed(name, version, bundles_dir()) is not None,
            }
        )
    if json:
        print_json(rows)
        return
    shown = (
        (row["harness"], row["version"] or "-", ", ".join(row["dialects"]), _yes(row["installed"]))
        for row in rows
    )
    console.print(table("harnesses", ("harness", "version", "dialects", "installed"), shown))


def _yes(value: bool) -> str:
    return "yes" if value else "no"


@app.command()
def prune(
    unused_days: Annotated[
        float, typer.Option(min=0, help="Remove what was not used for so many days.")
    ] = 14,
    most_gb: Annotated[
        float | None, typer.Option(min=0, help="Then the longest unused, down to this size.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Remove installed harnesses that nobody uses; one that a running Bridle uses stays."""
    from bridle.harnesses.bundles import DAY_S, bundles_dir
    from bridle.harnesses.bundles import prune as remove

    most_mb = None if most_gb is None else int(most_gb * 1024)
    pruned = remove(bundles_dir(), unused_s=unused_days * DAY_S, most_mb=most_mb, dry_run=dry_run)
    rows = [{"bundle": p.folder.name, "size_mb": p.size_mb, "why": p.why} for p in pruned]
    if json:
        print_json(rows)
        return
    gone = "would be removed" if dry_run else "removed"
    shown = ((row["bundle"], str(row["size_mb"]), row["why"]) for row in rows)
    total = sum(p.size_mb for p in pruned)
    title = f"{gone}: {len(rows)} bundles, {total} MB"
    console.print(table(title, ("bundle", "MB", "why"), shown))


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="Short name of the harness.")],
    version: Annotated[
        str | None, typer.Option(help="Another version than the pinned one, without its lock.")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Fork the session too, and name what varies.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Install a harness, let it do one piece of work against the scripted engine, and report.

    The work is one tool call (one edit where the program has no tools).
    """
    from bridle.cli.check import check_harness

    report = check_harness(name, version, replay=replay)
    if json:
        print_json(report)
    else:
        console.print(table(f"harness {name}", ("what", "result"), report.items()))
    raise typer.Exit(0 if report["works"] else 1)
