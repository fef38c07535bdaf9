"""A storm of equal calls: exactly one sample for each call that its client got an answer to."""

import json
import socket
import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
import pytest
from tests.gateway.house import house
from tests.gateway.storms import Stormy, weather

from bridle.config import Limits
from bridle.runtimes.base_runtime import Forwarder
from bridle.scripted.server import EngineServer


@asynccontextmanager
async def straight(urls):
    yield urls


@asynccontextmanager
async def forwarded(urls):
    """The same URLs through the forwarder of a sandbox."""
    host, _, port = urls["google"].removeprefix("http://").partition("/")[0].partition(":")
    listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
    listener.settimeout(0)
    inside = f"{host}:{listener.getsockname()[1]}"
    async with Forwarder(listener) as forwarder:
        forwarder.target = (host, int(port))
        yield {name: url.replace(f"{host}:{port}", inside) for name, url in urls.items()}


def limits(calls):
    """Fewer calls in flight than are made."""
    return Limits(max_calls_in_flight=max(3, calls // 3))


async def over_one_gateway(seed, calls, way):
    async with house(engine=Stormy(seed)) as home:
        handle = (await home.session(limits=limits(calls))).handle
        async with way(handle.base_urls) as urls:
            await weather(home.control, [(handle.session_id, urls, handle.key)], seed, calls)


def token(folder):
    return (folder / "control.token").read_text().strip()


@asynccontextmanager
async def two_workers(folder, engine_url):
    """`bridle gateway --workers 2`: what it prints, and a way to ask its control port."""
    command = ("gateway", "--workers", "2", "--port", "0", "--data", str(folder), "--json")
    process = await create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "bridle.cli",
            *command,
            "--engine",
            engine_url,
            "--tokenizer",
            "builtin",
        ),
        stdout=PIPE,
    )
    assert process.stdout is not None
    try:
        said = json.loads(await process.stdout.readline())
        bearer = {"Authorization": f"Bearer {token(folder)}"}
        async with aiohttp.ClientSession(said["control_url"], headers=bearer) as client:

            async def control(method, path, body=None):
                async with client.request(method, path, json=body) as answer:
                    return answer.status, await answer.json()

            yield said, control
    finally:
        process.terminate()
        await process.wait()


async def over_two_workers(seed, calls, folder):
    """Half of the calls to a session of each worker, which share one engine and its weather."""
    wanted = {"limits": limits(calls // 2).model_dump(mode="json")}
    async with (
        EngineServer(Stormy(seed)) as engine,
        two_workers(folder, engine.url) as (said, control),
    ):
        opened = [(await control("POST", "/sessions", wanted))[1] for _ in range(2)]
        ports = [urlsplit(one["base_url"]["openai"]).port for one in opened]
        assert sorted(ports) == sorted(said["worker_ports"])
        sessions = [(one["session_id"], one["base_url"], one["key"]) for one in opened]
        await weather(control, sessions, seed, calls // 2)


WAYS = pytest.mark.parametrize("way", [straight, forwarded], ids=["straight", "forwarded"])


@pytest.mark.timeout(120)
@WAYS
async def test_every_answered_call_of_a_small_storm_is_a_sample_of_its_own(way):
    await over_one_gateway(1, 18, way)


@pytest.mark.timeout(180)
async def test_every_answered_call_of_a_small_storm_over_two_workers_is_a_sample(tmp_path):
    await over_two_workers(1, 24, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
@WAYS
@pytest.mark.parametrize("seed", range(5))
async def test_every_answered_call_of_a_storm_is_a_sample_of_its_own(seed, way):
    await over_one_gateway(seed, 200, way)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
async def test_every_answered_call_of_a_storm_over_two_workers_is_a_sample(seed, tmp_path):
    await over_two_workers(seed, 200, tmp_path)
