import json

from tests.dialects.exchange import HEAD, NOTHING, TEXT, USAGE, events

from bridle.dialects.openai_responses_write import Dress, ResponsesStream
from bridle.errors import RequestError
from bridle.types import FinishReason, Reply


def told(stream):
    return [json.loads(event.data) for event in events(stream)]


def kinds(stream):
    return [event["type"].removeprefix("response.") for event in told(stream)]


def test_every_event_is_numbered_and_named():
    encoder = ResponsesStream(HEAD, Dress())
    stream = encoder.open() + encoder.keepalive() + b"".join(encoder.close(TEXT, USAGE))
    assert [event["sequence_number"] for event in told(stream)] == list(range(len(told(stream))))
    assert [event.event for event in events(stream)] == [event["type"] for event in told(stream)]
    assert kinds(stream)[:3] == ["created", "in_progress", "in_progress"]
    assert kinds(stream)[-1] == "completed"


def test_reasoning_without_a_summary_is_an_item_without_text():
    encoder = ResponsesStream(HEAD, Dress(encrypted=True))
    stream = encoder.reasoning("secret") + encoder.reasoning("s") + encoder.text("x")
    assert kinds(stream)[:2] == ["output_item.added", "output_item.done"]
    assert b"secret" not in stream
    assert told(stream)[1]["item"]["encrypted_content"]


def test_an_own_item_type_has_no_deltas():
    dress = Dress(wire={"shell": {"type": "shell"}})
    encoder = ResponsesStream(HEAD, dress)
    stream = encoder.tool_call(0, "call_1", "shell", '{"commands":["ls"]}')
    assert kinds(stream) == ["output_item.added", "output_item.done"]
    assert told(stream)[1]["item"]["type"] == "shell_call"


def test_a_freeform_call_streams_its_input():
    encoder = ResponsesStream(HEAD, Dress(freeform=frozenset({"patch"})))
    stream = encoder.tool_call(0, "call_1", "patch", '{"input":"x"}')
    assert kinds(stream)[1:3] == ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    assert told(stream)[2]["input"] == "x"


def test_a_compaction_streams_nothing_but_its_item():
    encoder = ResponsesStream(HEAD, Dress(compacts=True))
    assert encoder.reasoning("a") + encoder.text("b") + encoder.tool_call(0, "c", "f", "{}") == b""
    before, last = encoder.close(Reply("b", "a", (), FinishReason.STOP), USAGE)
    assert kinds(before) == ["output_item.added", "output_item.done"]
    assert [item["type"] for item in told(last)[0]["response"]["output"]] == ["compaction"]


def test_an_empty_reply_has_an_empty_message():
    _, last = ResponsesStream(HEAD, Dress()).close(NOTHING, USAGE)
    [item] = told(last)[0]["response"]["output"]
    assert item["content"][0]["text"] == ""


def test_a_late_failure_has_a_code_and_the_items_so_far():
    encoder = ResponsesStream(HEAD, Dress())
    encoder.tool_call(0, "call_1", "f", "{}")
    [event] = told(encoder.error(RequestError("busy", code="overloaded")))
    assert event["type"] == "response.failed"
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["code"] == "server_error"
    assert len(event["response"]["output"]) == 1
    [bare] = told(encoder.error(RequestError("bad")))
    assert bare["response"]["error"]["code"] == "invalid_request_error"
