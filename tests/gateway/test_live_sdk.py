"""The official SDKs read a live stream: every part of the turn before its last token is sampled.

The engine holds its last token until the client has seen all parts, so a reply that left whole
would never come.
"""

import asyncio
import json
from typing import Any

import anthropic
import httpx2
import pytest
from google import genai
from google.genai import types as genai_types
from tests.gateway.gated import TURN, Gated
from tests.gateway.house import SHELL_TOOL, house, user
from tests.gateway.test_sdk import client_of

from bridle.scripted.script import spell_call
from bridle.types import DeliveryState

PARAMETERS = SHELL_TOOL["function"]["parameters"]
COMMANDS = ["ls", "pwd"]


class Seen:
    """Events that a client has seen; the event is set when the turn is complete."""

    def __init__(self, engine: Gated) -> None:
        self._engine = engine
        self.reasoning = self.text = ""
        self.commands: list[str] = []
        self.live_commands = COMMANDS
        """Commands that leave before the reply is whole."""
        self.before_sign = 0
        """Events with something new that came before the engine went on."""

    def add(self, *, reasoning: Any = "", text: Any = "", command: str | None = None) -> None:
        self.reasoning += reasoning or ""
        self.text += text or ""
        self.commands += [] if command is None else [command]
        if not self._engine.sign.is_set():
            self.before_sign += bool(reasoning or text or command)
            whole = (TURN["reasoning"], TURN["content"], self.live_commands)
            if (self.reasoning, self.text, self.commands) == whole:
                self._engine.sign.set()


@pytest.fixture
async def living():
    """A session on a live gateway, and what its client sees."""
    engine = Gated(TURN)
    async with house(engine=engine, stream="live", keepalive_s=30) as home, asyncio.timeout(15):
        caller = await home.session()
        seen = Seen(engine)
        yield caller, seen
        assert engine.sign.is_set()
        assert seen.before_sign >= 6
        (exchange,) = caller.exchanges
        assert exchange.extra["stream"] == "live"
        await caller.until(lambda: caller.delivery(0) is DeliveryState.DELIVERED)


def command_of(arguments: str) -> str:
    command: str = json.loads(arguments)["command"]
    return command


async def test_the_openai_sdk_streams_a_live_chat_completion_with_reasoning_and_calls(living):
    caller, seen = living
    async with (
        client_of(caller) as client,
        client.chat.completions.stream(
            model="m",
            messages=[user("go")],
            tools=[SHELL_TOOL],
            stream_options={"include_usage": True},
        ) as stream,
    ):
        async for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                delta = event.chunk.choices[0].delta
                seen.add(reasoning=getattr(delta, "reasoning_content", ""), text=delta.content)
                for call in delta.tool_calls or ():
                    seen.add(command=command_of(call.function.arguments))
        done = await stream.get_final_completion()
    message = done.choices[0].message
    assert message.content == TURN["content"]
    assert [command_of(call.function.arguments) for call in message.tool_calls] == COMMANDS
    assert done.choices[0].finish_reason == "tool_calls"
    assert done.usage.prompt_tokens == caller.exchanges[0].prompt_length
    assert done.usage.completion_tokens == len(caller.exchanges[0].output_ids)


async def test_the_openai_sdk_streams_a_live_response_with_reasoning_and_calls(living):
    caller, seen = living
    tool = {"type": "function", "name": "bash", "parameters": PARAMETERS, "strict": False}
    async with (
        client_of(caller) as client,
        client.responses.stream(
            model="m", input="go", tools=[tool], reasoning={"summary": "auto"}
        ) as stream,
    ):
        async for event in stream:
            if event.type == "response.reasoning_summary_text.delta":
                seen.add(reasoning=event.delta)
            elif event.type == "response.output_text.delta":
                seen.add(text=event.delta)
            elif event.type == "response.output_item.done" and event.item.type == "function_call":
                seen.add(command=command_of(event.item.arguments))
        done = await stream.get_final_response()
    assert done.output_text == TURN["content"]
    assert [item.type for item in done.output] == ["reasoning", "message", *["function_call"] * 2]
    assert done.usage.input_tokens == caller.exchanges[0].prompt_length
    assert done.usage.output_tokens == len(caller.exchanges[0].output_ids)


async def test_the_anthropic_sdk_streams_a_live_message_with_thinking_and_calls(living):
    caller, seen = living
    client = anthropic.AsyncAnthropic(
        base_url=caller.handle.base_urls["anthropic"], api_key=caller.handle.key
    )
    tool: Any = {"name": "bash", "description": "Run.", "input_schema": PARAMETERS}
    async with (
        client,
        client.messages.stream(
            model="m",
            max_tokens=2000,
            messages=[user("go")],
            tools=[tool],
            thinking={"type": "enabled", "budget_tokens": 1024},
        ) as stream,
    ):
        async for event in stream:
            if event.type == "thinking":
                seen.add(reasoning=event.thinking)
            elif event.type == "text":
                seen.add(text=event.text)
            elif event.type == "content_block_stop" and event.content_block.type == "tool_use":
                seen.add(command=event.content_block.input["command"])
        done = await stream.get_final_message()
    assert [block.type for block in done.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert done.stop_reason == "tool_use"
    assert done.usage.input_tokens == caller.exchanges[0].prompt_length
    assert done.usage.output_tokens == len(caller.exchanges[0].output_ids)


async def test_text_after_a_tool_call_is_a_later_block_and_the_turn_is_extended():
    broken = "<tool_call>\n{'name'}\n</tool_call>"
    raw = "I look." + spell_call("bash", {"command": "ls"}) + broken
    async with house({"raw": raw}, {"content": "Done."}, stream="live") as home:
        caller = await home.session()
        client = anthropic.AsyncAnthropic(
            base_url=caller.handle.base_urls["anthropic"], api_key=caller.handle.key
        )
        tool: Any = {"name": "bash", "description": "Run.", "input_schema": PARAMETERS}
        asked: Any = {"model": "m", "max_tokens": 2000, "tools": [tool]}
        messages: list[Any] = [user("go")]
        async with client, client.messages.stream(messages=messages, **asked) as stream:
            done = await stream.get_final_message()
        async with anthropic.AsyncAnthropic(
            base_url=caller.handle.base_urls["anthropic"], api_key=caller.handle.key
        ) as again:
            assert [block.type for block in done.content] == ["text", "tool_use", "text"]
            echo = [block.model_dump(exclude_none=True) for block in done.content]
            result = {"type": "tool_result", "tool_use_id": echo[1]["id"], "content": "a"}
            messages += [{"role": "assistant", "content": echo}]
            messages += [{"role": "user", "content": [result]}]
            await again.messages.create(messages=messages, **asked)
        first, second = caller.exchanges
        assert second.parent_id == first.exchange_id


async def test_the_google_sdk_streams_a_live_reply_with_thoughts_and_calls(living):
    caller, seen = living
    seen.live_commands = []  # parallel calls leave in one event, so at the end
    http = httpx2.AsyncClient()
    options = genai_types.HttpOptions(
        base_url=caller.handle.base_urls["google"], httpx_async_client=http
    )
    client = genai.Client(api_key=caller.handle.key, http_options=options)
    declared = {"name": "bash", "description": "Run.", "parameters_json_schema": PARAMETERS}
    config: Any = {
        "tools": [{"function_declarations": [declared]}],
        "thinking_config": {"include_thoughts": True},
        "automatic_function_calling": {"disable": True},
    }
    usage: Any = None
    stream = await client.aio.models.generate_content_stream(
        model="m", contents="go", config=config
    )
    chunk: Any
    async for chunk in stream:
        for part in chunk.candidates[0].content.parts:
            if part.function_call is not None:
                seen.add(command=part.function_call.args["command"])
            elif part.thought:
                seen.add(reasoning=part.text)
            else:
                seen.add(text=part.text)
        usage = chunk.usage_metadata or usage
    await http.aclose()
    assert seen.commands == COMMANDS
    assert usage.prompt_token_count == caller.exchanges[0].prompt_length
    sampled = usage.candidates_token_count + (usage.thoughts_token_count or 0)
    assert sampled == len(caller.exchanges[0].output_ids)
