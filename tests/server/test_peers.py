"""Several services on one database, as several servers are."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest
from tests.server.house import (
    FakeWorkers,
    a_service,
    ended,
    left_by_killed,
    result,
    submission,
    until,
)

from bridle.config import Task
from bridle.server.schemas import run_id


class Clock:
    """Seconds that a test advances."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@asynccontextmanager
async def two(tmp_path, first=None, second=None, **settings):
    """Two services; the second one's neighbours are judged by `.clock`."""
    async with (
        a_service(tmp_path, first, owner="first", **settings) as one,
        a_service(tmp_path, second, owner="second", **settings) as other,
    ):
        other.clock = Clock()
        other.peers.clock = other.clock
        yield one, other


async def test_each_session_of_a_batch_runs_once_on_one_of_two_servers(tmp_path):
    workers = FakeWorkers(capacity=2), FakeWorkers(capacity=2)
    async with two(tmp_path, *workers) as (one, other):
        await one.submit([submission(f"t{n}", 3) for n in range(6)], owner="o")
        await other.peers.check()
        for number in range(6):
            await ended(other, f"t{number}")
        ran = [*workers[0].ran, *workers[1].ran]
        assert len(ran) == len(set(ran)) == 18


async def test_runs_of_a_dead_server_are_taken_over_after_its_lease(tmp_path):
    await left_by_killed(tmp_path, "finished", "cut", owner="dead")
    workers = FakeWorkers()
    workers.recallable["finished.0"] = result(
        "finished.0", Task(task_id="finished", instruction="x"), 0
    )
    async with a_service(tmp_path, workers, owner="me", lease_s=60) as service:
        clock = service.peers.clock = Clock()
        for clock.now in (0.0, 30.0, 60.0):
            await service.peers.check()
        assert workers.ran == []
        clock.now = 61.0
        await service.peers.check()
        await ended(service, "cut")
        await ended(service, "finished")
        assert workers.ran == ["cut.0.r2"]


async def test_a_server_that_renews_its_leases_is_not_taken_over_despite_clock_jumps(tmp_path):
    await left_by_killed(tmp_path, "a", owner="dead")
    async with a_service(tmp_path, owner="me", lease_s=60) as service:
        clock = service.peers.clock = Clock()
        for until_ in (5.0, 1e15, -7.0, 1.0):  # its clock jumps; ours goes on
            await service.store.renew(owner="dead", until=until_)
            await service.peers.check()
            clock.now += 50.0
        assert service.workers.ran == []


async def test_server_that_lost_its_lease_cancels_its_run_without_effect(tmp_path):
    slow, quick = FakeWorkers(capacity=1, held=True), FakeWorkers(capacity=0)
    async with two(tmp_path, slow, quick) as (one, other):
        await one.submit([submission("a")], owner="o")
        await until(lambda: slow.living)
        quick.capacity = 1
        await other.peers.take_over(["first"])
        await ended(other, "a")
        await one.peers.check()
        await until(lambda: not one.scheduler.running)
        row = await other.queries.session("a.0")
        assert (row["state"], row["attempt"], quick.ran) == ("COMPLETED", 2, ["a.0.r2"])
        # What the late one wrote is not left lying about.
        names = [path.stem for path in (tmp_path / "trajectories").rglob("*.parquet")]
        assert names == ["a.0.r2"]


@pytest.mark.parametrize("seed", range(3))
async def test_each_session_ends_once_while_two_servers_take_over_each_others_leases(
    tmp_path, seed
):
    drawn = random.Random(seed)
    workers = FakeWorkers(capacity=3, held=True), FakeWorkers(capacity=3, held=True)
    async with two(tmp_path, *workers) as servers:
        await servers[0].submit(
            [submission(f"t{n}", 2, max_attempts=100) for n in range(6)], owner="o"
        )
        await until(lambda: workers[0].living)
        await servers[1].peers.take_over([servers[0].owner])
        for _ in range(60):
            at = drawn.randrange(2)
            here, there, running = servers[at], servers[1 - at], workers[at]
            match drawn.choice(["steal", "look", "end", "end", "jump"]):
                case "steal":
                    await here.peers.take_over([there.owner])
                case "look":
                    await here.peers.check()
                case "end" if running.living:
                    running.let(drawn.choice(sorted(running.living)))
                case "jump":
                    await here.store.renew(owner=there.owner, until=drawn.uniform(-1e9, 1e12))
            await asyncio.sleep(0)

        async def all_ended():
            for server, running in zip(servers, workers, strict=True):
                await server.peers.check()
                for one in [*running.living]:
                    if not running.living[one].done():
                        running.let(one)
            rows = [await servers[0].queries.task(f"t{n}") for n in range(6)]
            return all(row["done_seq"] is not None for row in rows) and rows

        tasks = await until(all_ended)
        sessions = [row for task in tasks for row in await servers[1].queries.sessions(task["seq"])]
        await until(lambda: not any(server.scheduler.running for server in servers))
    assert {(row["state"], task["usable"]) for task in tasks for row in sessions} == {
        ("COMPLETED", 2)
    }
    assert max(row["attempt"] for row in sessions) > 1
    names = sorted(path.stem for path in (tmp_path / "trajectories").rglob("*.parquet"))
    assert names == sorted(run_id(row["session_id"], row["attempt"]) for row in sessions)


async def test_cancellation_reaches_the_runs_of_another_server(tmp_path):
    held = FakeWorkers(capacity=4, held=True)
    async with two(tmp_path, held, FakeWorkers(capacity=0)) as (one, other):
        await one.submit([submission("a"), submission("b", 2)], owner="o")
        await until(lambda: len(held.living) == 3)
        await other.cancel_task("a")
        assert await other.cancel_session("b.0") is True
        await one.peers.check()
        await ended(other, "a")
        await until(lambda: set(held.living) == {"b.1"})
        held.let("b.1")
        task = await ended(other, "b")
        rows = await other.queries.sessions(task["seq"])
        assert [row["state"] for row in rows] == ["CANCELLED", "COMPLETED"]


async def test_every_server_sees_a_pause_and_a_new_task(tmp_path):
    async with two(tmp_path, FakeWorkers(capacity=0)) as (one, other):
        await one.pause()
        await other.peers.check()
        await one.submit([submission("a")], owner="o")
        await other.peers.check()
        await asyncio.sleep(0.02)
        assert other.workers.ran == []
        await one.resume()
        await other.peers.check()
        await ended(one, "a")
        assert other.workers.ran == ["a.0"]


async def test_takeover_does_not_rerun_a_cancelled_session(tmp_path):
    held = FakeWorkers(held=True)
    async with two(tmp_path, held, FakeWorkers(capacity=0)) as (one, other):
        await one.submit([submission("a")], owner="o")
        await until(lambda: held.living)
        await other.cancel_session("a.0")
        await other.peers.take_over(["first"])
        await ended(other, "a")
        assert (await other.queries.session("a.0"))["state"] == "CANCELLED"
        assert other.workers.ran == []
