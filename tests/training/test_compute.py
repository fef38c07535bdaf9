"""An update is the same in every precision, layout and way of keeping what backward needs."""

import copy
import math

import pytest
import torch
import transformers
from tests.embedded.models import CONFIGS
from tests.training.made import group, plain_logprobs, sampled_under, session, tiny_model
from tests.training.test_grpo import a_batch

from bridle.errors import ConfigError
from bridle.training.compute import pack_attention, recompute_layers
from bridle.training.forward import lines_of
from bridle.training.grpo import Learner
from bridle.training.samples import Sample, make_batch
from bridle.training.settings import GrpoSettings

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


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("settings", [{}, {"kl": 0.1, "updates_per_batch": 3}])
def test_recomputed_layers_give_the_same_gradients(packing, settings):
    plain, report = updated(packing=packing, **settings)
    again, other = updated(packing=packing, gradient_checkpointing=True, **settings)

    assert torch.allclose(gradients(plain.model), gradients(again.model), atol=1e-6)
    assert other.loss == pytest.approx(report.loss, abs=1e-6)
    assert not again.model.training


def test_packed_traces_give_the_gradients_of_padded_ones():
    plain, report = updated(kl=0.1, updates_per_batch=3)
    again, other = updated(packing="sequence", kl=0.1, updates_per_batch=3)

    assert torch.allclose(gradients(plain.model), gradients(again.model), atol=1e-5)
    assert other.loss == pytest.approx(report.loss, abs=1e-6)
    assert other.logprob_error < 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
def test_bfloat16_is_near_float32_and_its_weights_stay_float32(packing, checkpointing):
    plain, report = updated(packing=packing)
    rough, other = updated(packing=packing, dtype="bfloat16", gradient_checkpointing=checkpointing)

    ours, theirs = gradients(rough.model), gradients(plain.model)
    assert 1e-4 < float((ours - theirs).norm() / theirs.norm()) < 0.05
    assert report.logprob_error < 1e-5
    assert 1e-4 < other.logprob_error < 0.1
    assert {one.dtype for one in rough.model.parameters()} == {torch.float32}
    assert ours.dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral", "mixture"])
def test_each_packed_trace_is_computed_as_if_alone(name):
    model = made(name)
    torch.manual_seed(1)
    samples = []
    for number, length in enumerate((4, 25, 9)):  # beyond the window of mistral
        ids = torch.randint(3, 2000, (length,)).tolist()
        one = sampled_under(model, ids[:2], ids[2:], name=f"t{number}")
        samples.append(Sample(one, 0, 1.0, 1.0))
    pack_attention(model)
    [line] = lines_of(samples, 100)

    with torch.no_grad():
        found = line.logprobs(model, 1.0)

    assert torch.allclose(found, torch.from_numpy(line.tokens().old), atol=1e-4)
    alone = [plain_logprobs(model, sample.trace)[-1] for sample in line.samples]
    at = [len(sample.trace.response_ids) for sample in line.samples]
    assert found[torch.tensor(at).cumsum(0) - 1].tolist() == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize(("name", "reason"), [("mamba", "mixes them up|not support")])
def test_a_model_that_mixes_up_packed_traces_is_refused(name, reason):
    with pytest.raises(ConfigError, match=f"packing = 'sequence': .* packed traces: .*({reason})"):
        Learner(made(name), GrpoSettings(packing="sequence"))


def test_a_model_without_known_layers_is_refused():
    model = transformers.PreTrainedModel(transformers.PreTrainedConfig())
    with pytest.raises(ConfigError, match="gradient_checkpointing: the layers of PreTrainedModel"):
        recompute_layers(model)


def test_packing_fills_pieces_without_padding():
    model = tiny_model()
    batch = [
        Sample(sampled_under(model, [2, 3], [5] * (n - 2), name=f"t{n}"), 0, 1.0, 1.0)
        for n in (41, 11, 31, 21, 61, 101)
    ]
    pieces = [*lines_of(batch, 60)]

    assert [[len(s.trace.response_ids) for s in one.samples] for one in pieces] == [
        [99], [59], [39, 19], [29, 9],
    ]  # fmt: skip
    assert [one.computed for one in pieces] == [100, 60, 60, 40]
    assert math.prod(sum(one.padding()) + 1 for one in pieces) == 1


def test_a_reference_and_a_teacher_are_packed_too():
    model, teacher = tiny_model(), tiny_model(2)
    settings = GrpoSettings(packing="sequence", kl=0.1, teacher="elsewhere")
    packed = Learner(copy.deepcopy(model), settings, teacher=copy.deepcopy(teacher))
    plain = Learner(model, settings.model_copy(update={"packing": "rows"}), teacher=teacher)
    one = sampled_under(model, [2, 3], [5, 6, 7])
    two = sampled_under(model, [2, 4], [8])
    batch = make_batch([group(session(1.0, one), session(0.0, two))], settings, version=0)

    assert packed.update(batch).teacher_kl == pytest.approx(plain.update(batch).teacher_kl)
