import json

import pytest
from tests.dialects.exchange import CALLS, HEAD, THOUGHT, USAGE, parse

from bridle.dialects import DIALECTS
from bridle.dialects.anthropic import read_message, read_system
from bridle.dialects.fields import BILLING
from bridle.dialects.media import block_part, data_part, url_part
from bridle.errors import RequestError
from bridle.types import Dialect, MediaPart, Message, Role, TextPart, ToolCall

WIRE = DIALECTS[Dialect.ANTHROPIC]
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
BILLED = [
    {"type": "text", "text": "x-anthropic-billing-header: v=1; cc_is_subagent=true;"},
    {"type": "text", "text": "You are a helper."},
]


def read(**fields):
    return parse(Dialect.ANTHROPIC, {"model": "m", "max_tokens": 9, "messages": HI, **fields})


def test_a_system_field_becomes_the_first_message_and_system_messages_keep_their_place():
    request = read(system="rules", messages=[*HI, {"role": "system", "content": "note"}])
    assert [message.role for message in request.messages] == [Role.SYSTEM, Role.USER, Role.SYSTEM]
    assert request.head_messages == 1
    assert request.span_lengths == (1, 1)
    assert read(system="").head_messages == read(system=[]).head_messages == 0


def test_the_billing_block_is_removed_and_recorded():
    request = read(system=BILLED)
    assert request.messages[0].text == "You are a helper."
    assert "cc_is_subagent=true" in request.extra["removed"][BILLING.name][0]
    assert b"billing" in request.head
    only = read(system=BILLED[:1])
    assert (only.head_messages, only.messages[0].role) == (0, Role.USER)


@pytest.mark.parametrize(
    ("choice", "read_as"),
    [
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "f"}, "f"),
        ({"type": "tool", "name": "later"}, "later"),
    ],
)
def test_tool_choice_is_read_as_a_mode_or_a_tool_name(choice, read_as):
    later = {"name": "later", "input_schema": {}, "defer_loading": True}
    request = read(tools=[*TOOLS, later], tool_choice=choice)
    assert request.tool_choice == read_as
    assert [tool.name for tool in request.tools] == ["f"]


@pytest.mark.parametrize(
    "choice", [{"type": "odd"}, {"type": "tool"}, {"type": "tool", "name": "g"}]
)
def test_a_tool_choice_that_names_nothing_is_refused(choice):
    with pytest.raises(RequestError, match=r"tool_choice|Tool choice"):
        read(tools=TOOLS, tool_choice=choice)


def test_top_k_zero_means_all():
    assert read(top_k=0).sampling.top_k == -1
    assert read(top_k=5).sampling.top_k == 5


def test_a_deferred_tool_is_shown_where_a_result_refers_to_it():
    later = {"name": "later", "input_schema": {"a": 1}, "defer_loading": True}
    blocks = [
        {"type": "text", "text": "found"},
        {"type": "tool_reference", "tool_name": "later"},
        {"type": "odd"},
    ]
    result = {"type": "tool_result", "tool_use_id": "t", "content": blocks}
    messages = [*HI, {"role": "user", "content": [result]}]
    plain, shown = read(messages=messages), read(messages=messages, tools=[later])
    assert shown.messages[0] == plain.messages[0]
    assert isinstance(plain.messages[1].content[1], MediaPart)
    first, loaded, odd = shown.messages[1].content
    assert first == TextPart("found")
    assert json.loads(loaded.text)["parameters"] == {"a": 1}
    assert isinstance(odd, MediaPart)
    text_only = [*HI, {"role": "user", "content": [{**result, "content": "x"}]}]
    assert read(messages=text_only, tools=[later]).messages[1].text == "x"


def test_thinking_is_shown_only_if_requested():
    asked = {"thinking": {"type": "adaptive"}}
    hidden = {"thinking": {"type": "enabled", "display": "omitted"}}
    shown = [
        json.loads(WIRE.reply_json(read(**extra), HEAD, THOUGHT, USAGE))["content"][0]
        for extra in ({}, {"thinking": {"type": "disabled"}}, asked, hidden)
    ]
    assert [block["type"] for block in shown] == ["text", "text", "thinking", "thinking"]
    assert [block.get("thinking") for block in shown[2:]] == ["Two and two.", ""]
    assert all(block["signature"] for block in shown[2:])


def test_a_reply_s_signature_and_call_ids_are_read_back():
    request = read(thinking={"type": "enabled"})
    [message] = WIRE.reply_messages(WIRE.reply_json(request, HEAD, CALLS, USAGE))
    assert isinstance(message, Message)
    assert len(message.issued_ids) == 1
    assert [call.id for call in message.tool_calls] == ["toolu_" + "a" * 24, "toolu_" + "b" * 24]


def test_response_schemas_are_read_from_output_config_and_output_format():
    schema = {"type": "object"}
    form = {"type": "json_schema", "schema": schema}
    assert read(output_config={"format": form}).response_schema == schema
    assert read(output_format=form).response_schema == schema
    assert read(output_config={"format": {"type": "json_schema"}}).response_schema == {}
    assert read(output_config={"format": {"type": "text"}}).response_schema is None


def last(content, **fields):
    body = {"model": "m", "max_tokens": 9, **fields}
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": content}]
    return parse(Dialect.ANTHROPIC, {**body, "messages": turns})


def test_last_assistant_text_is_a_prefill():
    assert last("It is").prefill == "It is"
    assert last([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]).prefill == "ab"
    assert last("").prefill is None
    assert last([{"type": "tool_use", "id": "t", "name": "f", "input": {}}]).prefill is None
    assert last("x").messages[-1].text == "x"


@pytest.mark.parametrize(
    ("content", "fields", "words"),
    [
        ("It is ", {}, "trailing whitespace"),
        ("It is", {"thinking": {"type": "enabled"}}, "thinking block"),
    ],
)
def test_a_prefill_that_anthropic_refuses_is_refused(content, fields, words):
    with pytest.raises(RequestError, match=words) as raised:
        last(content, **fields)
    assert raised.value.param == "messages"


def test_a_prefill_after_a_thinking_block_is_accepted_with_thinking_enabled():
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "It is"},
    ]
    assert last(content, thinking={"type": "enabled"}).prefill == "It is"


def read_content(role, content):
    return read_message({"role": role, "content": content}, "messages[0]")


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_string_content_is_one_text_block_and_empty_text_is_no_block(role):
    for some in ("go", [{"type": "text", "text": "go"}], ["go"]):
        [message] = read_content(role, some)
        assert message.content == (TextPart("go"),)
    null = () if role == "user" else (None,)  # a user's is refused
    for nothing in (
        "",
        *null,
        [],
        [{"type": "text", "text": ""}],
        [{"type": "text", "text": None}],
    ):
        [message] = read_content(role, nothing)
        assert message == Message(Role(role))


def test_tool_results_and_texts_keep_the_order_of_their_blocks():
    messages = read_content(
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
    messages = read_content(
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


def test_media_blocks_of_every_source_type_become_media_parts():
    def image(**source):
        return {"type": "image", "source": source}

    odd = {"type": "document", "source": {"type": "file", "file_id": "f"}, "title": None}
    [message] = read_content(
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
def test_invalid_content_blocks_are_refused_by_their_path(message, path):
    with pytest.raises(RequestError) as raised:
        read_message(message, "messages[0]")
    assert raised.value.param == path


def test_a_system_string_that_looks_like_a_billing_header_is_kept():
    text = "x-anthropic-billing-header: said by the user"
    messages, removed = read_system(text, "system")
    assert messages == (Message(Role.SYSTEM, (TextPart(text),)),)
    assert removed == {}


def test_results_of_a_search_are_text_and_files_of_the_provider_are_refused():
    found = {"type": "search_result", "title": "T", "source": "s", "content": ["words"]}
    parsed = read(messages=[{"role": "user", "content": [found]}]).messages[0]
    assert parsed.text == "T\ns\nwords"
    for block, why in (
        ({"type": "container_upload", "file_id": "f"}, "files are not kept here"),
        ({"type": "compaction", "encrypted_content": "x"}, "content is encrypted"),
    ):
        with pytest.raises(RequestError, match=why):
            read(messages=[{"role": "user", "content": [block]}])
