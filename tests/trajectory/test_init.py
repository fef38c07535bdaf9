"""The laws of trajectories, over random conversations and over hand-made ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trajectory.conversations import sessions

from bridle.capture.records import SessionCapture
from bridle.config import BuilderSpec
from bridle.trajectory import rebuild
from bridle.trajectory.result import trajectory_bytes
from bridle.trajectory.sample import MaskReason

STRATEGIES = ("per_request", "prefix_merging")


def stats(trajectory):
    return trajectory.metadata["stats"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(made=sessions())
def test_law_1_a_trace_is_what_the_engine_was_given_and_sampled(strategy, made):
    trajectory = rebuild(made.capture(), builder=BuilderSpec(strategy=strategy))
    for trace in trajectory.traces:
        last = trace.exchange_ids[-1]
        ids = np.concatenate([trace.prompt_ids, trace.response_ids])
        assert np.array_equal(ids, made.full(last))
        for exchange_id, end in zip(trace.exchange_ids, trace.turn_ends, strict=True):
            output = made.outputs[exchange_id]
            context = ids[: len(trace.prompt_ids) + end]
            start = end - len(output)
            if trace.loss_mask[max(start, 0) : end].any():
                assert np.array_equal(
                    context[: len(made.prompts[exchange_id])], made.prompts[exchange_id]
                )


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(made=sessions())
def test_law_2_every_sampled_token_trains_once_or_has_one_reason(strategy, made):
    trajectory = rebuild(made.capture(), builder=BuilderSpec(strategy=strategy))
    numbers = stats(trajectory)
    captured = sum(len(e.output_ids) for e in made.exchanges)
    assert numbers["tokens_captured"] == captured
    assert captured == numbers["tokens_trained"] + sum(numbers["tokens_excluded"].values())
    trained = {}
    for trace in trajectory.traces:
        start = 0
        assert trace.loss_mask.any()
        for exchange_id, end in zip(trace.exchange_ids, trace.turn_ends, strict=True):
            size = int(np.count_nonzero(trace.reasons[start:end] != MaskReason.PROMPT))
            for token in np.flatnonzero(trace.loss_mask[end - size : end]).tolist():
                key = exchange_id, token
                assert key not in trained
                trained[key] = True
                at = end - size + token
                exchange = next(e for e in made.exchanges if e.exchange_id == exchange_id)
                assert trace.response_ids[at] == exchange.output_ids[token]
                assert trace.response_logprobs[at] == exchange.logprobs[token]
            start = end
        assert not trace.response_logprobs[trace.loss_mask == 0].any()
    assert len(trained) == numbers["tokens_trained"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(made=sessions(), data=st.data())
def test_the_order_of_capture_does_not_matter(strategy, made, data):
    capture = made.capture()
    shuffled = data.draw(st.permutations(capture.exchanges))
    other = SessionCapture(
        capture.session, shuffled, dict(reversed(capture.deliveries.items())), capture.bodies,
        capture.outcome,
    )  # fmt: skip
    spec = BuilderSpec(strategy=strategy)
    assert trajectory_bytes(rebuild(other, builder=spec)) == trajectory_bytes(
        rebuild(capture, builder=spec)
    )


@given(made=sessions())
def test_both_builders_train_the_same_tokens(made):
    one, two = (
        stats(rebuild(made.capture(), builder=BuilderSpec(strategy=name))) for name in STRATEGIES
    )
    assert one["tokens_trained"] == two["tokens_trained"]
    assert one["tokens_excluded"] == two["tokens_excluded"]
