import json

import pytest
from tests.dialects.exchange import CALLS, HEAD, TEXT, THOUGHT, USAGE, parse

from bridle.dialects import DIALECTS
from bridle.dialects.base import RouteKind
from bridle.errors import RequestError
from bridle.types import Dialect, Role

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
def test_tool_choices(calling, read_as):
    request = read(tools=TOOLS, toolConfig={"functionCallingConfig": calling})
    assert request.tool_choice == read_as


def test_an_unknown_mode_is_refused():
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
def test_thinking(thinking, read_as):
    assert config(thinkingConfig=thinking).thinking is read_as


def test_answers_by_schema():
    schema = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}
    plain = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert config(responseSchema=schema).response_schema == plain
    assert config(response_json_schema=plain).response_schema == plain
    assert config(responseMimeType="application/json").response_schema == {}
    assert config(responseMimeType="text/plain").response_schema is None


def test_only_one_candidate_is_sampled():
    assert config(candidateCount=1).sampling.top_k is None
    with pytest.raises(RequestError, match="one candidate") as told:
        config(candidateCount=2)
    assert told.value.param == "generationConfig.candidateCount"
    assert config(topK=0).sampling.top_k == -1


def test_counting_takes_a_whole_request_too():
    inner = {"model": "models/my-model", "contents": HI, "systemInstruction": "be brief"}
    path = "/v1beta/models/my-model:countTokens"
    for key in ("generateContentRequest", "generate_content_request"):
        request = parse(Dialect.GOOGLE, {key: inner}, path)
        assert [message.role for message in request.messages] == [Role.SYSTEM, Role.USER]


def test_contents_may_be_one_content():
    request = parse(Dialect.GOOGLE, {"contents": HI[0]})
    assert request.messages[0].text == "hi"
    assert request.span_lengths == (1,)


def test_calls_have_ids_and_signatures_and_text_has_one_where_there_is_no_call():
    request = read()
    with_calls = json.loads(WIRE.reply_json(request, HEAD, CALLS, USAGE))
    text, first, second = with_calls["candidates"][0]["content"]["parts"]
    assert "thoughtSignature" not in text
    assert first["thoughtSignature"] != second["thoughtSignature"]
    assert first["functionCall"]["id"] == CALLS.tool_calls[0].id
    plain = json.loads(WIRE.reply_json(request, HEAD, TEXT, USAGE))
    assert plain["candidates"][0]["content"]["parts"][0]["thoughtSignature"]


def test_thoughts_are_shown_only_where_they_were_asked_for():
    for asked in (False, True):
        request = config(thinkingConfig={"includeThoughts": asked})
        parts = json.loads(WIRE.reply_json(request, HEAD, THOUGHT, USAGE))["candidates"][0]
        assert ("thought" in parts["content"]["parts"][0]) is asked


def test_one_model_is_shown_by_its_name():
    route = WIRE.route("GET", "/v1beta/models/x", "", {})
    assert route is not None
    assert route.kind is RouteKind.MODEL
    assert json.loads(WIRE.models(route, [], 9))["inputTokenLimit"] == 9
