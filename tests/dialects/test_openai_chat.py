import json
from dataclasses import replace

import pytest
from tests.dialects.exchange import CALLS, HEAD, NOTHING, TEXT, USAGE, parse

from bridle.dialects import DIALECTS
from bridle.dialects.media import block_part, url_part
from bridle.dialects.openai_chat import (
    read_choice,
    read_message,
    read_options,
    read_schema,
    read_thinking,
    read_tools,
)
from bridle.dialects.tools import ToolList
from bridle.errors import RequestError
from bridle.types import Dialect, FinishReason, Message, Reply, Role, TextPart, ToolCall, ToolSpec

WIRE = DIALECTS[Dialect.OPENAI_CHAT]
HI = [{"role": "user", "content": "hi"}]


def read(**fields):
    return parse(Dialect.OPENAI_CHAT, {"model": "m", "messages": HI, **fields})


def message(**fields):
    [result] = read_message(fields, "messages[0]")
    return result


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_string_content_is_one_text_part_and_empty_text_is_no_part(role):
    for some in ("go", ["go"], [{"type": "text", "text": "go"}], [{"text": "go"}]):
        assert message(role=role, content=some).content == (TextPart("go"),)
    null = () if role == "user" else (None,)  # a user's is refused
    for nothing in ("", *null, [], [""], [{"type": "text", "text": ""}]):
        assert message(role=role, content=nothing) == Message(Role(role))


def test_developer_and_function_roles_are_read_as_system_and_tool():
    assert message(role="developer", content="x").role is Role.SYSTEM
    parsed = message(role="function", name="f", content="x")
    assert (parsed.role, parsed.name, parsed.tool_call_id) == (Role.TOOL, "f", None)


def test_tool_calls_are_read_in_every_form_that_clients_send():
    new = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    bare = {"id": "1", "function": {"name": "f", "arguments": {"a": 1}}}
    custom = {"id": "1", "type": "custom", "custom": {"name": "p", "input": "raw"}}
    assert message(role="assistant", tool_calls=[new]).tool_calls == (
        ToolCall("1", "f", '{"a": 1}'),
    )
    assert message(role="assistant", tool_calls=[bare]).tool_calls == (
        ToolCall("1", "f", '{"a":1}'),
    )
    [call] = message(role="assistant", tool_calls=[custom]).tool_calls
    assert call == ToolCall("1", "p", "raw", custom=True)
    older = message(role="assistant", function_call={"name": "f", "arguments": "{}"})
    assert older.tool_calls == (ToolCall(None, "f", "{}"),)
    assert message(role="assistant", tool_calls=None) == Message(Role.ASSISTANT)


def test_reasoning_is_read_in_every_form_that_clients_send():
    assert message(role="assistant", reasoning_content="why").reasoning == "why"
    assert message(role="assistant", reasoning="why").reasoning == "why"
    assert message(role="assistant", reasoning={"text": "why"}).reasoning is None
    parts = [{"type": "thinking", "thinking": "w"}, {"type": "reasoning", "text": "hy"}]
    assert message(role="assistant", content=parts) == Message(Role.ASSISTANT, reasoning="why")


def test_an_assistant_s_refusal_is_read_as_its_text():
    assert message(role="assistant", refusal="no").content == (TextPart("no"),)
    assert message(role="assistant", content="x", refusal="no").text == "x"
    part = {"type": "refusal", "refusal": "no"}
    assert message(role="assistant", content=[part]).text == "no"


def test_media_keep_their_place_and_unknown_parts_their_json():
    odd = {"type": "image_url"}
    parsed = message(
        role="user",
        content=[
            {"type": "image_url", "image_url": "https://example.org/a.png"},
            {"type": "input_audio", "input_audio": {"data": "aGk="}},
            {"type": "file", "file": {"file_id": "f"}},
            odd,
        ],
    )
    assert parsed.content[0] == url_part("https://example.org/a.png", "image/*")
    assert parsed.content[1].media_type == "audio/*"
    assert parsed.content[2:] == (
        block_part({"type": "file", "file": {"file_id": "f"}}),
        block_part(odd),
    )


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({}, "m.role"),
        ({"role": "boss"}, "m.role"),
        ({"role": "user", "content": {}}, "m.content"),
        ({"role": "user", "content": [7]}, "m.content[0]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "m.content[0].image_url.url",
        ),
        ({"role": "assistant", "tool_calls": {}}, "m.tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "m.tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [{}]}, "m.tool_calls[0].function.name"),
        ({"role": "assistant", "function_call": {}}, "m.function_call.name"),
        ({"role": "tool", "tool_call_id": 7}, "m.tool_call_id"),
    ],
)
def test_invalid_messages_are_refused_by_their_path(fields, path):
    with pytest.raises(RequestError) as raised:
        read_message(fields, "m")
    assert raised.value.param == path


def test_functions_and_custom_tools_are_read_in_every_form_and_others_removed():
    f = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    spec = ToolSpec("f", "d", {"type": "object"}, strict=True)
    assert read(functions=[f]).tools == (spec,)
    assert read(tools=[{"type": "function", "function": f}]).tools == (spec,)
    assert read(tools=[{"type": "function", **f}]).tools == (spec,)
    parsed = read_tools([{"type": "custom", "custom": {"name": "p"}}, {"type": "mcp"}], "tools")
    assert parsed.freeform == {"p"}
    assert parsed.removed == {"server_tools": ["mcp"]}
    assert read(tools=[]).tools_span is read(tools=None).tools_span is None


def test_more_than_one_choice_is_refused():
    assert read(n=1).model == read(n=None).model == "m"
    for key, value in (("n", 2), ("n", True), ("n", 0), ("best_of", 3), ("n", "1")):
        with pytest.raises(RequestError) as raised:
            read(**{key: value})
        assert raised.value.param == key


def test_a_request_without_a_model_name_is_refused():
    for model in (None, "", 7):
        with pytest.raises(RequestError) as raised:
            read(model=model)
        assert raised.value.param == "model"


def test_replies_omit_absent_parts():
    plain = json.loads(WIRE.reply_json(read(), HEAD, TEXT, USAGE))["choices"][0]["message"]
    assert plain == {"role": "assistant", "content": "Hello there.", "refusal": None}
    empty = json.loads(WIRE.reply_json(read(), HEAD, NOTHING, USAGE))["choices"][0]["message"]
    assert empty["content"] == ""
    [result] = WIRE.reply_messages(WIRE.reply_json(read(), HEAD, CALLS, USAGE))
    assert result.tool_calls == CALLS.tool_calls
    assert result.reasoning == CALLS.reasoning


REASONED = Reply("4\u00e9", "Two and two.", (), FinishReason.STOP)


@pytest.mark.parametrize(
    "reply", [TEXT, NOTHING, CALLS, REASONED, replace(TEXT, content=" \ud800")]
)
def test_a_reply_of_text_only_is_read_back_as_any_message_is(reply):
    body = WIRE.reply_json(read(), HEAD, reply, USAGE)
    (choice,) = json.loads(body)["choices"]
    assert WIRE.reply_messages(body) == read_message(choice["message"], "message")


TOOLS = ToolList((ToolSpec("f", None, None),))


@pytest.mark.parametrize(
    ("head", "read_as"),
    [
        ({}, "auto"),
        ({"tool_choice": None}, "auto"),
        ({"tool_choice": "none"}, "none"),
        ({"tool_choice": "required"}, "required"),
        ({"tool_choice": "any"}, "required"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "f"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "f"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "f"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "required"}}, "required"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "auto"),
        ({"tool_choice": {"type": "allowed_tools"}}, "auto"),
        ({"tool_choice": {"type": "web_search"}}, "auto"),
        ({"tool_choice": {"type": "mcp", "name": "f"}}, "f"),
        ({"function_call": {"name": "f"}}, "f"),
        ({"function_call": "auto"}, "auto"),
    ],
)
def test_tool_choice_and_function_call_are_read_as_a_mode_or_a_tool_name(head, read_as):
    assert read_choice(head, TOOLS) == read_as


@pytest.mark.parametrize(
    ("choice", "path"),
    [
        ("sometimes", "tool_choice"),
        (7, "tool_choice"),
        ({}, "tool_choice.type"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        ({"type": "function", "function": 7}, "tool_choice.function"),
        ({"type": "function", "name": "g"}, "tool_choice"),
    ],
)
def test_an_invalid_tool_choice_is_refused_by_its_path(choice, path):
    with pytest.raises(RequestError) as raised:
        read_choice({"tool_choice": choice}, TOOLS)
    assert raised.value.param == path


def test_max_completion_tokens_comes_before_max_tokens():
    assert read_options({"max_tokens": 5}).max_tokens == 5
    assert read_options({"max_tokens": 5, "max_completion_tokens": 6}).max_tokens == 6
    assert read_options({"max_completion_tokens": None}).max_tokens is None
    with pytest.raises(RequestError, match="'max_completion_tokens'"):
        read_options({"max_completion_tokens": 0})


def test_top_k_min_tokens_and_stop_token_ids_are_read():
    result = read_options({"top_k": 0, "min_tokens": 2, "stop_token_ids": [1, 2], "stop": None})
    assert (result.top_k, result.min_tokens, result.stop_token_ids, result.stop) == (
        -1,
        2,
        (1, 2),
        (),
    )


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({}, None),
        ({"type": "json_object"}, {}),
        ({"type": "json_schema"}, {}),
        ({"type": "json_schema", "json_schema": {"schema": {"a": 1}}}, {"a": 1}),
    ],
)
def test_response_format_is_read_as_a_response_schema(form, schema):
    assert read_schema({"response_format": form}) == schema


@pytest.mark.parametrize(
    ("head", "thinking"),
    [
        ({}, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"enable_thinking": True}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"effort": "high"}}, None),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, None),
    ],
)
def test_thinking_is_read_from_every_field_that_switches_it(head, thinking):
    assert read_thinking(head) is thinking


def test_logit_bias_is_read_by_token_ids_and_other_keys_are_refused():
    assert read(logit_bias={"5": 1.5, "9": -100}).sampling.logit_bias == {"5": 1.5, "9": -100.0}
    assert read(logit_bias={}).sampling.logit_bias is None
    for wrong in ({"five": 1}, {"5": 101}):
        with pytest.raises(RequestError) as refused:
            read(logit_bias=wrong)
        assert "logit_bias" in str(refused.value)


def test_a_speakers_name_stands_before_the_words_of_a_user():
    assert message(role="user", name="ann", content="go").content == (
        TextPart("ann: "),
        TextPart("go"),
    )


def test_audio_that_the_provider_keeps_is_refused_by_its_field():
    with pytest.raises(RequestError) as refused:
        message(role="assistant", audio={"id": "a1"})
    assert refused.value.param == "messages[0].audio"
