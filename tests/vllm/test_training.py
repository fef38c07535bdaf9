"""GRPO on a real vLLM, whose running weights follow the trainer's."""

import pytest

from .learning import check_learning

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.needs("weight versions"),
    pytest.mark.drawn_with("learner"),
    pytest.mark.timeout(600),
]


async def test_grpo_on_a_running_vllm_improves_with_weights_updated_each_step(learner, tmp_path):
    updates = await check_learning(learner.url, learner.model, tmp_path)
    assert learner.call("GET", "/weight_info") == {"weight_version": str(updates)}
