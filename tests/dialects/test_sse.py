import itertools

from hypothesis import given
from hypothesis import strategies as st

from bridle.dialects.sse import DONE, SseEvent, SseParser, event_bytes

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


def test_the_specification_is_followed():
    assert SseParser().feed(STREAM) == EVENTS


@given(cuts=st.lists(st.integers(0, len(STREAM))))
def test_a_stream_cut_at_any_bytes_gives_the_same_events(cuts):
    parser = SseParser()
    edges = [0, *sorted(cuts), len(STREAM)]
    chunks = [STREAM[start:end] for start, end in itertools.pairwise(edges)]
    assert [event for chunk in chunks for event in parser.feed(chunk)] == EVENTS


@given(stream=st.binary(max_size=80), cut=st.integers(0, 80))
def test_any_bytes_are_events_or_none(stream, cut):
    parser = SseParser()
    told = parser.feed(stream[:cut]) + parser.feed(stream[cut:])
    assert told == SseParser().feed(stream)


def test_written_events_are_read_back():
    stream = event_bytes(b'{"a":1}') + event_bytes(b"{}", "ping") + DONE
    told = SseParser().feed(stream)
    assert told == [SseEvent('{"a":1}'), SseEvent("{}", "ping"), SseEvent("[DONE]")]
