"""`bridle rebuild`: trajectories again from capture, with the same or another builder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.output import console, print_json
from bridle.errors import ConfigError


def rebuild(
    target: Annotated[Path, typer.Argument(help="Run folder or capture file.")],
    builder: Annotated[
        str | None, typer.Option(help="per_request or prefix_merging; as it was run if not given.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; RUN/rebuilt if not given.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Build the trajectories of a run again from what was captured.

    Works on finished runs, running ones, and those whose process was killed; what is written is,
    for a finished run and the same builder, byte for byte what the run wrote.
    """
    from bridle.bridges.parquet import TrajectoryWriter
    from bridle.cli.captured import sessions
    from bridle.config import BuilderSpec
    from bridle.lifecycle.run_folder import TRAJECTORIES, TRAJECTORIES_PARQUET
    from bridle.trajectory import BUILDERS
    from bridle.trajectory import rebuild as build_again
    from bridle.trajectory.result import trajectory_bytes

    if builder is not None and builder not in BUILDERS:
        raise ConfigError(f"unknown builder {builder!r}; known: {', '.join(sorted(BUILDERS))}")
    spec = None if builder is None else BuilderSpec(strategy=builder)
    base = target if target.is_dir() else target.parent
    folder = out or base / "rebuilt"
    folder.mkdir(parents=True, exist_ok=True)
    totals = {"sessions": 0, "exchanges": 0, "traces": 0, "captured": 0, "trained": 0}
    lines = folder / f"{TRAJECTORIES}.part"
    with lines.open("wb") as file, TrajectoryWriter(folder / TRAJECTORIES_PARQUET) as parquet:
        for capture in sessions(target):
            trajectory = build_again(capture, builder=spec)
            file.write(trajectory_bytes(trajectory) + b"\n")
            parquet.write(trajectory)
            stats = trajectory.metadata["stats"]
            totals["sessions"] += 1
            totals["exchanges"] += stats["exchanges"]
            totals["traces"] += stats["traces"]
            totals["captured"] += stats["tokens_captured"]
            totals["trained"] += stats["tokens_trained"]
    lines.replace(folder / TRAJECTORIES)
    if json:
        print_json({"folder": str(folder), **totals})
        return
    console.print(
        "{sessions} sessions, {exchanges} exchanges -> {traces} traces; "
        "{captured} tokens captured, {trained} trained".format(**totals)
    )
    console.print(f"written: {folder / TRAJECTORIES}, {folder / TRAJECTORIES_PARQUET}")
