"""A batch of tasks in one process: engine, gateway, node and harnesses, with progress.

`run`, `demo` and `harness check` are this with different tasks. Whatever ends it (its last session,
Ctrl-C, a failure), the run folder is left complete: capture, trajectories and summary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.progress import Progress, TaskID

from bridle.api import Gateway
from bridle.cli.config import FileConfig, load_config
from bridle.cli.gateway import Streaming
from bridle.cli.output import notes, progress
from bridle.cli.preflight import preflight
from bridle.cli.serving import long_running
from bridle.config import AUTO, Task
from bridle.errors import Problems
from bridle.executors.local import LocalExecutor
from bridle.lifecycle.events import Event, Installing, SessionChanged
from bridle.lifecycle.manager import Node, NodeSettings
from bridle.lifecycle.session import FINAL
from bridle.runtimes import default_backend
from bridle.types import JSON, SessionStatus


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch to run: tasks, engine and output folder."""

    tasks: Sequence[Task]
    engine: str | FileConfig
    """One engine, as `--engine` takes it; or all of a config."""
    tokenizer: str | None
    folder: Path
    concurrency: int | None
    """Harnesses at once; `None` = twice the cores."""
    title: str = "sessions"
    """What the progress bar calls them."""
    stream: Streaming | None = None
    """How streamed replies leave the gateway (`GatewaySettings.stream`); `None` = as configured."""

    def setup(self) -> FileConfig:
        """The config that it runs with."""
        if isinstance(self.engine, FileConfig):
            return self.engine
        gateway = {"stream": self.stream}
        return load_config(None, engines=[self.engine], tokenizer=self.tokenizer, gateway=gateway)


def run_batch(batch: Batch) -> list[JSON]:
    """Run a batch to its end; its sessions' summaries in the order they were opened.

    `ConfigError` for a mistake in the tasks, before anything runs; `KeyboardInterrupt` after
    Ctrl-C, when everything has been ended and written.
    """
    with progress() as bars:
        return uvloop.run(_run(batch, Board(bars, batch)))


async def _run(batch: Batch, board: Board) -> list[JSON]:
    _say_where(batch)
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
        node = Node(
            gateway=served.app, store=served.store, folder=served.folder, settings=_settings(batch)
        )
        await stack.enter_async_context(node)
        stack.enter_context(node.events.listening(board.hear))
        stack.enter_context(node.events.listening(served.telemetry.hear))
        async with LocalExecutor(node).run(batch.tasks) as results:
            async for _ in results:
                pass
    sessions: list[JSON] = served.summary["sessions"]
    return sessions


def _say_where(batch: Batch) -> None:
    """Say which runtime those tasks get that name none."""
    if any(task.runtime.backend == AUTO for task in batch.tasks):
        backend, reason = default_backend()
        notes.print(f"runtime {backend}: {reason}", markup=False, soft_wrap=True)


def _settings(batch: Batch) -> NodeSettings:
    if batch.concurrency is None:
        return NodeSettings()
    return NodeSettings(run_slots=batch.concurrency)


class Board:
    """The progress bar of a batch, fed by the node's events."""

    def __init__(self, bars: Progress, batch: Batch) -> None:
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
