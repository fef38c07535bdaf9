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
    roots_of,
    session_advantages,
    shared_advantages,
    trace_weights,
    tree_advantages,
)


def rloo_advantages(group):
    return np.array(session_advantages(group, "rloo"))


rewards = st.lists(st.one_of(st.floats(-5, 5), st.just(math.nan)), max_size=10)


def test_grpo_advantages_equal_those_worked_by_hand():
    # mean 0.25, population deviation sqrt(3)/4
    expected = [3 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)]
    assert grpo_advantages([1, 0, 0, 0]) == pytest.approx(expected)
    assert grpo_advantages([1, 0, 0, 0], normalise=False) == pytest.approx(
        [0.75, -0.25, -0.25, -0.25]
    )


def test_rloo_advantages_equal_those_worked_by_hand():
    # 1 against the mean of (0, 0.5); 0 against (1, 0.5); 0.5 against (1, 0)
    assert rloo_advantages([1, 0, 0.5]) == pytest.approx([0.75, -0.75, 0.0])


@pytest.mark.parametrize("advantages", [grpo_advantages, rloo_advantages])
def test_advantages_are_zero_for_equal_rewards_and_for_a_group_of_one(advantages):
    assert advantages([0.3] * 4) == pytest.approx([0] * 4, abs=1e-12)
    assert advantages([0.7]).tolist() == [0.0]
    assert advantages([]).tolist() == []


def test_grpo_advantages_are_zero_when_rewards_differ_by_rounding_only():
    assert grpo_advantages([0.1 + 0.2, 0.3, 0.3]).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("advantages", [grpo_advantages, rloo_advantages])
def test_a_session_without_a_reward_has_advantage_0_and_does_not_change_its_group(advantages):
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
def test_rloo_advantages_are_centred_rewards_scaled_by_n_over_n_minus_1(group):
    count = sum(not math.isnan(reward) for reward in group)
    if count >= 2:
        centred = np.nan_to_num(np.array(group) - np.nanmean(group))
        assert rloo_advantages(group) == pytest.approx(centred * count / (count - 1))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=200))
def test_trace_weights_of_a_session_sum_to_one_in_proportion_to_trained_tokens(sizes):
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


def test_rloo_baseline_is_the_mean_of_the_other_known_rewards():
    assert rloo_advantages([1.0, math.nan]).tolist() == [0.0, 0.0]
    assert rloo_advantages([1.0, 0.0, math.nan, 0.5]).tolist() == [0.75, -0.75, 0.0, 0.0]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6), st.sampled_from(["grpo", "rloo"]))
def test_equal_rewards_within_a_session_give_the_sessions_advantage(group, kind):
    repeated = [[reward] * (n + 1) for n, reward in enumerate(group)]
    wanted = {"grpo": grpo_advantages, "rloo": rloo_advantages}[kind](group)
    for own, expected in zip(shared_advantages(repeated, kind), wanted, strict=True):
        assert own == pytest.approx([expected] * len(own), abs=1e-3)


def test_a_session_with_several_rewards_counts_once_in_its_group():
    # means 0.5 and 0: mean 0.25; squares (0.75**2 + 0.25**2) / 2 and 0.25**2
    deviation = math.sqrt((0.3125 + 0.0625) / 2)
    assert shared_advantages([[1, 0], [0]], "dr_grpo") == [[0.75, -0.25], [-0.25]]
    assert shared_advantages([[1, 0], [0]], "rloo") == [[1.0, 0.0], [-0.5]]
    assert shared_advantages([[1, 0], [0]], "grpo")[0][0] == pytest.approx(0.75 / deviation)


TURNS = 3


def played(name, reward, *, of=None, at=0):
    """A session of three turns of two tokens, or its fork after `at` of them."""
    fork = {} if of is None else {"fork": {"session": of, "replayed": exchanges(of)[:at]}}
    ends = tuple(2 * (turn + 1) for turn in range(TURNS))
    trace = SimpleNamespace(
        exchange_ids=tuple(exchanges(name)), turn_ends=ends, response_ids=range(2 * TURNS)
    )
    session: Any = SimpleNamespace(session_id=name, reward=reward, metadata=fork, traces=(trace,))
    return session


def exchanges(name):
    return [f"{name}-{turn}" for turn in range(TURNS)]


def test_tree_advantages_compare_a_session_with_its_fork_from_the_branch_point_on():
    """`a` is worth (1 + 0) / 2 before its second turn, and 1 against its fork's 0 after it."""
    group = [played("a", 1.0), played("b", 0.0), played("a1", 0.0, of="a", at=2)]
    ((a,), (b,), (fork,)) = tree_advantages(group, "dr_grpo")
    assert a.tolist() == [0.25] * 4 + [0.5] * 2
    assert b.tolist() == [-0.25] * 6
    assert fork[4:].tolist() == [-0.5] * 2
    assert roots_of(group) == [0, 1, 0]


def test_tree_advantages_count_a_fork_of_a_fork_in_the_value_of_earlier_turns():
    """`a1` is worth (0 + 1) / 2 after its own second turn, so `a` is worth (0 + 1 / 2) / 2."""
    group = [
        played("a", 0.0),
        played("a1", 0.0, of="a", at=1),
        played("a2", 1.0, of="a1", at=2),
        played("b", 0.0),
    ]
    found = [of[0] for of in tree_advantages(group, "dr_grpo")]
    assert found[0].tolist() == [0.125] * 2 + [-0.25] * 4
    assert found[1][2:].tolist() == [0.25] * 2 + [-0.5] * 2
    assert found[2][4:].tolist() == [0.5] * 2
    assert roots_of(group) == [0, 0, 0, 3]


def test_a_fork_without_a_reward_does_not_change_tree_advantages():
    group = [played("a", 1.0), played("b", 0.0), played("a1", None, of="a", at=1)]
    ((a,), _, (fork,)) = tree_advantages(group, "dr_grpo")
    assert a.tolist() == [0.5] * 2 + [0.0] * 4
    assert not fork.any()


def test_forks_of_a_session_outside_the_group_are_their_own_roots():
    group = [played(name, reward, of="gone", at=1) for name, reward in (("x", 1.0), ("y", 0.0))]
    assert roots_of(group) == [0, 1]


@given(
    values=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=6),
    forks=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 2), st.sampled_from([0.0, 1.0]))),
    kind=st.sampled_from(["grpo", "dr_grpo"]),
)
def test_tree_advantages_of_siblings_sum_to_zero(values, forks, kind):
    group = [played(f"r{place}", value) for place, value in enumerate(values)]
    for number, (of, at, value) in enumerate(forks):
        origin = group[of % len(group)]
        given = len(origin.metadata.get("fork", {}).get("replayed", ()))
        if at > given:
            group.append(played(f"f{number}", value, of=origin.session_id, at=at))
    found = {
        one.session_id: of[0] for one, of in zip(group, tree_advantages(group, kind), strict=True)
    }
    roots = [found[one.session_id][0] for one in group if "fork" not in one.metadata]
    assert sum(roots) == pytest.approx(0, abs=1e-9)
    siblings = {}
    for one in group:
        if origin := one.metadata.get("fork"):
            at = len(origin["replayed"])
            own = found[origin["session"]][2 * at]
            siblings.setdefault((origin["session"], at), [own]).append(
                found[one.session_id][2 * at]
            )
    for of in siblings.values():
        assert sum(of) == pytest.approx(0, abs=1e-9)
    if not siblings:
        assert roots == pytest.approx(session_advantages(values, kind))
