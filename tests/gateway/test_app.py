"""The gateway as a whole: starting, sessions, sealing, ending."""

import asyncio
import socket

import aiohttp
import numpy as np
import pytest
from tests.conformance.memory import MemoryStore
from tests.gateway.house import TOKEN, house, renderer, scripted, user
from tests.gateway.test_exchange import GatedStore
from tests.gateway.test_relay import late, sent, went

from bridle.config import Limits
from bridle.engines.base import EngineInfo
from bridle.errors import ConfigError, EngineError, StoreError
from bridle.gateway.app import GatewayServer, check_engine
from bridle.gateway.listener import listen
from bridle.gateway.settings import GatewaySettings
from bridle.gateway.weights import SetPolicy
from bridle.types import DeliveryState, LogprobMode


async def test_an_opened_session_has_a_base_url_for_openai_anthropic_and_google_clients():
    async with house({"content": "a"}) as home:
        handle = await home.gateway.open_session("one", task_id="t", metadata={"n": 1})
        base = f"{home.gateway.url}/s/one"
        assert handle.base_urls == {"anthropic": base, "openai": f"{base}/v1", "google": base}
        assert handle.key.startswith("bk-")
        (record,) = home.store.sessions()
        assert (record.session_id, record.task_id, record.metadata["n"]) == ("one", "t", 1)
        assert handle.key not in str(record)


async def test_base_urls_of_a_session_begin_with_the_configured_public_url():
    async with house({"content": "a"}, public_url="http://gateway.internal:99/") as home:
        handle = await home.gateway.open_session("one")
        assert handle.base_urls["google"] == "http://gateway.internal:99/s/one"
        assert home.gateway.control_url != home.gateway.url


async def test_session_ids_are_generated_when_missing_and_refused_when_taken():
    async with house({"content": "a"}) as home:
        first = await home.gateway.open_session()
        second = await home.gateway.open_session()
        assert first.session_id != second.session_id
        with pytest.raises(ConfigError, match="exists already"):
            await home.gateway.open_session(first.session_id)
        with pytest.raises(ConfigError, match="session id"):
            await home.gateway.open_session("a/b")
        assert home.gateway.session_ids() == [first.session_id, second.session_id]


async def test_session_facts_count_calls_turns_tokens_and_deliveries():
    async with house({"content": "a"}) as home:
        caller = await home.session(limits=Limits(max_turns=5))
        assert (caller.facts.calls, caller.facts.turns, caller.facts.delivered) == (0, 0, 0)
        await caller.ask([user("go")])
        await caller.post(b"{")
        facts = caller.facts
        assert (facts.calls, facts.turns, facts.delivered) == (2, 1, 1)
        assert facts.tokens == len(caller.exchanges[0].output_ids)
        assert facts.failed_last
        with pytest.raises(KeyError):
            home.gateway.facts("unknown")


async def test_a_session_that_cannot_be_recorded_does_not_exist():
    class Full(MemoryStore):
        async def open_session(self, session):
            raise StoreError("disk full")

    async with house({"content": "a"}, store=Full()) as home:
        for _ in range(2):
            with pytest.raises(StoreError, match="disk full"):
                await home.gateway.open_session("one")
        assert home.gateway.session_ids() == []
        status, reply = await home.control("POST", "/sessions", {"session_id": "one"})
        assert (status, reply["error"]["message"]) == (503, "disk full")


# ---- sealing


async def test_sealing_a_session_cancels_its_calls_with_401():
    engine = late()
    async with house(engine=engine) as home:
        caller = await home.session()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(caller.post({"model": "m", "messages": [user("go")]}))
            await engine.waits.wait()
            facts = await home.gateway.seal(caller.session_id)
        assert asking.result()[0] == 401
        assert (facts.turns, facts.sealed) == (0, True)
        assert await home.gateway.seal(caller.session_id) == caller.facts


async def test_an_ended_session_can_be_dropped_from_memory_and_stays_in_the_store():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        await caller.ask([user("go")])
        assert not home.gateway.forget(caller.session_id)  # it lives
        await home.gateway.seal(caller.session_id)
        assert home.gateway.forget(caller.session_id)
        assert not home.gateway.forget(caller.session_id)
        assert home.gateway.session_ids() == []
        status, _ = await caller.post({"model": "m", "messages": [user("go")]})
        assert status == 401
        assert len(home.store.exchanges(caller.session_id)) == 1


async def test_sealing_a_session_marks_its_undelivered_reply_as_abandoned():
    engine = late()
    async with house(engine=engine) as home:
        caller = await home.session()
        await went(caller, engine)
        engine.sign.set()
        await caller.until(lambda: caller.facts.turns == 1)
        facts = await home.gateway.seal(caller.session_id)
        assert (facts.turns, facts.delivered) == (1, 0)
        assert caller.delivery(0) is DeliveryState.ABANDONED


async def test_a_reply_counts_as_delivered_if_the_session_is_sealed_right_after_it():
    async with house({"content": "a"}) as home:
        for _ in range(10):
            caller = await home.session()
            await caller.ask([user("go")])
            assert (await home.gateway.seal(caller.session_id)).delivered == 1
            assert caller.delivery(0) is DeliveryState.DELIVERED


async def test_concurrent_seals_of_a_session_wait_for_its_commit_and_return_the_same_facts():
    store = GatedStore()
    async with house({"content": "a"}, store=store) as home:
        caller = await home.session()
        store.gate.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(caller.post({"model": "m", "messages": [user("go")]}))
            await store.arrived.wait()
            seals = [group.create_task(home.gateway.seal(caller.session_id)) for _ in range(2)]
            await asyncio.sleep(0.05)
            assert not any(seal.done() for seal in seals)
            store.gate.set()
        assert [seal.result().turns for seal in seals] == [1, 1]


async def test_an_unknown_session_cannot_be_sealed():
    async with house({"content": "a"}) as home:
        with pytest.raises(KeyError):
            await home.gateway.seal("unknown")


# ---- ending


async def test_closing_the_gateway_ends_calls_with_503_and_closes_its_port():
    engine = late()
    async with house(engine=engine) as home:
        caller = await home.session()
        reader, writer = await sent(caller, {"model": "m", "messages": [user("go")]})
        await engine.waits.wait()
        url = home.gateway.url
    answer = await reader.read()
    assert b"503" in answer.split(b"\r\n")[0]
    writer.close()
    host, _, port = url.removeprefix("http://").partition(":")
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection(host, int(port))


async def test_closing_the_gateway_marks_an_undelivered_reply_as_abandoned():
    store = MemoryStore()
    engine = late()
    async with house(engine=engine, store=store) as home:
        caller = await home.session("one")
        await went(caller, engine)
        engine.sign.set()
        await caller.until(lambda: caller.facts.turns == 1)
    (record,) = store.deliveries("one").values()
    assert record.state is DeliveryState.ABANDONED


# ---- starting


def gateway(engine=None, **settings):
    return GatewayServer(
        engine=engine or scripted({"content": "a"}),
        renderer=renderer(),
        store=MemoryStore(),
        settings=GatewaySettings(control_token=TOKEN, **settings),
    )


async def test_a_port_in_use_is_a_clear_error_and_leaves_nothing_behind():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for settings in ({"port": port}, {"control_port": port}):
            with pytest.raises(ConfigError, match=f":{port}: the port is in use"):
                async with gateway(**settings):
                    pass


class Lacking:
    """An engine that cannot give what training needs."""

    def __init__(self, **info):
        self._inner = scripted({"content": "a"})
        self._info = info
        self.closed = False

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def start(self):
        info = await self._inner.start()
        fields = {name: getattr(info, name) for name in EngineInfo.__slots__}
        return EngineInfo(**{**fields, **self._info})

    async def aclose(self):
        self.closed = True


@pytest.mark.parametrize(
    ("info", "missing"),
    [({"token_in": False}, "token ids"), ({"logprob_mode": LogprobMode.NONE}, "no logprobs")],
)
async def test_an_engine_without_token_ids_or_logprobs_is_refused_and_closed(info, missing):
    engine = Lacking(**info)
    with pytest.raises(EngineError, match=missing) as refused:
        async with gateway(engine):
            pass
    assert "--allow-untokenized" in str(refused.value)
    assert engine.closed


class Tokenizes(Lacking):
    """A good engine whose tokenizer is a mirror image of ours, or ours, or not reported."""

    def __init__(self, tokenizer):
        super().__init__()
        self._tokenizer = tokenizer

    async def tokenize(self, text):
        return self._tokenizer(renderer().tokenizer.encode(text, add_special_tokens=False))

    async def render(self, _messages, _tools, _arguments):
        return None


async def test_an_engine_with_another_tokenizer_is_refused_and_closed():
    engine = Tokenizes(lambda ids: np.array(ids[::-1]))
    with pytest.raises(EngineError, match=r"other ids for 'Plain.*--tokenizer DIR"):
        async with gateway(engine):
            pass
    assert engine.closed


@pytest.mark.parametrize("tokenizer", [np.array, lambda _: None])
async def test_an_engine_with_the_same_or_an_unreported_tokenizer_is_accepted(tokenizer):
    async with gateway(Tokenizes(tokenizer)) as served:
        assert served.info.token_in


async def test_an_engine_without_tokens_and_logprobs_needs_allow_untokenized():
    info = await scripted({"content": "a"}).start()
    check_engine(info, allow_untokenized=False)
    lacking = EngineInfo("m", 100, LogprobMode.NONE, token_in=False, version=0)
    check_engine(lacking, allow_untokenized=True)
    with pytest.raises(EngineError, match="'m' cannot be trained on"):
        check_engine(lacking, allow_untokenized=False)


async def test_a_control_port_separates_control_routes_from_model_routes():
    async with house({"content": "a"}, control_port=0) as home:
        caller = await home.session()
        await caller.ask([user("go")])
        assert home.gateway.control_url != home.gateway.url
        assert (await home.control("GET", "/sessions"))[0] == 200
        for path, status in (("/sessions", 404), ("/policy", 404), ("/health", 200)):
            url = home.gateway.url + path
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with home.client.get(url, headers=headers) as response:
                assert response.status == status
        url = f"{home.gateway.control_url}/v1/chat/completions"
        async with home.client.post(url, headers=caller.headers) as response:
            assert response.status == 401


async def test_sockets_passed_to_the_gateway_are_served_after_its_prepare_hook():
    prepared = []

    async def prepare(gateway: GatewayServer) -> None:
        await gateway.set_policy(SetPolicy(version=3))
        prepared.append(gateway.url)

    with listen("127.0.0.1", 0) as data, listen("127.0.0.1", 0) as control:
        ports = [one.getsockname()[1] for one in (data, control)]
        gateway = GatewayServer(
            engine=scripted({"content": "a"}),
            renderer=renderer(),
            store=MemoryStore(),
            settings=GatewaySettings(
                control_token=TOKEN, control_port=1, public_url="http://gate.example:{port}/x"
            ),
            sockets=(data, control),
            prepare=prepare,
        )
        async with gateway, aiohttp.ClientSession() as client:
            assert prepared == [""], "nothing listened yet"
            assert gateway.url == f"http://gate.example:{ports[0]}/x"
            assert gateway.control_url == f"http://127.0.0.1:{ports[1]}"
            bearer = {"Authorization": f"Bearer {TOKEN}"}
            for port, status in zip(ports, (404, 200), strict=True):
                url = f"http://127.0.0.1:{port}/policy"
                async with client.get(url, headers=bearer) as reply:
                    assert reply.status == status
            assert gateway.policy()["version"] == 3
