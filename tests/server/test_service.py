"""The whole service: what survives it, what it begins with, what it removes."""

import asyncio

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

from bridle.config import BuilderSpec, Task
from bridle.errors import ConfigError
from bridle.gateway.weights import SetPolicy
from bridle.node.base import Installing, SessionChanged
from bridle.types import SessionStatus


async def submit(service, *submissions):
    return await service.submit(submissions, owner="o")


async def test_status_has_the_version_until_which_groups_are_held_back(tmp_path):
    """The next training on a server begins with version 0 again."""
    settings = {"max_version_lag": 0, "groups_per_version": 2}
    async with a_service(tmp_path, **settings) as service:
        await submit(service, *(submission(f"a{number}") for number in range(5)))
        for number in range(5):
            await service.set_policy(SetPolicy(version=number // 2))
            await ended(service, f"a{number}")
        assert (await service.status())["groups_held_until"] is None
        await service.set_policy(SetPolicy(version=0))
        assert (await service.status())["groups_held_until"] == 2
        await submit(service, submission("b"))
        await service.set_policy(SetPolicy(version=2))
        await ended(service, "b")


async def test_policies_that_are_set_at_once_reach_the_nodes_one_after_the_other(tmp_path):
    """Each holds sampling on all nodes, and lets it go on: the first would do so for the second."""

    class Slow(FakeWorkers):
        begun, ended = [], []

        async def set_policy(self, wanted):
            self.begun.append(wanted.version)
            await asyncio.sleep(0)
            assert len(self.begun) == len(self.ended) + 1
            self.ended.append(wanted.version)
            return await super().set_policy(wanted)

    async with a_service(tmp_path, Slow()) as service, asyncio.TaskGroup() as group:
        for version in (3, 4, 5):
            group.create_task(service.set_policy(SetPolicy(version=version)))
    assert Slow.ended == [3, 4, 5]


async def test_restart_stores_finished_runs_and_reruns_the_others(tmp_path):
    await left_by_killed(tmp_path, "finished", "cut", owner="me")
    workers = FakeWorkers()
    workers.recallable["finished.0"] = result(
        "finished.0", Task(task_id="finished", instruction="x"), 0, reward=0.25
    )
    async with a_service(tmp_path, workers) as service:
        row = await ended(service, "finished")
        await ended(service, "cut")
        (session,) = await service.queries.sessions(row["seq"])
        assert '"reward":0.25' in session["result"]
        assert workers.ran == ["cut.0.r2"]


async def test_live_lease_of_another_server_is_not_taken_over(tmp_path):
    await left_by_killed(tmp_path, "a", owner="me")
    workers = FakeWorkers()
    async with a_service(tmp_path, workers, owner="other") as service:
        await submit(service, submission("b"))
        await ended(service, "b")
        assert workers.ran == ["b.0"]


async def test_pause_applies_to_a_claim_in_progress(tmp_path):
    checks, go = [], asyncio.Event()
    async with a_service(tmp_path, workers := FakeWorkers()) as service:

        async def check():
            checks.append(go.is_set())
            await go.wait()

        service.files.check = check
        service.scheduler.wake.notify_all()
        await until(lambda: checks)
        await service.pause()
        await submit(service, submission("a"))
        go.set()
        await until(lambda: checks == [False, True])
        assert workers.ran == []
        await service.resume()
        await ended(service, "a")


async def test_pause_survives_a_restart(tmp_path):
    async with a_service(tmp_path) as service:
        await service.pause()
        await submit(service, submission("a"))
    workers = FakeWorkers()
    async with a_service(tmp_path, workers) as service:
        await asyncio.sleep(0.03)
        assert (workers.ran, (await service.status())["paused"]) == ([], True)
        await service.resume()
        await ended(service, "a")


async def test_draining_waits_for_running_sessions_and_starts_no_new_one(tmp_path):
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


async def test_greater_version_of_database_and_engines_wins(tmp_path):
    async with a_service(tmp_path) as service:
        await service.set_policy(SetPolicy(version=4))
    workers = FakeWorkers()
    async with a_service(tmp_path, workers) as service:
        assert workers.asked == [SetPolicy(version=4)]
    workers.version = 9
    async with a_service(tmp_path, workers) as service:
        assert (await service.status())["policy"]["version"] == 9


async def test_stale_running_sessions_are_cancelled_if_configured(tmp_path):
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


async def test_cancelling_a_session_affects_no_other_session_of_its_task(tmp_path):
    workers = FakeWorkers(capacity=2, held=True)
    async with a_service(tmp_path, workers) as service:
        await submit(service, submission("a", 2))
        await until(lambda: len(workers.living) == 2)
        assert await service.cancel_session("nobody") is None
        assert await service.cancel_session("a.0") is True
        workers.let("a.1")
        task = await ended(service, "a")
        assert await service.cancel_session("a.0") is False
        rows = await service.queries.sessions(task["seq"])
        assert [row["state"] for row in rows] == ["CANCELLED", "COMPLETED"]


async def test_task_check_is_cached_and_its_error_repeated(tmp_path):
    async with a_service(tmp_path) as service:
        task = submission("a", builder=BuilderSpec(strategy="nope")).split()[0]
        for name in ("a", "b"):
            with pytest.raises(ConfigError, match=r"^unknown builder 'nope'"):
                service.check(task.model_copy(update={"task_id": name}))


async def test_events_report_the_stage_of_runs(tmp_path):
    workers = FakeWorkers()
    async with a_service(tmp_path, workers) as service:
        changed = SessionChanged("a.0", "a", 0, "command", SessionStatus.BUILDING, 1.0)
        with service.events.subscribe() as reader:
            workers.events.tell(Installing("codex", "a line"))
            workers.events.tell(changed)
            outcome = await reader.next(1)
        assert (outcome["run_id"], outcome["status"]) == ("a.0", "BUILDING")
        assert service.stage("a.0", 1) == "BUILDING"
        workers.events.tell(SessionChanged("a.0", "a", 0, "command", SessionStatus.COMPLETED, 2.0))
        assert service.stage("a.0", 1) is None


async def test_an_exception_of_a_part_of_the_server_is_recorded_as_its_failure(tmp_path):
    async with a_service(tmp_path) as service:
        service.failed(RuntimeError("a bug"))
        assert service.failure == "RuntimeError('a bug')"
