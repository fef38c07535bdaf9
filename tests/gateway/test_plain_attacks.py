"""The plain path under what a network, a client or a trainer may do at the worst moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest
import uvloop
from tests.gateway.house import Caller, House, user
from tests.gateway.test_plain import Streaming, Watched, played, raw

from bridle.engines.base import GenerateRequest
from bridle.engines.vllm import VllmEngine
from bridle.gateway import plain as plain_file
from bridle.gateway.plain import PlainCall
from bridle.types import DeliveryState

WAYS = {"json": (Caller, "whole"), "whole": (Streaming, "whole"), "live": (Streaming, "live")}
TURN = {"content": "one two three"}
SLOW: dict[str, Any] = {"content": "one two three four five six seven eight", "pace_s": 0.02}


@asynccontextmanager
async def dripping() -> AsyncIterator[Any]:
    """A way to an engine whose answers arrive byte by byte; gives what makes its adapter."""
    target = ""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(target)
        there, back = await asyncio.open_connection(url.hostname, url.port)

        async def ask() -> None:
            while data := await reader.read(1 << 16):
                back.write(data)
            back.close()

        async with asyncio.TaskGroup() as group:
            group.create_task(ask())
            with suppress(ConnectionError):
                while data := await there.read(1 << 16):
                    for at in range(len(data)):
                        writer.write(data[at : at + 1])
                        await asyncio.sleep(0)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)

    def adapter(url: str) -> VllmEngine:
        nonlocal target
        target = url
        return VllmEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    async with server:
        yield adapter


async def turns(home: House, way: str, count: int = 3) -> tuple[Caller, list[Any]]:
    """A caller after so many turns, and the messages of its next one."""
    caller = WAYS[way][0](home, (await home.session("s")).handle)
    messages: list[Any] = [user("go")]
    for _ in range(count):
        messages += [await caller.ask(messages), user("and then")]
    return caller, messages


def begun(monkeypatch: pytest.MonkeyPatch, then: Any = lambda: None) -> list[Any]:
    """The calls that the plain path begins from now on; `then` runs behind each."""
    seen: list[Any] = []
    begins = plain_file.PlainCall.begin

    def begin(flight: Any) -> None:
        begins(flight)
        seen.append(flight)
        then()

    monkeypatch.setattr(plain_file.PlainCall, "begin", begin)
    return seen


@pytest.mark.parametrize("way", WAYS)
async def test_an_engine_s_reply_may_arrive_byte_by_byte(monkeypatch, way):
    seen = begun(monkeypatch)
    async with (
        dripping() as adapter,
        played(TURN, adapter=adapter, stream=WAYS[way][1]) as home,
    ):
        caller, messages = await turns(home, way)
        assert [one["content"] for one in messages[1::2]] == [TURN["content"]] * 3
        assert len(seen) == 2
        sampled = [one.output_ids.tolist() for one in caller.exchanges]
        assert sampled[0] == sampled[1] == sampled[2]
        assert [caller.delivery(at) for at in range(3)] == [DeliveryState.DELIVERED] * 3


async def said(home: House, caller: Caller, messages: list[Any], leave: Any, way: str) -> bytes:
    """Send all of a request and leave in some manner; return the bytes received until then."""
    url = urlsplit(caller.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    body = orjson.dumps({"model": "m", "messages": messages, "stream": way != "json"})
    head = "".join(f"{name}: {value}\r\n" for name, value in caller.headers.items())
    writer.write(
        f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\n{head}"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return await leave(reader, writer)


async def patient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Read all of the reply."""
    answer = b""
    while b'"usage"' not in answer and b"[DONE]" not in answer:  # which end it
        answer += await reader.read(1 << 16)
    await asyncio.sleep(0.1)
    writer.close()
    return answer


async def half_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Tell that nothing more is sent, and read on."""
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def gone_in_the_middle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Go when a part of the reply has come."""
    answer = b""
    while answer.count(b"data: ") < 3:
        answer += await reader.read(1 << 16)
    writer.transport.abort()
    return answer


def over(session: Any) -> bool:
    """Return whether no call of a session runs or is answered."""
    return not session.running and not session.replying


@pytest.mark.parametrize(
    ("leave", "way"),
    [
        (half_closed, "json"),
        (half_closed, "whole"),
        (half_closed, "live"),
        (gone_in_the_middle, "live"),
    ],
)
async def test_a_client_that_leaves_is_treated_alike_by_both_paths(monkeypatch, leave, way):
    found = []
    for plain in (True, False):
        async with played(SLOW, plain=plain, stream=WAYS[way][1], retry_grace_s=0) as home:
            caller, messages = await turns(home, way, 2)
            await said(home, caller, messages, patient, way)  # its head is known from here on
            messages += [{"role": "assistant", "content": SLOW["content"]}, user("once more")]
            session: Any = home.gateway._registry.get("s")
            with monkeypatch.context() as patch:
                seen = begun(patch)
                answer = await said(home, caller, messages, leave, way)
                await caller.until(partial(over, session))
                assert len(seen) == plain
            states = [caller.delivery(at) for at in range(len(caller.exchanges))]
            kept = [(one.finish_reason, one.output_ids.size > 0) for one in caller.exchanges]
            found.append((answer[:12], states, kept, caller.facts.turns))
            assert (session.in_hand.requests, session.in_hand.size) == (0, 0)
            assert not home.gateway._engine.calls
    assert found[0] == found[1]


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("way", WAYS)
async def test_a_weight_update_between_placing_and_sampling_loses_no_plain_call(
    monkeypatch, way, connected
):
    async with played(TURN, stream=WAYS[way][1]) as home, asyncio.TaskGroup() as group:
        caller, messages = await turns(home, way, 2)
        pool = home.gateway._engine
        (replica,) = pool._replicas.values()
        engine: Any = replica.engine
        if not connected:
            engine._client.connections._keepalive_s = 0
        updates = []

        async def update() -> None:
            await pool.hold("abort")
            await pool.release()

        seen = begun(monkeypatch, lambda: updates.append(group.create_task(update())))
        assert (await caller.ask(messages))["content"] == TURN["content"]
        await updates[0]
        assert len(seen) == len(updates) == 1
        assert len(caller.exchanges) == 3
        assert caller.delivery(2) is DeliveryState.DELIVERED


@pytest.mark.parametrize("way", WAYS)
async def test_both_paths_choose_the_same_of_two_equal_parents(way):
    found = []
    for plain in (True, False):
        async with played(TURN, plain=plain, stream=WAYS[way][1]) as home:
            caller, messages = await turns(home, way, 2)
            twin = [caller.ask(messages), caller.ask(messages)]
            first, second = [await one for one in twin]
            assert first["content"] == second["content"]
            for _ in range(2):
                messages += [first, user("go on")]
                first = await caller.ask(messages)
            exchanges = caller.exchanges
            ids = [one.exchange_id for one in exchanges]
            found.append(
                [
                    (
                        None if one.parent_id is None else ids.index(one.parent_id),
                        one.extra.get("tie"),
                        len(one.extra.get("repeats", ())),
                        caller.delivery(at),
                    )
                    for at, one in enumerate(exchanges)
                ]
            )
    assert found[0] == found[1]


def test_under_uvloop_a_new_connection_takes_the_plain_path_though_its_request_comes_at_once():
    async def burst() -> tuple[int, int]:
        async with played({"content": "a"}) as home:
            callers = [await home.session(f"s{n}") for n in range(16)]
            talks: list[list[Any]] = [[user("go")] for _ in callers]

            async def turn(caller: Caller, messages: Any) -> None:
                async with raw(home, caller) as (send, receive, _):
                    await send(messages)
                    messages += [await receive(), user("and then")]

            for _ in range(2):
                async with asyncio.TaskGroup() as group:
                    for caller, messages in zip(callers, talks, strict=True):
                        group.create_task(turn(caller, messages))
            return home.gateway.plain.served, len(callers)

    served, callers = uvloop.run(burst())
    assert served == callers, "the second turn of each"


class Begun(VllmEngine):
    """An adapter that counts the streams that it sent outside of a task."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.streams = 0

    def begin(self, request: GenerateRequest) -> asyncio.Future[Any] | None:
        waiting = super().begin(request)
        self.streams += request.stream and waiting is not None
        return waiting


async def test_live_streams_take_the_plain_path_and_are_sent_at_once():
    engine = Watched({"content": "a"})
    async with played(server=engine, adapter=Begun, stream="live") as home:
        caller, probed = Streaming(home, (await home.session("s")).handle), engine.asked
        messages: list[Any] = [user("go")]
        for _ in range(3):
            messages += [await caller.ask(messages), user("and then")]
        assert home.gateway.plain.served == 2
        assert [one.extra["stream"] for one in caller.exchanges] == ["live"] * 3
        (replica,) = home.gateway._engine.each()
        assert isinstance(replica.engine, Begun)
        assert (replica.engine.streams, engine.asked - probed) == (2, 3), "all but the root"


async def refused(caller: Caller, messages: Any) -> None:
    """Send a request whose connection breaks."""
    with pytest.raises(aiohttp.ClientError):
        await caller.post({"model": "m", "messages": messages})


@pytest.mark.parametrize("ends", ["client", "seal"])
async def test_a_live_stream_that_ends_before_its_task_begins_is_aborted(ends, monkeypatch):
    engine = Watched({"content": "a"})
    house = played(server=engine, stream="live", retry_grace_s=0.0)
    async with house as home, asyncio.TaskGroup() as group:
        caller = Streaming(home, (await home.session("s")).handle)
        messages: list[Any] = [user("go")]
        messages += [await caller.ask(messages), user("and then")]
        session = home.gateway._registry.get("s")
        assert session is not None
        engine.held, begin = True, PlainCall.begin
        ending: list[Any] = []

        def end_and_begin(call: PlainCall) -> None:
            if ends == "seal":
                ending.append(group.create_task(home.gateway.seal("s")))
            else:
                asyncio.get_running_loop().call_soon(call.line.connection.connection_lost, None)
                ending.append(call.line.connection.transport)
            begin(call)

        monkeypatch.setattr(PlainCall, "begin", end_and_begin)
        if ends == "seal":
            assert (await caller.post({"model": "m", "messages": messages}))[0] == 401
        else:
            asking = group.create_task(refused(caller, messages))
            await caller.until(lambda: bool(ending))
            ending[0].abort()
            await asking
        async with asyncio.timeout(15):
            while session.running:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        assert not home.gateway._engine.calls
        assert len(caller.exchanges) == 1


async def test_a_request_sent_behind_another_does_not_make_that_one_s_head_known():
    def request(key: str, messages: Any) -> bytes:
        body = orjson.dumps({"model": "m", "messages": messages})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nx-api-key: {key}\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async with played(TURN) as home:
        caller, other = await home.session("s"), await home.session("t")
        await home.gateway.seal("t")
        url = urlsplit(caller.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        messages = [user("go")]
        both = [request(one.handle.key, messages) for one in (other, caller)]
        writer.write(b"".join(both))
        answers = b""
        while b"401 Unauthorized" not in answers or b'"usage"' not in answers:
            answers += await reader.read(1 << 16)
        messages += [{"role": "assistant", "content": TURN["content"]}, user("and then")]
        writer.write(request(other.handle.key, messages))
        assert (await reader.readuntil(b"\r\n")).split()[1] == b"401"
        assert (len(caller.exchanges), home.gateway.plain.served) == (1, 0)
        writer.close()


def test_under_uvloop_a_known_head_with_two_user_agents_is_served_on_every_new_connection():
    async def burst() -> list[bytes]:
        async with played(TURN) as home:
            caller = await home.session("s")
            url = urlsplit(caller.url)

            async def root(text: str) -> bytes:
                body = orjson.dumps({"model": "m", "messages": [user(text)]})
                head = f"POST {url.path} HTTP/1.1\r\nHost: g\r\nUser-Agent: a\r\nUser-Agent: b\r\n"
                key = f"x-api-key: {caller.handle.key}\r\n"
                reader, writer = await asyncio.open_connection(url.hostname, url.port)
                writer.write(f"{head}{key}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                status = (await reader.readuntil(b"\r\n")).split()[1]
                writer.close()
                return status

            found = [await root("go")]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(root(f"go {number}")) for number in range(8)]
            return [*found, *[task.result() for task in tasks]]

    assert uvloop.run(burst()) == [b"200"] * 9
