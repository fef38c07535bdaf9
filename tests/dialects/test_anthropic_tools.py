import json
import typing

import pytest
from anthropic.types.beta import (
    BetaBrowserMemberInput,
    BetaBrowserToolsetConfigsParam,
    BetaComputerMemberInput,
    BetaComputerToolsetConfigsParam,
    BetaMemoryTool20250818CreateCommand,
    BetaMemoryTool20250818InsertCommand,
    BetaMemoryTool20250818RenameCommand,
    BetaMemoryTool20250818StrReplaceCommand,
    BetaMemoryTool20250818ViewCommand,
    BetaToolUnionParam,
)

from bridle.dialects.anthropic import read_message, read_tools
from bridle.dialects.anthropic_write import TOOLSETS as FAMILIES
from bridle.dialects.anthropic_write import client_run, member_call, toolset
from bridle.types import ToolCall

CLIENT = ("bash", "text_editor", "memory", "computer")
TOOLSETS = ("computer_toolset", "browser_toolset")


def types_of_the_sdk():
    """Every type of tool that the SDK knows, but for tools with a schema of their own."""
    for param in typing.get_args(BetaToolUnionParam):
        hints = typing.get_type_hints(param)
        for kind in typing.get_args(hints["type"]):
            if isinstance(kind, str) and kind != "custom":
                yield kind


@pytest.mark.parametrize("kind", list(types_of_the_sdk()))
def test_client_run_tools_become_functions_and_provider_run_tools_are_removed(kind):
    tools = read_tools([{"type": kind, "name": "it"}], "tools")
    family = kind.rpartition("_")[0]
    if family in CLIENT or family in TOOLSETS:
        [spec] = tools.specs
        named = family.removesuffix("_toolset") if family in TOOLSETS else "it"
        assert (spec.name, tools.removed) == (named, {})
        assert spec.parameters is not None
        assert spec.parameters["properties"].keys() >= set(spec.parameters["required"])
    else:
        assert (tools.specs, tools.removed) == ((), {"server_tools": [kind]})


def test_the_editor_of_the_computer_use_quickstart_is_a_function():
    editor = {"type": "str_replace_based_edit_tool", "name": "str_replace_based_edit_tool"}
    [spec] = read_tools([editor], "tools").specs
    assert spec == client_run("text_editor_20250429", "str_replace_based_edit_tool", {})


def test_memory_tool_schema_has_the_fields_of_the_sdk_commands():
    spec = client_run("memory_20250818", "memory", {})
    assert spec is not None
    assert spec.parameters is not None
    for command in (
        BetaMemoryTool20250818CreateCommand,
        BetaMemoryTool20250818InsertCommand,
        BetaMemoryTool20250818RenameCommand,
        BetaMemoryTool20250818StrReplaceCommand,
        BetaMemoryTool20250818ViewCommand,
    ):
        assert spec.parameters["properties"].keys() >= set(command.model_fields)


def test_each_version_of_a_tool_has_its_own_commands_and_actions():
    def words(kind, **tool):
        spec = client_run(kind, "t", tool)
        return json.dumps([spec and spec.description, spec and spec.parameters])

    assert "undo_edit" in words("text_editor_20250124")
    assert "undo_edit" not in words("text_editor_20250728")
    assert "scroll" not in words("computer_20241022")
    assert "scroll" in words("computer_20250124")
    size = {"display_width_px": 1024, "display_height_px": 768}
    assert "1024 pixels wide and 768" in words("computer_20250124", **size)
    assert "region" in words("computer_20251124", enable_zoom=True)
    assert client_run("bash", "t", {}) is None


def function_of(family, **tool):
    found = toolset(f"{family}_toolset_20260801", tool, "tools[0]")
    assert found is not None
    spec, deferred = found
    assert spec.parameters is not None
    return spec.parameters["properties"], deferred


@pytest.mark.parametrize(
    ("family", "configs", "inputs"),
    [
        ("computer", BetaComputerToolsetConfigsParam, BetaComputerMemberInput),
        ("browser", BetaBrowserToolsetConfigsParam, BetaBrowserMemberInput),
    ],
)
def test_a_toolset_s_function_takes_every_action_of_the_sdk(family, configs, inputs):
    members = set(typing.get_type_hints(configs))
    shown, deferred = function_of(family, configs={name: {"enabled": True} for name in members})
    assert (set(shown["action"]["enum"]), deferred) == (members, False)
    arguments = {
        field.alias or name
        for model in typing.get_args(inputs)
        for name, field in model.model_fields.items()
    }
    assert shown.keys() == {"action", *arguments}


def test_the_configs_of_a_toolset_decide_which_actions_are_shown():
    shown, _ = function_of("browser", configs={"navigate": {"enabled": False}, "find": None})
    assert not {"navigate", "javascript_exec"} & set(shown["action"]["enum"])
    assert "find" in shown["action"]["enum"]
    every = {name: {"defer_loading": True} for name in shown["action"]["enum"]}
    assert function_of("browser", configs=every)[1]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_toolset_call_is_written_as_its_action_and_read_back(family):
    found = member_call(ToolCall("toolu_1", family, '{"action": "wait", "duration": 2}'))
    assert found == ("wait", '{"duration": 2}')
    block = {"type": "tool_use", "id": "toolu_1", "name": "wait", "input": {"duration": 2}}
    [message] = read_message(
        {"role": "assistant", "content": [{**block, "toolset_name": family}]}, "messages[0]"
    )
    [call] = message.tool_calls
    assert (call.name, json.loads(call.arguments)) == (family, {"action": "wait", "duration": 2})
    [message] = read_message({"role": "assistant", "content": [block]}, "messages[0]")
    assert message.tool_calls[0].name == "wait"


@pytest.mark.parametrize("arguments", ["", "[]", "{", '{"duration": 2}', '{"action": 3}'])
def test_a_call_of_a_toolset_without_an_action_is_a_call_of_an_unknown_tool(arguments):
    assert member_call(ToolCall("toolu_1", "computer", arguments)) is None
