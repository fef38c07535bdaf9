"""The objective against hand-worked numbers and an independent plain implementation."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tests.training.made import group, plain_logprobs, sampled_under, session, tiny_model, trace

from bridle.config import builtin_tokenizer_dir
from bridle.errors import ConfigError, EngineError, TrainingError
from bridle.training.forward import DIVERGENCE_ROWS, Tokens, divergence
from bridle.training.grpo import Learner, objective
from bridle.training.loop import save_checkpoint
from bridle.training.samples import make_batch
from bridle.training.settings import GrpoSettings

TOKENIZER = transformers.PreTrainedTokenizerFast.from_pretrained(builtin_tokenizer_dir())


def tokens(old, advantages, weights):
    return Tokens(
        np.array(old, np.float32),
        np.zeros(len(old), np.int32),
        np.array(advantages, np.float32),
        np.array(weights, np.float32),
    )


def test_the_grpo_loss_of_five_tokens_equals_the_one_worked_by_hand():
    """Ratios 1.5, 0.5, 1.5, 0.5, 1.0; importance 1, 1, 1, 1, 4 under a cap of 2."""
    start = torch.log(torch.tensor([0.2, 0.2, 0.2, 0.2, 0.8]))
    now = torch.log(torch.tensor([0.3, 0.1, 0.3, 0.1, 0.8])).requires_grad_()
    sampled = np.log([0.2, 0.2, 0.2, 0.2, 0.2])
    given_tokens = tokens(sampled, [1, 1, -1, -1, 1], [0.1, 0.2, 0.3, 0.4, 0.5])

    terms = objective(now, given_tokens, GrpoSettings(), start=start)

    # 0.1 * 1.2  +  0.2 * 0.5  +  0.3 * -1.5  +  0.4 * -0.8  +  0.5 * 2 * 1
    assert terms.loss.item() == pytest.approx(-(0.12 + 0.1 - 0.45 - 0.32 + 1.0), abs=1e-6)
    assert (terms.clipped, terms.capped) == (2, 1)
    terms.loss.backward()
    # The clip stops the first and the fourth; elsewhere -weight * importance * ratio * advantage.
    assert now.grad.tolist() == pytest.approx([0, -0.1, 0.45, 0, -1.0], abs=1e-6)


def test_the_kl_term_is_the_weighted_k3_estimate_with_its_gradient():
    now = torch.log(torch.tensor([0.5])).requires_grad_()
    reference = torch.log(torch.tensor([0.25]))
    settings = GrpoSettings(kl=2.0)

    terms = objective(now, tokens([math.log(0.5)], [0], [0.5]), settings, reference=reference)

    k3 = 0.5 - math.log(0.5) - 1
    assert terms.kl == pytest.approx(0.5 * k3)
    assert terms.loss.item() == pytest.approx(2.0 * 0.5 * k3)
    terms.loss.backward()
    assert now.grad.item() == pytest.approx(2.0 * 0.5 * (1 - 0.5))


def plain(now, start, sampled, advantages, weights, reference, settings):
    """The same formula token by token, in Python's own floats."""
    total = 0.0
    for at, weight in enumerate(weights):
        ratio = math.exp(now[at] - start[at])
        held = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
        gain = min(ratio * advantages[at], held * advantages[at])
        trust = min(math.exp(start[at] - sampled[at]), settings.importance_cap)
        apart = reference[at] - now[at]
        total += -weight * trust * gain + settings.kl * weight * (math.exp(apart) - apart - 1)
    return total


logprob = st.floats(-4, 0, width=32)


@given(
    st.lists(
        st.tuples(logprob, logprob, logprob, logprob, st.floats(-2, 2, width=32)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([GrpoSettings(kl=0.1), GrpoSettings(kl=0.5, clip_high=0.4, importance_cap=5)]),
)
def test_the_grpo_loss_equals_that_of_a_plain_implementation(rows, settings):
    now, start, sampled, reference, advantages = zip(*rows, strict=True)
    weights = [1 / (n + 1) for n in range(len(rows))]

    terms = objective(
        torch.tensor(now),
        tokens(sampled, advantages, weights),
        settings,
        start=torch.tensor(start),
        reference=torch.tensor(reference),
    )

    wanted = plain(now, start, sampled, advantages, weights, reference, settings)
    assert float(terms.loss) == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def a_batch(model, settings, version=0):
    """Two groups; tokens 7 are worth something."""
    groups = [
        group(
            session(1.0, sampled_under(model, [2, 3, first], [7, 9], version=version)),
            session(0.0, sampled_under(model, [2, 3, first], [8, 9], version=version)),
            session(
                0.0,
                sampled_under(model, [2, 3, first], [10, 11, 12], [1, 0, 1], version=version),
                sampled_under(model, [2, 4], [13], version=version),
            ),
        )
        for first in (4, 5)
    ]
    return make_batch(groups, settings, version=version)


@pytest.mark.parametrize("packing", ["rows", "sequence", "tree"])
@pytest.mark.parametrize("batch_tokens", [1, 1000])
def test_the_gradient_of_the_first_update_is_the_plain_policy_gradient(packing, batch_tokens):
    """At the start of a batch the objective's gradient is -sum(weight * A * grad logprob)."""
    settings = GrpoSettings(packing=packing, batch_tokens=batch_tokens, clip_norm=1e9)
    learner, other = Learner(tiny_model(), settings), tiny_model()
    batch = a_batch(learner.model, settings)

    update = learner.update(batch)

    loss = torch.tensor(0.0)
    for sample in batch.samples:
        one = sample.trace
        ids = torch.tensor([[*one.prompt_ids.tolist(), *one.response_ids.tolist()]])
        table = torch.log_softmax(other(ids).logits[0], -1)
        for place in np.flatnonzero(one.loss_mask):
            at = len(one.prompt_ids) + place
            loss = loss - sample.weight * sample.advantage * table[at - 1, ids[0, at]]
    loss.backward()
    for mine, theirs in zip(learner.model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-5)
    norm = sum(float(p.grad.square().sum()) for p in other.parameters()) ** 0.5
    assert update.norm == pytest.approx(norm, rel=1e-3)
    assert update.loss == pytest.approx(
        -sum(s.weight * s.advantage * s.trace.loss_mask.sum() for s in batch.samples), abs=1e-5
    )


def test_an_update_raises_the_probability_of_better_replies_and_counts_its_tokens():
    settings = GrpoSettings(learning_rate=1e-2, threads=1)
    learner = Learner(tiny_model(), settings)
    batch = a_batch(learner.model, settings)
    good, bad = batch.samples[0].trace, batch.samples[1].trace

    def margin():
        return plain_logprobs(learner.model, good)[0] - plain_logprobs(learner.model, bad)[0]

    before = margin()
    update = learner.update(batch)

    assert margin() > before + 0.01
    assert (update.version, learner.version, learner.steps) == (1, 1, 1)
    assert (update.tokens, update.traces, update.sessions) == (batch.tokens, 8, 6)
    assert update.lags == {0: batch.tokens}
    assert (update.clipped, update.capped) == (0, 0)


def test_logprob_error_is_near_zero_for_current_weights_and_none_for_stale_tokens():
    settings = GrpoSettings()
    model = tiny_model()
    learner = Learner(model, settings, version=3)

    same = learner.update(a_batch(model, settings, version=3))
    assert same.logprob_error is not None
    assert same.logprob_error < 1e-5
    stale = learner.update(replace(a_batch(model, settings, version=3), version=4))
    assert stale.logprob_error is None


def test_logprob_error_shows_a_rollout_logprob_that_differs_from_the_model_s():
    settings = GrpoSettings(threads=1)
    model = tiny_model()
    wrong = trace([2, 3], [7], logprobs=[plain_logprobs(model, trace([2, 3], [7]))[0] - 0.25])
    right = sampled_under(model, [2, 3], [8])
    batch = make_batch([group(session(1.0, wrong), session(0.0, right))], settings, version=0)

    assert Learner(model, settings).update(batch).logprob_error == pytest.approx(0.25, abs=1e-4)


def test_several_updates_of_one_batch_are_clipped():
    settings = GrpoSettings(learning_rate=0.05, updates_per_batch=6, clip_low=0.1, clip_high=0.1)
    learner = Learner(tiny_model(), settings)

    update = learner.update(a_batch(learner.model, settings))

    assert learner.steps == 6
    assert learner.version == 1
    assert 0 < update.clipped < 1


def test_a_kl_term_keeps_the_policy_nearer_to_its_reference():
    far = []
    for kl in (0.0, 5.0):
        settings = GrpoSettings(learning_rate=1e-2, kl=kl, updates_per_batch=5, threads=1)
        learner = Learner(tiny_model(), settings)
        batch = a_batch(learner.model, settings)
        before = plain_logprobs(learner.model, batch.samples[0].trace)
        learner.update(batch)
        after = plain_logprobs(learner.model, batch.samples[0].trace)
        far.append(np.abs(np.subtract(after, before)).max())
    assert far[1] < far[0]


def test_the_grpo_learning_rate_rises_linearly_during_warm_up():
    settings = GrpoSettings(learning_rate=1e-6, warmup_steps=3, updates_per_batch=1)
    learner = Learner(tiny_model(), settings)
    rates = []
    for version in range(5):
        learner.update(a_batch(learner.model, settings, version=version))
        rates.append(learner.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.25e-6, 0.5e-6, 0.75e-6, 1e-6, 1e-6])


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_nan_loss_or_gradient_raises_and_leaves_the_weights_unchanged(kind):
    settings = GrpoSettings(threads=1)
    model = tiny_model()
    learner = Learner(model, settings)
    batch = a_batch(model, settings)
    if kind == "loss":
        batch.samples[0].trace.response_logprobs[0] = math.nan
    else:
        model.lm_head.weight.register_hook(lambda grad: grad * math.nan)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    with pytest.raises(TrainingError, match=f"the {kind} at step 1 is not a number; .*version 0"):
        learner.update(batch)

    assert all(map(torch.equal, before, model.parameters()))
    assert learner.version == 0


def test_weights_of_a_batch_whose_second_update_fails_are_the_next_version():
    settings = GrpoSettings(threads=1, updates_per_batch=2)
    learner = Learner(tiny_model(), settings)
    batch = a_batch(learner.model, settings)
    factors = iter([1.0, math.nan])
    head = learner.model.lm_head.weight
    head.register_hook(lambda grad: grad * next(factors))
    before = head.detach().clone()

    with pytest.raises(TrainingError, match=r"gradient at step 2 is not a number; .*version 1"):
        learner.update(batch)

    assert not torch.equal(head, before)
    assert learner.version == 1


def test_a_batch_without_samples_raises_with_the_reasons_for_leaving_them_out():
    settings = GrpoSettings()
    flat = make_batch([group(session(1.0, trace([2], [3])))], settings, version=0)
    with pytest.raises(TrainingError, match=r"nothing to train on; left out: \{'flat': 1\}"):
        Learner(tiny_model(), settings).update(flat)


def test_an_update_restores_the_number_of_torch_threads():
    settings = GrpoSettings(threads=2)
    learner = Learner(tiny_model(), settings)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        learner.update(a_batch(learner.model, settings))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_learner_is_loaded_from_folders_with_a_frozen_reference(tmp_path):
    save_checkpoint(tmp_path, Learner(tiny_model(), GrpoSettings()), TOKENIZER, {"step": 1}, keep=1)
    [folder] = tmp_path.iterdir()

    learner = Learner.load(folder, GrpoSettings(kl=0.1), folder)

    assert learner.reference is not None
    assert learner.reference is not learner.model
    assert not any(p.requires_grad for p in learner.reference.parameters())
    with pytest.raises(EngineError, match="does not exist"):
        Learner.load(tmp_path / "gone", GrpoSettings())


def test_the_teacher_s_divergence_is_added_to_the_loss_of_each_token():
    """Of two tokens with the advantages 1 and 1, the second was sampled from half its chance."""
    now = torch.tensor([-3.0, -1.0]).requires_grad_()
    apart = torch.tensor([0.4, 0.2]).requires_grad_()
    given_tokens = tokens([-3.0, -1.0 - math.log(2)], [1.0, 1.0], [0.5, 0.5])

    terms = objective(now, given_tokens, GrpoSettings(distill=0.5), teacher=apart)

    assert terms.loss.item() == pytest.approx(-0.5 * (1 - 0.5 * 0.4) - 0.5 * 2 * (1 - 0.5 * 0.2))
    assert terms.teacher_kl == pytest.approx(0.5 * 0.4 + 0.5 * 0.2)
    terms.loss.backward()
    assert apart.grad is not None
    assert apart.grad.tolist() == pytest.approx([0.25, 0.5])


def test_the_teacher_divergence_is_the_exact_kl_of_both_distributions_with_its_gradient():
    """Also in pieces, and where the other vocabulary has padding behind it."""
    generator = torch.Generator().manual_seed(1)
    ours = torch.randn(DIVERGENCE_ROWS + 3, 11, generator=generator, dtype=torch.double)
    other = torch.randn(DIVERGENCE_ROWS + 3, 13, generator=generator, dtype=torch.double)
    other[:, 11:] = -50
    ours.requires_grad_()
    own, far = torch.log_softmax(ours / 0.7, -1), torch.log_softmax(other[:, :11] / 0.7, -1)
    wanted = torch.nn.functional.kl_div(far, own, reduction="none", log_target=True).sum(-1)
    (expected,) = torch.autograd.grad(wanted.sum(), ours)

    found = divergence(ours, other, 0.7)

    assert torch.allclose(found.double(), wanted, atol=1e-5)
    (gradient,) = torch.autograd.grad(found.sum(), ours)
    assert torch.allclose(gradient, expected, atol=1e-5)


@pytest.mark.timeout(60)
def test_distillation_moves_the_policy_to_its_teacher_without_rewards():
    policy, teacher = tiny_model(1), tiny_model(2)
    settings = GrpoSettings(flat_groups="keep", learning_rate=3e-2, teacher="elsewhere")
    learner = Learner(policy, settings, teacher=teacher)
    prompt = [5, 9, 17]

    def apart():
        ids = torch.tensor([prompt])
        with torch.no_grad():
            own, other = (
                torch.log_softmax(model(ids, use_cache=False).logits[0, -1].double(), -1)
                for model in (policy, teacher)
            )
        return float((own.exp() * (own - other)).sum())

    before, torch_rng = apart(), torch.Generator().manual_seed(3)
    for version in range(10):
        with torch.no_grad():
            spread = torch.softmax(policy(torch.tensor([prompt])).logits[0, -1], -1)
        drawn = torch.multinomial(spread, 32, replacement=True, generator=torch_rng).tolist()
        sessions = [
            session(0.0, trace(prompt, [token], logprobs=[spread[token].log()], version=version))
            for token in drawn
        ]
        learner.update(make_batch([group(*sessions)], settings, version=version))
    assert apart() < before / 2


def test_a_teacher_with_a_different_tokenizer_is_refused(tmp_path):
    learner = Learner(tiny_model(), GrpoSettings())
    for name in ("policy", "teacher"):
        save_checkpoint(tmp_path / name, learner, TOKENIZER, {"step": 1}, keep=1)
    (policy,), (teacher,) = ((tmp_path / n).glob("step-*") for n in ("policy", "teacher"))
    loaded = Learner.load(policy, GrpoSettings(teacher=str(teacher)))
    assert loaded.teacher is not None
    other = transformers.PreTrainedTokenizerFast.from_pretrained(builtin_tokenizer_dir())
    other.add_tokens(["<another>"])
    other.save_pretrained(teacher)
    with pytest.raises(ConfigError, match="has another tokenizer"):
        Learner.load(policy, GrpoSettings(teacher=str(teacher)))
