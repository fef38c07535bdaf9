"""A storm of equal calls: exactly one sample for each call that its client got an answer to."""

import asyncio
import random
import socket
from contextlib import asynccontextmanager

import pytest
from tests.gateway.house import house
from tests.gateway.storms import Stormy, blow, check

from bridle.config import Limits
from bridle.gateway.weights import SetPolicy
from bridle.runtimes.forward import Forwarder


async def pauses(gateway, seed):
    """Pause the model again and again, for a moment each."""
    chance = random.Random(seed)
    while True:
        await asyncio.sleep(chance.uniform(0.2, 1))
        await gateway.set_policy(SetPolicy(paused=True))
        await asyncio.sleep(chance.uniform(0, 0.3))
        await gateway.set_policy(SetPolicy(paused=False))


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


async def weather(seed, calls, way):
    async with house(engine=Stormy(seed)) as home:
        caller = await home.session(limits=Limits(max_calls_in_flight=max(3, calls // 3)))
        handle = caller.handle
        async with way(handle.base_urls) as urls, asyncio.TaskGroup() as group:
            pausing = group.create_task(pauses(home.gateway, seed))
            outcome = await blow(urls, handle.key, seed, calls)
            pausing.cancel()
        path = f"/sessions/{caller.session_id}"
        _, found = await home.control("GET", f"{path}/exchanges")
        check(outcome, found["exchanges"], calls)
        _, trajectory = await home.control("GET", f"{path}/trajectory")
    stats = trajectory["metadata"]["stats"]
    delivered = [one for one in found["exchanges"] if one["delivered"]]
    assert stats["tokens_trained"] == sum(len(one["output_ids"]) for one in delivered)
    assert stats["joins"] == sum(len(one["joined_by"]) for one in found["exchanges"])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", [straight, forwarded], ids=["straight", "forwarded"])
async def test_every_answered_call_of_a_small_storm_is_a_sample_of_its_own(way):
    await weather(1, 18, way)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", [straight, forwarded], ids=["straight", "forwarded"])
@pytest.mark.parametrize("seed", range(5))
async def test_every_answered_call_of_a_storm_is_a_sample_of_its_own(seed, way):
    await weather(seed, 200, way)
