"""verl's agent loop: every trace of a session reaches the queue of its V1 trainer."""

from types import SimpleNamespace

import pytest
from tests.bridges.absent import absent, bare
from tests.bridges.by_hand import Player, rows, session, trace

from bridle.bridges.base import Shape
from bridle.bridges.remote import open_server
from bridle.bridges.verl import BridleAgentLoop, outputs_of
from bridle.errors import ConfigError
from bridle.testing import TrainedRow, trainer_conformance, trainer_sessions

pytestmark = pytest.mark.filterwarnings("ignore")  # verl, ray and tensordict warn

SHAPE = Shape(16, 16, overlong="drop", blanks=True)


class Settings(dict):
    """Settings with attributes, like OmegaConf's."""

    __getattr__ = dict.__getitem__


def config(**custom):
    rollout = Settings(prompt_length=16, response_length=16, custom=custom)
    actor = SimpleNamespace(rollout=rollout)
    return SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=actor))


def test_missing_agent_loop_settings_are_named():
    with pytest.raises(ConfigError, match=r"custom\.bridle_server"):
        BridleAgentLoop(config(bridle_server="http://127.0.0.1:1"))


@pytest.fixture
def queue():
    """verl's own V1 worker without engines; its rows land in a list, not in actors of Ray."""
    from transformers import PreTrainedTokenizerFast

    from bridle.config import builtin_tokenizer_dir

    with absent("transfer_queue", "torchdata", "peft"), bare("verl.trainer.ppo.v1"):
        from verl.trainer.ppo.v1 import agent_loop_tq, utils

    rows = []

    async def put(keys, fields, tags, partition_id):
        rows.append((keys, fields, tags, partition_id))

    agent_loop_tq.tq.async_kv_batch_put = put
    worker = object.__new__(agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class)
    worker.tokenizer = PreTrainedTokenizerFast.from_pretrained(builtin_tokenizer_dir())
    worker.processor = worker.reward_loop_worker_handles = None
    worker.distillation_enabled = False
    worker.mm_processor_kwargs = {}
    return worker, rows, utils.compute_advantage_for_multi_trajectories


@pytest.mark.train
@pytest.mark.timeout(180)
async def test_verl_s_v1_queue_trains_every_token_of_every_trace(queue):
    worker, put, _ = queue
    groups = trainer_sessions()
    for number, one in enumerate(one for group in groups for one in group.sessions):
        worker.processor = sees(2) if one.session_id == "images" else None
        kwargs = {"uid": "u", "session_id": number, "global_steps": 4}
        await worker._agent_loop_postprocess(outputs_of(one, SHAPE), False, **kwargs)
    rows = []
    for keys, fields, tags, partition in put:
        assert partition == "train"
        for at, key in enumerate(keys):
            extra = fields["extra_fields"][at]
            given = len(fields["prompts"][at])
            pad = [0] * given
            mask = fields["loss_mask"][at].tolist()
            pixels = fields["multi_modal_inputs"][at].get("pixel_values")
            assert (pixels is not None) is (extra["bridle_session"] == "images")
            if pixels is not None:
                made = sees(2).image_processor([red()], return_tensors="pt")
                assert pixels.equal(made["pixel_values"])
            assert key.endswith(f"_{at}")
            assert (tags[at]["seq_len"], mask) == (
                given + len(mask),
                fields["response_mask"][at].tolist(),
            )
            rows.append(TrainedRow(
                extra["bridle_session"], fields["input_ids"][at].tolist(), [*pad, *mask],
                [*pad, *fields["rollout_log_probs"][at].tolist()], [*pad, *extra["token_versions"]],
            ))  # fmt: skip
    trainer_conformance(groups, rows).check()


def sees(token):
    """A processor of a real model family, to which an image is one token with this id."""
    from transformers import LlavaProcessor, PreTrainedTokenizerFast
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    from bridle.config import builtin_tokenizer_dir

    tokenizer = PreTrainedTokenizerFast.from_pretrained(builtin_tokenizer_dir())
    size = {"height": 28, "width": 28}
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size)
    return LlavaProcessor(
        images, tokenizer, patch_size=28, vision_feature_select_strategy="full",
        image_token=tokenizer.convert_ids_to_tokens(token),
    )  # fmt: skip


def red():
    from PIL import Image

    return Image.new("RGB", (1, 1), (200, 40, 40))


@pytest.mark.train
@pytest.mark.timeout(180)
async def test_verl_s_queue_has_the_routed_experts_of_each_token(queue):
    worker, put, _ = queue
    result = session("s", 1.0, trace(routed_experts=rows()), trace("t1"))
    outputs = outputs_of(result, SHAPE)
    assert [output.routed_experts is None for output in outputs] == [False, True]
    await worker._agent_loop_postprocess(outputs[:1], False, uid="u", session_id=0, global_steps=1)
    ((_, fields, *_),) = put
    aligned = fields["routed_experts"][0].numpy()
    assert (aligned.shape, aligned[-1].any()) == ((10, 2, 3), False)
    assert (aligned[:9] == rows()[:9]).all()


@pytest.mark.train
@pytest.mark.timeout(180)
async def test_verl_s_grpo_counts_a_session_once_and_its_loss_reaches_every_trace(queue):
    import numpy as np
    import torch
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import agg_loss

    worker, put, advantages_of = queue
    many = session("s", 1.0, trace(), trace("t1"), trace("t2", reward=0.25))
    for number, one in enumerate(
        [many, session("u", 0.0, trace()), session("v", None, trace()), session("w", 0.0)]
    ):
        kwargs = {"uid": "u", "session_id": number, "global_steps": 1}
        await worker._agent_loop_postprocess(outputs_of(one, SHAPE), False, **kwargs)
    keys = [key for keys, *_ in put for key in keys]
    rows = [{name: fields[name][at] for name in ("response_mask", "rm_scores")}
            for keys, fields, *_ in put for at in range(len(keys))]  # fmt: skip
    batch = {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)
        for name in ("response_mask", "rm_scores")
    }
    batch["token_level_rewards"] = batch["rm_scores"]
    data = DataProto.from_dict(
        tensors=batch, non_tensors={"uid": np.array(["u"] * 5, dtype=object)}
    )
    done = advantages_of(data, keys, "grpo", config={})
    assert keys == ["u_0_0", "u_0_1", "u_0_2", "u_1_0", "u_3_0"]
    # The group is 1, 0, 0: mean 1/3, and the deviation of a sample.
    high, low = (2 / 3) / 3**-0.5, (-1 / 3) / 3**-0.5
    advantages = done.batch["advantages"]
    assert advantages.sum(-1).tolist() == pytest.approx([5 * high] * 3 + [5 * low, 0], abs=1e-4)
    loss = torch.zeros_like(advantages, requires_grad=True)
    agg_loss(-advantages * torch.exp(loss), done.batch["response_mask"], "token-mean").backward()
    assert torch.equal(loss.grad != 0, done.batch["response_mask"] == 1)


@pytest.mark.train
@pytest.mark.timeout(180)
async def test_verl_s_registry_starts_the_agent_loop_that_plays_the_row_s_task(tmp_path):
    import hydra

    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a", "instruction": "go"}\n')
    custom = {"bridle_server": "http://127.0.0.1:1", "bridle_tasks": str(tmp_path / "tasks.jsonl")}
    named = {"name": "bridle", "_target_": "bridle.bridges.verl.BridleAgentLoop"}
    loop = hydra.utils.instantiate(named, trainer_config=config(**custom), tokenizer=None)
    loop._sessions.__exit__()
    open_server.cache_clear()
    loop._sessions = player = Player(*[session("s", 1.0, trace())] * 3)
    for step in (1, 1, 2):
        (output,) = await loop.run({}, extra_info={"task_id": "a"}, global_steps=step, uid="x")
    assert (player.asked, player.versions) == ([["a"]] * 3, [0, 1])
    assert output.extra_fields["min_global_steps"] == 3
    assert (output.reward_score, output.num_turns) == (1.0, 2)
    with pytest.raises(ConfigError, match="'c', which is not in the task file"):
        await loop.run({}, extra_info={"task_id": "c"})


@pytest.mark.train
@pytest.mark.timeout(180)
def test_overlong_traces_give_one_masked_verl_row_and_an_unknown_reward_gives_no_row():
    (row,) = outputs_of(
        session("s", 1.0, trace(), trace("t1")), Shape(16, 5, overlong="drop", blanks=True)
    )
    assert (row.response_mask, row.reward_score) == ([0], 1.0)
    assert outputs_of(session("s", None, trace()), SHAPE) == []
