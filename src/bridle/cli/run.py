"""`bridle run` and `bridle fork`, and the batches of all verbs: everything in one process.

A batch of tasks (`run`, `fork`, `demo`, `harness check` and `tasks verify` have one) runs engine,
gateway, node and harnesses, with progress. `preflight` checks configuration, ports and programs
before an engine is called or a sandbox is created. However the batch ends (last session, Ctrl-C,
SIGTERM, a closed terminal, failure), the run folder is complete: capture, trajectories and summary.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.progress import Progress, TaskID

from bridle import telemetry
from bridle.api import Gateway, new_run_folder
from bridle.cli.config import FileConfig, load_config
from bridle.cli.process import long_running, run_to_end
from bridle.cli.show import COLUMNS, print_scores, row
from bridle.cli.terminal import (
    ConcurrencyOption,
    EngineOptions,
    FirstOption,
    HarnessOption,
    JsonOption,
    PromptOption,
    RuntimeOption,
    SamplesOption,
    StreamOption,
    TasksArgument,
    TelemetryOption,
    UntokenizedOption,
    VerifiedOption,
    check_folder,
    console,
    notes,
    print_json,
    print_table,
    progress,
    with_option_groups,
)
from bridle.config import AUTO, ForkSpec, Task, assets_dir, read_text
from bridle.datasets.harbor import SET
from bridle.datasets.jsonl import load_tasks, require_verified, with_template
from bridle.errors import ConfigError, EngineError, Problems, StoreError, cannot_listen
from bridle.folders import FULL, check_room
from bridle.harnesses import CHECKS
from bridle.node.base import Event, Installing, SessionChanged
from bridle.node.local import LocalExecutor, LocalNode, NodeSettings, check
from bridle.node.results import CAPTURE, RUN, TRAJECTORIES, config_of, find_session, tasks_of
from bridle.node.session import FINAL, read_replay
from bridle.runtimes import check_machine, default_backend, resolve_auto
from bridle.runtimes.local import PATH, search_path
from bridle.trajectory.scores import from_summaries, scores_of
from bridle.types import JSON, SessionStatus, is_server_url, without_user_info


@dataclass(frozen=True, slots=True)
class BatchRun:
    """A batch to run: tasks, engine and output folder."""

    tasks: Sequence[Task]
    engine: str | FileConfig
    """An engine as `--engine` takes it, or a whole config."""
    folder: Path
    concurrency: int | None = None
    """Harnesses running at once; `None` = twice the cores."""
    title: str = "sessions"
    """Label of the progress bar."""

    def setup(self) -> FileConfig:
        """Return the configuration of the batch's engine."""
        if isinstance(self.engine, FileConfig):
            return self.engine
        return load_config(None, engines=[self.engine])


def run_batch(batch: BatchRun) -> list[JSON]:
    """Run the sessions of a batch; return their summaries in the order in which they were opened.

    `ConfigError` for a mistake, before anything runs; `KeyboardInterrupt` after Ctrl-C, SIGTERM
    or SIGHUP, once all sessions have ended and all files are written.
    """
    with progress() as bars:
        return run_to_end(_run(batch, Board(bars, batch)))


async def _run(batch: BatchRun, board: Board) -> list[JSON]:
    if any(task.runtime.backend == AUTO for task in batch.tasks):
        backend, reason = default_backend()
        notes.print(f"runtime {backend}: {reason}", markup=False, soft_wrap=True)
    facts: JSON = {"concurrency": batch.concurrency}
    facts["tasks"] = [task.model_dump(mode="json") for task in batch.tasks]
    served = Gateway(batch.setup(), data=batch.folder, facts=facts)
    problems = Problems()
    preflight(problems, batch.tasks, served)
    problems.raise_any()
    board.say("starting the engine")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(served)
        stack.enter_context(long_running())
        slots = {} if batch.concurrency is None else {"run_slots": batch.concurrency}
        settings = NodeSettings.model_validate(slots)
        node = LocalNode(
            gateway=served.app, store=served.store, folder=served.folder, settings=settings
        )
        await stack.enter_async_context(node)
        stack.enter_context(node.events.listening(board.hear))
        stack.enter_context(node.events.listening(served.telemetry.on_event))
        async with LocalExecutor(node).run(batch.tasks) as results:
            async for _ in results:
                pass
    sessions: list[JSON] = served.summary["sessions"]
    return sessions


class Board:
    """The progress bar of a batch, fed by the node's events."""

    def __init__(self, bars: Progress, batch: BatchRun) -> None:
        self._bars = bars
        total = sum(task.num_samples for task in batch.tasks)
        self._bar: TaskID = bars.add_task(batch.title, total=total, note="")
        self._running: set[str] = set()
        self._completed = 0
        self._rewards: list[float] = []

    def say(self, note: str) -> None:
        """Show a note beside the progress bar."""
        self._bars.update(self._bar, note=note)

    def hear(self, event: Event) -> None:
        """Update the progress display by an event of the node."""
        match event:
            case Installing(harness, line):
                self.say(f"installing {harness}: {line}")
            case SessionChanged():
                self._session(event)

    def _session(self, event: SessionChanged) -> None:
        if event.status is SessionStatus.RUNNING:
            self._running.add(event.session_id)
        elif event.status in FINAL:
            self._running.discard(event.session_id)
            self._completed += event.status is SessionStatus.COMPLETED
            if event.reward is not None:
                self._rewards.append(event.reward)
            self._bars.advance(self._bar)
            if event.error:
                notes.print(f"{event.session_id}: {event.error}", markup=False, style="yellow")
        note = f"{len(self._running)} running, {self._completed} completed"
        if self._rewards:
            mean = sum(self._rewards) / len(self._rewards)
            note += f", mean reward {mean:.2f} over {len(self._rewards)} scored"
        self.say(note)


CONNECT_S = 2.0
"""Timeout of the test connection to an engine."""

SANDBOX_FOLDERS = tuple(map(Path, ("/usr", "/bin", "/sbin", "/lib", "/lib64")))
"""Folders that every sandbox without an image shows."""


def preflight(problems: Problems, tasks: Sequence[Task], gateway: Gateway | None) -> None:
    """Add everything that would keep `tasks` from running on `gateway` to `problems`; starts
    nothing.
    """
    faults: defaultdict[str, list[str]] = defaultdict(list)
    for task in tasks:
        own = Problems()
        with own.noting():
            check([task])
            _check_program(task)
            if task.fork is not None:
                read_replay(task.fork, Path(task.task_dir or "."))
        for error in own.found:
            name = f"task {task.task_id!r}"
            faults[str(error).removeprefix(f"{name}: ")].append(name)
    for fault, names in faults.items():
        also = f" and {len(names) - 1} more" if len(names) > 1 else ""
        problems.found.append(ConfigError(f"{names[0]}{also}: {fault}"))
    if gateway is None:
        return
    for backend in dict.fromkeys(resolve_auto(task.runtime).backend for task in tasks):
        with problems.noting():
            check_machine(backend)
    with problems.noting():
        _check_run_folder(gateway.path)
    with problems.noting():
        gateway.prepare()
    with problems.noting():
        telemetry.check(gateway.config.telemetry)
    with problems.noting():
        _check_port(gateway.config)
    with problems.noting():
        _check_engines(gateway.config.engines)


def _check_program(task: Task) -> None:
    """Refuse a command whose program a sandbox on this machine does not show."""
    spec, command = resolve_auto(task.runtime), task.agent.command
    contained = spec.backend == "bubblewrap"
    if not command or not (contained or spec.backend == "local") or spec.image or spec.prepare:
        return
    try:
        program, *words = shlex.split(command)
    except ValueError:
        return
    own_path = "PATH" in {**spec.env, **task.agent.env}
    is_name = re.fullmatch(r"[\w.+-]+", program) and not (words and words[0].startswith("("))
    if is_name and not own_path and not _is_known(program, PATH if contained else search_path()):
        place = "the sandbox" if contained else "this machine"
        raise ConfigError(
            f"agent.command: {place} has no program {program!r}; `bridle init --agent` finds what "
            "an agent needs"
        )
    if not contained:
        return
    shown = (*map(str, SANDBOX_FOLDERS), *spec.kwargs.get("binds", ()))
    path = Path(program)
    if path.is_absolute() and path.exists() and not any(path.is_relative_to(s) for s in shown):
        raise ConfigError(
            f"agent.command: the sandbox does not show {program}; `bridle init --agent` finds "
            "what it needs, or name it in runtime.kwargs.binds"
        )


@lru_cache
def _is_known(program: str, path: str) -> bool:
    """Return whether bash finds a program, a builtin or a keyword of this name."""
    bash = shutil.which("bash") or "bash"
    asked = (bash, "-c", 'type -t -- "$1"', "bash", program)
    env = {"PATH": path}
    return subprocess.run(asked, env=env, capture_output=True, check=False).returncode == 0


def _check_run_folder(folder: Path) -> None:
    if any((folder / name).exists() for name in (RUN, CAPTURE, TRAJECTORIES)):
        raise ConfigError(f"{folder} holds a run already; give another folder")
    check_folder(folder, "--out")
    existing = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    try:
        check_room(existing)
    except OSError as error:
        fix = "free some disk space" if error.errno in FULL else "name another folder by --out"
        raise StoreError(
            f"cannot begin a run in {existing}: {error.strerror or error}; {fix}"
        ) from error


def _check_port(config: FileConfig) -> None:
    host, port = config.gateway.host, config.gateway.port
    try:
        with closing(socket.create_server((host, port))):
            pass
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def _check_engines(specs: Sequence[str]) -> None:
    """Refuse engine servers if none accepts a connection."""
    faults = []
    for spec in specs:
        found = re.search(r"https?://[^#]+", spec)
        if found is None or not is_server_url(found[0]):
            return
        url = urlsplit(found[0])
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            socket.create_connection((url.hostname, port), timeout=CONNECT_S).close()
        except OSError as error:
            shown = without_user_info(spec)
            faults.append(f"engine {shown} takes no connection: {error.strerror or error}")
        else:
            return
    raise EngineError("; ".join(faults) + "; start it, or name another")


@with_option_groups
def run(  # noqa: PLR0913 - one parameter per flag
    tasks: TasksArgument,
    engines: EngineOptions,
    harness: HarnessOption = None,
    runtime: RuntimeOption = None,
    network: Annotated[
        str | None, typer.Option(help="gateway_only, open or none, for all tasks.")
    ] = None,
    samples: SamplesOption = None,
    template: Annotated[
        Path | None,
        typer.Option(help="File with a text that contains {{ instruction }}, for all tasks."),
    ] = None,
    first: FirstOption = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a task set with an invalid row.")
    ] = False,
    manifest: VerifiedOption = None,
    builder: Annotated[
        str | None, typer.Option(help="per_request or prefix_merging, for all tasks.")
    ] = None,
    concurrency: ConcurrencyOption = None,
    stream: StreamOption = None,
    prompt: PromptOption = None,
    allow_untokenized: UntokenizedOption = None,
    telemetry: TelemetryOption = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/<date> if not given.")] = None,
    scores: Annotated[
        bool, typer.Option("--report", help="Print pass@k, mean rewards and failures by cause.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Run tasks with real harnesses and write their trajectories.

    Exit code 0 if every session COMPLETED, else 1; rewards do not count.
    """
    overrides = task_overrides(
        harness=harness, runtime=runtime, network=network, samples=samples, builder=builder
    )
    if harness in CHECKS and not engines.engine and engines.config is None:
        engines = replace(engines, engine=[f"scripted:{assets_dir() / 'silent.json'}"])
    folder = out or new_run_folder(Path("runs"))
    gateway = {"stream": stream, "prompt": prompt, "allow_untokenized": allow_untokenized}
    loaded, setup = _checked(
        lambda: _selected(tasks, overrides, template, first, manifest, strict=strict),
        lambda: engines.load(gateway=gateway, telemetry=telemetry),
        folder,
    )
    with _naming(folder):
        lines = run_batch(BatchRun(loaded, setup, folder, concurrency))
    report(lines, folder, scores=scores, json=json)
    raise typer.Exit(0 if all(line["status"] == "COMPLETED" for line in lines) else 1)


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Note where the ended sessions are, if the batch inside is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        if (folder / CAPTURE).exists():
            notes.print(f"written to {folder}; `bridle show {folder}` lists its sessions")
        raise


def _checked(
    load: Callable[[], list[Task]], configure: Callable[[], FileConfig], folder: Path
) -> tuple[list[Task], FileConfig]:
    """Return the tasks and the config; the error for a wrong one names all other mistakes too."""
    problems = Problems()
    loaded, setup = problems.tried(load), problems.tried(configure)
    if loaded is None or setup is None:
        gateway = None if setup is None else Gateway(setup, data=folder)
        preflight(problems, loaded or (), gateway)
        problems.raise_any()
    assert loaded is not None
    assert setup is not None
    return loaded, setup


def task_overrides(
    *,
    harness: str | None = None,
    runtime: str | None = None,
    network: str | None = None,
    samples: int | None = None,
    builder: str | None = None,
) -> JSON:
    """Return the fields that command-line flags set for all tasks; `None` = the flag was
    not given.
    """
    overrides: JSON = {}
    if harness is not None:  # a command belongs to the task's own harness
        overrides["agent"] = {"harness": harness, "command": None, "import_path": None}
    where = {"backend": runtime, "network": network}
    if where := {name: value for name, value in where.items() if value is not None}:
        overrides["runtime"] = where
    if samples is not None:
        overrides["num_samples"] = samples
    if builder is not None:
        overrides["builder"] = {"strategy": builder}
    return overrides


def load_task_set(path: Path, overrides: JSON, *, strict: bool = False) -> list[Task]:
    """Return the tasks of a path, each with the name of the task set in its metadata."""
    of_registry = not path.exists() and SET.fullmatch(str(path))
    named = {"task_set": path.name.rpartition(":")[2] if of_registry else path.resolve().stem}
    return [
        task.model_copy(update={"metadata": {**named, **task.metadata}})
        for task in load_tasks(path, overrides=overrides, strict=strict)
    ]


def _selected(
    path: Path,
    overrides: JSON,
    template: Path | None,
    first: int | None,
    manifest: Path | None,
    *,
    strict: bool,
) -> list[Task]:
    """Load the tasks to run. `ConfigError` if the manifest does not list one as sound."""
    loaded = load_task_set(path, overrides, strict=strict)[:first]
    if template is not None:
        text = read_text(template)
        loaded = [with_template(task, text) for task in loaded]
    if manifest is not None:
        require_verified(loaded, manifest)
    return loaded


def report(lines: list[JSON], folder: Path, *, json: bool, scores: bool = False) -> None:
    """Print the sessions of a batch and, with `scores`, its pass@k and failures."""
    found = scores_of(from_summaries(lines)) if scores else []
    if json:
        shown = {"report": [score.as_json() for score in found]} if scores else {}
        print_json({"folder": str(folder), "sessions": lines, **shown})
        return
    print_table(f"{folder}: {len(lines)} sessions", COLUMNS, map(row, lines))
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "unknown"
    console.print(f"mean reward {mean} over {len(rewards)} scored of {len(lines)} sessions")
    print_scores(found)
    written = f"written to {folder}; details: bridle show SESSION --run {folder}"
    console.print(written, soft_wrap=True)


@with_option_groups
def fork(
    session: Annotated[str, typer.Argument(help="Session id, or its beginning.")],
    at: Annotated[
        int,
        typer.Option(min=1, help="Number of captured replies that are replayed without a model."),
    ],
    engines: EngineOptions,
    run: Annotated[
        Path, typer.Option(help="Run folder, or folder of runs, that holds the session.")
    ] = Path("runs"),
    samples: Annotated[int, typer.Option(min=1, help="Forks of the session.")] = 1,
    concurrency: ConcurrencyOption = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/<date> if not given.")] = None,
    json: JsonOption = False,
) -> None:
    """Sample a captured session again from one of its turns on.

    The task's harness starts in a fresh runtime. Its first --at calls get the captured replies, as
    long as each prompt equals the captured one; then the model samples. Without --engine the run's
    own engine is used. Exit code 0 if every fork was exact, or equivalent (its prompts differed
    only in known noise, such as a random id), else 1.
    """
    task, base = forked_task(session, run, at, samples)
    folder = check_folder(out or new_run_folder(Path("runs")), "--out")
    setup = setup_of(base, engines)
    with _naming(folder):
        lines = run_batch(BatchRun([task], setup, folder, concurrency))
    verdicts = Counter(line["fork"]["verdict"] for line in lines if line["fork"])
    exact, equivalent = verdicts["exact"], verdicts["equivalent"]
    if json:
        counts = {"exact": exact, "equivalent": equivalent}
        print_json({"folder": str(folder), **counts, "sessions": lines})
    else:
        report(lines, folder, json=False)
        names = sorted({name for line in lines for name in (line["fork"] or {}).get("noise", ())})
        noise = f", {equivalent} but for {', '.join(names)}" if equivalent else ""
        console.print(f"{exact} of {len(lines)} sessions forked exactly at call {at}{noise}")
    raise typer.Exit(0 if exact + equivalent == len(lines) else 1)


def forked_task(session: str, run: Path, at: int, samples: int) -> tuple[Task, Path]:
    """Return the task of a session's forks, and the session's run folder.

    `ConfigError` if the run does not hold the session's task.
    """
    path, capture = find_session(session, run)
    base, task_id = path.parent, capture.session.task_id
    tasks = tasks_of(base)
    if task_id not in tasks:
        raise ConfigError(
            f"run folder {base} does not hold the session's task {task_id!r}: only sessions of "
            "`bridle run` can be forked"
        )
    spec = ForkSpec(capture=str(path.resolve()), session=capture.session.session_id, at=at)
    return tasks[task_id].model_copy(update={"num_samples": samples, "fork": spec}), base


def setup_of(base: Path, engines: EngineOptions) -> FileConfig:
    """Return the config that flags name, or that of the run `base` if they name none and no engine.

    Prompts are made as in the run.
    """
    facts = config_of(base)
    if engines.config is None and not engines.engine:
        tokenizer = engines.tokenizer or facts.get("tokenizer")
        engines = EngineOptions(engine=facts.get("engines"), tokenizer=tokenizer)
    gateway = {name: facts.get(name) for name in ("stream", "prompt")}
    return engines.load(gateway=gateway, rendering=facts.get("rendering"))
