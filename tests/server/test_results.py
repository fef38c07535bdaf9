import pytest
from tests.server.house import a_service, ended, submission

from bridle.errors import StoreError
from bridle.server.results import session_result, task_status, trajectory


async def a_group(service):
    await service.submit([submission("a", 2)], owner="o")
    task = await ended(service, "a")
    return task, await service.views.sessions(task["seq"])


async def test_a_status_has_its_results_only_where_they_are_asked_for(tmp_path):
    async with a_service(tmp_path) as service:
        task, rows = await a_group(service)
        told = await task_status(service, task, results=True)
        assert (told["status"], told["total_sessions"], told["completed_sessions"]) == (
            *("completed", 2, 2),
        )
        assert [one["session_id"] for one in told["results"]] == ["a.0", "a.1"]
        assert told["results"][0]["trajectory"]["traces"][0]["response_ids"] == [0, 1, 2, 3]
        assert told["result_paths"] == [f"{service.files.root}/{row['file']}" for row in rows]
        assert (await task_status(service, task, results=False))["results"] == []


async def test_a_trajectory_that_was_removed_while_we_looked_is_none(tmp_path):
    async with a_service(tmp_path) as service:
        _, rows = await a_group(service)
        await service.files.remove(rows[0]["file"])
        with pytest.raises(StoreError):
            await trajectory(service, rows[0])
        await service.state.forget_files(rows[0]["task_seq"])
        assert await trajectory(service, rows[0]) is None
        told = await session_result(service, await service.views.session("a.0"))
        assert told["trajectory"]["metadata"] == {"removed": True}


async def test_packed_results_have_arrays_as_bytes(tmp_path):
    async with a_service(tmp_path) as service:
        _, rows = await a_group(service)
        told = await session_result(service, rows[0], packed=True)
        assert isinstance(told["trajectory"]["traces"][0]["prompt_ids"]["data"], bytes)
