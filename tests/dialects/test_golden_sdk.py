"""The official SDKs read the recorded replies and streams of the golden exchanges."""

import json
import typing
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic.types.beta import (
    BetaMemoryTool20250818Command,
    BetaMessage,
    BetaMessageThreadParam,
)
from openai.types import responses
from openai.types.chat import ChatCompletion
from openai.types.responses.response_output_item import LocalShellCall
from pydantic import TypeAdapter
from tests.dialects.golden import FOLDERS, GOLDEN, turn_of
from tests.dialects.test_anthropic_tools import CLIENT, types_of_the_sdk

ASKED: dict[str, Any] = {"model": "my-model", "messages": [{"role": "user", "content": "go"}]}
OWN_ITEMS = {
    "local_shell": LocalShellCall,
    "shell": responses.ResponseFunctionShellToolCall,
    "apply_patch": responses.ResponseApplyPatchToolCall,
    "computer": responses.ResponseComputerToolCall,
    "computer_use_preview": responses.ResponseComputerToolCall,
    "custom": responses.ResponseCustomToolCall,
    "tool_search": responses.ResponseToolSearchCall,
}
"""The type that the SDK has for a call, by the type of the tool."""


def folders(dialect: str) -> list[str]:
    """The golden exchanges of a dialect whose reply is a model's turn."""
    return [
        one
        for one in FOLDERS
        if one.startswith(f"{dialect}/") and not one.endswith("compact_route")
    ]


def recorded(folder: str, name: str):
    return json.loads((GOLDEN / folder / name).read_text())


def client(sdk, folder: str, name: str) -> Any:
    """A client of an SDK to which every answer is a recorded file."""
    kind = "text/event-stream" if name.endswith(".sse") else "application/json"
    content = (GOLDEN / folder / name).read_bytes()
    answer = httpx2.MockTransport(
        lambda _: httpx2.Response(200, headers={"Content-Type": kind}, content=content)
    )
    return sdk(api_key="k", base_url="http://gw", http_client=httpx2.Client(transport=answer))


@pytest.mark.parametrize("folder", folders("anthropic"))
def test_anthropic_s_sdk_reads_one_message_from_reply_and_stream(folder):
    messages = client(anthropic.Anthropic, folder, "reply.json").beta.messages
    whole = messages.create(**ASKED, max_tokens=9)
    messages = client(anthropic.Anthropic, folder, "stream.sse").beta.messages
    with messages.stream(**ASKED, max_tokens=9) as stream:
        streamed = stream.get_final_message()
    assert isinstance(BetaMessage.model_validate(recorded(folder, "reply.json")), BetaMessage)
    assert [one.to_dict() for one in streamed.content] == [one.to_dict() for one in whole.content]
    assert (streamed.id, streamed.stop_reason) == (whole.id, whole.stop_reason)
    calls = [block for block in whole.content if block.type == "tool_use"]
    result = turn_of(folder).get("tool_calls", [])
    assert [call.toolset_name or call.name for call in calls] == [one["name"] for one in result]
    for call, one in zip(calls, result, strict=True):
        if call.name == "memory":
            command = TypeAdapter(BetaMemoryTool20250818Command).validate_python(call.input)
            assert command.command == call.input["command"]
        if "client_tools" in folder or "thread" in folder:
            action = {"action": call.name} if call.toolset_name else {}
            assert {**action, **call.input} == json.loads(one["arguments"])


@pytest.mark.parametrize("folder", folders("openai_responses"))
def test_openai_s_sdk_reads_one_response_from_reply_and_stream(folder):
    whole = client(openai.OpenAI, folder, "reply.json").responses.create(model="m", input="go")
    streaming = client(openai.OpenAI, folder, "stream.sse").responses
    *_, last = streaming.create(model="m", input="go", stream=True)
    read = responses.Response.model_validate(recorded(folder, "reply.json"))
    assert [type(item) for item in read.output] == [type(item) for item in whole.output]
    assert [one.to_dict() for one in last.response.output] == [
        one.to_dict() for one in whole.output
    ]


@pytest.mark.parametrize(
    "folder",
    [f"openai_responses/{one}" for one in ("own_item_types", "computer", "computer_use_preview")],
)
def test_openai_s_sdk_reads_a_call_as_the_item_of_its_tool(folder):
    whole = client(openai.OpenAI, folder, "reply.json").responses.create(model="m", input="go")
    calls = {item.call_id: item for item in whole.output if hasattr(item, "call_id")}
    tools = {tool["type"]: tool for tool in recorded(folder, "request.json")["tools"]}
    for result in turn_of(folder)["tool_calls"]:
        item, given = calls.pop(result["id"]), json.loads(result["arguments"])
        kind = "custom" if result["name"] == "edit" else result["name"]
        if "oops" in given:
            assert item.type == "function_call"
            continue
        assert isinstance(item, OWN_ITEMS[kind])
        match item:
            case responses.ResponseComputerToolCall():
                action = item.actions[0] if "computer" in tools else item.action
                assert action.to_dict() == given
            case responses.ResponseToolSearchCall():
                assert (item.arguments, item.execution) == (given, "client")
            case responses.ResponseCustomToolCall():
                assert item.input == given["input"]
            case responses.ResponseApplyPatchToolCall():
                assert item.operation.to_dict() == given
            case _:
                assert given.items() <= item.action.to_dict().items()
    assert calls == {}


@pytest.mark.parametrize("folder", folders("openai_chat"))
def test_openai_s_sdk_reads_one_completion_from_reply_and_stream(folder):
    whole = client(openai.OpenAI, folder, "reply.json").chat.completions.create(**ASKED)
    assert ChatCompletion.model_validate(recorded(folder, "reply.json")) == whole
    streaming = client(openai.OpenAI, folder, "stream.sse").chat.completions
    deltas = [one.choices[0].delta for one in streaming.create(**ASKED, stream=True) if one.choices]
    message = whole.choices[0].message
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    calls = message.tool_calls or []
    assert [one.id for one in pieces if one.id] == [one.id for one in calls]
    for index, call in enumerate(calls):
        kind = call.type
        said = [one.to_dict().get(kind, {}) for one in pieces if one.index == index]
        for field, text in getattr(call, kind).to_dict().items():
            assert "".join(one.get(field, "") for one in said) == text


def test_every_tool_that_a_client_runs_has_a_golden_exchange():
    kinds = {
        tool.get("type")
        for folder in FOLDERS
        for tool in (recorded(folder, "request.json").get("tools") or ())
    }
    anthropic_s = {one for one in types_of_the_sdk() if one.rpartition("_")[0] in CLIENT}
    assert anthropic_s | OWN_ITEMS.keys() <= kinds


def test_every_form_of_a_thread_has_a_golden_exchange():
    threads = [recorded(folder, "request.json").get("thread") for folder in FOLDERS]
    forms = [
        typing.get_type_hints(form)["type"] for form in typing.get_args(BetaMessageThreadParam)
    ]
    known = {kind for form in forms for kind in typing.get_args(form)}
    assert {thread["type"] for thread in threads if thread} == known
