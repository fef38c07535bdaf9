import json

import pytest
from tests.dialects.exchange import CALLS, HEAD, TEXT, THOUGHT, USAGE, parse

from bridle.dialects import DIALECTS
from bridle.dialects.base import Route, RouteKind
from bridle.dialects.fields import camel
from bridle.dialects.google import (
    computer_use,
    plain_schema,
    read_content,
    read_system,
    speaks_older,
)
from bridle.dialects.json_reader import encode
from bridle.dialects.media import block_part, data_part, url_part
from bridle.errors import RequestError
from bridle.types import Dialect, Message, Role, TextPart, ToolCall

WIRE = DIALECTS[Dialect.GOOGLE]
HI = [{"role": "user", "parts": [{"text": "hi"}]}]
TOOLS = [{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}]


def read(**fields):
    return parse(Dialect.GOOGLE, {"contents": HI, **fields})


def config(**fields):
    return read(generationConfig=fields)


@pytest.mark.parametrize(
    ("calling", "read_as"),
    [
        ({}, "auto"),
        ({"mode": "AUTO"}, "auto"),
        ({"mode": "none"}, "none"),
        ({"mode": "ANY"}, "required"),
        ({"mode": "VALIDATED"}, "auto"),
        ({"mode": "ANY", "allowedFunctionNames": ["f"]}, "f"),
        ({"mode": "ANY", "allowed_function_names": ["f", "g"]}, "required"),
    ],
)
def test_function_calling_config_is_read_as_a_mode_or_a_function_name(calling, read_as):
    request = read(tools=TOOLS, toolConfig={"functionCallingConfig": calling})
    assert request.tool_choice == read_as


@pytest.mark.parametrize(
    ("names", "param"), [([], "mode"), (["gone"], "allowedFunctionNames"), (["a", "b"], "mode")]
)
def test_a_required_call_without_tools_is_refused_by_the_field_that_asks_for_it(names, param):
    calling = {"mode": "ANY", "allowedFunctionNames": names}
    with pytest.raises(RequestError) as refused:
        read(toolConfig={"functionCallingConfig": calling})
    assert refused.value.param == f"toolConfig.functionCallingConfig.{param}"


def test_an_unknown_function_calling_mode_is_refused():
    with pytest.raises(RequestError, match="ODD"):
        read(tools=TOOLS, toolConfig={"functionCallingConfig": {"mode": "ODD"}})


def test_one_tool_object_is_a_list_of_one():
    assert [tool.name for tool in read(tools=TOOLS[0]).tools] == ["f", "g"]
    dropped = read(tools=[{"googleSearch": {}, "codeExecution": None}])
    assert dropped.extra["removed"] == {"server_tools": ["googleSearch"]}


@pytest.mark.parametrize(
    ("thinking", "read_as"),
    [
        ({}, None),
        ({"thinkingBudget": 0}, False),
        ({"thinkingBudget": -1}, None),
        ({"thinking_budget": 100}, True),
        ({"includeThoughts": True}, True),
    ],
)
def test_thinking_config_is_read_as_on_off_or_unset(thinking, read_as):
    assert config(thinkingConfig=thinking).thinking is read_as


def test_response_schemas_and_the_json_mime_type_are_read():
    schema = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}
    plain = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert config(responseSchema=schema).response_schema == plain
    assert config(response_json_schema=plain).response_schema == plain
    assert config(responseMimeType="application/json").response_schema == {}
    assert config(responseMimeType="text/plain").response_schema is None


def test_only_one_candidate_is_sampled():
    assert config(candidateCount=1).sampling.top_k is None
    with pytest.raises(RequestError, match="one candidate") as raised:
        config(candidateCount=2)
    assert raised.value.param == "generationConfig.candidateCount"
    assert config(topK=0).sampling.top_k == -1


def test_count_tokens_accepts_a_whole_generate_content_request():
    inner = {"model": "models/my-model", "contents": HI, "systemInstruction": "be brief"}
    path = "/v1beta/models/my-model:countTokens"
    for key in ("generateContentRequest", "generate_content_request"):
        request = parse(Dialect.GOOGLE, {key: inner}, path)
        assert [message.role for message in request.messages] == [Role.SYSTEM, Role.USER]


def test_contents_may_be_one_content():
    request = parse(Dialect.GOOGLE, {"contents": HI[0]})
    assert request.messages[0].text == "hi"
    assert request.span_lengths == (1,)


def test_calls_have_ids_and_signatures_and_text_has_a_signature_only_without_calls():
    request = read()
    with_calls = json.loads(WIRE.reply_json(request, HEAD, CALLS, USAGE))
    text, first, second = with_calls["candidates"][0]["content"]["parts"]
    assert "thoughtSignature" not in text
    assert first["thoughtSignature"] != second["thoughtSignature"]
    assert first["functionCall"]["id"] == CALLS.tool_calls[0].id
    plain = json.loads(WIRE.reply_json(request, HEAD, TEXT, USAGE))
    assert plain["candidates"][0]["content"]["parts"][0]["thoughtSignature"]


def test_thoughts_are_shown_only_if_requested():
    for asked in (False, True):
        request = config(thinkingConfig={"includeThoughts": asked})
        parts = json.loads(WIRE.reply_json(request, HEAD, THOUGHT, USAGE))["candidates"][0]
        assert ("thought" in parts["content"]["parts"][0]) is asked


def test_a_model_route_shows_the_model_with_its_context_length():
    route = WIRE.route("GET", "/v1beta/models/x", "", {})
    assert route is not None
    assert route.kind is RouteKind.MODEL
    assert json.loads(WIRE.models(route, [], 9))["inputTokenLimit"] == 9


def read_parts_of(role, *parts):
    return read_content({"role": role, "parts": list(parts)}, "contents[0]")


def test_keys_become_camel_case_except_inside_of_arguments():
    assert camel({"function_call": {"the_args": 1}, "a": 2}) == {
        "functionCall": {"the_args": 1},
        "a": 2,
    }


def test_google_s_type_names_in_schemas_become_json_schema_types():
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
    result = (Message(Role.SYSTEM, (TextPart("rules"),)),)
    assert read_system("rules", "s") == result
    assert read_system({"parts": [{"text": "rules"}]}, "s") == result
    assert read_system({"parts": {"text": "rules"}}, "s") == result
    for nothing in (None, "", {}, {"parts": []}, {"parts": [{"text": ""}]}):
        assert read_system(nothing, "s") == ()


def test_empty_text_and_signature_only_parts_are_dropped():
    assert read_parts_of("user", {"text": ""}, {"thoughtSignature": "c2ln"}, {}) == (
        Message(Role.USER),
    )
    assert read_content({}, "c") == (Message(Role.USER),)


def test_media_and_unknown_parts_stay_in_place():
    odd = {"videoMetadata": {"fps": 1}}
    [message] = read_parts_of(
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
    [message] = read_parts_of("function", part)
    assert (message.role, message.text, message.tool_call_id) == (Role.TOOL, text, "1")


def test_a_function_response_may_hold_media():
    image = {"inline_data": {"mime_type": "image/png", "data": "aGk="}}
    part = {"function_response": {"name": "f", "response": {"output": "o"}, "parts": [image]}}
    before, message = read_parts_of("user", {"text": "first"}, part)
    assert before.text == "first"
    assert message.content == (TextPart("o"), data_part("image/png", "aGk="))


def test_text_after_a_call_is_a_message_of_its_own():
    call = {"functionCall": {"name": "f", "args": {"a": 1}, "id": ""}, "thoughtSignature": "a-_8"}
    assert read_parts_of(
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
def test_invalid_contents_are_refused_by_their_path(content, path):
    with pytest.raises(RequestError) as raised:
        read_content(content, "c")
    assert raised.value.param == path


def parsed(model, *tools):
    wire = DIALECTS[Dialect.GOOGLE]
    body = {"contents": [{"role": "user", "parts": [{"text": "go"}]}], "tools": list(tools)}
    route = Route(Dialect.GOOGLE, RouteKind.GENERATE, model=model, stream=False)
    return wire.parse(route, encode(body), {})


def names(request):
    return [spec.name for spec in request.tools]


def test_the_computer_use_tool_is_declared_as_the_functions_of_its_client_libraries():
    tool = {"computerUse": {"environment": "ENVIRONMENT_BROWSER"}}
    newer, older = parsed("policy", tool), parsed("gemini-2.5-computer-use-preview-10-2025", tool)
    assert {"click", "type", "scroll", "hotkey", "take_screenshot"} <= set(names(newer))
    assert {"click_at", "type_text_at", "scroll_document", "wait_5_seconds"} <= set(names(older))
    assert "navigate" in names(newer)
    assert "navigate" in names(older)
    assert newer.extra["removed"] == older.extra["removed"] == {}


def test_excluded_functions_of_computer_use_are_not_shown():
    tool = {"computer_use": {"excluded_predefined_functions": ["navigate", "drag_and_drop"]}}
    shown = names(parsed("m", tool, {"functionDeclarations": [{"name": "own"}]}))
    assert shown[-1] == "own"
    assert not {"navigate", "drag_and_drop"} & set(shown)


def test_a_declared_function_takes_the_place_of_the_predefined_one_of_its_name():
    own = {"name": "navigate", "description": "Mine."}
    request = parsed("m", {"computerUse": {}, "functionDeclarations": [own]})
    assert [spec.description for spec in request.tools if spec.name == "navigate"] == ["Mine."]


def test_computer_use_of_a_mobile_device_is_removed_as_a_provider_tool():
    request = parsed("m", {"computerUse": {"environment": "ENVIRONMENT_MOBILE"}})
    assert (request.tools, request.extra["removed"]) == ((), {"server_tools": ["computerUse"]})


@pytest.mark.parametrize("older", [True, False])
def test_every_required_argument_of_an_action_is_described(older):
    for spec in computer_use({}, "tools[0].computerUse", older=older) or ():
        assert spec.parameters is not None
        assert set(spec.parameters["required"]) <= spec.parameters["properties"].keys()
        assert spec.description


def test_computer_use_actions_depend_on_the_model_name():
    assert speaks_older("models/gemini-2.5-pro")
    assert speaks_older("gemini-3-flash-preview")
    assert not speaks_older("gemini-3.5-flash")
    assert not speaks_older("policy")


def test_a_reply_that_comes_back_with_a_part_for_each_piece_is_left_to_parse():
    kept = {"role": "model", "parts": [{"text": "I see.", "thought": True}, {"text": 'a "text"'}]}
    pieces = {"role": "model", "parts": [{"text": piece} for piece in ("I ", "see", ".")]}
    after = encode(HI[0])
    assert WIRE.read_new([encode(kept), after]) is not None
    assert WIRE.read_new([encode(pieces), after]) is None
