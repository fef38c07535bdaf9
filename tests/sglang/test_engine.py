"""The adapter and the probe against a real SGLang: ids, logprobs, versions, aborts, streams."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.vllm.checks import (
    CLOSE,
    TOKENIZER,
    check_teacher,
    plain_logprobs,
    prompt_of,
    reply,
    request,
)
from tests.vllm.serving import CONTEXT_LENGTH

from bridle.engines.sglang import SglangEngine
from bridle.errors import ContextOverflowError, EngineError
from bridle.types import FinishReason, LogprobMode, VersionSpan

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

PROMPT = prompt_of("Say anything.")


@pytest.fixture
async def opened(server):
    """Makes adapters on the server, started."""
    made = []

    async def make(**options):
        made.append(SglangEngine(server.url, **options))
        await made[-1].start()
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


async def test_the_probe_finds_everything_that_training_needs_on_sglang(opened, server):
    engine = await opened()
    info = await engine.start()
    assert engine.report.usable
    lacking = {f.what for f in engine.report.findings if not f.ok}
    assert lacking == {"streams", "seeds"}  # flags that this server was not started with
    assert info.token_in
    assert info.logprob_mode is LogprobMode.PROCESSED
    assert info.context_length == CONTEXT_LENGTH
    assert info.eos_token_ids == (TOKENIZER.end_id,)
    assert info.tokenizer_dir == str(server.model)
    assert engine.vocab_size == 2048
    assert engine.server_version == "0.5.23"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_sglang_samples_under_the_sent_prompt_ids_and_returns_exact_logprobs(
    opened, server, stream, temperature
):
    engine = await opened()
    asked = request(PROMPT, stream=stream, max_tokens=24, min_tokens=0, temperature=temperature)
    ids, logprobs, chunks = await reply(engine, asked)
    assert len(ids) == len(logprobs) > 0
    assert (len(chunks) > 1) is (stream and len(ids) > 1)
    assert chunks[-1].versions == (VersionSpan(0, 0, len(ids)),)
    expected = plain_logprobs(server.model, PROMPT, ids, temperature)
    assert np.abs(expected - logprobs).max() < CLOSE


async def test_teacher_logprobs_of_sglang_equal_those_of_a_forward_pass(server):
    await check_teacher(f"sglang:{server.url}", server.model)


async def test_stop_tokens_stop_strings_and_max_tokens_end_sglang_replies(opened):
    engine = await opened()
    ids, _, chunks = await reply(engine, request(PROMPT, max_tokens=6, top_k=1))
    assert (chunks[-1].finish_reason, len(ids)) == (FinishReason.LENGTH, 6)
    stopped, _, chunks = await reply(
        engine, request(PROMPT, max_tokens=6, top_k=1, stop_token_ids=(int(ids[2]),))
    )
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert stopped.tolist() == ids[: ids.tolist().index(ids[2]) + 1].tolist()
    text = TOKENIZER.decode(ids)[2:8]
    for stream in (False, True):
        asked = request(PROMPT, max_tokens=6, top_k=1, stop=(text,), stream=stream)
        stopped, _, chunks = await reply(engine, asked)
        assert (chunks[-1].finish_reason, chunks[-1].stop_text) == (FinishReason.STOP, text)
        assert stopped.tolist() == ids[: len(stopped)].tolist()
        assert text in TOKENIZER.decode(stopped)


async def test_requests_that_would_crash_sglang_are_refused_before_they_are_sent(opened, server):
    engine = await opened()
    with pytest.raises(EngineError, match="vocabulary") as caught:
        await reply(engine, request([5, 99_999]))
    assert (caught.value.status, caught.value.retryable) == (400, False)
    with pytest.raises(ContextOverflowError):
        await reply(engine, request([5] * (CONTEXT_LENGTH + 10)))
    engine._context_length = 10 * CONTEXT_LENGTH  # as if it had not reported it
    with pytest.raises(EngineError, match="context length") as overflow:
        await reply(engine, request([5] * (CONTEXT_LENGTH + 10)))
    assert overflow.value.status in {400, None}
    await engine.health()


async def test_an_aborted_sglang_stream_keeps_its_tokens(opened):
    engine = await opened()
    endless = request(PROMPT, stream=True, max_tokens=8000, min_tokens=7999)
    got = []
    async for chunk in engine.generate(endless):
        got.append(chunk)
        if len(chunk.output_ids):
            await engine.abort("r")
    ids = np.concatenate([chunk.output_ids for chunk in got])
    assert got[-1].finish_reason is FinishReason.ABORT
    assert 0 < len(ids) < 8000
    assert sum(len(chunk.logprobs) for chunk in got) == len(ids)
    assert got[-1].versions == (VersionSpan(0, 0, len(ids)),)


async def test_an_aborted_sglang_call_without_streaming_keeps_its_tokens(opened):
    engine = await opened()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(reply(engine, request(PROMPT, max_tokens=8000, min_tokens=7999)))
        await asyncio.sleep(2)
        await engine.abort("r")
    ids, logprobs, chunks = task.result()
    assert chunks[-1].finish_reason is FinishReason.ABORT
    assert len(logprobs) == len(ids) < 8000
    assert sum(span.end - span.start for span in chunks[-1].versions) == len(ids)


async def test_sglang_obeys_a_json_schema_grammar(opened):
    engine = await opened()
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    grammar = {"json_schema": schema | {"additionalProperties": False}}
    asked = replace(request(PROMPT, max_tokens=900), grammar=grammar)
    ids, logprobs, _ = await reply(engine, asked)
    said = json.loads(TOKENIZER.decode(ids, skip_special=True))
    assert said in ({"a": 1}, {"a": 2})
    assert len(logprobs) == len(ids)


async def test_sglang_reports_cached_prompt_tokens(opened):
    engine = await opened()
    prompt = prompt_of("word " * 300)
    await reply(engine, request(prompt, max_tokens=2))
    _, _, chunks = await reply(engine, request(prompt, max_tokens=2))
    assert chunks[-1].cached_tokens == len(prompt) - 1


async def test_sglang_tokenises_and_renders_messages_as_bridle_does(opened):
    engine = await opened()
    assert (await engine.tokenize("hello")).tolist() == TOKENIZER.encode("hello").tolist()
    messages = [{"role": "user", "content": "hi"}]
    ours = TOKENIZER.encode(TOKENIZER.render(messages, None, add_generation_prompt=True))
    assert (await engine.template(messages, None, {})).tolist() == ours.tolist()


async def test_version_spans_show_a_weight_update_in_mid_reply_of_sglang(opened, server, models):
    engine = await opened()
    long = request(PROMPT, stream=True, max_tokens=80, min_tokens=80)
    chunks = []
    async for chunk in engine.generate(long):
        chunks.append(chunk)
        if len(chunks) == 1:
            await engine.update_weights(models[1], 7)
    ids = np.concatenate([chunk.output_ids for chunk in chunks])
    logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
    spans = chunks[-1].versions
    assert [span.version for span in spans] == [0, 7]
    assert spans[-1].end == len(ids) == 80
    for span, folder in zip(spans, models, strict=True):
        before = [*PROMPT, *ids[: span.start]]
        expected = plain_logprobs(folder, before, ids[span.start : span.end])
        # The end token has no chance before `min_tokens`: what is left is a little likelier.
        assert np.abs(expected - logprobs[span.start : span.end]).max() < 0.02
    server.load(models[0], 0)


async def test_incremental_sglang_streams_give_exact_logprobs(sglang, models):
    server = sglang.running("--incremental-streaming-output")
    engine = SglangEngine(server.url)
    try:
        await engine.start()
        report: Any = engine.report
        assert "streams" not in {f.what for f in report.findings if not f.ok}
        ids, logprobs, chunks = await reply(engine, request(PROMPT, stream=True, max_tokens=24))
        assert len(chunks) > 1
        expected = plain_logprobs(server.model, PROMPT, ids)
        assert np.abs(expected - logprobs).max() < CLOSE
    finally:
        await engine.aclose()
