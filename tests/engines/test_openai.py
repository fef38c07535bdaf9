import asyncio
import json

import pytest
from aiohttp import web
from tests.engines.shapes import collect, request
from tests.engines.stub import Stub, events

from bridle.engines import open_engine, openai
from bridle.engines.base import CutError, TextDelta
from bridle.engines.openai import OpenAIEngine
from bridle.errors import ConfigError, ContextOverflowError, EngineError
from bridle.types import FinishReason, LogprobMode, Sampling, ToolCall, VersionSpan

CHAT = "v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
KEY = "sk-very-secret"


def said(text="hello", **choice):
    message = {"role": "assistant", "content": text}
    return {"choices": [{"message": message, "finish_reason": "stop", **choice}]}


def delta(text, finish=None):
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


@pytest.fixture
async def opened():
    """Makes a stub server with these replies, and an adapter of it that never waits."""
    made = []

    async def make(**replies):
        stub = await Stub(**{CHAT: said(), **replies}).__aenter__()
        engine = OpenAIEngine(stub.url + "/v1", api_key=KEY, timeout_s=30)
        made.append((stub, engine))
        await engine.start()
        return stub, engine

    yield make
    for stub, engine in made:
        await engine.aclose()
        await stub.__aexit__()


def call(**fields):
    return request(**{"messages": HI, **fields})


@pytest.mark.parametrize(
    ("path", "named", "key"), [("v1", "#gpt", "theirs"), ("other/v4", "", "ours")]
)
async def test_the_short_form_names_server_model_and_key(stub, monkeypatch, path, named, key):
    monkeypatch.delenv("BRIDLE_ENGINE_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    if key == "ours":
        monkeypatch.setenv("BRIDLE_ENGINE_API_KEY", "ours")
    models = {"data": [{"id": named[1:] or "theirs"}, *([{"id": "another"}] if named else [])]}
    server = await stub(**{f"{path}/models": models, f"{path}/chat/completions": said()})
    engine = open_engine(f"openai:{server.url}/{path}{named}")
    assert (await engine.start()).model == models["data"][0]["id"]
    assert (await collect(engine, call()))[-1].reply.content == "hello"
    await engine.aclose()
    assert {one["Authorization"] for one in server.headers} == {f"Bearer {key}"}


def test_the_short_form_of_a_hosted_model_has_a_url():
    with pytest.raises(ConfigError, match="is not the URL of a server"):
        open_engine("openai:gpt")


async def test_the_openai_engine_reports_no_token_input_and_no_logprobs(opened):
    _, engine = await opened()
    info = await engine.start()
    assert (info.model, info.context_length) == ("stub", 1000)
    assert (info.token_in, info.logprob_mode) == (False, LogprobMode.NONE)
    assert [one.what for one in engine.report.missing] == ["token in"]
    await engine.health()


async def test_text_reasoning_and_calls_come_as_the_server_parsed_them(opened):
    reply = {"content": "to you", "reasoning": "hm",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}  # fmt: skip
    _, engine = await opened(**{CHAT: said(message=reply, finish_reason="tool_calls")})
    (chunk,) = await collect(engine, call())
    assert (chunk.reply.content, chunk.reply.reasoning) == ("to you", "hm")
    assert chunk.reply.tool_calls == (ToolCall("c", "f", "{}"),)
    assert (len(chunk.output_ids), len(chunk.logprobs), chunk.versions) == (0, 0, ())


async def test_a_stream_yields_text_deltas_and_ends_with_the_whole_reply(opened):
    usage = {"choices": [], "usage": {"prompt_tokens": 3}}
    stub, engine = await opened(
        **{CHAT: events(delta("he"), delta("llo"), delta("", "stop"), usage)}
    )
    chunks = await collect(engine, call(stream=True))
    assert [chunk.delta for chunk in chunks] == [TextDelta(text=t) for t in ("he", "llo", "")]
    assert chunks[-1].reply.content == "hello"
    assert stub.bodies[-1]["stream_options"] == {"include_usage": True}


async def test_ids_are_kept_where_the_server_reports_them(opened):
    _, engine = await opened(**{CHAT: said(token_ids=[7, 8])})
    (chunk,) = await collect(engine, call())
    assert chunk.output_ids.tolist() == [7, 8]
    assert chunk.versions == (VersionSpan(0, 0, 2),)
    assert len(chunk.logprobs) == 0


def picky(body):
    """Refuses what OpenAI's own API does not know, one thing at a time."""
    read = json.loads(body)
    for name in ("return_token_ids", "top_k", "max_tokens"):
        if name in read:
            hint = "; use max_completion_tokens" if name == "max_tokens" else ""
            return 400, {"error": {"message": f"Unsupported parameter: {name}{hint}"}}
    return said()


async def test_fields_that_a_server_refused_are_not_sent_again(opened):
    stub, engine = await opened(**{CHAT: picky})
    asked = call(sampling=Sampling(1.0, 1.0, -1, 9, stop=("a", "b", "c", "d", "e"), seed=3))
    await collect(engine, asked)
    assert len(stub.bodies) == 3
    await collect(engine, asked)
    assert len(stub.bodies) == 4
    body = stub.bodies[-1]
    assert body == {"model": "stub", "messages": HI, "max_completion_tokens": 9, "seed": 3,
                    "stop": ["a", "b", "c", "d"], "temperature": 1.0, "top_p": 1.0}  # fmt: skip


async def test_a_400_that_dropping_fields_does_not_cure_is_raised_after_two_tries(opened):
    stub, engine = await opened(**{CHAT: (400, {"error": {"message": "no"}})})
    with pytest.raises(EngineError, match="no") as caught:
        await collect(engine, call())
    assert (caught.value.status, len(stub.bodies)) == (400, 2)


async def test_max_tokens_beyond_the_server_s_context_is_dropped_and_the_call_retried(opened):
    def tight(body):
        if json.loads(body).get("max_tokens", 0) > 10:
            return 400, {"error": {"message": "maximum context length is 20 tokens"}}
        return said()

    stub, engine = await opened(**{CHAT: tight})
    (chunk,) = await collect(engine, call())
    assert chunk.finish_reason is FinishReason.STOP
    assert "max_tokens" not in stub.bodies[-1]


@pytest.mark.parametrize(
    ("grammar", "reply"),
    [
        ({"json_schema": {}}, {"type": "json_object"}),
        (
            {"json_schema": {"type": "array"}},
            {"type": "json_schema", "json_schema": {"name": "reply", "schema": {"type": "array"}}},
        ),
    ],
)
async def test_a_grammar_is_a_response_format(opened, grammar, reply):
    stub, engine = await opened()
    await collect(engine, call(grammar=grammar, tools=[{"type": "function"}], model="other"))
    assert stub.bodies[-1]["response_format"] == reply
    assert stub.bodies[-1]["tools"] == [{"type": "function"}]
    assert stub.bodies[-1]["model"] == "other"
    assert "tool_choice" not in stub.bodies[-1]


async def test_unwanted_tool_calls_are_sent_as_tool_choice_none(opened):
    stub, engine = await opened()
    await collect(engine, call(tools=[{"type": "function"}], calls=False))
    assert stub.bodies[-1]["tool_choice"] == "none"
    await collect(engine, call(calls=False))
    assert "tool_choice" not in stub.bodies[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("reply", "wait_s"), [("7", 7.0), ("soon", None), (None, None)])
async def test_a_busy_server_s_error_has_its_retry_after(opened, stream, reply, wait_s):
    async def busy(request):
        headers = {} if reply is None else {"Retry-After": reply}
        return web.json_response({"error": {"message": "busy"}}, status=429, headers=headers)

    stub, engine = await opened(**{CHAT: busy})
    with pytest.raises(EngineError, match="busy") as caught:
        await collect(engine, call(stream=stream))
    error = caught.value
    assert (error.status, error.retryable, error.retry_after_s) == (429, True, wait_s)
    assert len(stub.bodies) == 1


async def test_no_error_repeats_the_key(opened):
    refusal = (401, {"error": {"message": f"wrong key: {KEY}"}})
    stub, engine = await opened(**{CHAT: refusal})
    with pytest.raises(EngineError, match=r"wrong key: \*\*\*") as caught:
        await collect(engine, call())
    assert KEY not in repr(caught.value)
    assert stub.headers[-1]["Authorization"] == f"Bearer {KEY}"
    stub.replies["/v1/models"] = refusal
    fresh = OpenAIEngine(stub.url + "/v1", api_key=KEY)
    for ask in (engine.health, fresh.start):
        with pytest.raises(EngineError) as again:
            await ask()
        assert KEY not in str(again.value)
    await fresh.aclose()


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ({"data": [{"id": "b"}, {"id": "a"}]}, r"name one, as in openai:URL#MODEL \(a, b\)"),
        (404, "lists no model: name one, as in openai:URL#MODEL$"),
        (b"<html>", "not JSON"),
    ],
)
async def test_a_server_without_exactly_one_listed_model_is_refused_without_a_model_name(
    opened, models, says
):
    with pytest.raises(EngineError, match=says):
        await opened(**{"v1/models": models})


async def test_a_server_that_lists_nothing_serves_the_model_that_is_named(stub):
    server = await stub(**{"v1/models": 404, CHAT: said()})
    engine = OpenAIEngine(server.url + "/v1", model="gpt")
    info = await engine.start()
    assert (info.model, info.context_length) == ("gpt", openai.UNKNOWN_CONTEXT)
    await engine.aclose()


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (b"<html>no</html>", EngineError, "a page, not JSON"),
        ((200, {"choices": []}), CutError, "without a finish reason"),
        ((400, {"error": {"message": "maximum context length is 10 tokens"}}),
         ContextOverflowError, "context length is 10"),
        (said(finish_reason="content_filter"), EngineError, "content_filter"),
    ],
)  # fmt: skip
async def test_unusable_replies_are_engine_errors_with_the_reason(opened, reply, kind, says):
    _, engine = await opened(**{CHAT: reply})
    with pytest.raises(kind, match=says):
        await collect(engine, call())


async def test_a_call_without_messages_is_refused_with_400(opened):
    _, engine = await opened()
    with pytest.raises(EngineError, match="takes messages") as caught:
        await collect(engine, request())
    assert caught.value.status == 400


async def test_an_abort_ends_a_waiting_call(opened):
    async def silence(_request):
        await asyncio.sleep(30)

    stub, engine = await opened(**{CHAT: silence})
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        first = group.create_task(collect(engine, call(request_id="mine")))
        second = group.create_task(collect(engine, call(request_id="other", stream=True)))
        while len(stub.bodies) < 2:  # noqa: ASYNC110 - the stub has no event
            await asyncio.sleep(0.005)
        await engine.abort("mine")
        await engine.abort("unknown")
        await engine.aclose()
    for task in (first, second):
        assert task.result()[-1].finish_reason is FinishReason.ABORT
        assert task.result()[-1].reply is None


async def test_a_whole_reply_that_breaks_off_is_cut(opened):
    async def half(request):
        response = web.StreamResponse()
        response.content_length = 1000
        await response.prepare(request)
        await response.write(b'{"half":')
        request.transport.close()
        return response

    _, engine = await opened(**{CHAT: half})
    with pytest.raises(CutError):
        await collect(engine, call())
