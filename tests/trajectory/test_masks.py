"""Every sampled token that does not train has one reason, decided by records and later requests."""

import numpy as np
import pytest
from tests.capture.made import MadeSession

from bridle.trajectory import DEFAULT_TRAIN
from bridle.trajectory.builders import mark
from bridle.trajectory.graph import grow
from bridle.trajectory.sample import MaskReason
from bridle.types import DeliveryState, FinishReason, Kind, LogprobMode


def reasons(made, train=DEFAULT_TRAIN):
    graph = grow("s1", made.exchanges)
    marks = mark(graph, made.exchanges, made.deliveries, train)
    return {exchange_id: reason.key for exchange_id, reason in marks.by_exchange.items()}


def one(**fields):
    made = MadeSession()
    made.call(**fields)
    return reasons(made)["x0"]


def test_a_delivered_reply_trains():
    assert one() == "trained"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"state": DeliveryState.CUT}, "cut"),
        ({"state": DeliveryState.ABANDONED}, "abandoned"),
        ({"state": DeliveryState.SUPERSEDED}, "superseded"),
        ({"state": None}, "unresolved"),
        ({"kind": Kind.SIDE}, "kind"),
        ({"extra": {"other_model": "judge"}}, "other_model"),
        ({"extra": {"other_model": "judge"}, "kind": Kind.SIDE}, "other_model"),
        ({"finish_reason": FinishReason.ABORT}, "aborted"),
        ({"finish_reason": FinishReason.LENGTH}, "trained"),
        ({"constrained": True, "logprob_mode": LogprobMode.RAW}, "constrained"),
        ({"constrained": True}, "trained"),
        ({"logprob_mode": LogprobMode.RAW}, "trained"),
        ({"logprob_mode": LogprobMode.NONE, "logprobs": np.empty(0, np.float32)}, "unpaired"),
        ({"prompt_digest": b"other"}, "broken"),
        ({"kind": Kind.SIDE, "finish_reason": FinishReason.ABORT}, "kind"),
    ],
)
def test_each_fact_has_its_reason(fields, reason):
    assert one(**fields) == reason


def test_the_task_says_which_kinds_train():
    made = MadeSession()
    for kind in Kind:
        made.call(None, kind=kind)
    assert list(reasons(made).values()) == ["trained", "trained", "trained", "kind"]
    assert list(reasons(made, {Kind.SIDE}).values()) == ["kind", "kind", "kind", "trained"]


@pytest.mark.parametrize("state", [*DeliveryState, None])
def test_a_reply_that_a_later_request_shows_was_delivered(state):
    made = MadeSession()
    made.call(state=state)
    made.call("x0")
    assert reasons(made) == {"x0": "trained", "x1": "trained"}


@pytest.mark.parametrize("state", [DeliveryState.CUT, None])
def test_a_reply_whose_messages_continue_without_its_ids_was_delivered(state):
    made = MadeSession()
    made.call(state=state)
    made.call(None, continues="x0", root_reason="tools_changed")
    assert reasons(made)["x0"] == "trained"


@pytest.mark.parametrize("fields", [{"root_reason": "partial"}, {"extra": {"drift": "partial"}}])
def test_a_request_that_shows_a_part_of_a_reply_proves_no_delivery(fields):
    made = MadeSession()
    made.call(state=DeliveryState.CUT)
    made.call(None, continues="x0", **fields)
    assert reasons(made)["x0"] == "cut"


def test_a_child_that_keeps_a_part_of_the_ids_proves_no_delivery():
    made = MadeSession()
    made.call(state=DeliveryState.ABANDONED)
    made.call("x0", kept=12, continues=None)
    assert reasons(made)["x0"] == "abandoned"


def retried(*, started_at, **second):
    made = MadeSession()
    made.call()
    made.call(None, new=made.exchanges[0].suffix_ids, started_at=started_at, **second)
    return made


def test_a_delivered_reply_that_was_asked_for_again_trains():
    assert reasons(retried(started_at=1002.0)) == {"x0": "trained", "x1": "trained"}


def test_identical_requests_that_wait_together_are_separate_samples():
    assert reasons(retried(started_at=1001.2)) == {"x0": "trained", "x1": "trained"}


def test_of_two_replies_to_one_question_the_continued_one_is_the_turn():
    made = retried(started_at=1002.0)
    made.call("x0")
    assert reasons(made) == {"x0": "trained", "x1": "trained", "x2": "trained"}


def test_the_record_of_a_superseded_reply_yields_to_a_request_that_shows_it():
    made = MadeSession()
    made.call(state=DeliveryState.SUPERSEDED)
    made.call("x0")
    assert reasons(made)["x0"] == "trained"


def test_an_undelivered_first_try_is_abandoned_not_superseded():
    made = retried(started_at=1002.0)
    made.deliver("x0", DeliveryState.ABANDONED)
    assert reasons(made)["x0"] == "abandoned"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.5])
def test_a_token_without_a_usable_logprob_is_masked_alone(value):
    made = MadeSession()
    logprobs = np.array([-1, value, 0, -0.5, 1e-7], np.float32)
    made.call(logprobs=logprobs)
    marks = mark(grow("s1", made.exchanges), made.exchanges, made.deliveries, DEFAULT_TRAIN)
    assert marks.by_exchange["x0"] is MaskReason.TRAINED
    assert marks.by_token["x0"].tolist() == [0, MaskReason.UNPAIRED, 0, 0, 0]
