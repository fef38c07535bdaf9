import pytest

from bridle.dialects.openai_chat import read_choice, read_options, read_schema, read_thinking
from bridle.dialects.tools import ToolList
from bridle.errors import RequestError
from bridle.types import ToolSpec

TOOLS = ToolList((ToolSpec("f", None, None),))


@pytest.mark.parametrize(
    ("head", "read_as"),
    [
        ({}, "auto"),
        ({"tool_choice": None}, "auto"),
        ({"tool_choice": "none"}, "none"),
        ({"tool_choice": "required"}, "required"),
        ({"tool_choice": "any"}, "required"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "f"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "f"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "f"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "required"}}, "required"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "auto"),
        ({"tool_choice": {"type": "allowed_tools"}}, "auto"),
        ({"tool_choice": {"type": "web_search"}}, "auto"),
        ({"tool_choice": {"type": "mcp", "name": "f"}}, "f"),
        ({"function_call": {"name": "f"}}, "f"),
        ({"function_call": "auto"}, "auto"),
    ],
)
def test_tool_choices(head, read_as):
    assert read_choice(head, TOOLS) == read_as


@pytest.mark.parametrize(
    ("choice", "path"),
    [
        ("sometimes", "tool_choice"),
        (7, "tool_choice"),
        ({}, "tool_choice.type"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        ({"type": "function", "function": 7}, "tool_choice.function"),
        ({"type": "function", "name": "g"}, "tool_choice"),
    ],
)
def test_a_choice_of_nothing_is_refused(choice, path):
    with pytest.raises(RequestError) as told:
        read_choice({"tool_choice": choice}, TOOLS)
    assert told.value.param == path


def test_budgets_in_both_names():
    assert read_options({"max_tokens": 5}).max_tokens == 5
    assert read_options({"max_tokens": 5, "max_completion_tokens": 6}).max_tokens == 6
    assert read_options({"max_completion_tokens": None}).max_tokens is None
    with pytest.raises(RequestError, match="'max_completion_tokens'"):
        read_options({"max_completion_tokens": 0})


def test_additions_of_open_servers():
    told = read_options({"top_k": 0, "min_tokens": 2, "stop_token_ids": [1, 2], "stop": None})
    assert (told.top_k, told.min_tokens, told.stop_token_ids, told.stop) == (-1, 2, (1, 2), ())


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({}, None),
        ({"type": "json_object"}, {}),
        ({"type": "json_schema"}, {}),
        ({"type": "json_schema", "json_schema": {"schema": {"a": 1}}}, {"a": 1}),
    ],
)
def test_answers_by_schema(form, schema):
    assert read_schema({"response_format": form}) == schema


@pytest.mark.parametrize(
    ("head", "thinking"),
    [
        ({}, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"enable_thinking": True}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"effort": "high"}}, None),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, None),
    ],
)
def test_thinking_is_switched_in_any_form(head, thinking):
    assert read_thinking(head) is thinking
