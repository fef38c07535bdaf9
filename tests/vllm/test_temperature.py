"""A vLLM that gives the logprobs of what was really drawn from: after temperature."""

import numpy as np
import pytest

from bridle.engines.vllm import VllmEngine
from bridle.types import LogprobMode

from .checks import CLOSE, plain_logprobs, prompt_of, reply, request
from .serving import ROUTES

pytestmark = [pytest.mark.vllm, pytest.mark.drawn_with("learner"), pytest.mark.timeout(300)]

PROMPT = prompt_of("Say anything.")


async def test_processed_logprobs_are_detected_and_are_those_after_temperature(learner):
    for route in ROUTES:
        engine = VllmEngine(learner.url, route=route)
        try:
            info = await engine.start()
            assert info.logprob_mode is LogprobMode.PROCESSED
            asked = request(PROMPT, temperature=0.7, max_tokens=24, seed=1)
            ids, logprobs, _ = await reply(engine, asked)
        finally:
            await engine.aclose()
        assert len(ids) > 4
        assert np.abs(plain_logprobs(learner.model, PROMPT, ids, 0.7) - logprobs).max() < CLOSE
        raw = plain_logprobs(learner.model, PROMPT, ids)
        assert np.abs(raw - logprobs).max() > 10 * CLOSE
