"""The door passes bytes on as they are, and breaks a reply where a test wants it."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from tests.real_clients.door import Cut, Door, cut_position

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
MESSAGES = (
    b'event: message_start\ndata: {}\n\nevent: content_block_delta\ndata: {"text":"a"}\n\n',
    b"event: content_block_stop\ndata: {}\n\n",
    b"event: message_stop\ndata: {}\n\n",
)
CHAT = (
    b'data: {"delta":{"content":"a"},"finish_reason":null}\n\n',
    b'data: {"delta":{"tool_calls":[{}]}}\n\n',
    b"data: [DONE]\n\n",
)
RESPONSES = (
    b"event: response.created\ndata: {}\n\n",
    b"event: response.output_item.done\ndata: {}\n\n",
    b"event: response.completed\ndata: {}\n\n",
)
GOOGLE = (
    b'data: {"content":{',
    b'"parts":[{"text":"a"}]}}\r\n\r\n',
    b'data: {"finishReason":"STOP"}\r\n\r\n',
)
REPLIES = {
    "messages": MESSAGES,
    "chat/completions": CHAT,
    "responses": RESPONSES,
    "enerateContent": GOOGLE,
}


@pytest.mark.parametrize("path", REPLIES)
def test_the_fault_proxy_cuts_a_stream_before_or_after_its_first_complete_block(path):
    begun, complete, rest = REPLIES[path]
    whole = SSE + begun + complete + rest
    assert whole[: cut_position(whole, path, "before")] == SSE + begun
    assert whole[: cut_position(whole, path, "after")] == SSE + begun + complete
    for early in (SSE[:20], SSE, SSE + begun):
        assert cut_position(early, path, "before") is None


def test_the_fault_proxy_cuts_a_reply_without_streaming_in_half():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"
    assert cut_position(head + b"abc", "messages", "before") is None
    assert cut_position(head + b"abcd", "messages", "before") == len(head) + 2


@asynccontextmanager
async def behind(door, *replies):
    """A server behind `door` that gives `replies` to requests, one after another."""
    left = list(replies)

    async def answer(reader, writer):
        while await reader.read(1 << 16):
            writer.write(left.pop(0))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, door:
        door.upstream = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection(*door.url.removeprefix("http://").split(":"))
        yield reader, writer
        writer.close()


async def test_the_fault_proxy_cuts_only_the_reply_to_the_matching_request_and_only_once():
    door = Door(Cut(b"here", "after"))
    begun, complete, rest = MESSAGES
    whole = SSE + begun + complete + rest
    async with behind(door, whole, whole) as (reader, writer):
        for body in (b"nothing", b"it is here"):
            writer.write(b"POST /s/x/v1/messages?beta=true HTTP/1.1\r\n\r\n" + body)
            expected = whole if body == b"nothing" else SSE + begun + complete
            assert await reader.readexactly(len(expected)) == expected
        assert await reader.read() == b""
    assert door.made == [Cut(b"here", "after")]


async def test_the_fault_proxy_records_a_client_s_wait_after_a_429():
    door = Door()
    busy = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"
    request = b"POST /v1/chat/completions HTTP/1.1\r\n\r\n{}"
    async with behind(door, busy, busy) as (reader, writer):
        for _ in range(2):
            writer.write(request)
            await reader.readexactly(len(busy))
    assert len(door.waits) == 1
    assert door.made == []
