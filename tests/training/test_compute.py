"""An update is the same in every precision, layout and way of keeping what backward needs."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests.embedded.models import CONFIGS
from tests.training.made import group, plain_logprobs, sampled_under, session, tiny_model, trace
from tests.training.test_grpo import a_batch

from bridle.errors import ConfigError
from bridle.training import forward
from bridle.training.forward import chosen, packed_of, rows_of
from bridle.training.grpo import Learner, pack_attention, recompute_layers
from bridle.training.samples import Sample, make_batch
from bridle.training.settings import GrpoSettings

ROOT = Path(__file__).parents[2]
PACKINGS = ["rows", "sequence", "tree"]


def gradients(model):
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def updated(**settings):
    """A learner after an update of a batch that its own weights sampled, and the report."""
    model = tiny_model()
    learner = Learner(model, GrpoSettings.model_validate({"clip_norm": 1e9, **settings}))
    return learner, learner.update(a_batch(tiny_model(), learner.settings))


def made(name):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.initializer_range = 0.3
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def update_alone(**settings):
    """The report of an update in a process of its own (`tests/training/memory.py`)."""
    command = [sys.executable, "-m", "tests.training.memory", json.dumps(settings)]
    given = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(300)
def test_gradient_checkpointing_takes_less_than_a_quarter_of_the_memory():
    """Measured: 97 MiB against 671."""
    plain, again = (update_alone(gradient_checkpointing=one) for one in (False, True))
    assert again["mib"] < plain["mib"] / 4
    assert again["norm"] == pytest.approx(plain["norm"], rel=1e-5)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("settings", [{}, {"kl": 0.1, "updates_per_batch": 3}])
def test_gradient_checkpointing_gives_the_same_gradients(packing, settings):
    plain, report = updated(packing=packing, **settings)
    again, other = updated(packing=packing, gradient_checkpointing=True, **settings)

    assert torch.allclose(gradients(plain.model), gradients(again.model), atol=1e-6)
    assert other.loss == pytest.approx(report.loss, abs=1e-6)
    assert not again.model.training


def test_packed_and_padded_traces_give_the_same_gradients():
    plain, report = updated(kl=0.1, updates_per_batch=3)
    again, other = updated(packing="sequence", kl=0.1, updates_per_batch=3)

    assert torch.allclose(gradients(plain.model), gradients(again.model), atol=1e-5)
    assert other.loss == pytest.approx(report.loss, abs=1e-6)
    assert other.logprob_error < 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
def test_bfloat16_gradients_are_near_float32_and_weights_stay_float32(packing, checkpointing):
    plain, report = updated(packing=packing)
    rough, other = updated(packing=packing, dtype="bfloat16", gradient_checkpointing=checkpointing)

    ours, theirs = gradients(rough.model), gradients(plain.model)
    assert 1e-4 < float((ours - theirs).norm() / theirs.norm()) < 0.05
    assert report.logprob_error < 1e-5
    assert 1e-4 < other.logprob_error < 0.1
    assert {one.dtype for one in rough.model.parameters()} == {torch.float32}
    assert ours.dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral", "mixture"])
def test_logprobs_of_a_packed_trace_equal_those_of_the_trace_alone(name):
    model = made(name)
    torch.manual_seed(1)
    samples = []
    for number, length in enumerate((4, 25, 9)):  # beyond the window of mistral
        ids = torch.randint(3, 2000, (length,)).tolist()
        one = sampled_under(model, ids[:2], ids[2:], name=f"t{number}")
        samples.append(Sample(one, 0, 1.0, 1.0))
    pack_attention(model)
    [line] = packed_of(samples, 100)

    with torch.no_grad():
        found = chosen(*line.logits(model), 1.0)

    assert torch.allclose(found, torch.from_numpy(line.tokens().old), atol=1e-4)
    alone = [plain_logprobs(model, sample.trace)[-1] for sample in line.samples]
    at = [len(sample.trace.response_ids) for sample in line.samples]
    assert found[torch.tensor(at).cumsum(0) - 1].tolist() == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("name", ["mamba", "gemma2"])
def test_a_model_that_cannot_compute_packed_traces_is_refused(name):
    """The one mixes them up; the attention of the other caps its scores, which torch's does not."""
    with pytest.raises(
        ConfigError, match=r"packing = 'sequence': .* cannot compute packed traces: "
    ):
        Learner(made(name), GrpoSettings(packing="sequence"))


def test_packing_computes_a_seventh_fewer_tokens_than_padding_when_lengths_differ():
    """64 traces of 24 to 1,169 tokens (log-normal), without a common beginning."""
    drawn = np.random.default_rng(0)
    lengths = np.exp(drawn.normal(5.3, 0.9, 64)).astype(int)
    samples = [Sample(trace([2], [3] * (n - 1)), 0, 1.0, 1.0) for n in lengths.tolist()]
    padded = sum(one.computed for one in rows_of(samples, 4096, share=True, width=128))

    packed = sum(one.computed for one in packed_of(samples, 4096))

    assert (packed, padded) == (18_847, 21_849)


def test_gradient_checkpointing_refuses_a_model_without_known_layers():
    model = transformers.PreTrainedModel(transformers.PreTrainedConfig())
    with pytest.raises(
        ConfigError, match="gradient_checkpointing: it is not supported for PreTrainedModel"
    ):
        recompute_layers(model)


@pytest.fixture(params=[True, False])
def cudnn(request):
    """State of cuDNN's attention before an update."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(request.param)
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("packing", PACKINGS)
def test_only_long_traces_use_cudnn_s_attention_and_a_layer_computed_again_uses_the_same(
    packing, cudnn, monkeypatch
):
    monkeypatch.setattr(forward, "LONG", 8)
    settings = GrpoSettings(packing=packing, batch_tokens=1, gradient_checkpointing=True)
    short, long = ([2, 3], [4]), ([2] * 7, [3])
    model, seen = tiny_model(), []
    groups = [
        group(*(session(reward, sampled_under(tiny_model(), *ids)) for reward in (1.0, 0.0)))
        for ids in (short, long)
    ]
    learner = Learner(model, settings)
    model.model.layers[0].mlp.register_forward_pre_hook(
        lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled())
    )

    learner.update(make_batch(groups, settings, version=0))

    assert {tuple(pair) for pair in zip(seen[::2], seen[1::2], strict=True)} == {
        (False, False),
        (True, True),
    }
    assert torch.backends.cuda.cudnn_sdp_enabled() is cudnn


def test_packed_pieces_have_no_padding():
    model = tiny_model()
    batch = [
        Sample(sampled_under(model, [2, 3], [5] * (n - 2), name=f"t{n}"), 0, 1.0, 1.0)
        for n in (41, 11, 31, 21, 61, 101)
    ]
    pieces = [*packed_of(batch, 60)]

    assert [[len(s.trace.response_ids) for s in one.samples] for one in pieces] == [
        [99], [59], [39, 19], [29, 9],
    ]  # fmt: skip
    assert [one.computed for one in pieces] == [100, 60, 60, 40]
    assert not any(sum(one.padding()) for one in pieces)


def test_reference_and_teacher_give_the_same_divergence_with_packing():
    model, teacher = tiny_model(), tiny_model(2)
    settings = GrpoSettings(packing="sequence", kl=0.1, teacher="elsewhere")
    packed = Learner(copy.deepcopy(model), settings, teacher=copy.deepcopy(teacher))
    plain = Learner(model, settings.model_copy(update={"packing": "rows"}), teacher=teacher)
    one = sampled_under(model, [2, 3], [5, 6, 7])
    two = sampled_under(model, [2, 4], [8])
    batch = make_batch([group(session(1.0, one), session(0.0, two))], settings, version=0)

    assert packed.update(batch).teacher_kl == pytest.approx(plain.update(batch).teacher_kl)
