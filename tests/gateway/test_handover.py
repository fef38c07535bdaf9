"""Accepted connections looked at, given away, and taken over from one that died."""

import asyncio
import socket
from contextlib import contextmanager

import pytest

from bridle.errors import ConfigError
from bridle.gateway.handover import Door, Giver, Taker, listen

HEAD = b"POST /v1 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"


@contextmanager
def door(head_timeout_s=5.0):
    """An open door: its address, and a queue of what is decided on."""
    listening, decided = listen("127.0.0.1", 0), asyncio.Queue()
    address = listening.getsockname()
    opened = Door(listening, lambda *told: decided.put_nowait(told), head_timeout_s=head_timeout_s)
    opened.open()
    try:
        yield address, decided
    finally:
        opened.close()


def client(address) -> socket.socket:
    connection = socket.create_connection(address)
    connection.settimeout(0)
    return connection


async def told_by(connection: socket.socket) -> bytes:
    async with asyncio.timeout(15):
        try:
            return await asyncio.get_running_loop().sock_recv(connection, 4096)
        except ConnectionError:
            return b""  # closed with what it sent unread


async def test_a_head_is_looked_at_and_stays_in_the_socket():
    with door() as (address, decided), client(address) as one:
        one.send(HEAD + b"{}")
        head, connection = await decided.get()
        with connection:
            assert head.startswith(HEAD)
            assert connection.recv(4096) == HEAD + b"{}"


async def test_a_head_in_pieces_is_waited_for():
    with door() as (address, decided), client(address) as one:
        one.send(HEAD[:10])
        await asyncio.sleep(0.02)
        assert decided.empty()
        one.send(HEAD[10:])
        head, connection = await decided.get()
        connection.close()
        assert head == HEAD


async def test_a_head_that_does_not_end_is_closed_and_silence_is_not():
    with (
        door(head_timeout_s=0.02) as (address, decided),
        client(address) as begun,
        client(address) as silent,
    ):
        begun.send(HEAD[:10])
        assert await told_by(begun) == b""
        silent.send(HEAD)
        _, connection = await decided.get()
        connection.close()


async def test_who_leaves_without_a_word_is_forgotten_and_so_is_everybody_at_the_end():
    with door() as (address, decided):
        with client(address) as gone:
            pass
        silent = client(address)
        half = client(address)
        half.send(HEAD[:10])
        await asyncio.sleep(0.02)
    with silent, half, gone:
        assert decided.empty()
        assert await told_by(silent) == b""


async def test_a_port_in_use_and_an_address_of_others_are_clear_errors():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: the port is in use"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1:0"):
        listen("203.0.113.1", 0)


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


async def test_what_is_given_is_taken_in_order_with_its_bytes():
    giver, (ours, its) = Giver(), pair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that some must wait
    taken: asyncio.Queue[socket.socket] = asyncio.Queue()
    ended = asyncio.Event()
    taker = Taker(its, taken.put_nowait, ended.set)
    giver.connect(ours)
    ends = [socket.socketpair() for _ in range(100)]
    for number, (near, far) in enumerate(ends):
        near.send(b"%d" % number)
        giver.give(far)
    for number, (near, _) in enumerate(ends):
        with near, await taken.get() as got:
            assert got.recv(16) == b"%d" % number
    giver.close()
    await ended.wait()
    taker.close()
    assert all(far.fileno() < 0 for _, far in ends), "the giver keeps nothing open"


async def test_what_a_dead_process_did_not_take_goes_to_the_next_one():
    giver = Giver()
    near, far = socket.socketpair()
    giver.give(far)  # nobody is there yet
    ours, dead = pair()
    giver.connect(ours)
    dead.close()  # it was given and never taken
    await asyncio.sleep(0)
    taken: asyncio.Queue[socket.socket] = asyncio.Queue()
    ours, its = pair()
    taker = Taker(its, taken.put_nowait, lambda: None)
    giver.connect(ours)
    with near, await taken.get() as got:
        near.send(b"hello")
        assert got.recv(16) == b"hello"
    giver.close()
    taker.close()


async def test_what_waits_when_all_ends_is_closed():
    giver = Giver()
    near, far = socket.socketpair()
    giver.give(far)
    giver.close()
    with near:
        assert near.recv(1) == b""
