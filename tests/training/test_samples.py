"""Weights of the tokens of a batch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.capture.made import MadeSession
from tests.training.made import group, session, trace

from bridle.errors import TrainingError
from bridle.training.samples import DR_GRPO_TOKENS, advantages_of, make_batch, nothing_left
from bridle.training.settings import GrpoSettings
from bridle.trajectory import rebuild
from bridle.types import Kind, Sampling


def of(groups, version=0, max_lag=None, **settings):
    return make_batch(groups, GrpoSettings(**settings), version=version, max_lag=max_lag)


PAIR = group(
    session(1.0, trace([1], [2, 3]), trace([1], [4, 5, 6, 7])),
    session(0.0, trace([1], [8])),
)


@pytest.mark.parametrize(
    ("normalise", "weights"),
    [
        ("token", [1 / 12, 1 / 12, 1 / 2]),
        ("sequence", [1 / 8, 1 / 16, 1 / 2]),
        ("batch", [1 / 7, 1 / 7, 1 / 7]),
    ],
)
def test_token_weights_are_normalised_by_session_trace_or_batch(normalise, weights):
    batch = of([PAIR], normalise=normalise)

    assert [sample.weight for sample in batch.samples] == pytest.approx(weights)
    assert [sample.advantage for sample in batch.samples] == [1, 1, -1]
    assert (batch.sessions, batch.tokens) == (2, 7)


def test_dr_grpo_equals_the_paper_s_formula():
    """Eq. 3 of arXiv 2503.20783: sum over sessions and tokens of (R - mean R), over G.

    Divided by one constant; neither by a session's length nor by the deviation.
    """
    rewards = [1.0, 0.0, 0.0]
    lengths = [2, 5, 3]
    of_paper = [
        (1 / 3) * (reward - sum(rewards) / 3) * n
        for reward, n in zip(rewards, lengths, strict=True)
    ]
    sessions = [session(r, trace([1], range(n))) for r, n in zip(rewards, lengths, strict=True)]

    batch = of([group(*sessions)], advantage="dr_grpo")

    found = [s.weight * s.advantage * s.trace.loss_mask.sum() for s in batch.samples]
    assert [one * DR_GRPO_TOKENS for one in found] == pytest.approx(of_paper)


def test_dr_grpo_refuses_setting_normalise():
    with pytest.raises(ValidationError, match="dr_grpo divides by a constant: remove normalise"):
        GrpoSettings(advantage="dr_grpo", normalise="token")


def test_trace_rewards_are_compared_within_a_role():
    def played(name, planner, worker):
        return session(
            0.5,
            trace([1], [2], reward=planner, metadata={"kind": "agent"}),
            trace([1], [3], reward=worker, metadata={"kind": "subagent"}),
            name=name,
        )

    batch = of([group(played("a", 1.0, 0.0), played("b", 0.0, 0.5))])

    assert [s.advantage for s in batch.samples] == [1, -1, -1, 1]
    assert (batch.left_out, batch.alone) == ({}, 0)
    assert group(played("a", 1.0, 0.0), played("b", 0.0, 0.5)).varies


def test_trace_rewards_of_agents_with_different_names_are_not_compared():
    made = [
        session(
            reward,
            *(trace([1], [2], reward=own, metadata={"kind": "subagent", "agent": name})
              for name, own in rewards.items()),
        )
        for reward, rewards in ((1.0, {"big": 0.2, "small": 0.9}), (0.0, {"big": 0.4}))
    ]  # fmt: skip

    batch = of([group(*made)])

    # The only `small` has its session's advantage.
    assert [s.advantage for s in batch.samples] == pytest.approx([-1, 1, 1])
    assert batch.alone == 1


def test_token_rewards_give_each_turn_its_own_advantage():
    def played(first, second):
        return session(
            1.0,
            trace(
                [1],
                [2, 3, 4, 5],
                [1, 0, 1, 1],
                turn_ends=(1, 4),
                token_rewards=np.array([first, 0, 0, second], np.float32),
            ),
        )

    batch = of([group(played(1, 0), played(0, 1))])

    # Turn 1 is worth 1 in both; turn 2 is worth 0 and 1.
    assert [s.advantage.tolist() for s in batch.samples] == [[0, -1, -1, -1], [0, 1, 1, 1]]
    assert batch.left_out == {}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=2, max_size=5),
    st.sampled_from(["grpo", "dr_grpo", "rloo"]),
)
def test_a_token_reward_on_the_last_token_gives_the_session_reward_s_advantage(played, kind):
    """If all traces have equal turns, rewards per token and per session are the same."""

    def made(*, per_token):
        return group(
            *(
                session(
                    float(reward),
                    trace(
                        [1],
                        range(n + 1),
                        turn_ends=(1, n + 1),
                        reward=float(reward),
                        token_rewards=np.array([0] * n + [reward], np.float32)
                        if per_token
                        else None,
                    ),
                )
                for reward, n in played
            )
        )

    found, _ = advantages_of(made(per_token=True), kind)
    wanted, _ = advantages_of(made(per_token=False), kind)
    for [own], [expected] in zip(found, wanted, strict=True):
        assert own == pytest.approx(np.broadcast_to(expected, np.shape(own)))


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", 0.7, "1"),
        ("temperature", 0.0, "1"),
        ("top_p", 0.9, "1"),
        ("top_k", 20, "-1"),
        ("presence_penalty", 0.5, "0"),
        ("frequency_penalty", 0.5, "0"),
        ("repetition_penalty", 1.1, "1"),
        ("min_p", 0.05, "0"),
    ],
)
def test_sessions_sampled_with_other_sampling_parameters_are_refused(field, value, allowed):
    other = trace([1], [2], metadata={"sampling": {field: [None, value]}})
    said = (
        rf"session odd \(trace t\) samples at {field} {value:g}, and training is for {allowed}: "
        rf'set the task\'s sampling.{field} = {{mode = "override", value = {allowed}}}'
    )
    with pytest.raises(TrainingError, match=said):
        of([group(session(1.0, other, name="odd"), PAIR.sessions[1])])
    unused = trace([1], [2], [0], metadata={"sampling": {field: [value]}})
    assert of([group(session(1.0, unused, trace([1], [2])), PAIR.sessions[1])]).tokens == 2


def test_a_batch_refuses_sessions_with_images():
    seen = replace(trace([1], [2, 3]), media=[{"digest": "d", "media_type": "image/png"}])
    with pytest.raises(TrainingError, match="has images, whose pixels `bridle train` would not"):
        of([group(session(1.0, seen), session(0.0, trace([1], [8])))])


def test_sessions_sampled_with_a_logit_bias_are_refused():
    plain = trace([1], [2], metadata={"sampling": {"logit_bias": [None]}})
    other = trace([1], [2], metadata={"sampling": {"logit_bias": [None, {"7": -100.0}]}})
    assert of([group(session(1.0, plain), PAIR.sessions[1])]).tokens
    with pytest.raises(TrainingError, match="logit_bias, and training is for none"):
        of([group(session(1.0, other, name="odd"), PAIR.sessions[1])])


def captured(name, *, reward, trace_rewards, top_p=1.0, kind=Kind.SUBAGENT):
    """A session as capture has it: an agent's call, and one by another agent."""
    made = MadeSession(name, metadata={"train": ["agent", "subagent"]})
    made.call(None)
    sampling = Sampling(temperature=1.0, top_p=top_p, top_k=-1)
    made.call(None, continues=None, kind=kind, sampling=sampling)
    made.end(reward, trace_rewards=trace_rewards)
    return rebuild(made.capture())


def test_trace_rewards_give_advantages_when_session_rewards_are_equal():
    sessions = [
        captured("a", reward=1.0, trace_rewards=(1.0, 0.0)),
        captured("b", reward=1.0, trace_rewards=(0.0, 1.0)),
    ]
    batch = of([group(*sessions)], version=7)
    assert [s.advantage for s in batch.samples] == [1, -1, -1, 1]


def test_sampling_parameters_of_untrained_turns_are_not_checked():
    fine = captured("fine", reward=0.0, trace_rewards=None)
    side = captured("side", reward=1.0, trace_rewards=None, top_p=0.5, kind=Kind.SIDE)
    assert of([group(fine, side)], version=7).sessions == 2

    narrow = captured("narrow", reward=1.0, trace_rewards=None, top_p=0.5)
    with pytest.raises(TrainingError, match=r"session narrow .* samples at top_p 0\.5"):
        of([group(fine, narrow)], version=7)


@pytest.mark.parametrize(("advantage", "first"), [("grpo", 1.0), ("dr_grpo", 0.5), ("rloo", 1.0)])
def test_the_advantage_setting_selects_grpo_dr_grpo_or_rloo(advantage, first):
    batch = of([PAIR], advantage=advantage)
    assert [sample.advantage for sample in batch.samples] == [first, first, -first]


@given(
    st.lists(
        st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=2, max_size=4),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["token", "sequence", "batch"]),
)
def test_the_token_weights_of_a_batch_sum_to_one(lengths, normalise):
    groups = [
        group(
            *(session(float(i == 0), *(trace([1], range(n)) for n in s)) for i, s in enumerate(g))
        )
        for g in lengths
    ]
    batch = of(groups, normalise=normalise)
    total = sum(s.weight * s.trace.loss_mask.sum() for s in batch.samples)
    assert total == pytest.approx(1)


def test_a_flat_group_is_left_out_or_kept_with_advantage_0():
    flat = group(*(session(1.0, trace([1], [2])) for _ in range(2)))

    assert of([flat, PAIR]).left_out == {"flat": 2}
    assert len(of([flat, PAIR]).samples) == 3
    kept = of([flat, PAIR], flat_groups="keep")
    assert [sample.advantage for sample in kept.samples] == [0, 0, 1, 1, -1]
    assert kept.sessions == 4


def test_sessions_without_a_reward_or_tokens_do_not_change_advantages():
    mixed = group(
        *PAIR.sessions, session(None, trace([1], [2])), session(0.5, trace([1], [2], [0]))
    )
    batch = of([mixed], advantage="dr_grpo")

    assert batch.left_out == {"unknown": 1, "empty": 1}
    assert batch.sessions == 2
    assert [sample.advantage for sample in batch.samples] == [0.5, 0.5, -0.5]


def test_a_session_older_than_max_lag_is_left_out_as_stale():
    old = session(1.0, trace([1], [2, 3], version=[3, 5]))
    new = session(0.0, trace([1], [2, 3], version=[4, 5]))

    assert of([group(old, new)], version=5, max_lag=1).left_out == {"stale": 1}
    assert of([group(old, new)], version=5, max_lag=2).lags == {0: 2, 1: 1, 2: 1}


def test_a_session_of_a_version_that_there_is_not_yet_is_left_out_as_newer():
    """A server that was away when another training ended samples with that one's weights."""
    other = session(1.0, trace([1], [2, 3], version=[5, 40]))
    own = session(0.0, trace([1], [2, 3], version=5))

    batch = of([group(other, own)], version=5, max_lag=1)
    assert (batch.left_out, batch.lags) == ({"newer": 1}, {0: 2})
    assert "versions after 5, which this training has not made" in nothing_left(batch)


def test_a_session_of_unknown_policy_version_is_left_out_as_unversioned():
    unknown, other = session(1.0, trace([1], [2], version=-1)), PAIR.sessions[1]

    batch = of([group(unknown, other)], version=9, max_lag=9)
    assert (batch.left_out, batch.lags) == ({"unversioned": 1}, {9: 1})
    assert of([group(unknown, other)], version=9).lags == {-1: 1, 9: 1}
    assert "did not say which weights" in nothing_left(batch)
    stale = of([group(other, *PAIR.sessions)], version=9, max_lag=0)
    assert "raise max_lag" in nothing_left(stale)
    assert "did not say" not in nothing_left(stale)


@pytest.mark.parametrize(
    ("overlong", "responses", "weight"),
    [
        ("mask", [[2]], 1 / 12),  # 1 of 6 tokens of one of 2 sessions
        ("drop", [[2]], 1 / 2),
        ("truncate", [[2], [4, 5]], 1 / 6),
    ],
)
def test_an_overlong_trace_is_masked_dropped_or_truncated_as_the_setting_says(
    overlong, responses, weight
):
    long = session(1.0, trace([1], [2, 3], [1, 0]), trace([1], [4, 5, 6, 7, 8]))
    batch = of([group(long, session(0.0, trace([1], [9])))], max_length=3, overlong=overlong)
    trained = [s.trace.response_ids[s.trace.loss_mask == 1].tolist() for s in batch.samples[:-1]]

    assert batch.left_out == {"overlong": 1}
    assert trained == responses
    assert batch.samples[0].weight == pytest.approx(weight)


def test_an_overlong_trace_raises_with_setting_refuse():
    with pytest.raises(TrainingError, match="6 tokens, over the limit max_length = 3"):
        of(
            [group(session(1.0, trace([1], range(5))))],
            max_length=3,
            overlong="refuse",
            flat_groups="keep",
        )


def test_a_trace_whose_prompt_exceeds_max_length_is_left_out():
    long = session(1.0, trace([1, 2, 3, 4], [5]), trace([1], [2]))
    batch = of([group(long, PAIR.sessions[1])], max_length=3, overlong="truncate")
    assert [len(sample.trace.response_ids) for sample in batch.samples] == [1, 1]


def test_raw_logprobs_are_refused_when_training_at_a_temperature_other_than_1():
    raw = group(session(1.0, trace([1], [2], mode="raw")), PAIR.sessions[1])

    assert of([raw]).tokens == 2
    with pytest.raises(TrainingError, match=r"'raw', and training at temperature 0\.7 needs"):
        of([raw], temperature=0.7)


def test_the_first_token_of_a_trace_without_a_prompt_does_not_train():
    bare = group(session(1.0, trace([], [2, 3])), session(0.0, trace([], [4])))
    batch = of([bare])
    assert batch.left_out == {"empty": 1}
    assert [sample.weight for sample in batch.samples] == [1.0]


def test_a_group_without_known_rewards_neither_trains_nor_varies():
    assert PAIR.trains
    assert PAIR.varies
    failed = group(session(None), session(None, status="ERROR"))
    assert not failed.trains
    assert not failed.varies
    assert np.isnan(failed.rewards).all()


def test_a_session_and_its_forks_count_once_in_advantages_and_weights():
    fork = {"fork": {"session": "a", "replayed": ["a-0"]}}
    first = trace([1], [2, 3], exchange_ids=("a-0", "a-1"), turn_ends=(1, 2))
    again = trace([1], [2, 4], [0, 1], exchange_ids=("c-0", "c-1"), turn_ends=(1, 2))
    alone = trace([1], [5, 6], exchange_ids=("b-0", "b-1"), turn_ends=(1, 2))
    origin, other = session(1.0, first, name="a"), session(0.0, alone, name="b")
    forked = replace(session(0.0, again, name="c"), metadata=fork)
    batch = of([group(origin, other, forked)], advantage="dr_grpo")
    assert batch.sessions == 3
    assert [one.advantage.tolist() for one in batch.samples] == [
        [0.25, 0.5],
        [-0.5, -0.5],
        [-0.25, -0.25],
    ]
    of_trees = of([group(origin, other, forked)], normalise="token")
    weights = [one.weight for one in of_trees.samples]
    assert weights == pytest.approx([1 / 6, 1 / 6, 1 / 4])
