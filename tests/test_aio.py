"""Structured-concurrency helpers."""

import asyncio
import time
from itertools import pairwise

import pytest

from bridle.aio import Checkup, LoopClock, Nursery, Turnstile, retry, run_shielded


async def test_run_shielded_finishes_its_work_when_the_caller_is_cancelled():
    done = asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0.05)
        done.set()

    async def caller() -> None:
        await run_shielded(work(), timeout_s=60)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(caller())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert done.is_set()


async def test_run_shielded_returns_the_value_or_raises_the_error_or_times_out():
    async def value() -> int:
        return 3

    async def fails() -> None:
        raise ValueError("no")

    assert await run_shielded(value(), timeout_s=60) == 3
    with pytest.raises(ValueError, match="no"):
        await run_shielded(fails(), timeout_s=60)
    with pytest.raises(TimeoutError):
        await run_shielded(asyncio.sleep(5), timeout_s=0.01)


async def test_a_nursery_reports_the_error_of_an_owned_future_and_cancels_the_others():
    errors, loop = [], asyncio.get_running_loop()
    failing, waiting = loop.create_future(), loop.create_future()
    async with Nursery(errors.append) as nursery:
        nursery.own(failing)
        nursery.own(waiting)
        failing.set_exception(ValueError("no"))
    assert [str(error) for error in errors] == ["no"]
    assert waiting.cancelled()


async def test_a_nursery_reports_task_errors_and_cancels_its_tasks_on_exit():
    errors, ended = [], []

    async def fails() -> None:
        raise ValueError("mine")

    async def sleeps() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async with Nursery(errors.append) as nursery:
        nursery.start(fails(), name="fails")
        nursery.start(sleeps(), name="sleeps")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    assert [str(error) for error in errors] == ["mine"]
    assert ended == [True]


async def test_retry_stops_at_the_first_success_and_after_the_last_attempt():
    tries = []

    async def third_time() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("not yet")
        return "done"

    async def other() -> None:
        raise KeyError("x")

    assert await retry(third_time, attempts=3, backoff_s=0, retry_on=(OSError,)) == "done"
    tries.clear()
    with pytest.raises(OSError, match="not yet"):
        await retry(third_time, attempts=2, backoff_s=0, retry_on=(OSError,))
    with pytest.raises(KeyError):
        await retry(other, attempts=3, backoff_s=0, retry_on=(OSError,))
    with pytest.raises(ValueError, match="at least 1"):
        await retry(other, attempts=0, backoff_s=0, retry_on=(OSError,))


async def test_a_turnstile_admits_a_limited_number_of_tasks_per_loop_round_in_order():
    turnstile, through, seen = Turnstile(2), [], []

    async def comes(name: int) -> None:
        await turnstile.enter()
        through.append(name)

    async with asyncio.TaskGroup() as group:
        for name in range(5):
            group.create_task(comes(name))
        while len(through) < 5:
            await asyncio.sleep(0)
            seen.append(len(through))

    assert through == [0, 1, 2, 3, 4]
    assert all(after - before <= 2 for before, after in pairwise([0, *seen]))


async def test_a_turnstile_admits_a_single_task_at_once():
    turnstile = Turnstile(1)
    for _ in range(3):
        entering = turnstile.enter()
        with pytest.raises(StopIteration):
            entering.send(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_a_task_cancelled_at_a_turnstile_does_not_block_the_others():
    turnstile, through = Turnstile(1), []

    async def comes(name: str) -> None:
        await turnstile.enter()
        through.append(name)

    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        group.create_task(comes("first"))
        leaves = group.create_task(comes("leaves"))
        group.create_task(comes("last"))
        leaves.get_loop().call_soon(leaves.cancel)

    assert through == ["first", "last"]


async def test_a_loop_clock_caps_the_time_of_a_stalled_loop_and_follows_an_idle_one():
    clock = LoopClock(0.5)
    async with Nursery(print) as nursery:
        nursery.start(clock.run(), name="clock")
        await asyncio.sleep(0)
        begun, began = clock(), time.monotonic()
        time.sleep(3)  # noqa: ASYNC251 - the stall
        assert clock() - begun <= 0.5
        after, later = clock(), time.monotonic()
        await asyncio.sleep(1)
        assert clock() - after <= time.monotonic() - later
        assert clock() - begun > 0.5
        assert time.monotonic() - began >= 4


async def test_run_shielded_raises_a_cancellation_that_arrives_as_the_work_ends():
    async def work():
        asyncio.get_running_loop().call_soon(caller.cancel)

    async with asyncio.TaskGroup() as group:
        caller = group.create_task(run_shielded(work(), timeout_s=60))
        await asyncio.wait([caller])

    assert caller.cancelled()


async def test_a_checkup_caches_its_result_until_the_interval_has_passed():
    faults = [ValueError("full"), None]
    made = []

    async def check():
        made.append(1)
        await asyncio.sleep(0)
        if (fault := faults[min(len(made), 2) - 1]) is not None:
            raise fault

    seldom, often = Checkup(check, every_s=1000), Checkup(check, every_s=0)
    for _ in range(2):
        with pytest.raises(ValueError, match="full"):
            await seldom()
    assert len(made) == 1
    await often()
    await often()
    assert len(made) == 3
