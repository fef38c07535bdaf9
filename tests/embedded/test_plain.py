import numpy as np
import pytest

from bridle.embedded.model import PlainModel
from bridle.engines.base import GenerateRequest
from bridle.engines.compare import recompute_logprobs
from bridle.engines.ids import ArrayIds
from bridle.errors import EngineError
from bridle.types import LogprobMode, Sampling

PROMPT = np.arange(5, 25, dtype=np.int32)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_what_the_embedded_engine_samples_is_a_plain_forward_pass(
    opened, folder, temperature
):
    plain = PlainModel(folder)
    async with opened(folder) as engine:
        asked = Sampling(temperature=temperature, top_p=1.0, top_k=-1, max_tokens=12, seed=1)
        chunks = [c async for c in engine.generate(GenerateRequest("r", ArrayIds(PROMPT), asked))]
        ids = np.concatenate([chunk.output_ids for chunk in chunks])
        told = np.concatenate([chunk.logprobs for chunk in chunks])
        assert np.abs(plain.logprobs(PROMPT, ids, temperature) - told).max() < 1e-3
        finding = await recompute_logprobs(engine, LogprobMode.PROCESSED, plain.logprobs, PROMPT)
    assert finding.ok, finding


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(EngineError):
        PlainModel(tmp_path)
