"""The control routes: sessions, what was captured, policy, metrics, health."""

import asyncio
import gc
import stat
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from tests.capture.made import MadeSession
from tests.conformance.memory import MemoryStore
from tests.gateway.house import TOKEN, house, scripted, user

from bridle.capture.records import Delivery
from bridle.engines.pool import EnginePool
from bridle.engines.pool_replica import Replica
from bridle.errors import ConfigError, EngineError
from bridle.gateway.control import (
    TOKEN_ENV,
    Refusal,
    TokenCheck,
    control_token,
    encode,
    exchanges_json,
)
from bridle.gateway.keys import AT_ONCE
from bridle.gateway.registry import GatewaySession
from bridle.gateway.settings import GatewaySettings
from bridle.types import DeliveryState


async def test_a_peer_that_guesses_tokens_must_wait_and_the_right_token_works():
    async with house({"content": "a"}) as home:
        for _ in range(AT_ONCE):
            assert (await home.control("GET", "/sessions", token="wrong"))[0] == 401
        url, headers = f"{home.gateway.control_url}/sessions", {"Authorization": "Bearer wrong"}
        async with home.client.get(url, headers=headers) as refused:
            assert (refused.status, int(refused.headers["Retry-After"])) == (429, 2)
            assert "too many wrong tokens" in (await refused.json())["error"]["message"]
        async with home.client.get(url) as without:
            assert without.status == 401
        assert (await home.control("GET", "/sessions"))[0] == 200


class SlowStore(MemoryStore):
    """Reads of one session wait until a test lets them go on."""

    def __init__(self):
        super().__init__()
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read(self, session_id):
        self.reading.set()
        assert self.go_on.wait(30)
        return super().read(session_id)


@pytest.mark.parametrize("what", ["exchanges", "trajectory"])
async def test_model_calls_are_answered_while_a_long_capture_is_read(what):
    store = SlowStore()
    async with house({"content": "a"}, store=store) as home:
        one = await home.session("one")
        await one.ask([user("go")])
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(home.control("GET", f"/sessions/one/{what}"))
            await one.until(store.reading.is_set)
            await one.ask([user("go")])
            assert (await home.control("GET", "/health"))[0] == 200
            assert not reading.done()
            store.go_on.set()
        assert reading.result()[0] == 200


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", "bk-key"])
async def test_every_control_route_but_health_asks_for_the_token(token):
    routes = [
        ("GET", "/sessions"),
        ("POST", "/sessions"),
        ("GET", "/sessions/one"),
        ("DELETE", "/sessions/one"),
        ("POST", "/sessions/one/reward"),
        ("GET", "/sessions/one/exchanges"),
        ("GET", "/sessions/one/trajectory"),
        ("GET", "/policy"),
        ("POST", "/policy"),
        ("GET", "/replicas"),
        ("POST", "/replicas"),
        ("DELETE", "/replicas"),
        ("GET", "/metrics"),
        ("GET", "/sessions/one/unknown"),
    ]
    async with house({"content": "a"}) as home:
        await home.session("one")
        for method, path in routes:
            assert (await home.control(method, path, token=token))[0] == 401, path
        assert (await home.control("GET", "/health", token=token)) == (200, {"status": "ok"})
        assert home.gateway.session_ids() == ["one"]


async def test_a_session_is_opened_used_read_and_ended_over_http():
    async with house({"content": "hello"}) as home:
        body = {"session_id": "one", "metadata": {"n": 1}, "limits": {"max_turns": 3}}
        status, opened = await home.control("POST", "/sessions", body)
        assert status == 200
        assert opened["session_id"] == "one"
        assert opened["base_url"]["openai"] == f"{home.gateway.url}/s/one/v1"
        url = opened["base_url"]["openai"] + "/chat/completions"
        headers = {"Authorization": f"Bearer {opened['key']}"}
        request: Any = {"model": "m", "messages": [user("go")]}
        async with home.client.post(url, json=request, headers=headers) as response:
            reply = await response.json()
        request["messages"] += [reply["choices"][0]["message"], user("on")]
        async with home.client.post(url, json=request, headers=headers) as response:
            assert response.status == 200

        _, listed = await home.control("GET", "/sessions")
        assert [session["session_id"] for session in listed["sessions"]] == ["one"]
        _, facts = await home.control("GET", "/sessions/one")
        assert (facts["turns"], facts["delivered"], facts["outcome"]) == (2, 2, None)

        _, read = await home.control("GET", "/sessions/one/exchanges")
        first, second = read["exchanges"]
        assert second["parent_id"] == second["continues"] == first["exchange_id"]
        before = first["prompt_ids"] + first["output_ids"]
        assert second["prompt_ids"][: len(before)] == before
        assert len(first["logprobs"]) == len(first["output_ids"])
        assert first["versions"] == [{"version": 0, "start": 0, "end": len(first["output_ids"])}]
        assert (first["delivered"], first["finish_reason"]) == (True, "stop")
        assert first["reply"]["choices"][0]["message"]["content"] == "hello"

        for builder, traces in (("prefix_merging", 1), ("per_request", 2)):
            _, trajectory = await home.control("GET", f"/sessions/one/trajectory?builder={builder}")
            assert len(trajectory["traces"]) == traces
            stats = trajectory["metadata"]["stats"]
            excluded = sum(stats["tokens_excluded"].values())
            assert stats["tokens_captured"] == stats["tokens_trained"] + excluded

        status, facts = await home.control("DELETE", "/sessions/one")
        assert (status, facts["sealed"]) == (200, True)
        async with home.client.post(url, json=request, headers=headers) as response:
            assert response.status == 401
        assert (await home.control("DELETE", "/sessions/one"))[0] == 200
        _, facts = await home.control("GET", "/sessions/one")
        assert facts["outcome"]["status"] == "COMPLETED"
        assert len((await home.control("GET", "/sessions/one/exchanges"))[1]["exchanges"]) == 2


async def test_the_last_reward_given_to_a_session_counts_once_it_has_ended():
    async with house({"content": "hello"}) as home:
        await home.session("one")
        first = {"reward": 1, "trace_rewards": [0.5], "by": "ann", "why": "looked right"}
        status, given = await home.control("POST", "/sessions/one/reward", first)
        assert (status, given["reward"], given["by"]) == (200, 1.0, "ann")
        assert (await home.control("GET", "/sessions/one/trajectory"))[1]["reward"] is None
        await home.control("DELETE", "/sessions/one")
        assert (await home.control("GET", "/sessions/one/trajectory"))[1]["reward"] == 1.0
        await home.control("POST", "/sessions/one/reward", {"reward": 0.25, "why": "was not"})
        status, facts = await home.control("GET", "/sessions/one")
        assert facts["outcome"]["reward"] == 0.25
        assert [each["why"] for each in facts["outcome"]["metadata"]["scores"]] == [
            "looked right", "was not",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "reward"),
        ({"reward": "much"}, "reward"),
        ({"reward": 1, "trace_rewards": [None]}, "trace_rewards"),
        ({"reward": 1, "score": 2}, "score"),
    ],
)
async def test_an_invalid_reward_is_a_400_that_names_its_field(body, field):
    async with house({"content": "hello"}) as home:
        await home.session("one")
        status, answer = await home.control("POST", "/sessions/one/reward", body)
        assert status == 400
        assert field in answer["error"]["message"]
        status, _ = await home.control("POST", "/sessions/two/reward", {"reward": 1})
        assert status == 404


async def test_a_deleted_session_leaves_no_object_and_is_still_known_by_its_id():
    async with house({"content": "hello"}) as home:
        caller = await home.session("one")
        await caller.ask([user("go")])
        gone = weakref.ref(home.known("one"))
        _, before = await home.control("DELETE", "/sessions/one")
        gc.collect()
        assert gone() is None
        assert home.gateway.session_ids() == []
        _, facts = await home.control("GET", "/sessions/one")
        assert facts.pop("outcome")["status"] == "COMPLETED"
        assert facts == before
        assert (await home.control("DELETE", "/sessions/one"))[1] == before
        assert (await home.control("POST", "/sessions", {"session_id": "one"}))[0] == 409
        assert len((await home.control("GET", "/sessions/one/exchanges"))[1]["exchanges"]) == 1
        status, refused = await caller.post({"model": "m", "messages": [user("on")]})
        assert (status, "has ended" in refused["error"]["message"]) == (401, True)


async def test_opening_a_session_does_not_iterate_over_other_sessions():
    async with house({"content": "hello"}) as home:
        looked = 0

        class Seen(GatewaySession):
            def __getattribute__(self, name):
                nonlocal looked
                looked += 1
                return super().__getattribute__(name)

        for _ in range(5):
            home.known((await home.session()).session_id).__class__ = Seen
        for body in ({}, {"session_id": "named"}):
            assert (await home.control("POST", "/sessions", body))[0] == 200
        assert looked == 0
        assert len((await home.control("GET", "/sessions"))[1]["sessions"]) == 7
        assert looked >= 5


async def test_sessions_are_listed_in_pages():
    async with house({"content": "hello"}) as home:
        for number in range(5):
            await home.session(f"s{number}")
        _, first = await home.control("GET", "/sessions?limit=2")
        await home.control("DELETE", "/sessions/s1")
        _, second = await home.control("GET", f"/sessions?limit=2&after={first['next']}")
        _, third = await home.control("GET", f"/sessions?limit=2&after={second['next']}")
        pages = [[one["session_id"] for one in page["sessions"]] for page in (first, second, third)]
        assert pages == [["s0", "s1"], ["s2", "s3"], ["s4"]]
        assert third["next"] is None
        status, refused = await home.control("GET", "/sessions?limit=many")
        assert (status, refused["error"]["message"]) == (
            400,
            "query parameter limit='many': give a whole number",
        )


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"session_id": "a/b"}, 400, "session id"),
        ({"sesion": "a"}, 400, "sesion"),
        ({"sampling": {"temperature": 1}}, 400, "sampling.temperature"),
        ({"session_id": "taken"}, 409, "'taken' exists already"),
        ([], 400, "the request's body"),
    ],
)
async def test_an_invalid_request_to_open_a_session_is_refused_with_its_reason(
    body, status, message
):
    async with house({"content": "a"}) as home:
        await home.session("taken")
        reported, reply = await home.control("POST", "/sessions", body)
        assert reported == status
        assert message in reply["error"]["message"]


async def test_an_empty_body_opens_a_session():
    async with house({"content": "a"}) as home:
        status, opened = await home.control("POST", "/sessions")
        assert status == 200
        assert opened["session_id"] in home.gateway.session_ids()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/sessions/none", 404),
        ("DELETE", "/sessions/none", 404),
        ("GET", "/sessions/none/exchanges", 404),
        ("GET", "/sessions/none/trajectory", 404),
        ("GET", "/sessions/one/unknown", 404),
        ("PUT", "/sessions", 404),
        ("POST", "/health", 404),
        ("GET", "/sessions/one/trajectory?builder=none", 400),
    ],
)
async def test_unknown_sessions_and_control_routes_are_refused_with_a_message(method, path, status):
    async with house({"content": "a"}) as home:
        await home.session("one")
        reported, reply = await home.control(method, path)
        assert reported == status
        assert reply["error"]["message"]


async def test_a_body_that_is_too_large_is_refused():
    async with house({"content": "a"}) as home:
        status, _ = await home.control("POST", "/policy", "x" * 1_040_000)
        assert status == 413


async def test_engines_are_released_and_resumed_with_a_version_through_the_policy_route():
    async with house({"content": "a"}) as home:

        async def states():
            _, reported = await home.control("GET", "/replicas")
            return [(one["state"], one["version"]) for one in reported["replicas"]]

        assert (await home.control("POST", "/policy", {"released": True}))[0] == 200
        assert await states() == [("released", 0)]
        assert (await home.control("GET", "/health"))[0] == 200
        serving = {"released": False, "version": 8}
        assert (await home.control("POST", "/policy", serving))[0] == 200
        assert await states() == [("live", 8)]
        status, reported = await home.control(
            "POST", "/policy", {"released": True, "replicas": ["z"]}
        )
        assert (status, "no replica 'z'" in reported["error"]["message"]) == (400, True)
        status, reported = await home.control("POST", "/policy", {**serving, "weights": "/w"})
        assert (status, "only a released replica" in reported["error"]["message"]) == (400, True)
        status, reported = await home.control("POST", "/policy", {**serving, "released": True})
        assert (status, "at the resume" in reported["error"]["message"]) == (400, True)


async def test_the_policy_can_be_read_and_set():
    async with house({"content": "a"}) as home:
        _, policy = await home.control("GET", "/policy")
        assert policy.pop("replicas") == ["engine"]
        assert [one["state"] for one in policy.pop("engines")] == ["serving"]
        assert policy == {"version": 0, "paused": False, "hold": None, "model": "scripted"}
        _, policy = await home.control("POST", "/policy", {"version": 3, "paused": True})
        assert (policy["version"], policy["paused"]) == (3, True)
        _, policy = await home.control("POST", "/policy", {"paused": False})
        assert (policy["version"], policy["paused"]) == (3, False)


async def test_metrics_count_requests_calls_deliveries_and_open_sessions():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        await caller.ask([user("go")])
        await caller.post(b"{")
        _, text = await home.control("GET", "/metrics")
    route = 'dialect="openai_chat",route="generate"'
    assert f'bridle_requests_total{{{route},status="200"}} 1.0' in text
    assert f'bridle_requests_total{{{route},status="400"}} 1.0' in text
    assert 'bridle_calls_total{outcome="committed"} 1.0' in text
    assert 'bridle_deliveries_total{state="delivered"} 1.0' in text
    assert "bridle_sessions_open 1.0" in text
    assert "bridle_calls_in_flight 0.0" in text


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"limits":{"max_turns":%b}}' % (b"9" * 400), "limits.max_turns"),
        (b'{"metadata":{"a":%b}}' % (b"9" * 400), "metadata.a"),
        (b'{"metadata":%b}' % (b'{"a":' * 900 + b"1" + b"}" * 900), "metadata.a"),
        (b'{"metadata":null}', "metadata"),
    ],
)
async def test_a_session_of_unreadable_fields_is_refused_by_their_name(body, field):
    async with house({"content": "a"}) as home:
        url, headers = f"{home.gateway.control_url}/sessions", {"Authorization": f"Bearer {TOKEN}"}
        async with home.client.post(url, data=body, headers=headers) as response:
            assert response.status == 400
            assert field in (await response.json())["error"]["message"]


class Sick:
    """An engine that cannot sample now."""

    def __init__(self):
        self._inner = scripted({"content": "a"})

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def health(self):
        raise EngineError("secret address")


async def test_health_is_503_without_details_when_the_engine_is_unhealthy():
    async with house(engine=Sick()) as home:
        status, reply = await home.control("GET", "/health", token="")
        assert status == 503
        assert "secret" not in orjson.dumps(reply).decode()


async def test_a_bug_in_a_control_route_is_a_500_without_details():
    class Broken(EnginePool):
        async def health(self):
            raise KeyError("secret")

    broken = Broken([Replica("a", scripted({"content": "a"}))])
    async with house(engine=broken) as home:
        status, reply = await home.control("GET", "/health")
        assert status == 500
        assert "secret" not in str(reply)


# ---- the token


def test_a_token_that_is_no_utf_8_is_wrong():
    http: Any = SimpleNamespace(headers={"Authorization": "Bearer \udcff"}, remote="10.0.0.1")
    with pytest.raises(Refusal) as refused:
        TokenCheck("a")(http)
    assert refused.value.status == 401


def test_a_token_is_made_once_and_kept_for_its_owner_only(tmp_path):
    settings = GatewaySettings(data_dir=tmp_path / "data")
    token = control_token(settings)
    kept = tmp_path / "data" / "control.token"
    assert control_token(settings) == token == kept.read_text().strip()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert len(token) >= 43


def test_a_given_token_comes_before_the_environment_and_that_before_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_ENV, "from-the-environment\n")  # as a file of a secret ends
    assert control_token(GatewaySettings(data_dir=tmp_path)) == "from-the-environment"
    given = GatewaySettings(data_dir=tmp_path, control_token="given-given-given")
    assert control_token(given) == "given-given-given"
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_the_token_lives_in_memory_only():
    assert control_token(GatewaySettings()) != control_token(GatewaySettings())


def test_a_token_file_that_cannot_be_had_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"control\.token"):
        control_token(GatewaySettings(data_dir=tmp_path / "file"))
    (tmp_path / "control.token").mkdir()
    with pytest.raises(ConfigError, match=r"control\.token"):
        control_token(GatewaySettings(data_dir=tmp_path))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "control.token").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        control_token(GatewaySettings(data_dir=tmp_path / "empty"))


@pytest.fixture
def made():
    return MadeSession("s1", seed=3)


def shown(made):
    capture = made.capture()
    return orjson.loads(encode(exchanges_json(capture.exchanges, capture.deliveries)))


def test_an_exchange_that_extends_another_is_shown_with_its_whole_prompt(made):
    made.call(exchange_id="first", new=6, output=4)
    made.call("first", exchange_id="second", new=3, output=2)
    made.call("first", exchange_id="branch", new=5, output=1)
    made.call("branch", exchange_id="in part", kept=8, new=2)
    for exchange in shown(made):
        exchange_id = exchange["exchange_id"]
        assert exchange["prompt_ids"] == made.prompts[exchange_id].tolist()
        assert exchange["output_ids"] == made.outputs[exchange_id].tolist()
        assert len(exchange["logprobs"]) == len(exchange["output_ids"])


def test_an_exchange_has_the_promised_keys(made):
    made.call()
    (exchange,) = shown(made)
    promised = {
        "exchange_id",
        "parent_id",
        "continues",
        "root_reason",
        "dialect",
        "kind",
        "prompt_ids",
        "output_ids",
        "logprobs",
        "versions",
        "finish_reason",
        "delivered",
    }
    assert promised <= set(exchange)


def test_only_a_delivered_reply_counts_as_delivered(made):
    made.call(state=None)
    capture = made.capture()
    (exchange,) = capture.exchanges
    for state in (None, *DeliveryState):
        record = Delivery(exchange.exchange_id, "s1", state, 0.0) if state else None
        deliveries = {exchange.exchange_id: record} if record else {}
        (seen,) = exchanges_json([exchange], deliveries)
        assert seen["delivered"] is (state is DeliveryState.DELIVERED)
        assert seen["delivery"] == (None if state is None else state.value)


def test_prompts_of_exchanges_that_extend_an_unreadable_one_are_null(made):
    made.call(exchange_id="lost")
    made.call("lost", exchange_id="child")
    made.call("child", exchange_id="grandchild")
    capture = made.capture()
    seen = exchanges_json(capture.exchanges[1:], capture.deliveries)
    assert [exchange["prompt_ids"] for exchange in seen] == [None, None]
    assert [len(exchange["output_ids"]) for exchange in seen] == [5, 5]
