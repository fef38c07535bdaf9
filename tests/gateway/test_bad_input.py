"""Whatever a client sends, on every route: a refusal in shape or a right answer, never a 500."""

import asyncio
import json
from random import Random

import orjson
import pytest
from tests.gateway import test_counting as rich
from tests.gateway.house import house
from tests.gateway.test_data import connected, mangled, request

from bridle.types import Dialect

ROUTES = {
    "chat": ("/v1/chat/completions", rich.chat()),
    "responses": ("/v1/responses", rich.responses()),
    "compact": ("/v1/responses/compact", rich.responses()),
    "input_tokens": ("/v1/responses/input_tokens", rich.responses()),
    "messages": ("/v1/messages", rich.messages()),
    "count_tokens": ("/v1/messages/count_tokens", rich.messages()),
    "google": ("/v1beta/models/m:generateContent", rich.google()),
    "google stream": ("/v1beta/models/m:streamGenerateContent?alt=sse", rich.google()),
    "countTokens": ("/v1beta/models/m:countTokens", rich.google()),
}
ROUNDS = 40


@pytest.mark.parametrize("name", list(ROUTES))
async def test_mutated_request_bodies_get_200_or_a_4xx_with_an_error_message(name):
    random = Random(name)
    path, body = ROUTES[name]
    async with house({"content": "a"}) as home:
        caller = await home.session()
        for _ in range(ROUNDS):
            value = body
            for _ in range(random.randint(1, 4)):
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
                error = orjson.loads(reply)["error"]
                assert error["message"], (raw, reply)


@pytest.mark.parametrize("name", ["chat", "responses", "messages", "google"])
async def test_unknown_request_fields_are_accepted(name):
    path, body = ROUTES[name]
    async with house({"content": "a"}) as home:
        caller = await home.session()
        odd = {**body, "x_unknown": {"deep": [1, None]}, "metadata": None}
        status, _, raw = await request(home, "POST", path, key=caller.handle.key, body=odd)
        assert status == 200, raw


@pytest.mark.parametrize(
    ("path", "change", "where"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0]"),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": 1}]}, "tools[0]"),
        ("/v1/chat/completions", {"temperature": "hot"}, "temperature"),
        ("/v1/responses", {"input": [{"type": "message", "role": 7}]}, "input[0].role"),
        ("/v1/responses", {"previous_response_id": 5}, "previous_response_id"),
        ("/v1/responses/compact", {"input": 5}, "input"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [5]}]}, "messages[0].content"),
        ("/v1/messages", {"thinking": "on"}, "thinking"),
        ("/v1/messages/count_tokens", {"system": 5}, "system"),
        ("/v1beta/models/m:generateContent", {"contents": [{"parts": "go"}]}, "contents[0].parts"),
        ("/v1beta/models/m:countTokens", {"generationConfig": 1}, "generationConfig"),
    ],
)
async def test_a_field_of_a_wrong_type_is_a_400_that_names_its_path(path, change, where):
    body = next(body for route, body in ROUTES.values() if route == path)
    async with house({"content": "a"}) as home:
        caller = await home.session()
        wrong = {**body, **change}
        status, _, raw = await request(home, "POST", path, key=caller.handle.key, body=wrong)
        assert status == 400
        assert where in orjson.loads(raw)["error"]["message"]


def nested(levels):
    value: dict[str, object] = {"type": "string"}
    for _ in range(levels):
        value = {"type": "object", "properties": {"a": value}}
    return value


def deep_tool(route):
    """A tool list of the route's provider with a schema of 900 levels."""
    function = {"name": "f", "parameters": nested(450)}
    match route:
        case "chat":
            return [{"type": "function", "function": function}]
        case "responses" | "compact" | "input_tokens":
            return [{"type": "function", **function}]
        case "messages" | "count_tokens":
            return [{"name": "f", "input_schema": nested(450)}]
    return [{"functionDeclarations": [function]}]


@pytest.mark.parametrize("name", list(ROUTES))
async def test_deep_schemas_null_lists_and_huge_numbers_are_400s_with_their_field(name):
    path, body = ROUTES[name]
    items = "contents" if "contents" in body else "input" if "input" in body else "messages"
    changes = [("tools", {"tools": deep_tool(name)}), (items, {items: None})]
    if items == "contents":
        changes.append(("topK", {"generationConfig": {"topK": 10**400}}))
    else:
        changes.append(("top_k", {"top_k": 10**400}))
    async with house({"content": "a"}) as home:
        caller = await home.session()
        for field, change in changes:
            raw = json.dumps({**body, **change}).encode()
            status, _, reply = await request(home, "POST", path, key=caller.handle.key, body=raw)
            assert status == 400, (field, reply)
            assert field in orjson.loads(reply)["error"]["message"], reply


OTHER = (
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/files"),
    ("POST", "/v1/audio/speech"),
    ("POST", "/v1/images/generations"),
    ("POST", "/v1/moderations"),
    ("POST", "/v1/fine_tuning/jobs"),
    ("GET", "/v1/vector_stores"),
    ("GET", "/v1/chat/completions/chatcmpl-1"),
    ("PUT", "/v1/responses"),
)


@pytest.mark.parametrize(("method", "path"), OTHER)
async def test_unserved_openai_routes_are_a_404_in_openai_s_error_shape(method, path):
    async with house({"content": "a"}) as home:
        caller = await home.session()
        status, _, raw = await request(home, method, path, key=caller.handle.key, body={})
        error = orjson.loads(raw)["error"]
        assert (status, error["code"], error["type"]) == (404, "not_found", "invalid_request_error")


@pytest.mark.parametrize(
    ("method", "path", "headers", "shape"),
    [
        ("POST", "/v1/messages/batches", {"anthropic-version": "2023-06-01"}, Dialect.ANTHROPIC),
        ("GET", "/v1/files", {"anthropic-version": "2023-06-01"}, Dialect.ANTHROPIC),
        ("POST", "/v1/complete", {"anthropic-version": "2023-06-01"}, Dialect.ANTHROPIC),
        ("POST", "/v1beta/models/m:embedContent", {}, Dialect.GOOGLE),
        ("POST", "/v1beta/models/m:batchGenerateContent", {}, Dialect.GOOGLE),
        ("POST", "/v1beta/cachedContents", {"x-goog-api-key": "k"}, Dialect.GOOGLE),
        ("GET", "/v1beta/files", {"x-goog-api-key": "k"}, Dialect.GOOGLE),
    ],
)
async def test_unserved_anthropic_and_google_routes_are_a_404_in_their_error_shape(
    method, path, headers, shape
):
    async with house({"content": "a"}) as home:
        status, _, raw = await request(home, method, path, headers=headers, body={})
        error = orjson.loads(raw)["error"]
        assert status == 404
        if shape is Dialect.GOOGLE:
            assert error["status"] == "NOT_FOUND"
        else:
            assert error["type"] == "not_found_error"


# ---- slow clients


def head_of(caller, length):
    key = caller.handle.key.encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n"
        b"Content-Length: %d\r\n\r\n" % (key, length)
    )


async def test_a_body_that_trickles_is_a_408_and_others_are_served_meanwhile():
    async with house({"content": "a"}, body_timeout_s=3) as home:
        caller = await home.session()
        reader, writer = await connected(home)
        writer.write(head_of(caller, 1000))

        async def trickle():
            while True:
                writer.write(b" ")
                await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as group:
            task = group.create_task(trickle())
            await caller.ask([{"role": "user", "content": "go"}])
            async with asyncio.timeout(15):
                assert b"408" in await reader.readline()
            task.cancel()
        writer.close()


async def test_a_head_that_never_ends_costs_one_connection_only():
    async with house({"content": "a"}, head_timeout_s=3) as home:
        caller = await home.session()
        slow = [await connected(home) for _ in range(20)]
        for _, writer in slow:
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nX-Slow: ")
        await caller.ask([{"role": "user", "content": "go"}])
        for reader, writer in slow:
            async with asyncio.timeout(15):
                assert await reader.read() == b""
            writer.close()


async def test_a_body_over_the_limit_is_a_413_in_every_dialect():
    async with house({"content": "a"}, max_body_bytes=500) as home:
        caller = await home.session()
        for path, _ in ROUTES.values():
            big = b'{"model":"' + b"x" * 1000 + b'"}'
            status, _, raw = await request(home, "POST", path, key=caller.handle.key, body=big)
            assert (status, "error" in orjson.loads(raw)) == (413, True), path


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/realtime"])
async def test_a_websocket_upgrade_gets_426_on_the_responses_route_and_404_elsewhere(path):
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    async with house({"content": "a"}) as home:
        status, _, _ = await request(home, "GET", path, headers=headers)
        assert status == (426 if path == "/v1/responses" else 404)
