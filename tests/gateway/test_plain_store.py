"""Linear turns whose records the store's thread writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.conformance.memory import MemoryStore
from tests.gateway.house import Caller, user
from tests.gateway.test_plain import Streaming, Watched, asked, linear_turns, played

from bridle.capture.sqlite import SqliteStore
from bridle.errors import StoreError
from bridle.gateway.plain import TOGETHER
from bridle.types import DeliveryState

either = pytest.mark.parametrize("harness", [Caller, Streaming])


async def test_plain_calls_need_no_task_while_the_store_s_thread_writes(tmp_path):
    async with await SqliteStore.open(tmp_path / "capture.sqlite", fsync="group") as store:
        engine = Watched({"content": "a"})
        async with played(server=engine, store=store) as home:
            caller = await home.session("s")
            messages: list[Any] = [user("go")]
            before = engine.asked
            for _ in range(4):
                messages += [await caller.ask(messages), user("and then")]
            assert home.gateway.plain.served == 3, "all but the first"
            assert [call.task is None for call in caller.calls] == [False, True, True, True]
            assert engine.asked == before + 4
            assert [caller.delivery(n) for n in range(4)] == [DeliveryState.DELIVERED] * 4
            parents = [one.parent_id for one in caller.exchanges]
            assert parents[1:] == [one.exchange_id for one in caller.exchanges[:-1]]


class Thread(MemoryStore):
    """A store whose thread writes when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = False
        self.waits = asyncio.Event()
        self.write: Any = None
        """Ends the write that waits, with an error if one is given."""

    def commit_now(self, commits: Any) -> Any:
        """Write at once, or when `write` is called."""
        if not self.holds:
            return super().commit_now(commits)
        done = asyncio.get_running_loop().create_future()

        def write(error: Exception | None = None) -> None:
            if error is not None:
                done.set_exception(error)
                return
            super(Thread, self).commit_now(commits)
            if not done.done():
                done.set_result(None)

        self.write = write
        self.waits.set()
        return [done]


@either
async def test_a_reply_waits_for_the_store_s_thread(harness):
    async with linear_turns(harness, store=Thread()) as (home, _, caller, messages, start):
        home.store.holds = True
        reply = start(caller.ask(messages))
        await home.store.waits.wait()
        assert not reply.done()
        assert len(asked(home)) == 1
        home.store.write()
        assert (await reply)["content"] == "a"
        assert home.gateway.plain.served == 2
        assert caller.delivery(2) is DeliveryState.DELIVERED


@either
async def test_a_write_that_fails_in_the_store_s_thread_is_an_error_and_may_be_asked_again(harness):
    async with linear_turns(harness, store=Thread()) as (home, engine, caller, messages, start):
        home.store.holds, before = True, engine.asked
        first = start(caller.post({"model": "m", "messages": messages}))
        await home.store.waits.wait()
        home.store.write(StoreError("the disk is full"))
        status, _ = await first
        assert status == 503
        home.store.holds = False
        assert (await caller.ask(messages))["content"] == "a"
        assert engine.asked == before + 2
        assert len(caller.exchanges) == 3


@either
async def test_a_client_that_goes_while_the_store_writes_leaves_its_reply_to_a_retry(harness):
    async with linear_turns(harness, store=Thread()) as (home, engine, caller, messages, start):
        home.store.holds, before = True, engine.asked
        first = start(caller.ask(messages))
        await home.store.waits.wait()
        first.cancel()
        await caller.unclaimed()
        assert not asked(home)
        second = start(caller.ask(messages))
        await caller.until(lambda: [call for call in caller.calls if call.clients])
        home.store.write()
        assert (await second)["content"] == "a"
        assert engine.asked == before + 1, "the retry joined"
        assert caller.delivery(2) is DeliveryState.DELIVERED


@either
async def test_sealing_a_session_waits_for_its_pending_store_write(harness):
    async with linear_turns(harness, store=Thread()) as (home, _, caller, messages, start):
        home.store.holds = True
        reply = start(caller.ask(messages))
        await home.store.waits.wait()
        seal = start(home.gateway.seal("s"))
        await caller.until(lambda: not asked(home))
        assert not seal.done()
        home.store.write()
        assert (await reply)["content"] == "a"
        await seal
        assert len(home.store.exchanges("s")) == 3


# ---- replies of several sessions in one transaction


class Together(MemoryStore):
    """A store that counts what it writes at once, and refuses the exchanges of some sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.refused: set[str] = set()

    def commit_now(self, commits: Any) -> Any:
        """Write all of them, or none."""
        self.sizes.append(len(commits))
        if any(exchange.session_id in self.refused for exchange, _ in commits):
            raise StoreError("the disk is full")
        super().commit_now(commits)


@asynccontextmanager
async def replied(harness: type[Caller]) -> AsyncIterator[Any]:
    """Three sessions whose engine replied; `answer_replied` writes and answers."""
    engine, store = Watched({"content": "a"}), Together()
    async with played(server=engine, store=store) as home, asyncio.TaskGroup() as group:
        callers = [harness(home, (await home.session(name)).handle) for name in "stu"]
        talks: list[list[Any]] = [[user(f"go {number}")] for number in range(3)]
        for _ in range(2):
            for caller, messages in zip(callers, talks, strict=True):
                messages += [await caller.ask(messages), user("and then")]
        plain = home.gateway.plain
        answer, plain.answer_replied = plain.answer_replied, lambda: None  # type: ignore[method-assign]
        sent = [
            group.create_task(caller.post({"model": "m", "messages": messages}))
            for caller, messages in zip(callers, talks, strict=True)
        ]
        await callers[0].until(lambda: len(plain.replied) == 3)
        plain.answer_replied = answer  # type: ignore[method-assign]
        store.sizes.clear()
        yield home, engine, callers, sent, talks


@either
async def test_replies_that_come_together_are_written_together(harness):
    async with replied(harness) as (home, _, callers, sent, _):
        home.gateway.plain.answer_replied()
        assert home.store.sizes == [3]
        assert [(await reply)[0] for reply in sent] == [200] * 3
        assert [caller.delivery(2) for caller in callers] == [DeliveryState.DELIVERED] * 3
        assert home.gateway.plain.served == 6, "all but the roots"


@either
async def test_an_exchange_that_cannot_be_written_fails_alone(harness):
    async with replied(harness) as (home, engine, callers, sent, talks):
        home.store.refused.add("t")
        home.gateway.plain.answer_replied()
        assert home.store.sizes == [3, 1, 1, 1]
        assert [(await reply)[0] for reply in sent] == [200, 503, 200]
        before = engine.asked
        home.store.refused.clear()
        assert (await callers[1].ask(talks[1]))["content"] == "a"
        assert engine.asked == before + 1
        assert [len(caller.exchanges) for caller in callers] == [3] * 3


@either
async def test_a_client_that_goes_before_its_reply_is_written_leaves_it_to_a_retry(harness):
    async with replied(harness) as (home, engine, callers, sent, talks):
        before = engine.asked
        sent[0].cancel()
        await callers[0].until(lambda: len(callers[0].exchanges) == 3)
        home.gateway.plain.answer_replied()
        assert home.store.sizes == [1, 2], "a task wrote the first one"
        assert (await callers[0].ask(talks[0]))["content"] == "a"
        assert engine.asked == before, "the retry joined"
        assert [(await reply)[0] for reply in sent[1:]] == [200] * 2
        assert [len(caller.exchanges) for caller in callers] == [3] * 3


@either
async def test_sealing_a_session_whose_reply_waits_for_others_ends_its_call_alone(harness):
    async with replied(harness) as (home, _, callers, sent, _):
        await home.gateway.seal("t")
        home.gateway.plain.answer_replied()
        assert home.store.sizes == [2]
        assert [(await reply)[0] for reply in sent] == [200, 401, 200]
        assert [len(caller.exchanges) for caller in callers] == [3, 2, 3]


@either
async def test_a_reply_whose_reading_fails_leaves_the_others_of_its_round_alone(harness):
    async with replied(harness) as (home, _, callers, sent, _):
        home.gateway.plain.replied[0].pool = object()  # which cannot be asked for the reply
        home.gateway.plain.answer_replied()
        assert [(await reply)[0] for reply in sent] == [500, 200, 200]
        assert [len(caller.exchanges) for caller in callers] == [2, 3, 3]


async def test_a_write_batch_of_plain_replies_has_a_largest_size():
    count = TOGETHER + 1
    store, engine = Together(), Watched({"content": "a"})
    async with played(server=engine, store=store) as home, asyncio.TaskGroup() as group:
        callers = [await home.session(f"s{number}") for number in range(count)]
        talks: list[list[Any]] = [[user(f"go {number}")] for number in range(count)]
        for caller, messages in zip(callers, talks, strict=True):
            messages += [await caller.ask(messages), user("and then")]
        engine.held, before = True, engine.asked
        asking = zip(callers, talks, strict=True)
        sent = [group.create_task(caller.ask(messages)) for caller, messages in asking]
        await callers[0].until(lambda: engine.asked == before + count)
        store.sizes.clear()
        engine.sign.set()
        assert [(await reply)["content"] for reply in sent] == ["a"] * count
        assert sum(store.sizes) == count
        assert max(store.sizes) <= TOGETHER


# ---- requests that arrive in one round of the loop


@asynccontextmanager
async def arrived(harness: type[Caller], *sessions: str) -> AsyncIterator[Any]:
    """A request of each of these sessions that has arrived and is not read; `begin_arrived` reads
    them. A session that is named twice sends its request over two connections. Gives a function
    that counts the calls to the engine since.
    """
    engine = Watched({"content": "a"})
    async with played(server=engine, store=Together()) as home, asyncio.TaskGroup() as group:
        known = {
            name: harness(home, (await home.session(name)).handle)
            for name in dict.fromkeys(sessions)
        }
        talks = {name: [user(f"go {name}")] for name in known}
        for name, caller in known.items():
            talks[name] += [await caller.ask(talks[name]), user("and then")]
        plain = home.gateway.plain
        begin, plain.begin_arrived = plain.begin_arrived, lambda: None  # type: ignore[method-assign]
        sent = [
            group.create_task(known[name].post({"model": "m", "messages": talks[name]}))
            for name in sessions
        ]
        await known[sessions[0]].until(lambda: len(plain.arrived) == len(sessions))
        plain.begin_arrived = begin  # type: ignore[method-assign]
        before = engine.asked
        yield home, lambda: engine.asked - before, list(known.values()), sent


@either
async def test_requests_that_arrive_together_take_the_plain_path_each_in_its_session(harness):
    async with arrived(harness, "s", "t", "u") as (home, asked, callers, sent):
        home.gateway.plain.begin_arrived()
        assert [(await reply)[0] for reply in sent] == [200] * 3
        assert (home.gateway.plain.served, asked()) == (3, 3)
        assert [len(caller.exchanges) for caller in callers] == [2] * 3


@either
async def test_the_later_of_equal_requests_that_arrive_together_repeats_the_first(harness):
    async with arrived(harness, "s", "t", "s") as (home, asked, callers, sent):
        home.gateway.plain.begin_arrived()
        assert [(await reply)[0] for reply in sent] == [200] * 3
        assert asked() == 3
        _, first, later = sorted(callers[0].exchanges, key=lambda one: len(one.extra))
        assert later.extra["repeats"] == [first.exchange_id]


@either
async def test_a_client_that_goes_before_its_request_is_read_takes_nothing_with_it(harness):
    async with arrived(harness, "s", "t") as (home, asked, callers, sent):
        first = home.gateway.plain.arrived[0].connection
        sent[0].cancel()
        await callers[0].until(lambda: first.line is None)
        home.gateway.plain.begin_arrived()
        assert (await sent[1])[0] == 200
        assert asked() == 1
        assert [len(caller.exchanges) for caller in callers] == [1, 2]
        assert home.gateway.plain.admission.bytes_in_hand == 0


@either
async def test_a_session_sealed_before_its_request_is_read_gets_401_and_no_sample(harness):
    async with arrived(harness, "s", "t") as (home, asked, callers, sent):
        await home.gateway.seal("s")
        home.gateway.plain.begin_arrived()
        assert [(await reply)[0] for reply in sent] == [401, 200]
        assert asked() == 1
        assert [len(caller.exchanges) for caller in callers] == [1, 2]


async def test_a_request_sent_behind_one_that_is_not_read_is_answered_after_it():
    async with arrived(Caller, "s", "t") as (home, asked, callers, sent):
        first = home.gateway.plain.arrived[0]
        first.connection.data_received(b"".join(first._parts))
        home.gateway.plain.begin_arrived()
        assert [(await reply)[0] for reply in sent] == [200, 200]
        assert asked() == 2, "the same again is a retry"
        assert [len(caller.exchanges) for caller in callers] == [2, 2]
