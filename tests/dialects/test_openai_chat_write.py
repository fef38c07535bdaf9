import json

import pytest
from tests.dialects.exchange import CALLS, HEAD, TEXT, USAGE, events, live

from bridle.dialects.base import Route, RouteKind
from bridle.dialects.media import block_part, data_part, url_part
from bridle.dialects.openai_chat_write import (
    ChatStream,
    chat_error_message,
    chat_messages,
    chat_tools,
    error_object,
    error_response,
    finish_reason,
    models_json,
    tool_call_json,
    usage_json,
)
from bridle.dialects.openai_responses_write import responses_message
from bridle.errors import RequestError
from bridle.types import (
    Dialect,
    FinishReason,
    Message,
    Reply,
    Role,
    TextPart,
    ToolCall,
    ToolSpec,
    Usage,
)

CALL = ToolCall("1", "f", '{"input":"x"}')


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        (Reply("x", None, (), FinishReason.STOP), "stop"),
        (Reply("x", None, (CALL,), FinishReason.STOP), "tool_calls"),
        (Reply("x", None, (CALL,), FinishReason.LENGTH), "length"),
        (Reply("x", None, (), FinishReason.ABORT), "length"),
    ],
)
def test_replies_have_the_finish_reason_that_openai_uses(reply, result):
    assert finish_reason(reply) == result


def test_a_freeform_call_is_written_as_a_custom_call_with_its_text():
    custom = {"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}
    assert tool_call_json(CALL, {"f"}) == custom
    assert tool_call_json(ToolCall("1", "f", "x", custom=True), ()) == custom
    assert tool_call_json(CALL, ())["function"]["arguments"] == '{"input":"x"}'


def test_usage_details_are_never_null():
    result = usage_json(Usage(1, 2))
    assert result["prompt_tokens_details"] == {"cached_tokens": 0}
    assert result["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_one_model_and_the_list_of_models_are_written_as_json():
    one = Route(Dialect.OPENAI_CHAT, RouteKind.MODEL, model="a/b")
    assert json.loads(models_json(one, ["x"], 9))["id"] == "a/b"
    listed = Route(Dialect.OPENAI_CHAT, RouteKind.MODELS)
    assert json.loads(models_json(listed, ["x"], 9))["data"][0]["max_model_len"] == 9


def chunks(stream):
    result = [event.data for event in events(stream)]
    assert result.pop() == "[DONE]"
    return [json.loads(data) for data in result]


def test_the_role_comes_first_and_the_finish_reason_last():
    result = chunks(live(ChatStream(HEAD, include_usage=False), CALLS))
    assert result[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in result]
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}
    assert all("usage" not in chunk for chunk in result)
    indexes = [
        c["index"] for chunk in result for c in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert indexes == [0, 1]


def test_usage_chunk_is_sent_if_requested():
    result = chunks(live(ChatStream(HEAD, include_usage=True), TEXT))
    assert result[-1]["choices"] == []
    assert result[-1]["usage"]["total_tokens"] == 18
    assert all(chunk["usage"] is None for chunk in result[:-1])


def test_finish_usage_and_done_are_one_last_event():
    encoder = ChatStream(HEAD, include_usage=True)
    before, last = encoder.close(TEXT, USAGE)
    assert [chunk["choices"] == [] for chunk in chunks(last)] == [False, True]
    assert b'finish_reason":"' not in before


def test_a_keepalive_is_a_chunk_with_an_empty_delta():
    [event] = events(ChatStream(HEAD, include_usage=False).keepalive())
    assert json.loads(event.data)["choices"][0]["delta"] == {}


def test_a_freeform_call_is_streamed_as_one_custom_call():
    encoder = ChatStream(HEAD, include_usage=False, freeform={"patch"})
    [event] = events(encoder.tool_call(0, "call_1", "patch", '{"input":"x"}'))
    [call] = json.loads(event.data)["choices"][0]["delta"]["tool_calls"]
    assert call["custom"] == {"name": "patch", "input": "x"}


def test_a_late_failure_of_a_chat_stream_has_no_error_event():
    assert ChatStream(HEAD, include_usage=False).error(RequestError("gone")) is None


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


def test_chat_and_responses_have_their_own_context_overflow_messages():
    assert "maximum context length is 40 tokens" in chat_error_message(OVERFLOW)
    assert responses_message(OVERFLOW).endswith("(50 tokens > 40 maximum)")
    bare = RequestError("no room", code="context_length_exceeded")
    assert chat_error_message(bare) == "no room"
    assert "exceeds the context window" in responses_message(bare)
    assert responses_message(RequestError("other")) == "other"
    assert error_object(OVERFLOW, "m")["code"] == "context_length_exceeded"


def test_text_parts_are_joined_and_messages_keep_their_roles():
    result = chat_messages(
        [
            Message(Role.SYSTEM, (TextPart("a"), TextPart("b"))),
            Message(Role.USER),
            Message(Role.USER),
        ]
    )
    assert result == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": ""},
        {"role": "user", "content": ""},
    ]


def test_an_assistant_turn_has_its_reasoning_and_calls():
    calls = (ToolCall("1", "f", "{bad"), ToolCall("2", "patch", "raw", custom=True))
    [result] = chat_messages([Message(Role.ASSISTANT, reasoning="why", tool_calls=calls)])
    assert (result["content"], result["reasoning_content"]) == (None, "why")
    assert result["tool_calls"][0]["function"] == {"name": "f", "arguments": "{bad"}
    assert json.loads(result["tool_calls"][1]["function"]["arguments"]) == {"input": "raw"}
    [plain] = chat_messages([Message(Role.ASSISTANT, (TextPart("x"),))])
    assert plain == {"role": "assistant", "content": "x"}


def test_a_result_names_its_call_and_tool():
    [result] = chat_messages([Message(Role.TOOL, (TextPart("r"),), tool_call_id="1", name="f")])
    assert result == {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"}


def test_media_keep_their_place():
    content = (
        TextPart("see"),
        data_part("image/png", "aGk="),
        data_part("audio/wav", "aGk="),
        url_part("https://example.org/a.pdf", "application/pdf"),
        block_part({"type": "odd", "n": 1}),
        data_part("application/json", "e30="),
    )
    [result] = chat_messages([Message(Role.USER, content)])
    assert result["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
        {"type": "file", "file": {"file_data": "https://example.org/a.pdf"}},
        {"type": "odd", "n": 1},
        {"type": "file", "file": {"file_data": "data:application/json;base64,e30="}},
    ]


def test_tools_have_only_the_keys_that_were_given():
    tools = [ToolSpec("f", None, None), ToolSpec("g", "does", {"type": "object"}, strict=True)]
    assert chat_tools(tools) == [
        {"type": "function", "function": {"name": "f"}},
        {
            "type": "function",
            "function": {
                "name": "g",
                "description": "does",
                "parameters": {"type": "object"},
                "strict": True,
            },
        },
    ]
