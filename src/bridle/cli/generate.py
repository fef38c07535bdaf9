"""`bridle generate`: a data set from tasks in one command: run, filter, export, and go on later.

Each call plays what is still wanting as a run of its own, in `OUT/rounds/NNN`, and writes
`OUT/data.*` and `OUT/statistics.json` anew from all rounds. So a call that was stopped, or killed,
is gone on with by the same command: sessions that have ended are not run again, those that failed
on our side are.
"""

from __future__ import annotations

import json as json_text
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.export import (
    ROUNDS,
    FinishOption,
    Format,
    KeepOption,
    MarginOption,
    MaxTokensOption,
    MinRewardOption,
    PairsOption,
    RepetitionOption,
    TurnsOption,
    UniqueOption,
    captures_of,
    rules_of,
    show_report,
    write_export,
)
from bridle.cli.gateway import (
    ConcurrencyOption,
    ConfigOption,
    EnginesOption,
    HarnessOption,
    TokenizerOption,
    UntokenizedOption,
)
from bridle.cli.output import check_folder, notes, print_json
from bridle.cli.run import RuntimeOption
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.bridges.selection import Rules
    from bridle.cli.config import FileConfig
    from bridle.config import Task

SUFFIX = {Format.PARQUET: "parquet"}
STATISTICS = "statistics.json"


def generate(  # noqa: PLR0913 - one parameter per flag
    tasks: Annotated[
        Path, typer.Argument(help="Task file, Harbor task folder, or a folder of them.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the data set; may hold an earlier call's.")],
    engine: EnginesOption = None,
    config: ConfigOption = None,
    tokenizer: TokenizerOption = None,
    allow_untokenized: UntokenizedOption = None,
    form: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.SFT,
    harness: HarnessOption = None,
    runtime: RuntimeOption = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Attempts at each task; with --keep the most of them.")
    ] = 1,
    first: Annotated[int | None, typer.Option(min=1, help="Only the first N tasks.")] = None,
    concurrency: ConcurrencyOption = None,
    min_reward: MinRewardOption = None,
    max_tokens: MaxTokensOption = None,
    turns: TurnsOption = None,
    finish: FinishOption = None,
    max_repetition: RepetitionOption = None,
    unique: UniqueOption = False,
    keep: KeepOption = None,
    margin: MarginOption = 0.01,
    pairs: PairsOption = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a data set: run tasks, filter what came of them, and write it; goes on where it stopped.

    With --keep N a task is tried until N of its sessions are accepted, at most --samples times.
    Ends with code 1 if nothing was accepted.
    """
    from bridle.cli.config import load_config

    rules = rules_of(
        form,
        min_reward=min_reward,
        max_tokens=max_tokens,
        turns=turns,
        finish=finish,
        max_repetition=max_repetition,
        unique=unique,
        keep=keep,
    )
    check_folder(out, "--out")
    loaded = _load(tasks, harness, runtime)[:first]
    gateway = {"allow_untokenized": allow_untokenized}
    setup = load_config(config, engines=engine or (), tokenizer=tokenizer, gateway=gateway)
    rounds = _play(loaded, setup, out, rules, samples, concurrency)
    data = out / f"data.{SUFFIX.get(form, 'jsonl')}"
    report = write_export(out, form, data, rules, margin=margin, pairs=pairs)
    report["rounds"] = rounds
    (out / STATISTICS).write_text(json_text.dumps(report["statistics"], indent=2) + "\n")
    if json:
        print_json(report)
    else:
        show_report(report)
    raise typer.Exit(0 if report["statistics"]["accepted"] else 1)


def _load(path: Path, harness: str | None, runtime: str | None) -> list[Task]:
    """The tasks of a path, which know the name of their set."""
    from bridle.datasets.jsonl import load_tasks

    overrides: JSON = {}
    if harness is not None:
        overrides["agent"] = {"harness": harness, "command": None, "import_path": None}
    if runtime is not None:
        overrides["runtime"] = {"backend": runtime}
    named = {"task_set": path.resolve().stem}
    return [
        task.model_copy(update={"metadata": {**named, **task.metadata}})
        for task in load_tasks(path, overrides=overrides)
    ]


def _play(
    tasks: Sequence[Task],
    setup: FileConfig,
    out: Path,
    rules: Rules,
    samples: int,
    concurrency: int | None,
) -> int:
    """Play what is wanting, round after round; how many rounds there are now."""
    from bridle.cli.batch import Batch, run_batch

    number = len(list((out / ROUNDS).glob("*")))
    before: Counter[str] | None = None
    while True:
        attempts, accepted = _standing(out, rules)
        wanted = _wanting(tasks, rules, samples, attempts, accepted)
        if wanted and attempts == before:
            # What fails on our side is tried once more by the next call, not for ever.
            notes.print(f"{len(wanted)} tasks have fewer attempts than asked for; call again")
        if not wanted or attempts == before:
            return number
        before = attempts
        folder = out / ROUNDS / f"{number:03d}"
        run_batch(Batch(wanted, setup, None, folder, concurrency, f"round {number}"))
        number += 1


def _wanting(
    tasks: Sequence[Task],
    rules: Rules,
    samples: int,
    attempts: Counter[str],
    accepted: Counter[str],
) -> list[Task]:
    """The tasks that want more sessions, each with their number."""
    wanted = []
    for task in tasks:
        left = samples - attempts[task.task_id]
        if rules.keep is not None:
            left = min(left, rules.keep - accepted[task.task_id])
        if left > 0:
            wanted.append(task.model_copy(update={"num_samples": left}))
    return wanted


def _standing(out: Path, rules: Rules) -> tuple[Counter[str], Counter[str]]:
    """Per task: sessions that ended by the agent's own doing, and those that are accepted."""
    from bridle.bridges.selection import survey
    from bridle.trajectory import rebuild
    from bridle.trajectory.scores import Attempted

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
        found = survey(((one, rebuild(one)) for one in captures_of(out)), rules)
        accepted.update(task_of[session_id] for session_id in found.accepted)
    return attempts, accepted
