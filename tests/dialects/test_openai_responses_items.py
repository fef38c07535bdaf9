import pytest

from bridle.dialects.media import block_part, data_part, url_part
from bridle.dialects.openai_responses import join_turn, read_item, read_parts
from bridle.dialects.openai_responses_write import compacted
from bridle.errors import RequestError
from bridle.types import Message, Role, TextPart, ToolCall


def read(**item):
    [message] = read_item(item, "input[0]")
    return message


def test_messages_with_and_without_a_type():
    told = read(role="user", content=[{"type": "input_text", "text": "a"}, "b"])
    assert told == read(type="message", role="user", content=["a", {"type": "text", "text": "b"}])
    assert read(role="developer", content="x").role is Role.SYSTEM
    ours = read(role="assistant", id="msg_1", content=[{"type": "refusal", "refusal": "no"}])
    assert (ours.text, ours.issued_ids) == ("no", ("msg_1",))
    assert read(role="user", id="msg_2", content="x").issued_ids == ()


def test_reasoning_is_its_content_or_its_summary():
    summary = [{"type": "summary_text", "text": "s"}, {"type": "summary_text", "text": "t"}]
    content = [{"type": "reasoning_text", "text": "c"}]
    assert read(type="reasoning", summary=summary).reasoning == "s\nt"
    assert read(type="reasoning", summary=summary, content=content).reasoning == "c"
    told = read(type="reasoning", summary=[], content=None, id="rs", encrypted_content="e")
    assert (told.reasoning, told.issued_ids) == ("", ("rs", "e"))


def test_a_compaction_item_of_ours_is_its_summary():
    told = read(type="compaction", id="c", encrypted_content=compacted("all é"))
    assert told.role is Role.USER
    assert told.text.endswith("all é")


@pytest.mark.parametrize("foreign", ["gAAAA", "bridle1.%%%", "bridle1._w==", None])
def test_a_compaction_item_of_another_provider_is_refused(foreign):
    with pytest.raises(RequestError, match="compaction item of another provider") as caught:
        read(type="compaction_summary", encrypted_content=foreign)
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
def test_calls_of_every_kind(item, call):
    assert read(**item).tool_calls == (call,)


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
def test_results_of_every_kind(item, text):
    told = read(**item, call_id="c")
    assert (told.role, told.text, told.tool_call_id) == (Role.TOOL, text, "c")


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
def test_what_the_provider_ran_is_shown_as_text(item, text):
    told = read(**item)
    assert (told.role, told.tool_call_id) == (Role.ASSISTANT, None)
    assert told.text == (text or '[program_output] {"call_id":"c","result":"4"}\n')


def test_a_call_of_an_unknown_kind_that_the_client_answers_is_a_call():
    told = read(type="odd_call", id="o", call_id="c", status="completed", what=1)
    assert told.tool_calls == (ToolCall("c", "odd", '{"what":1}'),)


def test_a_screenshot_is_a_picture():
    shot = {"type": "computer_screenshot", "image_url": "data:image/png;base64,aGk="}
    told = read(type="computer_call_output", call_id="c", output=shot)
    assert told.content == (data_part("image/png", "aGk="),)
    told = read(type="function_call_output", call_id="c", output={"image_url": "u"})
    assert told.text == '{"image_url":"u"}'


@pytest.mark.parametrize("kind", ["tool_search_call", "tool_search_output"])
def test_a_tool_search_of_the_provider_is_text_and_one_of_the_client_is_not(kind):
    told = read(type=kind, call_id=None, execution="server", status="completed", tools=[])
    assert (told.role, told.tool_calls) == (Role.ASSISTANT, ())
    assert told.text.startswith(f"[{kind}] ")
    told = read(type=kind, call_id="c", execution="client", arguments={}, tools=[])
    assert "c" in (told.tool_call_id, *(call.id for call in told.tool_calls))


def test_unknown_items_stay_in_place():
    search = {"type": "odd_call", "id": "ws"}
    assert read(**search) == Message(Role.ASSISTANT, (block_part(search),))
    odd = {"type": "odd", "x": 1}
    assert read(**odd) == Message(Role.USER, (block_part(odd),))
    assert read(type="mcp_call_output", id=7).tool_call_id is None


def test_parts_of_every_kind():
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
def test_wrong_items_are_named(item, path):
    with pytest.raises(RequestError) as told:
        read_item(item, "i")
    assert told.value.param == path


def test_a_reference_to_an_item_is_not_found():
    with pytest.raises(RequestError, match="msg_1") as told:
        read_item({"type": "item_reference", "id": "msg_1"}, "i")
    assert (told.value.status, told.value.code) == (404, "not_found")


def test_what_joins_one_turn():
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
