"""PostgreSQL that goes for a while and comes back: the server says so, and goes on by itself."""

import asyncio

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs
from tests.server.cluster import Cluster, Pair
from tests.server.house import FakeWorkers, an_app, body, ended, until

from bridle.errors import StateError
from bridle.server.storage import Database


@pytest.fixture
def own_cluster(monkeypatch):
    """A PostgreSQL of the test's own, which it may end."""
    with Cluster() as running:
        monkeypatch.setenv("BRIDLE_TEST_DATABASE", running.fresh())
        yield running


async def health(http):
    response = await http.get("/health")
    return response.status_code, response.json()["status"]


async def goes_on(http, workers):
    """Submit a third task to the server that is well again, and see all three end."""
    await until(lambda: is_well(http))
    assert (await http.post("/v1/tasks", json={"tasks": [body("c")]})).status_code == 200
    await until(lambda: len(workers.living) == 2)
    workers.let("b.0")
    workers.let("c.0")
    for task_id in ("a", "b", "c"):
        assert (await ended(http.service, task_id))["usable"] == 1
    assert workers.ran == ["a.0", "b.0", "c.0"]


@pytest.mark.postgres
@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_server_survives_a_database_crash_and_runs_each_session_once(
    own_cluster, tmp_path, end
):
    workers = FakeWorkers(held=True)
    async with an_app(tmp_path, workers) as http:
        await http.post("/v1/tasks", json={"tasks": [body("a"), body("b")]})
        await until(lambda: len(workers.living) == 2)
        getattr(own_cluster, end)()
        try:
            assert await health(http) == (503, "store_error")
            response = await http.post("/v1/tasks", json={"tasks": [body("c")]})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "store_error")
            assert "retry-after" in response.headers
            with capture_logs() as log:
                workers.let("a.0")
                await until(lambda: any(one.get("doing") == "storing a.0" for one in log))
        finally:
            await asyncio.to_thread(own_cluster.start)
        await goes_on(http, workers)


@pytest.mark.postgres
@pytest.mark.timeout(180)
async def test_hanging_database_gives_503_and_work_resumes_afterwards(
    own_cluster, tmp_path, monkeypatch
):
    monkeypatch.setenv("BRIDLE_TEST_DATABASE", hasty(own_cluster.fresh()))
    workers = FakeWorkers(held=True)
    async with an_app(tmp_path, workers) as http:
        await http.post("/v1/tasks", json={"tasks": [body("a"), body("b")]})
        await until(lambda: len(workers.living) == 2)
        with own_cluster.frozen():
            for _ in range(2):
                response = await http.post("/v1/tasks", json={"tasks": [body("c")]})
                assert (response.status_code, response.json()["error"]["code"]) == (
                    503,
                    "store_error",
                )
                assert "did not answer in time" in response.json()["error"]["message"]
            assert await health(http) == (503, "store_error")
            with capture_logs() as log:
                workers.let("a.0")
                await until(lambda: any(one.get("doing") == "storing a.0" for one in log))
        await goes_on(http, workers)


@pytest.mark.postgres
@pytest.mark.timeout(180)
async def test_server_stops_while_its_database_hangs(own_cluster, tmp_path):
    database = await Database.open(hasty(own_cluster.fresh()))
    async with database.read() as connection:
        await connection.execute(text("SELECT 1"))
    with own_cluster.frozen():
        async with asyncio.timeout(60):
            await database.aclose()


@pytest.mark.postgres
@pytest.mark.timeout(180)
async def test_start_fails_if_the_database_hangs(own_cluster):
    url = own_cluster.fresh()
    with own_cluster.frozen():
        async with asyncio.timeout(90):
            with pytest.raises(StateError, match="did not answer in time"):
                await Database.open(url)


def hasty(url):
    """The same database, whose statements have 2 s."""
    return f"{url}&command_timeout=2"


@pytest.mark.postgres
@pytest.mark.timeout(180)
async def test_promoted_standby_has_every_group_exactly_once(monkeypatch, tmp_path):
    workers = FakeWorkers(held=True)
    with Pair() as pair:
        monkeypatch.setenv("BRIDLE_TEST_DATABASE", pair.fresh())
        async with an_app(tmp_path, workers) as http:
            await http.post("/v1/tasks", json={"tasks": [body("a"), body("b")]})
            await until(lambda: len(workers.living) == 2)
            workers.let("a.0")
            await ended(http.service, "a")
            pair.kill_primary()
            assert await health(http) == (503, "store_error")
            with capture_logs() as log:
                workers.let("b.0")
                await until(lambda: any(one.get("doing") == "storing b.0" for one in log))
            await asyncio.to_thread(pair.promote)
            await until(lambda: is_well(http))
            assert (await http.post("/v1/tasks", json={"tasks": [body("c")]})).status_code == 200
            await until(lambda: "c.0" in workers.living)
            workers.let("c.0")
            for task_id in ("b", "c"):
                assert (await ended(http.service, task_id))["usable"] == 1
            groups = (await http.get("/v1/groups")).json()["groups"]
            assert [one["task_id"] for one in groups] == ["a", "b", "c"]
            assert workers.ran == ["a.0", "b.0", "c.0"]


@pytest.mark.postgres
async def test_lone_standby_is_a_temporary_error():
    with Pair() as pair:
        pair.fresh()
        for attributes in ("", "&target_session_attrs=primary"):
            with pytest.raises(StateError, match="the database cannot be used"):
                await Database.open(pair.url_of_standby() + attributes)


@pytest.mark.postgres
async def test_health_responds_while_the_database_hangs(own_cluster, tmp_path):
    async with an_app(tmp_path) as http:
        assert await health(http) == (200, "ok")
        with own_cluster.frozen():
            await until(lambda: is_store_error(http))
        await until(lambda: is_well(http))


async def is_store_error(http):
    return await health(http) == (503, "store_error")


async def is_well(http):
    return await health(http) == (200, "ok")
