"""`bridle fork`: more samples of a captured session from one of its turns on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.gateway import ConcurrencyOption, ConfigOption, EnginesOption, TokenizerOption
from bridle.cli.output import check_folder, console, print_json
from bridle.errors import ConfigError

if TYPE_CHECKING:
    from bridle.cli.config import FileConfig
    from bridle.config import Task


def fork(  # noqa: PLR0913 - one parameter per flag
    session: Annotated[str, typer.Argument(help="Session id, or its beginning.")],
    at: Annotated[
        int, typer.Option(min=1, help="How many captured replies are given again, without a model.")
    ],
    run: Annotated[
        Path, typer.Option(help="Run folder, or the folder of runs, that has it.")
    ] = Path("runs"),
    samples: Annotated[int, typer.Option(min=1, help="Sessions that begin like it.")] = 1,
    engine: EnginesOption = None,
    config: ConfigOption = None,
    tokenizer: TokenizerOption = None,
    concurrency: ConcurrencyOption = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/<date> if not given.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Sample a captured session again from one of its turns on.

    The task's harness starts anew in a fresh runtime. Its first --at calls get the captured
    replies, as long as each prompt is the captured one; then the model samples. Without --engine
    the run's own engine is used. Ends with code 0 if every fork was exact, or equivalent (its
    prompts differed in named texts only, such as a random id), else 1.
    """
    from bridle.api import new_run_folder
    from bridle.cli.batch import Batch, run_batch

    task, base = forked_task(session, run, at, samples)
    folder = check_folder(out or new_run_folder(Path("runs")), "--out")
    setup = setup_of(base, config, engine, tokenizer)
    lines = run_batch(Batch([task], setup, None, folder, concurrency))
    verdicts = Counter(line["fork"]["verdict"] for line in lines if line["fork"])
    exact, equivalent = verdicts["exact"], verdicts["equivalent"]
    if json:
        counts = {"exact": exact, "equivalent": equivalent}
        print_json({"folder": str(folder), **counts, "sessions": lines})
    else:
        from bridle.cli.run import report

        report(lines, folder, json=False)
        names = sorted({name for line in lines for name in (line["fork"] or {}).get("noise", ())})
        noise = f", {equivalent} but for {', '.join(names)}" if equivalent else ""
        console.print(f"{exact} of {len(lines)} sessions forked exactly at call {at}{noise}")
    raise typer.Exit(0 if exact + equivalent == len(lines) else 1)


def forked_task(session: str, run: Path, at: int, samples: int) -> tuple[Task, Path]:
    """Return the task of forks of a session, and the run folder that holds the session.

    `ConfigError` if the run does not hold the session's task.
    """
    from bridle.cli.captured import find_session, tasks_of
    from bridle.config import ForkSpec

    path, capture = find_session(session, run)
    base, task_id = path.parent, capture.session.task_id
    tasks = tasks_of(base)
    if task_id not in tasks:
        raise ConfigError(
            f"{base} does not hold the task {task_id!r}: only sessions of bridle run can be forked"
        )
    spec = ForkSpec(capture=str(path.resolve()), session=capture.session.session_id, at=at)
    return tasks[task_id].model_copy(update={"num_samples": samples, "fork": spec}), base


def setup_of(
    base: Path, config: Path | None, engines: list[str] | None, tokenizer: str | None
) -> FileConfig:
    """Return the config that was given; without an engine, that of the run."""
    from bridle.cli.captured import config_of
    from bridle.cli.config import load_config

    facts = config_of(base)
    gateway = {name: facts.get(name) for name in ("stream", "prompt")}
    if config is None and not engines:
        engines = facts.get("engines")
        tokenizer = tokenizer or facts.get("tokenizer")
    return load_config(config, engines=engines or (), tokenizer=tokenizer, gateway=gateway)
