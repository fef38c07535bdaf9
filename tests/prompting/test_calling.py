"""A grammar for required calls writes them as the model's own template does."""

import json

import pytest

from bridle.prompting.renderer import call_grammar, load_renderer
from bridle.types import Message, Role, TextPart, ToolCall, ToolSpec

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = (ToolSpec("look", None, SCHEMA), ToolSpec("wait", "Wait.", None))


def calls_of(grammar):
    return grammar["format"]["elements"][1]


def test_a_required_call_is_one_of_all_tools_and_a_named_one_is_that_tool():
    every = calls_of(call_grammar("qwen3", TOOLS, "required"))
    assert [json.loads(tag["begin"].split("\n")[1] + "0}")["name"] for tag in every["tags"]] == [
        "look",
        "wait",
    ]
    assert [tag["content"]["json_schema"] for tag in every["tags"]] == [SCHEMA, {"type": "object"}]
    only = calls_of(call_grammar("qwen3", TOOLS, "wait"))
    assert [tag["begin"].count("wait") for tag in only["tags"]] == [1]
    assert only["at_least_one"]


@pytest.mark.parametrize(
    ("form", "tools", "choice"),
    [
        ("glm-4.5", TOOLS, "required"),
        (None, TOOLS, "required"),
        ("qwen3", (), "required"),
        ("qwen3", TOOLS, "x"),
    ],
)
def test_without_a_known_call_syntax_or_tool_there_is_no_call_grammar(form, tools, choice):
    assert call_grammar(form, tools, choice) is None


def test_the_call_grammar_s_tags_are_those_that_the_chat_template_writes():
    renderer = load_renderer("builtin")
    call = ToolCall("c", "look", '{"path": "a"}')
    messages = (
        Message(Role.USER, (TextPart("go"),)),
        Message(Role.ASSISTANT, tool_calls=(call,)),
        Message(Role.TOOL, (TextPart("r"),), tool_call_id="c"),
    )
    shown = renderer.decode(renderer.render(messages, TOOLS, thinking=None))
    grammar = renderer.call_grammar(TOOLS, "look")
    assert grammar is not None
    [tag] = calls_of(grammar)["tags"]
    assert f'{tag["begin"]}{{"path": "a"}}{tag["end"]}' in shown
