import json

import pytest
from tests.dialects.exchange import CALLS, HEAD, NOTHING, TEXT, THOUGHT, USAGE, events

from bridle.dialects.openai_responses_write import (
    Dress,
    ResponsesStream,
    call_item,
    deleted_json,
    items_page,
    output_items,
    response_json,
    status_of,
    usage_json,
)
from bridle.errors import RequestError
from bridle.types import FinishReason, Reply, ToolCall, Usage


def test_output_items_are_numbered_by_position():
    items = output_items(HEAD, Dress(), CALLS)
    assert [item["type"] for item in items] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert [item["id"][-3:] for item in items] == ["000", "001", "002", "003"]
    assert [item["type"] for item in output_items(HEAD, Dress(), NOTHING)] == ["message"]
    only = Reply("", "why", (), FinishReason.STOP)
    assert [item["type"] for item in output_items(HEAD, Dress(), only)] == ["reasoning"]


def test_reasoning_summary_and_encrypted_content_follow_the_request():
    plain = output_items(HEAD, Dress(), THOUGHT)[0]
    assert (plain["summary"], "encrypted_content" in plain) == ([], False)
    shown = output_items(HEAD, Dress(summary=True, encrypted=True), THOUGHT)[0]
    assert shown["summary"][0]["text"] == THOUGHT.reasoning
    assert shown["encrypted_content"]


def test_calls_are_written_in_the_item_type_of_their_tool():
    dress = Dress(
        freeform=frozenset({"ns__p"}),
        wire={
            "ns__p": {"namespace": "ns", "name": "p"},
            "ns__f": {"namespace": "ns", "name": "f"},
            "shell": {"type": "shell"},
        },
    )

    def item(name, arguments, **fields):
        return call_item(HEAD, dress, 1, ToolCall("call_1", name, arguments, **fields))

    custom = item("ns__p", '{"input": "x"}')
    assert (custom["type"], custom["name"], custom["namespace"]) == ("custom_tool_call", "p", "ns")
    assert custom["input"] == "x"
    assert item("q", "raw", custom=True)["input"] == "raw"
    function = item("ns__f", "{}")
    assert (function["name"], function["namespace"]) == ("f", "ns")
    assert item("shell", '{"commands":[]}')["type"] == "shell_call"
    assert item("shell", "{}")["type"] == "function_call"
    nameless = call_item(HEAD, dress, 1, ToolCall(None, "g", "{}"))
    assert nameless["call_id"] == f"call_{HEAD.reply_id}001"


def test_a_response_in_progress_has_no_output_and_no_usage():
    begun = response_json(HEAD, Dress(echo={"store": False}))
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert begun["store"] is False
    ended = response_json(HEAD, Dress(), CALLS, USAGE)
    assert (ended["status"], ended["usage"]["total_tokens"]) == ("completed", 18)


def test_incomplete_response_has_a_reason():
    result = [status_of(Reply("", None, (), reason)) for reason in FinishReason]
    limit = ("incomplete", {"reason": "max_output_tokens"})
    assert result == [("completed", None), limit, limit]
    assert usage_json(Usage(1, 2))["output_tokens_details"] == {"reasoning_tokens": 0}


def stream_events(stream):
    return [json.loads(event.data) for event in events(stream)]


def kinds(stream):
    return [event["type"].removeprefix("response.") for event in stream_events(stream)]


def test_every_event_is_numbered_and_named():
    encoder = ResponsesStream(HEAD, Dress())
    stream = encoder.open() + encoder.keepalive() + b"".join(encoder.close(TEXT, USAGE))
    assert [event["sequence_number"] for event in stream_events(stream)] == list(
        range(len(stream_events(stream)))
    )
    assert [event.event for event in events(stream)] == [
        event["type"] for event in stream_events(stream)
    ]
    assert kinds(stream)[:3] == ["created", "in_progress", "in_progress"]
    assert kinds(stream)[-1] == "completed"


def test_reasoning_without_a_summary_is_an_item_without_text():
    encoder = ResponsesStream(HEAD, Dress(encrypted=True))
    stream = encoder.reasoning("secret") + encoder.reasoning("s") + encoder.text("x")
    assert kinds(stream)[:2] == ["output_item.added", "output_item.done"]
    assert b"secret" not in stream
    assert stream_events(stream)[1]["item"]["encrypted_content"]


def test_a_shell_call_item_is_streamed_without_deltas():
    dress = Dress(wire={"shell": {"type": "shell"}})
    encoder = ResponsesStream(HEAD, dress)
    stream = encoder.tool_call(0, "call_1", "shell", '{"commands":["ls"]}')
    assert kinds(stream) == ["output_item.added", "output_item.done"]
    assert stream_events(stream)[1]["item"]["type"] == "shell_call"


def test_a_freeform_call_streams_its_input():
    encoder = ResponsesStream(HEAD, Dress(freeform=frozenset({"patch"})))
    stream = encoder.tool_call(0, "call_1", "patch", '{"input":"x"}')
    assert kinds(stream)[1:3] == ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    assert stream_events(stream)[2]["input"] == "x"


def test_a_compaction_streams_nothing_but_its_item():
    encoder = ResponsesStream(HEAD, Dress(compacts=True))
    assert encoder.reasoning("a") + encoder.text("b") + encoder.tool_call(0, "c", "f", "{}") == b""
    before, last = encoder.close(Reply("b", "a", (), FinishReason.STOP), USAGE)
    assert kinds(before) == ["output_item.added", "output_item.done"]
    assert [item["type"] for item in stream_events(last)[0]["response"]["output"]] == ["compaction"]


def test_an_empty_reply_has_an_empty_message():
    _, last = ResponsesStream(HEAD, Dress()).close(NOTHING, USAGE)
    [item] = stream_events(last)[0]["response"]["output"]
    assert item["content"][0]["text"] == ""


def test_a_late_failure_has_a_code_and_the_items_so_far():
    encoder = ResponsesStream(HEAD, Dress())
    encoder.tool_call(0, "call_1", "f", "{}")
    [event] = stream_events(encoder.error(RequestError("busy", code="overloaded")))
    assert event["type"] == "response.failed"
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["code"] == "server_error"
    assert len(event["response"]["output"]) == 1
    [bare] = stream_events(encoder.error(RequestError("bad")))
    assert bare["response"]["error"]["code"] == "invalid_request_error"


SPANS = (
    b'{"role":"user","content":"hi"}',
    b'{"type":"reasoning","id":"rs_1","summary":[]},{"role":"assistant","content":"ok"}',
    b'{"type":"function_call_output","call_id":"c","output":"r"}',
)


def page(query="order=asc"):
    return json.loads(items_page(SPANS, query))


def test_listed_items_have_ids_types_and_parts():
    user, thought, said, result = page()["data"]
    assert user["content"] == [{"type": "input_text", "text": "hi"}]
    assert said["content"][0] == {"type": "output_text", "text": "ok", "annotations": []}
    assert thought == {"type": "reasoning", "id": "rs_1", "summary": []}
    assert result["id"].startswith("fco_")
    assert result["status"] == user["status"] == "completed"
    assert len({item["id"] for item in page()["data"]}) == 4
    assert page() == page(), "ids are the same each time"


def test_items_page_is_newest_first_by_default():
    assert page("")["data"] == page()["data"][::-1]
    found = page("limit=2")
    assert (len(found["data"]), found["has_more"]) == (2, True)
    assert (found["first_id"], found["last_id"]) == tuple(item["id"] for item in found["data"])


def test_an_empty_page_has_no_ends():
    last = page()["data"][-1]["id"]
    found = page(f"order=asc&after={last}")
    assert found == {
        "object": "list",
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=101", "limit=-1", "limit=²", "order=up", "after=nothing"]
)
def test_invalid_page_queries_are_refused_by_name(query):
    with pytest.raises(RequestError) as raised:
        page(query)
    assert raised.value.param == query.partition("=")[0]


def test_a_deletion_is_confirmed():
    assert json.loads(deleted_json("resp_1"))["deleted"] is True
