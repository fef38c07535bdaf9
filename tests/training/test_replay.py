"""A trainer that replays the rollout's experts computes what the rollout computed."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.made import group, session
from tests.training.mixture import difference, flipped, off, played, save_mixture

from bridle.errors import TrainingError
from bridle.experts import complete_rows
from bridle.training.forward import chosen, facts_of, rows_of
from bridle.training.grpo import Learner
from bridle.training.samples import Sample, make_batch
from bridle.training.settings import GrpoSettings
from bridle.trajectory.fidelity import Facts

pytestmark = pytest.mark.timeout(120)  # 8 s of a core of one's own


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_mixture(tmp_path_factory.mktemp("mixture"), ties=True)


@pytest.fixture(scope="module")
def rolled(folder):
    """Traces of sessions of three turns, through a gateway."""
    import asyncio

    found = asyncio.run(played(folder, sessions=2, turns=3))
    assert [len(one.traces) for one in found] == [1, 1]
    return [trace for one in found for trace in one.traces]


def test_a_trace_over_cached_turns_has_the_routed_experts_of_all_its_tokens(rolled):
    for trace in rolled:
        assert len(trace.exchange_ids) == 3
        assert trace.metadata["cached_tokens"][1] > 0
        assert complete_rows(trace.routed_experts) is not None
        assert (trace.routed_experts[-1] == -1).all()


@pytest.mark.parametrize(
    ("setting", "with_replay"),
    [({}, 1e-11), ({"noise": 3e-6}, 1e-9), ({"dtype": torch.bfloat16}, 1e-4)],
)
def test_replaying_routed_experts_lowers_the_kl_to_that_of_rounding(
    folder, rolled, setting, with_replay
):
    model = off(folder, **setting)
    replayed, largest = difference(model, rolled, replay=True)
    alone, _ = difference(model, rolled, replay=False)
    assert replayed < with_replay
    if setting:
        assert flipped(model, rolled) > 0.1
        assert alone > 1000 * replayed
        assert alone > 0.01
    else:
        assert largest < 1e-4


@pytest.mark.parametrize("packing", ["rows", "sequence", "tree"])
def test_an_update_replays_routed_experts_in_every_batch_layout(folder, rolled, packing):
    errors: Any = {}
    for name in ("replayed", "alone"):
        traces = [
            one if name == "replayed" else dataclasses.replace(one, routed_experts=None)
            for one in rolled
        ]
        learner = Learner(off(folder, noise=3e-6), GrpoSettings(packing=packing))
        sessions = [session(float(n), one, name=f"s{n}") for n, one in enumerate(traces)]
        batch = make_batch([group(*sessions)], learner.settings, version=0)
        errors[name] = learner.update(batch).logprob_error
    assert errors["replayed"] < 1e-2
    assert errors["alone"] > 0.1


@pytest.mark.parametrize("packing", ["rows", "sequence", "tree"])
def test_setting_replay_experts_turns_the_replay_of_experts_on_and_off(folder, rolled, packing):
    batch = [group(*(session(float(n), one, name=f"s{n}") for n, one in enumerate(rolled)))]
    errors: Any = {}
    for replay in (True, False):
        settings = GrpoSettings(packing=packing, replay_experts=replay)
        learner = Learner(off(folder, noise=3e-6), settings)
        errors[replay] = learner.update(make_batch(batch, settings, version=0)).logprob_error
    assert GrpoSettings().replay_experts
    assert errors[True] < 1e-2
    assert errors[False] > 0.1


def test_the_mismatch_limit_is_checked_with_experts_replayed_as_the_setting_says(folder, rolled):
    batch = [group(*(session(float(n), one, name=f"s{n}") for n, one in enumerate(rolled)))]
    for replay in (True, False):
        settings = GrpoSettings(most_mismatch=1e-4, replay_experts=replay)
        learner = Learner(off(folder, noise=3e-6), settings)
        made = make_batch(batch, settings, version=0)
        if replay:
            assert learner.update(made).tokens
        else:
            with pytest.raises(TrainingError, match="most_mismatch"):
                learner.update(made)


@pytest.mark.parametrize("packing", ["rows", "sequence", "tree"])
def test_a_trace_without_recorded_experts_is_routed_by_the_model_in_a_mixed_batch(
    folder, rolled, packing
):
    whole, without = rolled[0], dataclasses.replace(rolled[1], routed_experts=None)
    found = []
    for first in (whole, dataclasses.replace(whole, routed_experts=None)):
        settings = GrpoSettings(packing=packing)
        learner = Learner(off(folder, noise=3e-6), settings)
        batch = [group(session(0.0, first, name="s0"), session(1.0, without, name="s1"))]
        (piece,) = learner._pieces(make_batch(batch, settings, version=0))
        with torch.no_grad():
            logprobs = chosen(*piece.logits(learner.model), 1.0).numpy()
        of, apart = piece.places()[0], np.abs(logprobs - piece.tokens().old)
        names = [sample.trace.trace_id for sample in piece.samples]
        of_each = {name: apart[of == number] for number, name in enumerate(names)}
        found.append((of_each[whole.trace_id], of_each[without.trace_id]))
    (replayed, beside), (alone, _) = found
    assert replayed.max() < 1e-2
    assert alone.max() > 0.1
    assert beside.max() > 0.1


@pytest.mark.parametrize("packing", ["rows", "sequence", "tree"])
def test_gradient_checkpointing_replays_the_same_experts(folder, rolled, packing):
    found = []
    for again in (False, True):
        settings = GrpoSettings(packing=packing, gradient_checkpointing=again, clip_norm=1e9)
        learner = Learner(off(folder, noise=3e-6), settings)
        sessions = [session(float(n), one, name=f"s{n}") for n, one in enumerate(rolled)]
        learner.update(make_batch([group(*sessions)], settings, version=0))
        gradients = [one.grad.flatten() for one in learner.model.parameters()]
        found.append(torch.cat(gradients))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-4


def test_a_shared_prefix_replays_its_routed_experts(folder, rolled):
    model = off(folder, noise=3e-6)
    first = rolled[0]
    shorter = first.cut(first.turn_ends[1])
    samples = [Sample(one, 0, 1.0, 1.0) for one in (first, shorter)]
    (piece,) = rows_of(samples, 1 << 20, share=True)
    assert piece.prefix > 1
    with torch.no_grad():
        ours = chosen(*piece.logits(model), 1.0).numpy()
    assert np.abs(ours - piece.tokens().old).max() < 1e-2


def test_facts_name_experts_as_replayed_when_all_traces_have_them(folder, rolled):
    model = off(folder)
    assert facts_of(model, Facts()).experts == "routed"
    assert facts_of(model, Facts(), rolled).experts == "replayed"
    unknown = dataclasses.replace(rolled[0], routed_experts=None)
    assert facts_of(model, Facts(), [rolled[1], unknown]).experts == "routed"


def test_traces_with_experts_of_several_models_are_refused_in_one_batch(folder, rolled):
    other = dataclasses.replace(rolled[1], routed_experts=rolled[1].routed_experts[:, :2])
    samples = [Sample(one, 0, 1.0, 1.0) for one in (rolled[0], other)]
    (piece,) = rows_of(samples, 1 << 20, share=False)
    with pytest.raises(TrainingError, match="experts of several models"):
        chosen(*piece.logits(off(folder)), 1.0)
