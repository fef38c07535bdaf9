import pytest
from tests.dialects.exchange import HEAD, USAGE

from bridle.dialects.anthropic_write import (
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
    ("reply", "told"),
    [
        (Reply("x", None, (), FinishReason.STOP), ("end_turn", None)),
        (Reply("x", None, (), FinishReason.STOP, stop_text="END"), ("stop_sequence", "END")),
        (Reply("x", None, (CALL,), FinishReason.STOP), ("tool_use", None)),
        (Reply("x", None, (CALL,), FinishReason.LENGTH), ("max_tokens", None)),
        (Reply("x", None, (), FinishReason.ABORT), ("max_tokens", None)),
    ],
)
def test_stop_reasons(reply, told):
    assert stop_reason(reply) == told


def test_cached_tokens_are_counted_apart():
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


def test_an_unknown_code_is_a_bad_request_with_its_own_status():
    error = RequestError("upgrade", status=426, code="odd")
    assert status_of(error) == 426
    assert error_body(error)["error"]["type"] == "invalid_request_error"
