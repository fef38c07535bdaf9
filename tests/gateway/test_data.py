"""The data routes: who is let in, what is refused, and in which form."""

import asyncio
import json
from random import Random
from typing import Any

import aiohttp
import orjson
import pytest
from tests.conformance.memory import MemoryStore
from tests.gateway.house import TOKEN, events, house, user

from bridle.gateway.keys import mint_key
from bridle.types import Dialect

BODY = {"model": "m", "messages": [user("go")]}


async def request(home, method, path, *, key=None, body=None, headers=None):
    """Status, headers and body of one raw request."""
    sent = dict(headers or {})
    if key is not None:
        sent["Authorization"] = f"Bearer {key}"
    data = body if isinstance(body, bytes | None) else orjson.dumps(body)
    url = home.gateway.url + path
    async with home.client.request(method, url, data=data, headers=sent) as response:
        return response.status, response.headers, await response.read()


# ---- who is let in


@pytest.mark.parametrize("prefix", ["/s/{id}/v1", "/s/{key}/v1", "/v1", "/any/prefix/v1"])
async def test_the_session_is_named_by_path_and_key_or_by_the_key_alone(prefix):
    async with house({"content": "a"}) as home:
        caller = await home.session("one")
        key = caller.handle.key
        path = prefix.format(id="one", key=key) + "/chat/completions"
        status, _, _ = await request(home, "POST", path, key=key, body=BODY)
        assert status == 200
        assert caller.facts.turns == 1


async def test_a_key_in_the_path_is_enough():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        path = f"/s/{caller.handle.key}/v1/chat/completions"
        status, _, _ = await request(home, "POST", path, body=BODY)
        assert status == 200
        status, _, _ = await request(home, "POST", path, key="sk-dummy", body=BODY)
        assert status == 200


UNKNOWN = {
    "none": None,
    "empty": "",
    "foreign": "sk-dummy",
    "wrong": "bk-wrong",
    "never-given": mint_key(),
    "control": TOKEN,
}


@pytest.mark.parametrize("key", UNKNOWN.values(), ids=UNKNOWN)
async def test_an_unknown_key_is_a_401_and_never_a_new_session(key):
    async with house({"content": "a"}) as home:
        caller = await home.session("one")
        for path in ("/v1/chat/completions", "/s/one/v1/chat/completions"):
            status, _, raw = await request(home, "POST", path, key=key, body=BODY)
            assert status == 401
            assert orjson.loads(raw)["error"]["code"] == "invalid_api_key"
        assert caller.facts.calls == 0
        assert home.gateway.session_ids() == ["one"]


async def test_a_session_key_gives_401_on_the_path_of_another_session():
    async with house({"content": "a"}) as home:
        one, other = await home.session("one"), await home.session("other")
        status, _, _ = await request(
            home, "POST", "/s/other/v1/chat/completions", key=one.handle.key, body=BODY
        )
        assert status == 401
        status, _, _ = await request(
            home,
            "POST",
            f"/s/{other.handle.key}/v1/chat/completions",
            key=one.handle.key,
            body=BODY,
        )
        assert status == 401
        assert (one.facts.calls, other.facts.calls) == (0, 0)


async def test_a_session_key_opens_no_control_route():
    async with house({"content": "a"}) as home:
        caller = await home.session("one")
        for path in ("/sessions", "/sessions/one/exchanges", "/policy", "/metrics"):
            assert (await home.control("GET", path, token=caller.handle.key))[0] == 401


@pytest.mark.parametrize(
    ("dialect", "path", "header"),
    [
        (Dialect.ANTHROPIC, "/v1/messages", "x-api-key"),
        (Dialect.OPENAI_RESPONSES, "/v1/responses", "authorization"),
        (Dialect.GOOGLE, "/v1beta/models/m:generateContent", "x-goog-api-key"),
    ],
)
async def test_a_401_has_the_shape_of_its_provider(dialect, path, header):
    async with house({"content": "a"}) as home:
        status, _, raw = await request(home, "POST", path, headers={header: "Bearer no"}, body={})
        error = orjson.loads(raw)["error"]
    assert status == 401
    expected = {
        Dialect.ANTHROPIC: ("type", "authentication_error"),
        Dialect.OPENAI_RESPONSES: ("code", "invalid_api_key"),
        Dialect.GOOGLE: ("status", "UNAUTHENTICATED"),
    }
    name, value = expected[dialect]
    assert error[name] == value


# ---- all four dialects


REQUESTS: dict[Dialect, tuple[str, Any, Any]] = {
    Dialect.ANTHROPIC: (
        "/v1/messages",
        {"model": "m", "max_tokens": 100, "messages": [user("go")]},
        ("content", 0, "text"),
    ),
    Dialect.OPENAI_CHAT: (
        "/v1/chat/completions",
        BODY,
        ("choices", 0, "message", "content"),
    ),
    Dialect.OPENAI_RESPONSES: (
        "/v1/responses",
        {"model": "m", "input": "go"},
        ("output", 0, "content", 0, "text"),
    ),
    Dialect.GOOGLE: (
        "/v1beta/models/m:generateContent",
        {"contents": [{"role": "user", "parts": [{"text": "go"}]}]},
        ("candidates", 0, "content", "parts", 0, "text"),
    ),
}


@pytest.mark.parametrize("dialect", list(Dialect))
async def test_every_dialect_is_answered_and_captured(dialect):
    path, body, where = REQUESTS[dialect]
    async with house({"content": "the answer"}) as home:
        caller = await home.session()
        prefix = f"/s/{caller.session_id}"
        status, _, raw = await request(
            home, "POST", prefix + path, key=caller.handle.key, body=body
        )
        assert status == 200, raw
        value = orjson.loads(raw)
        for step in where:
            value = value[step]
        assert value == "the answer"
        assert [exchange.dialect for exchange in caller.exchanges] == [dialect]


# ---- what is refused


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "expected an object"),
        (b"", "JSON"),
        ({"model": "m"}, "'messages'"),
        ({"model": "m", "messages": "go"}, "messages"),
        ({"model": "m", "messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"model": "m", "messages": [user("go")], "n": 2}, "n"),
    ],
)
async def test_a_malformed_body_is_a_400_that_names_what_is_wrong(body, message):
    async with house({"content": "a"}) as home:
        caller = await home.session()
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        status, reply = await caller.post(data)
        assert status == 400
        assert message in reply["error"]["message"]
        facts = caller.facts
        assert (facts.calls, facts.turns, facts.failed_last) == (1, 0, True)


async def test_a_body_over_the_limit_is_a_413_however_it_is_sent():
    async def in_pieces():
        for _ in range(5):
            yield b"x" * 1000

    async with house({"content": "a"}, max_body_bytes=2000) as home:
        caller = await home.session()
        for data in (b"x" * 5000, in_pieces()):
            async with home.client.post(caller.url, data=data, headers=caller.headers) as response:
                assert response.status == 413
                reply = orjson.loads(await response.read())
            assert reply["error"]["code"] == "request_too_large"


async def connected(home):
    host, _, port = home.gateway.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


def chat_request(key, *headers, version="1.1", path="/v1/chat/completions"):
    body = orjson.dumps(BODY)
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Authorization: Bearer {key}", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


async def answer(reader):
    """Status and body of the next reply of a connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head.split()[1]), orjson.loads(await reader.readexactly(length))


async def test_every_request_of_a_connection_is_judged_by_its_own_head():
    async with house({"content": "a"}, *[{"content": "b"}] * 3) as home:
        one, other = await home.session("one"), await home.session("other")
        reader, writer = await connected(home)
        asked = [
            (chat_request(one.handle.key), 200),
            (chat_request(one.handle.key), 200),
            (chat_request("bk-wrong"), 401),
            (chat_request(other.handle.key), 200),
            (chat_request(other.handle.key, path="/s/one/v1/chat/completions"), 401),
            (chat_request(other.handle.key, path="/v1/embeddings"), 404),
            (chat_request(one.handle.key), 200),
        ]
        for sent, status in asked:
            writer.write(sent)
            async with asyncio.timeout(60):
                assert (await answer(reader))[0] == status
        writer.close()
        assert (one.facts.turns, other.facts.turns) == (3, 1)


async def test_a_key_that_its_connection_used_before_is_dead_after_the_session_s_end():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        reader, writer = await connected(home)
        writer.write(chat_request(caller.handle.key))
        async with asyncio.timeout(60):
            assert (await answer(reader))[0] == 200
            await home.gateway.seal(caller.handle.session_id)
            writer.write(chat_request(caller.handle.key))
            assert (await answer(reader))[0] in {401, 410}
        writer.close()


@pytest.mark.parametrize(
    "how", [{"version": "1.0"}, {"headers": ["Connection: close"]}], ids=["http-1.0", "close"]
)
async def test_a_client_without_keepalive_gets_its_whole_reply_and_a_closed_connection(how):
    async with house({"content": "a"}) as home:
        caller = await home.session()
        reader, writer = await connected(home)
        sent = chat_request(
            caller.handle.key, *how.get("headers", ()), version=how.get("version", "1.1")
        )
        writer.write(sent)
        async with asyncio.timeout(60):
            status, body = await answer(reader)
            assert await reader.read() == b""
        writer.close()
        assert (status, body["choices"][0]["message"]["content"]) == (200, "a")


class LosesDeliveries(MemoryStore):
    """A store that fails to record a delivery."""

    def deliver_soon(self, delivery, failed):
        raise RuntimeError(delivery.exchange_id)


async def test_a_failed_delivery_record_after_a_whole_reply_sends_no_second_reply():
    async with house({"content": "a"}, store=LosesDeliveries()) as home:
        caller = await home.session()
        reader, writer = await connected(home)
        writer.write(chat_request(caller.handle.key))
        async with asyncio.timeout(60):
            assert (await answer(reader))[0] == 200
            assert await reader.read() == b""
        writer.close()


async def test_half_a_body_is_a_408_after_its_time():
    async with house({"content": "a"}, body_timeout_s=0.1) as home:
        caller = await home.session()
        reader, writer = await connected(home)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
            b"Authorization: Bearer " + caller.handle.key.encode() + b'\r\n\r\n{"model":'
        )
        async with asyncio.timeout(15):
            assert b"408" in await reader.readline()
        writer.close()


async def test_a_client_that_disconnects_within_its_body_leaves_no_exchange():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        _, writer = await connected(home)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
            b"Authorization: Bearer " + caller.handle.key.encode() + b'\r\n\r\n{"model":'
        )
        await caller.until(lambda: caller.facts.calls == 1)
        writer.close()
        await asyncio.sleep(0.05)
        assert caller.exchanges == []
        await caller.ask([user("go")])


async def test_a_body_that_is_not_what_its_encoding_says_is_a_400():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        async with home.client.post(
            caller.url, data=b"not gzip", headers={**caller.headers, "Content-Encoding": "gzip"}
        ) as response:
            assert response.status == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/chat/completions", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/responses/resp_1", 401),
        ("HEAD", "/", 200),
        ("HEAD", "/api/hello", 200),
    ],
)
async def test_head_probes_get_200_and_other_keyless_requests_404_or_401(method, path, status):
    async with house({"content": "a"}) as home:
        found, _, _ = await request(home, method, path)
        assert found == status


async def test_a_model_route_by_another_method_is_refused_with_the_method_that_it_takes():
    async with house({"content": "a"}) as home:
        _, _, body = await request(home, "GET", "/v1/chat/completions")
    assert b"GET of 'completions' is not served here; models are asked by POST at" in body


async def test_a_websocket_upgrade_is_a_426():
    async with house({"content": "a"}) as home:
        headers = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        }
        status, _, _ = await request(home, "GET", "/v1/responses", headers=headers)
        assert status == 426


async def test_an_unknown_earlier_response_is_a_404():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        body = {"model": "m", "input": "go", "previous_response_id": "resp_x"}
        status, _, raw = await request(
            home, "POST", "/v1/responses", key=caller.handle.key, body=body
        )
        assert status == 404
        assert "resp_x" in orjson.loads(raw)["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "kind"),
    [
        ({"anthropic-version": "2023-06-01"}, ("type", "not_found_error")),
        ({"x-goog-api-client": "x"}, ("status", "NOT_FOUND")),
        ({}, ("code", "not_found")),
    ],
)
async def test_an_unknown_route_is_a_404_in_the_error_shape_of_the_client_s_headers(headers, kind):
    async with house({"content": "a"}) as home:
        status, _, reply = await request(home, "GET", "/v1/nowhere", headers=headers)
        assert status == 404
        assert orjson.loads(reply)["error"][kind[0]] == kind[1]


# ---- what is never sampled


async def test_model_lists_are_answered_in_the_provider_s_shape():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        key = caller.handle.key
        assert (await request(home, "GET", "/v1/models"))[0] == 401
        _, _, raw = await request(home, "GET", "/v1/models", key=key)
        assert orjson.loads(raw)["data"][0]["id"] == "scripted"
        _, _, raw = await request(home, "GET", "/v1/models/any-name", key=key)
        assert orjson.loads(raw)["id"] == "any-name"
        _, _, raw = await request(home, "GET", "/v1beta/models", headers={"x-goog-api-key": key})
        assert orjson.loads(raw)["models"][0]["name"].startswith("models/")
        assert caller.facts.calls == 0


@pytest.mark.parametrize(
    ("dialect", "path", "field"),
    [
        (Dialect.ANTHROPIC, "/v1/messages/count_tokens", "input_tokens"),
        (Dialect.OPENAI_RESPONSES, "/v1/responses/input_tokens", "input_tokens"),
        (Dialect.GOOGLE, "/v1beta/models/m:countTokens", "totalTokens"),
    ],
)
async def test_tokens_are_counted_exactly_and_never_sampled(dialect, path, field):
    async with house({"content": "a"}) as home:
        caller = await home.session()
        key = caller.handle.key
        generate, body, _ = REQUESTS[dialect]
        _, _, raw = await request(home, "POST", path, key=key, body=body)
        counted = orjson.loads(raw)[field]
        assert caller.exchanges == []
        assert caller.facts.calls == 0
        await request(home, "POST", generate, key=key, body=body)
        assert caller.exchanges[0].prompt_length == counted


async def test_counting_a_continuation_includes_the_sampled_reasoning_tokens():
    async with house({"reasoning": "a long thought " * 5, "content": "a"}) as home:
        caller = await home.session()
        key = caller.handle.key
        path, body, _ = REQUESTS[Dialect.ANTHROPIC]
        _, _, raw = await request(home, "POST", path, key=key, body=body)
        content = [block for block in orjson.loads(raw)["content"] if block["type"] == "text"]
        messages = [user("go"), {"role": "assistant", "content": content}, user("on")]
        body = {**body, "messages": messages}
        _, _, raw = await request(home, "POST", f"{path}/count_tokens", key=key, body=body)
        counted = orjson.loads(raw)["input_tokens"]
        await request(home, "POST", path, key=key, body=body)
        assert caller.exchanges[1].parent_id is not None
        assert caller.exchanges[1].prompt_length == counted


async def test_a_sealed_session_s_key_is_dead_on_every_route():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        await home.gateway.seal(caller.session_id)
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models")):
            status, _, raw = await request(
                home, method, path, key=caller.handle.key, body=None if method == "GET" else BODY
            )
            assert status == 401
            assert b"ended" in raw


async def test_keys_are_not_logged(capsys):
    async with house({"fault": 500, "content": "a"}) as home:
        caller = await home.session()
        await caller.post(BODY)
        await request(home, "POST", f"/s/{caller.handle.key}/v1/chat/completions", body=BODY)
        await home.gateway.seal(caller.session_id)
    shown = "".join(capsys.readouterr())
    assert "call_failed" in shown
    assert caller.handle.key not in shown


async def test_256_streams_at_once_are_served():
    async with house({"content": "a", "delay_s": 0.2}) as home:
        callers = [await home.session(f"s{index}") for index in range(256)]
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client:
            home.client, shared = client, home.client
            async with asyncio.TaskGroup() as group:
                streams = [group.create_task(caller.stream([user("go")])) for caller in callers]
            home.client = shared
        assert all(stream.result()[-1] == "[DONE]" for stream in streams)
        assert sum(caller.facts.delivered for caller in callers) == 256


async def test_the_test_helper_parses_server_sent_events():
    assert events(b'data: {"a":1}\n\n: comment\n\ndata: [DONE]\n\n') == [{"a": 1}, "[DONE]"]


# ---- fuzz


def mangled(random: Random, value: Any) -> Any:
    """`value` with one of its parts replaced by something odd."""
    odd = [None, True, 0, -1, 1e300, "", "x" * 50, [], {}, [[]], {"type": "zzz"}, "\ud800"]
    if isinstance(value, dict) and value and random.random() < 0.8:
        key = random.choice(list(value))
        return {**value, key: mangled(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.8:
        index = random.randrange(len(value))
        return [*value[:index], mangled(random, value[index]), *value[index + 1 :]]
    return random.choice(odd)


@pytest.mark.parametrize("dialect", list(Dialect))
async def test_mutated_bodies_of_every_dialect_get_200_or_a_4xx_error(dialect):
    random = Random(dialect.value)
    path, body, _ = REQUESTS[dialect]
    async with house({"content": "a"}) as home:
        caller = await home.session()
        for _ in range(60):
            value = body
            for _ in range(random.randint(1, 3)):
                value = mangled(random, value)
            raw = json.dumps(value).encode()
            if random.random() < 0.2:
                raw = raw[: random.randrange(len(raw) + 1)]
            async with asyncio.timeout(15):
                status, _, reply = await request(
                    home, "POST", path, key=caller.handle.key, body=raw
                )
            assert status == 200 or 400 <= status < 500, (raw, reply)
            if status != 200:
                assert "error" in orjson.loads(reply)
