"""A session's memory of its bodies changes no result, only the work."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.dialects import DIALECTS
from bridle.dialects.base import Route, RouteKind
from bridle.dialects.history import KEPT, SMALLEST, RequestHistory
from bridle.errors import RequestError
from bridle.types import Dialect

CHAT = DIALECTS[Dialect.OPENAI_CHAT]
LONG = "x" * SMALLEST


def parsed(wire, body, memo):
    """Return what a body is read as; a refusal as its text."""
    route = Route(wire.dialect, RouteKind.GENERATE, model="m", stream=False)
    try:
        return wire.parse(route, body, memo)
    except RequestError as error:
        return str(error), error.param


def chat(*texts, before="", after="", comma=","):
    messages = comma.join(json.dumps({"role": "user", "content": text}) for text in texts)
    return f'{{"model":"m"{before},"messages":[{messages}]{after}}}'.encode()


class Counting(RequestHistory):
    """Counts the spans that had to be hashed and looked up."""

    def __init__(self):
        super().__init__()
        self.looked = 0

    def get(self, key, default=None):
        self.looked += 1
        return super().get(key, default)


texts = st.lists(st.sampled_from([LONG, "a", '"messages"', "b]", "c,", "messages"]), max_size=6)
frames = st.sampled_from(["", ',"stream":true', ',"tools":[{"type":"function"}]', ',"x":"]"'])


@given(
    bodies=st.lists(
        st.builds(
            lambda t, before, after, comma: chat(*t, before=before, after=after, comma=comma),
            texts,
            frames,
            frames,
            st.sampled_from([",", " , "]),
        ),
        max_size=8,
    )
)
def test_parsing_does_not_depend_on_earlier_requests(bodies):
    memo = RequestHistory()
    for body in bodies:
        assert parsed(CHAT, body, memo) == parsed(CHAT, body, {})


ONE = '{"role":"user","content":"b"}'
PIECES = [ONE, ",", " ", "[", "]", "{", "}", '"', "\\", "]}", ',"messages":[', "5", LONG]


@given(
    before=frames,
    after=frames,
    said=st.lists(
        st.one_of(
            st.just(["", ONE]),
            st.just(["", ONE, ONE]),
            st.lists(st.sampled_from(["", *PIECES]), max_size=5),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_a_growing_body_is_parsed_the_same_with_and_without_the_memo(before, after, said):
    memo = RequestHistory()
    body = chat(LONG, before=before, after=after)
    end = f"]{after}}}".encode()
    assert parsed(CHAT, body, memo) == parsed(CHAT, body, {})
    for pieces in said:
        more = (",".join(pieces) if pieces[:1] == [""] else "".join(pieces)).encode()
        longer = body.removesuffix(end) + more + end
        read = parsed(CHAT, longer, memo)
        assert read == parsed(CHAT, longer, {})
        if not isinstance(read, tuple):
            body = longer


def test_other_fields_of_a_growing_request_are_not_read_again():
    tools = ',"tools":[{"type":"function","function":{"name":"f"}}]'
    memo = RequestHistory()
    for texts_so_far in ([LONG], [LONG, "a"], [LONG, "a", "b"]):
        result = parsed(CHAT, chat(*texts_so_far, before=tools), memo)
        assert [spec.name for spec in result.tools] == ["f"]
    grown = memo.grown(chat(LONG, "a", "b", "c", before=tools), "messages", b"chat:")
    assert grown is not None
    begun, inside = grown
    assert set(begun.fields) == {"model", "tools"}
    assert len(begun.items) == 3
    assert inside == b'{"role": "user", "content": "c"}'
    for other in (chat(LONG, "a", "b", "c"), chat(LONG, "a", "b", "c", before=tools, after=" ")):
        assert memo.grown(other, "messages", b"chat:") is None


def test_only_new_messages_of_a_growing_body_are_parsed():
    memo = Counting()
    history = [LONG]
    for turn in range(20):
        parsed(CHAT, chat(*history), memo)
        assert memo.looked == 2 * turn + 1
        history += [f"answer {turn}", f"more {turn}"]


def test_a_repeated_body_parses_no_message_again():
    memo = Counting()
    for _ in range(3):
        parsed(CHAT, chat(LONG, "a"), memo)
    assert memo.looked == 2


def test_several_conversations_at_once_are_remembered():
    memo = Counting()
    for turn in range(3):
        for name in range(KEPT):
            parsed(CHAT, chat(f"{name}{LONG}", *map(str, range(turn))), memo)
    assert memo.looked == KEPT * 3


@pytest.mark.parametrize(
    "body",
    [
        chat(LONG, "a", after=',"messages":[{"role":"user","content":"other"}]'),
        chat(LONG, "a")[:-2] + b",]}",
        chat(LONG, "a")[:-2],
        chat(LONG, "a")[:-2] + b',{"role":5}]}',
        chat(LONG, "a")[:-2] + b'x,{"role":"user"}]}',
        chat(LONG, "a")[:-2] + b' ,{"role":"user","content":"b"}]}',
    ],
)
def test_a_body_with_only_a_known_prefix_is_parsed_as_without_the_memo(body):
    memo = RequestHistory()
    parsed(CHAT, chat(LONG, "a"), memo)
    assert parsed(CHAT, body, memo) == parsed(CHAT, body, {})


def test_a_fault_in_a_new_message_names_its_place():
    memo = RequestHistory()
    parsed(CHAT, chat(LONG, "a"), memo)
    body = chat(LONG, "a")[:-2] + b',{"role":"user","content":5}]}'
    assert parsed(CHAT, body, memo)[1] == "messages[2].content"


def test_two_dialects_in_one_session_are_kept_apart():
    memo = RequestHistory()
    body = chat(LONG, "a", before=',"max_tokens":5')
    for dialect in (Dialect.OPENAI_CHAT, Dialect.ANTHROPIC, Dialect.OPENAI_CHAT):
        wire = DIALECTS[dialect]
        assert parsed(wire, body, memo) == parsed(wire, body, {})


@pytest.mark.parametrize("dialect", list(Dialect))
def test_every_dialect_s_growing_history_is_read_the_same(dialect):
    wire = DIALECTS[dialect]
    memo, fresh = Counting(), Counting()
    for turns in range(1, 5):
        body = growing(dialect, turns)
        assert parsed(wire, body, memo) == parsed(wire, body, dict(fresh))
    assert memo.looked <= 5


def growing(dialect, turns):
    texts = [LONG, *map(str, range(turns))]
    if dialect is Dialect.GOOGLE:
        contents = [{"role": "user", "parts": [{"text": text}]} for text in texts]
        return json.dumps({"contents": contents}, separators=(",", ":")).encode()
    messages = [{"role": "user", "content": text} for text in texts]
    field = "input" if dialect is Dialect.OPENAI_RESPONSES else "messages"
    body = {"model": "m", "max_tokens": 5, field: messages}
    return json.dumps(body, separators=(",", ":")).encode()


@pytest.mark.parametrize("dialect", [d for d in Dialect if d in DIALECTS])
def test_head_fields_are_parsed_once_per_session(dialect):
    wire, memo = DIALECTS[dialect], RequestHistory()
    message = {"role": "user", "content": "a", "parts": [{"text": "a"}]}
    hot, cold = (
        {"model": "m", "max_tokens": 9, "temperature": t, "generationConfig": {"temperature": t}}
        for t in (1.0, 0.5)
    )

    def read(head, count):
        body = json.dumps({**head, wire.messages_field: [message] * count}).encode()
        fresh = parsed(wire, body, {})
        made = parsed(wire, body, memo)
        assert made == fresh
        return made.sampling

    first = read(hot, 1)
    assert read(cold, 2).temperature == 0.5
    assert read(hot, 3) is first
    for seed in range(KEPT):
        read({**hot, "user": f"{seed}"}, 1)
    assert read(hot, 1) is not first


ITEMS = [
    {"role": "user", "content": "u"},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "id": "msg_1", "content": "said"},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "seen"},
    {"type": "additional_tools", "tools": [{"type": "function", "name": "look"}]},
]


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from(range(len(ITEMS))), min_size=1), st.integers(1, 9)),
        min_size=1,
        max_size=4,
    )
)
def test_joining_items_does_not_depend_on_earlier_requests(conversations):
    wire, memo = DIALECTS[Dialect.OPENAI_RESPONSES], RequestHistory()
    for places, step in conversations:
        for count in range(1, len(places) + 1, step):
            items = [ITEMS[place] for place in places[:count]]
            body = json.dumps({"model": "m", "input": items}).encode()
            assert parsed(wire, body, memo) == parsed(wire, body, {})


def test_news_counts_only_the_bytes_after_the_longest_known_prefix():
    memo, other = RequestHistory(), RequestHistory()
    first = chat(LONG)
    assert memo.news(first) == len(first)
    parsed(CHAT, first, memo)

    assert memo.news(chat(LONG, "more")) < 100
    assert other.news(first) == len(first)
    other.adopt(memo)
    assert other.news(first) == memo.news(first) < 100


def test_newest_forgets_a_body_when_another_with_the_same_messages_arrives():
    memo = RequestHistory()
    first = parsed(CHAT, chat(LONG, after=',"max_tokens":1'), memo)
    newest = memo.newest(first.span_digests)
    assert newest is not None
    assert newest.tail == b'],"max_tokens":1}'
    second = parsed(CHAT, chat(LONG, after=',"max_tokens":2'), memo)
    assert memo.newest(first.span_digests) is None
    newest = memo.newest(second.span_digests)
    assert newest is not None
    assert newest.tail == b'],"max_tokens":2}'
