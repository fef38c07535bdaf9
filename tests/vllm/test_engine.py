"""The adapter and the probe against a real vLLM, which gives raw logprobs by default."""

import asyncio
import json

import numpy as np
import pytest

from bridle.engines.vllm_routes import VllmRoute
from bridle.errors import ContextOverflowError, EngineError
from bridle.prompting.renderer import call_grammar
from bridle.types import FinishReason, LogprobMode, ToolSpec, VersionSpan

from .checks import (
    CLOSE,
    TOKENIZER,
    RecordingVllm,
    check_teacher,
    plain_logprobs,
    prompt_of,
    reply,
    request,
)
from .serving import CONTEXT_LENGTH, LACKING, ROUTES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPT = prompt_of("Say anything.")
BLOCK = 128
"""Tokens of one block of the prefix cache on a CPU; only whole blocks are reused."""


@pytest.fixture
async def opened(server):
    """Makes adapters on the server, started."""
    made = []

    async def make(**options):
        made.append(RecordingVllm(server.url, **options))
        await made[-1].start()
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


@pytest.mark.parametrize("route", ROUTES)
async def test_the_probe_finds_everything_that_training_needs_on_every_vllm_route(
    opened, server, route
):
    engine = await opened(route=route)
    info = await engine.start()
    assert engine.report.usable
    images = ("images",) if route is VllmRoute.GENERATE else ()
    found = {f.what: f.ok for f in engine.report.findings}
    assert found.pop("weights") is ("weight versions" not in LACKING)
    assert found == dict.fromkeys(
        ("route", "context length", "pairing", "sampled ids", "logprobs", "token in",
         "logprob mode", "streaming", "seeds", *images), True
    )  # fmt: skip
    assert info.token_in
    assert info.logprob_mode is LogprobMode.RAW
    assert info.context_length == CONTEXT_LENGTH
    assert info.eos_token_ids == (TOKENIZER.end_id,)
    assert info.tokenizer_dir == str(server.model)


@pytest.mark.needs("weight versions")
async def test_the_generate_route_is_chosen_when_it_reports_weight_versions(opened):
    engine = await opened()
    assert engine.report.findings[0].found == VllmRoute.GENERATE.path


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_vllm_samples_under_the_sent_prompt_ids_and_returns_exact_logprobs(
    opened, server, route, stream
):
    engine = await opened(route=route)
    asked = request(PROMPT, stream=stream, max_tokens=24, min_tokens=24)
    ids, logprobs, chunks = await reply(engine, asked)
    assert len(ids) == 24
    assert (len(chunks) > 1) is stream
    assert [c.prompt_ids_json for c in chunks if c.prompt_ids_json] == [asked.prompt.json()]
    assert chunks[-1].versions == (VersionSpan(0, 0, 24),)
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    expected = plain_logprobs(server.model, PROMPT, ids)
    assert np.abs(expected - logprobs).max() < CLOSE


async def test_teacher_logprobs_of_vllm_equal_those_of_a_forward_pass(server):
    await check_teacher(server.url, server.model)


async def test_a_seed_gives_the_same_reply_on_every_vllm_route(opened):
    found = []
    for route in ROUTES:
        engine = await opened(route=route)
        for stream in (False, True):
            ids, _, _ = await reply(engine, request(PROMPT, seed=7, stream=stream))
            found.append(ids.tolist())
    assert len(found) == 2 * len(ROUTES)
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("route", ROUTES)
async def test_stop_strings_and_stop_tokens_end_vllm_replies(opened, server, route):
    server.say({"conversations": [{"turns": [{"content": "one two three four"}]}]})
    engine = await opened(route=route)
    ids, _, chunks = await reply(engine, request(PROMPT))
    whole = TOKENIZER.encode("one two three four").tolist()
    assert ids.tolist() == [*whole, TOKENIZER.end_id]
    assert (chunks[-1].finish_reason, chunks[-1].stop_text) == (FinishReason.STOP, None)

    ids, _, chunks = await reply(engine, request(PROMPT, stop=("three",)))
    assert (chunks[-1].finish_reason, chunks[-1].stop_text) == (FinishReason.STOP, "three")
    assert ids.tolist() == whole[: len(ids)]
    assert "three" in TOKENIZER.decode(ids)

    third = whole[2]
    ids, _, chunks = await reply(engine, request(PROMPT, stop_token_ids=(third,)))
    assert ids.tolist() == whole[: whole.index(third) + 1]
    assert (chunks[-1].finish_reason, chunks[-1].stop_text) == (FinishReason.STOP, None)


@pytest.mark.parametrize("route", ROUTES)
async def test_vllm_s_refusals_are_raised_as_engine_or_context_overflow_errors(opened, route):
    engine = await opened(route=route)
    with pytest.raises(EngineError, match="vocabulary") as caught:
        await reply(engine, request([5, 99_999]))
    assert (caught.value.status, caught.value.retryable) == (400, False)

    engine = await opened(route=route)  # 0.24 closes the connection after that refusal
    engine._context_length = 10 * CONTEXT_LENGTH  # as if it had not reported it
    with pytest.raises(ContextOverflowError) as overflow:
        await reply(engine, request([5] * (CONTEXT_LENGTH + 10)))
    assert overflow.value.context_length == CONTEXT_LENGTH
    await engine.health()


@pytest.mark.parametrize("route", ROUTES)
async def test_an_aborted_call_keeps_its_tokens_and_stops_on_the_vllm_server(opened, server, route):
    engine = await opened(route=route)
    endless = request(PROMPT, stream=True, max_tokens=20_000, min_tokens=20_000)
    ids = 0
    async for chunk in engine.generate(endless):
        ids += len(chunk.output_ids)
        if ids >= 5 and chunk.finish_reason is None:
            await engine.abort("r")
    assert chunk.finish_reason is FinishReason.ABORT
    assert 5 <= ids < 20_000
    async with asyncio.timeout(60):
        while await asyncio.to_thread(server.metric, "vllm:num_requests_running"):  # noqa: ASYNC110 - a server's state has no event
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("route", ROUTES)
async def test_vllm_obeys_a_json_schema_grammar(opened, route):
    engine = await opened(route=route)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    asked = request(PROMPT, max_tokens=200)
    object.__setattr__(asked, "grammar", {"json_schema": schema | {"additionalProperties": False}})
    ids, logprobs, _ = await reply(engine, asked)
    said = json.loads(TOKENIZER.decode(ids, skip_special=True))
    assert said in ({"a": 1}, {"a": 2})
    assert len(logprobs) == len(ids)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_required_tool_call_is_sampled_in_the_chat_template_s_format(opened, route):
    engine = await opened(route=route)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    tools = [ToolSpec("look", None, schema | {"additionalProperties": False})]
    grammar = call_grammar("qwen3", tools, "look")
    assert grammar is not None
    grammar["format"]["elements"].pop(0)  # a model without sense would talk for ever
    grammar["format"]["elements"][0]["stop_after_first"] = True
    asked = request(PROMPT, max_tokens=300)
    object.__setattr__(asked, "grammar", {"structural_tag": grammar})
    ids, _, _ = await reply(engine, asked)
    text = TOKENIZER.decode(ids)
    said = text.partition("<tool_call>\n")[2].partition("\n</tool_call>")[0]
    assert json.loads(said) in [{"name": "look", "arguments": {"a": n}} for n in (1, 2)], text


async def test_vllm_reports_cached_prompt_tokens(opened):
    engine = await opened()
    prompt = prompt_of("word " * 300)
    await reply(engine, request(prompt))
    _, _, chunks = await reply(engine, request(prompt))
    assert chunks[-1].cached_tokens == len(prompt) // BLOCK * BLOCK


async def test_a_configured_logprob_mode_that_differs_from_the_measured_one_is_refused(opened):
    with pytest.raises(EngineError, match="raw by measurement, processed by configuration"):
        await opened(logprob_mode=LogprobMode.PROCESSED)
