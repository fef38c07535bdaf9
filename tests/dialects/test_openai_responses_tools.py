import json

import pytest

from bridle.dialects.openai_responses_write import (
    call_of_item,
    item_of_call,
    qualified_name,
    read_tools,
)
from bridle.errors import RequestError
from bridle.types import ToolCall


def test_tool_names_are_qualified_by_their_namespace():
    assert qualified_name(None, "f") == qualified_name("", "f") == "f"
    assert qualified_name("ns", "f") == qualified_name("ns__", "f") == "ns__f"


def test_client_tools_of_every_type_become_functions_and_provider_tools_are_removed():
    parsed = read_tools(
        [
            {"type": "function", "name": "f", "description": "d", "strict": True},
            {"type": "custom", "name": "p", "format": {"type": "text"}},
            {
                "type": "namespace",
                "name": "ns",
                "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "p"}],
            },
            {"type": "apply_patch"},
            {"type": "web_search"},
            {"type": "tool_search"},
        ],
        "tools",
    )
    assert [spec.name for spec in parsed.specs] == ["f", "p", "ns__f", "ns__p", "apply_patch"]
    assert parsed.specs[0].strict
    assert parsed.freeform == {"p", "ns__p"}
    assert parsed.wire == {
        "ns__f": {"namespace": "ns", "name": "f"},
        "ns__p": {"namespace": "ns", "name": "p"},
        "apply_patch": {"type": "apply_patch"},
    }
    assert parsed.removed == {"server_tools": ["web_search", "tool_search"]}


@pytest.mark.parametrize(
    ("tools", "path"),
    [
        ([{}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "namespace", "name": "n", "tools": [7]}], "tools[0].tools[0]"),
        ([7], "tools[0]"),
        (7, "tools"),
    ],
)
def test_invalid_tools_are_refused_by_their_path(tools, path):
    with pytest.raises(RequestError) as raised:
        read_tools(tools, "tools")
    assert raised.value.param == path


@pytest.mark.parametrize(
    ("kind", "key", "given", "arguments"),
    [
        ("local_shell", "action", {"type": "exec", "command": ["ls"], "env": {}}, None),
        ("shell", "action", {"commands": ["ls"]}, None),
        ("apply_patch", "operation", {"type": "create_file", "path": "a", "diff": "+"}, None),
    ],
)
def test_call_items_of_special_tools_round_trip_through_tool_calls(kind, key, given, arguments):
    del arguments
    call = call_of_item({key: given}, f"{kind}_call", "c", "i")
    assert call is not None
    assert (call.name, call.id) == (kind, "c")
    item = item_of_call(kind, call.arguments)
    assert item == {"type": f"{kind}_call", key: given}


def test_a_tool_search_that_the_client_runs_is_a_function():
    schema = {"type": "object", "properties": {"goal": {"type": "string"}}}
    tool = {"type": "tool_search", "execution": "client", "description": "d", "parameters": schema}
    [spec] = read_tools([tool], "tools").specs
    assert (spec.name, spec.description, spec.parameters) == ("tool_search", "d", schema)
    item = item_of_call("tool_search", '{"goal":"mail"}')
    assert item == {
        "type": "tool_search_call",
        "execution": "client",
        "arguments": {"goal": "mail"},
    }
    call = call_of_item(item, "tool_search_call", "c", "i")
    assert call == ToolCall("c", "tool_search", '{"goal":"mail"}')
    assert read_tools([{**tool, "execution": "server"}], "tools").specs == ()


def test_items_of_unknown_call_types_are_no_tool_calls():
    assert call_of_item({}, "web_search_call", None, "i") is None
    assert call_of_item({}, "shell", None, "i") is None


@pytest.mark.parametrize("arguments", ["", "[1]", "{}", '{"type":"create_file"}', "{"])
def test_arguments_that_do_not_fit_a_tool_s_item_type_give_no_item(arguments):
    assert item_of_call("apply_patch", arguments) is None


def test_a_local_shell_call_has_an_environment():
    item = item_of_call("local_shell", json.dumps({"command": ["ls"]}))
    assert item is not None
    assert item["action"] == {"type": "exec", "env": {}, "command": ["ls"]}


@pytest.mark.parametrize("tool", ["computer", "computer_use_preview"])
def test_computer_call_round_trips(tool):
    arguments = '{"type":"wait"}'
    item = item_of_call("computer", arguments, tool)
    assert item is not None
    assert call_of_item(item, "computer_call", "c", "i") == ToolCall("c", "computer", arguments)
    both = {"actions": [{"type": "wait"}, {"type": "screenshot"}]}
    call = call_of_item(both, "computer_call", "c", "i")
    assert call is not None
    assert call.arguments == '{"actions":[{"type":"wait"},{"type":"screenshot"}]}'
