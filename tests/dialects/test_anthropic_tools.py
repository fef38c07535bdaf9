import json
import typing

import pytest
from anthropic.types.beta import (
    BetaMemoryTool20250818CreateCommand,
    BetaMemoryTool20250818InsertCommand,
    BetaMemoryTool20250818RenameCommand,
    BetaMemoryTool20250818StrReplaceCommand,
    BetaMemoryTool20250818ViewCommand,
    BetaToolUnionParam,
)

from bridle.dialects import DIALECTS
from bridle.dialects.anthropic import client_run, read_tools
from bridle.dialects.base import Route, RouteKind
from bridle.errors import RequestError
from bridle.types import Dialect

CLIENT = ("bash", "text_editor", "memory", "computer")


def types_of_the_sdk():
    """Yield every type of tool that the SDK knows, but for tools with a schema and toolsets."""
    for param in typing.get_args(BetaToolUnionParam):
        hints = typing.get_type_hints(param)
        for kind in typing.get_args(hints["type"]):
            if isinstance(kind, str) and kind != "custom" and "_toolset_" not in kind:
                yield kind


@pytest.mark.parametrize("kind", list(types_of_the_sdk()))
def test_client_run_tools_become_functions_and_provider_run_tools_are_removed(kind):
    tools = read_tools([{"type": kind, "name": "it"}], "tools")
    if kind.rpartition("_")[0] in CLIENT:
        [spec] = tools.specs
        assert (spec.name, tools.removed) == ("it", {})
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


def test_a_version_has_its_own_commands_and_actions():
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


@pytest.mark.parametrize("kind", ["computer_toolset_20260801", "browser_toolset_20260801"])
def test_a_toolset_is_refused_by_its_name(kind):
    body = json.dumps({"model": "m", "messages": [], "tools": [{"type": kind}]}).encode()
    wire = DIALECTS[Dialect.ANTHROPIC]
    with pytest.raises(RequestError, match=f"tools.0.: '{kind}' is not served") as refused:
        wire.parse(Route(Dialect.ANTHROPIC, RouteKind.GENERATE), body, {})
    status, _, reply = wire.error(refused.value)
    assert (status, json.loads(reply)["error"]["type"]) == (400, "invalid_request_error")
