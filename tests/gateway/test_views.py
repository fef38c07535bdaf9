"""Exchanges as JSON, their whole prompts put together from what was kept."""

import orjson
import pytest
from tests.capture.made import MadeSession

from bridle.capture.records import Delivery
from bridle.gateway.views import encode, exchanges_json
from bridle.types import DeliveryState


@pytest.fixture
def made():
    return MadeSession("s1", seed=3)


def shown(made):
    capture = made.capture()
    return orjson.loads(encode(exchanges_json(capture.exchanges, capture.deliveries)))


def test_a_child_shows_its_whole_prompt(made):
    made.call(exchange_id="first", new=6, output=4)
    made.call("first", exchange_id="second", new=3, output=2)
    made.call("first", exchange_id="branch", new=5, output=1)
    made.call("branch", exchange_id="in part", kept=8, new=2)
    for exchange in shown(made):
        exchange_id = exchange["exchange_id"]
        assert exchange["prompt_ids"] == made.prompts[exchange_id].tolist()
        assert exchange["output_ids"] == made.outputs[exchange_id].tolist()
        assert len(exchange["logprobs"]) == len(exchange["output_ids"])


def test_the_promised_keys_are_there(made):
    made.call()
    (exchange,) = shown(made)
    promised = {
        "exchange_id",
        "parent_id",
        "continues",
        "root_reason",
        "dialect",
        "kind",
        "prompt_ids",
        "output_ids",
        "logprobs",
        "versions",
        "finish_reason",
        "delivered",
    }
    assert promised <= set(exchange)


def test_only_a_delivered_reply_counts_as_delivered(made):
    made.call(state=None)
    capture = made.capture()
    (exchange,) = capture.exchanges
    for state in (None, *DeliveryState):
        record = Delivery(exchange.exchange_id, "s1", state, 0.0) if state else None
        deliveries = {exchange.exchange_id: record} if record else {}
        (seen,) = exchanges_json([exchange], deliveries)
        assert seen["delivered"] is (state is DeliveryState.DELIVERED)
        assert seen["delivery"] == (None if state is None else state.value)


def test_what_stands_on_an_unreadable_exchange_says_so(made):
    made.call(exchange_id="lost")
    made.call("lost", exchange_id="child")
    made.call("child", exchange_id="grandchild")
    capture = made.capture()
    seen = exchanges_json(capture.exchanges[1:], capture.deliveries)
    assert [exchange["prompt_ids"] for exchange in seen] == [None, None]
    assert [len(exchange["output_ids"]) for exchange in seen] == [5, 5]
