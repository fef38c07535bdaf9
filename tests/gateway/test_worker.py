"""A worker process: started, restarted, stopped."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from bridle.errors import BridleError, ConfigError
from bridle.gateway.listener import listen
from bridle.gateway.workers import Worker

SMALL = (sys.executable, str(Path(__file__).parent / "small_worker.py"))


@asynccontextmanager
async def worker(command=SMALL, *, starts=None, **own):
    """A worker that is not started; `starts` collects the arguments of its starts."""
    gateway = {"data_dir": "/worker-0", "control_token": "t"}

    def spec():
        answer = {"gateway": gateway, "worker-0": own, "policy": {}, "replicas": []}
        if starts is not None:
            starts.append(answer)
        return answer

    with listen("127.0.0.1", 0) as data, listen("127.0.0.1", 0) as control:
        made = Worker("worker-0", command=command, spec=spec, sockets=(data, control))
        try:
            yield made
        finally:
            await made.stop()


@asynccontextmanager
async def running(one: Worker):
    """A worker that is started and kept running."""
    await one.start()
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(one.keep_running())
        try:
            yield
        finally:
            keeping.cancel()
    await one.stop()


async def restarted(one: Worker, times: int = 1) -> None:
    async with asyncio.timeout(60):
        while one.restarts < times:  # noqa: ASYNC110 - the counter has no event
            await asyncio.sleep(0.005)
        await one.ready.wait()


async def ask(one: Worker, number: int = 0) -> str:
    url = f"http://127.0.0.1:{one.sockets[number].getsockname()[1]}/x"
    async with aiohttp.ClientSession() as client, client.get(url) as reply:
        return (await reply.json())["worker"]


async def test_a_killed_worker_is_restarted_on_the_same_ports():
    starts: list = []
    async with worker(starts=starts) as one, running(one):
        first = one.pid
        assert first is not None
        assert [await ask(one, number) for number in (0, 1)] == ["worker-0"] * 2
        os.kill(first, signal.SIGKILL)
        await restarted(one)
        assert one.pid != first
        assert [await ask(one, number) for number in (0, 1)] == ["worker-0"] * 2
        assert len(starts) == 2, "what the process reads is made anew for every start"
    assert not one.ready.is_set()


async def test_a_client_that_connects_while_the_worker_is_down_is_served_when_it_is_back():
    async with worker() as one, asyncio.TaskGroup() as group:
        early = group.create_task(ask(one))
        await asyncio.sleep(0)
        async with running(one):
            assert await early == "worker-0"


async def test_a_restart_that_fails_is_repeated(tmp_path):
    async with worker(stumbles=str(tmp_path / "mark")) as one, running(one):
        assert one.pid is not None
        os.kill(one.pid, signal.SIGKILL)
        await restarted(one, times=2)


async def test_a_start_raises_the_error_that_the_process_reports():
    async with worker(error="no such engine", kind="ConfigError") as one:
        with pytest.raises(ConfigError, match="no such engine"):
            await one.start()
    async with worker(error="odd", kind="SomethingElse") as one:
        with pytest.raises(BridleError, match="odd"):
            await one.start()


async def test_a_process_that_ends_without_a_report_is_an_error():
    async with worker((sys.executable, "-c", "")) as one:
        with pytest.raises(
            BridleError, match="the gateway's process 'worker-0' ended before it could serve"
        ):
            await one.start()
