import asyncio
import threading
import time

import numpy as np
import pytest

from bridle.engines.base import GenerateRequest
from bridle.engines.ids import ArrayIds
from bridle.errors import ConfigError, EngineError
from bridle.scripted.engine import scripted_logprobs
from bridle.scripted.tokenizer import load_tokenizer
from bridle.testing import JumpingLoop, RecordingEngine, instant_engine, scripted_engine
from bridle.types import FinishReason, Sampling

TOKENIZER = load_tokenizer(None)


def request(text="hi", **fields):
    return GenerateRequest("r", ArrayIds(TOKENIZER.encode(text)), Sampling(), **fields)


async def test_the_instant_engine_answers_any_prompt_with_so_many_ids():
    engine = instant_engine(tokens=16)
    (chunk,) = [one async for one in engine.generate(request())]
    assert (len(chunk.output_ids), chunk.finish_reason) == (16, FinishReason.STOP)
    assert chunk.output_ids[-1] == TOKENIZER.end_id
    assert np.array_equal(chunk.logprobs, scripted_logprobs(chunk.output_ids))
    text = TOKENIZER.decode(chunk.output_ids)
    assert TOKENIZER.encode(text).tolist() == chunk.output_ids.tolist()
    info = await engine.start()
    assert info.token_in
    await engine.health()
    await engine.abort("r")
    await engine.aclose()


async def test_conversations_come_before_the_turns_for_all_others():
    engine = scripted_engine(
        [{"content": "rest"}],
        conversations=[{"when": {"user_contains": "special"}, "turns": [{"content": "special"}]}],
        model="m",
    )
    (chunk,) = [one async for one in engine.generate(request("special"))]
    assert TOKENIZER.visible(chunk.output_ids) == "special"
    assert (await engine.start()).model == "m"
    with pytest.raises(ConfigError, match=r"script: conversations\.0\.turns\.0\.contents"):
        scripted_engine([{"contents": "typo"}])


async def test_a_recording_engine_keeps_what_it_was_asked():
    engine = RecordingEngine(scripted_engine([{"content": "word " * 20}]))
    chunks = [one async for one in engine.generate(request(stream=True))]
    assert len(chunks) > 1
    assert engine.closed_early == []
    opened = engine.generate(request(stream=True))
    await anext(opened)
    await opened.aclose()
    assert len(engine.requests) == 2
    assert engine.closed_early == ["r"]
    await engine.abort("x")
    assert engine.aborted == ["x"]
    assert (await engine.start()).model == "scripted"
    await engine.health()
    await engine.aclose()


async def test_a_failure_is_not_an_early_close():
    engine = RecordingEngine(scripted_engine([{"fault": 500}]))
    with pytest.raises(EngineError):
        [one async for one in engine.generate(request())]
    assert engine.closed_early == []


def test_a_clock_that_jumps_gives_hours_in_their_order():
    async def hours():
        loop, order = asyncio.get_running_loop(), []
        assert isinstance(loop, JumpingLoop)
        began = loop.time()

        async def wait(seconds):
            await asyncio.sleep(seconds)
            order.append((seconds, round(loop.time() - began)))

        with loop.jumping():
            async with asyncio.TaskGroup() as group:
                for seconds in (7200, 60, 3600):
                    group.create_task(wait(seconds))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3600):
                    await asyncio.sleep(7200)
            assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
            with pytest.raises(ZeroDivisionError):
                await asyncio.to_thread(lambda: 1 // 0)
        assert loop.time() - began >= 3 * 3600
        await asyncio.sleep(0.01)
        return order

    began = time.monotonic()
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        assert runner.run(hours()) == [(60, 60), (3600, 3600), (7200, 7200)]
    assert time.monotonic() - began < 3600
