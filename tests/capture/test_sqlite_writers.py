"""A record is written by its caller if it is small and the disk is quick, else by the thread."""

import asyncio
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
from tests.capture.made import MadeSession, content_digest

from bridle.capture import sqlite
from bridle.capture.sqlite import HELD_UP_S, LATER_S, WRITTEN_HERE, SqliteStore
from bridle.errors import StoreError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "capture.sqlite"


@pytest.fixture
def quick_disk(monkeypatch):
    """No write counts as slow: the disk of a busy machine is not the theme."""
    monkeypatch.setattr(sqlite, "HELD_UP_S", 60)


def three_turns(session_id="s1"):
    made = MadeSession(session_id)
    made.call()
    made.call("x0", new=900)
    made.call("x1")
    made.end()
    return made


class Bodies(dict):
    """Bodies of an exchange that note the thread which writes them, and then call `during`."""

    def __init__(self, size=0, during=lambda: None):
        text = b"x" * size
        super().__init__({content_digest(text): text} if text else {})
        self.writers = []
        self.during = during

    def items(self):
        self.writers.append(threading.current_thread())
        self.during()
        return super().items()


async def opened(store, session_id="s"):
    made = MadeSession(session_id)
    await store.open_session(made.record)
    return made


async def writers(store, made, *, size=0, count=1):
    """Return the names of the threads that did so many writes."""
    found = set()
    for _ in range(count):
        bodies = Bodies(size)
        await store.commit(made.call(), bodies)
        found |= {one.name for one in bodies.writers}
    return found


HERE = {threading.current_thread().name}


def thread_of(path):
    return {f"capture {path}"}


async def test_small_records_are_written_by_their_callers_while_the_writer_thread_is_idle(
    path, quick_disk
):
    async with await SqliteStore.open(path) as store:
        made = await opened(store)
        assert await writers(store, made, count=3) == HERE
        assert await writers(store, made, size=WRITTEN_HERE + 1) == thread_of(path)
        assert await writers(store, made) == HERE


async def test_a_small_record_waits_for_the_thread_and_is_written_by_its_caller(path, quick_disk):
    began, go_on = threading.Event(), threading.Event()

    def stand():
        began.set()
        go_on.wait(20)

    async with await SqliteStore.open(path) as store:
        made = await opened(store)
        small = [Bodies() for _ in range(3)]
        async with asyncio.TaskGroup() as group:
            group.create_task(store.commit(made.call(), Bodies(WRITTEN_HERE + 1, stand)))
            await asyncio.to_thread(began.wait)
            for bodies in small:
                group.create_task(store.commit(made.call(), bodies))
            await asyncio.sleep(0.01)
            assert not any(bodies.writers for bodies in small)
            go_on.set()
    assert [[one.name for one in bodies.writers] for bodies in small] == [list(HERE)] * 3


async def test_with_fsync_the_thread_writes_all(path):
    async with await SqliteStore.open(path, fsync="group") as store:
        assert await writers(store, await opened(store), count=3) == thread_of(path)


async def test_a_write_that_the_disk_held_up_sends_those_that_follow_to_the_thread(
    path, monkeypatch
):
    monkeypatch.setattr(sqlite, "SHY_S", 1.0)
    async with await SqliteStore.open(path) as store:
        made = await opened(store)
        held_up = Bodies(during=lambda: time.sleep(2 * HELD_UP_S))
        await store.commit(made.call(), held_up)
        assert await writers(store, made, count=3) == thread_of(path)
        async with asyncio.timeout(15):
            while await writers(store, made) != HERE:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.1)


async def test_records_keep_their_order_with_several_writers(path):
    made = MadeSession()
    for _ in range(40):
        made.call()
    async with await SqliteStore.open(path) as store:
        await store.open_session(made.record)
        other = await opened(store, "other")
        async with asyncio.TaskGroup() as group:
            for index, exchange in enumerate(made.exchanges):
                bodies = made.new_bodies[exchange.exchange_id]
                group.create_task(store.commit(exchange, bodies))
                if index % 3 == 0:
                    group.create_task(store.commit(other.call(), Bodies(WRITTEN_HERE + 1)))
                if index % 7 == 0:
                    await asyncio.sleep(0)
        assert [exchange.index for exchange in store.exchanges("s1")] == list(range(40))


async def test_a_record_that_its_caller_cannot_write_is_its_caller_s_error_alone(path, quick_disk):
    async with await SqliteStore.open(path) as store:
        with pytest.raises(StoreError, match="never opened"):
            await store.deliver(MadeSession().deliver("x0"))
        assert await writers(store, await opened(store)) == HERE


@pytest.fixture
async def timers(monkeypatch):
    """The timers of deferred deliveries; a test fires them."""
    found, loop = [], asyncio.get_running_loop()
    call_later = loop.call_later

    def held(delay, callback, *given, **more):
        if delay != LATER_S:
            return call_later(delay, callback, *given, **more)
        found.append(partial(callback, *given))
        return None

    monkeypatch.setattr(loop, "call_later", held)
    return found


def deliveries_in(path):
    """Return how many deliveries another process would find in the file."""
    with closing(sqlite3.connect(path)) as other:
        return other.execute("SELECT count(*) FROM deliveries").fetchone()[0]


async def test_a_delivery_is_written_with_the_next_exchange_and_readable_at_once(
    path, quick_disk, timers
):
    made = three_turns()
    async with await SqliteStore.open(path) as store, asyncio.TaskGroup() as group:
        await store.open_session(made.record)
        first, second, _ = made.exchanges
        await store.commit(first, made.bodies)
        result = group.create_task(store.deliver(made.deliver(first.exchange_id)))
        await asyncio.sleep(0)
        assert deliveries_in(path) == 0
        await store.commit(second, made.bodies)
        assert deliveries_in(path) == 1
        await result
        group.create_task(store.deliver(made.deliver(second.exchange_id)))
        await asyncio.sleep(0)
        assert set(store.deliveries("s1")) == {first.exchange_id, second.exchange_id}


async def test_an_exchange_takes_deliveries_along_once_the_first_has_waited_for_others(
    path, quick_disk, timers, monkeypatch
):
    monkeypatch.setattr(sqlite, "TOGETHER_S", 60)
    made = three_turns()
    async with await SqliteStore.open(path) as store, asyncio.TaskGroup() as group:
        await store.open_session(made.record)
        first, second, third = made.exchanges
        await store.commit(first, made.bodies)
        statements = []
        store._writer._connection.set_trace_callback(statements.append)
        store.deliver_soon(made.deliver(first.exchange_id), failed=print)
        await store.commit(second, made.bodies)
        assert deliveries_in(path) == 0
        assert [one.split()[0] for one in statements] == ["INSERT"], "a transaction by itself"
        group.create_task(store.deliver(made.deliver(second.exchange_id)))
        await asyncio.sleep(0)
        await store.commit(third, made.bodies)
        assert deliveries_in(path) == 2, "somebody waits for one of them"
        monkeypatch.setattr(sqlite, "TOGETHER_S", 0)
        store.deliver_soon(made.deliver(third.exchange_id), failed=print)
        await store.commit(replace(made.call("x2"), index=3), made.bodies)
        assert deliveries_in(path) == 3


async def test_one_timer_writes_the_deliveries_that_no_exchange_took_with_it(
    path, quick_disk, timers
):
    made = three_turns()
    async with await SqliteStore.open(path) as store, asyncio.TaskGroup() as group:
        await store.open_session(made.record)
        for exchange in made.exchanges[:2]:
            await store.commit(exchange, made.bodies)
            group.create_task(store.deliver(made.deliver(exchange.exchange_id)))
            await asyncio.sleep(0)
        (of_the_first,) = timers
        of_the_first()
        assert deliveries_in(path) == 1, "the second came later, and waits as long"
        _, of_the_second = timers
        of_the_second()
        assert deliveries_in(path) == 2
        group.create_task(store.deliver(made.deliver(made.exchanges[1].exchange_id)))
        await asyncio.sleep(0)
        assert len(timers) == 3
        timers[2]()
        assert deliveries_in(path) == 3


async def test_a_delivery_is_written_after_the_loop_of_an_earlier_one_has_ended(path, quick_disk):
    made = three_turns()
    async with await SqliteStore.open(path) as store:
        await store.open_session(made.record)
        first, second, _ = made.exchanges
        for exchange in (first, second):
            await store.commit(exchange, made.bodies)

        async def deliver_and_end():
            store.deliver_soon(made.deliver(first.exchange_id), failed=print)

        await asyncio.to_thread(asyncio.run, deliver_and_end())
        async with asyncio.timeout(10):
            await store.deliver(made.deliver(second.exchange_id))
        assert deliveries_in(path) == 2


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
