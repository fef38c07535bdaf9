"""GRPO on a real SGLang, whose running weights follow the trainer's."""

import pytest
from examples.demo.model import demo_model
from tests.vllm.learning import check_learning

from .serving import RealSglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    """A server of the demo's model."""
    with RealSglang(tmp_path_factory.mktemp("learner"), demo_model()) as server:
        yield server.running("--context-length", "4096")


async def test_grpo_on_a_running_sglang_improves_with_weights_updated_each_step(learner, tmp_path):
    updates = await check_learning(f"sglang:{learner.url}", learner.model, tmp_path)
    assert learner.call("GET", "/model_info")["weight_version"] == str(updates)
