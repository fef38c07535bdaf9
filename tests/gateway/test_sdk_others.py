"""The Anthropic and Google SDKs over loopback: what they read is what was captured."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2
import pytest
from google import genai
from google.genai import errors as genai_errors
from google.genai import types as genai_types
from tests.gateway.house import house, scripted

CALLS = {
    "reasoning": "two files",
    "content": "I look.",
    "tool_calls": [
        {"name": "look", "arguments": {"path": "a"}},
        {"name": "look", "arguments": {"path": "b"}},
    ],
}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL: Any = {"name": "look", "description": "Look.", "input_schema": SCHEMA}
USER: Any = [{"role": "user", "content": "compare"}]


def anthropic_client(caller) -> Any:
    return anthropic.AsyncAnthropic(
        base_url=caller.handle.base_urls["anthropic"], api_key=caller.handle.key, max_retries=0
    )


@asynccontextmanager
async def google_client(caller) -> AsyncIterator[Any]:
    # The SDK's own choice is a subclass of aiohttp's client, of which aiohttp warns.
    async with httpx2.AsyncClient() as http:
        options = genai_types.HttpOptions(
            base_url=caller.handle.base_urls["google"], httpx_async_client=http
        )
        yield genai.Client(api_key=caller.handle.key, http_options=options).aio


DECLARED = genai_types.FunctionDeclaration(
    name="look", description="Look.", parameters_json_schema=SCHEMA
)
CONFIG = genai_types.GenerateContentConfig(
    tools=[genai_types.Tool(function_declarations=[DECLARED])],
    thinking_config=genai_types.ThinkingConfig(include_thoughts=True),
    automatic_function_calling=genai_types.AutomaticFunctionCallingConfig(disable=True),
)


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_anthropic_sdk_reads_thinking_text_and_parallel_calls(streamed):
    async with house(CALLS) as home:
        caller = await home.session()
        args: Any = {
            "model": "m",
            "max_tokens": 2000,
            "messages": USER,
            "tools": [TOOL],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        async with anthropic_client(caller) as client:
            counted = await client.messages.count_tokens(
                **{key: value for key, value in args.items() if key != "max_tokens"}
            )
            if streamed:
                async with client.messages.stream(**args) as stream:
                    done = await stream.get_final_message()
            else:
                done = await client.messages.create(**args)
        kinds = [block.type for block in done.content]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        assert done.content[0].thinking.strip() == "two files"
        assert [block.input for block in done.content[2:]] == [{"path": "a"}, {"path": "b"}]
        [exchange] = caller.exchanges
        assert done.usage.input_tokens == exchange.prompt_length == counted.input_tokens
        assert done.usage.output_tokens == len(exchange.output_ids)
        assert done.stop_reason == "tool_use"


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_google_sdk_reads_thoughts_text_and_parallel_calls(streamed):
    async with house(CALLS) as home:
        caller = await home.session()
        args: Any = {"model": "m", "contents": "compare", "config": CONFIG}
        async with google_client(caller) as client:
            if streamed:
                pieces = [p async for p in await client.models.generate_content_stream(**args)]
            else:
                pieces = [await client.models.generate_content(**args)]
        parts = [part for piece in pieces for part in piece.candidates[0].content.parts]
        usage = pieces[-1].usage_metadata
        thoughts = "".join(part.text for part in parts if part.thought)
        said = "".join(part.text for part in parts if part.text and not part.thought)
        calls = [part.function_call for part in parts if part.function_call]
        assert (thoughts.strip(), said.strip()) == ("two files", "I look.")
        assert [(call.name, call.args) for call in calls] == [
            ("look", {"path": "a"}),
            ("look", {"path": "b"}),
        ]
        [exchange] = caller.exchanges
        assert usage.prompt_token_count == exchange.prompt_length
        assert usage.thoughts_token_count == exchange.extra["reasoning_tokens"] > 0
        assert usage.total_token_count == exchange.prompt_length + len(exchange.output_ids)


async def test_the_google_sdk_s_token_count_equals_the_sampled_prompt_s_length():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        async with google_client(caller) as client:
            counted = await client.models.count_tokens(model="m", contents="compare")
            await client.models.generate_content(model="m", contents="compare")
            listed = [model.name async for model in await client.models.list()]
        assert counted.total_tokens == caller.exchanges[0].prompt_length
        assert listed == ["models/scripted"]


async def test_an_overflow_and_a_refusal_are_the_sdks_own_errors():
    engine = scripted({"content": "a", "fault": 400}, context_length=100)
    async with house(engine=engine) as home:
        caller = await home.session()
        long: Any = [{"role": "user", "content": "word " * 200}]
        async with anthropic_client(caller) as client:
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
                await client.messages.create(model="m", max_tokens=9, messages=long)
            with pytest.raises(anthropic.BadRequestError, match="refused this request"):
                await client.messages.create(model="m", max_tokens=9, messages=USER)
        async with google_client(caller) as google:
            with pytest.raises(genai_errors.ClientError, match="exceeds the maximum number"):
                await google.models.generate_content(model="m", contents="word " * 200)
            with pytest.raises(genai_errors.ClientError, match="refused this request") as raised:
                await google.models.generate_content(model="m", contents="go")
        assert raised.value.code == 400
