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
def test_an_untrained_reply_has_the_mask_reason_of_its_state_or_kind(fields, reason):
    assert one(**fields) == reason


def test_the_train_setting_selects_the_kinds_of_calls_that_train():
    made = MadeSession()
    for kind in Kind:
        made.call(None, kind=kind)
    assert list(reasons(made).values()) == ["trained", "trained", "trained", "kind"]
    assert list(reasons(made, {Kind.SIDE}).values()) == ["kind", "kind", "kind", "trained"]


@pytest.mark.parametrize("state", [*DeliveryState, None])
def test_a_reply_contained_in_a_later_request_trains_whatever_its_delivery_record(state):
    made = MadeSession()
    made.call(state=state)
    made.call("x0")
    assert reasons(made) == {"x0": "trained", "x1": "trained"}


@pytest.mark.parametrize("state", [DeliveryState.CUT, None])
def test_a_cut_reply_trains_when_a_later_request_continues_its_messages(state):
    made = MadeSession()
    made.call(state=state)
    made.call(None, continues="x0", root_reason="tools_changed")
    assert reasons(made)["x0"] == "trained"


@pytest.mark.parametrize("fields", [{"root_reason": "partial"}, {"extra": {"drift": "partial"}}])
def test_a_cut_reply_stays_masked_when_a_later_request_shows_only_a_part_of_it(fields):
    made = MadeSession()
    made.call(state=DeliveryState.CUT)
    made.call(None, continues="x0", **fields)
    assert reasons(made)["x0"] == "cut"


def test_an_abandoned_reply_stays_masked_when_a_child_keeps_only_a_part_of_its_ids():
    made = MadeSession()
    made.call(state=DeliveryState.ABANDONED)
    made.call("x0", kept=12, continues=None)
    assert reasons(made)["x0"] == "abandoned"


def retried(*, started_at, **second):
    made = MadeSession()
    made.call()
    made.call(None, new=made.exchanges[0].suffix_ids, started_at=started_at, **second)
    return made


def test_a_delivered_reply_trains_also_when_its_request_is_repeated():
    assert reasons(retried(started_at=1002.0)) == {"x0": "trained", "x1": "trained"}


def test_replies_to_identical_concurrent_requests_all_train():
    assert reasons(retried(started_at=1001.2)) == {"x0": "trained", "x1": "trained"}


def test_two_replies_to_one_request_both_train_when_one_is_continued():
    made = retried(started_at=1002.0)
    made.call("x0")
    assert reasons(made) == {"x0": "trained", "x1": "trained", "x2": "trained"}


def test_a_superseded_reply_trains_when_a_later_request_contains_it():
    made = MadeSession()
    made.call(state=DeliveryState.SUPERSEDED)
    made.call("x0")
    assert reasons(made)["x0"] == "trained"


def test_an_undelivered_reply_whose_request_is_repeated_is_abandoned():
    made = retried(started_at=1002.0)
    made.deliver("x0", DeliveryState.ABANDONED)
    assert reasons(made)["x0"] == "abandoned"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.5])
def test_only_the_token_without_a_valid_logprob_is_masked_as_unpaired(value):
    made = MadeSession()
    logprobs = np.array([-1, value, 0, -0.5, 1e-7], np.float32)
    made.call(logprobs=logprobs)
    marks = mark(grow("s1", made.exchanges), made.exchanges, made.deliveries, DEFAULT_TRAIN)
    assert marks.by_exchange["x0"] is MaskReason.TRAINED
    assert marks.by_token["x0"].tolist() == [0, MaskReason.UNPAIRED, 0, 0, 0]
