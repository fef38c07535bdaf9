"""Replies on the wire: streams, keep-alives, late failures, clients that go or are slow."""

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from tests.dialects.sse import SseParser
from tests.gateway.gated import Gated
from tests.gateway.house import events, house, renderer, scripted, user
from tests.gateway.test_retries import FRESH, REQUEST, a_call, a_room

from bridle.config import SamplingPolicy
from bridle.dialects import DIALECTS
from bridle.dialects.base import Route, RouteKind
from bridle.dialects.openai_chat import OpenAIChat
from bridle.engines.base import CutError, GenerateChunk
from bridle.errors import EngineError
from bridle.gateway.call import Answer, Stage
from bridle.gateway.listener import Listener
from bridle.gateway.relay import Relay
from bridle.gateway.settings import GatewaySettings
from bridle.types import DeliveryState, Dialect, FinishReason, Reply, Usage


def late():
    """An engine that says `a` when it gets its sign."""
    return Gated({"content": "a"}, gate=0)


async def opened_stream(caller, messages=None, **more):
    """A raw connection with a streaming request sent."""
    body = {"model": "m", "messages": messages or [user("go")], "stream": True, **more}
    return await sent(caller, body)


async def sent(caller, body, headers=(), version="1.1", path="chat/completions"):
    data = orjson.dumps(body)
    reader, writer = await opened(caller, len(data), headers, version, path)
    writer.write(data)
    await writer.drain()
    return reader, writer


async def opened(caller, size, headers, version="1.1", path="chat/completions"):
    """A connection that has sent the head of a request with a body of this size."""
    host, _, port = caller.house.gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = [
        f"POST /v1/{path} HTTP/{version}",
        "Host: x",
        f"Content-Length: {size}",
        f"Authorization: Bearer {caller.handle.key}",
        *headers,
    ]
    writer.write("\r\n".join([*head, "", ""]).encode())
    return reader, writer


async def test_a_stream_has_the_sampled_reasoning_text_and_calls_and_ends_with_done():
    call = {"name": "bash", "arguments": {"command": "ls"}}
    async with house({"reasoning": "hm", "content": "text", "tool_calls": [call]}) as home:
        caller = await home.session()
        tool = {"type": "function", "function": {"name": "bash", "parameters": {}}}
        chunks = await caller.stream([user("go")], tools=[tool])
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1] if chunk["choices"]]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hm"
        assert "".join(delta.get("content") or "" for delta in deltas).strip() == "text"
        assert any(delta.get("tool_calls") for delta in deltas)
        assert chunks[-1] == "[DONE]"
        assert caller.delivery(0) is DeliveryState.DELIVERED


async def test_usage_in_a_stream_equals_the_recorded_token_counts():
    async with house({"content": "text"}) as home:
        caller = await home.session()
        chunks = await caller.stream([user("go")], stream_options={"include_usage": True})
        usage = chunks[-2]["usage"]
        (exchange,) = caller.exchanges
        assert usage["prompt_tokens"] == exchange.prompt_length
        assert usage["completion_tokens"] == len(exchange.output_ids)


async def test_headers_leave_before_the_first_token_and_keepalives_fill_the_silence():
    engine = late()
    async with house(engine=engine, headers_after_s=0.05, keepalive_s=0.03) as home:
        caller = await home.session()
        reader, writer = await opened_stream(caller)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"text/event-stream" in head
        silence = b""
        while silence.count(b"data: ") < 4:
            piece = await reader.read(65536)
            assert piece, silence
            silence += piece
        assert b'"a"' not in silence
        engine.sign.set()
        rest = await reader.readuntil(b"0\r\n\r\n")
        writer.close()
        assert b'"a"' in rest
        assert b"[DONE]" in rest


async def test_a_waiting_json_reply_sends_no_byte_before_it_is_sampled():
    engine = late()
    async with house(engine=engine, headers_after_s=0.01, keepalive_s=0.01) as home:
        caller = await home.session()
        reader, writer = await sent(caller, {"model": "m", "messages": [user("go")]})
        await engine.waits.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.read(1)
        engine.sign.set()
        assert b"200 OK" in await reader.readline()
        writer.close()


async def test_a_client_that_waits_for_100_continue_gets_it_and_its_body_is_read():
    async with asyncio.timeout(15), house({"content": "ok"}) as home:
        caller = await home.session()
        body = orjson.dumps({"model": "m", "messages": [user("hi")]})
        reader, writer = await opened(caller, len(body), ["expect: 100-Continue"])
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readuntil(b"\r\n")).split()[1] == b"200"
        writer.close()


class Failing:
    """A scripted engine that fails after its first token, when it gets its sign."""

    def __init__(self, error):
        self._inner = scripted({"content": "some words of a reply"})
        self._error = error
        self.sign = asyncio.Event()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def generate(self, request):
        async for chunk in self._inner.generate(request):
            yield GenerateChunk(chunk.output_ids[:1], chunk.logprobs[:1])
            await self.sign.wait()
            raise self._error


async def test_a_failure_before_the_headers_has_its_own_status():
    async with house({"fault": 503, "content": "a"}) as home:
        caller = await home.session()
        status, _ = await caller.post({"model": "m", "messages": [user("go")], "stream": True})
        assert status == 503


async def late_failure(home, engine, path, body):
    """Return what a streaming client reads of a reply that fails when its headers have arrived."""
    caller = await home.session()
    async with home.client.post(
        home.gateway.url + path, json=body, headers=caller.headers
    ) as response:
        assert response.status == 200
        engine.sign.set()
        pieces = []
        try:
            pieces.extend([piece async for piece in response.content.iter_any()])
        except aiohttp.ClientPayloadError:
            pieces.append(b"<cut>")
    assert caller.facts.failed_last
    assert caller.exchanges == []
    return b"".join(pieces)


MESSAGES = {"model": "m", "messages": [user("go")], "stream": True}
CONTENTS = {"contents": [{"role": "user", "parts": [{"text": "go"}]}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {**MESSAGES, "max_tokens": 100}),
        ("/v1/responses", {"model": "m", "input": "go", "stream": True}),
    ],
)
async def test_a_failure_in_mid_stream_is_the_dialects_error_event(path, body):
    engine = Failing(EngineError("secret"))
    async with house(engine=engine) as home:
        raw = await late_failure(home, engine, path, body)
    assert b"error" in raw
    assert b"secret" not in raw
    assert b"<cut>" not in raw


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", MESSAGES),
        ("/v1beta/models/m:streamGenerateContent?alt=sse", CONTENTS),
    ],
)
async def test_a_late_engine_failure_ends_a_stream_by_a_cut_or_error_and_never_by_done(path, body):
    engine = Failing(EngineError("secret"))
    async with house(engine=engine) as home:
        raw = await late_failure(home, engine, path, body)
    assert raw.endswith(b"<cut>") or b"error" in raw
    assert b"[DONE]" not in raw
    assert b"secret" not in raw


async def test_only_a_whole_stream_over_http_1_0_ends_without_a_connection_reset():
    engine = Gated({"content": "some words"})
    async with house(engine=engine, stream="live") as home:
        caller = await home.session()
        reader, writer = await sent(caller, MESSAGES, version="1.0")
        engine.sign.set()
        assert (await reader.read()).endswith(b"data: [DONE]\n\n")
        writer.close()
        engine.sign.clear()
        engine.error = EngineError("no", status=500)
        reader, writer = await sent(caller, MESSAGES, version="1.0")
        await reader.readuntil(b'"delta":{"content"')
        engine.sign.set()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        assert [caller.delivery(index) for index in range(2)] == [
            DeliveryState.DELIVERED,
            DeliveryState.CUT,
        ]


async def test_a_context_overflow_in_a_responses_stream_is_a_response_failed_event():
    async with house(engine=scripted({"content": "a"}, context_length=100)) as home:
        caller = await home.session()
        body = {"model": "m", "input": "word " * 100, "stream": True}
        async with home.client.post(
            f"{home.gateway.url}/v1/responses", json=body, headers=caller.headers
        ) as response:
            assert response.status == 200
            raw = await response.read()
        assert b"response.failed" in raw
        assert b"context_length_exceeded" in raw


# ---- clients that go


async def went(caller, engine, *, stream=False):
    """A client that asked, and left while the engine was at work."""
    body = {"model": "m", "messages": [user("go")], "stream": stream}
    _, writer = await sent(caller, body)
    await engine.waits.wait()
    writer.close()
    await caller.unclaimed()


async def test_a_client_that_went_may_ask_again_and_gets_the_same_sample():
    engine = late()
    async with house(engine=engine) as home:
        caller = await home.session()
        await went(caller, engine)
        async with asyncio.TaskGroup() as group:
            group.create_task(caller.ask([user("go")]))
            await caller.until(lambda: caller.calls[0].clients == 1)
            engine.sign.set()
        (exchange,) = caller.exchanges
        assert (caller.facts.calls, engine.asked) == (2, 1)
        assert caller.delivery(0) is DeliveryState.DELIVERED
        assert exchange.finish_reason == "stop"


async def test_a_retry_that_comes_after_the_commit_gets_the_committed_reply():
    engine = late()
    async with house(engine=engine) as home:
        caller = await home.session()
        await went(caller, engine)
        engine.sign.set()
        await caller.until(lambda: caller.facts.turns == 1)
        assert caller.delivery(0) is None
        # The same question as a stream: another form of the same reply.
        chunks = await caller.stream([user("go")])
        assert chunks[-1] == "[DONE]"
        assert caller.facts.turns == 1
        assert caller.delivery(0) is DeliveryState.DELIVERED


async def test_the_same_idempotency_key_joins_a_call_whose_client_still_waits():
    engine = late()
    async with house(engine=engine) as home:
        caller = await home.session()
        async with asyncio.TaskGroup() as group:
            key = {"idempotency-key": "k"}
            first = group.create_task(caller.ask([user("go")], key))
            await engine.waits.wait()
            again = group.create_task(caller.ask([user("go")], key))
            await caller.until(lambda: caller.calls[0].clients == 2)
            engine.sign.set()
        assert first.result() == again.result()
        assert caller.facts.turns == 1


async def test_identical_requests_of_waiting_clients_are_separate_samples():
    engine = late()
    async with house(engine=engine) as home:
        caller = await home.session()
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(caller.ask([user("go")]))
            await caller.until(lambda: engine.asked == 3)
            engine.sign.set()
        assert caller.facts.turns == 3
        assert [caller.delivery(i) for i in range(3)] == [DeliveryState.DELIVERED] * 3


async def test_an_unclaimed_call_is_cancelled_after_its_grace():
    engine = late()
    async with house(engine=engine, retry_grace_s=0.05) as home:
        caller = await home.session()
        _, writer = await sent(caller, {"model": "m", "messages": [user("go")]})
        await engine.waits.wait()
        writer.close()
        metrics = ""
        async with asyncio.timeout(15):
            while 'outcome="cancelled"} 1.0' not in metrics:
                metrics = (await home.control("GET", "/metrics"))[1]
                await asyncio.sleep(0.01)
        assert engine.closed.is_set()
        assert caller.exchanges == []
        assert not caller.facts.failed_last


async def test_an_unclaimed_reply_is_kept_as_abandoned():
    engine = late()
    async with house(engine=engine) as home:
        caller = await home.session()
        await went(caller, engine, stream=True)
        engine.sign.set()
        await caller.until(lambda: caller.facts.turns == 1)
        assert caller.delivery(0) is None
        caller.end_grace()
        await caller.until(lambda: caller.delivery(0) is DeliveryState.ABANDONED)
        # A late retry is still the same sample.
        await caller.ask([user("go")])
        assert caller.facts.turns == 1
        assert caller.delivery(0) is DeliveryState.DELIVERED


async def test_a_reply_asked_for_again_after_delivery_stays_delivered():
    async with house({"content": "a"}, {"content": "b"}) as home:
        caller = await home.session()
        reply = await caller.ask([user("go")])
        await caller.ask([user("go")])
        await caller.ask([user("go"), reply, user("on")])
        assert [caller.delivery(i) for i in range(3)] == [DeliveryState.DELIVERED] * 3


async def test_a_client_that_does_not_take_its_reply_counts_as_gone():
    async with a_room(grace_s=0) as room:
        call = room.add(a_call(stage=Stage.COMMITTED), FRESH)
        reply = Reply("a", None, (), FinishReason.STOP)
        call.answer = Answer(reply, Usage(1, 1), b"x" * 40_000_000)
        relay = Relay(GatewaySettings(write_timeout_s=0.1), room.deliveries)

        async def answer(http: web.BaseRequest) -> web.StreamResponse:
            route = Route(Dialect.OPENAI_CHAT, RouteKind.GENERATE)
            wire = DIALECTS[Dialect.OPENAI_CHAT]
            return await relay.answer(http, room.session, call, REQUEST, route, wire)

        async with Listener(
            answer, host="127.0.0.1", port=0, max_body_bytes=10, head_timeout_s=5
        ) as listener:
            port = int(listener.url.rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            transport: Any = writer.transport
            transport.pause_reading()
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(15):
                while call.delivery is None:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.01)
            transport.abort()
        assert await room.recorded(call) is DeliveryState.CUT


async def test_a_fault_in_the_middle_of_a_reply_cuts_it_and_loses_no_client():
    class Faulty(OpenAIChat):
        def stream(self, request, head):
            encoder: Any = super().stream(request, head)
            encoder.close = None  # not callable: a bug of ours after the stream began
            return encoder

    engine = late()
    async with house(engine=engine, headers_after_s=0.01, retry_grace_s=0) as home:
        caller = await home.session()
        body = {"model": "m", "messages": [user("go")], "stream": True}
        plain = DIALECTS[Dialect.OPENAI_CHAT]
        DIALECTS[Dialect.OPENAI_CHAT] = Faulty()
        try:
            async with home.client.post(caller.url, json=body, headers=caller.headers) as response:
                assert response.status == 200
                engine.sign.set()
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
        finally:
            DIALECTS[Dialect.OPENAI_CHAT] = plain
        assert caller.delivery(0) is DeliveryState.ABANDONED
        await caller.ask([user("go")])
        assert caller.delivery(0) is DeliveryState.DELIVERED


async def test_streamed_events_are_those_of_the_json_reply():
    async with house({"content": "same words"}) as home:
        caller = await home.session()
        chunks = await caller.stream([user("go")])
        whole = await caller.ask([user("go again")])
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-1])
        assert text == whole["content"] == "same words"


def test_an_empty_body_parses_to_no_events():
    assert events(b"") == []


async def test_a_reply_cut_at_its_token_budget_ends_with_finish_reason_length():
    engine = Failing(CutError("cut"))
    engine.sign.set()
    async with house(engine=engine) as home:
        caller = await home.session()
        status, reply = await caller.post({"model": "m", "messages": [user("go")], "max_tokens": 3})
        assert status == 200
        assert reply["choices"][0]["finish_reason"] == "length"
        assert caller.exchanges[0].extra["resumed"] == 2


@pytest.mark.parametrize("stream", ["live", "whole"])
async def test_hidden_reasoning_is_sampled_and_extended_but_never_sent(stream):
    turn = {"reasoning": "Hm.", "content": "Yes."}
    async with house(turn, {"content": "Done."}, stream=stream) as home:
        caller = await home.session(sampling=SamplingPolicy(reasoning="hide"))
        streamed = await caller.stream([user("go")])
        await caller.until(lambda: len(caller.exchanges) == 1)
        said = "".join(event["choices"][0]["delta"].get("content") or "" for event in streamed[:-1])
        asked = [user("go"), {"role": "assistant", "content": said}, user("on")]
        reply = await caller.ask(asked)
        first, second = caller.exchanges
    assert said == "Yes."
    assert "reasoning_content" not in orjson.dumps([streamed, reply]).decode()
    assert "Hm." in renderer().tokenizer.decode(first.output_ids.tolist())
    assert second.parent_id == first.exchange_id


async def test_parallel_calls_of_a_live_google_reply_leave_in_one_event():
    calls = [{"name": "shell", "arguments": {"command": word}} for word in ("ls", "pwd")]
    async with house({"content": "Both.", "tool_calls": calls}, stream="live") as home:
        caller = await home.session()
        url = f"{home.gateway.url}/v1beta/models/m:streamGenerateContent?alt=sse"
        schema = {"type": "object", "properties": {"command": {"type": "string"}}}
        body = {
            "contents": [{"role": "user", "parts": [{"text": "go"}]}],
            "tools": [{"functionDeclarations": [{"name": "shell", "parameters": schema}]}],
        }
        async with home.client.post(url, json=body, headers=caller.headers) as answer:
            shown = [orjson.loads(event.data) for event in SseParser().feed(await answer.read())]
    parts = [event["candidates"][0]["content"]["parts"] for event in shown]
    found = [
        [part["functionCall"]["args"] for part in each if "functionCall" in part] for each in parts
    ]
    assert [each for each in found if each] == [[{"command": "ls"}, {"command": "pwd"}]]
