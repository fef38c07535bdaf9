import asyncio
import itertools
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from bridle.engines import connection
from bridle.engines.connection import MOST_BYTES, Connections, CutReplyError, HttpCall, HttpReply

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n3;x=1\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
)
TO_THE_END = b"HTTP/1.1 200\r\n\r\nhello"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH


@given(
    wire=st.sampled_from([LENGTH, CHUNKED, TO_THE_END, INTERIM]),
    cuts=st.lists(st.integers(0, 90), max_size=8),
)
def test_a_reply_is_the_same_wherever_its_bytes_are_split(wire, cuts):
    reply = HttpReply()
    places = sorted({min(cut, len(wire)) for cut in cuts} | {0, len(wire)})
    pieces = [wire[a:b] for a, b in itertools.pairwise(places)]
    whole = [reply.feed(piece) for piece in pieces]
    assert not any(whole[:-1])
    assert whole[-1] or reply.ended()
    assert (reply.status, reply.body) == (200, b"hello")


@given(
    before=st.sampled_from([LENGTH, CHUNKED, LENGTH.replace(b"OK", b"Fine")]),
    size=st.integers(0, 12),
    cuts=st.lists(st.integers(0, 60), max_size=3),
    wire=st.sampled_from(
        [LENGTH, CHUNKED, INTERIM, LENGTH.replace(b" 5", b"5  "), LENGTH.replace(b"200", b"503")]
    ),
)
def test_parsing_a_reply_after_another_reply_equals_parsing_it_alone(before, wire, size, cuts):
    earlier = HttpReply()
    earlier.feed(before)
    body = b"hello" if wire is CHUNKED else b"h" * size
    wire = wire.replace(b"hello", body).replace(b"h: 5", b"h: %d" % size)
    wire = wire.replace(b"h:5", b"h:%d" % size)
    alone, after = HttpReply(), HttpReply(earlier.head)
    places = sorted({min(cut, len(wire)) for cut in cuts} | {0, len(wire)})
    for piece in [wire[a:b] for a, b in itertools.pairwise(places)]:
        assert after.feed(piece) is alone.feed(piece)
    for reply in (alone, after):
        assert (reply.body, reply.is_whole) == (body, False)
    answer = ("status", "keeps", "content_type", "retry_after")
    assert [getattr(after, name) for name in answer] == [getattr(alone, name) for name in answer]


@given(
    chunks=st.lists(
        st.one_of(
            st.sampled_from([b"data: 1\n\n", b"a\r\nb", b"3\r\nabc\r\n", b"\r\n", b"x" * 5000]),
            st.binary(min_size=1, max_size=9),
        ),
        max_size=9,
    ),
    cuts=st.lists(st.integers(0, 9000), max_size=8),
)
def test_chunks_are_the_same_wherever_they_are_split(chunks, cuts):
    framed = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in chunks)
    wire = CHUNKED.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + framed + b"0\r\n\r\n"
    reply, taken = HttpReply(), b""
    places = sorted({min(cut, len(wire)) for cut in cuts} | {0, len(wire)})
    for piece in [wire[a:b] for a, b in itertools.pairwise(places)]:
        assert not reply.is_whole
        whole = reply.feed(piece)
        taken += reply.take() if reply.status else b""
    assert whole
    assert taken == b"".join(chunks)


@pytest.mark.parametrize("wire", [LENGTH[:-1], CHUNKED[:-3], CHUNKED[:50], LENGTH[:10]])
def test_a_reply_whose_end_is_missing_is_never_whole(wire):
    reply = HttpReply()
    assert not reply.feed(wire)
    assert not reply.ended()


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 200\r\nContent-Length: -4\r\n\r\n",
        b"HTTP/1.1 200\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"HTTP/1.1 200\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n\r\n",
        b"HTTP/1.1 200\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 70_000,
        b"HTTP/1.1 200\r\nX: " + b"x" * (1 << 17),
    ],
)
def test_bytes_that_are_no_http_reply_are_a_connection_error(wire):
    with pytest.raises(ConnectionError, match=r"not valid HTTP/1\.1"):
        HttpReply().feed(wire)


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 200\r\nContent-Length: %d\r\n\r\n" % (MOST_BYTES + 1),
        b"HTTP/1.1 200\r\nContent-Length: %d\r\n\r\n" % 10**30,
    ],
)
def test_a_reply_announced_beyond_512_mib_is_refused_before_it_is_read(wire):
    with pytest.raises(ConnectionError, match="larger than 512 MiB"):
        HttpReply().feed(wire)


def test_a_chunk_whose_pieces_look_like_chunk_ends_is_read_whole():
    """Each byte is held once, and looked at as often however many pieces it came in."""
    piece = b"x" * 1020 + b"\r\n\r\n"
    reply = HttpReply()
    reply.feed(b"HTTP/1.1 200\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (4096 * 1024))
    for _ in range(4096):
        assert not reply.feed(piece)
    assert reply.feed(b"\r\n0\r\n\r\n")
    assert reply.body == piece * 4096


@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        (b"HTTP/1.1 204 No Content\r\n", True),
        (b"HTTP/1.1 204 No Content\r\nConnection: close\r\n", False),
        (b"HTTP/1.0 204 No Content\r\n", False),
        (b"HTTP/1.0 204 No Content\r\nConnection: Keep-Alive\r\n", True),
    ],
)
def test_a_reply_says_whether_its_connection_is_kept_alive(head, keeps):
    reply = HttpReply()
    assert reply.feed(head + b"\r\n")
    assert reply.keeps is keeps
    assert reply.body == b""


class Seen(list):
    """Bytes that arrived on each connection."""

    closed = 0
    """Connections that have ended."""
    answered = 0
    """Requests whose reply was sent."""


@asynccontextmanager
async def serving(*replies, silent_s=15.0, keepalive_s=15.0):
    """A server whose each connection gives the next of `replies` per request; counts connections.

    `None` closes, a number is a silence in seconds, or until the client has gone.
    """
    seen = Seen()
    left = list(replies)

    async def serve(reader, writer):
        seen.append(b"")
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                seen[-1] += head + await reader.readexactly(length)
                for part in left.pop(0):
                    if part is None:
                        return
                    if isinstance(part, bytes):
                        writer.write(part)
                    else:
                        with suppress(TimeoutError):
                            async with asyncio.timeout(part):
                                await reader.read(1)
                                return
                seen.answered += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            seen.closed += 1

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = URL(f"http://127.0.0.1:{port}/base/")
    made = Connections(url, {"A": "b"}, silent_s=silent_s, keepalive_s=keepalive_s)
    try:
        yield made, seen
    finally:
        await made.aclose()
        await made.aclose()
        server.close()
        await server.wait_closed()


async def until(condition):
    """Wait until it holds, and for what the server has sent to arrive."""
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)


async def test_calls_in_a_row_share_a_connection():
    async with serving([LENGTH], [CHUNKED], [LENGTH]) as (made, seen):
        for _ in range(3):
            reply = await made.post("/x?y=1", b"body", HttpCall())
            assert reply.body == b"hello"
    assert len(seen) == 1
    assert seen[0].startswith(b"POST /base/x?y=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nA: b\r\nContent-Length: 4\r\n\r\nbody" in seen[0]


async def test_calls_at_once_have_a_connection_each():
    async with serving(*[[0.01, LENGTH]] * 4) as (made, seen):
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(made.post("/", b"", HttpCall()))
        await made.post("/", b"", HttpCall())
    assert len(seen) == 3


async def test_a_connection_that_was_idle_for_long_is_not_used_again():
    async with serving(*[[LENGTH]] * 4, keepalive_s=0.4) as (made, seen):
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(made.post("/", b"", HttpCall()))
        await asyncio.sleep(0.45)
        await made.post("/", b"", HttpCall())
        await until(lambda: seen.closed == 2)
    assert len(seen) == 3


async def test_a_reply_that_ends_with_its_connection_is_whole_and_the_next_call_connects_anew():
    async with serving([TO_THE_END, None], [LENGTH]) as (made, seen):
        assert (await made.post("/", b"", HttpCall())).body == b"hello"
        assert (await made.post("/", b"", HttpCall())).body == b"hello"
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        ([None], ConnectionError, "disconnected"),
        ([LENGTH[:-1], None], CutReplyError, "disconnected"),
        ([b"nonsense", 0.05], ConnectionError, "not valid HTTP/1.1"),
        ([30], TimeoutError, None),
        ([0.05, LENGTH[:-1], 30], TimeoutError, None),
    ],
)
async def test_a_disconnected_malformed_or_silent_reply_raises_its_own_error(reply, kind, says):
    async with serving(reply, silent_s=0.1 if kind is TimeoutError else 15) as (made, _):
        with pytest.raises(kind, match=says):
            await made.post("/", b"", HttpCall())


async def test_a_slow_reply_does_not_time_out_while_bytes_keep_arriving():
    parts = [LENGTH[:9], 0.6, LENGTH[9:20], 0.6, LENGTH[20:]]
    async with serving(parts, silent_s=1) as (made, _):
        assert (await made.post("/", b"", HttpCall())).status == 200


async def test_unsolicited_bytes_close_an_idle_connection():
    async with serving([LENGTH, 0.01, b"more"], [LENGTH]) as (made, seen):
        await made.post("/", b"", HttpCall())
        await until(lambda: seen.closed)
        await made.post("/", b"", HttpCall())
    assert len(seen) == 2


async def test_closing_ends_calls_under_way():
    async def reply():
        with pytest.raises(ConnectionError):
            await made.post("/", b"", HttpCall())

    async with serving([30]) as (made, seen), asyncio.TaskGroup() as group:
        group.create_task(reply())
        await until(lambda: any(seen))
        await made.aclose()


async def test_a_call_without_an_idle_connection_is_sent_on_a_new_one():
    async with serving([LENGTH], [LENGTH], [0.01, LENGTH]) as (made, seen):
        call = made.begin("/x", b"body")
        assert (await made.post("/x", b"", call)).body == b"hello"
        for _ in range(2):
            await made.post("/x", b"", made.begin("/x", b""))
    assert len(seen) == 1
    assert b"\r\n\r\nbody" in seen[0]


async def test_a_call_begun_before_its_connection_fails_if_the_connect_fails(unused_tcp_port):
    made = Connections(URL(f"http://127.0.0.1:{unused_tcp_port}"), {}, silent_s=9)
    with pytest.raises(OSError, match="Connect call failed"):
        await made.post("/", b"", made.begin("/", b""))
    await made.aclose()


@pytest.mark.parametrize("dropped", [True, False])
async def test_a_call_dropped_before_its_connection_is_made_sends_nothing(dropped):
    async with serving([LENGTH], [LENGTH]) as (made, seen):
        call = made.begin("/", b"body")
        if dropped:
            made.drop(call)
            assert (await made.post("/", b"other", HttpCall())).body == b"hello"
        await made.aclose()
        with pytest.raises((ConnectionError, asyncio.CancelledError)):
            call.waiting.result()
    assert b"body" not in b"".join(seen)


@pytest.mark.parametrize("ends", [True, False])
async def test_a_stream_left_before_its_end_chunk_keeps_its_connection_only_if_marked_as_ended(
    ends,
):
    head, body = CHUNKED.split(b"\r\n\r\n", 1)
    parts = [head + b"\r\n\r\n" + body[:-5], 0.02, body[-5:]]
    async with serving(parts, [LENGTH]) as (made, seen):
        async with made.stream("/", b"", HttpCall()) as (reply, more):
            assert await more() == b"hello"
            assert not reply.is_whole
            reply.ends = ends
        await until(lambda: not ends or seen.answered)
        assert (await made.post("/", b"", HttpCall())).body == b"hello"
    assert len(seen) == 2 - ends


async def test_a_connection_whose_end_chunk_never_comes_is_closed_after_a_timeout(monkeypatch):
    monkeypatch.setattr(connection, "END_S", 0.02)
    head, body = CHUNKED.split(b"\r\n\r\n", 1)
    async with serving([head + b"\r\n\r\n" + body[:-5], 30]) as (made, seen):
        async with made.stream("/", b"", HttpCall()) as (reply, more):
            await more()
            reply.ends = True
        await until(lambda: seen.closed)


async def parts_of(made, *, most=99):
    """The parts of a streamed reply, at most so many."""
    found = []
    async with made.stream("/", b"", HttpCall()) as (reply, more):
        assert reply.status == 200
        while len(found) < most and (part := await more()):
            found.append(part)
    return found


async def test_streamed_replies_yield_all_parts_and_reuse_their_connection():
    head, body = CHUNKED.split(b"\r\n\r\n", 1)
    cut = [head + b"\r\n\r\n", 0.05, body[:7], 0.05, body[7:]]
    async with serving(cut, [LENGTH], [TO_THE_END, None]) as (made, seen):
        for _ in range(3):
            assert b"".join(await parts_of(made)) == b"hello"
    assert len(seen) == 1


@asynccontextmanager
async def three_streams():
    """Connections, three streams and the server's writer of each; the first stream has begun."""
    writers, head = [], CHUNKED.split(b"\r\n\r\n", 1)[0] + b"\r\n\r\n"

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        writers.append(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    made = Connections(URL(f"http://127.0.0.1:{port}/"), {}, silent_s=15.0)
    try:
        async with AsyncExitStack() as stack:
            reads = []
            for count in range(1, 4):
                _, more = await stack.enter_async_context(made.stream("/", b"", HttpCall()))
                reads.append(more)
                await until(lambda count=count: len(writers) == count)
            writers[0].write(chunk(b"a"))
            assert await reads[0]() == b"a", "a first part is read at once"
            yield reads, writers
    finally:
        await made.aclose()
        server.close()
        for writer in writers:
            writer.close()
        await server.wait_closed()


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


async def test_later_parts_of_a_stream_are_gathered_while_many_wait_for_their_first(monkeypatch):
    monkeypatch.setattr(connection, "MANY", 2)
    monkeypatch.setattr(connection, "GATHER_S", 3600.0)
    async with three_streams() as (reads, writers), asyncio.TaskGroup() as group:
        reading = group.create_task(reads[0]())
        for data in (b"b", b"c"):
            writers[0].write(chunk(data))
            await asyncio.sleep(0.05)
        assert not reading.done(), "two streams wait for their first part"
        writers[1].write(chunk(b"x"))
        assert await reads[1]() == b"x"
        writers[0].write(chunk(b"d"))
        assert await reading == b"bcd", "one stream waits"


async def test_gathered_parts_are_read_after_a_time_and_a_whole_reply_at_once(monkeypatch):
    monkeypatch.setattr(connection, "MANY", 2)
    monkeypatch.setattr(connection, "GATHER_S", 0.01)
    async with three_streams() as (reads, writers):
        writers[0].write(chunk(b"b"))
        assert await reads[0]() == b"b"
        monkeypatch.setattr(connection, "GATHER_S", 3600.0)
        writers[0].write(chunk(b"c") + chunk(b""))
        assert await reads[0]() == b"c"
        assert await reads[0]() == b"", "its end"


async def test_a_stream_that_ends_before_its_first_part_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(connection, "MANY", 1)
    monkeypatch.setattr(connection, "GATHER_S", 3600.0)
    async with three_streams() as (reads, writers):
        writers[1].write(chunk(b""))
        assert await reads[1]() == b""
        writers[2].close()
        with pytest.raises(CutReplyError):
            await reads[2]()
        writers[0].write(chunk(b"b"))
        assert await reads[0]() == b"b"


async def test_a_stream_that_is_left_early_drops_its_connection():
    head, body = CHUNKED.split(b"\r\n\r\n", 1)
    first, rest = body.split(b"\r\n", 2)[:2], body
    begun = head + b"\r\n\r\n" + b"\r\n".join(first) + b"\r\n"
    async with serving([begun, 30, rest], [LENGTH]) as (made, seen):
        assert len(await parts_of(made, most=1)) == 1
        assert await parts_of(made) == [b"hello"]
    assert len(seen) == 2


async def test_a_stream_that_breaks_between_two_reads_raises_at_the_next_read():
    head, _ = CHUNKED.split(b"\r\n\r\n", 1)
    begun = head + b"\r\n\r\n2\r\nhe\r\n"
    async with (
        serving([begun, 0.01, None]) as (made, seen),
        made.stream("/", b"", HttpCall()) as (_, more),
    ):
        assert await more() == b"he"
        await until(lambda: seen.closed)
        with pytest.raises(CutReplyError):
            await more()
