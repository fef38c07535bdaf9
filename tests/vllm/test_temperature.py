"""A vLLM that gives the logprobs of what was really drawn from: after temperature."""

import numpy as np
import pytest

from bridle.engines.vllm import VllmEngine
from bridle.engines.vllm_routes import Route
from bridle.types import LogprobMode

from .checks import plain_logprobs, prompt_of, reply, request

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPT = prompt_of("Say anything.")
PROCESSED = ("--logprobs-mode", "processed_logprobs")


async def test_processed_logprobs_are_measured_as_such_and_belong_to_the_temperature(vllm):
    vllm.say(None)
    server = vllm.running(*PROCESSED)
    for route in Route:
        engine = VllmEngine(server.url, route=route)
        try:
            info = await engine.start()
            assert info.logprob_mode is LogprobMode.PROCESSED
            asked = request(PROMPT, temperature=0.7, max_tokens=24, min_tokens=24)
            ids, logprobs, _ = await reply(engine, asked)
        finally:
            await engine.aclose()
        unbarred = plain_logprobs(server.model, PROMPT, ids, 0.7)
        # The end token was barred by `min_tokens`; its share is what the two may differ by.
        assert np.abs(unbarred - logprobs).max() < 2e-2
        assert np.abs(plain_logprobs(server.model, PROMPT, ids) - logprobs).max() > 0.1
