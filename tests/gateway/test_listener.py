"""Connections: opened, limited in size and time, closed without a trace."""

import asyncio
import gzip
import socket
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bridle.errors import ConfigError
from bridle.gateway.listener import HEAD_BYTES, Connection, Listener, listen


async def echo(http: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=await http.read())


@asynccontextmanager
async def listening(
    handler=echo,
    *,
    port=0,
    most=1 << 20,
    head_timeout_s=5.0,
    write_timeout_s=600.0,
    opened=None,
    room=None,
):
    listener = Listener(
        handler,
        host="127.0.0.1",
        port=port,
        max_body_bytes=most,
        head_timeout_s=head_timeout_s,
        write_timeout_s=write_timeout_s,
        listening=opened,
        most=room,
    )
    async with listener:
        yield listener


def address(listener: Listener) -> tuple[str, int]:
    host, _, port = listener.url.removeprefix("http://").partition(":")
    return host, int(port)


async def test_port_0_takes_a_free_port_and_reports_it():
    async with (
        listening() as listener,
        aiohttp.ClientSession() as client,
        client.post(listener.url, data=b"hello") as response,
    ):
        assert await response.read() == b"hello"


async def test_a_port_in_use_is_a_clear_error():
    async with listening() as listener:
        _, port = address(listener)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: the port is in use"):
            async with listening(port=port):
                pass


async def test_an_address_that_is_not_ours_is_a_clear_error():
    listener = Listener(echo, host="203.0.113.1", port=0, max_body_bytes=1, head_timeout_s=1)
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1:0"):
        async with listener:
            pass


async def test_a_closed_listener_accepts_nobody():
    async with listening() as listener:
        host, port = address(listener)
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection(host, port)


async def test_a_connection_with_half_a_request_head_is_closed_after_the_head_timeout():
    async with listening(head_timeout_s=0.1) as listener:
        reader, writer = await asyncio.open_connection(*address(listener))
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n")
        async with asyncio.timeout(15):
            assert await reader.read() == b""
        writer.close()


async def test_a_connection_without_a_byte_is_closed_after_the_time_of_a_head():
    async with listening(head_timeout_s=0.1) as listener:
        reader, writer = await asyncio.open_connection(*address(listener))
        async with asyncio.timeout(15):
            assert await reader.read() == b""
        writer.close()


async def test_half_requests_cannot_keep_others_out():
    async with listening(head_timeout_s=600, room=20) as listener:
        served, writer = await asyncio.open_connection(*address(listener))
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nok")
        await served.readuntil(b"ok")
        halves = [await asyncio.open_connection(*address(listener)) for _ in range(60)]
        for _, half in halves:
            half.write(b"POST / HTTP/1.1\r\nHost: x\r\n")
        async with (
            asyncio.timeout(15),
            aiohttp.ClientSession() as client,
            client.post(listener.url, data=b"in") as response,
        ):
            assert await response.read() == b"in"
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\non")
            await served.readuntil(b"on")  # an idle connection went on, the oldest half went
            assert await halves[0][0].read() == b""
        for one in (writer, *(half for _, half in halves)):
            one.close()


async def test_a_full_listener_closes_unauthenticated_connections_and_never_authenticated_ones():
    """They send whole requests and stay, or half heads, as many as they like."""

    async def known(http: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(http.protocol, Connection)
        http.protocol.is_known = http.protocol.is_known or "key" in http.headers
        return web.Response(body=b"ok")

    whole = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    async with asyncio.timeout(30), listening(known, head_timeout_s=600, room=20) as listener:
        served, writer = await asyncio.open_connection(*address(listener))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nkey: 1\r\n\r\n")
        await served.readuntil(b"ok")
        strangers = []
        for sent in (whole, whole[:-2]) * 40:
            strangers.append(await asyncio.open_connection(*address(listener)))
            strangers[-1][1].write(sent)
        assert (await strangers[0][0].read()).endswith(b"ok")  # the oldest is closed
        writer.write(whole)
        await served.readuntil(b"ok")
        for one in (writer, *(other for _, other in strangers)):
            one.close()


async def test_unfinished_heads_have_a_bounded_memory(monkeypatch):
    """One peer sends a head without end, others heads of 64 KiB each that they do not finish."""
    monkeypatch.setattr("bridle.gateway.listener.UNFINISHED_BYTES", 1 << 20)
    line = b"x: " + b"a" * 60_000 + b"\r\n"
    async with asyncio.timeout(60), listening(head_timeout_s=600) as listener:
        endless, writer = await asyncio.open_connection(*address(listener))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n" + line * 5)
        with suppress(ConnectionResetError):
            assert await endless.read() == b""
        halves = []
        for _ in range(30):
            halves.append(await asyncio.open_connection(*address(listener)))
            halves[-1][1].write(b"GET / HTTP/1.1\r\nHost: x\r\n" + line)
        with suppress(ConnectionResetError):
            assert await halves[0][0].read() == b""
        async with aiohttp.ClientSession() as client, client.get(listener.url) as response:
            assert response.status == 200
        for one in (writer, *(half for _, half in halves)):
            one.close()


async def test_an_unfinished_head_behind_a_request_has_a_bounded_memory():
    left = asyncio.Event()

    async def wait(_: web.BaseRequest) -> web.StreamResponse:
        try:
            await asyncio.Event().wait()
            return web.Response()
        finally:
            left.set()

    async with asyncio.timeout(30), listening(wait, head_timeout_s=600) as listener:
        reader, writer = await asyncio.open_connection(*address(listener))
        whole = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        writer.write(whole * 3 + whole[:-2] + (b"x: " + b"a" * 60_000 + b"\r\n") * 100)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        await left.wait()
        writer.close()


async def large(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=b"a" * (16 << 20))


@asynccontextmanager
async def not_reading(listener: Listener, count: int):
    """So many clients that ask for `large` and read nothing; each has its reply waiting."""
    writers = [(await asyncio.open_connection(*address(listener)))[1] for _ in range(count)]
    for writer in writers:
        transport: Any = writer.transport
        transport.pause_reading()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    try:
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


async def test_a_client_that_takes_nothing_of_its_reply_is_cut_off():
    async with asyncio.timeout(30), listening(large, write_timeout_s=0.1) as listener:
        served = listener._runner.server
        async with not_reading(listener, 2):
            while served.requests_count < 2 or served.connections:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
        async with aiohttp.ClientSession() as client, client.get(listener.url) as response:
            assert len(await response.read()) == 16 << 20


async def test_clients_that_do_not_read_their_replies_keep_nobody_out():
    async with asyncio.timeout(60), listening(large, room=4) as listener, AsyncExitStack() as stack:
        served = listener._runner.server
        for number in range(1, 13):
            await stack.enter_async_context(not_reading(listener, 1))
            while served.requests_count < number:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
        assert len(served.connections) <= 4
        async with aiohttp.ClientSession() as client, client.get(listener.url) as response:
            assert len(await response.read()) == 16 << 20


async def test_a_request_in_progress_is_not_closed_by_new_idle_connections():
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def wait(_: web.BaseRequest) -> web.StreamResponse:
        arrived.set()
        await go_on.wait()
        return web.Response(body=b"done")

    async with listening(wait, room=4) as listener:
        reader, writer = await asyncio.open_connection(*address(listener))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(15):
            await arrived.wait()
            halves = [await asyncio.open_connection(*address(listener)) for _ in range(12)]
            assert await halves[0][0].read() == b""
            go_on.set()
            await reader.readuntil(b"done")
        for one in (writer, *(half for _, half in halves)):
            one.close()


async def test_an_idle_connection_stays_open_longer_than_half_a_head():
    async with listening(head_timeout_s=2) as listener:
        reader, writer = await asyncio.open_connection(*address(listener))
        for pause_s in (3, 0):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nok")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"200 OK" in head
            assert await reader.readexactly(2) == b"ok"
            await asyncio.sleep(pause_s)
        writer.close()
        await writer.wait_closed()


async def test_a_handler_is_cancelled_when_its_client_goes():
    gone = asyncio.Event()
    arrived = asyncio.Event()

    async def wait(_: web.BaseRequest) -> web.StreamResponse:
        arrived.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            gone.set()
            raise
        raise AssertionError

    async with listening(wait) as listener:
        _, writer = await asyncio.open_connection(*address(listener))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(15):
            await arrived.wait()
            writer.close()
            await gone.wait()


async def test_headers_of_many_kilobytes_are_taken():
    headers = {"x-state": "a" * 40_000}
    async with (
        listening() as listener,
        aiohttp.ClientSession() as client,
        client.post(listener.url, data=b"ok", headers=headers) as response,
    ):
        assert response.status == 200


async def test_a_body_that_was_not_read_is_not_unpacked_after_its_answer():
    found = []

    async def refuse(http: web.BaseRequest) -> web.StreamResponse:
        found.append(http.content)
        return web.Response(status=401)

    bomb = gzip.compress(bytes(1 << 24))
    head = (
        b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Encoding: gzip\r\n"
        b"Content-Length: %d\r\n\r\n" % len(bomb)
    )
    async with listening(refuse) as listener:
        answer = await exchanged(listener, head + bomb)
    assert answer.startswith(b"HTTP/1.1 401")
    assert found[0].total_bytes <= 1 << 20


async def test_a_client_whose_body_is_refused_gets_an_error_and_frees_its_place():
    async def refuse(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=413)

    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    async with listening(refuse, room=4) as listener, asyncio.timeout(15):
        sending = []
        for _ in range(12):
            sending.append(await asyncio.open_connection(*address(listener)))
            reader, writer = sending[-1]
            writer.write(head)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 413")
            assert b"\r\nConnection: close\r\n" in answer
            writer.write(b"what is sent on is not read")
        assert await sending[0][0].read() == b""
        for _, writer in sending:
            writer.close()


async def test_bytes_that_are_not_http_get_400():
    async with listening() as listener:
        reader, writer = await asyncio.open_connection(*address(listener))
        writer.write(b"\x16\x03\x01 not http\r\n\r\n")
        async with asyncio.timeout(15):
            assert b"400" in await reader.readline()
        writer.close()


async def test_an_ipv6_address_is_written_in_brackets():
    if not socket.has_ipv6:
        return
    listener = Listener(echo, host="::1", port=0, max_body_bytes=1, head_timeout_s=1)
    try:
        async with listener:
            assert listener.url.startswith("http://[::1]:")
    except ConfigError:
        assert listener.url == ""  # a machine without an IPv6 loopback


async def test_a_socket_that_listens_already_is_served_and_keeps_its_backlog():
    with listen("127.0.0.1", 0) as opened:
        port = opened.getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)  # nobody accepts yet
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nok")
        async with listening(opened=opened) as listener:
            assert listener.url == f"http://127.0.0.1:{port}"
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(2) == b"ok"
            writer.close()


def test_a_port_that_cannot_be_listened_on_is_a_clear_error():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: the port is in use"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1:0"):
        listen("203.0.113.1", 0)
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:65536: .*65535"):
        listen("127.0.0.1", 65536)


async def exchanged(listener: Listener, *pieces: bytes) -> bytes:
    """Everything that a connection answers to these pieces, sent one after the other."""
    reader, writer = await asyncio.open_connection(*address(listener))
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        for _ in range(3):
            await asyncio.sleep(0)  # so that the listener reads each piece alone
    writer.write_eof()
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    return answer


async def agents(http: web.BaseRequest) -> web.StreamResponse:
    return web.json_response(
        {"agents": http.headers.getall("User-Agent"), "body": (await http.read()).decode()}
    )


BODY = b"\r\nUser-Agent: x\r\nuser-agent: y\r\n\r\n"
LENGTH = f"Content-Length: {len(BODY)}\r\n".encode()


@pytest.mark.parametrize(
    "pieces",
    [
        (
            b"POST / HTTP/1.1\r\nHost: h\r\nUser-Agent: a\r\nuser-agent: b\r\n"
            + LENGTH
            + b"\r\n"
            + BODY,
        ),
        (
            b"POST / HTTP/1.1\r\nHost: h\r\nUser-Agent: a\r\n",
            b"X: 1\r\nUser-Agent: b\r\n" + LENGTH + b"\r\n",
            BODY,
        ),
    ],
    ids=["in one piece", "in several pieces"],
)
async def test_a_request_with_two_user_agents_is_served_under_the_first(pieces):
    async with listening(agents) as listener:
        answer = await exchanged(listener, *pieces, *pieces)
    assert answer.count(b"HTTP/1.1 200") == 2, answer
    assert answer.count(b'"agents": ["a"]') == 2
    assert answer.count(rb'"body": "\r\nUser-Agent: x\r\nuser-agent: y\r\n\r\n"') == 2


async def test_body_bytes_arriving_in_pieces_do_not_count_as_an_unfinished_head():
    """The first piece may come between the request's arrival and its handler's start."""
    seen: list[Connection] = []
    came = asyncio.Event()

    async def wait(http: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(http.protocol, Connection)
        seen.append(http.protocol)
        await came.wait()
        return web.Response(body=await http.content.read())

    size = HEAD_BYTES + 10
    async with listening(wait) as listener:
        reader, writer = await asyncio.open_connection(*address(listener))
        assert listener._runner is not None
        assert listener._runner.server is not None
        await asyncio.sleep(0.05)
        (connection,) = listener._runner.server.connections
        connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(4):
            connection.data_received(b"x" * (size // 5))
            await asyncio.sleep(0)
        connection.data_received(b"x" * (size - 4 * (size // 5)))
        assert seen == [connection]
        assert connection._deadline is None, "the head is whole"
        assert connection._unfinished == 0
        came.set()
        assert (await reader.readuntil(b"\r\n")).split()[1] == b"200"
        writer.close()
