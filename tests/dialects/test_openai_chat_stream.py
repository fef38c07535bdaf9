import json

from tests.dialects.exchange import CALLS, HEAD, TEXT, USAGE, events, live

from bridle.dialects.openai_chat_write import ChatStream
from bridle.errors import RequestError


def chunks(stream):
    told = [event.data for event in events(stream)]
    assert told.pop() == "[DONE]"
    return [json.loads(data) for data in told]


def test_the_role_comes_first_and_the_finish_reason_last():
    told = chunks(live(ChatStream(HEAD, include_usage=False), CALLS))
    assert told[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in told]
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}
    assert all("usage" not in chunk for chunk in told)
    indexes = [
        c["index"] for chunk in told for c in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert indexes == [0, 1]


def test_usage_is_a_chunk_of_its_own_where_it_was_asked_for():
    told = chunks(live(ChatStream(HEAD, include_usage=True), TEXT))
    assert told[-1]["choices"] == []
    assert told[-1]["usage"]["total_tokens"] == 18
    assert all(chunk["usage"] is None for chunk in told[:-1])


def test_what_ends_a_reply_is_one_last_event():
    encoder = ChatStream(HEAD, include_usage=True)
    before, last = encoder.close(TEXT, USAGE)
    assert [chunk["choices"] == [] for chunk in chunks(last)] == [False, True]
    assert b'finish_reason":"' not in before


def test_a_keepalive_is_a_chunk_without_meaning():
    [event] = events(ChatStream(HEAD, include_usage=False).keepalive())
    assert json.loads(event.data)["choices"][0]["delta"] == {}


def test_a_freeform_call_is_streamed_as_one():
    encoder = ChatStream(HEAD, include_usage=False, freeform={"patch"})
    [event] = events(encoder.tool_call(0, "call_1", "patch", '{"input":"x"}'))
    [call] = json.loads(event.data)["choices"][0]["delta"]["tool_calls"]
    assert call["custom"] == {"name": "patch", "input": "x"}


def test_a_late_failure_is_a_cut():
    assert ChatStream(HEAD, include_usage=False).error(RequestError("gone")) is None
