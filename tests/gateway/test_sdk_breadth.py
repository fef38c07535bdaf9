"""The official Python SDKs over loopback, each with all that its users ask for: `oracle` says what
they must read. The same is asked of the npm SDKs in tests/real_clients."""

import base64
import json
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from google import genai
from google.genai import errors as genai_errors
from google.genai import types
from tests.gateway.house import house
from tests.gateway.oracle import (
    AGAIN,
    CUT,
    HELLO,
    IMAGE_REFUSED,
    SHAPED,
    by_id,
    check,
    check_run,
    engine,
)

ANSWER = {
    "type": "object",
    "properties": {"key": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["key", "n"],
    "additionalProperties": False,
}
COMMAND = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
PNG = b"\x89PNG not really"
PNG64 = base64.b64encode(PNG).decode()
LONG = "word " * 6000


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


class Chat:
    """Chat Completions of `openai`."""

    api = "chat"

    def __init__(self, handle: Any, *, key: str | None = None, retries: int = 0) -> None:
        self.client: Any = openai.AsyncOpenAI(
            base_url=handle.base_urls["openai"], api_key=key or handle.key, max_retries=retries
        )

    async def ask(self, content: Any, *, stream: bool, shaped: bool = False) -> Any:
        schema = {"name": "answer", "schema": ANSWER, "strict": True}
        more = {"response_format": {"type": "json_schema", "json_schema": schema}} if shaped else {}
        return self.facts(await self.send([user(content)], stream=stream, **more))

    async def send(self, messages: Any, *, stream: bool, **more: Any) -> Any:
        body = {"model": "m", "messages": messages, **more}
        if not stream:
            return await self.client.chat.completions.create(**body)
        options = {"include_usage": True}
        async with self.client.chat.completions.stream(**body, stream_options=options) as events:
            try:
                return await events.get_final_completion()
            except openai.LengthFinishReasonError as cut:
                return cut.completion

    def facts(self, done: Any) -> Any:
        message = done.choices[0].message
        return {
            "id": done.id,
            "text": message.content,
            "reasoning": getattr(message, "reasoning_content", None),
            "calls": [(c.function.name, c.function.arguments) for c in message.tool_calls or ()],
            "finish": done.choices[0].finish_reason,
            "prompt": done.usage.prompt_tokens,
            "output": done.usage.completion_tokens,
        }

    async def run(self, *, stream: bool) -> Any:
        tools = [{"type": "function", "function": {"name": "bash", "parameters": COMMAND}}]
        messages = [user("compare")]
        first = await self.send(messages, stream=stream, tools=tools)
        message = first.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": call.function.arguments}
            for call in message.tool_calls
        ]
        # Parallel results come in any order.
        messages += [message.model_dump(exclude_none=True), *reversed(results)]
        second = await self.send(messages, stream=stream, tools=tools)
        return self.facts(first), self.facts(second)

    def image(self) -> Any:
        url = {"url": f"data:image/png;base64,{PNG64}"}
        return [{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": url}]

    async def models(self) -> Any:
        listed = [model.id async for model in self.client.models.list()]
        return listed, (await self.client.models.retrieve("m")).id

    async def wrong(self) -> Any:
        return await self.send("hello", stream=False)

    async def nowhere(self) -> Any:
        return await self.client.embeddings.create(model="m", input="hello")


class Responses(Chat):
    """Responses of `openai`."""

    api = "responses"

    async def ask(self, content: Any, *, stream: bool, shaped: bool = False) -> Any:
        schema = {"type": "json_schema", "name": "answer", "schema": ANSWER, "strict": True}
        more = {"text": {"format": schema}} if shaped else {}
        return self.facts(await self.send([user(content)], stream=stream, **more))

    async def send(self, messages: Any, *, stream: bool, **more: Any) -> Any:
        body = {
            "model": "m",
            "input": messages,
            "reasoning": {"summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            **more,
        }
        if not stream:
            return await self.client.responses.create(**body)
        async with self.client.responses.stream(**body) as events:
            # `get_final_response` takes no response that was cut by its budget.
            return [event async for event in events][-1].response

    def facts(self, done: Any) -> Any:
        thoughts = [part.text for i in done.output if i.type == "reasoning" for part in i.summary]
        calls = [item for item in done.output if item.type == "function_call"]
        cut = done.incomplete_details
        return {
            "id": done.id,
            "text": done.output_text,
            "reasoning": "".join(thoughts) or None,
            "calls": [(call.name, call.arguments) for call in calls],
            "finish": cut.reason if cut else done.status,
            "prompt": done.usage.input_tokens,
            "output": done.usage.output_tokens,
        }

    async def run(self, *, stream: bool) -> Any:
        tools = [{"type": "function", "name": "bash", "parameters": COMMAND, "strict": False}]
        first = await self.send([user("compare")], stream=stream, tools=tools)
        output = [item.model_dump(exclude_none=True) for item in first.output]
        results = [
            {"type": "function_call_output", "call_id": i["call_id"], "output": i["arguments"]}
            for i in output
            if i["type"] == "function_call"
        ]
        for item in output:
            item.pop("parsed_arguments", None)
            for part in item.get("content", ()):
                part.pop("parsed", None)
        messages = [user("compare"), *output, *reversed(results)]
        second = await self.send(messages, stream=stream, tools=tools)
        return self.facts(first), self.facts(second)

    def image(self) -> Any:
        url = f"data:image/png;base64,{PNG64}"
        return [
            {"type": "input_text", "text": "what is it"},
            {"type": "input_image", "image_url": url, "detail": "auto"},
        ]

    async def count(self) -> int:
        counted = await self.client.responses.input_tokens.count(model="m", input="hello")
        return int(counted.input_tokens)

    async def wrong(self) -> Any:
        return await self.send(7, stream=False)

    async def nowhere(self) -> Any:
        return await self.client.responses.retrieve("resp_none")


class Messages:
    """Messages of `anthropic`."""

    api = "anthropic"

    def __init__(self, handle: Any, *, key: str | None = None, retries: int = 0) -> None:
        self.client: Any = anthropic.AsyncAnthropic(
            base_url=handle.base_urls["anthropic"], api_key=key or handle.key, max_retries=retries
        )

    async def ask(self, content: Any, *, stream: bool, shaped: bool = False) -> Any:
        form = {"type": "json_schema", "schema": ANSWER}
        more = {"output_config": {"format": form}} if shaped else {}
        return self.facts(await self.send([user(content)], stream=stream, **more))

    async def send(self, messages: Any, *, stream: bool, **more: Any) -> Any:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        body = {"model": "m", "max_tokens": 2000, "thinking": thinking, "messages": messages}
        if not stream:
            return await self.client.messages.create(**body, **more)
        async with self.client.messages.stream(**body, **more) as events:
            return await events.get_final_message()

    def facts(self, done: Any) -> Any:
        def of(kind: str) -> Any:
            return [block for block in done.content if block.type == kind]

        return {
            "id": done.id,
            "text": "".join(block.text for block in of("text")),
            "reasoning": "".join(block.thinking for block in of("thinking")) or None,
            "calls": [(block.name, block.input) for block in of("tool_use")],
            "finish": done.stop_reason,
            "prompt": done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0),
            "output": done.usage.output_tokens,
        }

    async def run(self, *, stream: bool) -> Any:
        tools = [{"name": "bash", "input_schema": COMMAND}]
        messages = [user("compare")]
        first = await self.send(messages, stream=stream, tools=tools)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": json.dumps(block.input)}
            for block in first.content
            if block.type == "tool_use"
        ]
        said = [block.model_dump(exclude_none=True) for block in first.content]
        messages += [{"role": "assistant", "content": said}, user(results[::-1])]
        second = await self.send(messages, stream=stream, tools=tools)
        return self.facts(first), self.facts(second)

    def image(self) -> Any:
        source = {"type": "base64", "media_type": "image/png", "data": PNG64}
        return [{"type": "text", "text": "what is it"}, {"type": "image", "source": source}]

    async def count(self) -> int:
        counted = await self.client.messages.count_tokens(model="m", messages=[user("hello")])
        return int(counted.input_tokens)

    async def models(self) -> Any:
        listed = [model.id async for model in self.client.models.list()]
        return listed, (await self.client.models.retrieve("m")).id

    async def wrong(self) -> Any:
        return await self.send("hello", stream=False)

    async def nowhere(self) -> Any:
        return await self.client.get("/v1/nowhere", cast_to=object)


class Google:
    """generateContent of `google-genai`."""

    api = "google"

    def __init__(self, handle: Any, *, key: str | None = None, retries: int = 0) -> None:
        # Its other client, aiohttp's, it makes by a way that aiohttp warns of.
        self.http = httpx2.AsyncClient()
        options = types.HttpOptions(
            base_url=handle.base_urls["google"],
            httpx_async_client=self.http,
            retry_options=types.HttpRetryOptions(attempts=retries + 1, initial_delay=0.01),
        )
        self.whole = genai.Client(api_key=key or handle.key, http_options=options)
        self.client = self.whole.aio.models

    async def ask(self, content: Any, *, stream: bool, shaped: bool = False) -> Any:
        more = {"response_mime_type": "application/json", "response_json_schema": ANSWER}
        return self.facts(await self.send(content, stream=stream, **(more if shaped else {})))

    async def send(self, contents: Any, *, stream: bool, **more: Any) -> Any:
        config = types.GenerateContentConfig(
            thinking_config=types.ThinkingConfig(include_thoughts=True),
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
            **more,
        )
        body: Any = {"model": "m", "contents": contents, "config": config}
        if not stream:
            return [await self.client.generate_content(**body)]
        return [chunk async for chunk in await self.client.generate_content_stream(**body)]

    def facts(self, chunks: Any) -> Any:
        last = chunks[-1]
        parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts or ()]
        used = last.usage_metadata
        return {
            "id": last.response_id,
            "text": "".join(p.text for p in parts if p.text and not p.thought),
            "reasoning": "".join(p.text for p in parts if p.text and p.thought) or None,
            "calls": [
                (p.function_call.name, p.function_call.args) for p in parts if p.function_call
            ],
            "finish": last.candidates[0].finish_reason.value,
            "prompt": used.prompt_token_count,
            "output": used.candidates_token_count + (used.thoughts_token_count or 0),
        }

    async def run(self, *, stream: bool) -> Any:
        declared = types.FunctionDeclaration(name="bash", parameters_json_schema=COMMAND)
        tools = [types.Tool(function_declarations=[declared])]
        contents = [types.Content(role="user", parts=[types.Part(text="compare")])]
        first = await self.send(contents, stream=stream, tools=tools)
        parts = [part for chunk in first for part in chunk.candidates[0].content.parts or ()]
        results = [
            types.Part(
                function_response=types.FunctionResponse(
                    id=part.function_call.id, name="bash", response=part.function_call.args
                )
            )
            for part in parts
            if part.function_call
        ]
        contents += [
            types.Content(role="model", parts=parts),
            types.Content(role="user", parts=results[::-1]),
        ]
        second = await self.send(contents, stream=stream, tools=tools)
        return self.facts(first), self.facts(second)

    def image(self) -> Any:
        parts = [
            types.Part(text="what is it"),
            types.Part.from_bytes(data=PNG, mime_type="image/png"),
        ]
        return [types.Content(role="user", parts=parts)]

    async def count(self) -> int:
        counted = await self.client.count_tokens(model="m", contents="hello")
        return int(counted.total_tokens or 0)

    async def models(self) -> Any:
        listed = [str(model.name) async for model in await self.client.list()]
        named = str((await self.client.get(model="m")).name)
        return [name.removeprefix("models/") for name in listed], named.removeprefix("models/")

    async def wrong(self) -> Any:
        return await self.send([types.Content(role="nobody", parts=[])], stream=False)

    async def nowhere(self) -> Any:
        return await self.client.embed_content(model="m", contents="hello")


SDKS = [Chat, Responses, Messages, Google]
every_sdk = pytest.mark.parametrize("sdk", SDKS)
both_ways = pytest.mark.parametrize("stream", [False, True])


@asynccontextmanager
async def asked(sdk: Any, **options: Any) -> Any:
    """An SDK at a gateway of its own, and who it is there."""
    async with house(engine=engine()) as home:
        caller = await home.session()
        speaker = sdk(caller.handle, **options)
        try:
            yield speaker, caller
        finally:
            await (speaker.http.aclose() if sdk is Google else speaker.client.close())


@every_sdk
@both_ways
@pytest.mark.parametrize(("word", "turn"), [("hello", HELLO), ("cut", CUT)])
async def test_a_reply_is_read_as_it_was_scripted(sdk, stream, word, turn):
    async with asked(sdk) as (speaker, caller):
        facts = await speaker.ask(word, stream=stream)
        check(facts, turn, speaker.api, by_id(caller.exchanges))


@every_sdk
@both_ways
async def test_parallel_calls_and_their_results_are_one_conversation(sdk, stream):
    async with asked(sdk) as (speaker, caller):
        first, second = await speaker.run(stream=stream)
        check_run(first, second, speaker.api, by_id(caller.exchanges))


@every_sdk
async def test_every_sdk_reads_a_structured_answer_and_its_schema_is_recorded_as_unenforced(sdk):
    async with asked(sdk) as (speaker, caller):
        facts = await speaker.ask("json", stream=False, shaped=True)
        exchange = check(facts, SHAPED, speaker.api, by_id(caller.exchanges))
        assert exchange.extra["unenforced"] == ["response_format"]


@pytest.mark.parametrize("sdk", [Messages, Google])
async def test_the_sdk_s_own_retry_is_one_sample(sdk):
    async with asked(sdk, retries=2) as (speaker, caller):
        facts = await speaker.ask("again", stream=False)
        check(facts, AGAIN, speaker.api, by_id(caller.exchanges))
        assert len(caller.exchanges) == 1


@pytest.mark.parametrize("sdk", [Responses, Messages, Google])
async def test_tokens_are_counted_as_they_are_used_and_nothing_is_sampled_for_it(sdk):
    async with asked(sdk) as (speaker, caller):
        counted = await speaker.count()
        assert caller.exchanges == []
        assert counted == (await speaker.ask("hello", stream=False))["prompt"]


@pytest.mark.parametrize("sdk", [Chat, Messages, Google])
async def test_models_are_listed_and_named(sdk):
    async with asked(sdk) as (speaker, _):
        assert await speaker.models() == (["scripted"], "m")


async def read(error_of: Any) -> Any:
    """Status and text of the error that the SDK raises."""
    raised = (openai.APIStatusError, anthropic.APIStatusError, genai_errors.APIError)
    with pytest.raises(raised) as caught:
        await error_of
    error: Any = caught.value
    return (error.code if isinstance(error, genai_errors.APIError) else error.status_code), error


@every_sdk
@both_ways
async def test_every_sdk_gets_400_for_an_image_to_a_text_model(sdk, stream):
    async with asked(sdk) as (speaker, _):
        status, error = await read(speaker.ask(speaker.image(), stream=stream))
        assert status == 400
        assert IMAGE_REFUSED in str(error)


BUSY = {"anthropic": 529}


@every_sdk
@both_ways
async def test_errors_have_the_status_that_the_sdk_acts_on(sdk, stream):
    async with asked(sdk) as (speaker, _):
        statuses = {
            word: (await read(speaker.ask(word, stream=stream)))[0]
            for word in ("limit", "broken", "busy")
        }
    assert statuses == {"limit": 429, "broken": 500, "busy": BUSY.get(sdk.api, 503)}


@pytest.mark.parametrize(
    ("sdk", "stream"),
    [
        (sdk, stream)
        for sdk in SDKS
        for stream in (False, True)
        if (sdk, stream) != (Responses, True)
    ],
)
async def test_every_sdk_gets_400_for_a_prompt_beyond_the_context(sdk, stream):
    async with asked(sdk) as (speaker, caller):
        assert (await read(speaker.ask(LONG, stream=stream)))[0] == 400
        assert caller.exchanges == []


async def test_a_streamed_response_that_is_too_long_fails_by_its_event_as_codex_reads_it():
    async with asked(Responses) as (speaker, _):
        events = await speaker.client.responses.create(model="m", input=LONG, stream=True)
        last = [event async for event in events][-1]
    assert last.type == "response.failed"
    assert last.response.error.code == "context_length_exceeded"


@every_sdk
async def test_a_wrong_key_body_or_path_is_refused(sdk):
    async with asked(sdk, key="bk-nobody") as (stranger, _):
        assert (await read(stranger.ask("hello", stream=False)))[0] == 401
    async with asked(sdk) as (speaker, _):
        assert (await read(speaker.wrong()))[0] == 400
        assert (await read(speaker.nowhere()))[0] == 404


@pytest.mark.parametrize("sdk", [Chat, Responses, Messages])
async def test_a_busy_model_says_when_to_come_back(sdk):
    async with asked(sdk) as (speaker, _):
        for word in ("limit", "busy"):
            _, error = await read(speaker.ask(word, stream=False))
            assert error.response.headers["retry-after"] == "1"


async def test_googles_error_details_hold_the_retry_delay():
    async with asked(Google) as (speaker, _):
        _, error = await read(speaker.ask("limit", stream=False))
        assert any(d.get("retryDelay") == "1s" for d in error.details["error"]["details"])
