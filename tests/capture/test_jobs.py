import asyncio
import threading

from bridle.capture.sqlite import Job, Jobs
from bridle.errors import StoreError


def job(name):
    loop = asyncio.get_running_loop()
    return Job(lambda written: written.append(name), loop, loop.create_future())


def names(jobs):
    written = []
    for one in jobs:
        one.work(written)
    return written


async def test_deferred_jobs_run_before_jobs_that_are_queued_later():
    jobs = Jobs()
    jobs.left += (job("a"), job("b"))
    jobs.give(job("c"))
    assert names([jobs.get() for _ in range(3)]) == ["a", "b", "c"]
    assert jobs.empty
    assert not jobs.take_left()


async def test_the_thread_is_busy_until_it_has_finished_all_that_was_queued():
    jobs = Jobs()
    jobs.left.append(job("a"))
    assert jobs.given == jobs.finished
    jobs.give(job("b"))
    assert jobs.given != jobs.finished
    jobs.finished += 2
    assert jobs.given == jobs.finished


async def test_the_next_writer_takes_the_deferred_jobs():
    jobs, left = Jobs(), job("a")
    jobs.left.append(left)
    assert left in jobs.left
    assert job("a") not in jobs.left
    assert names(jobs.take_left()) == ["a"]
    assert left not in jobs.left
    assert jobs.take_left() == []
    jobs.give()
    assert jobs.given == jobs.finished


async def test_a_queued_marker_comes_after_the_deferred_jobs():
    jobs, mark = Jobs(), threading.Event()
    jobs.left.append(job("a"))
    jobs.put(mark)
    assert names([jobs.get()]) == ["a"]
    assert jobs.get() is mark


async def test_a_caller_is_notified_once_at_once_or_from_another_thread():
    here, there, late = job("a"), job("b"), job("c")
    here.finish(None, asyncio.get_running_loop())
    assert here.done.done()
    await asyncio.to_thread(there.finish, StoreError("full"))
    await asyncio.sleep(0)
    assert str(there.done.exception()) == "full"
    late.done.cancel()
    late.finish(None, asyncio.get_running_loop())
    assert late.done.cancelled()


def test_a_caller_whose_loop_is_gone_is_not_notified():
    async def left():
        return job("a")

    alone = asyncio.run(left())
    alone.finish(None)
    assert not alone.done.done()
