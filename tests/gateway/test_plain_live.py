"""Live streams on the plain path: whatever happens to one, both paths say and store the same."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from tests.gateway.gated import Gated
from tests.gateway.house import Caller, House, events, user
from tests.gateway.speech import SPEECHES, Harness
from tests.gateway.test_plain import OtherPrompt, Streaming, played

from bridle.dialects import history as history_file
from bridle.errors import EngineError
from bridle.gateway import plain_live as plain_live_file
from bridle.types import DeliveryState

KEEPALIVE = b'"delta":{},"finish_reason":null'
NOTHING = b"it does not come: the connection ends"
WORDS = "one two three four five six seven eight nine ten"


class Talk:
    """A session whose next turn streams live over a connection of its own, held by its engine."""

    def __init__(self, home: House, caller: Caller, engine: Gated, messages: list[Any]) -> None:
        self.home = home
        self.caller = caller
        self.engine = engine
        self.messages = messages
        self.received = b""
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def send(self) -> None:
        """Ask for the next turn; its reply stands at the gate when this returns."""
        url = urlsplit(self.caller.url)
        if not hasattr(self, "writer"):
            self.reader, self.writer = await asyncio.open_connection(url.hostname, url.port)
        body = orjson.dumps({"model": "m", "messages": self.messages, "stream": True})
        lines = [f"{name}: {value}" for name, value in self.caller.headers.items()]
        head = [f"POST {url.path} HTTP/1.1", f"Host: {url.netloc}", *lines]
        self.writer.write("\r\n".join([*head, f"Content-Length: {len(body)}\r\n\r\n"]).encode())
        self.writer.write(body)
        await self.engine.waits.wait()

    async def read(self, until: bytes) -> None:
        """Read until these bytes came, or the connection ended."""
        while until not in self.received and (data := await self.reader.read(1 << 16)):
            self.received += data

    async def end(self, until: bytes = b"[DONE]") -> None:
        """Let the engine go on, and read the rest."""
        self.engine.sign.set()
        await self.read(until)

    def said(self) -> Any:
        """The status, and the events without times, ids and comments, texts joined."""
        status = self.received[9:12]
        found: list[Any] = []
        text = ""
        body = self.received.partition(b"\r\n\r\n")[2]
        for event in events(re.sub(rb"(^|\r\n)[0-9a-f]+\r\n", b"", body)):
            choices = event.get("choices") if isinstance(event, dict) else None
            delta = choices[0]["delta"] if choices else {}
            text += delta.get("content") or ""
            if not choices:
                found.append(event if isinstance(event, str) else sorted(event))
            elif choices[0]["finish_reason"] or delta.get("role"):
                found.append((choices[0]["finish_reason"], sorted(delta)))
        return status, text, found


@asynccontextmanager
async def talking(
    gate: int, error: Exception | None = None, *, plain: bool, content: str = WORDS, **settings: Any
) -> AsyncIterator[Talk]:
    engine = Gated({"content": content}, gate=gate, error=error)
    engine.error = None
    engine.sign.set()
    async with played(server=engine, plain=plain, stream="live", **settings) as home:
        caller = Streaming(home, (await home.session("s")).handle)
        talk = Talk(home, caller, engine, [user("go")])
        for _ in range(2):  # the first has its head known
            await talk.send()
            await talk.read(b"[DONE]")
            talk.messages += [{"role": "assistant", "content": content}, user("and then")]
            talk.received = b""
        engine.error = error
        engine.sign.clear()
        engine.waits.clear()
        await caller.until(lambda: caller.delivery(1) is DeliveryState.DELIVERED)
        assert home.gateway.plain.served == plain
        if plain:
            assert (talk.caller._session.tip is not None) is (history_file.SMALLEST == 1)
        async with asyncio.timeout(20):
            yield talk
        talk.writer.close()


async def silence_first(talk: Talk) -> None:
    await talk.send()
    await talk.read(KEEPALIVE)
    await talk.end()


async def silence_in_the_middle(talk: Talk) -> None:
    await talk.send()
    await talk.read(b"two")
    await talk.read(KEEPALIVE)
    await talk.end()


async def failure_first(talk: Talk) -> None:
    await talk.send()
    await talk.end(b"error")


async def failure(talk: Talk) -> None:
    await talk.send()
    await talk.end()


async def seal(talk: Talk) -> None:
    await talk.send()
    await talk.read(b"two")
    await talk.home.gateway.seal("s")
    await talk.read(NOTHING)


async def seal_first(talk: Talk) -> None:
    await talk.send()
    await talk.home.gateway.seal("s")
    await talk.read(b"invalid_api_key")


async def closing(talk: Talk) -> None:
    await talk.send()
    await talk.read(b"two")
    await talk.home.gateway.__aexit__(None, None, None)
    await talk.read(NOTHING)


async def second_request(talk: Talk) -> None:
    await talk.send()
    await talk.read(b"two")
    await talk.send()
    await talk.end()
    after = talk.received.partition(b"[DONE]")[2]
    while b"[DONE]" not in after:
        after += await talk.reader.read(1 << 16)


async def another_prompt(talk: Talk) -> None:
    """Get a reply that the engine samples under a prompt of its own, and go on from it."""
    (replica,) = talk.home.gateway._engine.each()
    engine: Any = replica.engine
    engine.prompt = b"[5,6,7]"
    await talk.send()
    await talk.end()
    engine.prompt = None
    talk.messages += [{"role": "assistant", "content": WORDS}, user("and then")]
    await talk.caller.ask(talk.messages)


async def leave(talk: Talk) -> None:
    """Go when a part of the reply has come."""
    await talk.send()
    await talk.read(b"two")
    talk.writer.transport.abort()
    (call,) = (call for call in talk.caller.calls if call.in_flight)
    await talk.caller.until(lambda: call.clients == 0)


async def retry(talk: Talk) -> None:
    await leave(talk)
    del talk.writer
    talk.received = b""
    await talk.send()
    await talk.end()


async def go_on(talk: Talk, text: str) -> None:
    """Send a turn that shows the part of the reply that came."""
    talk.messages += [{"role": "assistant", "content": text}, user("Resume directly.")]
    talk.engine.error = None
    talk.engine.sign.set()
    await talk.caller.ask(talk.messages)
    await talk.caller.ask([*talk.messages, user("and then")])


async def leave_and_go_on(talk: Talk) -> None:
    await leave(talk)
    await go_on(talk, "one two")


async def break_and_go_on(talk: Talk) -> None:
    await talk.send()
    await talk.read(b"two")
    talk.engine._gate = 0
    talk.engine.sign.set()
    await talk.read(NOTHING)
    talk.engine._gate = -1
    await go_on(talk, "one two three")


DISTURBED: dict[str, tuple[Callable[[Talk], Awaitable[None]], dict[str, Any]]] = {
    "silence first": (silence_first, {"gate": 0, "keepalive_s": 0.05, "headers_after_s": 0.05}),
    "silence": (silence_in_the_middle, {"gate": 6, "keepalive_s": 0.05}),
    "failure first": (failure_first, {"gate": 0, "error": EngineError("it broke", status=400)}),
    "failure": (failure, {"gate": 6, "error": EngineError("it broke", status=400)}),
    "seal first": (seal_first, {"gate": 0}),
    "seal": (seal, {"gate": 6}),
    "closing": (closing, {"gate": 6}),
    "second request": (second_request, {"gate": 6}),
    "another prompt": (another_prompt, {"gate": 6, "adapter": OtherPrompt}),
    "retry": (retry, {"gate": 6}),
    "leave": (leave_and_go_on, {"gate": 6}),
    "break": (break_and_go_on, {"gate": 6, "error": EngineError("it broke", status=400)}),
}


@pytest.mark.parametrize("smallest", [1, 2000])
@pytest.mark.parametrize("name", DISTURBED)
async def test_a_disturbed_live_stream_is_answered_and_stored_alike_by_both_paths(
    monkeypatch, name, smallest
):
    monkeypatch.setattr(history_file, "SMALLEST", smallest)  # 1: without a search
    disturb, how = DISTURBED[name]
    found = []
    for plain in (True, False):
        async with talking(plain=plain, **how) as talk:
            await disturb(talk)
            if name != "closing":
                await talk.caller.until(lambda talk=talk: not talk.caller._session.replying)
                assert not talk.home.gateway._engine.calls
            exchanges = talk.caller.exchanges
            ids = [None, *[one.exchange_id for one in exchanges]]
            rows = [
                (
                    *(one.finish_reason, one.output_ids.tolist(), one.extra.get("error")),
                    *(ids.index(one.parent_id), ids.index(one.continues), one.root_reason),
                )
                for one in exchanges
            ]
            states = [talk.caller.delivery(at) for at in range(len(exchanges))]
            found.append((talk.said(), rows, states))
    assert found[0] == found[1]


@pytest.mark.parametrize("room_for", [0, 1, 2])
async def test_a_live_stream_to_a_connection_without_room_is_continued_by_the_general_path(
    monkeypatch, room_for
):
    asked = itertools.count()
    async with talking(gate=6, plain=True) as talk:
        monkeypatch.setattr(plain_live_file, "takes_at_once", lambda *_: next(asked) < room_for)
        await talk.send()
        await talk.end()
        _, text, found = talk.said()
        assert (text, found[-1]) == (WORDS, "[DONE]")
        await talk.caller.until(lambda: talk.caller.delivery(2) is DeliveryState.DELIVERED)
        assert talk.home.gateway.plain.served == 1
    assert next(asked) == room_for + 1


async def test_the_keepalive_timeout_of_a_connection_does_not_end_its_live_stream():
    async with talking(gate=6, plain=True) as talk:
        await talk.send()
        await talk.read(b"two")
        (call,) = (call for call in talk.caller.calls if call.in_flight)
        flight: Any = call.flight
        connection = flight._plain.line.connection
        connection._next_keepalive_close_time = 0
        connection._process_keepalive()
        await talk.end()
        assert talk.said()[1] == WORDS
        assert talk.home.gateway.plain.served == 2


async def test_a_live_stream_that_cannot_be_written_is_cut_and_its_call_goes_on(monkeypatch):
    async with talking(gate=6, plain=True) as talk:
        await talk.send()
        await talk.read(b"two")
        monkeypatch.setattr(plain_live_file, "takes_at_once", None)
        talk.engine.sign.set()
        with suppress(ConnectionError):
            await talk.read(NOTHING)
        await talk.caller.until(lambda: len(talk.caller.exchanges) == 3)
        assert b"[DONE]" not in talk.received
        assert talk.caller.exchanges[2].finish_reason == "stop"
        session = talk.caller._session
        await talk.caller.until(lambda: not session.in_hand.requests)


async def test_a_live_stream_s_large_end_waits_until_its_client_reads(monkeypatch):
    monkeypatch.setattr(plain_live_file, "takes_at_once", lambda transport, size: size < 2_000)
    found = []
    for plain in (True, False):
        async with played({"content": WORDS * 10}, plain=plain, stream="live") as home:
            caller = await home.session("s")
            speech = SPEECHES["responses"]
            harness = Harness(caller, speech, "You are an agent.", random.Random(0), streams=True)
            for _ in range(3):
                harness.take(await harness.send() or [])
            assert home.gateway.plain.served == 0
            texts = [
                event["response"]["output"][0]["content"][0]["text"]
                for _, _, answer in harness.answers
                for event in answer
                if event["type"] == "response.completed"
            ]
            found.append((texts, [caller.delivery(at) for at in range(3)]))
    assert found[0] == found[1]
    assert found[0][0] == [WORDS * 10] * 3
