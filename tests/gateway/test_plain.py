"""The plain path: what it serves is stored, counted and answered as by the general path."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
from tests.conformance.memory import MemoryStore
from tests.gateway.house import (
    TOKEN,
    Caller,
    House,
    scripted,
    user,
)
from tests.gateway.sdk_agents import CLIENTS, reading
from tests.gateway.sdk_agents import TURNS as TURNS_OF_SDK
from tests.gateway.speech import ERRAND, SPEECHES, Harness, chat_said, events

from bridle.config import Limits, SamplingPolicy
from bridle.dialects import history as history_file
from bridle.engines.base import GenerateChunk, GenerateRequest
from bridle.engines.vllm import VllmEngine
from bridle.errors import EngineError
from bridle.gateway import exchange as exchange_file
from bridle.gateway import plain as plain_file
from bridle.gateway.app import GatewayServer
from bridle.gateway.settings import GatewaySettings
from bridle.prompting.renderer import load_renderer
from bridle.scripted.server import EngineServer
from bridle.types import DeliveryState

CALL = {"name": "bash", "arguments": {"command": "ls"}}
OTHER = {"name": "bash", "arguments": {"command": ERRAND}}
TURNS: tuple[dict[str, Any], ...] = (
    {"content": "I will look."},
    {"reasoning": "First the files.", "content": "", "tool_calls": [CALL]},
    {"reasoning": "Both are needed.", "content": "I look twice.", "tool_calls": [CALL, OTHER]},
    {"content": "Not whole", "finish": "length"},
    {"reasoning": "Only a thought.", "content": "It is done."},
    {"raw": '<tool_call>\n{"name": "bash", "arguments": {"command": \n</tool_call>'},
    {"content": "  spaced \n"},
    {"reasoning": "Only a thought", "content": ""},
)
"""Replies by the number of assistant messages before them."""


@asynccontextmanager
async def played(
    *turns: dict[str, Any],
    store: Any = None,
    plain: bool = True,
    server: Any = None,
    adapter: type[VllmEngine] = VllmEngine,
    **settings: Any,
) -> AsyncIterator[House]:
    """A gateway before an engine server; ids of calls are counted."""
    numbers = itertools.count()
    async with EngineServer(server or scripted(*turns)) as engine:
        gateway = GatewayServer(
            engine=adapter(engine.url),
            renderer=load_renderer("builtin", new_call_id=lambda: f"call_{next(numbers):030}"),
            store=store or MemoryStore(),
            settings=GatewaySettings(control_token=TOKEN, **settings),
        )
        async with gateway, aiohttp.ClientSession() as client:
            gateway.plain.is_open = plain
            yield House(gateway, gateway._store, client)


def timeless(value: Any) -> Any:
    """A reply without the time that it tells."""
    if isinstance(value, dict):
        return {name: timeless(one) for name, one in value.items() if name not in CREATED}
    return [timeless(one) for one in value] if isinstance(value, list) else value


CREATED = {"created", "created_at"}


def rows_of(home: House, session_id: str) -> list[dict[str, Any]]:
    """Records of a session, without times."""
    deliveries = home.store.deliveries(session_id)
    rows = []
    for one in home.store.exchanges(session_id):
        row: dict[str, Any] = {}
        for name in one.__dataclass_fields__:
            if name in {"started_at", "first_token_s", "duration_s"}:
                continue
            value = getattr(one, name)
            row[name] = value.tolist() if isinstance(value, np.ndarray) else repr(value)
        row["reply"] = timeless(orjson.loads(one.reply))
        delivery = deliveries.get(one.exchange_id)
        if delivery is not None:
            row["delivery"] = [delivery.state, delivery.detail, len(delivery.joined_by)]
        rows.append(row)
    bodies = home.store.bodies(session_id)
    rows.append({digest.hex(): body.decode() for digest, body in sorted(bodies.items())})
    return rows


def numbers_of(home: House) -> dict[str, float]:
    """The gateway's metrics that do not tell times or addresses."""
    answer = [line for line in home.gateway.metrics().splitlines() if not line.startswith("#")]
    found = {}
    for line in answer:
        name, _, value = line.rpartition(" ")
        if "seconds" not in name and "free_bytes" not in name:
            found[name.partition(",replica=")[0]] = float(value)
    return found


async def play(seed: int, name: str, reply: str, *, plain: bool) -> tuple[Any, int]:
    """Play a seed's traffic; all that can be seen of it, and how often the plain path began."""
    begun = []
    choose = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        # Ids are drawn alike, so that digests of what holds them are alike.
        patch.setattr(exchange_file, "os", SimpleNamespace(urandom=random.Random(seed).randbytes))
        if seed % 2:
            patch.setattr(history_file, "SMALLEST", 1)
        how: Any = {"stream": "live"} if reply == "live" else {}
        async with played(*choose.sample(list(TURNS), 5), plain=plain, **how) as home:
            begins = plain_file.PlainCall.begin
            patch.setattr(
                plain_file.PlainCall, "begin", lambda flight: begun.append(begins(flight))
            )
            limits = Limits(
                max_turns=choose.choice([None, 12]), max_tokens=choose.choice([None, 400])
            )
            policy = SamplingPolicy(
                reasoning=choose.choice(["show", "show", "hide"]),
                on_rewrite=choose.choice(["extend", "fork"]),
            )
            caller = await home.session("s", limits=limits, sampling=policy)
            speech = SPEECHES[name]
            streams = reply != "json"
            harness = Harness(caller, speech, "You are an agent.", choose, streams=streams)
            for _ in range(12):
                await harness.step()
            facts = caller.facts
            return (
                [
                    (status, headers, timeless(answer))
                    for status, headers, answer in harness.answers
                ],
                rows_of(home, "s"),
                numbers_of(home),
                (facts.calls, facts.turns, facts.delivered, facts.tokens, facts.limit),
                (facts.failed_last, facts.last_error, facts.last_error_code),
            ), len(begun)


@pytest.mark.parametrize("reply", ["json", "whole", "live"])
@pytest.mark.parametrize("name", SPEECHES)
@pytest.mark.parametrize("seed", range(6))
async def test_the_plain_and_the_general_path_store_count_and_answer_alike(seed, name, reply):
    general, none = await play(seed, name, reply, plain=False)
    plain, begun = await play(seed, name, reply, plain=True)
    for one, other in zip(plain, general, strict=True):
        assert one == other
    assert none == 0
    assert begun > 1, "the plain path was not taken"


@pytest.mark.parametrize("client", CLIENTS)
async def test_requests_of_the_sdks_take_the_plain_path_after_the_first_turn(client):
    async with played(server=scripted(**reading())) as home:
        await client((await home.session("s")).handle, TURNS_OF_SDK)
        assert home.gateway.plain.served == TURNS_OF_SDK - 1, "all but the root"


# ---- what is not plain


class Watched:
    """A scripted engine that can hold its calls until a sign, and counts them."""

    def __init__(self, *turns: dict[str, Any]):
        self._inner = scripted(*turns)
        self.held = False
        self.errors: list[Exception] = []
        """Raised by the next calls, in their order."""
        self.sign = asyncio.Event()
        self.waits = asyncio.Event()
        self.asked = 0
        self.cut = False

    async def abort(self, request_id: str) -> None:
        """End the call that waits."""
        del request_id
        self.held, self.cut = False, self.held
        self.sign.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def generate(self, request):
        self.asked += 1
        if self.held:
            self.waits.set()
            await self.sign.wait()
        if self.cut:
            self.cut = False
            yield GenerateChunk.aborted(())
            return
        if self.errors:
            raise self.errors.pop(0)
        async for chunk in self._inner.generate(request):
            yield chunk


class OtherPrompt(VllmEngine):
    """An adapter for a server that uses a prompt of its own from a switch on."""

    prompt: bytes | None = None

    def arrived(self, request: GenerateRequest) -> GenerateChunk | None:
        """Read a reply as that server would give it."""
        return self._changed(super().arrived(request))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        async for chunk in super().generate(request):
            yield self._changed(chunk)

    def _changed(self, chunk: Any) -> Any:
        if chunk is None or self.prompt is None:
            return chunk
        return replace(chunk, prompt_ids_json=self.prompt)


class Streaming(Caller):
    """A harness that asks for a stream and puts its reply together."""

    async def post(self, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status, and the reply as a whole one has it."""
        async with self.house.client.post(
            self.url,
            data=orjson.dumps({**body, "stream": True}),
            headers={**self.headers, **(headers or {})},
        ) as response:
            raw = await response.read()
        if response.status != 200:
            return response.status, orjson.loads(raw)
        return 200, {"choices": [{"message": message} for message in chat_said(events(raw))]}


def tip_of(home: House) -> Any:
    """The turn that the session's next request may go on from without a search."""
    session = home.gateway._registry.get("s")
    assert session is not None
    return session.tip


@asynccontextmanager
async def linear_turns(harness: type[Caller], *turns: dict[str, Any], **settings: Any):
    """A gateway, its engine, a caller and the messages of its next linear request."""
    engine = Watched(*(turns or ({"content": "a"},)))
    async with played(server=engine, **settings) as home, asyncio.TaskGroup() as group:
        caller = harness(home, (await home.session("s")).handle)
        messages = [user("go")]
        for _ in range(2):
            messages += [await caller.ask(messages), user("and then")]
        assert home.gateway.plain.served == 1, "the second turn took the plain path"
        assert (tip_of(home) is not None) is (history_file.SMALLEST == 1)
        yield home, engine, caller, messages, group.create_task


@pytest.fixture(params=[(Caller, 2000), (Caller, 1), (Streaming, 2000), (Streaming, 1)])
def linear(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`linear_turns` of a harness that asks for whole replies, and of one that asks for streams.

    Their next request needs a search among the session's, or goes on from the last one without.
    """
    harness, smallest = request.param
    monkeypatch.setattr(history_file, "SMALLEST", smallest)
    return partial(linear_turns, harness)


def asked(home: House) -> Any:
    """The calls that are on the plain path now."""
    session = home.gateway._registry.get("s")
    assert session is not None
    return [call for call in session.calls.values() if call.flight is not None]


async def test_a_client_that_goes_leaves_its_call_to_a_retry(linear):
    async with linear() as (home, engine, caller, messages, start):
        engine.held, before = True, engine.asked
        first = start(caller.ask(messages))
        await engine.waits.wait()
        assert len(asked(home)) == 1
        first.cancel()
        await caller.unclaimed()
        assert not asked(home)
        second = start(caller.ask(messages))
        await caller.until(lambda: [call for call in caller.calls if call.clients])
        engine.sign.set()
        assert (await second)["content"] == "a"
        assert engine.asked == before + 1, "the retry joined"
        assert caller.delivery(2) is DeliveryState.DELIVERED
        assert len(caller.exchanges) == 3


@pytest.mark.parametrize("grace_s", [0, 10])
async def test_a_call_that_nobody_claims_is_cancelled(grace_s, linear):
    async with linear(retry_grace_s=grace_s) as (home, engine, caller, messages, start):
        engine.held = True
        first = start(caller.ask(messages))
        await engine.waits.wait()
        first.cancel()
        if grace_s:
            await caller.unclaimed()
            caller.end_grace()
        await caller.until(lambda: len(caller.calls) == 2)
        pool = home.gateway._engine
        await caller.until(lambda: not pool.calls and not pool.replicas()[0]["calls_in_flight"])
        assert len(caller.exchanges) == 2
        engine.held = False
        engine.sign.set()
        assert (await caller.ask(messages))["content"] == "a"


async def test_sealing_a_session_cancels_its_plain_call_with_401(linear):
    async with linear() as (home, engine, caller, messages, start):
        engine.held = True
        call = start(caller.post({"model": "m", "messages": messages}))
        await engine.waits.wait()
        assert len(asked(home)) == 1
        await home.gateway.seal("s")
        status, reply = await call
        assert status == 401
        assert "ended" in reply["error"]["message"]
        assert len(caller.exchanges) == 2
        assert not home.gateway._engine.calls


async def test_an_open_connection_of_a_sealed_session_gets_401_and_no_sample(linear):
    async with linear() as (home, engine, caller, messages, _):
        before = engine.asked
        await home.gateway.seal("s")
        status, reply = await caller.post({"model": "m", "messages": messages})
        assert status == 401
        assert "ended" in reply["error"]["message"]
        assert engine.asked == before


async def test_a_call_that_the_engine_aborts_is_resumed(linear):
    async with linear() as (_, engine, caller, messages, _):
        before, engine.cut = engine.asked, True
        assert (await caller.ask(messages))["content"] == "a"
        assert engine.asked == before + 2
        assert len(caller.exchanges) == 3


async def test_a_reply_under_another_prompt_is_stored_under_the_engines_ids(monkeypatch, linear):
    async with linear(adapter=OtherPrompt) as (home, engine, caller, messages, _):
        before = engine.asked
        monkeypatch.setattr(OtherPrompt, "prompt", b"[5,6,7]")
        assert (await caller.ask(messages))["content"] == "a"
        assert home.gateway.plain.served == 1
        assert engine.asked == before + 1, "the sample in hand is used"
        last = caller.exchanges[-1]
        assert last.suffix_ids[-3:].tolist() == [5, 6, 7]
        assert last.extra["break"]["reason"] == "engine_prompt"


async def test_a_gateway_that_closes_answers_its_plain_call_with_503(linear):
    async with linear() as (home, engine, caller, messages, start):
        engine.held = True
        call = start(caller.post({"model": "m", "messages": messages}))
        await engine.waits.wait()
        await home.gateway.__aexit__(None, None, None)
        assert (await call)[0] == 503


async def test_a_plain_call_across_a_weight_update_is_one_resumed_reply(linear):
    async with linear() as (home, engine, caller, messages, start):
        engine.held = True
        call = start(caller.ask(messages))
        await engine.waits.wait()
        pool = home.gateway._engine
        await pool.hold("abort")
        await caller.until(lambda: not asked(home))
        await pool.release()
        assert (await call)["content"] == "a"
        assert caller.exchanges[2].extra["resumed"] == 1
        assert home.gateway.plain.served == 1
        assert len(caller.exchanges) == 3


async def test_a_paused_policy_gives_503_on_the_plain_path_and_samples_nothing(linear):
    async with linear() as (home, engine, caller, messages, _):
        before = engine.asked
        await home.control("POST", "/policy", {"paused": True})
        status, _ = await caller.post({"model": "m", "messages": messages})
        assert (status, engine.asked) == (503, before)


@pytest.mark.parametrize("error", [EngineError("busy", status=503, retryable=True)])
async def test_a_call_that_the_engine_refuses_is_tried_again(error, linear):
    async with linear() as (home, engine, caller, messages, _):
        engine.errors.append(error)
        before = engine.asked
        assert (await caller.ask(messages))["content"] == "a"
        assert engine.asked == before + 2
        assert home.gateway.plain.served == 1
        assert len(caller.exchanges) == 3


@pytest.mark.parametrize("by_alarm", [True, False])
async def test_headers_and_keepalives_of_a_waiting_plain_stream_are_sent_in_time(by_alarm):
    patience = {"headers_after_s": 0.05, "keepalive_s": 0.05} if by_alarm else {}
    async with linear_turns(Streaming, **patience) as (home, engine, caller, messages, start):
        engine.held, before = True, engine.asked
        body = orjson.dumps({"model": "m", "messages": messages, "stream": True})
        posted = home.client.post(caller.url, data=body, headers=caller.headers)
        sending = start(posted.__aenter__())
        await engine.waits.wait()
        if by_alarm:
            await caller.until(lambda: not asked(home))
        else:  # handed over late, for whatever reason
            (call,) = asked(home)
            call.clock_start -= 20
            call.flight.hand_over()
        async with asyncio.timeout(5), await sending as response:
            sofar = b""
            while sofar.count(b"data: ") < 1 + 2 * by_alarm:
                sofar += await response.content.readany()
            engine.sign.set()
            answer = events(sofar + await response.content.read())
        assert chat_said(answer)[0]["content"] == "a"
        assert (answer[-1], engine.asked) == ("[DONE]", before + 1)
        assert home.gateway.plain.served == 1
        await caller.until(lambda: caller.delivery(2) is DeliveryState.DELIVERED)
        assert len(caller.exchanges) == 3


async def test_the_keepalive_alarm_of_a_plain_stream_is_cancelled_once_it_is_sent():
    async with linear_turns(Streaming) as (home, engine, caller, messages, start):
        engine.held = True
        asking = start(caller.ask(messages))
        await engine.waits.wait()
        flight = asked(home)[0].flight
        assert flight.alarm is not None
        engine.sign.set()
        assert (await asking)["content"] == "a"
        assert flight.alarm.cancelled()


async def test_a_plain_call_after_an_expired_engine_connection_stays_on_the_plain_path(linear):
    async with linear() as (home, _, caller, messages, _):
        (replica,) = home.gateway._engine._replicas.values()
        replica.engine._client.connections._keepalive_s = 0
        assert (await caller.ask(messages))["content"] == "a"
        assert home.gateway.plain.served == 2


async def test_a_lost_engine_gives_503_on_the_plain_path(linear):
    async with linear() as (home, _, caller, messages, _):
        (replica,) = home.gateway._engine._replicas.values()
        connections = replica.engine._client.connections
        pool = home.gateway._engine
        pool.settings = pool.settings.model_copy(update={"patience_s": 0.1})
        connections._keepalive_s, connections._url = 0, connections._url.with_port(9)
        status, _ = await caller.post({"model": "m", "messages": messages})
        assert (status, home.gateway.plain.served) == (503, 1)
        assert len(caller.exchanges) == 2


async def test_streams_take_the_general_path_once_a_second_replica_could_resume_them():
    async with EngineServer(scripted({"content": "a"})) as spare, played({"content": "a"}) as home:
        caller = Streaming(home, (await home.session("s")).handle)
        messages: list[Any] = [user("go")]
        for served in (0, 1, 1, 1):
            messages += [await caller.ask(messages), user("and then")]
            assert home.gateway.plain.served == served
            if len(home.gateway._engine.replicas()) == 1 and served:
                await home.gateway.add_replica(spare.url)


async def test_a_stream_begins_with_the_length_of_its_prompt():
    async with played({"content": "a"}) as home:
        caller = await home.session("s")
        speech = SPEECHES["anthropic"]
        harness = Harness(caller, speech, "You are an agent.", random.Random(0), streams=True)
        for _ in range(2):
            harness.take(await harness.send() or [])
        begun = [answer[0]["message"]["usage"]["input_tokens"] for _, _, answer in harness.answers]
        assert begun == [one.prompt_length for one in caller.exchanges]
        assert home.gateway.plain.served == 1


# ---- the wire


@asynccontextmanager
async def raw(home: House, caller: Caller) -> AsyncIterator[Any]:
    """Send a request over a connection of its own, in these pieces; read a reply."""
    host, port = home.gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    def request(messages: Any) -> bytes:
        body = orjson.dumps({"model": "m", "messages": messages})
        lines = [
            "POST /v1/chat/completions HTTP/1.1",
            "Host: gateway",
            f"Authorization: {caller.headers['Authorization']}",
            f"Content-Length: {len(body)}",
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    async def send(messages: Any, *, pieces: int = 1) -> None:
        data = request(messages)
        body = data.index(b"\r\n\r\n") + 4
        size = -(-(len(data) - body) // pieces)
        for at in range(0, len(data) - body, size):
            writer.write(data[body + at if at else 0 : body + at + size])
            await writer.drain()
            await asyncio.sleep(0.02 if pieces > 1 else 0)

    async def receive() -> Any:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        status, body = int(head.split()[1]), orjson.loads(await reader.readexactly(length))
        assert status == 200, body
        return body["choices"][0]["message"]

    try:
        yield send, receive, writer
    finally:
        writer.close()


async def test_a_body_may_come_in_pieces():
    async with played({"content": "a"}) as home:
        caller = await home.session("s")
        async with raw(home, caller) as (send, receive, _):
            messages: list[Any] = [user("go")]
            for _ in range(3):
                await send(messages, pieces=4)
                messages += [await receive(), user("and then")]
            assert home.gateway.plain.served == 2


async def test_a_request_head_seen_once_takes_the_plain_path_on_every_connection():
    async with played({"content": "a"}) as home:
        caller, other = await home.session("s"), await home.session("t")
        messages: list[Any] = [user("go")]
        for served in range(3):
            async with raw(home, caller) as (send, receive, _):
                await send(messages)
                messages += [await receive(), user("and then")]
            assert home.gateway.plain.served == served
        async with raw(home, other) as (send, receive, _):
            await send(messages)
            await receive()
            await send(messages)  # a known head, but nothing linear
            await receive()
        assert home.gateway.plain.served == 2
        assert (len(caller.exchanges), len(other.exchanges)) == (3, 2)


async def test_the_plain_path_serves_two_sessions_that_alternate_on_one_connection():
    async with played({"content": "a"}) as home:
        callers = [await home.session("s"), await home.session("t")]
        talks: list[list[Any]] = [[user("go")], [user("go on")]]
        for _ in range(3):
            for caller, messages in zip(callers, talks, strict=True):  # over one connection
                messages += [await caller.ask(messages), user("and then")]
        assert home.gateway.plain.served == 4
        for caller in callers:
            parents = [one.parent_id for one in caller.exchanges]
            assert parents == [None, *[one.exchange_id for one in caller.exchanges[:-1]]]


async def test_an_idle_connection_after_plain_turns_is_closed_by_the_keepalive_timeout():
    async with linear_turns(Caller) as (home, engine, caller, messages, _):
        async with raw(home, caller) as (send, receive, _):
            await send(messages)
            messages += [await receive(), user("once more")]
        async with raw(home, caller) as (send, receive, _):
            engine.held = True
            await send(messages)
            await engine.waits.wait()
            connection = asked(home)[0].flight.line.connection
            engine.sign.set()
            await receive()
            assert home.gateway.plain.served == 2
            assert connection.is_known
            assert connection.was_served
            assert connection._deadline is None
            assert connection._keepalive_handle is not None
            connection._next_keepalive_close_time = 0
            connection._process_keepalive()
            assert connection.transport is None


async def test_a_pipelined_request_is_answered_after_the_plain_reply(linear):
    async with linear() as (home, engine, caller, messages, _):
        async with raw(home, caller) as (send, receive, _):
            await send(messages)
            messages += [await receive(), user("once more")]
            engine.held = True
            await send(messages)
            await engine.waits.wait()
            await send([user("something else")])
            engine.sign.set()
            assert [(await receive())["content"] for _ in range(2)] == ["a", "a"]
        assert len(caller.exchanges) == 5
        assert [caller.delivery(at) for at in range(5)] == [DeliveryState.DELIVERED] * 5


async def test_a_body_that_arrives_slowly_is_handed_to_the_general_path(monkeypatch, linear):
    monkeypatch.setattr(plain_file, "GATHER_S", 0.05)
    async with linear() as (home, _, caller, messages, _):
        async with raw(home, caller) as (send, receive, _):
            await send(messages)
            messages += [await receive(), user("once more")]
            before = home.gateway.plain.served
            await send(messages, pieces=6)
            assert (await receive())["content"] == "a"
            assert home.gateway.plain.served == before
        await caller.until(lambda: caller.delivery(3) is DeliveryState.DELIVERED)


async def test_a_client_that_disconnects_within_its_body_on_the_plain_path_samples_nothing(linear):
    async with linear() as (home, engine, caller, messages, start):
        async with raw(home, caller) as (send, receive, writer):
            await send(messages)
            messages += [await receive(), user("once more")]
            calls, before = caller.facts.calls, engine.asked
            task = start(send(messages, pieces=3))
            await asyncio.sleep(0.03)
            task.cancel()
            writer.transport.abort()
        await caller.until(lambda: caller.facts.calls == calls + 1)
        session = home.gateway._registry.get("s")
        assert session is not None
        assert engine.asked == before
        assert (session.in_hand.requests, session.in_hand.size) == (0, 0)


async def test_the_plain_path_serves_12_concurrent_sessions_correctly():
    async with played({"content": "a"}, {"content": "b"}, {"content": "c"}) as home:
        callers = [await home.session(f"s{number}") for number in range(12)]

        async def run(caller: Caller) -> list[str]:
            messages: list[Any] = [user(f"go {caller.session_id}")]
            for turn in range(3):
                messages += [await caller.ask(messages), user(f"and {turn}")]
            return [one["content"] for one in messages if one["role"] == "assistant"]

        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(run(caller)) for caller in callers]
        assert [task.result() for task in runs] == [["a", "b", "c"]] * 12
        for caller in callers:
            parents = [one.parent_id for one in caller.exchanges]
            assert parents == [None, *[one.exchange_id for one in caller.exchanges[:-1]]]
        assert home.gateway.plain.served > 12


async def test_a_connection_keeps_no_session_that_has_ended(linear):
    async with linear() as (home, _, caller, messages, _):
        gone = weakref.ref(home.gateway._registry.get("s"))
        await home.gateway.seal("s")
        assert home.gateway.forget("s")
        gc.collect()
        assert gone() is None
        status, _ = await caller.post({"model": "m", "messages": messages})
        assert status == 401
