"""Tests of `GET /metrics` of a server, read as Prometheus reads it."""

from prometheus_client.parser import text_string_to_metric_families
from tests.server.house import FakeWorkers, an_app, body, ended, failure, submission, until

from bridle.errors import NodeLostError
from bridle.server.http import ApiToken, TokenRole


async def numbers(http):
    """Sample name and labels, sorted -> value."""
    response = await http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): (
            sample.value
        )
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def test_metrics_count_ends_causes_stages_and_tokens(tmp_path):
    answers = {"b": failure("harness_crash"), "c.0": failure(), "d.0": NodeLostError("gone")}
    async with an_app(tmp_path, FakeWorkers(answers=answers)) as http:
        tasks = [body("a", 2), body("b"), body("c", max_attempts=2), body("d")]
        assert (await http.post("/v1/tasks", json={"tasks": tasks})).status_code == 200
        for task in "abcd":
            await ended(http.service, task)
        result = await numbers(http)

    def runs(status, cause, became):
        labels = f"became={became}", f"cause={cause}", f"status={status}"
        return result.get(("bridle_server_runs_total", *labels), 0)

    assert runs("COMPLETED", "", "final") == 4
    assert runs("ERROR", "harness_crash", "final") == 1
    assert runs("ERROR", "infrastructure", "again") == 1
    assert runs("LOST", "infrastructure", "again") == 1
    assert result["bridle_server_stage_seconds_count", "stage=run"] == 6
    assert result["bridle_server_tokens_total", "fate=trained"] == 4 * 4
    assert result["bridle_server_tokens_total", "fate=cut"] == 5
    labels = "method=POST", "route=/v1/tasks", "status=200"
    assert result["bridle_server_requests_total", *labels] == 1


async def test_metrics_report_current_counts_by_state_and_node(tmp_path):
    workers = FakeWorkers(1, held=True)
    async with an_app(tmp_path, workers) as http:
        await http.post("/v1/tasks", json={"tasks": [body("a", 3)]})
        await until(lambda: workers.living)
        await http.post("/policy", json={"version": 7})
        await http.post("/v1/pause")
        result = await numbers(http)
        workers.let("a.0")
        await until(lambda: not workers.living)
    assert result["bridle_server_sessions", "state=RUNNING"] == 1
    assert result["bridle_server_sessions", "state=ERROR"] == 0
    assert result["bridle_server_sessions_waiting",] == 2
    assert result["bridle_server_tasks", "state=running"] == 1
    assert result["bridle_server_callbacks", "state=dead"] == 0
    assert (result["bridle_server_slots",], result["bridle_server_runs_under_way",]) == (1, 1)
    assert (result["bridle_server_paused",], result["bridle_server_policy_version",]) == (1, 7)
    assert result["bridle_node_up", "node=fake"] == result["bridle_node_slots", "node=fake"] == 1
    assert result["bridle_sessions_open", "node=fake"] == 0


async def test_metrics_report_queued_and_running_sessions_by_owner(tmp_path):
    workers = FakeWorkers(2, held=True)
    async with an_app(tmp_path, workers) as http:
        await http.service.submit([submission("a", 5)], owner="a")
        await http.service.submit([submission("b", 4)], owner="b", tenant=True)
        await until(lambda: len(workers.living) == 2)
        result = await numbers(http)
        status = (await http.get("/v1/status")).json()
    waiting = {owner: result["bridle_server_owner_waiting", f"owner={owner}"] for owner in "ab"}
    running = {owner: result["bridle_server_owner_running", f"owner={owner}"] for owner in "ab"}
    assert sum(waiting.values()) == 7
    assert sum(running.values()) == 2
    assert status["owners"] == {
        owner: {"waiting": waiting[owner], "running": running[owner]} for owner in "ab"
    }


async def test_scrape_reports_an_unreachable_database_as_a_gauge(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIDLE_TEST_DATABASE", str(tmp_path / "own.sqlite"))
    async with an_app(tmp_path) as http:
        assert (await numbers(http))["bridle_server_database_up",] == 1
        async with http.service.store.database.write() as connection:
            await connection.exec_driver_sql("DROP TABLE callbacks")
        result = await numbers(http)
        assert result["bridle_server_database_up",] == 0
        assert result["bridle_server_slots",] == 4
        assert ("bridle_server_sessions_waiting",) not in result
        http.service.failed(RuntimeError("boom"))
        assert (await numbers(http))["bridle_server_healthy",] == 0


async def test_metrics_route_answers_401_without_a_token(tmp_path):
    tokens = [ApiToken(name="prometheus", token="s" * 16, roles=(TokenRole.METRICS,))]
    async with an_app(tmp_path, tokens=tokens) as http:
        assert (await http.get("/metrics")).status_code == 401
        headers = {"authorization": f"Bearer {'s' * 16}"}
        assert (await http.get("/metrics", headers=headers)).status_code == 200
