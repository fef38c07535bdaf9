"""A reply on its way: what leaves early, what is kept of a stream that broke, who joins it."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dialects.test_base import Plain
from tests.gateway.gated import TURN, Gated
from tests.gateway.house import SHELL_TOOL, events, house, renderer, user
from tests.gateway.test_relay import opened_stream, sent
from tests.gateway.test_restore import again, on_disk

from bridle.engines.base import GenerateChunk, TextDelta
from bridle.errors import EngineError
from bridle.gateway.live import LiveReply, Mark
from bridle.prompting.prompt import PromptIds
from bridle.types import DeliveryState, FinishReason, Reply, ToolCall

PROMPT = PromptIds.root(np.array([1, 2], np.int32))
WORDS = "one two three four five six seven eight nine ten"


def chunk(text="", *, delta=None, reported=None):
    ids = np.array(renderer().tokenizer.encode(text), np.int32)
    return GenerateChunk(ids, np.zeros(len(ids), np.float32), delta=delta, prompt_ids_json=reported)


def reply(*, by_ids=True):
    reader = renderer().live(tools=(), prompt_tail=PROMPT.array(), stops=()) if by_ids else None
    return LiveReply(reader, PROMPT)


def reported(live):
    """Everything that a client is sent, as plain words."""
    return live.after(Mark(), Plain())[0].decode()


# ---- what leaves


def test_live_pieces_are_parsed_from_token_ids_into_reasoning_and_text():
    live = reply()
    live.feed(chunk("<think>\nhm"))
    live.feed(chunk("\n</think>\n\nHello"))
    assert reported(live) == "r:hm;t:Hello;"
    assert live.is_live


def test_live_pieces_come_from_the_engine_s_own_parser_if_it_streams_deltas():
    live = reply(by_ids=False)
    assert not live.is_live
    live.feed(chunk("x", delta=TextDelta("hm")))
    live.feed(chunk("x", delta=TextDelta(text=" as it is ")))
    assert reported(live) == "r:hm;t: as it is ;"
    assert live.is_live
    live.feed(chunk("x", delta=TextDelta("again", "more")))
    live.feed(chunk("x", delta=TextDelta(text="more")))
    assert reported(live) == "r:hm;t: as it is ;"


def test_live_pieces_stop_when_the_engine_alternates_parsed_and_unparsed_chunks():
    live = reply()
    live.feed(chunk("x", delta=TextDelta(text="one")))
    live.feed(chunk("two"))
    live.feed(chunk("x", delta=TextDelta(text="three")))
    assert reported(live) == "t:one;"


def test_nothing_is_streamed_if_the_engine_reports_another_prompt():
    live = reply()
    live.feed(chunk("Hello", reported=b"[1,3]"))
    assert reported(live) == ""
    same = reply()
    same.feed(chunk("Hello", reported=PROMPT.json()))
    assert reported(same) == "t:Hello;"


def test_a_client_that_reads_slowly_gets_many_pieces_as_one():
    live, encoder = reply(), Plain()
    live.feed(chunk("one"))
    first, mark = live.after(Mark(), encoder)
    for word in (" two", " three", " four"):
        live.feed(chunk(word))
    rest, end = live.after(mark, encoder)
    assert (first, rest) == (b"t:one;", b"t: two three four;")
    assert live.after(end, encoder) == (b"", end)


def test_the_delivered_part_of_a_stream_is_that_of_the_furthest_client():
    live = reply()
    live.feed(chunk("one two three"))
    assert not live.partly_sent
    live.note(Mark(0, 7))
    live.note(Mark(0, 3))
    assert (live.partly_sent, live.delivered().content) == (True, "one two")


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 99))
def test_a_stream_position_is_parsed_back_from_its_text_form(reasoning, text, calls):
    mark = Mark(reasoning, text, calls)
    assert Mark.read(str(mark)) == mark
    assert Mark.read(f"shown by {mark}") is None


def test_a_stream_position_cuts_a_reply_s_reasoning_text_and_calls():
    calls = (ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}"))
    whole = Reply("text", "hm", calls, FinishReason.STOP)
    part = Mark(2, 3, 1).within(whole)
    assert (part.reasoning, part.content, part.tool_calls) == ("hm", "tex", calls[:1])
    assert Mark().within(replace(whole, reasoning=None)).reasoning is None


# ---- through the gateway


@pytest.fixture
async def living():
    """A live gateway whose engine holds the last token of each reply until it gets a sign."""
    engine = Gated(TURN, {"content": "And then?"})
    async with house(engine=engine, stream="live") as home, asyncio.timeout(15):
        yield engine, await home.session()


async def read_until(reader, text):
    """Return what comes until `text` was read."""
    seen = b""
    while text not in seen:
        piece = await reader.read(65536)
        assert piece, seen
        seen += piece
    return seen


async def test_the_last_event_waits_for_the_commit(living):
    engine, caller = living
    reader, writer = await opened_stream(caller, tools=[SHELL_TOOL])
    seen = await read_until(reader, b"pwd")
    assert b"look" in seen
    assert caller.exchanges == []
    assert b"[DONE]" not in seen
    engine.sign.set()
    rest = await read_until(reader, b"[DONE]")
    assert b"pwd" not in rest
    assert len(caller.exchanges) == 1
    writer.close()


async def test_keepalives_fill_the_silence_between_pieces():
    engine = Gated(TURN)
    async with house(engine=engine, stream="live", keepalive_s=0.03) as home:
        caller = await home.session()
        reader, writer = await opened_stream(caller, tools=[SHELL_TOOL])
        await read_until(reader, b"pwd")
        assert await read_until(reader, b'"delta":{}') is not None
        engine.sign.set()
        await read_until(reader, b"[DONE]")
        writer.close()


class Late(Gated):
    """Gives its first token at a sign of its own."""

    first: asyncio.Event

    async def generate(self, request):
        await self.first.wait()
        async for chunk in super().generate(request):
            yield chunk


async def test_a_reply_whose_first_piece_follows_a_keepalive_counts_as_partly_written():
    engine = Late(TURN)
    engine.first = asyncio.Event()
    async with house(engine=engine, stream="live", headers_after_s=0.01) as home:
        caller = await home.session()
        reader, writer = await opened_stream(caller, tools=[SHELL_TOOL])
        await read_until(reader, b"data:")
        engine.first.set()
        await read_until(reader, b"both")
        (call,) = caller.calls
        writer.transport.abort()
        await caller.until(lambda: call.clients == 0)
        assert call.partly_written
        engine.sign.set()


async def test_a_whole_mode_stream_sends_its_text_at_the_end_and_is_recorded_as_whole():
    engine = Gated(TURN)
    async with house(engine=engine, headers_after_s=0.01) as home:
        caller = await home.session()
        reader, writer = await opened_stream(caller)
        await engine.waits.wait()
        assert b"I look" not in await reader.read(65536)
        engine.sign.set()
        await read_until(reader, b"[DONE]")
        writer.close()
        await caller.ask([user("go")])
        assert [e.extra.get("stream") for e in caller.exchanges] == ["whole", None]


async def test_a_stream_with_requested_logprobs_is_sent_whole(living):
    engine, caller = living
    engine.sign.set()
    await caller.stream([user("go")], logprobs=True)
    assert caller.exchanges[0].extra["stream"] == "whole"


async def test_a_live_streamed_turn_is_extended_by_the_next_turn(living):
    engine, caller = living
    engine.sign.set()
    chunks = await caller.stream([user("go")], tools=[SHELL_TOOL])
    deltas = [c["choices"][0]["delta"] for c in chunks[:-1] if c["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    text = "".join(delta.get("content") or "" for delta in deltas)
    message = {"role": "assistant", "content": text, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "x"} for c in calls]
    await caller.stream([user("go"), message, *results], tools=[SHELL_TOOL])
    first, second = caller.exchanges
    assert second.parent_id == first.exchange_id


# ---- late failures


async def late_failure(caller, path, body):
    """Return what a client reads of a stream until it ends or is cut."""
    pieces = []
    url = caller.house.gateway.url + path
    async with caller.house.client.post(url, json=body, headers=caller.headers) as response:
        assert response.status == 200
        try:
            async for piece in response.content.iter_any():
                pieces.append(piece)  # noqa: PERF401 - what came before the cut counts
        except aiohttp.ClientPayloadError:
            pieces.append(b"<cut>")
    return b"".join(pieces)


def request_of(messages, **more):
    return {"model": "m", "messages": messages, "stream": True, **more}


LATE: Any = [
    ("/v1/chat/completions", request_of([user("go")]), b"<cut>"),
    ("/v1/messages", request_of([user("go")], max_tokens=100), b"event: error"),
    ("/v1/responses", {"model": "m", "input": "go", "stream": True}, b"response.failed"),
    (
        "/v1beta/models/m:streamGenerateContent?alt=sse",
        {"contents": [{"role": "user", "parts": [{"text": "go"}]}]},
        b'"error"',
    ),
]


@pytest.mark.parametrize(("path", "body", "error_text"), LATE)
async def test_tokens_streamed_before_an_engine_failure_are_recorded_and_do_not_train(
    path, body, error_text
):
    engine = Gated({"content": WORDS}, gate=6, error=EngineError("secret"))
    async with house(engine=engine, stream="live") as home, asyncio.timeout(15):
        caller = await home.session()
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(late_failure(caller, path, body))
            await engine.waits.wait()
            await caller.until(lambda: _live(caller).sent.text > 0)
            engine.sign.set()
        raw = reading.result()
        assert b"one" in raw
        assert error_text in raw
        assert b"secret" not in raw
        assert caller.facts.failed_last
        (exchange,) = caller.exchanges
        assert len(exchange.output_ids) == 6
        assert (exchange.finish_reason, exchange.extra["error"]) == ("abort", "engine_error")
        assert caller.delivery(0) is DeliveryState.CUT
        _, trajectory = await home.control("GET", f"/sessions/{caller.session_id}/trajectory")
        stats = trajectory["metadata"]["stats"]
        assert stats["tokens_excluded"] == {"cut": 6}
        # The same question once more is another sample.
        engine.error = None
        assert b"ten" in await late_failure(caller, path, body)
        assert engine.asked == 2


def _live(caller):
    (call,) = caller.calls
    return call.live or LiveReply(None, PROMPT)


async def test_an_engine_failure_before_the_first_token_is_a_500_and_captures_nothing():
    engine = Gated({"content": WORDS}, gate=0, error=EngineError("secret"))
    engine.sign.set()
    async with house(engine=engine, stream="live") as home:
        caller = await home.session()
        status, _ = await caller.post(request_of([user("go")]))
        assert status == 500
        assert caller.exchanges == []


async def test_a_live_stream_is_resumed_after_a_retryable_engine_failure():
    engine = Gated({"content": WORDS}, gate=6, error=EngineError("busy", retryable=True))
    async with house(engine=engine, stream="live") as home, asyncio.timeout(15):
        caller = await home.session()
        reader, writer = await opened_stream(caller)
        await read_until(reader, b"two")
        engine.sign.set()
        await engine.closed.wait()
        engine.error = None
        rest = await read_until(reader, b"[DONE]")
        assert b"ten" in rest
        assert caller.exchanges[0].extra["resumed"] == 1
        writer.close()


# ---- clients that go


async def begun(caller, text=b"two", messages=None):
    """A client that has read up to `text` and gone."""
    reader, writer = await opened_stream(caller, messages)
    seen = await read_until(reader, text)
    writer.transport.abort()
    (call,) = (c for c in caller.calls if c.live is not None and c.in_flight)
    await caller.until(lambda: call.clients == 0)
    return events(seen.partition(b"\r\n\r\n")[2]), call


@pytest.fixture
async def wordy():
    engine = Gated({"content": WORDS}, {"content": "Resumed."}, gate=8)
    async with house(engine=engine, stream="live") as home, asyncio.timeout(15):
        yield engine, await home.session()


async def test_a_retry_of_a_stream_that_broke_gets_all_of_the_same_reply(wordy):
    engine, caller = wordy
    await begun(caller)
    reader, writer = await opened_stream(caller)
    await read_until(reader, b"one two")
    engine.sign.set()
    await read_until(reader, b"[DONE]")
    writer.close()
    assert (engine.asked, len(caller.exchanges)) == (1, 1)
    await caller.until(lambda: caller.delivery(0) is DeliveryState.DELIVERED)


async def test_a_json_retry_of_a_stream_that_broke_gets_it_whole(wordy):
    engine, caller = wordy
    await begun(caller)
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(caller.ask([user("go")]))
        await caller.until(lambda: caller.calls[0].clients == 1)
        engine.sign.set()
    assert asked.result()["content"] == WORDS
    assert caller.facts.turns == 1


async def test_an_abandoned_stream_is_cut_and_a_turn_with_its_sent_text_continues_it():
    engine = Gated({"content": WORDS}, {"content": "Resumed."}, gate=8)
    async with house(engine=engine, stream="live", retry_grace_s=0) as home, asyncio.timeout(15):
        caller = await home.session()
        chunks, _ = await begun(caller)
        await caller.until(lambda: caller.facts.turns == 1)
        await caller.until(lambda: caller.delivery(0) is DeliveryState.CUT)
        assert engine.closed.is_set()
        (exchange,) = caller.exchanges
        assert exchange.finish_reason == "abort"
        assert 2 <= len(exchange.output_ids) <= 8
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        await goes_on_from(caller, text)


async def goes_on_from(caller, text):
    """A harness that keeps the beginning of a turn asks for more."""
    partly = {"role": "assistant", "content": text}
    await caller.ask([user("go"), partly, user("Resume directly.")])
    first, second = caller.exchanges
    assert second.continues == first.exchange_id
    assert (second.parent_id, second.root_reason) == (None, "partial")
    assert caller.delivery(0) is DeliveryState.CUT
    stats = await stats_of(caller)
    assert stats["tokens_excluded"] == {"cut": len(first.output_ids)}
    assert stats["tokens_trained"] == len(second.output_ids)


async def stats_of(caller):
    path = f"/sessions/{caller.session_id}/trajectory"
    _, trajectory = await caller.house.control("GET", path)
    return trajectory["metadata"]["stats"]


async def test_a_turn_with_the_sent_text_of_a_cut_stream_continues_it_after_a_restart(tmp_path):
    path = tmp_path / "c.sqlite"
    engine = Gated({"content": WORDS}, {"content": "Resumed."}, gate=8)
    live: Any = {"stream": "live", "retry_grace_s": 0}
    async with on_disk(path, engine=engine, **live) as home, asyncio.timeout(15):
        caller = await home.session("s")
        await begun(caller, b"four")
        await caller.until(lambda: caller.facts.turns == 1)
    async with on_disk(path, engine=engine, **live) as home, asyncio.timeout(15):
        moved = again(home, caller)
        assert moved.delivery(0) is DeliveryState.CUT
        await goes_on_from(moved, "one two three")
        # The question itself is another sample: the first one has no end.
        engine.sign.set()
        assert (await moved.ask([user("go")]))["content"] == WORDS
        assert engine.asked == 3


async def test_a_next_turn_with_the_sent_text_of_a_running_stream_ends_its_sampling(wordy):
    engine, caller = wordy
    chunks, call = await begun(caller)
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert call.in_flight
    await goes_on_from(caller, text)
    assert engine.asked == 2


async def test_a_next_turn_with_less_text_than_was_streamed_continues_the_stream(wordy):
    _, caller = wordy
    await begun(caller, b"four")
    await goes_on_from(caller, "one two")
    cut, resumed = caller.exchanges
    assert cut.finish_reason == "abort"
    assert resumed.continues == cut.exchange_id


async def test_an_abandoned_stream_sampled_to_its_end_is_cut_and_a_later_retry_gets_it():
    engine = Gated({"content": WORDS}, gate=8)
    async with house(engine=engine, stream="live") as home:
        caller = await home.session()
        await begun(caller)
        engine.sign.set()
        await caller.until(lambda: caller.facts.turns == 1)
        caller.end_grace()
        await caller.until(lambda: caller.delivery(0) is DeliveryState.CUT)
        assert caller.exchanges[0].finish_reason == "stop"
        assert (await caller.ask([user("go")]))["content"] == WORDS
        assert (caller.delivery(0), engine.asked) == (DeliveryState.DELIVERED, 1)


async def test_sealing_a_session_during_a_live_stream_records_the_sent_part_as_cut(wordy):
    engine, caller = wordy
    reader, writer = await opened_stream(caller)
    await read_until(reader, b"two")
    await caller.house.gateway.seal(caller.session_id)
    assert b"[DONE]" not in await reader.read()
    writer.close()
    assert caller.exchanges[0].extra["error"] == "authentication_error"
    assert caller.delivery(0) is DeliveryState.CUT
    assert engine.closed.is_set()


@pytest.mark.parametrize("stream", ["live", "whole"])
async def test_a_reply_that_is_not_read_when_its_session_ends_is_cut_and_stays_so(stream):
    turn = {"content": "additionalProperties" * 50_000}  # a stream says it five times
    async with asyncio.timeout(60), house(turn, stream=stream) as home:
        caller = await home.session()
        body = {"model": "m", "input": "hi", "stream": True}
        reader, writer = await sent(caller, body, path="responses")
        transport: Any = writer.transport
        transport.pause_reading()
        await caller.until(lambda: caller.calls and caller.calls[0].answer)
        facts = await home.gateway.seal(caller.session_id)
        assert (facts.delivered, caller.delivery(0)) == (0, DeliveryState.CUT)
        transport.resume_reading()
        with suppress(ConnectionResetError):
            assert not (await reader.read()).endswith(b"0\r\n\r\n")
        assert caller.facts == facts
        assert caller.delivery(0) is DeliveryState.CUT
        writer.close()


@pytest.mark.parametrize("number", range(1, 11))
async def test_wherever_a_client_goes_its_retry_gets_the_whole_turn(living, number):
    engine, caller = living
    reader, writer = await opened_stream(caller, tools=[SHELL_TOOL])
    seen = b""
    while seen.count(b"data: ") < number:
        piece = await reader.read(300)
        assert piece
        seen += piece
    writer.transport.abort()
    await caller.until(lambda: caller.calls[0].clients == 0)
    engine.sign.set()
    chunks = await caller.stream([user("go")], tools=[SHELL_TOOL])
    deltas = [c["choices"][0]["delta"] for c in chunks[:-1] if c["choices"]]
    assert "".join(d.get("content") or "" for d in deltas) == TURN["content"]
    assert sum(len(d.get("tool_calls") or ()) for d in deltas) == 2
    assert engine.asked == 1
    await caller.until(lambda: caller.delivery(0) is DeliveryState.DELIVERED)


# ---- many, and slow ones


async def test_a_client_that_does_not_read_its_live_stream_blocks_no_other_session():
    long = " ".join(f"word{i}" for i in range(2000))
    async with house({"content": long}, stream="live") as home:
        caller = await home.session()
        _, writer = await sent(caller, request_of([user("go")]))
        transport: Any = writer.transport
        transport.pause_reading()
        await caller.until(lambda: caller.facts.turns == 1)  # sampled and kept, though nobody reads
        other = await home.session()
        assert (await other.stream([user("go")]))[-1] == "[DONE]"
        transport.abort()


async def test_256_concurrent_live_streams_of_a_session_are_all_whole_and_recorded():
    async with house({"content": WORDS}, stream="live") as home:
        caller = await home.session()
        body = request_of([user("go")])
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client:

            async def one(number):
                data = orjson.dumps({**body, "messages": [user(f"go {number}")]})
                async with client.post(caller.url, data=data, headers=caller.headers) as answer:
                    chunks = events(await answer.read())
                deltas = [c["choices"][0]["delta"] for c in chunks[:-1] if c["choices"]]
                return "".join(delta.get("content") or "" for delta in deltas)

            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(one(number)) for number in range(256)]
        assert {task.result() for task in asked} == {WORDS}
        assert caller.facts.turns == 256
        assert {e.extra["stream"] for e in caller.exchanges} == {"live"}
