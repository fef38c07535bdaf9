"""`bridle export`: trajectories in the forms that others read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.output import console, print_json


class Format(StrEnum):
    """What can be written."""

    PARQUET = "parquet"
    SFT = "sft"
    JSONL = "jsonl"


def export(
    target: Annotated[Path, typer.Argument(help="Run folder or capture file.")],
    form: Annotated[Format, typer.Option("--format", help="What to write.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    min_reward: Annotated[
        float, typer.Option(help="sft: leave out sessions with a lower reward.")
    ] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(help="sft: leave out longer examples.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the trajectories of a run as Parquet, SFT examples or JSON lines."""
    from bridle.bridges.parquet import write_trajectories
    from bridle.bridges.sft import export_sft
    from bridle.cli.captured import sessions
    from bridle.trajectory import rebuild
    from bridle.trajectory.result import trajectory_bytes

    captures = {capture.session.session_id: capture for capture in sessions(target)}
    trajectories = [rebuild(capture) for capture in captures.values()]
    report = {"sessions": len(trajectories), "file": str(out), "format": form.value}
    out.parent.mkdir(parents=True, exist_ok=True)
    match form:
        case Format.PARQUET:
            write_trajectories(out, trajectories)
            report["traces"] = sum(len(t.traces) for t in trajectories)
        case Format.JSONL:
            out.write_bytes(b"".join(trajectory_bytes(t) + b"\n" for t in trajectories))
        case Format.SFT:
            counts = export_sft(
                out, trajectories, min_reward=min_reward, max_tokens=max_tokens, captures=captures
            )
            report |= {"examples": counts.examples, "rejected": counts.rejected}
            report |= {"texts": counts.texts} if counts.texts else {}
    if json:
        print_json(report)
    else:
        console.print(", ".join(f"{name}: {value}" for name, value in report.items()))
