"""A request's cost is bounded before it is parsed."""

import asyncio
import gc
import gzip
import io
import itertools
import threading
import tracemalloc
import zlib
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from tests.gateway.house import House, house, renderer, scripted, user
from tests.gateway.test_data import request

from bridle.dialects.history import RequestHistory
from bridle.errors import RequestError
from bridle.gateway.admission import (
    GATEWAY_BODIES,
    LONG_BYTES,
    REFUSED_BYTES,
    REQUESTS,
    SESSION_BODIES,
    SESSION_BYTES,
    Admission,
    Taken,
)
from bridle.gateway.registry import InHand
from bridle.gateway.settings import GatewaySettings
from bridle.types import Message, Role, TextPart

ROUTES = {
    "chat": ("/v1/chat/completions", lambda text: {"messages": [user(text)]}),
    "responses": ("/v1/responses", lambda text: {"input": text}),
    "messages": ("/v1/messages", lambda text: {"max_tokens": 9, "messages": [user(text)]}),
    "google": (
        "/v1beta/models/m:generateContent",
        lambda text: {"contents": [{"parts": [{"text": text}]}]},
    ),
}
TOO_LONG = ("context length", "context window", "prompt is too long", "input token count")


def request_of(text: str) -> bytes:
    """A Chat request with this text."""
    return orjson.dumps({"model": "m", "messages": [user(text)]})


async def send(home: House, name: str, text: str) -> tuple[int, Any]:
    """Status and error of one request with this text."""
    caller = await home.session()
    path, body = ROUTES[name]
    raw = orjson.dumps({"model": "m", **body(text)})
    status, _, reply = await request(home, "POST", path, key=caller.handle.key, body=raw)
    return status, orjson.loads(reply).get("error")


def remembered(home: House, session_id: str) -> RequestHistory:
    """Return what a session remembers of its requests."""
    return home.known(session_id).messages


@pytest.mark.parametrize("name", list(ROUTES))
@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
async def test_a_decompression_bomb_is_decoded_up_to_the_body_limit_and_gets_413(
    name, encoding, compress
):
    path, body = ROUTES[name]
    bomb = compress(orjson.dumps({"model": "m", **body("a" * (12 << 20))}))
    async with house({"content": "a"}, max_body_bytes=1 << 20) as home:
        caller = await home.session()
        headers = {**caller.headers, "Content-Encoding": encoding}
        tracemalloc.start()
        try:
            url = home.gateway.url + path
            async with home.client.post(url, data=bomb, headers=headers) as response:
                status, reply = response.status, await response.json()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert status == 413
    assert "1048576 bytes" in reply["error"]["message"]
    assert peak < 8 << 20


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip"])
async def test_an_encoding_that_cannot_be_read_is_a_400_that_names_those_that_can(encoding):
    async with house({"content": "a"}) as home:
        caller = await home.session()
        headers = {**caller.headers, "Content-Encoding": encoding}
        async with home.client.post(caller.url, data=b"x" * 100, headers=headers) as response:
            assert response.status == 400
            error = (await response.json())["error"]
    assert error["type"] == "invalid_request_error"
    assert "gzip, deflate" in error["message"]


async def test_a_damaged_encoding_is_named_in_one_line():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        headers = {**caller.headers, "Content-Encoding": "gzip"}
        async with home.client.post(caller.url, data=b"x" * 100, headers=headers) as response:
            error = (await response.json())["error"]
    assert response.status == 400
    assert error["message"].endswith("cannot be read: Can not decode content-encoding: gzip")


@pytest.mark.parametrize("name", list(ROUTES))
async def test_more_characters_than_the_context_holds_are_refused_before_tokenising(name):
    engine = scripted({"content": "a"}, context_length=1000)
    async with house(engine=engine) as home:
        status, error = await send(home, name, "a" * (LONG_BYTES + 1000))
    assert status == 400
    assert any(words in error["message"] for words in TOO_LONG), error
    longest = renderer().chars_per_token
    assert str(-int(-(LONG_BYTES + 1000) // longest)) in error["message"]  # the least, not a count


@pytest.mark.parametrize("name", list(ROUTES))
async def test_a_prompt_of_more_tokens_than_the_context_is_refused_as_too_long(name):
    engine = scripted({"content": "a"}, context_length=20_000)
    async with house(engine=engine) as home:
        text = "some words in a row, " * 15_000
        status, error = await send(home, name, text)
    assert status == 400
    assert any(words in error["message"] for words in TOO_LONG), error


async def test_a_very_long_text_without_word_breaks_is_refused_with_that_reason():
    engine = scripted({"content": "a"}, context_length=1_000_000)
    async with house(engine=engine) as home:
        status, error = await send(home, "chat", "a" * 700_000)
    assert status == 400
    assert "without a break between words" in error["message"]


async def test_a_long_prompt_has_the_same_token_ids_as_one_rendered_in_one_piece():
    text = "def f(x):\n    return we're {x: 'é'} 12345\n" * 9000
    async with house(
        {"content": "a"}, engine=scripted({"content": "a"}, context_length=1 << 20)
    ) as home:
        caller = await home.session()
        await caller.ask([user(text)])
        await caller.ask([user(text), {"role": "assistant", "content": "a"}, user("on " * 90_000)])
        first, second = caller.exchanges
    asked = (Message(Role.USER, (TextPart(text),)),)
    whole = renderer().render(asked, (), thinking=None)
    assert first.suffix_ids.tolist() == whole.tolist()
    assert second.parent_id == first.exchange_id


async def test_others_are_answered_while_a_long_prompt_is_made():
    engine = scripted({"content": "a"}, context_length=1 << 20)
    async with house(engine=engine) as home:
        caller, other = await home.session(), await home.session()
        answered = 0
        async with asyncio.TaskGroup() as group:
            words = "some words in a row, " * 24_000
            long = group.create_task(caller.ask([user(words)]))
            while not long.done():
                async with home.client.get(home.gateway.url + "/health") as response:
                    assert response.status == 200
                await other.ask([user(f"go {answered}")])
                answered += 1
    assert answered > 2


async def test_refused_requests_leave_nothing_in_the_session_s_message_cache():
    engine = scripted({"content": "a"}, context_length=1000)
    async with house(engine=engine) as home:
        caller = await home.session()
        for number in range(3):
            body = request_of(f"{number}" + "a" * 2 * LONG_BYTES)
            assert (await caller.post(body))[0] == 400
            known = remembered(home, caller.session_id)
            assert (len(known), known.news(body)) == (0, len(body))
        text = "a" * (LONG_BYTES // 2)
        for number in range(REFUSED_BYTES // len(text) + 1):
            await caller.post({"model": "m", "n": 2, "messages": [user(f"{number}{text}")]})
        assert len(remembered(home, caller.session_id)) <= 1


async def test_a_long_history_is_not_parsed_again_by_the_next_request():
    engine = scripted({"content": "a"}, context_length=1 << 20)
    async with house(engine=engine) as home:
        caller = await home.session()
        messages = [user("some words in a row, " * 15_000)]
        answer = await caller.ask(messages)
        session = home.known(caller.session_id)
        again = orjson.dumps({"model": "m", "messages": [*messages, answer, user("on")]})
        assert session.messages.news(again) < 1000


def taking(settings: GatewaySettings) -> tuple[Admission, Any]:
    return Admission(settings, lambda _: None), SimpleNamespace(in_hand=InHand())


def test_requests_at_once_beyond_a_session_s_share_get_429():
    admission, session = taking(GatewaySettings())
    taken = [Taken(admission, session).__enter__() for _ in range(REQUESTS)]
    with pytest.raises(RequestError) as refused, Taken(admission, session):
        pass
    assert (refused.value.status, refused.value.code) == (429, "session_busy")
    taken[0].__exit__()
    with Taken(admission, session):
        assert session.in_hand.requests == REQUESTS


def test_a_session_s_capture_is_bounded():
    admission, session = taking(GatewaySettings())
    with Taken(admission, session):
        session.in_hand.captured = SESSION_BYTES
    with pytest.raises(RequestError) as refused, Taken(admission, session):
        pass
    assert (refused.value.status, refused.value.code) == (413, "request_too_large")


async def test_unknown_fields_and_messages_count_towards_a_session_s_capture_limit():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        await caller.ask([user("hi")], junk="x" * 5000)
        once = home.known(caller.session_id).in_hand.captured
        assert once > 5000
        await caller.ask([user("hi"), user("b" * 3000)], junk="x" * 5000)
        assert home.known(caller.session_id).in_hand.captured > once + 8000


async def test_token_counting_requests_do_not_fill_the_session_s_message_cache():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        url = f"{caller.handle.base_urls['anthropic']}/v1/messages/count_tokens"
        for number in range(6):
            body = {
                "model": "m",
                "messages": [user(f"{number}")],
                "junk": "x" * (REFUSED_BYTES // 4),
            }
            async with home.client.post(
                url, data=io.BytesIO(orjson.dumps(body)), headers=caller.headers
            ) as answer:
                assert answer.status == 200, await answer.read()
        assert len(home.known(caller.session_id).messages) < 5


MANY: dict[str, dict[str, Any]] = {
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 200_000}]},
    "calls": {
        "messages": [user("go"), {"role": "assistant", "tool_calls": [{"id": "c"}] * 300_000}]
    },
    "tools": {"messages": [user("go")], "tools": [{"type": "function", "function": {}}] * 200_000},
    "stop": {"messages": [user("go")], "stop": ["a"] * 300_000},
    "fields": {"messages": [user("go")], **{f"field{number}": 0 for number in range(300_000)}},
}


@pytest.mark.parametrize("name", list(MANY))
async def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(name):
    async with house({"content": "a"}) as home:
        caller = await home.session()
        raw = orjson.dumps({"model": "m", **MANY[name]})
        async with home.client.post(
            caller.url, data=io.BytesIO(raw), headers=caller.headers
        ) as response:
            refused = await response.json()
        assert (response.status, refused["error"]["code"]) == (413, "request_too_large")
        known = remembered(home, caller.session_id)
        assert (len(known), known.news(raw)) == (0, len(raw))


REFUSED_BODIES = {
    "too long by its characters": (400, request_of("a" * 600_000), {}),
    "too long by its tokens": (400, request_of("some words in a row, " * 28_000), {}),
    "refused by the engine": (400, request_of("some words in a row, " * 12_000), {}),
    "no JSON": (400, b"[" + b"a" * 600_000, {}),
    "too large": (413, gzip.compress(request_of("a" * (4 << 20))), {"Content-Encoding": "gzip"}),
}


@pytest.mark.parametrize("name", list(REFUSED_BODIES))
async def test_a_refused_body_is_freed_without_the_garbage_collector(name):
    expected, body, encoding = REFUSED_BODIES[name]
    context_length = 100_000 if name == "refused by the engine" else 20_000
    engine = scripted({"content": "a", "fault": 400}, context_length=context_length)
    async with house(engine=engine, max_body_bytes=1 << 20) as home:
        caller = await home.session()

        async def send() -> None:
            headers = {**caller.headers, **encoding, "Connection": "close"}
            async with home.client.post(caller.url, data=body, headers=headers) as response:
                assert response.status == expected, await response.read()

        await send()
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(4):
                await send()
            await caller.until(lambda: tracemalloc.get_traced_memory()[0] < 500_000)
        finally:
            tracemalloc.stop()
            gc.enable()


def test_body_bytes_at_once_are_limited_per_session_by_429_and_per_gateway_by_503():
    admission, session = taking(GatewaySettings(max_body_bytes=100))
    with Taken(admission, session) as taken:
        taken.grow(100 * SESSION_BODIES)
        with pytest.raises(RequestError) as refused:
            taken.grow(1)
        assert (refused.value.status, refused.value.code) == (429, "session_busy")
    assert admission.bytes_in_hand == session.in_hand.size == 0
    for _ in range(GATEWAY_BODIES // SESSION_BODIES):
        each: Any = SimpleNamespace(in_hand=InHand())
        Taken(admission, each).__enter__().grow(100 * SESSION_BODIES)
    with Taken(admission, session) as taken, pytest.raises(RequestError) as refused:
        taken.grow(1)
    assert (refused.value.status, refused.value.code) == (503, "overloaded")


async def test_a_finished_or_refused_request_releases_its_share_of_requests_and_bytes():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        await caller.ask([user("go")])
        await caller.post(b"no json")
        session = home.known(caller.session_id)
        await caller.until(lambda: session.in_hand.requests == 0)
        assert session.in_hand.size == 0


async def test_another_session_is_served_while_a_slow_body_arrives():
    async with house({"content": "a"}, body_timeout_s=30) as home:
        slow, other = await home.session(), await home.session()

        async def drip():
            yield b'{"model": "m", '
            await asyncio.Event().wait()

        async def send_slowly():
            await home.client.post(slow.url, data=drip(), headers=slow.headers)

        async with asyncio.TaskGroup() as group:
            sending = group.create_task(send_slowly())
            await slow.until(lambda: slow.facts.calls == 1)
            assert (await other.ask([user("go")]))["content"] == "a"
            assert not sending.done()
            sending.cancel()


async def test_decompression_of_a_large_body_yields_to_other_tasks_every_mebibyte():
    async with house({"content": "a"}, max_body_bytes=1 << 23) as home:
        caller, seen = await home.session(), set[int]()
        session = home.known(caller.session_id)

        async def others():
            while True:
                seen.add(session.in_hand.size)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(others())
            raw = gzip.compress(b" " * (1 << 24))
            status, _ = await caller.post(raw, {"Content-Encoding": "gzip"})
            ticking.cancel()
    sizes = sorted(seen)
    assert status == 413
    assert max(after - before for before, after in itertools.pairwise(sizes)) <= 1 << 20
    assert sizes[-1] >= 1 << 22


async def test_a_disconnected_client_holds_its_parsing_slot_until_its_body_is_parsed():
    """Clients that sent long bodies and left had any number of them parsed at once."""
    begun, go_on = threading.Event(), threading.Event()

    def parse(*_: object) -> None:
        begun.set()
        go_on.wait(30)
        raise RequestError("no request")

    session: Any = SimpleNamespace(in_hand=InHand(), messages=RequestHistory())
    wire: Any = SimpleNamespace(parse=parse)
    route: Any = None
    admission = Admission(GatewaySettings(), lambda _: None)
    async with asyncio.TaskGroup() as group:
        body = b" " * (LONG_BYTES + 1)
        reading = group.create_task(admission.read(session, wire, route, body))
        assert await asyncio.to_thread(begun.wait, 30)
        reading.cancel()
        for _ in range(5):  # rounds of the loop, in which a cancelled task would end
            await asyncio.sleep(0)
        held = session.in_hand.reading.locked()
        go_on.set()
    assert held
    assert reading.cancelled()
    assert not session.in_hand.reading.locked()
