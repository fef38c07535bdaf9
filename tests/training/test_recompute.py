"""The reference trainer's own logprobs, and the gate that they are for updates."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.training.made import group, plain_logprobs, sampled_under, session, tiny_model

from bridle.errors import TrainingError
from bridle.training.forward import digest_of_weights, facts_of, recompute
from bridle.training.grpo import Learner
from bridle.training.samples import make_batch
from bridle.training.settings import GrpoSettings
from bridle.trajectory.fidelity import Facts, certify

RANDOM = np.random.default_rng(0)


def traces_of(model, count=4, version=0):
    return [
        sampled_under(
            model,
            RANDOM.integers(2, 48, 3 + number).tolist(),
            RANDOM.integers(2, 48, 12 + 3 * number).tolist(),
            version=version,
            name=f"t{number}",
        )
        for number in range(count)
    ]


def batch_of(traces, settings, version=0):
    sessions = [session(float(n % 2), one, name=one.trace_id) for n, one in enumerate(traces)]
    return make_batch([group(*sessions)], settings, version=version)


def test_recomputed_logprobs_equal_those_of_a_plain_forward_pass():
    model = tiny_model()
    traces = traces_of(model)
    answers = list(recompute(model, traces, batch_tokens=60))
    assert {one.trace_id for one in answers} == {"t0", "t1", "t2", "t3"}
    for answer in answers:
        trace = traces[int(answer.trace_id[1:])]
        assert answer.logprobs == pytest.approx(plain_logprobs(model, trace), abs=1e-5)
        assert answer.entropies is not None
        assert ((answer.entropies > 0) & (answer.entropies < np.log(48))).all()
    assert max(one.padding or 0 for one in answers) > 0
    assert certify(traces, answers, facts_of(model, Facts())).faithful


def test_given_facts_override_those_read_from_a_model():
    facts = facts_of(tiny_model(), Facts(version=4, padding="none"))
    assert (facts.dtype, facts.experts) == ("float32", "dense")
    assert (facts.version, facts.padding) == (4, "none")
    assert digest_of_weights(tiny_model(0)) == digest_of_weights(tiny_model(0))
    assert digest_of_weights(tiny_model(0)) != digest_of_weights(tiny_model(1))


@pytest.mark.parametrize("packing", ["rows", "tree"])
def test_an_update_over_the_mismatch_limit_is_refused_and_leaves_the_weights(packing):
    model = tiny_model()
    settings = GrpoSettings(most_mismatch=1e-3, packing=packing, temperature=1.0)
    other = traces_of(tiny_model(1))
    learner = Learner(model, settings)
    before = digest_of_weights(model)
    with pytest.raises(TrainingError, match=r"update 1 is refused: .*most_mismatch.*: .*weights"):
        learner.update(batch_of(other, settings))
    assert (digest_of_weights(model), learner.version) == (before, 0)
    assert learner.update(batch_of(traces_of(model), settings)).version == 1


def test_a_mismatch_below_the_limit_or_of_older_weights_is_accepted():
    other = traces_of(tiny_model(1))
    lenient = GrpoSettings(most_mismatch=1e3)
    assert Learner(tiny_model(), lenient).update(batch_of(other, lenient)).version == 1
    strict = GrpoSettings(most_mismatch=0.0)
    stale = [replace(one, versions=one.versions + 0) for one in other]
    learner = Learner(tiny_model(), strict, version=1)
    assert learner.update(batch_of(stale, strict, version=1)).version == 2


def test_an_update_takes_the_same_forward_passes_with_and_without_a_mismatch_limit(monkeypatch):
    model = tiny_model()
    passes = 0
    forward = model.forward

    def counted(*args, **kwargs):
        nonlocal passes
        passes += 1
        return forward(*args, **kwargs)

    counts = []
    for most in (None, 10.0):
        settings = GrpoSettings(most_mismatch=most, learning_rate=1e-9)
        passes = 0
        with torch.random.fork_rng():
            monkeypatch.setattr(model, "forward", counted)
            Learner(model, settings).update(batch_of(traces_of(model), settings))
            monkeypatch.undo()
        counts.append(passes)
    assert counts[0] == counts[1]
