import json

import msgspec
import pytest

from bridle.dialects.json_reader import content_digest
from bridle.dialects.tools import (
    KEPT_LISTS,
    ToolList,
    ToolMemo,
    as_function,
    check_choice,
    freeform_input,
    freeform_spec,
    list_digest,
    tools_sent,
)
from bridle.errors import RequestError
from bridle.types import ToolCall, ToolSpec

F = ToolSpec("f", None, None)


def test_tool_list_is_parsed_once_until_evicted():
    seen = []

    def read(value, path):
        seen.append(value)
        return ToolList((F,))

    memo = ToolMemo(read)
    first = memo.read(b"[0]", "tools")
    assert memo.read(b"[0]", "tools") is first
    for number in range(1, KEPT_LISTS + 1):
        memo.read(f"[{number}]".encode(), "tools")
        memo.read(b"[0]", "tools")
    memo.read(b"[1]", "tools")
    assert seen == [[number] for number in [0, *range(1, KEPT_LISTS + 1), 1]]


def test_a_list_that_cannot_be_read_is_refused_each_time():
    def read(value, path):
        raise RequestError("no", param=path)

    memo = ToolMemo(read)
    for _ in range(2):
        with pytest.raises(RequestError):
            memo.read(b"[]", "tools")


@pytest.mark.parametrize("raw", [b"null", b"[]", b" [ ] ", b"[\n]"])
def test_empty_tool_list_is_no_tool_list(raw):
    assert tools_sent(msgspec.Raw(raw)) is None
    assert tools_sent(None) is None
    assert tools_sent(msgspec.Raw(b"[ 1 ]")) == b"[ 1 ]"


def test_a_list_that_is_sent_again_is_the_same_object_and_its_digest_is_known():
    lists = [b'[{"name":"%d"}]' % number for number in range(KEPT_LISTS + 3)]
    first = [tools_sent(msgspec.Raw(raw)) for raw in lists]
    again = tools_sent(msgspec.Raw(bytes(bytearray(lists[-2]))))
    assert again is first[-2]
    assert tools_sent(msgspec.Raw(bytes(bytearray(lists[-1])))) is first[-1]
    for raw in (*lists, again, b"never sent"):
        assert raw is not None
        assert list_digest(raw) == content_digest(raw)
    assert [tools_sent(msgspec.Raw(raw)) for raw in lists] == lists  # whether forgotten or not


def test_a_choice_is_a_mode_or_a_tool_that_was_sent():
    tools = ToolList((F,))
    assert [check_choice(name, tools, "p") for name in ("auto", "none", "required", "f")]
    with pytest.raises(RequestError, match="'g' not found") as raised:
        check_choice("g", tools, "p")
    assert raised.value.param == "p"
    with pytest.raises(RequestError, match="asks for a tool call, but 'tools' has no tool"):
        check_choice("required", ToolList(), "p")


def test_two_tool_lists_are_merged_into_one():
    one = ToolList((F,), frozenset("f"), {"f": {"a": 1}}, {}, {"rule": ["x"]})
    two = ToolList((F,), frozenset("g"), {"g": {}}, {"d": F}, {"rule": ["y"], "other": ["z"]})
    both = one.plus(two)
    assert both.specs == (F, F)
    assert both.freeform == {"f", "g"}
    assert set(both.wire) == {"f", "g"}
    assert both.removed == {"rule": ["x", "y"], "other": ["z"]}
    assert one.removed == {"rule": ["x"]}


def test_a_freeform_tool_is_a_function_with_one_text():
    spec = freeform_spec({"name": "patch", "description": "Patch it."}, "tools[0]")
    assert (spec.name, spec.description) == ("patch", "Patch it.")
    assert freeform_spec({"name": "patch"}, "tools[0]", "ns__patch").name == "ns__patch"
    assert (spec.parameters or {})["required"] == ["input"]
    call = ToolCall("1", "patch", "raw\n", custom=True)
    shown = as_function(call)
    assert json.loads(shown.arguments) == {"input": "raw\n"}
    assert freeform_input(shown.arguments) == call.arguments
    assert as_function(shown) is shown


@pytest.mark.parametrize("arguments", ["raw", "[1]", '{"other": 1}', '{"input": 7}', "[" * 9999])
def test_freeform_arguments_without_an_input_text_are_the_input_themselves(arguments):
    assert freeform_input(arguments) == arguments
    shown = as_function(ToolCall("1", "patch", arguments, custom=True))
    assert freeform_input(shown.arguments) == arguments


def test_the_description_of_a_freeform_tool_ends_with_its_grammar():
    def description(form, text=None):
        tool = {"name": "patch", "description": text, "format": form}
        return freeform_spec(tool, "tools[0]").description

    flat = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    assert description(flat) == "The input must match this regex grammar:\na+"
    assert description(flat, "Patch it.") == f"Patch it.\n\n{description(flat)}"
    assert str(description({"grammar": {"definition": "x"}})).endswith("lark grammar:\nx")
    for form in (None, {}, {"type": "text"}, {"grammar": 7}):
        assert description(form) is None
