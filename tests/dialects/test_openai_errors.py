import json

from bridle.dialects.openai_chat_write import chat_error_message, error_object, error_response
from bridle.dialects.openai_responses_write import responses_message
from bridle.errors import RequestError

OVERFLOW = RequestError(
    "no room", code="context_length_exceeded", prompt_tokens=50, context_length=40
)


def test_an_error_names_its_field():
    status, _, body = error_response(RequestError("bad", param="messages[0]"), "bad")
    assert status == 400
    assert json.loads(body) == {
        "error": {
            "message": "bad",
            "type": "invalid_request_error",
            "param": "messages[0]",
            "code": None,
        }
    }


def test_an_unknown_code_keeps_its_status():
    assert error_response(RequestError("x", status=426, code="odd"), "x")[0] == 426


def test_both_apis_say_an_overflow_in_their_own_words():
    assert "maximum context length is 40 tokens" in chat_error_message(OVERFLOW)
    assert responses_message(OVERFLOW).endswith("(50 tokens > 40 maximum)")
    bare = RequestError("no room", code="context_length_exceeded")
    assert chat_error_message(bare) == "no room"
    assert "exceeds the context window" in responses_message(bare)
    assert responses_message(RequestError("other")) == "other"
    assert error_object(OVERFLOW, "m")["code"] == "context_length_exceeded"
