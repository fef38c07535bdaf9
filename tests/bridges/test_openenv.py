"""Training traces of OpenEnv; with the real package in the suite `train`."""

import numpy as np
import pytest
from tests.bridges.absent import bare
from tests.bridges.by_hand import session, trace

from bridle.bridges.traces import openenv_trace, training_trace


def forked():
    """Two traces share their first call; it trains in the first."""
    mask = np.array([0, 0, 0, 0, 1, 1, 1], np.uint8)
    other = trace("t1", loss_mask=mask, response_logprobs=np.where(mask, -0.25, 0).astype("f4"),
                  exchange_ids=("e0", "e2"))  # fmt: skip
    return session("s", 1.0, trace(), other)


def test_each_call_is_one_openenv_turn_with_its_whole_prompt():
    result = training_trace(forked())
    assert [turn["node_id"] for turn in result["turns"]] == ["e0", "e1", "e2"]
    first, second, third = result["turns"]
    assert first["loss_mask"] == [0, 0, 0, 1, 1]
    assert second["prompt_token_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert second["completion_token_ids"] == [8, 9, 10]
    assert second["metadata"] == {"trace_id": "t0", "reward": None, "versions": [4]}
    assert third["per_token_logps"] == [-0.25] * 3


def test_a_call_masked_in_one_trace_is_taken_from_the_trace_that_trains_it():
    masked = trace("t0", loss_mask=trace().loss_mask * 0)
    result = training_trace(session("s", 1.0, masked, trace("t1")))
    assert [turn["metadata"]["trace_id"] for turn in result["turns"]] == ["t1", "t1"]


@pytest.mark.train
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_the_openenv_package_reads_every_turn():
    harness = "openenv.core.harness"
    with bare("openenv", "openenv.core", harness, f"{harness}.capture"):
        read = openenv_trace(forked())
    assert read.turns[0].loss_mask == [0, 0, 0, 1, 1]
    assert len(read.to_trace_entries()) == 3
