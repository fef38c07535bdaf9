import asyncio
import json
import socket
from contextlib import closing
from itertools import pairwise

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.stub import Stub, events
from yarl import URL

from bridle.engines import connection, http
from bridle.engines.base import CutError
from bridle.engines.connection import AbortedError, HttpCall
from bridle.engines.http import (
    EngineClient,
    EventDecoder,
    engine_error,
    parse_retry_after,
)
from bridle.errors import ConfigError, ContextOverflowError, EngineError

HTML = b"\n<!doctype html><title>502</title>"


@pytest.fixture
async def client():
    """Makes a stub server with these replies, and a client of it."""
    opened = []

    async def make(timeout_s=30.0, api_key=None, **replies):
        stub = Stub(**replies)
        await stub.__aenter__()
        made = EngineClient(stub.url + "/v1/", api_key=api_key, timeout_s=timeout_s)
        opened.append((stub, made))
        return stub, made

    yield make
    for stub, made in opened:
        await made.aclose()
        await made.aclose()
        await stub.__aexit__()


async def drop(request):
    request.transport.close()
    return web.Response()


async def half(request):
    response = web.StreamResponse()
    response.content_length = 1000
    await response.prepare(request)
    await response.write(b'{"half":')
    request.transport.close()
    return response


async def silence(_request):
    await asyncio.sleep(30)


async def trickle(request):
    """One event, then nothing."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    await asyncio.sleep(30)
    return response


async def listed(stream):
    return [data async for several in stream for data in several]


async def test_the_api_key_is_sent_and_a_trailing_v1_is_dropped_from_the_url(client):
    stub, made = await client(api_key="k", ok={"a": 1})
    assert await made.get("/ok") == {"a": 1}
    assert stub.headers[0]["Authorization"] == "Bearer k"
    assert made.base_url == stub.url


async def test_a_key_s_line_break_at_its_end_is_dropped_and_one_inside_is_refused(client):
    stub, made = await client(api_key="k\n", ok={"a": 1})
    await made.get("/ok")
    assert stub.headers[0]["Authorization"] == "Bearer k"

    with pytest.raises(ConfigError, match="BRIDLE_ENGINE_API_KEY takes the key alone") as raised:
        EngineClient(stub.url, api_key="sk-one\nsk-two", timeout_s=1)
    assert "sk-" not in str(raised.value)


async def test_an_error_that_repeats_the_api_key_hides_it(client):
    key = "sk-very-secret"
    message = f"{'x' * 290} {key} is not valid"  # a long error is cut, in the middle of the key
    error = {"error": {"message": message}}
    _, made = await client(api_key=key, json=(401, error), text=(401, message.encode()))
    for path in ("/json", "/text"):
        with pytest.raises(EngineError, match=r"x \*\*\*") as raised:
            await made.get(path)
        assert "sk-" not in str(raised.value)


async def test_user_info_of_a_url_is_sent_and_never_shown(client):
    stub, _ = await client()
    own = EngineClient(stub.url.replace("://", "://name:secret@"), api_key=None, timeout_s=1)
    try:
        await own.get("/v1/models")
        await own.post("/v1/models", b"{}", HttpCall(), prompt_tokens=1)
        sent = [headers["Authorization"] for headers in stub.headers]
        assert sent == ["Basic bmFtZTpzZWNyZXQ="] * 2
        await stub.__aexit__()
        for asked in (own.get("/health"), own.post("/x", b"{}", HttpCall(), prompt_tokens=1)):
            with pytest.raises(EngineError) as raised:
                await asked
            assert "secret" not in str(raised.value)
    finally:
        await own.aclose()


async def test_an_optional_path_may_be_missing(client):
    _, made = await client(health=b"")
    assert await made.get("/nowhere", optional=True) == {}
    assert await made.get("/health") == {}
    with pytest.raises(EngineError, match="answered 404") as caught:
        await made.get("/nowhere")
    assert (caught.value.status, caught.value.retryable) == (404, False)


@pytest.mark.parametrize(
    ("status", "body", "retryable", "says"),
    [
        (500, b'{"error":{"message":"dead"}}', True, "answered 500: dead"),
        (429, b'{"error":"slow"}', True, "slow"),
        (503, b'{"detail":"loading"}', True, "loading"),
        (502, HTML, True, "answered 502 with a page, not JSON"),
        (200, HTML, False, "with a page, not JSON"),
        (400, b'{"message":"bad"}', False, "bad"),
        (401, b"{}", False, "is the API key right"),
        (422, b'{"detail":[{"loc":"x"}]}', False, "loc"),
        (418, b"", False, "(empty body)"),
        (400, b"plain words", False, "plain words"),
    ],
)
def test_http_failures_have_the_server_s_message_and_are_retryable_by_status(
    status, body, retryable, says
):
    error = engine_error(status, body, URL("http://h/p"))
    assert says in str(error)
    assert (error.status, error.retryable) == (status, retryable)


@pytest.mark.parametrize(
    "text",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
        "maximum model length of 4096 reached",
        # vLLM 0.32.0: the chat route, then completions.
        "Input length (5000) exceeds model's maximum context length (4096).",
        "This model's maximum context length is 4096 tokens. However, your prompt contains 5000.",
    ],
)
def test_a_server_s_context_overflow_message_raises_context_overflow_error(text):
    body = json.dumps({"error": {"message": text}}).encode()
    error = engine_error(400, body, URL("http://h/p"), prompt_tokens=5000)
    assert isinstance(error, ContextOverflowError)
    assert (error.prompt_tokens, error.context_length) == (5000, 4096)


async def test_a_refused_connection_is_a_retryable_error():
    made = EngineClient("http://127.0.0.1:9", api_key=None, timeout_s=1)
    with pytest.raises(EngineError, match="cannot be reached") as caught:
        await made.get("/v1/models")
    assert caught.value.retryable
    await made.aclose()


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (drop, EngineError, "cannot be reached"),
        (half, CutError, "ended in mid-reply"),
        (silence, EngineError, r"sent nothing for 0\.5 s"),
        (HTML, EngineError, "not JSON"),
        (b"[]", EngineError, "answered 200"),
        (503, EngineError, "answered 503"),
    ],
)
async def test_a_reply_that_fails_is_an_engine_error(client, reply, kind, says):
    _, made = await client(timeout_s=0.5 if reply is silence else 15, call=reply)
    with pytest.raises(kind, match=says):
        await made.post("/call", b"{}", HttpCall(), prompt_tokens=1)


async def test_an_unaccepted_connection_is_reported_as_such_and_not_as_a_silent_server(monkeypatch):
    """Its machine drops packets, as this listener does whose queue is full."""
    for module in (connection, http):
        monkeypatch.setattr(module, "CONNECT_S", 0.1)
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as listener:
        address = listener.getsockname()
        first, second = (socket.socket() for _ in range(2))
        with closing(first), closing(second):
            first.connect(address)
            second.setblocking(False)
            second.connect_ex(address)
            made = EngineClient(f"http://127.0.0.1:{address[1]}", api_key=None, timeout_s=1800)
            for asked in (
                made.get("/v1/models"),
                made.post("/call", b"{}", HttpCall(), prompt_tokens=1),
            ):
                with pytest.raises(EngineError, match=r"took no connection in 0\.1 s") as caught:
                    await asked
                assert caught.value.retryable
            await made.aclose()


async def test_request_bodies_of_3_mib_are_sent_whole(client):
    stub, made = await client(call={"ok": 1})
    text = "x" * (3 << 20)
    assert await made.post("/call", json.dumps({"a": text}).encode(), HttpCall(), prompt_tokens=1)
    assert stub.bodies[0]["a"] == text


async def test_events_are_read_however_they_are_cut(client):
    parts = [b": comment\n", b"da", b"ta: 1\n", b"\n", b"event: x\r\nid: 3\r\nda", b"ta: 2\r\n\r",
             b"\ndata:3\ndata: 4\n\n", b"data: [DONE]\n\ndata: late\n\n"]  # fmt: skip
    _, made = await client(call=events(*parts, done=False))
    found = await listed(made.stream("/call", b"{}", HttpCall(), prompt_tokens=1))
    assert found == [b"1", b"2", b"3\n4"]


async def test_events_of_one_write_arrive_as_one_list(client):
    _, made = await client(call=events(b"data: 1\n\ndata: 2\n\n"))
    reads = [several async for several in made.stream("/call", b"{}", HttpCall(), prompt_tokens=1)]
    assert reads == [[b"1", b"2"]]


@given(st.data())
def test_events_are_the_same_however_their_bytes_are_split(data):
    reply = data.draw(st.lists(st.binary().map(lambda one: one.hex().encode()), max_size=6))
    ends = data.draw(st.sampled_from([b"\n\n", b"\r\n\n", b"\n\n: note\n\n", b"\nid: 1\n\n"]))
    text = b"".join(b"data: " + one + ends for one in reply)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    decoder = EventDecoder()
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    assert [one for piece in pieces for one in decoder.feed(piece)] == reply


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (503, EngineError, "answered 503"),
        (b"{}", EngineError, "answered 200"),
        (HTML, EngineError, "not JSON"),
        (drop, EngineError, "cannot be reached"),
        (trickle, CutError, "stopped sending"),
    ],
)
async def test_a_stream_that_fails_is_an_engine_error(client, reply, kind, says):
    _, made = await client(timeout_s=0.5 if reply is trickle else 15, call=reply)
    with pytest.raises(kind, match=says):
        await listed(made.stream("/call", b"{}", HttpCall(), prompt_tokens=1))


async def test_a_stream_whose_connection_breaks_is_cut(client):
    async def broken(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        request.transport.close()
        return response

    _, made = await client(call=broken)
    with pytest.raises(CutError, match="ended in mid-reply"):
        await listed(made.stream("/call", b"{}", HttpCall(), prompt_tokens=1))


async def test_an_abort_ends_a_wait_at_once(client):
    _, made = await client(timeout_s=30, call=silence)
    call = HttpCall()
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        task = group.create_task(aborted(made.post("/call", b"{}", call, prompt_tokens=1)))
        await asyncio.sleep(0.05)
        call.abort()
    assert task.result()
    assert await aborted(made.post("/call", b"{}", call, prompt_tokens=1))


async def test_an_abort_ends_a_stream_that_waits_for_its_next_event(client):
    _, made = await client(timeout_s=30, call=trickle)
    call = HttpCall()
    stream = made.stream("/call", b"{}", call, prompt_tokens=1)
    async with asyncio.timeout(15):
        assert await anext(stream) == [b"1"]
        asyncio.get_running_loop().call_soon(call.abort)
        with pytest.raises(AbortedError):
            await anext(stream)


async def test_a_stream_that_was_aborted_between_two_reads_ends(client):
    _, made = await client(timeout_s=30, call=trickle)
    call = HttpCall()
    stream = made.stream("/call", b"{}", call, prompt_tokens=1)
    assert await anext(stream) == [b"1"]
    call.abort()
    async with asyncio.timeout(15):
        with pytest.raises(AbortedError):
            await anext(stream)


async def aborted(work):
    try:
        await work
    except AbortedError:
        return True
    return False


@pytest.mark.parametrize(
    ("reply", "wait_s"),
    [
        ("3", 3.0),
        ("-1", 0.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 60.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
        ("soon", None),
        ("inf", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(reply, wait_s):
    assert parse_retry_after(reply, 40.0) == wait_s
