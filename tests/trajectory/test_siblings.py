"""Answers to one question: siblings that train, the rejected ones, and their weight and reward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.capture.made import MadeSession

from bridle.errors import ConfigError
from bridle.trajectory import rebuild
from bridle.trajectory.builders import rejected, shown_whole
from bridle.types import DeliveryState, FinishReason


def asked(made, parent=None, *, question="q", **fields):
    """One more answer to a question, under the prompt of the first one."""
    first = next((e for e in made.exchanges if e.extra.get("question") == question), None)
    new = 10 if first is None else first.suffix_ids
    return made.call(parent, new=new, extra={"question": question}, **fields).exchange_id


def found(made):
    return rejected(made.exchanges, made.deliveries, shown_whole(made.exchanges))


def test_repeated_requests_reject_all_replies_but_the_last():
    made = MadeSession()
    for _ in range(3):
        asked(made)
    assert found(made) == {"x0": "x2", "x1": "x2"}


def test_repeated_requests_reject_all_replies_but_the_continued_one():
    made = MadeSession()
    for _ in range(3):
        asked(made)
    made.call("x1")
    assert found(made) == {"x0": "x1", "x2": "x1"}


def test_parallel_and_sequential_repeats_reject_the_same_number_of_replies():
    parallel, sequential = MadeSession(), MadeSession()
    for _ in range(4):
        asked(parallel, started_at=1001.0)
        asked(sequential)
    assert len(found(parallel)) == len(found(sequential)) == 3


def test_a_question_repeated_after_its_reply_rejects_nothing():
    made = MadeSession()
    asked(made)
    made.call("x0")
    asked(made)
    assert found(made) == {}


def test_requests_with_equal_messages_and_different_questions_are_no_siblings():
    made = MadeSession()
    first = made.call(None, extra={"question": "router"})
    made.call(None, new=first.suffix_ids, extra={"question": "agent"})
    made.call("x1")
    assert found(made) == {}


def test_siblings_are_found_by_prompt_ids_when_the_capture_has_no_questions():
    made = MadeSession()
    first = made.call(None)
    made.call(None, new=first.suffix_ids)
    made.call(None)
    assert found(made) == {"x0": "x1"}


@pytest.mark.parametrize(
    "fields",
    [
        {"finish_reason": FinishReason.LENGTH},
        {"finish_reason": FinishReason.ABORT},
        {"state": DeliveryState.CUT},
        {"state": DeliveryState.ABANDONED},
        {"state": DeliveryState.SUPERSEDED},
        {"state": None},
    ],
    ids=lambda fields: str(next(iter(fields.values()))),
)
def test_a_reply_that_was_cut_or_lost_is_not_counted_as_rejected(fields):
    made = MadeSession()
    asked(made, **fields)
    asked(made)
    assert found(made) == {}


# ---- trajectories


def a_rejection(**metadata):
    """Turn `x0`, a long rejected answer `x1` under it, and `x2`, which goes on to `x3`."""
    made = MadeSession(metadata=metadata)
    made.call(output=4)
    asked(made, "x0", output=50)
    asked(made, "x0", output=5)
    made.call("x2", output=6)
    made.end(reward=1.0)
    return made


def by_leaf(made):
    return {trace.exchange_ids[-1]: trace for trace in rebuild(made.capture()).traces}


def test_a_rejected_reply_trains_alone_in_a_trace_marked_as_rejected():
    traces = by_leaf(a_rejection())
    assert {leaf: int(one.loss_mask.sum()) for leaf, one in traces.items()} == {"x1": 50, "x3": 15}
    assert traces["x1"].metadata["rejected"] is True
    assert "rejected" not in traces["x3"].metadata


def test_turns_before_a_rejected_reply_train_in_their_own_trace():
    made = MadeSession()
    made.call(output=4)
    asked(made, "x0", output=50)
    asked(made, output=5, continues="x0", root_reason="tools_changed")
    sizes = {leaf: int(one.loss_mask.sum()) for leaf, one in by_leaf(made).items()}
    assert sizes == {"x0": 4, "x1": 50, "x2": 5}


def test_rejected_replies_are_counted_and_the_task_may_mask_them():
    stats = rebuild(a_rejection().capture()).metadata["stats"]
    assert stats["rejected"] == {"exchanges": 1, "tokens": 50}
    assert (stats["tokens_trained"], stats["tokens_excluded"]) == (65, {})
    stats = rebuild(a_rejection(rejected="mask").capture()).metadata["stats"]
    assert stats["rejected"] == {"exchanges": 1, "tokens": 50}
    assert (stats["tokens_trained"], stats["tokens_excluded"]) == (15, {"rejected": 50})


def test_an_unknown_value_of_setting_rejected_is_refused_by_name():
    with pytest.raises(ConfigError, match="rejected: 'drop'; known: train, mask"):
        rebuild(a_rejection(rejected="drop").capture())


def test_a_rejected_reply_has_the_session_s_reward_unless_the_task_gives_another():
    assert {leaf: one.reward for leaf, one in by_leaf(a_rejection()).items()} == {
        "x1": 1.0,
        "x3": 1.0,
    }
    own = by_leaf(a_rejection(rejected_reward=-0.5))
    assert {leaf: one.reward for leaf, one in own.items()} == {"x1": -0.5, "x3": 1.0}


def test_a_rejected_reply_has_no_reward_when_the_session_has_none():
    made = a_rejection(rejected_reward=-0.5)
    made.end(reward=None)
    assert [one.reward for one in by_leaf(made).values()] == [None, None]


def test_trace_rewards_of_an_evaluator_override_the_task_s_rejected_reward():
    made = a_rejection(rejected_reward=-0.5)
    made.end(trace_rewards=(0.25, 0.75))
    assert sorted(one.reward for one in by_leaf(made).values()) == [0.25, 0.75]


@given(outputs=st.lists(st.integers(1, 20), max_size=6), parallel=st.booleans())
def test_every_token_of_any_number_of_rejected_replies_trains_once(outputs, parallel):
    made = MadeSession()
    made.call(output=3)
    for output in outputs:
        asked(made, "x0", output=output, started_at=1002.0 if parallel else None)
    stands = asked(made, "x0", output=7)
    made.call(stands, output=2)
    trajectory = rebuild(made.capture())
    sizes = [int(trace.loss_mask.sum()) for trace in trajectory.traces]
    stats = trajectory.metadata["stats"]
    assert stats["rejected"] == {"exchanges": len(outputs), "tokens": sum(outputs)}
    assert sum(sizes) == stats["tokens_captured"] == 12 + sum(outputs)
    assert sum(bool(trace.metadata.get("rejected")) for trace in trajectory.traces) == len(outputs)
