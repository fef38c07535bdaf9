import orjson
import pytest
from tests.server.house import a_service, ended, submission
from tests.server.test_finalize import failed
from tests.server.test_store import NOW, a_state, claim, done, submit

from bridle.errors import StoreError
from bridle.server.queries import (
    group_json,
    polar_state,
    polar_status,
    result_json,
    session_json,
    session_result,
    task_status,
    trajectory,
)
from bridle.server.schemas import FINAL_TASKS, TaskState


async def a_group(service):
    await service.submit([submission("a", 2)], owner="o")
    task = await ended(service, "a")
    return task, await service.queries.sessions(task["seq"])


async def test_task_status_has_results_only_on_request(tmp_path):
    async with a_service(tmp_path) as service:
        task, rows = await a_group(service)
        result = await task_status(service, task, results=True)
        assert (result["status"], result["total_sessions"], result["completed_sessions"]) == (
            *("completed", 2, 2),
        )
        assert [one["session_id"] for one in result["results"]] == ["a.0", "a.1"]
        assert result["results"][0]["trajectory"]["traces"][0]["response_ids"] == [0, 1, 2, 3]
        assert result["result_paths"] == [f"{service.files.root}/{row['file']}" for row in rows]
        assert (await task_status(service, task, results=False))["results"] == []


async def test_a_trajectory_removed_by_retention_is_read_as_none(tmp_path):
    async with a_service(tmp_path) as service:
        _, rows = await a_group(service)
        await service.files.remove(rows[0]["file"])
        with pytest.raises(StoreError):
            await trajectory(service, rows[0])
        await service.store.forget_files(rows[0]["task_seq"])
        assert await trajectory(service, rows[0]) is None
        result = await session_result(service, await service.queries.session("a.0"))
        assert result["trajectory"]["metadata"] == {"removed": True}


async def test_packed_results_have_arrays_as_bytes(tmp_path):
    async with a_service(tmp_path) as service:
        _, rows = await a_group(service)
        result = await session_result(service, rows[0], packed=True)
        assert isinstance(result["trajectory"]["traces"][0]["prompt_ids"]["data"], bytes)


@pytest.mark.parametrize("state", TaskState)
def test_polar_task_status_is_running_until_final_and_completed_only_if_completed(state):
    result = polar_status({"state": state})
    assert (result == "running") == (state not in FINAL_TASKS)
    assert (result == "completed") == (state is TaskState.COMPLETED)


def test_polar_status_of_a_cancelled_session_is_error():
    assert polar_state("CANCELLED") == "ERROR"
    assert polar_state("TIMEOUT") == "TIMEOUT"


async def test_a_session_without_a_trajectory_has_an_empty_one(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", 2))
        await claim(state, 1)
        await state.stop_task("a", "cancelled", now=NOW)
        await state.put_back("a.0", 1, owner="me", why="stopped", now=NOW)
        row = await state.queries.session("a.1")
        polar = result_json(row, None, polar=True)
        assert polar["trajectory"]["traces"] == []
        assert (polar["status"], polar["trajectory"]["status"]) == ("ERROR", "ERROR")
        assert (polar["cause"], polar["error"]) == ("cancelled", "cancelled")
        assert result_json(row, None, polar=False)["status"] == "CANCELLED"


async def test_group_lists_unusable_sessions_and_its_version_lag(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", 2))
        one, two = await claim(state)
        await state.finish(done(one, version_min=3, version_max=4), owner="me", now=NOW)
        await state.finish(failed(two), owner="me", now=NOW)
        task = await state.queries.task("a")
        rows = await state.queries.sessions(task["seq"])
        sessions = [session_json(row, None) for row in rows]
        group = group_json(task, sessions, version=5)
        assert (group["version_lag"], group["usable_sessions"]) == (2, 1)
        assert [one["session_id"] for one in group["missing"]] == ["a.1"]
        assert group["missing"][0]["error"] == "it broke"
        assert group_json(task, [], version=5)["version_lag"] is None
        orjson.dumps(group)


async def test_a_running_session_shows_its_stage(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a"))
        await claim(state)
        row = await state.queries.session("a.0")
        assert session_json(row, "BUILDING")["status"] == "BUILDING"
        assert session_json(row, None)["status"] == "RUNNING"
