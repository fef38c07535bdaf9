"""A batch of tasks in one process: engine, gateway, node and harnesses, with progress.

`run`, `fork`, `demo`, `harness check` and `tasks verify` are batches. `preflight` checks
configuration, ports and programs before an engine is called or a sandbox is created. However the
batch ends (last session, Ctrl-C, failure), the run folder is complete: capture, trajectories and
summary.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

import uvloop
from rich.progress import Progress, TaskID

from bridle import telemetry
from bridle.api import Gateway
from bridle.cli.config import FileConfig, load_config
from bridle.cli.output import check_folder, notes, progress
from bridle.cli.process import long_running
from bridle.config import AUTO, Task
from bridle.errors import ConfigError, EngineError, Problems, StoreError, cannot_listen
from bridle.folders import check_room
from bridle.node.base import Event, Installing, SessionChanged
from bridle.node.local import LocalExecutor, LocalNode, NodeSettings, check
from bridle.node.run_folder import CAPTURE, RUN, TRAJECTORIES
from bridle.node.session import FINAL, read_replay
from bridle.runtimes import check_machine, default_backend, resolve_auto
from bridle.runtimes.local import PATH, search_path
from bridle.types import JSON, SessionStatus


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
        if isinstance(self.engine, FileConfig):
            return self.engine
        return load_config(None, engines=[self.engine])


def run_batch(batch: BatchRun) -> list[JSON]:
    """Run a batch; return its sessions' summaries in the order in which they were opened.

    `ConfigError` for a mistake, before anything runs; `KeyboardInterrupt` after Ctrl-C, once
    all sessions have ended and all files are written.
    """
    with progress() as bars:
        return uvloop.run(_run(batch, Board(bars, batch)))


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
        self._bars.update(self._bar, note=note)

    def hear(self, event: Event) -> None:
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
    """Note everything that would keep `tasks` from running on `gateway`; starts nothing."""
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
        fix = "; `bridle init --agent` finds what an agent needs"
        raise ConfigError(f"agent.command: {place} has no program {program!r}{fix}")
    if not contained:
        return
    fix = "`bridle init --agent` finds what it needs; or name it in runtime.kwargs.binds"
    shown = (*map(str, SANDBOX_FOLDERS), *spec.kwargs.get("binds", ()))
    path = Path(program)
    if path.is_absolute() and path.exists() and not any(path.is_relative_to(s) for s in shown):
        raise ConfigError(f"agent.command: the sandbox does not show {program}; {fix}")


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
        raise StoreError(f"{existing}: {error.strerror or error}; free some disk space") from error


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
        url = urlsplit(found[0]) if found else None
        if url is None or not url.hostname:
            return
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            socket.create_connection((url.hostname, port), timeout=CONNECT_S).close()
        except OSError as error:
            faults.append(f"engine {spec} takes no connection: {error.strerror or error}")
        else:
            return
    raise EngineError("; ".join(faults) + "; start it, or name another")
