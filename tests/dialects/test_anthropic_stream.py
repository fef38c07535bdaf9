import json

import pytest
from tests.dialects.exchange import HEAD, USAGE, events

from bridle.dialects.anthropic_write import MessagesStream
from bridle.errors import RequestError
from bridle.types import FinishReason, Reply


def kinds(stream):
    told = [json.loads(event.data) for event in events(stream)]
    assert [event.event for event in events(stream)] == [event["type"] for event in told]
    return [
        (event["type"], (event.get("delta") or event.get("content_block") or {}).get("type"))
        for event in told
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
    told = MessagesStream(HEAD, thinking=None).error(RequestError("full", code=code))
    [event] = events(told)
    assert event.event == "error"
    assert json.loads(event.data)["error"] == error
