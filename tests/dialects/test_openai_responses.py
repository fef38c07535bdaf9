import json

import pytest
from tests.dialects.exchange import CALLS, HEAD, TEXT, USAGE, parse

from bridle.dialects import recognise
from bridle.dialects.base import StoredReply
from bridle.dialects.json_reader import content_digest
from bridle.dialects.openai_responses import OpenAIResponses
from bridle.errors import RequestError
from bridle.types import Dialect, Role

WIRE = OpenAIResponses()
HI = {"role": "user", "content": "hi"}


def read(*items, **fields):
    return parse(Dialect.OPENAI_RESPONSES, {"model": "m", "input": list(items) or [HI], **fields})


def test_a_string_is_a_users_message():
    request = read(input="hi")
    assert request.messages == read().messages
    assert json.loads(request.message_spans[0]) == HI


def test_the_items_of_a_turn_are_one_message_and_one_span():
    reasoning = {
        "type": "reasoning",
        "id": "rs",
        "summary": [{"type": "summary_text", "text": "w"}],
    }
    said = {"type": "message", "role": "assistant", "content": "ok"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "r"}
    request = read(HI, reasoning, said, call, call, result)
    assert [m.role for m in request.messages] == [Role.USER, Role.ASSISTANT, Role.TOOL]
    turn = request.messages[1]
    assert (turn.reasoning, turn.text, len(turn.tool_calls)) == ("w", "ok", 2)
    assert request.span_lengths == (1, 1, 1)
    assert json.loads(b"[" + request.message_spans[1] + b"]") == [reasoning, said, call, call]
    assert request.span_digests == tuple(content_digest(span) for span in request.message_spans)


def test_turns_that_stand_side_by_side_stay_two():
    """Codex after a cut keeps the completed items and appends the next turn's."""
    reasoning = {"type": "reasoning", "summary": []}
    said = {"type": "message", "role": "assistant", "content": "ok"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    kept = read(HI, reasoning, said)
    request = read(HI, reasoning, said, reasoning, call, said)
    assert [(m.text, len(m.tool_calls)) for m in request.messages[1:]] == [
        ("ok", 0),
        ("", 1),
        ("ok", 0),
    ]
    assert request.span_digests[: len(kept.span_digests)] == kept.span_digests


def test_instructions_are_the_heads_message():
    request = read(instructions="rules")
    assert (request.messages[0].role, request.head_messages) == (Role.SYSTEM, 1)
    told = read(instructions=[{"role": "developer", "content": "rules"}])
    assert told.messages == request.messages
    assert read(instructions="").head_messages == 0


def test_tools_may_come_as_an_item():
    item = {"type": "additional_tools", "tools": [{"type": "function", "name": "g"}]}
    request = read(item, HI, tools=[{"type": "function", "name": "f"}])
    assert [tool.name for tool in request.tools] == ["f", "g"]
    assert request.span_lengths == (0, 1)
    assert read({"type": "additional_tools"}, HI).tools == ()
    broken = {"type": "additional_tools", "tools": [{"type": "function"}]}
    with pytest.raises(RequestError) as told:
        read(HI, broken)
    assert told.value.param == "input[1].tools[0].name"


@pytest.mark.parametrize("key", ["background", "conversation", "prompt"])
def test_what_needs_the_providers_own_store_is_refused(key):
    with pytest.raises(RequestError, match=key):
        read(**{key: True})
    assert read(**{key: None}).model == "m"


def test_a_request_is_continued_from_stored_items():
    first = read(HI)
    reply = WIRE.reply_json(first, HEAD, CALLS, USAGE)
    results = [
        {"type": "function_call_output", "call_id": call.id, "output": "r"}
        for call in CALLS.tool_calls
    ]
    body = {"model": "m", "input": results, "previous_response_id": f"resp_{HEAD.reply_id}"}
    assert parse(Dialect.OPENAI_RESPONSES, body).extra["previous"]
    kept = StoredReply(first.message_spans, reply, first.head)
    whole = json.loads(WIRE.continued(json.dumps(body).encode(), kept))
    assert list(whole)[-2:] == ["input", "previous_response_id"]
    request = parse(Dialect.OPENAI_RESPONSES, whole)
    assert request.messages[:2] == (*first.messages, *WIRE.reply_messages(reply))
    assert [m.role for m in request.messages[2:]] == [Role.TOOL, Role.TOOL]
    bare = {"model": "m", "previous_response_id": "resp_x"}
    again = json.loads(WIRE.continued(json.dumps(bare).encode(), kept))
    assert len(again["input"]) == 5
    assert parse(Dialect.OPENAI_RESPONSES, bare).messages == ()


def test_what_a_compaction_stands_for_is_not_gone_on_from():
    compacting = read(HI, {"type": "compaction_trigger"})
    reply = WIRE.reply_json(compacting, HEAD, TEXT, USAGE)
    [item] = WIRE.history(StoredReply(compacting.message_spans, reply, compacting.head))
    assert json.loads(item)["type"] == "compaction"


def test_a_compaction_can_be_a_route_of_its_own():
    route = recognise("POST", "/v1/responses/compact", "", {})
    assert route is not None
    body = {"model": "m", "input": [HI], "stream": True}
    request = WIRE.parse(route, json.dumps(body).encode(), {})
    assert (request.stream, request.tool_choice) == (False, "none")
    assert len(request.message_spans) == 2
    whole = json.loads(WIRE.reply_json(request, HEAD, TEXT, USAGE))
    assert whole["object"] == "response.compaction"
    assert [item["type"] for item in whole["output"]] == ["compaction"]
    kept = WIRE.body(request.head, request.message_spans, request.tools_span)
    again = WIRE.parse(route_of("/v1/responses"), kept, {})
    assert again.messages == request.messages


def route_of(path):
    route = recognise("POST", path, "", {})
    assert route is not None
    return route


@pytest.mark.parametrize(
    ("method", "path", "action"),
    [
        ("GET", "resp_1", "get"),
        ("DELETE", "resp_1", "delete"),
        ("GET", "resp_1/input_items", "input_items"),
        ("POST", "resp_1/cancel", "cancel"),
    ],
)
def test_what_is_asked_of_a_kept_reply_is_in_its_path(method, path, action):
    route = recognise(method, f"/any/v1/responses/{path}/", "", {})
    assert route is not None
    assert (route.kind, route.resource, route.action) == ("stored", "resp_1", action)


def test_answers_by_schema():
    def form(**fields):
        return read(text={"format": fields}).response_schema

    assert form(type="json_schema", schema={"a": 1}) == {"a": 1}
    assert form(type="json_schema") == form(type="json_object") == {}
    assert form(type="text") is form() is None


def test_reasoning_that_is_switched_off():
    assert read(reasoning={"effort": "none"}).thinking is False
    assert read(reasoning={"effort": "low"}).thinking is None
    assert read(top_k=0).sampling.top_k == -1


def test_a_compaction_asks_for_text_and_gives_one_item():
    request = read(HI, {"type": "compaction_trigger"}, tools=[{"type": "function", "name": "f"}])
    assert (request.tool_choice, len(request.tools)) == ("none", 1)
    whole = json.loads(WIRE.reply_json(request, HEAD, TEXT, USAGE))
    [item] = whole["output"]
    assert item["type"] == "compaction"
    [back] = read(item).messages
    assert back.text.endswith(TEXT.content)


def test_a_reply_does_not_repeat_what_grows():
    request = read(instructions="rules", tools=[{"type": "function", "name": "f"}], store=False)
    whole = json.loads(WIRE.reply_json(request, HEAD, TEXT, USAGE))
    assert (whole["tools"], whole["instructions"], whole["store"]) == ([], None, False)


def test_models_and_paths_of_other_apis():
    route = recognise("GET", "/v1/models", "", {})
    assert route is not None
    stored = WIRE.route("PATCH", "/v1/responses", "", {})
    assert stored is not None
    assert stored.resource == "responses"
    assert json.loads(WIRE.models(route, ["m"], 9))["data"][0]["id"] == "m"
    assert WIRE.route("POST", "/v1/other", "", {}) is None
