"""The official SDKs read a call whose arguments are no JSON, and its echo goes on in one trace."""

import json
import random
from typing import Any

import pytest
from tests.gateway.house import SHELL_TOOL, house, tool_result, user
from tests.gateway.speech import SPEECHES, Harness
from tests.gateway.test_sdk import client_of, said
from tests.gateway.test_sdk_others import (
    CONFIG,
    SCHEMA,
    TOOL,
    USER,
    anthropic_client,
    google_client,
)

from bridle.types import Kind

ARGUMENTS = '{"path": "say "hi""}'
RAW = {
    "raw": f'I look.\n<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>',
}
END = {"content": "done"}
WRAPPED = {"INVALID_JSON": ARGUMENTS}
STREAMED = pytest.mark.parametrize("streamed", [False, True])
CHAT_TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


async def stats(home, caller) -> Any:
    _, found = await home.control("GET", f"/sessions/{caller.session_id}/trajectory")
    return found["metadata"]["stats"]


async def is_one_trace(home, caller, drift: str = "exact") -> None:
    """The session is one extended conversation, and all that was sampled trains."""
    found = await stats(home, caller)
    assert (found["exchanges"], found["roots"], found["branches"]) == (2, 1, 0)
    assert found["tokens_trained"] == found["tokens_captured"] > 0
    assert found["drift"] == {drift: 1}
    assert found["malformed_calls"] == 1
    assert {exchange.kind for exchange in caller.exchanges} == {Kind.AGENT}


@STREAMED
@pytest.mark.parametrize("stream", ["live", "whole"])
async def test_the_openai_sdk_reads_the_raw_arguments_in_chat(streamed, stream):
    async with house(RAW, END, stream=stream) as home:
        caller = await home.session()
        messages: list[Any] = [user("go")]
        args: Any = {"model": "m", "messages": messages, "tools": [CHAT_TOOL]}
        async with client_of(caller) as client:
            if streamed:
                async with client.chat.completions.stream(**args) as events:
                    done = await events.get_final_completion()
            else:
                done = await client.chat.completions.create(**args)
            [choice] = done.choices
            [call] = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls"
            assert (call.function.name, call.function.arguments) == ("look", ARGUMENTS)
            assert choice.message.content == "I look."
            echo = {"role": "assistant", **said(choice.message)}
            for one in echo["tool_calls"]:
                one["function"].pop("parsed_arguments", None)
            messages += [echo, {"role": "tool", "tool_call_id": call.id, "content": "no JSON"}]
            await client.chat.completions.create(**args)
        await is_one_trace(home, caller)


@pytest.mark.parametrize("repaired", ["{}", '{"path": "say hi"}', '{"_malformed_tool_call": "x"}'])
async def test_a_turn_with_arguments_that_the_harness_repaired_extends_the_sampled_tokens(repaired):
    raw = RAW["raw"].replace('"look"', '"bash"')
    async with house({"raw": raw}, END) as home:
        caller = await home.session()
        message = await caller.ask([user("go")], tools=[SHELL_TOOL])
        [call] = message["tool_calls"]
        assert call["function"]["arguments"] == ARGUMENTS
        call["function"]["arguments"] = repaired
        await caller.ask([user("go"), message, tool_result(call, "no JSON")], tools=[SHELL_TOOL])
        await is_one_trace(home, caller, "rewritten_args")


@STREAMED
async def test_the_openai_sdk_reads_the_raw_arguments_in_responses(streamed):
    async with house(RAW, END) as home:
        caller = await home.session()
        items: list[Any] = [user("go")]
        tool = {"type": "function", "name": "look", "parameters": SCHEMA}
        args: Any = {"model": "m", "input": items, "tools": [tool]}
        async with client_of(caller) as client:
            if streamed:
                async with client.responses.stream(**args) as events:
                    done = await events.get_final_response()
            else:
                done = await client.responses.create(**args)
            [call] = [item for item in done.output if item.type == "function_call"]
            assert (done.status, call.name, call.arguments) == ("completed", "look", ARGUMENTS)
            items += [item.to_dict() for item in done.output]
            for item in items:
                item.pop("parsed_arguments", None)
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "no JSON"}
            await client.responses.create(**{**args, "input": [*items, output]})
        await is_one_trace(home, caller)


@STREAMED
async def test_the_anthropic_sdk_reads_the_raw_arguments_under_the_documented_key(streamed):
    async with house(RAW, END) as home:
        caller = await home.session()
        args: Any = {"model": "m", "max_tokens": 500, "messages": USER, "tools": [TOOL]}
        async with anthropic_client(caller) as client:
            if streamed:
                async with client.messages.stream(**args) as events:
                    done = await events.get_final_message()
            else:
                done = await client.messages.create(**args)
            *_, call = done.content
            assert (done.stop_reason, call.name, call.input) == ("tool_use", "look", WRAPPED)
            result = {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": "no JSON",
                "is_error": True,
            }
            turn = {"role": "assistant", "content": [b.to_dict() for b in done.content]}
            more = [*USER, turn, {"role": "user", "content": [result]}]
            await client.messages.create(**{**args, "messages": more})
        await is_one_trace(home, caller)


@STREAMED
async def test_the_google_sdk_reads_the_raw_arguments_under_the_same_key(streamed):
    async with house(RAW, END) as home:
        caller = await home.session()
        contents: list[Any] = [{"role": "user", "parts": [{"text": "go"}]}]
        args: Any = {"model": "m", "config": CONFIG}
        async with google_client(caller) as client:
            models = client.models
            if streamed:
                events = await models.generate_content_stream(contents=contents, **args)
                pieces = [piece async for piece in events]
            else:
                pieces = [await models.generate_content(contents=contents, **args)]
            parts = [part for piece in pieces for part in piece.candidates[0].content.parts]
            [called] = [part for part in parts if part.function_call]
            call = called.function_call
            assert (call.name, call.args) == ("look", WRAPPED)
            reason = pieces[-1].candidates[0].finish_reason
            assert reason.value == "STOP"
            answer = {"id": call.id, "name": "look", "response": {"error": "no JSON"}}
            shown = [json.loads(part.model_dump_json(exclude_none=True)) for part in parts]
            contents += [
                {"role": "model", "parts": [part for part in shown if part.get("text") != ""]},
                {"role": "user", "parts": [{"function_response": answer}]},
            ]
            await models.generate_content(contents=contents, **args)
        await is_one_trace(home, caller)


@STREAMED
@pytest.mark.parametrize("name", SPEECHES)
async def test_a_call_with_deeply_nested_arguments_is_captured_extended_and_rendered(
    name, streamed
):
    nested = "[" * 600 + "]" * 600
    call = f'<tool_call>\n{{"name": "bash", "arguments": {{"command": {nested}}}}}\n</tool_call>'
    async with house({"raw": call}, END) as home:
        caller = await home.session()
        speech = SPEECHES[name]
        harness = Harness(caller, speech, "Be brief.", random.Random(0), streams=streamed)
        items = await harness.send() or []
        given = [(one, "too deep") for item in items for one in speech.calls(item)]
        harness.messages += [*items, *speech.results(given)]
        await harness.send()
        harness.messages[harness.first] = speech.user("Begin anew.")
        await harness.send()
        assert [status for status, _, _ in harness.answers] == [200, 200, 200]
        one, two, three = caller.exchanges
        assert (len(given), two.parent_id) == (1, one.exchange_id)
        assert (three.continues, three.root_reason) == (one.exchange_id, "history_changed")
