import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dialects.exchange import HEAD, events, live
from tests.dialects.sse import SseEvent, SseParser

from bridle.dialects.anthropic_write import MessagesStream
from bridle.dialects.base import DONE, event_bytes
from bridle.dialects.google_write import ContentStream
from bridle.dialects.openai_chat_write import ChatStream
from bridle.dialects.openai_responses_write import Dress, ResponsesStream
from bridle.types import FinishReason, Reply, ToolCall

STREAM = (
    '\ufeffevent: a\ndata: {"x":"é"}\n\n'
    ": a comment\r\n"
    "data:one\r\ndata: two\r\ndata\r\n\r\n"
    "id: 7\rdata:  spaced\r\r"
    "retry: 10\nnonsense\nid: no\0pe\n\n"
    "event: named without data\n\n"
    "data: [DONE]\n\n"
    "data: never ended"
).encode()
EVENTS = [
    SseEvent('{"x":"é"}', "a"),
    SseEvent("one\ntwo\n"),
    SseEvent(" spaced", id="7"),
    SseEvent("[DONE]", id="7"),
]


def test_the_test_sse_parser_follows_the_specification():
    assert SseParser().feed(STREAM) == EVENTS


@given(cuts=st.lists(st.integers(0, len(STREAM))))
def test_a_stream_cut_at_any_bytes_gives_the_same_events(cuts):
    parser = SseParser()
    edges = [0, *sorted(cuts), len(STREAM)]
    chunks = [STREAM[start:end] for start, end in itertools.pairwise(edges)]
    assert [event for chunk in chunks for event in parser.feed(chunk)] == EVENTS


@given(stream=st.binary(max_size=80), cut=st.integers(0, 80))
def test_any_bytes_parse_the_same_in_one_or_two_chunks(stream, cut):
    parser = SseParser()
    result = parser.feed(stream[:cut]) + parser.feed(stream[cut:])
    assert result == SseParser().feed(stream)


def test_written_events_are_read_back():
    stream = event_bytes(b'{"a":1}') + event_bytes(b"{}", "ping") + DONE
    result = SseParser().feed(stream)
    assert result == [SseEvent('{"a":1}'), SseEvent("{}", "ping"), SseEvent("[DONE]")]


words = st.text(st.sampled_from('a"\\{}\u2028\u2029\u0085\x0b\x1c\r\n\u00e2\u0080é'), min_size=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda head: ChatStream(head, include_usage=True),
        lambda head: ResponsesStream(head, Dress()),
        lambda head: MessagesStream(head, thinking="text"),
        lambda head: ContentStream(head, thoughts=True, sse=True),
    ],
    ids=["chat", "responses", "anthropic", "google"],
)
@given(text=words, thought=words, argument=words, model=words)
def test_every_dialect_reads_the_same_when_split_at_every_break_of_unicode(
    make, text, thought, argument, model
):
    call = ToolCall("call_1", "f", json.dumps({"x": argument}, ensure_ascii=False))
    reply = Reply(text, thought, (call,), FinishReason.STOP)
    stream = live(make(replace(HEAD, model=model)), reply)
    lines = [line for line in stream.decode().splitlines() if line.startswith("data: ")]
    assert [line.removeprefix("data: ") for line in lines] == [one.data for one in events(stream)]
    for line in lines:
        assert line == "data: [DONE]" or json.loads(line.removeprefix("data: "))
