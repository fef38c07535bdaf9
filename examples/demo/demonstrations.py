"""Demonstrations for the demo model: a weak scripted policy, captured through the gateway.

The light agent's own code asks the gateway, so what is learned is what the agent will send. Every
session is kept, the failed ones too: the model that comes out succeeds seldom, and has something
left to learn.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.bridges.examples import SftCounts, examples_of, write_sft
from bridle.capture.records import Outcome
from bridle.capture.sqlite import SqliteStore
from bridle.cli.config import load_config, open_setup
from bridle.gateway.app import GatewayServer
from bridle.gateway.settings import GatewaySettings
from bridle.trajectory import rebuild
from bridle.types import SessionStatus

from . import light_agent
from .lookups import Lookup, lookups, weak_script, write_files

if TYPE_CHECKING:
    from bridle.gateway.registry import SessionHandle

AT_ONCE = 16
"""Demonstrations under way together."""


async def collect(
    folder: Path, count: int, *, seed: int, report: Callable[[int], None] = lambda _: None
) -> SftCounts:
    """Play `count` demonstrations and write `folder/demonstrations.jsonl` (SFT examples).

    `folder` must not hold an earlier capture. `report` is called with the number that are done.
    """
    tasks = list(lookups(count, seed=seed))
    script = _write_script(tasks, folder, seed)
    setup = open_setup(load_config(None, engines=[f"scripted:{script}"]))
    store = await SqliteStore.open(folder / "capture.sqlite")
    async with (
        store,
        GatewayServer(
            engine=setup.engine, renderer=setup.renderer, store=store, settings=GatewaySettings()
        ) as gateway,
    ):
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for start in range(0, count, AT_ONCE):
                batch = tasks[start : start + AT_ONCE]
                async with asyncio.TaskGroup() as group:
                    for task in batch:
                        group.create_task(_demonstrate(task, gateway, store, threads, folder))
                report(start + len(batch))
        captures = (store.read(session.session_id) for session in store.sessions())
        examples = [one for capture in captures for one in examples_of(rebuild(capture))]
    return write_sft(folder / "demonstrations.jsonl", examples)


def _write_script(tasks: list[Lookup], folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "demonstrator.json"
    script.write_text(json.dumps(weak_script(tasks, seed=seed)))
    return script


async def _demonstrate(
    task: Lookup,
    gateway: GatewayServer,
    store: SqliteStore,
    threads: ThreadPoolExecutor,
    folder: Path,
) -> None:
    handle: SessionHandle = await gateway.open_session(
        task.task_id, task_id=task.task_id, metadata={"harness": "light_agent"}
    )
    work = folder / "work" / task.task_id
    write_files(task, work)
    ask = partial(
        light_agent.run,
        handle.base_urls["openai"],
        handle.key,
        "bridle-policy",
        task.instruction,
        work,
    )
    answer = await asyncio.get_running_loop().run_in_executor(threads, ask)
    await gateway.seal(task.task_id)
    reward = float(answer.strip() == task.answer)
    await store.close_session(
        Outcome(task.task_id, SessionStatus.COMPLETED, ended_at=time.time(), reward=reward)
    )
