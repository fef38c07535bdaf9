"""Linear turns whose records the store's thread writes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.conformance.memory import MemoryStore
from tests.gateway.house import Caller, user
from tests.gateway.test_plain import Streaming, Watched, asked, linear_turns, played

from bridle.capture.sqlite import SqliteStore
from bridle.errors import StoreError
from bridle.types import DeliveryState

either = pytest.mark.parametrize("harness", [Caller, Streaming])


async def test_a_store_that_writes_in_its_thread_is_waited_for_without_a_task(tmp_path):
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

    def commit_now(self, exchange: Any, bodies: Any) -> Any:
        """Write at once, or when `write` is called."""
        if not self.holds:
            return super().commit_now(exchange, bodies)
        done = asyncio.get_running_loop().create_future()

        def write(error: Exception | None = None) -> None:
            if error is not None:
                done.set_exception(error)
                return
            super(Thread, self).commit_now(exchange, bodies)
            if not done.done():
                done.set_result(None)

        self.write = write
        self.waits.set()
        return done


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
async def test_a_session_that_ends_waits_for_what_the_store_writes(harness):
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
