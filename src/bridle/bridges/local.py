"""Sessions on this machine for a trainer that knows no asyncio: tasks in, trajectories out.

Engine, gateway and node live on an event loop in a thread of their own, so a trainer's own loop
calls `play` and waits. New weights go from the trainer's memory into the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

from bridle.capture.sqlite import SqliteStore
from bridle.config import Task
from bridle.engines import open_engine
from bridle.engines.base import Weights
from bridle.errors import ConfigError
from bridle.gateway.app import GatewayServer
from bridle.gateway.settings import GatewaySettings
from bridle.gateway.weights import SetPolicy
from bridle.node.local import LocalExecutor, LocalNode, NodeSettings
from bridle.node.results import RunFolder
from bridle.prompting.renderer import load_renderer
from bridle.trajectory.sample import Trajectory

T = TypeVar("T")


class LocalSessions:
    """Plays tasks through their harnesses; use as a context manager, from any thread."""

    def __init__(
        self,
        engine: str,
        folder: Path,
        *,
        tokenizer: str | None = None,
        node: NodeSettings | None = None,
    ) -> None:
        """Keep the settings; start nothing yet.

        Args:
            engine: As `--engine` of `bridle run` takes it, e.g. `embedded:DIR`.
            folder: Run folder of the sessions; must not hold a run.
            tokenizer: Folder; `None` = the one in `DIR` of an embedded engine.
            node: How much runs at once and what is kept; `None` = the defaults.
        """
        self._engine = engine
        self._folder = folder
        self._tokenizer = tokenizer or engine.partition(":")[2]
        self._node = node or NodeSettings(keep_logs="failed")
        self._ready: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop
        self._end: asyncio.Event
        self._gateway: GatewayServer
        self._executor: LocalExecutor
        self._thread = threading.Thread(target=self._main, name="bridle-sessions", daemon=True)

    def __enter__(self) -> Self:
        """Start all of it; raises what kept it from starting."""
        self._thread.start()
        self._ready.result()
        return self

    def __exit__(self, *_: object) -> None:
        """End what runs and complete the run folder."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def play(self, tasks: Sequence[Task]) -> list[Trajectory]:
        """Run one session for each entry of `tasks`, in order; a task may be listed several times.

        The outcome of every session is in its trajectory. `ConfigError` for a task that names
        something unknown, or that branches.
        """
        return self._wait(self._play(tasks))

    def update_weights(self, weights: Weights, version: int) -> None:
        """Load `weights` into the engine as policy `version`; later tokens are sampled from
        them.
        """
        self._wait(self._gateway.update_weights(weights, version))

    def set_version(self, version: int) -> None:
        """Set the weight version of later samples; the engine has the weights already."""
        self._wait(self._gateway.set_policy(SetPolicy(version=version)))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _play(self, tasks: Sequence[Task]) -> list[Trajectory]:
        if any(task.branching for task in tasks):
            raise ConfigError(
                "branching: this trainer cannot train sessions that branch; remove `branching` "
                "from the tasks, or train with `bridle train`"
            )
        counts = Counter(task.task_id for task in tasks)
        once = {task.task_id: task for task in tasks}
        wanted = [
            task.model_copy(update={"num_samples": counts[task_id]})
            for task_id, task in once.items()
        ]
        async with self._executor.run(wanted) as results:
            ended = [result async for result in results]
        found: defaultdict[str, list[Trajectory]] = defaultdict(list)
        for result in sorted(ended, key=lambda one: one.sample_index):
            found[result.task_id].append(result.trajectory)
        return [found[task.task_id].pop(0) for task in tasks]

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with AsyncExitStack() as stack:
            config = {"engine": self._engine, "tokenizer": self._tokenizer}
            folder = stack.enter_context(RunFolder.create(self._folder, config=config))
            stack.callback(folder.discard_if_unused)
            store = await stack.enter_async_context(await SqliteStore.open(folder.capture))
            self._gateway = GatewayServer(
                engine=open_engine(self._engine, tokenizer=self._tokenizer),
                renderer=load_renderer(self._tokenizer),
                store=store,
                settings=GatewaySettings(),
            )
            await stack.enter_async_context(self._gateway)
            node = LocalNode(gateway=self._gateway, store=store, folder=folder, settings=self._node)
            await stack.enter_async_context(node)
            self._executor = LocalExecutor(node)
            self._ready.set_result(None)
            await self._end.wait()
            await asyncio.to_thread(folder.finish, store)
