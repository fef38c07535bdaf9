"""The whole service: what survives it, what it begins with, what it removes."""

import asyncio

import pytest
from tests.server.house import (
    FakeWorkers,
    a_service,
    database_of,
    ended,
    result,
    submission,
    until,
)

from bridle.config import BuilderSpec, Task
from bridle.errors import ConfigError
from bridle.gateway.weights import SetPolicy
from bridle.node.events import Installing, SessionChanged
from bridle.server.claiming import Room
from bridle.server.database import Database
from bridle.server.state import State
from bridle.types import SessionStatus


async def submit(service, *submissions):
    return await service.submit(submissions, owner="o")


async def leave_running(tmp_path, *task_ids):
    """Return what a server that was killed leaves: accepted tasks, leased sessions."""
    async with await Database.open(database_of(tmp_path)) as database:
        state = State(database)
        await state.submit([submission(name) for name in task_ids], owner="o", now=1.0)
        await state.claim(Room(99), owner="me", now=2.0, lease_s=1e12)


async def test_a_killed_servers_finished_run_is_stored_and_the_others_run_again(tmp_path):
    await leave_running(tmp_path, "finished", "cut")
    workers = FakeWorkers()
    workers.recallable["finished.0"] = result(
        "finished.0", Task(task_id="finished", instruction="x"), 0, reward=0.25
    )
    async with a_service(tmp_path, workers) as service:
        row = await ended(service, "finished")
        await ended(service, "cut")
        (session,) = await service.views.sessions(row["seq"])
        assert '"reward":0.25' in session["result"]
        assert workers.ran == ["cut.0.r2"]


async def test_another_servers_living_lease_is_left_alone(tmp_path):
    await leave_running(tmp_path, "a")
    workers = FakeWorkers()
    async with a_service(tmp_path, workers, owner="other") as service:
        await submit(service, submission("b"))
        await ended(service, "b")
        assert workers.ran == ["b.0"]


async def test_a_pause_holds_for_a_claim_that_is_under_way(tmp_path):
    checks, go = [], asyncio.Event()
    async with a_service(tmp_path, workers := FakeWorkers()) as service:

        async def check():
            checks.append(go.is_set())
            await go.wait()

        service.files.check = check
        service.dispatcher.wake.beat()
        await until(lambda: checks)
        await service.pause()
        await submit(service, submission("a"))
        go.set()
        await until(lambda: checks == [False, True])
        assert workers.ran == []
        await service.resume()
        await ended(service, "a")


async def test_a_pause_holds_over_a_restart(tmp_path):
    async with a_service(tmp_path) as service:
        await service.pause()
        await submit(service, submission("a"))
    workers = FakeWorkers()
    async with a_service(tmp_path, workers) as service:
        await asyncio.sleep(0.03)
        assert (workers.ran, (await service.status())["paused"]) == ([], True)
        await service.resume()
        await ended(service, "a")


async def test_draining_waits_for_what_runs_and_starts_nothing(tmp_path):
    workers = FakeWorkers(capacity=1, held=True)
    async with a_service(tmp_path, workers, drain_s=10) as service:
        await submit(service, submission("a", 2))
        await until(lambda: workers.living)
        async with asyncio.TaskGroup() as group:
            draining = group.create_task(service.drain())
            await asyncio.sleep(0)
            workers.let("a.0")
        assert draining.result() == 0
        assert workers.ran == ["a.0"]
        assert (await submit(service, submission("b"))) == [True]


async def test_the_greater_version_of_state_and_engines_holds(tmp_path):
    async with a_service(tmp_path) as service:
        await service.set_policy(SetPolicy(version=4))
    workers = FakeWorkers()
    async with a_service(tmp_path, workers) as service:
        assert workers.asked == [SetPolicy(version=4)]
    workers.version = 9
    async with a_service(tmp_path, workers) as service:
        assert (await service.status())["policy"]["version"] == 9


async def test_running_sessions_that_are_too_far_behind_are_cancelled_where_asked(tmp_path):
    workers = FakeWorkers(held=True)
    settings = {"max_version_lag": 1, "on_stale": "cancel"}
    async with a_service(tmp_path, workers, **settings) as service:
        await submit(service, submission("a"))
        await until(lambda: workers.living)
        await service.set_policy(SetPolicy(version=1))
        assert workers.living
        await service.set_policy(SetPolicy(version=2))
        task = await ended(service, "a")
        assert task["state"] == "failed"


async def test_a_session_is_cancelled_alone_wherever_it_stands(tmp_path):
    workers = FakeWorkers(capacity=2, held=True)
    async with a_service(tmp_path, workers) as service:
        await submit(service, submission("a", 2))
        await until(lambda: len(workers.living) == 2)
        assert await service.cancel_session("nobody") is None
        assert await service.cancel_session("a.0") is True
        workers.let("a.1")
        task = await ended(service, "a")
        assert await service.cancel_session("a.0") is False
        rows = await service.views.sessions(task["seq"])
        assert [row["state"] for row in rows] == ["CANCELLED", "COMPLETED"]


async def test_what_a_task_names_is_looked_up_once_and_told_each_time(tmp_path):
    async with a_service(tmp_path) as service:
        task = submission("a", builder=BuilderSpec(strategy="nope")).split()[0]
        for name in ("a", "b"):
            with pytest.raises(ConfigError, match=r"^unknown builder 'nope'"):
                service.check(task.model_copy(update={"task_id": name}))


async def test_runs_are_told_with_their_stage(tmp_path):
    workers = FakeWorkers()
    async with a_service(tmp_path, workers) as service:
        changed = SessionChanged("a.0", "a", 0, "command", SessionStatus.BUILDING, 1.0)
        with service.events.reading() as reader:
            workers.events.tell(Installing("codex", "a line"))
            workers.events.tell(changed)
            told = await reader.next(1)
        assert (told["run_id"], told["status"]) == ("a.0", "BUILDING")
        assert service.stage("a.0", 1) == "BUILDING"
        workers.events.tell(SessionChanged("a.0", "a", 0, "command", SessionStatus.COMPLETED, 2.0))
        assert service.stage("a.0", 1) is None


async def test_a_part_that_fails_for_good_is_told(tmp_path):
    async with a_service(tmp_path) as service:
        service.lost(RuntimeError("a bug"))
        assert service.broken == "RuntimeError('a bug')"
