"""Polar's routes, one by one; a whole client is in `test_polar_client.py`."""

import json

import pytest
from tests.server.house import (
    KNOWN,
    FakeWorkers,
    a_service,
    an_app,
    ended,
    failure,
    served,
    until,
)

from bridle.server.app import serve_api


def request(task_id="t", **changes):
    return {
        "task_id": task_id,
        "instruction": "Do it.",
        "runtime": {"backend": "local"},
        "agent": {"harness": "shell", "custom_shell": "true"},
        **changes,
    }


async def submit(http, *args, **changes):
    return await http.post("/rollout/task/submit", json=request(*args, **changes))


async def test_a_task_goes_from_running_to_completed_with_its_results(tmp_path):
    workers = FakeWorkers(held=True)
    async with an_app(tmp_path, workers) as http:
        response = await submit(http, num_samples=2)
        assert (response.status_code, response.json()) == (
            200,
            {"task_id": "t", "status": "running"},
        )
        assert (await submit(http, num_samples=2)).json() == response.json()
        assert (await submit(http, num_samples=3)).status_code == 409
        await until(lambda: len(workers.living) == 2)
        workers.let("t.0")
        await until(lambda: one_ended(http))
        status = (await http.get("/rollout/task/t")).json()
        assert (status["status"], status["results"]) == ("running", [])
        assert (status["total_sessions"], status["completed_sessions"]) == (2, 1)
        early = (await http.get("/rollout/task/t?include=results")).json()
        assert [one["session_id"] for one in early["results"]] == ["t.0"]
        workers.let("t.1")
        await ended(http.service, "t")
        status = (await http.get("/rollout/task/t")).json()
        assert (status["status"], len(status["results"])) == ("completed", 2)
        one = status["results"][0]
        assert {"session_id", "task_id", "status", "trajectory", "timing", "node_id"} <= set(one)
        trace = one["trajectory"]["traces"][0]
        assert len(trace["response_ids"]) == len(trace["loss_mask"])


async def one_ended(http):
    return (await http.service.queries.task("t"))["ended"] == 1


async def test_polar_routes_report_a_cancelled_task_as_failed_and_its_session_as_error(tmp_path):
    workers = FakeWorkers(held=True)
    async with an_app(tmp_path, workers) as http:
        await submit(http)
        await until(lambda: workers.living)
        assert (await http.delete("/rollout/task/t")).json()["status"] == "running"
        await ended(http.service, "t")
        status = (await http.get("/rollout/task/t")).json()
        assert (status["status"], status["state"]) == ("failed", "cancelled")
        assert [one["status"] for one in status["results"]] == ["ERROR"]
        sessions = (await http.get("/tasks/t/sessions")).json()["sessions"]
        assert [one["status"] for one in sessions] == ["ERROR"]


async def test_a_task_id_can_be_cancelled_before_it_is_submitted(tmp_path):
    async with an_app(tmp_path) as http:
        assert (await http.delete("/rollout/task/t")).status_code == 404
        response = await http.delete("/rollout/task/t?register_if_missing=true")
        assert (response.status_code, response.json()["status"]) == (200, "failed")
        assert (await submit(http)).status_code == 409


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"agent": {"harness": "nope"}}, "agent.harness"),
        ({"runtime": {"backend": "nope"}}, "runtime.backend"),
        ({"evaluator": {"strategy": "nope"}}, "evaluator.strategy"),
        ({"builder": {"strategy": "nope"}}, "builder.strategy"),
        ({"runtime": {"network": "host"}}, "runtime.network"),
        ({"agent": {"import_path": "os:system"}}, "agent.import_path"),
        ({"num_samples": -1}, "num_samples"),
        ({"timeout_seconds": -5}, "timeout_seconds"),
        ({"callback_url": "http://169.254.169.254/x"}, "callback_url"),
        ({"runtime": {"cpus": -1}}, "runtime.cpus"),
        ({"nonsense": 1}, "nonsense"),
        ({"task_id": "../x"}, "task_id"),
    ],
)
async def test_an_invalid_field_is_refused_by_name_with_the_known_values(tmp_path, changes, param):
    async with an_app(tmp_path) as http:
        response = await submit(http, **changes)
        assert (response.status_code, response.json()["error"]["param"]) == (422, param)
        if "nope" in str(changes):
            assert "known: " in response.json()["detail"]
        assert (await http.get("/tasks")).json()["tasks"] == []


async def test_task_and_session_lists_are_paginated_by_cursor(tmp_path):
    async with an_app(tmp_path, FakeWorkers(answers={"b": failure("harness_crash")})) as http:
        for name in "abc":
            await submit(http, name, num_samples=2)
            await ended(http.service, name)
        first = (await http.get("/tasks?limit=2")).json()
        rest = (await http.get(f"/tasks?limit=2&cursor={first['cursor']}")).json()
        result = [(one["task_id"], one["status"]) for one in first["tasks"] + rest["tasks"]]
        assert result == [("a", "completed"), ("b", "failed"), ("c", "completed")]
        page = (await http.get("/tasks/a/sessions?cursor=0&limit=5")).json()
        assert [one["session_id"] for one in page["sessions"]] == ["a.1"]
        for path in ("/tasks", "/tasks/a/sessions", "/v1/groups", "/v1/tasks", "/v1/callbacks"):
            assert (await http.get(f"{path}?cursor={2**62}")).status_code == 200, path
        assert (await http.get("/tasks/nobody/sessions")).status_code == 404


async def test_status_route_reports_slots_and_health_route_gets_503_after_a_failure(tmp_path):
    async with an_app(tmp_path) as http:
        assert (await http.get("/rollout/status")).json()["slots"] == 4
        assert (await http.get("/health")).json()["status"] == "ok"
        http.service.failed(RuntimeError("x"))
        assert (await http.get("/health")).status_code == 503


@pytest.mark.parametrize("path", ["/nodes", "/nodes/register", "/callbacks/session_result"])
async def test_node_routes_of_polar_are_not_served(tmp_path, path):
    async with an_app(tmp_path) as http:
        assert (await http.post(path, json={})).status_code == 404
        assert (await http.put("/tasks")).status_code == 405


async def test_events_are_streamed_as_they_happen(tmp_path):
    import httpx

    async with (
        a_service(tmp_path) as service,
        serve_api(served(service), host="127.0.0.1", port=0) as url,
        httpx.AsyncClient(base_url=url, headers=KNOWN) as http,
        http.stream("GET", "/events") as events,
    ):
        lines = events.aiter_lines()
        assert await anext(lines) == ": listening"
        await submit(http)
        seen = [line async for line in _until(lines, '"status":"ended"')]
        assert "event: task" in seen
        assert any('"status":"queued"' in line for line in seen)


async def test_an_event_with_line_separators_is_one_line(tmp_path):
    import httpx

    task_id = "a\u2028b\u2029c\u0085d"
    async with (
        a_service(tmp_path) as service,
        serve_api(served(service), host="127.0.0.1", port=0) as url,
        httpx.AsyncClient(base_url=url, headers=KNOWN) as http,
        http.stream("GET", "/events") as events,
    ):
        lines = events.aiter_lines()
        assert await anext(lines) == ": listening"
        service.events.publish({"type": "task", "task_id": task_id, "status": "ended"})
        *_, data = [line async for line in _until(lines, "data: ")]
        assert json.loads(data.removeprefix("data: "))["task_id"] == task_id


async def _until(lines, last):
    async for line in lines:
        yield line
        if last in line:
            return
