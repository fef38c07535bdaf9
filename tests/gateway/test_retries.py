"""Clients of a call and the record of what they received."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conformance.memory import MemoryStore
from tests.gateway.house import served

from bridle.aio import Nursery
from bridle.capture.records import SessionRecord
from bridle.config import Limits, SamplingPolicy
from bridle.dialects import DIALECTS
from bridle.errors import RequestError
from bridle.gateway.call import Asked, Call, Question, Stage
from bridle.gateway.metrics import Metrics
from bridle.gateway.registry import GatewaySession, question_key
from bridle.gateway.retries import Deliveries
from bridle.prompting.canonical import canonical
from bridle.prompting.conversation import Placement, PlacementKind
from bridle.types import (
    DeliveryState,
    Dialect,
    Message,
    ModelRequest,
    Role,
    Sampling,
    TextPart,
)

REQUEST = ModelRequest(
    dialect=Dialect.OPENAI_CHAT,
    model="m",
    messages=(Message(Role.USER, (TextPart("go"),)),),
    tools=(),
    sampling=Sampling(),
    stream=False,
)
KEY = canonical(REQUEST, {})
ASKED_FOR = question_key(REQUEST, KEY, None)
RETRY, FRESH = Asked(retry_count=1), Asked()


def a_call(exchange_id="e1", stage=Stage.SAMPLING, clients=0, **fields) -> Call:
    placement = Placement(PlacementKind.ROOT)
    wire = DIALECTS[Dialect.OPENAI_CHAT]
    question = Question(REQUEST, wire, KEY, placement, None, served(), ASKED_FOR)
    call = Call(exchange_id, "s", 0.0, 0.0, ASKED_FOR, question=question, clients=clients)
    for name, value in fields.items():
        setattr(call, name, value)
    for step in (Stage.SAMPLING, Stage.COMMITTING, Stage.COMMITTED):
        if call.stage is not stage:
            call.enter(step)
    return call


# ---- records


class Room:
    """A session, its store, and the deliveries of its calls."""

    def __init__(self, nursery: Nursery, store: MemoryStore, grace_s: float) -> None:
        record = SessionRecord("s", 0.0)
        self.session = GatewaySession(record, sampling=SamplingPolicy(), limits=Limits())
        self.store = store
        self.nursery = nursery
        self.deliveries = Deliveries(
            store=store, nursery=nursery, retry_grace_s=grace_s, metrics=Metrics()
        )

    def add(self, call: Call, *clients: Asked) -> Call:
        self.session.calls[call.exchange_id] = call
        self.session.tries.begin(call)
        for asked in clients:
            self.deliveries.attach(self.session, call, asked)
        return call

    async def recorded(self, call: Call) -> DeliveryState | None:
        record = self.store.deliveries("s").get(call.exchange_id)
        assert (None if record is None else record.state) is call.delivery
        return call.delivery


@asynccontextmanager
async def a_room(grace_s=10.0):
    store = MemoryStore()
    await store.open_session(SessionRecord("s", 0.0))
    errors: list[BaseException] = []
    async with Nursery(errors.append) as nursery:
        yield Room(nursery, store, grace_s)
    assert errors == []


async def test_a_received_reply_is_recorded_as_delivered_and_no_longer_joinable():
    async with a_room() as room:
        call = room.add(a_call(stage=Stage.COMMITTED), FRESH)
        room.session.failed_last = True
        room.deliveries.received(room.session, call)
        assert await room.recorded(call) is DeliveryState.DELIVERED
        assert call.question is None
        assert (room.session.delivered, room.session.failed_last) == (1, False)


async def test_a_client_that_went_may_come_back_within_the_grace():
    async with a_room() as room:
        call = room.add(a_call(stage=Stage.COMMITTED), FRESH)
        room.deliveries.left(room.session, call, partly=False)
        assert call.grace is not None
        assert room.deliveries.joined(room.session, ASKED_FOR, RETRY) is call
        assert call.grace is None
        room.deliveries.received(room.session, call)
        assert await room.recorded(call) is DeliveryState.DELIVERED


@pytest.mark.parametrize(
    ("partly", "state"), [(False, DeliveryState.ABANDONED), (True, DeliveryState.CUT)]
)
async def test_an_unclaimed_reply_is_abandoned_or_cut(partly, state):
    async with a_room(grace_s=0.01) as room:
        call = room.add(a_call(stage=Stage.COMMITTED), FRESH)
        room.deliveries.left(room.session, call, partly=partly)
        assert await room.recorded(call) is None
        await asyncio.sleep(0.05)
        assert await room.recorded(call) is state
        assert call.question is not None  # a late retry still gets it


async def test_an_unclaimed_call_in_flight_is_cancelled_and_not_joinable_at_once_without_grace():
    async with a_room(grace_s=0) as room:
        call = room.add(a_call(), FRESH)
        call.task = room.nursery.start(asyncio.sleep(30), name="call")
        room.deliveries.left(room.session, call, partly=False)
        assert room.deliveries.joined(room.session, ASKED_FOR, RETRY) is None
        await asyncio.wait([call.task])
        assert call.task.cancelled()
        assert await room.recorded(call) is None


async def test_a_call_whose_grace_ran_out_while_it_was_committed_is_abandoned_then():
    async with a_room(grace_s=0) as room:
        call = room.add(a_call(stage=Stage.COMMITTING), FRESH)
        room.deliveries.left(room.session, call, partly=False)
        assert await room.recorded(call) is None
        call.enter(Stage.COMMITTED)
        room.deliveries.committed(room.session, call)
        assert await room.recorded(call) is DeliveryState.ABANDONED


async def test_a_call_that_another_client_waits_for_is_kept():
    async with a_room(grace_s=0) as room:
        call = room.add(a_call(stage=Stage.COMMITTED), FRESH, RETRY)
        room.deliveries.left(room.session, call, partly=True)
        assert await room.recorded(call) is None
        room.deliveries.received(room.session, call)
        assert await room.recorded(call) is DeliveryState.DELIVERED


async def test_a_later_request_that_shows_a_reply_proves_its_delivery():
    async with a_room(grace_s=0) as room:
        call = room.add(a_call(stage=Stage.COMMITTED), FRESH)
        room.deliveries.left(room.session, call, partly=True)
        assert await room.recorded(call) is DeliveryState.CUT
        room.deliveries.shown(room.session, call, "e2")
        assert await room.recorded(call) is DeliveryState.DELIVERED
        assert room.session.delivered == 1


@pytest.mark.parametrize("again", [FRESH, RETRY], ids=["fresh", "retry"])
async def test_a_delivered_reply_that_is_asked_for_again_stays_delivered(again):
    async with a_room() as room:
        call = room.add(a_call(stage=Stage.COMMITTED), FRESH)
        room.deliveries.received(room.session, call)
        assert room.deliveries.joined(room.session, ASKED_FOR, again) is None
        assert await room.recorded(call) is DeliveryState.DELIVERED


async def test_the_same_idempotency_key_supersedes_a_delivered_reply_until_it_is_continued():
    keyed = Asked(idempotency_key="k")
    async with a_room() as room:
        call = room.add(a_call(stage=Stage.COMMITTED), keyed)
        room.deliveries.received(room.session, call)
        assert room.deliveries.joined(room.session, b"another question", keyed) is None
        assert await room.recorded(call) is DeliveryState.DELIVERED
        assert room.deliveries.joined(room.session, ASKED_FOR, keyed) is None
        assert await room.recorded(call) is DeliveryState.SUPERSEDED
        assert room.session.delivered == 0
        room.deliveries.shown(room.session, call, "e3")
        assert await room.recorded(call) is DeliveryState.DELIVERED
        assert room.deliveries.joined(room.session, ASKED_FOR, keyed) is None
        assert await room.recorded(call) is DeliveryState.DELIVERED
        assert room.session.delivered == 1


async def test_a_delivery_names_the_requests_that_joined_its_call():
    async with a_room() as room:
        call = room.add(a_call(stage=Stage.COMMITTED), FRESH)
        keyed = Asked(idempotency_key="k")
        for again in (RETRY, Asked(retry_count=2), FRESH, keyed, keyed):
            room.deliveries.left(room.session, call, partly=False)
            assert room.deliveries.joined(room.session, ASKED_FOR, again) is call
        room.deliveries.received(room.session, call)
        await room.recorded(call)
        joined_by = room.store.deliveries("s")["e1"].joined_by
        answer = [(one["why"], one["retry_count"]) for one in joined_by]
        gone = ("client_gone", 0)
        expected = [("retry_count", 1), ("retry_count", 2), gone, gone, ("idempotency_key", 0)]
        assert answer == expected


async def test_refusing_a_call_detaches_its_client_and_the_session_s_facts_have_the_error():
    async with a_room() as room:
        call = room.add(a_call(), FRESH)
        error = RequestError("try later", status=503, code="overloaded")
        room.deliveries.refused(room.session, call, error)
        assert (call.clients, room.session.facts().last_error) == (0, "try later")
        assert room.session.facts().last_error_code == "overloaded"
        assert room.session.failed_last


async def test_a_retry_of_a_failed_call_is_a_new_sample_at_once_while_another_client_waits():
    async with a_room() as room:
        tries, call = room.session.tries, room.add(a_call(), FRESH)
        room.add(a_call("another"), FRESH)
        call.error = RequestError("try later", status=503, code="overloaded")
        call.enter(Stage.FAILED)
        tries.failed(call)
        room.deliveries.refused(room.session, call, call.error)
        assert not await tries.waited(ASKED_FOR, RETRY)
        assert room.deliveries.joined(room.session, ASKED_FOR, RETRY) is None


async def test_the_end_of_a_session_settles_every_reply():
    async with a_room() as room:
        calls = {
            DeliveryState.ABANDONED: a_call("a", Stage.COMMITTED),
            DeliveryState.CUT: a_call("c", Stage.COMMITTED, partly_written=True),
            DeliveryState.DELIVERED: a_call("d", Stage.COMMITTED, delivery=DeliveryState.DELIVERED),
        }
        for call in calls.values():
            room.add(call)
            room.deliveries.close(room.session, call)
        assert [call.delivery for call in calls.values()] == list(calls)


# ---- any interleaving

MOVES = ("ask", "retry", "leave", "commit", "receive", "fail")


@given(moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 9)), max_size=30))
async def test_any_interleaving_of_retries_keeps_client_counts_and_deliveries_consistent(moves):
    async with a_room(grace_s=0) as room:
        calls: list[Call] = []
        for move, choice in moves:
            await play(room, calls, move, choice)
            for call in calls:
                assert call.clients >= 0
                settled = call.stage is Stage.COMMITTED and call.clients == 0
                assert not settled or call.delivery is not None
        delivered = sum(call.delivery is DeliveryState.DELIVERED for call in calls)
        assert room.session.delivered == delivered
        for call in calls:
            await room.recorded(call)


async def play(room: Room, calls: list[Call], move: str, choice: int) -> None:
    """One step of one client or of the engine; steps that cannot happen now do nothing."""
    if move in {"ask", "retry"}:
        asked = RETRY if move == "retry" else FRESH
        if room.deliveries.joined(room.session, ASKED_FOR, asked) is None:
            begun = room.add(a_call(f"e{len(calls)}"), asked)
            begun.task = room.nursery.start(asyncio.sleep(30), name="call")
            calls.append(begun)
        return
    if not calls:
        return
    call = calls[choice % len(calls)]
    sampling = call.stage is Stage.SAMPLING
    assert call.task is not None
    match move:
        case "commit" if sampling and not call.task.cancelling():
            call.enter(Stage.COMMITTING)
            call.enter(Stage.COMMITTED)
            room.deliveries.committed(room.session, call)
        case "fail" if sampling:
            call.enter(Stage.FAILED)
            room.session.tries.failed(call)
        case "leave" if call.clients:
            room.deliveries.left(room.session, call, partly=choice % 2 == 0)
            if call.task.cancelling():  # as the call's own task would
                call.enter(Stage.FAILED)
                room.session.tries.failed(call)
        case "receive" if call.clients and call.stage is Stage.COMMITTED:
            room.deliveries.received(room.session, call)
