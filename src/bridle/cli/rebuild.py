"""`bridle rebuild`: trajectories again from capture, with the same or another builder."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.output import check_folder, console, print_json, progress
from bridle.errors import ConfigError
from bridle.folders import private_file, private_folder

if TYPE_CHECKING:
    from bridle.config import BuilderSpec


def rebuild(
    target: Annotated[Path, typer.Argument(help="Run folder or capture file.")],
    builder: Annotated[
        str | None,
        typer.Option(help="per_request, prefix_merging, tree or module:function; default: as run."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; RUN/rebuilt if not given.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; as many as cores if not given.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Build the trajectories of a run again from what was captured.

    Works on finished runs, running ones, and those whose process was killed; what is written is,
    for a finished run and the same builder, byte for byte what the run wrote.
    """
    from bridle.cli.captured import capture_files
    from bridle.config import BuilderSpec
    from bridle.node.run_folder import TRAJECTORIES, TRAJECTORIES_PARQUET
    from bridle.trajectory import BUILDERS

    if builder is not None and builder not in BUILDERS and ":" not in builder:
        raise ConfigError(f"unknown builder {builder!r}; known: {', '.join(sorted(BUILDERS))}")
    spec = None if builder is None else BuilderSpec(strategy=builder)
    base = target if target.is_dir() else target.parent
    files = capture_files(target)
    folder = check_folder(out or base / "rebuilt", "--out")
    private_folder(folder)
    totals = _write(files, folder, spec, workers)
    if json:
        print_json({"folder": str(folder), **totals})
        return
    console.print(
        "{sessions} sessions, {exchanges} exchanges -> {traces} traces; "
        "{captured} tokens captured, {trained} trained".format(**totals)
    )
    written = f"written: {folder / TRAJECTORIES}, {folder / TRAJECTORIES_PARQUET}"
    console.print(written, soft_wrap=True)


def _write(
    paths: list[Path], folder: Path, spec: BuilderSpec | None, workers: int | None
) -> dict[str, int]:
    """Write the trajectories of the sessions of capture files into `folder`, and count them."""
    from bridle.bridges.parquet import TrajectoryWriter
    from bridle.bridges.rebuild import rebuild_all
    from bridle.capture.sqlite import SqliteReader
    from bridle.node.run_folder import TRAJECTORIES, TRAJECTORIES_PARQUET

    names: dict[Path, list[str]] = {}
    for path in paths:
        with SqliteReader(path) as reader:
            names[path] = [one.session_id for one in reader.sessions() if not one.is_aside]
    totals = {"sessions": 0, "exchanges": 0, "traces": 0, "captured": 0, "trained": 0}
    lines = folder / f"{TRAJECTORIES}.part"
    with (
        progress() as shown,
        private_file(lines).open("wb") as file,
        TrajectoryWriter(folder / TRAJECTORIES_PARQUET) as parquet,
    ):
        task = shown.add_task("rebuild", total=sum(map(len, names.values())), note="")
        every = (rebuild_all(path, ids, spec, workers=workers) for path, ids in names.items())
        for rebuilt in chain.from_iterable(every):
            file.write(rebuilt.line + b"\n")
            parquet.add(rebuilt.rows)
            totals["sessions"] += 1
            totals["exchanges"] += rebuilt.stats["exchanges"]
            totals["traces"] += rebuilt.stats["traces"]
            totals["captured"] += rebuilt.stats["tokens_captured"]
            totals["trained"] += rebuilt.stats["tokens_trained"]
            shown.advance(task)
    lines.replace(folder / TRAJECTORIES)
    return totals
