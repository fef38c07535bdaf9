"""From a free slot to a stored result, with workers whose results a test sets."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest
from tests.server.house import (
    FakeWorkers,
    a_service,
    ended,
    failure,
    result,
    submission,
    trace,
    until,
)

from bridle.config import Task
from bridle.errors import ConfigError, StoreError
from bridle.server.scheduler import UNSTORED, is_usable, versions_of
from bridle.trajectory.sample import Trajectory

TASK = Task(task_id="t", instruction="x")


async def submit(service, *submissions):
    return await service.submit(submissions, owner="o")


async def test_sessions_run_in_free_slots_and_their_results_are_stored(tmp_path):
    workers = FakeWorkers(capacity=2)
    async with a_service(tmp_path, workers) as service:
        await submit(service, submission("a", 5))
        task = await ended(service, "a")
        assert (task["state"], task["usable"]) == ("completed", 5)
        assert sorted(workers.ran) == [f"a.{index}" for index in range(5)]
        (row, *_) = await service.queries.sessions(task["seq"])
        kept = await service.files.read(row["file"])
        assert (kept.session_id, kept.metadata["run_id"]) == ("a.0", "a.0")
        assert (row["version_min"], row["version_max"]) == (3, 3)


async def test_concurrent_runs_never_exceed_the_slots(tmp_path):
    workers = FakeWorkers(capacity=3, held=True)
    async with a_service(tmp_path, workers) as service:
        await submit(service, submission("a", 5))
        await until(lambda: len(workers.living) == 3)
        workers.let("a.1")
        await until(lambda: "a.3" in workers.living)
        assert len(workers.living) == 3
        for name in ("a.0", "a.2", "a.3", "a.4"):
            await until(lambda name=name: name in workers.living)
            workers.let(name)
        await ended(service, "a")


async def test_infrastructure_failures_are_retried_and_leave_no_file(tmp_path):
    workers = FakeWorkers(answers={"a.0": failure(), "a.0.r2": StoreError("full")})
    async with a_service(tmp_path, workers) as service:
        await submit(service, submission("a"))
        task = await ended(service, "a")
        assert workers.ran == ["a.0", "a.0.r2", "a.0.r3"]
        (row,) = await service.queries.sessions(task["seq"])
        assert (row["state"], row["attempt"]) == ("COMPLETED", 3)
        files = [path.name for path in (tmp_path / "trajectories").rglob("*.parquet")]
        assert files == ["a.0.r3.parquet"]


async def test_retry_avoids_the_node_of_the_failed_run(tmp_path):
    answers = {
        f"a.0{run}": failure() | {"node_id": node} for run, node in (("", "n1"), (".r2", "n2"))
    }
    workers = FakeWorkers(answers=answers)
    async with a_service(tmp_path, workers) as service:
        await submit(service, submission("a"))
        await ended(service, "a")
        assert workers.avoided == {"a.0": set(), "a.0.r2": {"n1"}, "a.0.r3": {"n1", "n2"}}
        outcome = (await service.queries.session("a.0"))["earlier"]
        assert [one["node_id"] for one in json.loads(outcome)] == ["n1", "n2"]


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), StoreError("full")])
async def test_a_run_that_raises_ends_as_infrastructure_and_does_not_hang(tmp_path, fault):
    workers = FakeWorkers(answers={"a": fault})
    async with a_service(tmp_path, workers) as service:
        await submit(service, submission("a", max_attempts=2))
        task = await ended(service, "a")
        (row,) = await service.queries.sessions(task["seq"])
        assert (row["state"], row["attempt"]) == ("ERROR", 2)
        assert '"cause":"infrastructure"' in row["result"]


async def test_task_with_missing_parts_is_not_retried(tmp_path):
    workers = FakeWorkers(answers={"a": ConfigError("unknown harness 'x'")})
    async with a_service(tmp_path, workers) as service:
        await submit(service, submission("a"))
        await ended(service, "a")
        assert workers.ran == ["a.0"]


async def test_slot_is_free_before_its_result_is_stored_within_a_limit(tmp_path):
    workers = FakeWorkers(capacity=1)
    async with a_service(tmp_path, workers) as service:
        blocked = {
            tmp_path / "trajectories" / service.files.name(f"a.{n}").partition("/")[0]
            for n in range(5)
        }
        (tmp_path / "trajectories").mkdir(exist_ok=True)
        for folder in blocked:
            folder.symlink_to(tmp_path / "nowhere")
        await submit(service, submission("a", 5))
        await until(lambda: len(workers.ran) == UNSTORED)
        await asyncio.sleep(0.05)
        assert len(workers.ran) == len(service.scheduler.running) == UNSTORED
        for folder in blocked:
            folder.unlink()
        await ended(service, "a")
        assert len(workers.ran) == 5


async def test_cancelling_ends_a_running_session_and_prevents_a_starting_one(tmp_path):
    workers = FakeWorkers(held=True)
    async with a_service(tmp_path, workers) as service:
        await submit(service, submission("a", 2))
        await until(lambda: len(workers.living) == 2)
        await service.cancel_task("a")
        task = await ended(service, "a")
        assert task["state"] == "cancelled"
        rows = await service.queries.sessions(task["seq"])
        assert {row["state"] for row in rows} == {"CANCELLED"}


async def test_version_lag_holds_back_groups_until_the_next_version(tmp_path):
    workers = FakeWorkers(capacity=9)
    async with a_service(tmp_path, workers, max_version_lag=1, groups_per_version=1) as service:
        await submit(service, *(submission(name) for name in "abcd"))
        await ended(service, "b")
        await asyncio.sleep(0.05)
        assert workers.ran == ["a.0", "b.0"]
        await service.set_policy(version_of(1))
        await ended(service, "c")
        assert "d.0" not in workers.ran


async def test_unacknowledged_groups_hold_back_new_ones(tmp_path):
    workers = FakeWorkers(capacity=1)
    async with a_service(tmp_path, workers, max_unacked_groups=1) as service:
        await submit(service, submission("a"), submission("b"))
        await ended(service, "a")
        await asyncio.sleep(0.05)
        assert workers.ran == ["a.0"]
        await service.ack(cursor=1, task_ids=())
        await ended(service, "b")


async def test_inflight_groups_are_limited_and_complete(tmp_path):
    workers = FakeWorkers(capacity=4, held=True)
    async with a_service(tmp_path, workers, max_inflight_groups=1) as service:
        await submit(service, submission("a", 2), submission("b", 1))
        await until(lambda: len(workers.living) == 2)
        workers.let("a.0")
        await until(lambda: "a.0" not in workers.living)
        assert "b.0" not in workers.ran
        workers.let("a.1")
        await until(lambda: "b.0" in workers.living)
        workers.let("b.0")
        await ended(service, "b")


async def test_stopping_server_requeues_its_runs(tmp_path):
    held = FakeWorkers(held=True)
    async with a_service(tmp_path, held) as service:
        await submit(service, submission("a", 2))
        await until(lambda: len(held.living) == 2)
        held.let("a.0")
        await until(lambda: len(held.living) == 1)
        await until(lambda: one_ended(service))
    workers = FakeWorkers()
    async with a_service(tmp_path, workers) as service:
        task = await ended(service, "a")
        assert (task["state"], workers.ran) == ("completed", ["a.1.r2"])


async def one_ended(service):
    return (await service.queries.task("a"))["ended"] == 1


def version_of(number):
    from bridle.gateway.weights import SetPolicy

    return SetPolicy(version=number)


def test_completed_or_scored_sessions_are_usable():
    assert is_usable(result("r", TASK, 0))
    late = {"status": "TIMEOUT", "cause": "timeout"}
    assert is_usable(result("r", TASK, 0, **late))
    assert not is_usable(result("r", TASK, 0, **late, reward=None))
    assert not is_usable(result("r", TASK, 0, **late, traces=0))
    assert not is_usable(result("r", TASK, 0, status="ERROR", cause="evaluator", reward=None))
    assert is_usable(result("r", TASK, 0, status="ERROR", cause="harness_crash"))


def test_the_versions_of_a_trajectory_are_those_of_its_sampled_tokens():
    mixed = dataclasses.replace(trace(4), versions=np.array([-1, 5, 7, -1], dtype=np.int32))
    whole = Trajectory("s", "COMPLETED", (mixed, trace(2, version=6)), None, None, {})
    assert versions_of(whole) == (5, 7)
    assert versions_of(Trajectory("s", "ERROR", (), None, None, {})) == (None, None)
