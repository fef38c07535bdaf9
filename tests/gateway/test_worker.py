"""A worker's process: started, introduced, kept, ended."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from bridle.errors import BridleError, ConfigError
from bridle.gateway.worker import Worker

SMALL = (sys.executable, str(Path(__file__).parent / "small_worker.py"))


def worker(**told: Any) -> Worker:
    return Worker("worker-0", SMALL, orjson.dumps({"name": "small", **told}))


@asynccontextmanager
async def kept(one: Worker, prepare):
    """A worker that is started and kept alive."""
    await one.start()
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(one.keep(prepare))
        try:
            yield
        finally:
            await one.stop()
            await keeping


async def test_one_that_dies_is_started_again_and_prepared_before_it_serves():
    one, prepared = worker(), []

    async def prepare(again: Worker) -> None:
        prepared.append((again.url, again.ready))

    async with kept(one, prepare):
        before, first = one.url, one.pid
        assert one.ready
        assert first is not None
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(20):
            while one.restarts == 0:  # noqa: ASYNC110 - what is looked at has no event
                await asyncio.sleep(0.005)
        await one.wait_until_ready()
        assert prepared == [(one.url, False)]
        assert (one.pid, one.url) != (first, before)
    assert one.pid is None
    assert not one.ready


async def test_one_that_does_not_come_up_again_is_tried_once_more(tmp_path):
    one = worker(stumbles=str(tmp_path / "mark"))

    async def prepare(_: Worker) -> None: ...

    async with kept(one, prepare):
        assert one.pid is not None
        os.kill(one.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while one.restarts < 2:  # noqa: ASYNC110 - what is looked at has no event
                await asyncio.sleep(0.005)
        await one.wait_until_ready()


async def test_why_one_cannot_start_is_its_own_account():
    with pytest.raises(ConfigError, match="no such engine"):
        await worker(error="no such engine", kind="ConfigError").start()
    with pytest.raises(BridleError, match="odd"):
        await worker(error="odd", kind="SomethingElse").start()


async def test_one_that_says_nothing_has_ended():
    with pytest.raises(BridleError, match="worker-0 ended before it served"):
        await Worker("worker-0", (sys.executable, "-c", ""), b"{}").start()
