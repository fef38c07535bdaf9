from tests.dialects.exchange import HEAD, USAGE

from bridle.dialects.google_write import (
    call_part,
    error_json,
    error_response,
    finish_reason,
    usage_json,
)
from bridle.errors import RequestError
from bridle.types import FinishReason, Reply, ToolCall, Usage


def test_thoughts_are_counted_apart():
    counts = usage_json(USAGE)
    assert counts["candidatesTokenCount"] + counts["thoughtsTokenCount"] == 7
    assert counts["totalTokenCount"] == 18
    plain = usage_json(Usage(3, 4))
    assert not {"thoughtsTokenCount", "cachedContentTokenCount"} & plain.keys()


def test_a_call_without_an_id_gets_one_from_the_reply():
    part = call_part(HEAD, 1, ToolCall(None, "f", "{}"))
    assert part["functionCall"]["id"] == f"call_{HEAD.reply_id}001"


def test_finish_reasons():
    told = [finish_reason(Reply("", None, (), reason)) for reason in FinishReason]
    assert told == ["STOP", "MAX_TOKENS", "MAX_TOKENS"]


def test_an_error_names_the_field_and_when_to_come_back():
    bad = error_json(RequestError("no text", param="contents[0].parts[0].text"))
    [detail] = bad["error"]["details"]
    assert detail["fieldViolations"][0]["field"] == "contents[0].parts[0].text"
    status, headers, _ = error_response(RequestError("busy", code="paused", retry_after_s=2.5))
    assert (status, headers["Retry-After"]) == (503, "3")
    busy = error_json(RequestError("busy", code="paused", retry_after_s=2.5))
    assert busy["error"]["details"][0]["retryDelay"] == "2.5s"
