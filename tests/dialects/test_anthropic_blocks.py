import pytest

from bridle.dialects.anthropic import read_message, read_system
from bridle.dialects.media import block_part, data_part, url_part
from bridle.errors import RequestError
from bridle.types import Message, Role, TextPart, ToolCall


def read(role, content):
    return read_message({"role": role, "content": content}, "messages[0]")


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_a_string_is_one_text_block_and_empty_text_is_none(role):
    for some in ("go", [{"type": "text", "text": "go"}], ["go"]):
        [message] = read(role, some)
        assert message.content == (TextPart("go"),)
    null = () if role == "user" else (None,)  # a user's is refused
    for nothing in (
        "",
        *null,
        [],
        [{"type": "text", "text": ""}],
        [{"type": "text", "text": None}],
    ):
        [message] = read(role, nothing)
        assert message == Message(Role(role))


def test_results_stand_in_the_order_of_their_blocks():
    messages = read(
        "user",
        [
            {"type": "text", "text": "before"},
            {"type": "tool_result", "tool_use_id": "b"},
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "A"}]},
            {"type": "text", "text": "after"},
        ],
    )
    assert [(m.role, m.text, m.tool_call_id) for m in messages] == [
        (Role.USER, "before", None),
        (Role.TOOL, "", "b"),
        (Role.TOOL, "A", "a"),
        (Role.USER, "after", None),
    ]


def test_text_after_a_call_is_a_message_of_its_own():
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    messages = read(
        "assistant",
        [
            {"type": "thinking", "thinking": "hm", "signature": "s1"},
            {"type": "text", "text": "first"},
            call,
            {"type": "text", "text": ""},
            {"type": "text", "text": "second"},
            {"type": "redacted_thinking", "data": "s2"},
            {"type": "thinking"},
        ],
    )
    assert messages == (
        Message(
            Role.ASSISTANT,
            (TextPart("first"),),
            reasoning="hm",
            tool_calls=(ToolCall("1", "f", '{"a":1}'),),
            issued_ids=("s1",),
        ),
        Message(Role.ASSISTANT, (TextPart("second"),), issued_ids=("s2",)),
    )


def test_media_of_every_source():
    def image(**source):
        return {"type": "image", "source": source}

    odd = {"type": "document", "source": {"type": "file", "file_id": "f"}, "title": None}
    [message] = read(
        "user",
        [
            image(type="base64", media_type="image/jpeg", data="aGk="),
            image(type="base64", data="aGk="),
            image(type="url", url="https://example.org/a.png"),
            {"type": "document", "source": {"type": "text", "data": ""}},
            odd,
            {"type": "image"},
        ],
    )
    assert message.content == (
        data_part("image/jpeg", "aGk="),
        data_part("image/*", "aGk="),
        url_part("https://example.org/a.png", "image/*"),
        block_part(odd),
        block_part({"type": "image"}),
    )


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "user", "content": [7]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": 7}]}, "messages[0].content[0].type"),
        (
            {"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]},
            "messages[0].content[0].source.url",
        ),
        (
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]},
            "messages[0].content[0].name",
        ),
    ],
)
def test_wrong_blocks_are_named(message, path):
    with pytest.raises(RequestError) as told:
        read_message(message, "messages[0]")
    assert told.value.param == path


def test_a_system_string_is_never_noise():
    text = "x-anthropic-billing-header: said by the user"
    messages, removed = read_system(text, "system", ("claude_billing_header",))
    assert messages == (Message(Role.SYSTEM, (TextPart(text),)),)
    assert removed == {}
