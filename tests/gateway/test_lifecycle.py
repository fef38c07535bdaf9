"""Engines whose memory a trainer uses: `POST /engines/{id}` on servers that crash when touched.

Nothing of ours reaches a released engine, no reply is lost, and each token has the version of the
weights that sampled it (its logprob tells).
"""

import asyncio
import os
import random
import re
import signal
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
from tests.conformance.memory import MemoryStore
from tests.engines.sleepers import KINDS, QUICK, asleep_servers, pool_of, sampled_under, spec
from tests.gateway.house import TOKEN, house, user

from bridle.gateway.settings import GatewaySettings
from bridle.gateway.workers import Supervisor

TEXT = "one two three four five six seven eight nine ten"
TURN = {"content": TEXT, "pace_s": 0.001}
TURNS = 4
"""Calls of a session."""


def ids_of(servers):
    return [one.url.removeprefix("http://") for one in servers]


async def put_state(home, engine, **body):
    """The answer of `POST /engines/{engine}`, which must succeed: id -> state and version."""
    status, answer = await home.control("POST", f"/engines/{engine}", body)
    assert status == 200, answer
    return {one["id"]: (one["state"], one["version"]) for one in answer["engines"]}


async def refused(home, engine, **body):
    status, answer = await home.control("POST", f"/engines/{engine}", body)
    assert status != 200, answer
    return answer["error"]["message"]


class Load:
    """Callers that play sessions until they are stopped, half of them streamed."""

    def __init__(self, home, count):
        self.home, self.count = home, count
        self.replies = 0
        self.stopped = False

    async def __aenter__(self):
        self.group = await asyncio.TaskGroup().__aenter__()
        for number in range(self.count):
            self.group.create_task(self.play(number))
        return self

    async def __aexit__(self, *error):
        self.stopped = True
        await self.group.__aexit__(*error)

    async def play(self, number):
        while not self.stopped:
            caller, messages = await self.home.session(), [user("hi")]
            for _ in range(TURNS):
                if number % 2:
                    events = await caller.stream(messages)
                    deltas = [one["choices"][0]["delta"] for one in events[:-1] if one["choices"]]
                    reply = "".join(delta.get("content") or "" for delta in deltas)
                else:
                    reply = (await caller.ask(messages))["content"]
                assert reply == TEXT
                self.replies += 1
                messages += [{"role": "assistant", "content": reply}, user("go on")]

    async def further(self, count):
        """Wait for so many replies."""
        goal = self.replies + count
        async with asyncio.timeout(30):
            while self.replies < goal:  # noqa: ASYNC110 - the callers have no event
                await asyncio.sleep(0.002)


def counted(store, gateway):
    """Replies in the store; asserts that each is whole and under its true versions."""
    length = None
    count = 0
    for session_id in gateway.session_ids():
        for exchange in store.exchanges(session_id):
            sampled, said = sampled_under(exchange)
            assert sampled == said
            length = length or len(said)
            assert (len(said), exchange.finish_reason) == (length, "stop")
            count += 1
    return count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "cycles", [30, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
async def test_no_released_engine_is_touched_and_no_sample_lost_over_cycles(kind, cycles):
    store, draw = MemoryStore(), random.Random(kind)
    async with asleep_servers(kind, TURN) as servers:
        pool = pool_of(kind, servers)
        async with house(engine=pool, store=store) as home:
            engines = dict(zip(ids_of(servers), servers, strict=True))
            async with Load(home, 6) as load:
                for version in range(1, cycles + 1):
                    name = draw.choice([*engines, "all"])
                    chosen = list(engines.values()) if name == "all" else [engines[name]]
                    mode = draw.choice(["abort", "abort", "wait"])
                    states = await put_state(home, name, state="released", mode=mode)
                    for server in chosen:
                        await server.sleep()
                    gone = [states[one] for one in ids_of(chosen)]
                    assert {state for state, _ in gone} == {"released"}
                    assert (await home.control("GET", "/health"))[0] == 200
                    await asyncio.sleep(0.02 * draw.random())
                    for server in chosen:
                        await server.wake(version)
                    states = await put_state(home, name, state="resumed", version=version)
                    assert {states[one] for one in ids_of(chosen)} == {("serving", version)}
                    await load.further(2)
            assert [one.touches for one in servers] == [[], []]
            count = counted(store, home.gateway)
            assert count == load.replies > cycles
            resumed = [
                exchange
                for session_id in home.gateway.session_ids()
                for exchange in store.exchanges(session_id)
                if len(exchange.versions) > 1
            ]
            assert resumed  # the releases met replies in their middle


@pytest.fixture(params=["vllm generate", "sglang"])
def kind(request):
    return request.param


@asynccontextmanager
async def serving(kind, *, pace_s=0.001, **settings):
    """A gateway on one server: the house, the server, its id. It must not be touched asleep."""
    async with asleep_servers(kind, {**TURN, "pace_s": pace_s}, count=1) as (server,):
        async with house(engine=pool_of(kind, [server], **settings)) as home:
            yield home, server, *ids_of([server])
        assert server.touches == []


async def said(home):
    """The reply to one call of a new session."""
    caller = await home.session()
    return (await caller.ask([user("hi")]))["content"]


async def test_a_release_and_a_resume_may_be_sent_twice(kind):
    async with serving(kind) as (home, server, name):
        for _ in range(2):
            assert await put_state(home, name, state="released") == {name: ("released", 0)}
            await server.sleep()
        await server.wake(5)
        for _ in range(2):
            resumed = await put_state(home, name, state="resumed", version=5)
            assert resumed == {name: ("serving", 5)}
        assert await said(home) == TEXT


async def test_an_engine_that_serves_is_resumed_under_no_other_version(kind):
    async with serving(kind) as (home, _, name):
        assert await put_state(home, name, state="resumed") == {name: ("serving", 0)}
        message = await refused(home, name, state="resumed", version=3)
        assert "is live under weight version 0: only a released replica" in message
        assert "give `state`" in await refused(home, name, version=3)
        assert "no replica 'z'" in await refused(home, "z", state="released")


async def test_weights_for_a_released_engine_are_refused_and_those_it_missed_are_loaded(
    kind, tmp_path
):
    (tmp_path / "model.safetensors").touch()
    async with asleep_servers(kind, TURN) as servers:
        async with house(engine=pool_of(kind, servers)) as home:
            first, second = ids_of(servers)
            await put_state(home, first, state="released")
            await servers[0].sleep()
            weights = {"weights": str(tmp_path), "version": 4}
            message = await refused(home, first, **weights)
            assert "is released to its trainer: it loads weights when it is resumed" in message
            status, _ = await home.control("POST", "/policy", weights)
            assert (status, servers[1].engine.weights) == (200, 4)
            await servers[0].wake(0)
            states = await put_state(home, first, state="resumed")
            assert states == {first: ("serving", 4), second: ("serving", 4)}
            assert servers[0].engine.weights == 4
            await put_state(home, first, state="released")
            states = await put_state(home, first, state="resumed", weights=str(tmp_path), version=5)
            assert states == {first: ("serving", 5), second: ("serving", 4)}
        assert [one.touches for one in servers] == [[], []]


async def test_two_trainers_at_once_do_not_touch_each_others_engines(kind):
    async with asleep_servers(kind, TURN) as servers:
        async with house(engine=pool_of(kind, servers)) as home:
            first, _ = ids_of(servers)
            async with Load(home, 3) as load, asyncio.TaskGroup() as group:
                await load.further(1)
                asks = [
                    group.create_task(
                        home.control("POST", f"/engines/{first}", {"state": "released", "by": by})
                    )
                    for by in ("a", "b")
                ]
                await asks[0]
                await servers[0].sleep()
                assert (await asks[1])[0] == 400
                for state in ("released", "resumed"):
                    message = await refused(home, first, state=state, by="b")
                    assert "is released to trainer 'a', not to 'b'" in message
                await load.further(5)
                await servers[0].wake(0)
                await put_state(home, first, state="resumed", by="a")
        assert servers[0].touches == []


async def test_a_release_that_is_resumed_under_way_leaves_the_engine_serving(kind):
    async with (
        serving(kind, pace_s=0.02) as (home, _, name),
        Load(home, 1) as load,
        asyncio.TaskGroup() as group,
    ):
        await load.further(1)
        group.create_task(put_state(home, name, state="released", mode="wait"))
        await asyncio.sleep(0.01)
        assert await put_state(home, name, state="resumed") == {name: ("serving", 0)}
        await load.further(1)


async def test_a_gateway_that_starts_again_leaves_released_engines_alone(kind, tmp_path):
    async with asleep_servers(kind, TURN) as servers:
        first, _ = ids_of(servers)
        async with house(engine=pool_of(kind, servers), data_dir=tmp_path) as home:
            await put_state(home, "all", state="released", by="trainer")
            for server in servers:
                await server.sleep()
        async with house(engine=pool_of(kind, servers[:1]), data_dir=tmp_path) as home:
            body = {"engine": spec(kind, servers[1].url)}
            _, answer = await home.control("POST", "/replicas", body)
            assert [one["state"] for one in answer["replicas"]] == ["released"] * 2
            assert (await home.control("GET", "/health"))[0] == 200
            await asyncio.sleep(0.1)  # health checks would be due
            assert "not to ''" in await refused(home, first, state="resumed")
            await servers[0].wake(6)
            states = await put_state(home, first, state="resumed", version=6, by="trainer")
            assert states[first] == ("serving", 6)
            assert await said(home) == TEXT
            (exchange,) = home.store.exchanges(home.gateway.session_ids()[0])
            assert sampled_under(exchange)[0] == sampled_under(exchange)[1]
        async with house(engine=pool_of(kind, servers), data_dir=tmp_path) as home:
            _, answer = await home.control("GET", "/engines")
            assert [one["state"] for one in answer["engines"]] == ["serving", "released"]
            name = spec(kind, servers[1].url)  # a list of engines leaves it out for a while
            assert (await home.control("DELETE", f"/replicas?name={name}"))[0] == 200
            _, answer = await home.control("POST", "/replicas", body)
            assert [one["state"] for one in answer["replicas"]] == ["live", "released"]
            await servers[1].wake(0)
            await home.control("DELETE", f"/replicas?name={name}")
            await put_state(home, ids_of(servers)[1], state="resumed", by="trainer")
            _, answer = await home.control("POST", "/replicas", body)
            assert [one["state"] for one in answer["replicas"]] == ["live", "live"]
        assert [one.touches for one in servers] == [[], []]


async def test_an_operator_resumes_an_engine_whose_trainer_was_killed(kind):
    async with serving(kind, hold_patience_s=0.05) as (home, server, name):
        await put_state(home, name, state="released", by="run-7")
        await server.sleep()
        caller = await home.session()
        assert (await caller.post({"model": "m", "messages": [user("hi")]}))[0] == 503
        _, answer = await home.control("GET", "/engines")
        assert answer["engines"][0]["released_by"] == "run-7"
        assert re.search(r"bridle_replica_released\{.*\} 1.0", home.gateway.metrics())
        await server.wake(0)
        await put_state(home, name, state="resumed", by="run-7")
        assert await said(home) == TEXT


async def test_sessions_are_cut_if_the_release_says_so(kind):
    async with serving(kind, pace_s=0.05) as (home, server, name):
        caller, other = await home.session(), await home.session()
        body = {"model": "m", "messages": [user("hi")]}
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            call = group.create_task(caller.post(body))
            await caller.until(lambda: server.running)
            await put_state(home, name, state="released", mode="cut")
            await server.sleep()
            assert (await call)[0] == (await other.post(body))[0] == 503
        await server.wake(0)
        await put_state(home, name, state="resumed")
        assert await said(home) == TEXT


async def test_an_engine_that_was_held_when_it_was_released_samples_after_its_resume(kind):
    async with serving(kind) as (home, server, name):
        await home.control("POST", "/policy", {"hold": "abort"})
        await put_state(home, name, state="released")
        await server.sleep()
        await home.control("POST", "/policy", {"hold": False})
        await server.wake(2)
        await put_state(home, name, state="resumed", version=2)
        assert await said(home) == TEXT


async def test_an_engine_that_does_not_answer_its_resume_is_down_until_it_does(kind):
    async with serving(kind) as (home, server, name):
        await put_state(home, name, state="released")
        server.dead = True
        assert "no released replica could be resumed" in await refused(
            home, name, state="resumed", version=2
        )
        server.dead = False
        await server.wake(2)
        assert await said(home) == TEXT


@pytest.mark.timeout(120)
async def test_every_worker_of_a_gateway_leaves_a_released_engine_alone(kind, tmp_path):
    async with asleep_servers(kind, TURN, count=1) as (server,):
        config = {"engines": [spec(kind, server.url)], "tokenizer": "builtin", "routing": QUICK}
        supervisor = Supervisor(
            settings=GatewaySettings(data_dir=tmp_path, control_token=TOKEN),
            data=tmp_path,
            workers=2,
            command=(sys.executable, "-m", "bridle.cli.gateway"),
            spec={"config": config, "fsync": False},
        )
        async with supervisor as gateway, aiohttp.ClientSession() as client:
            headers = {"Authorization": f"Bearer {TOKEN}"}

            async def engines(**body):
                url = f"{gateway.control_url}/engines/all"
                async with client.post(url, json=body, headers=headers) as answer:
                    return [one["state"] for one in (await answer.json())["engines"]]

            assert await engines(state="released", by="t") == ["released"]
            await server.sleep()
            worker = gateway.workers[1]
            os.kill(worker.pid or 0, signal.SIGKILL)
            async with asyncio.timeout(60):
                while not (worker.restarts and worker.ready.is_set()):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)  # health checks would be due
            assert server.touches == []
            await server.wake(3)
            assert await engines(state="resumed", version=3, by="t") == ["serving"]
