"""`bridle export`: trajectories in the forms that others read."""

from __future__ import annotations

from collections.abc import Container, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from bridle.cli.output import check_file, console, number, print_json, table
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.bridges.examples import Example
    from bridle.bridges.selection import Rules, Survey
    from bridle.capture.records import SessionCapture
    from bridle.trajectory.sample import Trajectory


ROUNDS = "rounds"
"""Folder of the run folders of `bridle generate`, in that of its data set."""


class Format(StrEnum):
    """A format that can be written."""

    PARQUET = "parquet"
    SFT = "sft"
    JSONL = "jsonl"
    PAIRS = "pairs"
    ATIF = "atif"


MinRewardOption: TypeAlias = Annotated[
    float | None, typer.Option(help="Leave out lower rewards, and unknown ones; sft: 1.")
]
MaxTokensOption: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Leave out longer examples.")
]
TurnsOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Turns of the model, as MIN:MAX; either may be missing.")
]
FinishOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="Finish reason of the last turn that will do; may be repeated."),
]
RepetitionOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, help="Leave out examples of which more repeats (runs of 8 sampled tokens)."
    ),
]
UniqueOption: TypeAlias = Annotated[
    bool, typer.Option("--unique", help="Of a task's examples that say the same, take one.")
]
RejectedOption: TypeAlias = Annotated[
    bool,
    typer.Option("--rejected", help="Take replies too that the harness did not go on from."),
]
KeepOption: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Take at most the best N sessions of a task.")
]
MarginOption: TypeAlias = Annotated[
    float, typer.Option(min=0, help="pairs: least difference between two rewards.")
]
PairsOption: TypeAlias = Annotated[int, typer.Option(min=1, help="pairs: most pairs of a task.")]


def export(  # noqa: PLR0913 - one parameter per flag
    target: Annotated[
        Path, typer.Argument(help="Run folder, capture file, or folder of `bridle generate`.")
    ],
    form: Annotated[Format, typer.Option("--format", help="What to write.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    min_reward: MinRewardOption = None,
    max_tokens: MaxTokensOption = None,
    turns: TurnsOption = None,
    finish: FinishOption = None,
    max_repetition: RepetitionOption = None,
    unique: UniqueOption = False,
    keep: KeepOption = None,
    rejected: RejectedOption = False,
    margin: MarginOption = 0.01,
    pairs: PairsOption = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the trajectories of a run as Parquet, SFT examples, pairs, ATIF or JSON lines.

    sft, pairs and atif take COMPLETED sessions only. parquet and jsonl hold every session, unless a
    filter is given.
    """
    rules = rules_of(
        form,
        min_reward=min_reward,
        max_tokens=max_tokens,
        turns=turns,
        finish=finish,
        max_repetition=max_repetition,
        unique=unique,
        keep=keep,
        rejected=rejected or None,
    )
    check_file(out, "--out")
    report = write_export(target, form, out, rules, margin=margin, pairs=pairs)
    if json:
        print_json(report)
    else:
        show_report(report)


def rules_of(
    form: Format, *, turns: str | None, finish: list[str] | None, **given: float | None
) -> Rules:
    """The rules that flags ask for. `ConfigError` for turns that are not MIN:MAX."""
    from bridle.bridges.selection import Rules
    from bridle.errors import ConfigError

    values: JSON = {name: value for name, value in given.items() if value is not None}
    if form is Format.SFT:
        values.setdefault("min_reward", 1.0)
    if turns is not None:
        least, colon, most = turns.partition(":")
        try:
            values |= {"min_turns": int(least)} if least else {}
            values |= {"max_turns": int(most)} if most else {}
        except ValueError:
            colon = ""
        if not colon:
            raise ConfigError(f"--turns {turns!r} is not MIN:MAX")
    if finish:
        values["finish"] = tuple(finish)
    rules = Rules.model_validate(values)
    whole = form in (Format.PARQUET, Format.JSONL) and rules == Rules(rejected=rules.rejected)
    return _all() if whole else rules


def _all() -> Rules:
    from bridle.bridges.selection import Rules
    from bridle.types import SessionStatus

    return Rules(statuses=tuple(SessionStatus), rejected=True)


def write_export(
    target: Path, form: Format, out: Path, rules: Rules, *, margin: float = 0.01, pairs: int = 1
) -> JSON:
    """Write what the rules take of a run's sessions; counts and statistics."""
    from bridle.bridges.selection import survey

    found = survey(_rebuilt(target), rules)
    report: JSON = {"sessions": found.json()["attempted"], "file": str(out), "format": form.value}
    out.parent.mkdir(parents=True, exist_ok=True)
    report |= _write(target, form, out, found, rules, (margin, pairs))
    return report | {"statistics": found.json()}


def captures_of(target: Path, only: Container[str] | None = None) -> Iterator[SessionCapture]:
    """The sessions of a run, or of all rounds of a data set, read one at a time.

    `only` = the ids of those that are wanted; `None` = all. `ConfigError` if there is no run.
    """
    from bridle.cli.captured import CAPTURE, sessions

    rounds = sorted(file.parent for file in (target / ROUNDS).glob(f"*/{CAPTURE}"))
    for folder in rounds or [target]:
        for capture in sessions(folder):
            if only is None or capture.session.session_id in only:
                yield capture


def _rebuilt(
    target: Path, found: Survey | None = None
) -> Iterator[tuple[SessionCapture, Trajectory]]:
    from bridle.trajectory import rebuild

    only = None if found is None else found.accepted
    return ((capture, rebuild(capture)) for capture in captures_of(target, only))


def _write(
    target: Path, form: Format, out: Path, found: Survey, rules: Rules, pairing: tuple[float, int]
) -> JSON:
    from bridle.bridges.selection import chosen

    if form in (Format.PARQUET, Format.JSONL):
        return _write_whole(form, out, _rebuilt(target, None if rules == _all() else found))
    taken = chosen(_rebuilt(target, found), found.accepted)
    if form is Format.ATIF:
        from bridle.bridges.atif import write_atif

        return {"documents": write_atif(out, taken)}
    examples = (one for _, _, of in taken for one in of)
    if form is Format.PAIRS:
        from bridle.bridges.pairs import sibling_pairs, write_pairs

        siblings: list[JSON] = []

        def offered() -> Iterator[Example]:
            for capture, _, of in taken:
                siblings.extend(sibling_pairs(capture))
                yield from of

        margin, most = pairing
        counts = write_pairs(out, offered(), margin=margin, per_task=most, siblings=siblings)
        return {"pairs": counts.pairs, "left_out": dict(counts.left_out)}
    from bridle.bridges.sft import write_sft

    written = write_sft(out, examples)
    told = {"texts": written.texts} if written.texts else {}
    rejected = sum(found.rejected.values())
    return {"examples": written.examples, "rejected": rejected, **told}


def _write_whole(
    form: Format, out: Path, rebuilt: Iterator[tuple[SessionCapture, Trajectory]]
) -> JSON:
    from bridle.bridges.parquet import TrajectoryWriter
    from bridle.trajectory.result import trajectory_bytes

    traces = 0
    if form is Format.PARQUET:
        with TrajectoryWriter(out) as parquet:
            for _, trajectory in rebuilt:
                parquet.write(trajectory)
                traces += len(trajectory.traces)
        return {"traces": traces}
    part = out.with_name(out.name + ".part")
    with part.open("wb") as file:
        for _, trajectory in rebuilt:
            file.write(trajectory_bytes(trajectory) + b"\n")
    part.replace(out)
    return {}


COLUMNS = ("source", "#accepted", "#attempted", "#turns", "#tokens", "#hours", "#engine s")


def show_report(report: JSON) -> None:
    """Print what was written and the statistics."""
    counts = report["statistics"]
    rows = [
        [
            name,
            str(of["accepted"]),
            str(of["attempted"]),
            number(of["turns_mean"], 1),
            str(of["tokens"]),
            number(of["hours"], 3),
            number(of["engine_s"], 1),
        ]
        for name, of in [*counts["sources"].items(), ("all", counts)]
    ]
    title = f"{counts['tasks_accepted']} of {counts['tasks']} tasks gave something"
    console.print(table(title, COLUMNS, rows))
    for name in ("rejected", "examples_left_out"):
        if counts[name]:
            told = ", ".join(f"{reason} {count}" for reason, count in counts[name].items())
            console.print(f"{name.replace('_', ' ')}: {told}")
    written = [f"{name}: {value}" for name, value in report.items() if name != "statistics"]
    console.print(", ".join(written), soft_wrap=True)
