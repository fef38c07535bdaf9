"""Planted causes are named, clean runs are not accused, and bad input is refused.

The causes are planted by computing logprobs under a wrong setting (`planted`). Both runs of each
cause are judged: with the facts that both sides truthfully declare, and with the belief that all is
float32 and nothing else.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.trajectory.planted import (
    PLANTED,
    SHARED,
    Computing,
    clean,
    dense,
    play,
    recomputed,
    rerendered,
    retokenized,
    run,
)

from bridle.errors import ConfigError
from bridle.trajectory.fidelity import Facts, Recomputed, certify, digest_of_ids

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = torch.bfloat16


def first_names(certificate):
    return [mismatch.names[0] for mismatch in certificate.mismatches]


def stripped(made):
    """The run without what a trainer or an engine may leave out."""
    answers = [replace(one, ids=None, entropies=None, padding=None) for one in made.answers]
    traces = [replace(one, metadata={**one.metadata, "cached_tokens": None}) for one in made.traces]
    return replace(made, traces=traces, answers=answers)


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_mismatch_cause_is_named_first_with_and_without_facts(cause):
    made = PLANTED[cause](0)
    for facts in (True, False):
        found = made.certificate(facts=facts)
        assert first_names(found) == [cause], found.summary()
        (mismatch,) = found.mismatches
        assert mismatch.kl_share > 0.99
        assert mismatch.causes[0].evidence in found.summary()
        assert not found.faithful


@pytest.mark.parametrize("seed", range(4))
def test_a_run_without_a_mismatch_is_certified_as_faithful(seed):
    found = clean(seed).certificate(facts=True)
    assert found.faithful, found.summary()
    assert 0 < found.rms < found.tolerance
    assert "agree" in found.summary()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("facts", [True, False])
def test_at_least_nine_of_eleven_planted_causes_are_named_over_five_seeds(facts):
    named = Counter()
    for cause, plant in PLANTED.items():
        for seed in range(5):
            named[cause] += first_names(plant(seed).certificate(facts=facts)) == [cause]
    assert sum(count == 5 for count in named.values()) >= 9, named


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_hundred_runs_without_a_mismatch_are_certified_as_faithful():
    for seed in range(100):
        found = clean(seed).certificate(facts=True)
        assert found.faithful, (seed, found.summary())


def test_two_planted_causes_in_one_run_are_two_mismatches():
    made = run(0, show=retokenized, trainer=lambda how: replace(how, temperature=0.8))
    assert first_names(made.certificate(facts=False)) == ["ids", "temperature"]


def test_tokens_of_an_older_policy_version_are_a_mismatch_of_weights_alone():
    made = run(0, updated_by="trainer")
    traces = [
        replace(trace, versions=np.where(trace.loss_mask == 1, 2, -1).astype(np.int32))
        for trace in made.traces[:4]
    ]
    answers = [*made.answers[:4], *run(0).answers[4:]]
    found = certify([*traces, *made.traces[4:]], answers, SHARED, Facts(dtype="float32"))
    assert first_names(found) == ["weights"]
    assert "version 2 sampled these tokens" in found.mismatches[0].causes[0].evidence


def test_padding_is_found_from_trace_lengths_when_the_trainer_reports_none():
    made = stripped(PLANTED["padding"](1))
    assert first_names(made.certificate(facts=False)) == ["padding"]


def test_a_stale_prefix_cache_is_named_first_when_the_engine_reports_no_cache_hits():
    names = stripped(PLANTED["cache"](1)).certificate(facts=False).mismatches[0].names
    assert names == ["cache", "positions"]


def test_restarted_positions_are_named_before_a_stale_cache_when_no_cache_hits_are_reported():
    names = stripped(PLANTED["positions"](1)).certificate(facts=False).mismatches[0].names
    assert names == ["positions", "cache"]


def test_different_token_ids_are_suspected_when_the_trainer_sends_no_ids():
    made = stripped(run(1, show=retokenized))
    assert first_names(made.certificate(facts=False)) == ["ids"]
    everywhere = stripped(run(1, show=rerendered)).certificate(facts=False)
    assert {"weights", "ids", "template"} <= set(everywhere.mismatches[0].names)


def test_different_prompt_ids_are_the_cause_when_template_digests_agree():
    made = run(0, show=rerendered)
    assert made.certificate(facts=True).mismatches[0].names[0] == "ids"


def test_a_recomputed_row_that_ends_before_a_sampled_token_is_a_mismatch_of_ids():
    made = run(0)
    short = made.answers[0].ids
    assert short is not None
    found = certify(made.traces, [replace(made.answers[0], ids=short[:-1])], SHARED, SHARED)
    assert first_names(found) == ["ids"]
    assert "the end at the trainer" in found.mismatches[0].causes[0].evidence


def test_a_temperature_mismatch_is_found_without_entropies():
    made = run(2, trainer=lambda how: replace(how, temperature=0.8))
    assert first_names(stripped(made).certificate(facts=False)) == ["temperature"]


def test_the_trainer_s_temperature_is_estimated_from_entropies():
    made = run(2, trainer=lambda how: replace(how, temperature=0.9))
    evidence = made.certificate(facts=False).mismatches[0].causes[0].evidence
    assert "temperature is 0.9 times" in evidence


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout": lambda how: replace(how, top_k=10)}, "the rollout's logprob is the higher"),
        ({"trainer": lambda how: replace(how, top_k=30)}, "impossible at the trainer"),
        ({"rollout": lambda how: replace(how, penalty=1.1)}, "stood there before"),
        ({"rollout": lambda how: replace(how, bias=1.0)}, "id alone explains"),
    ],
)
def test_each_logits_processor_mismatch_is_named_with_its_own_evidence(changes, said):
    suspect = run(3, **changes).certificate(facts=False).mismatches[0].causes[0]
    assert suspect.cause == "processor"
    assert said in suspect.evidence


def test_differences_that_grow_with_the_position_name_position_ids_first():
    made = run(1, trainer=lambda how: replace(how, theta=9000.0))
    assert made.certificate(facts=False).mismatches[0].names == ["positions", "attention"]


def test_declared_facts_decide_between_causes_that_the_logprobs_leave_open():
    made = run(1, trainer=lambda how: replace(how, theta=1e5), trainer_facts={"positions": "1e5"})
    assert made.certificate(facts=False).mismatches[0].names == ["weights", "positions"]
    assert made.certificate(facts=True).mismatches[0].names == ["positions"]


def test_a_mismatch_whose_causes_all_facts_exclude_is_unknown():
    made = run(1, trainer=lambda how: replace(how, theta=1e5))
    (suspect,) = made.certificate(facts=True).mismatches[0].causes
    assert suspect.cause == "unknown"
    assert "the facts exclude" in suspect.evidence


def test_facts_that_differ_without_an_effect_on_logprobs_are_no_mismatch():
    made = run(1, trainer_facts={"attention": "flash", "weights": "other"})
    found = made.certificate(facts=True)
    assert found.faithful
    assert ("attention", "eager", "flash", False) in found.facts()


def test_half_precision_is_no_mismatch_unless_float32_is_declared():
    made = run(1, trainer=lambda how: replace(how, dtype=HALF))
    assert certify(made.traces, made.answers, Facts(), Facts()).faithful
    declared = certify(made.traces, made.answers, Facts(dtype="float32"), Facts(dtype="float32"))
    assert declared.mismatches[0].names == ["dtype", "attention", "weights"]


def test_routed_experts_are_no_cause_in_a_dense_model():
    made = PLANTED["experts"](1)
    assert "of the tokens hold" in made.certificate(facts=False).mismatches[0].causes[0].evidence
    dense_fact = replace(SHARED, dtype="bfloat16")
    found = certify(made.traces, made.answers, dense_fact, dense_fact)
    assert "experts" not in found.mismatches[0].names


def test_token_shares_and_kl_shares_of_turns_sum_to_one():
    found = PLANTED["cache"](0).certificate(facts=True)
    assert sum(turn.tokens for turn in found.turns) == found.tokens
    assert sum(turn.token_share for turn in found.turns) == pytest.approx(1)
    assert sum(turn.kl_share for turn in found.turns) == pytest.approx(1)
    accused = [turn for turn in found.turns if turn.causes]
    assert all(turn.causes == ("cache",) for turn in accused)
    assert sum(turn.kl_share for turn in accused) > 0.99
    assert max(turn.largest for turn in accused) > 0.1
    assert found.json()["mismatches"][0]["causes"][0]["cause"] == "cache"


def test_rollout_facts_are_read_from_the_traces():
    made = run(1, rollout=lambda how: replace(how, top_k=20, temperature=0.7))
    found = certify(made.traces, made.answers, Facts(), Facts(dtype="float32"))
    assert found.rollout.processors == "top_k=20"
    assert (found.rollout.temperature, found.rollout.version) == (0.7, 3)
    assert found.rollout.ids == found.trainer.ids is not None
    raw = [replace(trace, logprob_mode="raw") for trace in made.traces]
    found = certify(raw, stripped(made).answers, Facts(ids="d"), Facts())
    assert (found.rollout.temperature, found.rollout.processors) == (1.0, "none")
    assert found.rollout.ids == digest_of_ids(
        (trace.trace_id, np.concatenate([trace.prompt_ids, trace.response_ids])) for trace in raw
    )


def test_trained_tokens_without_a_recomputed_logprob_are_counted_as_missing():
    made = run(1)
    found = certify(made.traces, made.answers[:-1], Facts(), Facts())
    assert found.missing == int(made.traces[-1].loss_mask.sum())


def test_recomputed_logprobs_need_one_value_per_response_id():
    trace = run(1).traces[0]
    answer = Recomputed.of(trace, trace.response_logprobs, padding=0)
    assert certify([trace], [answer], Facts()).rms == 0
    with pytest.raises(ConfigError, match=r"3, and its response has \d+ ids"):
        Recomputed.of(trace, trace.response_logprobs[:3])


def test_invalid_recomputed_logprobs_are_refused_with_the_reason():
    model = dense(0)
    sessions = play(model, 0, Computing(model))
    answer = recomputed(sessions, Computing(model))[0]
    traces = run(0).traces
    with pytest.raises(ConfigError, match="of different lengths"):
        replace(answer, logprobs=answer.logprobs[1:])
    with pytest.raises(ConfigError, match="positive or not a number"):
        replace(answer, logprobs=answer.logprobs * np.nan)
    with pytest.raises(ConfigError, match="no token that trains stands at position 0"):
        certify(traces, [replace(answer, positions=answer.positions * 0)], Facts())
    with pytest.raises(ConfigError, match="twice"):
        certify(traces, [answer, answer], Facts())
    with pytest.raises(ConfigError, match="no such trace trains"):
        certify(traces, [replace(answer, trace_id="other")], Facts())
    with pytest.raises(ConfigError, match="nothing to compare"):
        certify(traces, [], Facts())


def test_unknown_facts_are_refused_with_a_list_of_the_known_ones():
    assert Facts.of({"dtype": "float16"}, "here").json() == {"dtype": "float16"}
    with pytest.raises(ConfigError, match=r"here: unknown fact 'colour'; known: weights, version"):
        Facts.of({"colour": "red"}, "here")
    with pytest.raises(ConfigError, match=r"unknown dtype 'int4'; known: float32"):
        Facts.of({"dtype": "int4"}, "here")
