import json

import pytest
from tests.dialects.exchange import CALLS, HEAD, TEXT, USAGE, live

from bridle.dialects.google_write import ContentStream
from bridle.errors import RequestError


@pytest.mark.parametrize("reply", [CALLS, TEXT])
def test_an_array_stream_is_one_json_array(reply):
    told = json.loads(live(ContentStream(HEAD, thoughts=True, sse=False), reply))
    assert told[-1]["candidates"][0]["finishReason"] == "STOP"
    assert all("usageMetadata" not in piece for piece in told[:-1])


def test_a_late_error_ends_an_array():
    encoder = ContentStream(HEAD, thoughts=False, sse=False)
    stream = encoder.open() + encoder.text("x") + encoder.error(RequestError("gone", code="paused"))
    assert json.loads(stream)[-1]["error"]["status"] == "UNAVAILABLE"


def test_what_keeps_a_client_waiting_is_no_comment():
    encoder = ContentStream(HEAD, thoughts=False, sse=True)
    assert encoder.keepalive().strip() == b""
    assert b": " not in encoder.open() + encoder.keepalive()


def test_the_signature_of_a_text_comes_with_the_last_event():
    encoder = ContentStream(HEAD, thoughts=False, sse=True)
    before, last = encoder.close(TEXT, USAGE)
    assert b"thoughtSignature" not in before
    assert b"thoughtSignature" in last


@pytest.mark.parametrize("sse", [True, False])
def test_parallel_calls_leave_in_one_event(sse):
    encoder = ContentStream(HEAD, thoughts=True, sse=sse)
    before, _ = encoder.close(CALLS, USAGE)
    (holding,) = [event for event in before.split(b"\r\n") if b"functionCall" in event]
    assert holding.count(b'"functionCall"') == 2
