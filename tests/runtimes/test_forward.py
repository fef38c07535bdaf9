"""Carrying connections to one address."""

import asyncio
import os
import resource
import socket
import struct
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest

from bridle.runtimes.place import MAX_CONNECTIONS, Forwarder


def listening():
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0)
    return listener, listener.getsockname()[1]


@asynccontextmanager
async def a_forwarder(serve):
    """A forwarder in front of a server; gives it and the port that it listens on."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    listener, port = listening()
    async with server, Forwarder(listener) as forwarder:
        forwarder.target = ("127.0.0.1", server.sockets[0].getsockname()[1])
        yield forwarder, port


async def echo(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_bytes_go_both_ways_and_ends_are_told():
    async with a_forwarder(echo) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = bytes(range(256)) * 4000
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent
        writer.close()


@pytest.mark.parametrize("busy", ["reading", "writing"])
async def test_a_client_that_vanishes_is_seen_on_the_other_side(busy):
    arrived = asyncio.get_running_loop().create_future()

    async def serve(reader, writer):
        got = await reader.readexactly(1)
        with suppress(ConnectionError):
            if busy == "writing":
                while True:
                    writer.write(b"y" * 65536)
                    await writer.drain()
            got += await reader.read()
        writer.close()
        arrived.set_result(got)

    async with a_forwarder(serve) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x")
        if busy == "writing":
            await reader.readexactly(1)
        # It ends without a word: what it had not read is answered with a reset.
        client = writer.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        async with asyncio.timeout(15):
            assert await arrived == b"x"


async def test_many_connections_at_once_are_kept_apart():
    async with a_forwarder(echo) as (_, port):

        async def one(number):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{number}\n".encode())
            answer = await reader.readline()
            writer.close()
            return int(answer)

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(number)) for number in range(100)]
    assert [task.result() for task in running] == list(range(100))


@pytest.mark.parametrize("target", [None, "closed"])
async def test_where_nobody_answers_the_connection_ends(target):
    async with a_forwarder(echo) as (forwarder, port):
        closed, number = listening()
        closed.close()
        forwarder.target = None if target is None else ("127.0.0.1", number)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(15):
            assert await reader.read() == b""
        writer.close()


async def test_after_its_end_nobody_listens():
    async with a_forwarder(echo) as (_, port):
        pass
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_machine_without_a_free_descriptor_ends_no_forwarder():
    async with a_forwarder(echo) as (_, port):
        client = socket.create_connection(("127.0.0.1", port))
        with every_descriptor_taken():
            for _ in range(20):  # it tries to accept meanwhile
                await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection(sock=client)
        writer.write(b"x")
        async with asyncio.timeout(15):
            assert await reader.readexactly(1) == b"x"
        writer.close()


@contextmanager
def every_descriptor_taken():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.open(os.devnull, os.O_RDONLY)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, hard))  # it was the lowest free one
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(taken)


async def test_a_client_that_stays_when_the_gateway_has_closed_holds_no_descriptor():
    async def close(reader, writer):
        await reader.readexactly(1)
        writer.close()

    async with a_forwarder(close) as (forwarder, port):
        forwarder.linger_s = 0.01
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x")
        async with asyncio.timeout(15):
            assert await reader.read() == b""
            # One place is for the next connection.
            while forwarder._room._value < MAX_CONNECTIONS - 1:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.005)
        writer.close()
