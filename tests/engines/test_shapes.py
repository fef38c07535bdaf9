"""One suite for every adapter of a server: what an engine is in process, it is over HTTP."""

import asyncio

import numpy as np
import pytest
from tests.engines.recording import InstantEngine, RecordingEngine
from tests.engines.shapes import PROMPT, SHAPES, TOKENIZER, collect, ids_of, logprobs_of, request

from bridle.engines.base import CutError, Pausable, Updatable, Versioned
from bridle.engines.ids import ArrayIds
from bridle.engines.vllm import VllmEngine
from bridle.errors import ContextOverflowError, EngineError
from bridle.testing import scripted_engine
from bridle.types import FinishReason, LogprobMode, Sampling, VersionSpan

TURN = {"reasoning": "hm", "content": "Hello, world, and all who live in it."}

pytestmark = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_logprobs_versions_and_end_are_those_of_the_engine(shape, stream):
    inside = scripted_engine([TURN])
    await inside.set_version(3)
    (expected,) = await collect(inside, request())
    async with shape.over(inside) as outside:
        chunks = await collect(outside, request(stream=stream))
    assert (len(chunks) > 1) is stream
    assert np.array_equal(ids_of(chunks), expected.output_ids)
    assert logprobs_of(chunks).dtype == np.float32
    assert np.array_equal(logprobs_of(chunks), expected.logprobs)
    reply = [c.prompt_ids_json for c in chunks if c.prompt_ids_json is not None]
    assert reply == ([expected.prompt_ids_json] if shape.tells_prompt or not stream else [])
    last = chunks[-1]
    assert last.finish_reason is FinishReason.STOP
    assert last.versions == (VersionSpan(3, 0, len(expected.output_ids)),)
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])


async def test_the_info_of_an_engine_client_is_that_of_its_server(shape):
    inside = scripted_engine([TURN], model="m", context_length=5000)
    await inside.set_version(4)
    async with shape.over(inside) as outside:
        info = await outside.start()
        assert (info.model, info.context_length, info.version) == ("m", 5000, 4)
        assert (info.logprob_mode, info.token_in) == (LogprobMode.RAW, True)
        assert info.tokenizer_dir == str(TOKENIZER.folder)
        assert outside.report.usable
        assert outside.report.duration_s < 5
        await outside.health()
        await outside.set_version(9)
        assert (await outside.start()).version == 9
        for contract in (Versioned, Pausable, Updatable):
            assert isinstance(outside, contract)


async def test_prompts_of_20000_ids_are_sent_unchanged(shape):
    inside = InstantEngine()
    engine = RecordingEngine(inside)
    prompt = np.arange(20_000, dtype=np.int32) % 2000
    async with shape.over(engine) as outside:
        chunks = await collect(outside, request(prompt))
    assert chunks[0].prompt_ids_json == ArrayIds(prompt).json()
    assert np.array_equal(engine.requests[-1].prompt.array(), prompt)
    assert np.array_equal(ids_of(chunks), inside.output_ids)


async def test_sampling_parameters_and_grammar_reach_the_server(shape):
    engine = RecordingEngine(scripted_engine([TURN]))
    wanted = Sampling(0.5, 0.9, 7, 11, 1, ("zz",), (5,), 3, 0.1, 0.2)
    grammar = {"json_schema": {"type": "object"}}
    async with shape.over(engine) as outside:
        await collect(outside, request(sampling=wanted, grammar=grammar))
    assert engine.requests[-1].sampling == wanted
    assert engine.requests[-1].grammar == grammar


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_stop_tokens_and_budgets_end_replies(shape, stream):
    whole = TOKENIZER.encode("Hello, world, and all who live in it.").tolist()
    async with shape.over(scripted_engine([{"raw": "Hello, world, and all"}])) as outside:
        chunks = await collect(
            outside, request(stream=stream, sampling=Sampling(max_tokens=99, stop=("world",)))
        )
        assert (chunks[-1].finish_reason, chunks[-1].stop_text) == (FinishReason.STOP, "world")
        assert "world" in TOKENIZER.decode(ids_of(chunks))
        chunks = await collect(outside, request(stream=stream, sampling=Sampling(max_tokens=3)))
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert ids_of(chunks).tolist() == whole[:3]
        stopping = Sampling(max_tokens=99, stop_token_ids=(whole[2],))
        chunks = await collect(outside, request(stream=stream, sampling=stopping))
        assert (chunks[-1].finish_reason, chunks[-1].stop_text) == (FinishReason.STOP, None)
        assert ids_of(chunks).tolist() == whole[: whole.index(whole[2]) + 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_call_ends_with_finish_reason_abort_and_no_ids(shape, stream):
    inside = RecordingEngine(scripted_engine([{"delay_s": 60}]))
    async with shape.over(inside) as outside:
        inside.requests.clear()
        async with asyncio.timeout(15), asyncio.TaskGroup() as group:
            made = request(request_id="mine", stream=stream)
            task = group.create_task(collect(outside, made))
            while not inside.requests:  # noqa: ASYNC110 - the far side has no event
                await asyncio.sleep(0.005)
            await outside.abort("unknown")
            await outside.abort("mine")
        assert task.result()[-1].finish_reason is FinishReason.ABORT
        assert len(ids_of(task.result())) == 0


async def test_an_aborted_stream_keeps_its_tokens_logprobs_and_version(shape):
    inside = RecordingEngine(scripted_engine([{"content": "word " * 2000}]))
    async with shape.over(inside) as outside:
        made = request(stream=True, request_id="mine", sampling=Sampling(max_tokens=9000))
        got = []
        async for chunk in outside.generate(made):
            got.append(chunk)
            if len(ids_of(got)):
                await outside.abort("mine")
    assert got[-1].finish_reason is FinishReason.ABORT
    assert got[-1].versions == (VersionSpan(0, 0, len(ids_of(got))),)
    assert len(logprobs_of(got)) == len(ids_of(got)) > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_call_ends_the_engines_call(shape, stream):
    inside = RecordingEngine(scripted_engine([{"delay_s": 60}]))
    async with shape.over(inside) as outside:
        inside.requests.clear()
        async with asyncio.timeout(15), asyncio.TaskGroup() as group:
            task = group.create_task(collect(outside, request(stream=stream)))
            while not inside.requests:  # noqa: ASYNC110 - the far side has no event
                await asyncio.sleep(0.005)
            task.cancel()
        async with asyncio.timeout(15):
            while not (inside.closed_early or inside.aborted):  # noqa: ASYNC110 - no event there
                await asyncio.sleep(0.005)


async def test_closing_an_engine_client_aborts_its_calls(shape):
    inside = RecordingEngine(scripted_engine([{"delay_s": 60}]))
    async with (
        shape.over(inside) as outside, asyncio.timeout(15), asyncio.TaskGroup() as group
    ):  # fmt: skip
        inside.requests.clear()
        task = group.create_task(collect(outside, request()))
        while not inside.requests:  # noqa: ASYNC110 - the far side has no event
            await asyncio.sleep(0.005)
        await outside.aclose()
    assert task.result()[-1].finish_reason is FinishReason.ABORT


async def test_a_prompt_without_room_is_an_overflow(shape):
    async with shape.over(scripted_engine([TURN], context_length=64)) as outside:
        for size, most in ((64, None), (60, 10)):
            asked = Sampling(max_tokens=most)
            with pytest.raises(ContextOverflowError) as caught:
                await collect(outside, request(np.arange(size) + 33, sampling=asked))
            assert (caught.value.prompt_tokens, caught.value.context_length) == (size, 64)


async def test_an_id_beyond_the_vocabulary_is_refused(shape):
    async with shape.over(scripted_engine([TURN])) as outside:
        with pytest.raises(EngineError, match=r"prompt\[1\]: 99999") as caught:
            await collect(outside, request([5, 99_999]))
    assert (caught.value.status, caught.value.retryable) == (400, False)


@pytest.mark.parametrize(("fault", "retryable"), [(500, True), (429, True), (400, False)])
@pytest.mark.parametrize("stream", [False, True])
async def test_faults_come_through_with_their_status(shape, fault, retryable, stream):
    async with shape.over(scripted_engine([{"fault": fault}])) as outside:
        with pytest.raises(EngineError) as caught:
            await collect(outside, request(stream=stream))
    assert (caught.value.status, caught.value.retryable) == (fault, retryable)


async def gather(engine, got):
    """Return what a streamed call gives until it fails."""
    async for chunk in engine.generate(request(stream=True)):
        got += chunk.output_ids.tolist()


async def test_a_cut_reply_raises_cut_error_after_the_streamed_tokens(shape):
    async with shape.over(scripted_engine([{**TURN, "fault": "cut"}])) as outside:
        with pytest.raises(CutError):
            await collect(outside, request())
        got: list[int] = []
        with pytest.raises(CutError):
            await gather(outside, got)
    assert TOKENIZER.decode(got).startswith("<think>\nhm")


async def test_64_concurrent_calls_over_http_all_finish(shape):
    inside = scripted_engine([{**TURN, "delay_s": 0.1}])
    async with (
        shape.over(inside) as outside, asyncio.timeout(15), asyncio.TaskGroup() as group
    ):  # fmt: skip
        calls = [
            group.create_task(collect(outside, request(request_id=f"r{number}")))
            for number in range(64)
        ]
    assert {call.result()[-1].finish_reason for call in calls} == {FinishReason.STOP}


async def test_a_pause_holds_new_calls_until_it_is_over_or_vllm_refuses_them(shape):
    async with shape.over(scripted_engine([TURN])) as outside:
        is_vllm = isinstance(outside, VllmEngine)
        for mode in ("abort", "wait", "keep"):
            assert await outside.pause(mode)
            assert await outside.is_paused() is is_vllm
            async with asyncio.timeout(15), asyncio.TaskGroup() as group:
                if is_vllm and mode != "keep":
                    with pytest.raises(EngineError, match="Generation is paused") as raised:
                        await collect(outside, request(PROMPT))
                    assert (raised.value.status, raised.value.retryable) == (503, True)
                    await outside.resume()
                task = group.create_task(collect(outside, request(PROMPT)))
                if not is_vllm or mode == "keep":
                    await asyncio.sleep(0.03)
                    assert not task.done()
                    await outside.resume()
            assert task.result()[-1].finish_reason is FinishReason.STOP
            assert not await outside.is_paused()


async def test_a_weight_update_that_the_engine_does_not_support_is_an_error(shape, tmp_path):
    async with shape.over(scripted_engine([TURN])) as outside:
        with pytest.raises(EngineError):
            await outside.update_weights(tmp_path, 5)
        (chunk,) = await collect(outside, request())
    assert chunk.finish_reason is FinishReason.STOP
