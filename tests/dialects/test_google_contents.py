import pytest

from bridle.dialects.google import camel, plain_schema, read_content, read_system
from bridle.dialects.media import block_part, data_part, url_part
from bridle.errors import RequestError
from bridle.types import Message, Role, TextPart, ToolCall


def read(role, *parts):
    return read_content({"role": role, "parts": list(parts)}, "contents[0]")


def test_only_an_objects_own_keys_change_case():
    assert camel({"function_call": {"the_args": 1}, "a": 2}) == {
        "functionCall": {"the_args": 1},
        "a": 2,
    }


def test_schemas_lose_googles_type_names_only():
    schema = {
        "type": "OBJECT",
        "required": ["TYPE"],
        "properties": {
            "type": {"type": "STRING", "enum": ["A"], "default": "B"},
            "enum": {"type": "ARRAY", "items": {"type": "NUMBER"}},
            "odd": True,
        },
        "anyOf": [{"type": "STRING"}, {"type": "NULL"}],
    }
    assert plain_schema(schema) == {
        "type": "object",
        "required": ["TYPE"],
        "properties": {
            "type": {"type": "string", "enum": ["A"], "default": "B"},
            "enum": {"type": "array", "items": {"type": "number"}},
            "odd": True,
        },
        "anyOf": [{"type": "string"}, {"type": "null"}],
    }


def test_a_system_instruction_is_a_content_or_a_text():
    told = (Message(Role.SYSTEM, (TextPart("rules"),)),)
    assert read_system("rules", "s") == told
    assert read_system({"parts": [{"text": "rules"}]}, "s") == told
    assert read_system({"parts": {"text": "rules"}}, "s") == told
    for nothing in (None, "", {}, {"parts": []}, {"parts": [{"text": ""}]}):
        assert read_system(nothing, "s") == ()


def test_parts_that_hold_nothing_are_no_parts():
    assert read("user", {"text": ""}, {"thoughtSignature": "c2ln"}, {}) == (Message(Role.USER),)
    assert read_content({}, "c") == (Message(Role.USER),)


def test_media_and_unknown_parts_stay_in_place():
    odd = {"videoMetadata": {"fps": 1}}
    [message] = read(
        "user",
        {"inlineData": {"data": "aGk="}},
        {"file_data": {"file_uri": "gs://a", "mime_type": "image/png"}},
        {"fileData": {"fileUri": "gs://b"}},
        odd,
    )
    assert message.content == (
        data_part("application/octet-stream", "aGk="),
        url_part("gs://a", "image/png"),
        url_part("gs://b", "application/octet-stream"),
        block_part(odd),
    )


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "o"}, "o"),
        ({"result": "r"}, "r"),
        ({"error": "e"}, '{"error": "e"}'),
        ({"output": "o", "more": 1}, '{"output": "o", "more": 1}'),
        ({"output": ["o"]}, '{"output": ["o"]}'),
        ("plain", "plain"),
        ({}, ""),
        (None, ""),
    ],
)
def test_a_function_response_shows_its_output(response, text):
    part = {"functionResponse": {"id": "1", "name": "f", "response": response}}
    [message] = read("function", part)
    assert (message.role, message.text, message.tool_call_id) == (Role.TOOL, text, "1")


def test_a_function_response_may_hold_media():
    image = {"inline_data": {"mime_type": "image/png", "data": "aGk="}}
    part = {"function_response": {"name": "f", "response": {"output": "o"}, "parts": [image]}}
    before, message = read("user", {"text": "first"}, part)
    assert before.text == "first"
    assert message.content == (TextPart("o"), data_part("image/png", "aGk="))


def test_text_after_a_call_is_a_message_of_its_own():
    call = {"functionCall": {"name": "f", "args": {"a": 1}, "id": ""}, "thoughtSignature": "a-_8"}
    assert read(
        "model", {"text": "one"}, call, {"text": "two"}, {"text": "why", "thought": True}
    ) == (
        Message(
            Role.ASSISTANT,
            (TextPart("one"),),
            tool_calls=(ToolCall(None, "f", '{"a":1}'),),
            issued_ids=("a+/8",),
        ),
        Message(Role.ASSISTANT, (TextPart("two"),), reasoning="why"),
    )


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ({"role": "boss", "parts": []}, "c.role"),
        ({"role": "user", "parts": "x"}, "c.parts"),
        ({"role": "user", "parts": 7}, "c.parts"),
        ({"role": "user", "parts": [7]}, "c.parts[0]"),
        ({"role": "model", "parts": [{"functionCall": {}}]}, "c.parts[0].functionCall.name"),
        ({"role": "user", "parts": [{"inlineData": {}}]}, "c.parts[0].inlineData.data"),
    ],
)
def test_wrong_contents_are_named(content, path):
    with pytest.raises(RequestError) as told:
        read_content(content, "c")
    assert told.value.param == path
