"""One policy over many gateways: held together, published everywhere, or left as they were."""

import asyncio
from contextlib import aclosing, asynccontextmanager

import pytest
from tests.gateway.house import TOKEN, house, scripted, user

from bridle.capture.records import no_ids, no_logprobs
from bridle.engines.base import GenerateChunk
from bridle.engines.pool import EnginePool
from bridle.engines.pool_replica import Replica
from bridle.errors import EngineError
from bridle.gateway.weights import SetPolicy
from bridle.node.fleet import Here, There, update, updating
from bridle.types import FinishReason

LONG = {"content": "one two three four five six seven eight nine ten"}


class Trained:
    """A scripted engine that takes weights, unless it is set not to; calls wait at its gate."""

    def __init__(self, *turns, takes=True):
        self._inner = scripted(*turns)
        self.loaded = []
        self._takes = takes
        self.gate = asyncio.Event()
        self.gate.set()
        self._ended = set()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def generate(self, request):
        while not self.gate.is_set():
            if request.request_id in self._ended:
                yield GenerateChunk(no_ids(), no_logprobs(), FinishReason.ABORT)
                return
            await asyncio.sleep(0.005)
        async with aclosing(self._inner.generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def abort(self, request_id):
        self._ended.add(request_id)
        await self._inner.abort(request_id)

    async def set_version(self, version):
        await self._inner.set_version(version)

    async def update_weights(self, source, version):
        if not self._takes:
            raise EngineError("disk full")
        self.loaded.append((source, version))
        await self._inner.set_version(version)


class Deaf:
    """A gateway that ignores control requests, and records them."""

    name = "deaf"

    def __init__(self, *refuses):
        self.refuses = refuses
        self.requests = []

    async def steer(self, wanted):
        given = wanted.model_dump(exclude_unset=True)
        self.requests.append(given)
        if given.keys() & set(self.refuses):
            raise EngineError("no")
        return {"replicas": ["inside"], "hold": None}


@asynccontextmanager
async def two(*turns, **options):
    """Two gateways, the first in this process and the second over HTTP, with engines of their own
    and one server that both name."""
    engines = [Trained(*turns, **options) for _ in range(3)]
    pools = [
        EnginePool([Replica(f"inside-{n}", engines[n]), Replica("http://shared", engines[2])])
        for n in range(2)
    ]
    async with (
        house(engine=pools[0]) as first,
        house(engine=pools[1]) as second,
        There(second.gateway.url, TOKEN) as there,
    ):
        yield (first, second), [Here(first.gateway), there], engines


def policies(homes):
    return [(reply["version"], reply["hold"]) for reply in (one.gateway.policy() for one in homes)]


async def under_way(home):
    async with asyncio.timeout(15):
        while True:
            _, reply = await home.control("GET", "/replicas")
            if any(one["calls_in_flight"] for one in reply["replicas"]):
                return
            await asyncio.sleep(0.005)


async def test_all_gateways_are_held_while_a_trainer_loads_and_go_on_under_the_new_version():
    async with two(LONG) as (homes, gateways, engines):
        callers = [await home.session() for home in homes]
        for engine in engines:
            engine.gate.clear()
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(one.ask([user("go")])) for one in callers]
            for home in homes:
                await under_way(home)
            async with updating(gateways, 7):
                assert policies(homes) == [(0, "abort"), (0, "abort")]
                assert not any(call.done() for call in calls)
                for engine in engines:
                    engine.gate.set()
        assert policies(homes) == [(7, None), (7, None)]
        assert [call.result()["content"] for call in calls] == [LONG["content"]] * 2
        for caller in callers:
            (exchange,) = caller.exchanges
            assert exchange.versions[-1].version == 7
            assert exchange.versions[-1].end == len(exchange.output_ids)


async def test_each_engine_loads_a_weight_folder_once_if_several_gateways_share_it():
    async with two(LONG) as (homes, gateways, engines):
        await update(gateways, "folder", 3, mode="wait")
        assert [engine.loaded for engine in engines] == [[("folder", 3)]] * 3
        assert policies(homes) == [(3, None), (3, None)]


async def test_weights_that_one_engine_does_not_take_are_published_nowhere():
    async with two(LONG, takes=False) as (homes, gateways, _):
        with pytest.raises(EngineError, match=r"this gateway: .*disk full.*; http://"):
            await update(gateways, "folder", 3)
        assert policies(homes) == [(0, None), (0, None)]
        assert (await (await homes[0].session()).ask([user("go")]))["content"] == LONG["content"]


@pytest.mark.parametrize("step", ["hold", "version", "weights"])
async def test_a_gateway_that_does_not_do_its_part_leaves_none_held(step):
    deaf = Deaf(step)
    async with two(LONG) as (homes, gateways, _):
        with pytest.raises(EngineError, match="deaf: no"):
            await update([*gateways, deaf], "folder", 3)
        assert [hold for _, hold in policies(homes)] == [None, None]
        assert deaf.requests[-1] == {"hold": False}


async def test_a_trainer_that_fails_publishes_nothing():
    async with two(LONG) as (homes, gateways, _):
        with pytest.raises(ZeroDivisionError):
            async with updating(gateways, 7):
                raise ZeroDivisionError
        assert policies(homes) == [(0, None), (0, None)]


async def test_a_trainer_that_is_cancelled_leaves_nobody_held():
    async with two(LONG) as (homes, gateways, _):
        held = asyncio.Event()

        async def train():
            async with updating(gateways, 7):
                held.set()
                await asyncio.Event().wait()

        async with asyncio.TaskGroup() as group:
            trainer = group.create_task(train())
            await held.wait()
            trainer.cancel()
        assert policies(homes) == [(0, None), (0, None)]


async def test_steering_a_remote_gateway_reports_a_wrong_token_or_no_answer():
    async with house({"content": "a"}) as home:
        async with There(home.gateway.url, "wrong") as there:
            with pytest.raises(EngineError, match="control token"):
                await there.steer(SetPolicy(version=1))
        url = home.gateway.url
    async with There(url, TOKEN) as there:
        with pytest.raises(EngineError, match="no answer"):
            await there.steer(SetPolicy(version=1))
