"""A record is written by its caller if it is small and the disk is quick, else by the thread."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from tests.capture.made import MadeSession

from bridle.capture import sqlite
from bridle.capture.sqlite import HELD_UP_S, LATER_S, WRITTEN_HERE, Job, SqliteStore
from bridle.errors import StoreError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "capture.sqlite"


def three_turns(session_id="s1"):
    made = MadeSession(session_id)
    made.call()
    made.call("x0", new=900)
    made.call("x1")
    made.end()
    return made


async def writers(store, *, size=0, count=1):
    """Return which threads did so many writes."""
    found = []
    for _ in range(count):
        await store._write(lambda _: found.append(threading.current_thread()), size=size)
    return set(found)


async def written_here(store, tries=50):
    for _ in range(tries):  # on a machine that may be busy
        store._writer._shy_until = 0.0
        if await writers(store, count=3) == {threading.current_thread()}:
            return True
    return False


async def test_small_records_are_written_by_their_callers_while_the_writer_thread_is_idle(path):
    async with await SqliteStore.open(path) as store:
        assert await written_here(store)
        assert await writers(store, size=WRITTEN_HERE + 1) == {store._writer._thread}


async def test_a_small_record_waits_for_the_thread_and_is_written_by_its_caller(path, monkeypatch):
    monkeypatch.setattr(sqlite, "HELD_UP_S", 60)  # the disk of a busy machine is not the theme
    began, go_on, found = threading.Event(), threading.Event(), []
    async with await SqliteStore.open(path) as store, asyncio.TaskGroup() as group:

        def slow(_):
            began.set()
            go_on.wait(20)

        group.create_task(store._write(slow, size=WRITTEN_HERE + 1))
        await asyncio.to_thread(began.wait)
        for _ in range(3):
            work = store._write(lambda _: found.append(threading.current_thread()))
            group.create_task(work)
        await asyncio.sleep(0.01)
        assert not found
        go_on.set()
    assert found == [threading.current_thread()] * 3


async def test_with_fsync_the_thread_writes_all(path):
    async with await SqliteStore.open(path, fsync="group") as store:
        assert await writers(store, count=3) == {store._writer._thread}


async def test_a_write_that_the_disk_held_up_sends_those_that_follow_to_the_thread(path):
    async with await SqliteStore.open(path) as store:
        await store._write(lambda _: time.sleep(2 * HELD_UP_S))
        assert await writers(store, count=3) == {store._writer._thread}
        assert await written_here(store)


async def test_records_keep_their_order_with_several_writers(path):
    made = MadeSession()
    for _ in range(40):
        made.call()
    async with await SqliteStore.open(path) as store:
        await store.open_session(made.record)
        async with asyncio.TaskGroup() as group:
            for index, exchange in enumerate(made.exchanges):
                bodies = made.new_bodies[exchange.exchange_id]
                group.create_task(store.commit(exchange, bodies))
                if index % 3 == 0:
                    group.create_task(store._write(lambda _: None, size=WRITTEN_HERE + 1))
                if index % 7 == 0:
                    await asyncio.sleep(0)
        assert [exchange.index for exchange in store.exchanges("s1")] == list(range(40))


async def test_a_record_that_its_caller_cannot_write_is_its_caller_s_error_alone(path):
    async with await SqliteStore.open(path) as store:
        with pytest.raises(StoreError, match="never opened"):
            await store.deliver(MadeSession().deliver("x0"))
        assert await written_here(store)


async def test_a_delivery_is_written_with_the_next_exchange_and_readable_at_once(path):
    made = three_turns()
    async with await SqliteStore.open(path) as store, asyncio.TaskGroup() as group:
        await store.open_session(made.record)
        first, second, _ = made.exchanges
        await store.commit(first, made.bodies)
        result = group.create_task(store.deliver(made.deliver(first.exchange_id)))
        await asyncio.sleep(0)
        assert len(store._writer._jobs.left) == 1
        await store.commit(second, made.bodies)
        assert not store._writer._jobs.left
        await result
        group.create_task(store.deliver(made.deliver(second.exchange_id)))
        await asyncio.sleep(0)
        assert set(store.deliveries("s1")) == {first.exchange_id, second.exchange_id}


async def test_the_timer_of_a_delivery_already_written_writes_no_later_delivery(path):
    made = three_turns()
    async with await SqliteStore.open(path) as store:
        await store.open_session(made.record)
        loop, writer = asyncio.get_running_loop(), store._writer
        first, second = loop.create_future(), loop.create_future()
        gone, left = (Job(lambda _: None, loop, done) for done in (first, second))
        writer.give_later(gone, LATER_S)
        await store.commit(made.exchanges[0], made.bodies)
        assert first.done()
        writer.give_later(left, LATER_S)
        writer._write_later(gone)
        assert writer._jobs.is_left(left)
        await second


async def test_a_delivery_that_cannot_be_written_costs_the_next_exchange_nothing(path):
    made = three_turns()
    async with await SqliteStore.open(path) as store, asyncio.TaskGroup() as group:
        await store.open_session(made.record)

        async def refused():
            with pytest.raises(StoreError, match="never opened"):
                await store.deliver(replace(made.deliver("x0"), session_id="nobody"))

        group.create_task(refused())
        await asyncio.sleep(0)
        await store.commit(made.exchanges[0], made.bodies)
        assert len(store.exchanges("s1")) == 1
