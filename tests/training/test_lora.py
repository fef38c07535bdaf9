"""An adapter trains alone, is all that a checkpoint holds, and means the same to the engine."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.training.made import plain_logprobs, sampled_under, tiny_model
from tests.training.test_grpo import a_batch
from tests.training.test_loop import TOKENIZER, Player, loop

from bridle.embedded.model import PlainModel, check_folder, load_model
from bridle.engines.base import ADAPTER, is_adapter
from bridle.errors import ConfigError, EngineError
from bridle.training.grpo import Learner
from bridle.training.loop import checkpoints, read_state, restore, save_checkpoint
from bridle.training.settings import GrpoSettings, LoraSettings

# The first import of peft takes 15 s where it writes down its bytecode.
pytestmark = pytest.mark.timeout(120)

LORA = LoraSettings(rank=4, alpha=8)


@pytest.fixture
def base(tmp_path):
    """The folder of the initial model."""
    tiny_model(3).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def learner(base, adapter=None, lora=LORA, **settings):
    given = GrpoSettings.model_validate({"learning_rate": 2e-2, **settings})
    return Learner.load(base, given, lora=lora, adapter=adapter)


def split(model):
    """Copies of the parameters: those of the adapter, and all others."""
    copies = {name: one.detach().clone() for name, one in model.named_parameters()}
    mine = {name: one for name, one in copies.items() if ".lora_" in name}
    return mine, {name: one for name, one in copies.items() if name not in mine}


@pytest.mark.parametrize("packing", ["rows", "sequence", "tree"])
def test_a_lora_update_changes_the_adapter_weights_only(base, packing):
    policy = learner(base, packing=packing)
    ours, models = split(policy.model)
    batch = a_batch(policy.model, policy.settings)
    update = policy.update(batch)
    after, same = split(policy.model)

    assert update.logprob_error is not None
    assert update.logprob_error < 1e-4
    assert len(ours) == 2 * 7 * 2  # two matrices for each of 7 linear layers in 2 blocks
    assert sum(not torch.equal(after[name], one) for name, one in ours.items()) == len(ours) / 2
    assert all(torch.equal(same[name], one) for name, one in models.items())
    policy.update(a_batch(policy.model, policy.settings, version=1))
    assert all(not torch.equal(split(policy.model)[0][name], one) for name, one in ours.items())


def test_a_new_lora_adapter_leaves_the_model_unchanged_and_is_deterministic(base):
    policy, noise = learner(base), torch.get_rng_state()
    other = learner(base)
    assert torch.equal(torch.get_rng_state(), noise)
    plain = tiny_model(3).state_dict()
    assert policy.weights().keys() == plain.keys()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in policy.weights().items())
    again = split(other.model)[0]
    assert all(torch.equal(one, again[name]) for name, one in split(policy.model)[0].items())


def test_a_lora_checkpoint_has_only_the_adapter_and_engines_load_it_merged(base, tmp_path):
    policy = learner(base)
    for version in range(3):
        policy.update(a_batch(policy.model, policy.settings, version=version))
    saved = save_checkpoint(tmp_path / "saved", policy, TOKENIZER, {"step": 1}, keep=1)
    trace = sampled_under(policy.model, [2, 3, 4, 5], [7, 8, 9, 10, 11])

    assert is_adapter(saved)
    assert not (saved / "model.safetensors").exists()
    assert all(".lora_" in name for name in load_file(saved / "adapter_model.safetensors"))
    check_folder(saved)
    found = PlainModel(saved).logprobs(trace.prompt_ids, trace.response_ids, 1.0)
    assert np.abs(found - trace.response_logprobs).max() < 1e-5
    before = plain_logprobs(tiny_model(3), trace)
    assert np.abs(found - before).max() > 1e-2
    load_model(saved, dtype="float32", device=torch.device("cpu")).save_pretrained(tmp_path / "m")
    merged = load_file(tmp_path / "m" / "model.safetensors")
    for name, tensor in policy.weights().items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6)


async def test_a_resumed_lora_training_equals_an_uninterrupted_one(base, tmp_path):
    fast = {"learning_rate": 1e-1}
    whole = learner(base, **fast)
    source = Player(whole.model, size=12)
    course = await loop(tmp_path / "whole", whole, source, steps=12).run()
    rewards = [one["reward"] for one in course.evaluations]
    assert rewards[-1] > rewards[0] + 0.2

    first = learner(base, **fast)
    await loop(tmp_path / "parts", first, Player(first.model, size=12), steps=6).run()
    last = checkpoints(tmp_path / "parts")[-1]
    second = learner(base, last, **fast)
    state = read_state(last)
    restore(second, last)
    again = Player(second.model, size=12, cursor=state["cursor"])
    await again.publish(second)
    await loop(tmp_path / "parts", second, again, state, steps=12).run()

    ours, theirs = split(second.model)[0], split(whole.model)[0]
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("targets", "message"),
    [(("nose",), "nose"), (("lm_head",), "output layer"), (("embed_tokens",), "embeddings")],
)
def test_lora_targets_that_cannot_be_adapted_are_refused_by_name(base, targets, message):
    with pytest.raises(ConfigError, match=message):
        learner(base, lora=LoraSettings(targets=targets))


def test_an_adapter_of_another_rank_or_target_is_not_resumed(base, tmp_path):
    policy = learner(base, lora=LoraSettings(rank=2, targets=("q_proj",)))
    saved = save_checkpoint(tmp_path / "saved", policy, TOKENIZER, {"step": 1}, keep=1)
    with pytest.raises(ConfigError, match=r"'rank': 2.*'rank': 4"):
        learner(base, saved, lora=LoraSettings(rank=4))
    with pytest.raises(ConfigError, match=r"q_proj.*v_proj"):
        learner(base, saved, lora=LoraSettings(rank=2, targets=("v_proj",)))


def test_an_adapter_without_its_base_model_is_refused(base, tmp_path):
    saved = save_checkpoint(tmp_path / "saved", learner(base), TOKENIZER, {"step": 1}, keep=1)
    config = json.loads((saved / ADAPTER).read_text())
    (saved / ADAPTER).write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(EngineError, match="lacks base_model_name_or_path"):
        check_folder(saved)
    (saved / ADAPTER).write_text(json.dumps({**config, "base_model_name_or_path": "/gone"}))
    with pytest.raises(EngineError, match="/gone does not exist"):
        check_folder(saved)
