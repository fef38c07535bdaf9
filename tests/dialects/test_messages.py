import json

from bridle.dialects.media import block_part, data_part, url_part
from bridle.dialects.openai_chat_write import chat_messages, chat_tools
from bridle.types import Message, Role, TextPart, ToolCall, ToolSpec


def test_text_is_joined_and_roles_stay():
    told = chat_messages(
        [
            Message(Role.SYSTEM, (TextPart("a"), TextPart("b"))),
            Message(Role.USER),
            Message(Role.USER),
        ]
    )
    assert told == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": ""},
        {"role": "user", "content": ""},
    ]


def test_an_assistant_turn_has_its_reasoning_and_calls():
    calls = (ToolCall("1", "f", "{bad"), ToolCall("2", "patch", "raw", custom=True))
    [told] = chat_messages([Message(Role.ASSISTANT, reasoning="why", tool_calls=calls)])
    assert (told["content"], told["reasoning_content"]) == (None, "why")
    assert told["tool_calls"][0]["function"] == {"name": "f", "arguments": "{bad"}
    assert json.loads(told["tool_calls"][1]["function"]["arguments"]) == {"input": "raw"}
    [plain] = chat_messages([Message(Role.ASSISTANT, (TextPart("x"),))])
    assert plain == {"role": "assistant", "content": "x"}


def test_a_result_names_its_call_and_tool():
    [told] = chat_messages([Message(Role.TOOL, (TextPart("r"),), tool_call_id="1", name="f")])
    assert told == {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"}


def test_media_keep_their_place():
    content = (
        TextPart("see"),
        data_part("image/png", "aGk="),
        data_part("audio/wav", "aGk="),
        url_part("https://example.org/a.pdf", "application/pdf"),
        block_part({"type": "odd", "n": 1}),
        data_part("application/json", "e30="),
    )
    [told] = chat_messages([Message(Role.USER, content)])
    assert told["content"] == [
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
