import json

import pytest
from tests.dialects.exchange import CALLS, HEAD, TEXT, USAGE, parse

from bridle.dialects import recognise
from bridle.dialects.base import StoredReply
from bridle.dialects.json_reader import content_digest
from bridle.dialects.media import block_part, data_part, url_part
from bridle.dialects.openai_responses import OpenAIResponses, join_turn, read_item, read_parts
from bridle.dialects.openai_responses_write import compacted
from bridle.errors import RequestError
from bridle.types import Dialect, Message, Role, TextPart, ToolCall

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


def test_consecutive_assistant_turns_stay_separate_messages():
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
    parsed = read(instructions=[{"role": "developer", "content": "rules"}])
    assert parsed.messages == request.messages
    assert read(instructions="").head_messages == 0


def test_tools_may_come_as_an_item():
    item = {"type": "additional_tools", "tools": [{"type": "function", "name": "g"}]}
    request = read(item, HI, tools=[{"type": "function", "name": "f"}])
    assert [tool.name for tool in request.tools] == ["f", "g"]
    assert request.span_lengths == (0, 1)
    assert read({"type": "additional_tools"}, HI).tools == ()
    broken = {"type": "additional_tools", "tools": [{"type": "function"}]}
    with pytest.raises(RequestError) as raised:
        read(HI, broken)
    assert raised.value.param == "input[1].tools[0].name"


@pytest.mark.parametrize("key", ["background", "conversation", "prompt"])
def test_requests_for_provider_stored_state_are_refused(key):
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


def test_history_begins_at_a_compaction_item():
    compacting = read(HI, {"type": "compaction_trigger"})
    reply = WIRE.reply_json(compacting, HEAD, TEXT, USAGE)
    [item] = WIRE.history(StoredReply(compacting.message_spans, reply, compacting.head))
    assert json.loads(item)["type"] == "compaction"


def test_the_compact_route_answers_with_a_compaction_item():
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
def test_stored_reply_routes_name_id_and_action(method, path, action):
    route = recognise(method, f"/any/v1/responses/{path}/", "", {})
    assert route is not None
    assert (route.kind, route.resource, route.action) == ("stored", "resp_1", action)


def test_text_format_is_read_as_a_response_schema():
    def form(**fields):
        return read(text={"format": fields}).response_schema

    assert form(type="json_schema", schema={"a": 1}) == {"a": 1}
    assert form(type="json_schema") == form(type="json_object") == {}
    assert form(type="text") is form() is None


def test_reasoning_effort_none_switches_thinking_off():
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


def test_response_does_not_repeat_instructions_and_tools():
    request = read(instructions="rules", tools=[{"type": "function", "name": "f"}], store=False)
    whole = json.loads(WIRE.reply_json(request, HEAD, TEXT, USAGE))
    assert (whole["tools"], whole["instructions"], whole["store"]) == ([], None, False)


def test_models_are_listed_and_paths_outside_the_api_are_not_routed():
    route = recognise("GET", "/v1/models", "", {})
    assert route is not None
    stored = WIRE.route("PATCH", "/v1/responses", "", {})
    assert stored is not None
    assert stored.resource == "responses"
    assert json.loads(WIRE.models(route, ["m"], 9))["data"][0]["id"] == "m"
    assert WIRE.route("POST", "/v1/other", "", {}) is None


def read_one(**item):
    [message] = read_item(item, "input[0]")
    return message


def test_messages_are_read_alike_with_and_without_a_type():
    parsed = read_one(role="user", content=[{"type": "input_text", "text": "a"}, "b"])
    assert parsed == read_one(
        type="message", role="user", content=["a", {"type": "text", "text": "b"}]
    )
    assert read_one(role="developer", content="x").role is Role.SYSTEM
    ours = read_one(role="assistant", id="msg_1", content=[{"type": "refusal", "refusal": "no"}])
    assert (ours.text, ours.issued_ids) == ("no", ("msg_1",))
    assert read_one(role="user", id="msg_2", content="x").issued_ids == ()


def test_reasoning_is_its_content_or_its_summary():
    summary = [{"type": "summary_text", "text": "s"}, {"type": "summary_text", "text": "t"}]
    content = [{"type": "reasoning_text", "text": "c"}]
    assert read_one(type="reasoning", summary=summary).reasoning == "s\nt"
    assert read_one(type="reasoning", summary=summary, content=content).reasoning == "c"
    parsed = read_one(type="reasoning", summary=[], content=None, id="rs", encrypted_content="e")
    assert (parsed.reasoning, parsed.issued_ids) == ("", ("rs", "e"))


def test_a_compaction_item_is_read_as_a_user_message_with_its_summary():
    parsed = read_one(type="compaction", id="c", encrypted_content=compacted("all é"))
    assert parsed.role is Role.USER
    assert parsed.text.endswith("all é")


@pytest.mark.parametrize("foreign", ["gAAAA", "bridle1.%%%", "bridle1._w==", None])
def test_a_compaction_item_of_another_provider_is_refused(foreign):
    with pytest.raises(RequestError, match="compaction item of another provider") as caught:
        read_one(type="compaction_summary", encrypted_content=foreign)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("item", "call"),
    [
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{bad"},
            ToolCall("c", "f", "{bad"),
        ),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "raw"},
            ToolCall("c", "p", "raw", custom=True),
        ),
        (
            {"type": "shell_call", "id": "sh", "action": {"commands": ["ls"]}},
            ToolCall("sh", "shell", '{"commands":["ls"]}'),
        ),
    ],
)
def test_call_items_of_every_type_are_read_as_tool_calls(item, call):
    assert read_one(**item).tool_calls == (call,)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"type": "function_call_output", "output": "r"}, "r"),
        ({"type": "function_call_output", "output": [{"type": "input_text", "text": "r"}]}, "r"),
        ({"type": "function_call_output", "output": {"a": 1}}, '{"a":1}'),
        ({"type": "function_call_output"}, ""),
        ({"type": "shell_call_output", "output": [{"stdout": "r"}]}, '[{"stdout":"r"}]'),
        ({"type": "apply_patch_call_output", "status": "failed"}, '{"status":"failed"}'),
        ({"type": "tool_search_output", "tools": []}, '{"tools":[]}'),
    ],
)
def test_output_items_of_every_type_are_read_as_tool_results(item, text):
    parsed = read_one(**item, call_id="c")
    assert (parsed.role, parsed.text, parsed.tool_call_id) == (Role.TOOL, text, "c")


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (
            {"type": "web_search_call", "id": "ws", "action": {"type": "search", "query": "é"}},
            '[web_search_call] {"action":{"type":"search","query":"é"}}\n',
        ),
        (
            {"type": "image_generation_call", "id": "ig", "result": "aGk=" * 500},
            '[image_generation_call] {"result":"(2000 characters of data)"}\n',
        ),
        ({"type": "program_output", "call_id": "c", "result": "4"}, None),
    ],
)
def test_provider_run_items_are_shown_as_text(item, text):
    parsed = read_one(**item)
    assert (parsed.role, parsed.tool_call_id) == (Role.ASSISTANT, None)
    assert parsed.text == (text or '[program_output] {"call_id":"c","result":"4"}\n')


def test_a_call_of_an_unknown_kind_that_the_client_answers_is_a_call():
    parsed = read_one(type="odd_call", id="o", call_id="c", status="completed", what=1)
    assert parsed.tool_calls == (ToolCall("c", "odd", '{"what":1}'),)


def test_a_computer_screenshot_is_read_as_an_image_result():
    shot = {"type": "computer_screenshot", "image_url": "data:image/png;base64,aGk="}
    parsed = read_one(type="computer_call_output", call_id="c", output=shot)
    assert parsed.content == (data_part("image/png", "aGk="),)
    parsed = read_one(type="function_call_output", call_id="c", output={"image_url": "u"})
    assert parsed.text == '{"image_url":"u"}'


@pytest.mark.parametrize("kind", ["tool_search_call", "tool_search_output"])
def test_a_tool_search_of_the_provider_is_text_and_one_of_the_client_is_not(kind):
    parsed = read_one(type=kind, call_id=None, execution="server", status="completed", tools=[])
    assert (parsed.role, parsed.tool_calls) == (Role.ASSISTANT, ())
    assert parsed.text.startswith(f"[{kind}] ")
    parsed = read_one(type=kind, call_id="c", execution="client", arguments={}, tools=[])
    assert "c" in (parsed.tool_call_id, *(call.id for call in parsed.tool_calls))


def test_unknown_items_stay_in_place():
    search = {"type": "odd_call", "id": "ws"}
    assert read_one(**search) == Message(Role.ASSISTANT, (block_part(search),))
    odd = {"type": "odd", "x": 1}
    assert read_one(**odd) == Message(Role.USER, (block_part(odd),))
    assert read_one(type="mcp_call_output", id=7).tool_call_id is None


def test_media_parts_of_every_type_are_read_and_empty_text_is_dropped():
    image = {"type": "input_image", "file_id": "f"}
    parts = [
        {"type": "input_image", "image_url": "data:image/png;base64,aGk="},
        {"type": "input_file", "file_data": "data:text/plain;base64,aGk="},
        {"type": "input_file", "file_url": "https://example.org/a"},
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "mp3"}},
        {"type": "input_audio", "input_audio": {"data": "aGk="}},
        image,
        {"type": "output_text", "text": ""},
    ]
    assert tuple(read_parts(parts, "p")) == (
        data_part("image/png", "aGk="),
        data_part("text/plain", "aGk="),
        url_part("https://example.org/a", "application/octet-stream"),
        data_part("audio/mp3", "aGk="),
        data_part("audio/*", "aGk="),
        block_part(image),
    )


@pytest.mark.parametrize(
    ("item", "path"),
    [
        ({}, "i"),
        ({"role": "boss"}, "i.role"),
        ({"role": "user", "content": 7}, "i.content"),
        ({"role": "user", "content": [7]}, "i.content[0]"),
        ({"type": 7}, "i.type"),
        ({"type": "function_call"}, "i.name"),
        ({"type": "local_shell_call", "action": "ls"}, "i.action"),
        ({"type": "item_reference", "id": "msg_1"}, "i"),
    ],
)
def test_invalid_items_are_refused_by_their_path(item, path):
    with pytest.raises(RequestError) as raised:
        read_item(item, "i")
    assert raised.value.param == path


def test_an_unresolved_item_reference_is_a_404():
    with pytest.raises(RequestError, match="msg_1") as raised:
        read_item({"type": "item_reference", "id": "msg_1"}, "i")
    assert (raised.value.status, raised.value.code) == (404, "not_found")


def test_items_join_one_assistant_turn_in_the_order_reasoning_text_calls_only():
    thought = Message(Role.ASSISTANT, reasoning="a", issued_ids=("1",))
    more = Message(Role.ASSISTANT, reasoning="b", issued_ids=("2",))
    text = Message(Role.ASSISTANT, (TextPart("x"),), issued_ids=("3",))
    call = Message(Role.ASSISTANT, tool_calls=(ToolCall("c", "f", "{}"),))
    both = join_turn(thought, more)
    assert both is not None
    assert (both.reasoning, both.issued_ids) == ("a\nb", ("1", "2"))
    joined = join_turn(both, text)
    assert joined is not None
    assert join_turn(joined, call) is not None
    assert join_turn(call, call) is not None
    assert join_turn(call, text) is None
    assert join_turn(text, text) is None
    assert join_turn(text, thought) is None
    assert join_turn(Message(Role.USER), text) is None
    assert join_turn(text, Message(Role.USER)) is None


def test_references_to_kept_items_are_replaced_and_unknown_ones_stay():
    kept = b'{"role":"user","content":"kept"}'
    items = [{"type": "item_reference", "id": name} for name in ("a", "b")]
    body = json.dumps({"model": "m", "input": items}).encode()

    resolved = json.loads(WIRE.resolved(body, lambda name: kept if name == "a" else None))

    assert resolved["input"] == [json.loads(kept), items[1]]
    assert WIRE.resolved(b'{"input":"x"}', lambda _: None) == b'{"input":"x"}'
