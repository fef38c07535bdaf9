import orjson
import pytest
from tests.server.house import submission
from tests.server.test_closing import failed
from tests.server.test_state import NOW, a_state, claim, done, submit

from bridle.server import wire
from bridle.server.states import FINAL_TASKS, TaskState


@pytest.mark.parametrize("state", TaskState)
def test_polar_knows_three_states_of_a_task(state):
    told = wire.polar_status({"state": state})
    assert (told == "running") == (state not in FINAL_TASKS)
    assert (told == "completed") == (state is TaskState.COMPLETED)


def test_polar_knows_no_cancelled_session():
    assert wire.polar_state("CANCELLED") == "ERROR"
    assert wire.polar_state("TIMEOUT") == "TIMEOUT"


async def test_a_session_without_a_trajectory_has_an_empty_one(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", 2))
        await claim(state, 1)
        await state.stop_task("a", "cancelled", now=NOW)
        await state.put_back("a.0", 1, owner="me", why="stopped", now=NOW)
        row = await state.views.session("a.1")
        polar = wire.session_result(row, None, polar=True)
        assert polar["trajectory"]["traces"] == []
        assert (polar["status"], polar["trajectory"]["status"]) == ("ERROR", "ERROR")
        assert (polar["cause"], polar["error"]) == ("cancelled", "cancelled")
        assert wire.session_result(row, None, polar=False)["status"] == "CANCELLED"


async def test_a_group_says_what_is_missing_and_how_far_behind_it_is(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", 2))
        one, two = await claim(state)
        await state.finish(done(one, version_min=3, version_max=4), owner="me", now=NOW)
        await state.finish(failed(two), owner="me", now=NOW)
        task = await state.views.task("a")
        rows = await state.views.sessions(task["seq"])
        sessions = [wire.session_json(row, None) for row in rows]
        group = wire.group_json(task, sessions, version=5)
        assert (group["version_lag"], group["usable_sessions"]) == (2, 1)
        assert [one["session_id"] for one in group["missing"]] == ["a.1"]
        assert group["missing"][0]["error"] == "it broke"
        assert wire.group_json(task, [], version=5)["version_lag"] is None
        orjson.dumps(group)


async def test_a_running_session_shows_its_stage(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a"))
        await claim(state)
        row = await state.views.session("a.0")
        assert wire.session_json(row, "BUILDING")["status"] == "BUILDING"
        assert wire.session_json(row, None)["status"] == "RUNNING"
