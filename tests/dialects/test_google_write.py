import json

import pytest
from tests.dialects.exchange import CALLS, HEAD, TEXT, USAGE, live

from bridle.dialects.google_write import (
    ContentStream,
    call_part,
    error_json,
    error_response,
    finish_reason,
    usage_json,
)
from bridle.errors import RequestError
from bridle.types import FinishReason, Reply, ToolCall, Usage


def test_thought_tokens_are_reported_apart_from_candidate_tokens():
    counts = usage_json(USAGE)
    assert counts["candidatesTokenCount"] + counts["thoughtsTokenCount"] == 7
    assert counts["totalTokenCount"] == 18
    plain = usage_json(Usage(3, 4))
    assert not {"thoughtsTokenCount", "cachedContentTokenCount"} & plain.keys()


def test_a_call_without_an_id_gets_one_from_the_reply():
    part = call_part(HEAD, 1, ToolCall(None, "f", "{}"))
    assert part["functionCall"]["id"] == f"call_{HEAD.reply_id}001"


def test_every_finish_reason_has_google_s_name():
    result = [finish_reason(Reply("", None, (), reason)) for reason in FinishReason]
    assert result == ["STOP", "MAX_TOKENS", "MAX_TOKENS"]


def test_an_error_has_its_field_violation_and_retry_delay():
    bad = error_json(RequestError("no text", param="contents[0].parts[0].text"))
    [detail] = bad["error"]["details"]
    assert detail["fieldViolations"][0]["field"] == "contents[0].parts[0].text"
    status, headers, _ = error_response(RequestError("busy", code="paused", retry_after_s=2.5))
    assert (status, headers["Retry-After"]) == (503, "3")
    busy = error_json(RequestError("busy", code="paused", retry_after_s=2.5))
    assert busy["error"]["details"][0]["retryDelay"] == "2.5s"


@pytest.mark.parametrize("reply", [CALLS, TEXT])
def test_an_array_stream_is_one_json_array(reply):
    parsed = json.loads(live(ContentStream(HEAD, thoughts=True, sse=False), reply))
    assert parsed[-1]["candidates"][0]["finishReason"] == "STOP"
    assert all("usageMetadata" not in piece for piece in parsed[:-1])


def test_a_late_error_closes_a_json_array_stream():
    encoder = ContentStream(HEAD, thoughts=False, sse=False)
    stream = encoder.open() + encoder.text("x") + encoder.error(RequestError("gone", code="paused"))
    assert json.loads(stream)[-1]["error"]["status"] == "UNAVAILABLE"


def test_keepalive_bytes_are_not_sse_comments():
    encoder = ContentStream(HEAD, thoughts=False, sse=True)
    assert encoder.keepalive().strip() == b""
    assert b": " not in encoder.open() + encoder.keepalive()


def test_the_signature_of_a_text_comes_with_the_last_event():
    encoder = ContentStream(HEAD, thoughts=False, sse=True)
    before, last = encoder.close(TEXT, USAGE)
    assert b"thoughtSignature" not in before
    assert b"thoughtSignature" in last


@pytest.mark.parametrize("sse", [True, False])
def test_parallel_calls_are_sent_in_one_event(sse):
    encoder = ContentStream(HEAD, thoughts=True, sse=sse)
    before, _ = encoder.close(CALLS, USAGE)
    (holding,) = [event for event in before.split(b"\r\n") if b"functionCall" in event]
    assert holding.count(b'"functionCall"') == 2
