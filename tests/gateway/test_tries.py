"""Questions, and the tries of a session that a further try may join."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.test_retries import ASKED_FOR, FRESH, KEY, REQUEST, RETRY, a_call

from bridle.errors import RequestError
from bridle.gateway.call import Asked, Stage
from bridle.gateway.registry import Tries, question_key
from bridle.prompting.canonical import canonical
from bridle.types import DeliveryState, ToolSpec

PAUSED = RequestError("paused", status=503, code="paused")


def tries_of(*calls):
    tries = Tries()
    for call in calls:
        tries.begin(call)
        for key in sorted(call.idempotency_keys):
            tries.named(call, key)
    return tries


def joined(calls, asked=FRESH):
    found = tries_of(*calls).find(ASKED_FOR, asked)
    return None if found is None else found.exchange_id


# ---- questions


def key_of(request, template_args=None):
    return question_key(request, canonical(request, {}), template_args)


def test_streaming_options_do_not_change_a_request_s_retry_key():
    assert key_of(replace(REQUEST, stream=True, include_usage=True)) == ASKED_FOR


SAMPLING = REQUEST.sampling


@pytest.mark.parametrize(
    "change",
    [
        {"messages": (*REQUEST.messages, *REQUEST.messages)},
        {"tools": (ToolSpec("look", None, None),)},
        {"tool_choice": "required"},
        {"response_schema": {}},
        {"response_schema": {"title": "\ud800"}},
        {"model": "other"},
        {"logprobs": True},
        {"prefill": "Yes, "},
        {"sampling": replace(SAMPLING, max_tokens=5)},
        {"sampling": replace(SAMPLING, stop=("x",))},
        {"sampling": replace(SAMPLING, seed=2**80)},
    ],
    ids="-".join,
)
def test_fields_that_change_the_reply_change_a_request_s_retry_key(change):
    assert key_of(replace(REQUEST, **change)) != ASKED_FOR


def test_template_arguments_change_a_request_s_retry_key():
    assert key_of(REQUEST, ("thinking", True)) != ASKED_FOR


def test_the_key_order_of_a_schema_does_not_change_a_request_s_retry_key():
    one, other = {"type": "object", "title": "t"}, {"title": "t", "type": "object"}
    assert key_of(replace(REQUEST, response_schema=one)) == key_of(
        replace(REQUEST, response_schema=other)
    )


# ---- joining


def test_a_call_whose_client_has_gone_is_joined():
    assert joined([a_call()]) == "e1"
    assert joined([a_call()], RETRY) == "e1"
    assert joined([a_call(stage=Stage.COMMITTED)]) == "e1"
    for state in (DeliveryState.CUT, DeliveryState.ABANDONED):
        assert joined([a_call(stage=Stage.COMMITTED, delivery=state)]) == "e1"


@pytest.mark.parametrize("asked", [FRESH, RETRY], ids=["fresh", "retry"])
def test_a_call_whose_client_waits_is_not_joined(asked):
    assert joined([a_call(clients=1)], asked) is None
    assert joined([a_call(stage=Stage.COMMITTED, clients=1)], asked) is None


def test_a_call_whose_client_waits_is_joined_by_its_own_idempotency_key():
    call = a_call(clients=1, idempotency_keys={"k"})
    assert joined([call], Asked(idempotency_key="k")) == "e1"


def test_a_lost_call_of_another_idempotency_key_is_not_joined():
    call = a_call(idempotency_keys={"k"})
    assert joined([call], Asked(idempotency_key="other", retry_count=1)) is None


def test_a_call_of_another_user_agent_is_not_joined():
    call = a_call(asked=Asked(user_agent="one"))
    assert joined([call], Asked(user_agent="other", retry_count=1)) is None
    assert joined([call], Asked(user_agent="one", retry_count=1)) == "e1"


def test_a_retry_does_not_join_a_call_with_other_messages():
    assert tries_of(a_call()).find(b"another", RETRY) is None


def test_a_retry_takes_the_call_whose_number_precedes_its_own_then_the_newest():
    calls = [a_call("second", retry_count=1), a_call("old"), a_call("new")]
    assert joined(calls, RETRY) == "new"
    assert joined(calls, Asked(retry_count=2)) == "second"


def test_a_call_that_is_delivered_or_failed_is_not_joined():
    delivered, failed = a_call("d", Stage.COMMITTED), a_call("f", clients=1)
    tries = tries_of(delivered, failed)
    tries.end(delivered)
    tries.failed(failed)
    assert tries.find(ASKED_FOR, RETRY) is None


# ---- retries of refused tries


async def test_a_retry_of_a_refused_try_is_a_new_sample_at_once():
    tries = tries_of(a_call(clients=1))
    tries.refused(ASKED_FOR, FRESH, PAUSED)
    assert not await tries.waited(ASKED_FOR, RETRY)
    assert tries.find(ASKED_FOR, RETRY) is None
    assert await tries.waited(ASKED_FOR, RETRY)  # the refused try is taken


async def test_a_retry_takes_a_lost_call_before_a_refused_try():
    tries = tries_of(a_call("lost"), a_call("live", clients=1))
    tries.refused(ASKED_FOR, FRESH, PAUSED)
    assert not await tries.waited(ASKED_FOR, RETRY)
    lost = tries.find(ASKED_FOR, RETRY)
    assert lost is not None
    lost.clients = 1
    assert not await tries.waited(ASKED_FOR, RETRY)  # the refused try is still there


async def test_a_refusal_that_no_sdk_retries_is_not_counted():
    tries = tries_of(a_call(clients=1))
    tries.refused(ASKED_FOR, FRESH, RequestError("bad"))
    assert await tries.waited(ASKED_FOR, RETRY)


async def test_a_call_that_ended_without_clients_counts_as_a_refused_try():
    lost = a_call("lost")
    tries = tries_of(lost, a_call("live", clients=1))
    tries.failed(lost)
    assert not await tries.waited(ASKED_FOR, RETRY)


async def test_a_retry_waits_for_the_connection_of_its_first_try_to_close():
    call = a_call(clients=1)
    tries = tries_of(call)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(tries.waited(ASKED_FOR, RETRY))
        await asyncio.sleep(0)
        call.clients = 0
        tries.detached()
    assert waiting.result()
    assert tries.find(ASKED_FOR, RETRY) is call


async def test_a_retry_waits_up_to_250_ms_for_the_first_trys_client_to_disconnect():
    tries, clock = tries_of(a_call(clients=1)), asyncio.get_running_loop().time
    began = clock()
    assert await tries.waited(ASKED_FOR, RETRY)
    assert clock() - began >= 0.24
    assert tries.find(ASKED_FOR, RETRY) is None


async def test_a_retry_waits_for_nothing_where_no_client_could_be_its_own():
    tries = tries_of(a_call(clients=1, asked=Asked(user_agent="other")))
    assert not await tries.waited(ASKED_FOR, RETRY)
    assert not await tries.waited(b"another question", RETRY)
    assert not await tries_of(a_call(clients=1)).waited(ASKED_FOR, FRESH)


async def test_a_retry_stops_waiting_when_the_last_sibling_has_its_reply():
    call = a_call(clients=1)
    tries = tries_of(call)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(tries.waited(ASKED_FOR, RETRY))
        await asyncio.sleep(0)
        tries.end(call)
        tries.detached()
    assert waiting.result()
    assert tries.find(ASKED_FOR, RETRY) is None


@given(fates=st.lists(st.sampled_from(["lost", "refused"]), max_size=8))
async def test_every_retry_takes_one_earlier_try_and_a_lost_one_first(fates):
    tries, lost = Tries(), fates.count("lost")
    for number, fate in enumerate(fates):
        if fate == "lost":
            tries.begin(a_call(f"e{number}"))
        else:
            tries.refused(ASKED_FOR, FRESH, PAUSED)
    joins = []
    for _ in fates:
        assert not await tries.waited(ASKED_FOR, RETRY)
        call = tries.find(ASKED_FOR, RETRY)
        joins.append(call is not None)
        if call is not None:
            call.clients = 1
    assert joins == [True] * lost + [False] * (len(fates) - lost)


def test_a_call_s_retry_key_equals_its_request_s_retry_key():
    assert a_call().question_key == question_key(REQUEST, KEY, None)
