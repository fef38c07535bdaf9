"""Responses with tokens per call, contiguous; with the real package in the suite `train`."""

import base64
from contextlib import chdir

import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.bridges.absent import absent
from tests.bridges.by_hand import Player, group, rows, session, trace

from bridle.bridges.base import TaskTable
from bridle.bridges.nemo import agent_class, items_of, response_of, train_batch, verify_response
from bridle.config import Task
from bridle.errors import TrainingError

pytestmark = pytest.mark.filterwarnings("ignore")  # nemo-gym warns about this and that
PARAMS = {"input": "go"}


def with_tokens(items):
    return [item for item in items if "prompt_token_ids" in item]


def test_the_last_item_of_each_call_has_its_token_ids_and_calls_are_contiguous():
    items = items_of(trace())
    assert [item["type"] for item in items] == [
        "reasoning", "function_call", "function_call_output", "message",
    ]  # fmt: skip
    first, second = with_tokens(items)
    assert (first["prompt_token_ids"], first["generation_token_ids"]) == ([1, 2, 3], [4, 5])
    assert second["prompt_token_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert second["generation_log_probs"] == [-0.5] * 3
    assert (items[1]["call_id"], items[2]["call_id"], items[2]["output"]) == ("c1", "c1", "ok")


def test_each_nemo_gym_call_has_the_routed_experts_of_its_prompt_and_output():
    first, second = with_tokens(items_of(trace(routed_experts=rows())))
    for item, tokens in ((first, 5), (second, 10)):
        magic, dtype, shape, text = item["routed_experts"].split(":")
        assert (magic, dtype, shape) == ("nrlre1", "int16", f"{tokens}x2x3")
        assert base64.b64decode(text) == rows()[:tokens].tobytes()
    assert "routed_experts" not in with_tokens(items_of(trace()))[0]


def test_an_untrained_call_is_in_the_prompt_of_the_next_nemo_gym_call():
    mask = trace().loss_mask.copy()
    mask[:2] = 0
    (only,) = with_tokens(items_of(trace(loss_mask=mask)))
    assert only["prompt_token_ids"] == [1, 2, 3, 4, 5, 6, 7]


def test_a_call_that_sampled_nothing_has_no_token_ids_for_nemo_gym():
    empty = trace(exchange_ids=("e0", "empty", "e1"), turn_ends=(2, 2, 7), response_messages=[])
    first, second = with_tokens(items_of(empty))
    assert first["generation_token_ids"] + second["generation_token_ids"] == [4, 5, 8, 9, 10]


def test_nemo_gym_items_of_unmatched_messages_are_empty_texts_with_token_ids():
    result = items_of(trace(response_messages=[]))
    assert [item["content"][0]["text"] for item in result] == ["", ""]
    assert len(with_tokens(result)) == 2


def test_a_nemo_gym_response_is_the_largest_trace_and_counts_the_other_tokens():
    small = trace("small", loss_mask=np.array([1, 1, 0, 0, 0, 0, 0], np.uint8))
    result = response_of(session("s", 1.0, small, trace()))
    assert len(with_tokens(result["output"])) == 2
    assert verify_response(session("s", 1.0, small, trace()), PARAMS)["tokens_left_out"] == 2


@pytest.mark.parametrize("traces", [(), (trace(loss_mask=np.eye(7, dtype=np.uint8)[1]),)])
def test_a_session_without_a_fully_trained_call_is_a_masked_nemo_gym_sample(traces):
    # NeMo RL ends with an error at a response without any token fields.
    made = verify_response(session("s", 0.0, *traces), PARAMS)
    (item,) = with_tokens(made["response"]["output"])
    assert [len(item[f"generation_{name}"]) for name in ("token_ids", "log_probs")] == [1, 1]
    assert made["instance_config"] == {"mask_sample": True}
    assert made["tokens_left_out"] == len(traces)
    assert not made["failure_reason"]


def test_nemo_gym_counts_the_tokens_of_partly_trained_calls_as_left_out():
    mask = trace().loss_mask.copy()
    mask[-1] = 0
    assert verify_response(session("s", 1.0, trace(loss_mask=mask)), PARAMS)["tokens_left_out"] == 2


def test_a_session_with_images_is_refused_for_nemo_rl_and_nemo_gym():
    seen = session("s", 1.0, trace(media=[{"digest": "d"}]))
    for bring in (response_of, lambda one: train_batch([group(one)], pad_id=0)):
        with pytest.raises(TrainingError, match="session s has images"):
            bring(seen)


def test_a_session_without_a_reward_is_a_masked_nemo_gym_sample_with_its_cause():
    result = verify_response(session("s", None, status="TIMEOUT", error="late"), PARAMS)
    assert (result["reward"], result["mask_sample"]) == (0.0, True)
    assert result["failure_reason"] == "TIMEOUT: late"
    assert result["tokens_left_out"] == 0
    # At 7ea279a NeMo RL reads `instance_config.mask_sample` (experience/rollouts.py) and no other.
    assert result["instance_config"] == {"mask_sample": True}
    known = verify_response(session("s", 0.5, trace()), PARAMS)
    assert (known["mask_sample"], known["instance_config"]) == (False, {"mask_sample": False})


@pytest.mark.train
@pytest.mark.timeout(180)
def test_the_nemo_gym_package_reads_response_items_as_training_items(tmp_path):
    # nemo-gym makes `cache/`, also for the package datasets, in the folder where it is imported.
    with absent("wandb"), chdir(tmp_path):
        from nemo_gym.openai_utils import NeMoGymResponse
        from nemo_gym.token_id_capture.builder import assert_prefix_contiguity
        from nemo_gym.token_id_capture.staging import decode_routed_experts

    made = response_of(session("s", 1.0, trace(routed_experts=rows())))
    assert_prefix_contiguity(made)
    read = NeMoGymResponse.model_validate(made)
    result = decode_routed_experts(read.output[3].routed_experts)
    assert result.values == rows().tolist()
    names = [type(item).__name__ for item in read.output]
    assert names == [
        "NeMoGymResponseReasoningItem",
        "NeMoGymResponseFunctionToolCallForTraining",
        "NeMoGymFunctionCallOutput",
        "NeMoGymResponseOutputMessageForTraining",
    ]
    assert read.output[3].generation_token_ids == [8, 9, 10]


@pytest.mark.train
@pytest.mark.timeout(180)
async def test_nemo_gym_s_agent_server_plays_a_session_per_run_request(tmp_path):
    with absent("wandb"), chdir(tmp_path):
        from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig
        from nemo_gym.server_utils import ServerClient
    from starlette.testclient import TestClient

    player = Player(session("s", 1.0, trace()))
    table = TaskTable([Task(task_id="a", instruction="go")])
    config = BaseResponsesAPIAgentConfig(
        host="127.0.0.1", port=1, entrypoint="app.py", name="bridle_agent"
    )
    client = ServerClient.model_construct(head_server_config=None, global_config_dict={})
    agent = agent_class(player, table)(config=config, server_client=client)
    with TestClient(agent.setup_webserver()) as http:
        answer = http.post("/run", json={"responses_create_params": PARAMS, "task_id": "a"})
    result = answer.json()
    assert answer.status_code == 200, result
    assert player.asked == [["a"]]
    assert result["reward"] == 1.0
    assert with_tokens(result["response"]["output"])[1]["generation_token_ids"] == [8, 9, 10]


def test_nemo_gym_warns_about_sessions_whose_traces_have_their_own_rewards():
    rewarded = session("s", 1.0, trace(), trace("t1", reward=0.5))
    with capture_logs() as logs:
        verify_response(rewarded, PARAMS)
        verify_response(session("u", 1.0, trace()), PARAMS)
    (result,) = logs
    assert (result["event"], result["session"]) == ("trace_rewards_left_out", "s")


# Of `ClippedPGLossDataDict` and the batch around it, at NeMo RL's commit 7ea279a
# (`algorithms/grpo.py`, `models/megatron/data.py`).
FIELDS = {
    "input_ids", "input_lengths", "token_mask", "sample_mask", "generation_logprobs", "advantages",
}  # fmt: skip


def two_sessions():
    """One with two traces, of which one has experts, and one with a cut trace."""
    cut = trace("u0").cut(4)
    return [
        group(
            session("s", 1.0, trace("s0", routed_experts=rows()), trace("s1")),
            session("u", 0.0, cut),
            session("v", None, trace("v0")),
        )
    ]


def test_a_nemo_rl_batch_has_every_trace_with_logprobs_advantages_and_routed_experts():
    batch, own = train_batch(two_sessions(), pad_id=99, rows_multiple=4, length_multiple=8)
    assert batch.keys() == FIELDS | {"routed_experts"}
    assert [row.trace.trace_id for row in own] == ["s0", "s1", "u0"]
    assert batch["input_ids"].shape == (4, 16)
    assert batch["input_lengths"].tolist() == [10, 10, 7, 1]
    assert batch["input_ids"][2].tolist() == [1, 2, 3, 4, 5, 6, 7, *[99] * 9]
    assert batch["token_mask"][0, :10].tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert batch["token_mask"][3].sum() == batch["sample_mask"][3] == 0
    assert batch["generation_logprobs"][0, :10].tolist() == [0, 0, 0, -0.5, -0.5, 0, 0, *[-0.5] * 3]
    assert [of[3].item() for of in batch["advantages"]] == [1, 1, -1, 0]
    assert batch["routed_experts"].shape == (4, 16, 2, 3)
    assert batch["routed_experts"][0, :10].tolist() == rows().tolist()
    assert (batch["routed_experts"][0, 10:] == -1).all()
    assert (batch["routed_experts"][1:] == -1).all()


def test_a_nemo_rl_batch_can_have_plain_advantages_and_no_routed_experts():
    sessions = session("s", 1.0, trace("s0")), session("u", 0.0, trace("u0"))
    batch, _ = train_batch([group(*sessions)], pad_id=0, normalise=False)
    assert batch.keys() == FIELDS
    assert [of[3].item() for of in batch["advantages"]] == [0.5, -0.5]


@pytest.mark.parametrize("token_level", [True, False])
def test_each_session_has_weight_1_in_nemo_rl_s_loss(token_level):
    batch, own = train_batch(two_sessions(), pad_id=0, token_level_loss=token_level)
    tokens, samples = batch["token_mask"][:, 1:], batch["sample_mask"]
    # Its `masked_mean` is over the batch's tokens, or over each sequence's and then over sequences.
    part = tokens * samples[:, None]
    if not token_level:
        part = part / tokens.sum(1, keepdim=True)
    weights = {"s": 0.0, "u": 0.0}
    for row, of in zip(own, part.sum(1).tolist(), strict=True):
        weights[row.session.session_id] += of
    assert weights == pytest.approx({"s": 1.0, "u": 1.0})


def test_a_nemo_rl_batch_without_trained_tokens_or_of_mixed_experts_is_refused():
    with pytest.raises(TrainingError, match="no trace in these groups of sessions has a token"):
        train_batch([group(session("v", None, trace()))], pad_id=0)
    other = trace("u0", routed_experts=rows()[:, :1])
    mixed = group(session("s", 1.0, trace("s0", routed_experts=rows())), session("u", 0.0, other))
    with pytest.raises(TrainingError, match="experts of several models"):
        train_batch([mixed], pad_id=0)
