import json

import pytest
from tests.dialects.exchange import HEAD, USAGE, events

from bridle.dialects.anthropic_write import (
    MessagesStream,
    call_block,
    error_body,
    message_json,
    status_of,
    stop_reason,
    usage_json,
)
from bridle.errors import RequestError
from bridle.types import FinishReason, Reply, ToolCall

CALL = ToolCall("call_1", "f", "{}")


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        (Reply("x", None, (), FinishReason.STOP), ("end_turn", None)),
        (Reply("x", None, (), FinishReason.STOP, stop_text="END"), ("stop_sequence", "END")),
        (Reply("x", None, (CALL,), FinishReason.STOP), ("tool_use", None)),
        (Reply("x", None, (CALL,), FinishReason.LENGTH), ("max_tokens", None)),
        (Reply("x", None, (), FinishReason.ABORT), ("max_tokens", None)),
    ],
)
def test_replies_have_the_stop_reason_that_anthropic_uses(reply, result):
    assert stop_reason(reply) == result


def test_cached_tokens_are_reported_apart_from_input_tokens():
    counts = usage_json(USAGE)
    total = counts["input_tokens"] + counts["cache_read_input_tokens"]
    assert total == USAGE.prompt_tokens


def test_a_call_without_an_id_gets_one_from_the_reply():
    block = call_block(HEAD, 2, ToolCall(None, "f", ""))
    assert block["id"] == f"toolu_{HEAD.reply_id}002"
    assert bytes(block["input"]) == b"{}"


def test_an_empty_reply_has_no_blocks():
    empty = message_json(HEAD, Reply("", None, (), FinishReason.STOP), USAGE, "text")
    assert empty["content"] == []


def test_an_error_of_an_unknown_code_is_an_invalid_request_and_keeps_its_http_status():
    error = RequestError("upgrade", status=426, code="odd")
    assert status_of(error) == 426
    assert error_body(error)["error"]["type"] == "invalid_request_error"


def kinds(stream):
    parsed = [json.loads(event.data) for event in events(stream)]
    assert [event.event for event in events(stream)] == [event["type"] for event in parsed]
    return [
        (event["type"], (event.get("delta") or event.get("content_block") or {}).get("type"))
        for event in parsed
    ]


def test_blocks_are_opened_filled_and_closed_in_turn():
    encoder = MessagesStream(HEAD, thinking="text")
    assert [kind for kind, _ in kinds(encoder.open())] == ["message_start", "ping"]
    stream = encoder.reasoning("a") + encoder.text("b") + encoder.reasoning("c")
    before, last = encoder.close(Reply("b", "ac", (), FinishReason.STOP), USAGE)
    assert kinds(stream + before) == [
        ("content_block_start", "thinking"),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "signature_delta"),
        ("content_block_stop", None),
        ("content_block_start", "text"),
        ("content_block_delta", "text_delta"),
        ("content_block_stop", None),
        ("content_block_start", "thinking"),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "signature_delta"),
        ("content_block_stop", None),
    ]
    assert [kind for kind, _ in kinds(last)] == ["message_delta", "message_stop"]


def test_omitted_thinking_is_a_block_with_a_signature_only():
    encoder = MessagesStream(HEAD, thinking="omitted")
    before, _ = encoder.close(Reply("", "why", (), FinishReason.STOP), USAGE)
    assert [inner for _, inner in kinds(before)] == ["thinking", "signature_delta", None]


def test_the_stream_opens_with_the_prompts_length():
    start = json.loads(events(MessagesStream(HEAD, thinking=None).open())[0].data)
    assert start["message"]["usage"]["input_tokens"] == HEAD.prompt_tokens


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("overloaded", {"type": "overloaded_error", "message": "Overloaded"}),
        ("engine_error", {"type": "overloaded_error", "message": "Overloaded"}),
        ("rate_limit", {"type": "rate_limit_error", "message": "full"}),
    ],
)
def test_an_error_event_has_the_providers_type_and_a_failure_of_ours_its_own_words(code, error):
    result = MessagesStream(HEAD, thinking=None).error(RequestError("full", code=code))
    [event] = events(result)
    assert event.event == "error"
    assert json.loads(event.data)["error"] == error
