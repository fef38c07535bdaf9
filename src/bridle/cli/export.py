"""`bridle rebuild`, `export` and `generate`: trajectory files and data sets from captured sessions.

Each call of `generate` runs the sessions that are still missing as a run in `OUT/rounds/NNN`, then
writes `OUT/data.*` and `OUT/statistics.json` from all rounds. A call that was interrupted or killed
is therefore resumed by the same command: ended sessions are not run again, those that failed
because of the system are.
"""

from __future__ import annotations

import json as json_text
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from bridle.bridges.examples import (
    Example,
    Rules,
    Survey,
    select_examples,
    sibling_pairs,
    survey,
    write_pairs,
    write_sft,
)
from bridle.bridges.parquet import TrajectoryWriter, rebuild_all
from bridle.bridges.traces import write_atif
from bridle.capture.records import SessionCapture
from bridle.capture.sqlite import SqliteReader
from bridle.cli.config import FileConfig
from bridle.cli.run import BatchRun, load_task_set, run_batch, task_overrides
from bridle.cli.terminal import (
    ConcurrencyOption,
    EngineOptions,
    FirstOption,
    HarnessOption,
    JsonOption,
    RuntimeOption,
    UntokenizedOption,
    check_file,
    check_folder,
    console,
    notes,
    number,
    print_json,
    progress,
    table,
    with_option_groups,
)
from bridle.config import BuilderSpec, Task
from bridle.errors import ConfigError
from bridle.folders import private_file, private_folder
from bridle.node.results import (
    CAPTURE,
    TRAJECTORIES,
    TRAJECTORIES_PARQUET,
    capture_files,
    sessions,
)
from bridle.trajectory import BUILDERS
from bridle.trajectory import rebuild as rebuilt_of
from bridle.trajectory.result import trajectory_bytes
from bridle.trajectory.sample import Trajectory
from bridle.trajectory.scores import Attempted
from bridle.types import JSON, SessionStatus


def rebuild(
    target: Annotated[Path, typer.Argument(help="Run folder or capture file.")],
    builder: Annotated[
        str | None,
        typer.Option(
            help="per_request, prefix_merging, tree or module:function; default: the run's."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; default: RUN/rebuilt.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: one per core.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Build the trajectories of a run again from its capture.

    Works for finished, running and killed runs. For a finished run and the same builder the files
    are identical to those of the run.
    """
    if builder is not None and builder not in BUILDERS and ":" not in builder:
        raise ConfigError(f"unknown builder {builder!r}; known: {', '.join(sorted(BUILDERS))}")
    spec = None if builder is None else BuilderSpec(strategy=builder)
    base = target if target.is_dir() else target.parent
    files = capture_files(target)
    folder = check_folder(out or base / "rebuilt", "--out")
    private_folder(folder)
    totals = _write_rebuilt(files, folder, spec, workers)
    if json:
        print_json({"folder": str(folder), **totals})
        return
    console.print(
        "{sessions} sessions, {exchanges} exchanges -> {traces} traces; "
        "{captured} tokens captured, {trained} trained".format(**totals)
    )
    written = f"written: {folder / TRAJECTORIES}, {folder / TRAJECTORIES_PARQUET}"
    console.print(written, soft_wrap=True)


def _write_rebuilt(
    paths: list[Path], folder: Path, spec: BuilderSpec | None, workers: int | None
) -> dict[str, int]:
    """Write the trajectories of capture files into `folder`; return counts."""
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


ROUNDS = "rounds"
"""Subfolder of a data set with the run folders of `bridle generate`."""


class ExportFormat(StrEnum):
    """A file format of `bridle export`."""

    PARQUET = "parquet"
    SFT = "sft"
    JSONL = "jsonl"
    PAIRS = "pairs"
    ATIF = "atif"


@dataclass(frozen=True, slots=True)
class FilterOptions:
    """Flags that select sessions and examples."""

    min_reward: Annotated[
        float | None, typer.Option(help="Leave out lower and unknown rewards; sft: 1.")
    ] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Leave out longer examples.")] = None
    turns: Annotated[
        str | None, typer.Option(help="Turns of the model, as MIN:MAX; either may be missing.")
    ] = None
    finish: Annotated[
        list[str] | None,
        typer.Option(help="Finish reason of the last turn to accept; repeatable."),
    ] = None
    max_repetition: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Leave out examples that repeat more (runs of 8 sampled tokens)."
        ),
    ] = None
    unique: Annotated[
        bool, typer.Option("--unique", help="Take one of a task's examples with the same text.")
    ] = False
    keep: Annotated[
        int | None, typer.Option(min=1, help="Take at most the best N sessions of a task.")
    ] = None
    margin: Annotated[
        float, typer.Option(min=0, help="pairs: least difference between two rewards.")
    ] = 0.01
    pairs: Annotated[int, typer.Option(min=1, help="pairs: most pairs of a task.")] = 1

    def rules(self, form: ExportFormat, *, rejected: bool = False) -> Rules:
        """Return the rules that these flags describe. `ConfigError` for turns that are not
        MIN:MAX.
        """
        names = ("min_reward", "max_tokens", "max_repetition", "unique", "keep")
        given = {name: getattr(self, name) for name in names} | {"rejected": rejected or None}
        values: JSON = {name: value for name, value in given.items() if value is not None}
        if form is ExportFormat.SFT:
            values.setdefault("min_reward", 1.0)
        if self.turns is not None:
            values |= _turn_limits(self.turns)
        if self.finish:
            values["finish"] = tuple(self.finish)
        rules = Rules.model_validate(values)
        is_unfiltered = rules == Rules(rejected=rules.rejected)
        return _all() if form in WHOLE_SESSIONS and is_unfiltered else rules


WHOLE_SESSIONS = (ExportFormat.PARQUET, ExportFormat.JSONL)
"""Formats that hold every session unless a filter is given."""


def _turn_limits(turns: str) -> JSON:
    least, colon, most = turns.partition(":")
    try:
        limits = {"min_turns": int(least)} if least else {}
        limits |= {"max_turns": int(most)} if most else {}
    except ValueError:
        colon = ""
    if not colon:
        raise ConfigError(f"--turns {turns!r} is not MIN:MAX; give for example 2:10, 2: or :10")
    if least and most and int(least) > int(most):
        raise ConfigError(
            f"--turns {turns!r}: MIN is greater than MAX, so no session would be left"
        )
    return limits


@with_option_groups
def export(
    target: Annotated[
        Path, typer.Argument(help="Run folder, capture file, or folder of `bridle generate`.")
    ],
    form: Annotated[ExportFormat, typer.Option("--format", help="Format of the file.")],
    out: Annotated[Path, typer.Option(help="File to write, which does not exist yet.")],
    filters: FilterOptions,
    rejected: Annotated[
        bool, typer.Option("--rejected", help="Include replies that the harness rejected.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Write the trajectories of a run as Parquet, SFT examples, pairs, ATIF or JSON lines.

    sft, pairs and atif contain COMPLETED sessions only. parquet and jsonl contain every session,
    unless a filter is given.
    """
    rules = filters.rules(form, rejected=rejected)
    if check_file(out, "--out").is_file():
        raise ConfigError(f"--out {out} exists already; name another file, or remove it first")
    report = write_export(target, form, out, rules, filters)
    if json:
        print_json(report)
    else:
        show_report(report)


def _all() -> Rules:
    return Rules(statuses=tuple(SessionStatus), rejected=True)


def write_export(
    target: Path, form: ExportFormat, out: Path, rules: Rules, filters: FilterOptions
) -> JSON:
    """Write the sessions of a run that the rules accept; return counts and statistics."""
    found = survey(_rebuilt(target), rules)
    report: JSON = {"sessions": found.json()["attempted"], "file": str(out), "format": form.value}
    out.parent.mkdir(parents=True, exist_ok=True)
    report |= _write(target, form, out, found, rules, filters)
    return report | {"statistics": found.json()}


def captures_of(target: Path, only: Container[str] | None = None) -> Iterator[SessionCapture]:
    """Yield the sessions of a run, or of all rounds of a data set.

    `only` = ids of the sessions to read; `None` = all. `ConfigError` if there is no run.
    """
    rounds = sorted(file.parent for file in (target / ROUNDS).glob(f"*/{CAPTURE}"))
    for folder in rounds or [target]:
        for capture in sessions(folder):
            if only is None or capture.session.session_id in only:
                yield capture


def _rebuilt(
    target: Path, found: Survey | None = None
) -> Iterator[tuple[SessionCapture, Trajectory]]:
    only = None if found is None else found.accepted
    return ((capture, rebuilt_of(capture)) for capture in captures_of(target, only))


def _write(
    target: Path, form: ExportFormat, out: Path, found: Survey, rules: Rules, filters: FilterOptions
) -> JSON:
    if form in WHOLE_SESSIONS:
        return _write_whole(form, out, _rebuilt(target, None if rules == _all() else found))
    taken = select_examples(_rebuilt(target, found), found.accepted)
    if form is ExportFormat.ATIF:
        return {"documents": write_atif(out, taken)}
    examples = (example for _, _, own in taken for example in own)
    if form is ExportFormat.PAIRS:
        siblings: list[JSON] = []

        def offered() -> Iterator[Example]:
            for capture, _, own in taken:
                siblings.extend(sibling_pairs(capture))
                yield from own

        counts = write_pairs(
            out, offered(), margin=filters.margin, per_task=filters.pairs, siblings=siblings
        )
        return {"pairs": counts.pairs, "left_out": dict(counts.left_out)}
    written = write_sft(out, examples)
    texts = {"texts": written.texts} if written.texts else {}
    rejected = sum(found.rejected.values())
    return {"examples": written.examples, "rejected": rejected, **texts}


def _write_whole(
    form: ExportFormat, out: Path, rebuilt: Iterator[tuple[SessionCapture, Trajectory]]
) -> JSON:
    traces = 0
    if form is ExportFormat.PARQUET:
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
    """Print the counts and the statistics of an export."""
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
    title = f"{counts['tasks_accepted']} of {counts['tasks']} tasks have accepted sessions"
    console.print(table(title, COLUMNS, rows))
    for name in ("rejected", "examples_left_out"):
        if counts[name]:
            reasons = ", ".join(f"{reason} {count}" for reason, count in counts[name].items())
            console.print(f"{name.replace('_', ' ')}: {reasons}")
    written = [f"{name}: {value}" for name, value in report.items() if name != "statistics"]
    console.print(", ".join(written), soft_wrap=True)


STATISTICS = "statistics.json"


@with_option_groups
def generate(  # noqa: PLR0913 - one parameter per flag
    tasks: Annotated[
        Path, typer.Argument(help="Task file, Harbor task folder, or a folder of them.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of the data set; an earlier call's is resumed.")
    ],
    engines: EngineOptions,
    filters: FilterOptions,
    allow_untokenized: UntokenizedOption = None,
    form: Annotated[
        ExportFormat, typer.Option("--format", help="Format of the file.")
    ] = ExportFormat.SFT,
    harness: HarnessOption = None,
    runtime: RuntimeOption = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Sessions per task; with --keep the most of them.")
    ] = 1,
    first: FirstOption = None,
    concurrency: ConcurrencyOption = None,
    json: JsonOption = False,
) -> None:
    """Make a data set: run tasks, filter their sessions and write them; resumes an earlier call.

    With --keep N a task is run until N of its sessions are accepted, at most --samples times. Exit
    code 1 if no session was accepted.
    """
    rules = filters.rules(form)
    check_folder(out, "--out")
    loaded = load_task_set(tasks, task_overrides(harness=harness, runtime=runtime))[:first]
    gateway = {"allow_untokenized": allow_untokenized}
    setup = engines.load(gateway=gateway)
    rounds = _run_rounds(loaded, setup, out, rules, samples, concurrency)
    data = out / ("data.parquet" if form is ExportFormat.PARQUET else "data.jsonl")
    report = write_export(out, form, data, rules, filters)
    report["rounds"] = rounds
    (out / STATISTICS).write_text(json_text.dumps(report["statistics"], indent=2) + "\n")
    if json:
        print_json(report)
    else:
        show_report(report)
    raise typer.Exit(0 if report["statistics"]["accepted"] else 1)


def _run_rounds(
    tasks: Sequence[Task],
    setup: FileConfig,
    out: Path,
    rules: Rules,
    samples: int,
    concurrency: int | None,
) -> int:
    """Run the missing sessions, round after round; return the number of rounds so far."""
    number = len(list((out / ROUNDS).glob("*")))
    before: Counter[str] | None = None
    while True:
        attempts, accepted = _counts(out, rules)
        wanted = _missing(tasks, rules, samples, attempts, accepted)
        if wanted and attempts == before:
            # The next call retries failures of the system; this one does not loop for ever.
            notes.print(f"{len(wanted)} tasks have too few attempts; run the command again")
        if not wanted or attempts == before:
            return number
        before = attempts
        folder = out / ROUNDS / f"{number:03d}"
        run_batch(BatchRun(wanted, setup, folder, concurrency, f"round {number}"))
        number += 1


def _missing(
    tasks: Sequence[Task],
    rules: Rules,
    samples: int,
    attempts: Counter[str],
    accepted: Counter[str],
) -> list[Task]:
    """Return the tasks that need more sessions, with their number as `num_samples`."""
    wanted = []
    for task in tasks:
        left = samples - attempts[task.task_id]
        if rules.keep is not None:
            left = min(left, rules.keep - accepted[task.task_id])
        if left > 0:
            wanted.append(task.model_copy(update={"num_samples": left}))
    return wanted


def _counts(out: Path, rules: Rules) -> tuple[Counter[str], Counter[str]]:
    """Count each task's attempts (failures of the system left out) and its accepted sessions."""
    attempts: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    if not any((out / ROUNDS).glob("*/capture.sqlite")):
        return attempts, accepted
    task_of: dict[str, str] = {}
    for capture in captures_of(out):
        task_id, outcome = capture.session.task_id or "", capture.outcome
        task_of[capture.session.session_id] = task_id
        if outcome is not None:
            attempts[task_id] += (
                Attempted("", "", task_id, outcome.status, outcome.cause, outcome.reward).is_attempt
                or outcome.status == "COMPLETED"
            )
    if rules.keep is not None:
        found = survey(((one, rebuilt_of(one)) for one in captures_of(out)), rules)
        accepted.update(task_of[session_id] for session_id in found.accepted)
    return attempts, accepted
