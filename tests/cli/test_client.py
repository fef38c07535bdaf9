"""Verbs of a rollout server's clients: submit, status, watch and cancel."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.server.house import (
    FakeWorkers,
    a_service,
    ended,
    failure,
    served,
    submission,
    until,
    with_token,
)

from bridle.server.app import serve_api


def test_an_invalid_task_file_is_reported_before_the_server_is_called(tmp_path, say):
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps([{"task_id": "a"}]))
    said = say("submit", file, "--server", "http://127.0.0.1:1")
    assert (said.code, "instruction" in said.err) == (2, True)


def test_a_priority_out_of_bounds_is_refused(tmp_path, say):
    assert say("submit", tmp_path, "--priority", "101").code == 2


async def test_status_command_shows_slots_of_the_server_and_sessions_of_a_task(tmp_path, say):
    async with (
        a_service(tmp_path, max_version_lag=0, groups_per_version=1) as service,
        serve_api(served(service), host="127.0.0.1", port=0) as url,
    ):
        await service.submit([submission("a", 2)], owner="o")
        await ended(service, "a")
        await service.pause()
        said = await asyncio.to_thread(say, "status", "--server", with_token(url))
        assert "0 of 4 slots in use, paused; policy version 0" in said.out
        assert "max_version_lag holds new groups back until policy version 1" in said.out
        said = await asyncio.to_thread(say, "status", "a", "--json", "--server", with_token(url))
        assert [one["session_id"] for one in said.json["sessions"]] == ["a.0", "a.1"]
        said = await asyncio.to_thread(say, "status", "a", "--server", with_token(url))
        assert ("owner" in said.out, " o " in said.out) == (True, True)
        said = await asyncio.to_thread(say, "status", "nobody", "--server", with_token(url))
        assert (said.code, "no task 'nobody'" in said.err) == (3, True)


async def test_watch_command_exits_with_code_1_if_a_task_did_not_complete(tmp_path, say):
    workers = FakeWorkers(answers={"b": failure("harness_crash")})
    async with (
        a_service(tmp_path, workers) as service,
        serve_api(served(service), host="127.0.0.1", port=0) as url,
    ):
        await service.submit([submission("a"), submission("b")], owner="o")
        for names, code in ((["a"], 0), (["a", "b"], 1)):
            said = await asyncio.to_thread(
                say, "watch", "--json", "--server", with_token(url), *names
            )
            assert said.code == code
            assert [one["task_id"] for one in said.json["tasks"]] == names
        said = await asyncio.to_thread(say, "watch", "--server", with_token(url))
        assert (said.code, "0 tasks" in said.out) == (0, True)


async def test_cancel_command_ends_a_running_task_and_reports_unknown_ids(tmp_path, say):
    workers = FakeWorkers(held=True)
    async with (
        a_service(tmp_path, workers) as service,
        serve_api(served(service), host="127.0.0.1", port=0) as url,
    ):
        await service.submit([submission("a")], owner="o")
        await until(lambda: workers.living)
        said = await asyncio.to_thread(
            say, "cancel", "a", "b", "--json", "--server", with_token(url)
        )
        assert (said.code, said.json) == (1, {"unknown": ["b"]})
        assert (await ended(service, "a"))["state"] == "cancelled"


@pytest.mark.timeout(40)
@pytest.mark.parametrize("verb", [["status"], ["cancel", "a"], ["watch", "a"]])
def test_an_unreachable_server_is_reported_in_one_line(say, verb):
    said = say(*verb, "--server", "http://127.0.0.1:1")
    assert (said.code, said.err.count("\n")) == (3, 1)
    assert "http://127.0.0.1:1 cannot be reached" in said.err
