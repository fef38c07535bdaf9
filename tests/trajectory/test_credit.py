"""Advantages and weights, against examples worked by hand."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.trajectory.credit import (
    grpo_advantages,
    leave_one_out_baselines,
    rloo_advantages,
    session_weights,
    shared_advantages,
    token_weights,
    trace_weights,
)

rewards = st.lists(st.one_of(st.floats(-5, 5), st.just(math.nan)), max_size=10)


def test_grpo_by_hand():
    # mean 0.25, population deviation sqrt(3)/4
    expected = [3 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)]
    assert grpo_advantages([1, 0, 0, 0]) == pytest.approx(expected)
    assert grpo_advantages([1, 0, 0, 0], normalise=False) == pytest.approx(
        [0.75, -0.25, -0.25, -0.25]
    )


def test_rloo_by_hand():
    # 1 against the mean of (0, 0.5); 0 against (1, 0.5); 0.5 against (1, 0)
    assert rloo_advantages([1, 0, 0.5]) == pytest.approx([0.75, -0.75, 0.0])


@pytest.mark.parametrize("advantages", [grpo_advantages, rloo_advantages])
def test_a_group_that_does_not_vary_or_has_one_member_teaches_nothing(advantages):
    assert advantages([0.3] * 4) == pytest.approx([0] * 4, abs=1e-12)
    assert advantages([0.7]).tolist() == [0.0]
    assert advantages([]).tolist() == []


def test_a_deviation_near_zero_is_not_divided_by():
    assert grpo_advantages([0.1 + 0.2, 0.3, 0.3]).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("advantages", [grpo_advantages, rloo_advantages])
def test_a_session_without_a_reward_has_no_part_in_its_group(advantages):
    with_unknown = advantages([1, math.nan, 0, 0.5])
    assert with_unknown[1] == 0.0
    assert with_unknown[[0, 2, 3]] == pytest.approx(advantages([1, 0, 0.5]))
    assert advantages([math.nan, 1.0]).tolist() == [0.0, 0.0]


@given(rewards)
def test_advantages_sum_to_zero_and_are_finite(group):
    for advantages in (grpo_advantages(group), rloo_advantages(group)):
        assert advantages.shape == (len(group),)
        assert np.isfinite(advantages).all()
        assert abs(advantages.sum()) < 1e-6


@given(rewards)
def test_leave_one_out_is_the_centred_reward_scaled(group):
    count = sum(not math.isnan(reward) for reward in group)
    if count >= 2:
        centred = np.nan_to_num(np.array(group) - np.nanmean(group))
        assert rloo_advantages(group) == pytest.approx(centred * count / (count - 1))


def test_a_session_of_many_traces_weighs_as_much_as_one_of_few():
    weights = session_weights([1, 4, 0])
    assert [w.tolist() for w in weights] == [[1.0], [0.25] * 4, []]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=200))
def test_traces_of_a_session_weigh_one_together_by_their_trained_tokens(sizes):
    traces: list[Any] = [
        SimpleNamespace(loss_mask=np.ones(trained), reasons=np.zeros(trained + masked))
        for trained, masked in sizes
    ]
    weights = trace_weights(traces)
    assert weights.sum() == pytest.approx(1.0)
    counts = [trained or masked for trained, masked in sizes]
    if sum(counts):
        assert weights * sum(counts) == pytest.approx(np.array(counts))
    else:
        assert weights == pytest.approx(1 / len(sizes))


def test_all_tokens_of_a_session_together_weigh_one():
    assert token_weights([30, 10]) @ np.array([30, 10]) == pytest.approx(1.0)
    assert token_weights([0, 0]).tolist() == [0.0, 0.0]
    assert token_weights([]).tolist() == []


def test_each_is_held_against_the_mean_of_the_others():
    baselines = leave_one_out_baselines([1.0, 0.0, math.nan, 0.5])
    assert baselines.tolist() == [0.25, 0.75, 0.5, 0.5]
    assert np.isnan(leave_one_out_baselines([1.0, math.nan])).tolist() == [True, False]
    assert rloo_advantages([1.0, 0.0, math.nan, 0.5]).tolist() == [0.75, -0.75, 0.0, 0.0]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6), st.sampled_from(["grpo", "rloo"]))
def test_equal_rewards_within_a_session_give_the_sessions_advantage(group, kind):
    repeated = [[reward] * (n + 1) for n, reward in enumerate(group)]
    wanted = {"grpo": grpo_advantages, "rloo": rloo_advantages}[kind](group)
    for own, expected in zip(shared_advantages(repeated, kind), wanted, strict=True):
        assert own == pytest.approx([expected] * len(own), abs=1e-3)


def test_several_rewards_of_a_session_have_one_vote_together():
    # means 0.5 and 0: mean 0.25; squares (0.75**2 + 0.25**2) / 2 and 0.25**2
    deviation = math.sqrt((0.3125 + 0.0625) / 2)
    assert shared_advantages([[1, 0], [0]], "dr_grpo") == [[0.75, -0.25], [-0.25]]
    assert shared_advantages([[1, 0], [0]], "rloo") == [[1.0, 0.0], [-0.5]]
    assert shared_advantages([[1, 0], [0]], "grpo")[0][0] == pytest.approx(0.75 / deviation)
