"""The server while its disk is full: it says so, waits, and loses and doubles no session."""

from structlog.testing import capture_logs
from tests.disks import full_disk
from tests.server.house import FakeWorkers, an_app, body, ended, until


async def health(http):
    response = await http.get("/health")
    return response.status_code, response.json()["status"], response.json().get("detail")


async def recovered(http):
    async def well():
        return (await health(http)) == (200, "ok", None)

    await until(well)


async def noticed(http):
    """A check is made once a second at most."""

    async def full():
        return (await health(http)) == (503, "store_error", "File too large")

    await until(full)


async def held_run(http):
    await http.post("/v1/tasks", json={"tasks": [body("a")]})
    await until(lambda: http.service.workers.living)


async def test_result_waits_for_disk_space_and_no_session_starts(tmp_path):
    async with an_app(tmp_path, FakeWorkers(held=True)) as http:
        await held_run(http)
        with full_disk(), capture_logs() as log:
            await noticed(http)
            http.service.workers.let("a.0", error="x" * 2000)
            await until(lambda: any(one.get("doing") == "writing a trajectory" for one in log))
            assert (await http.get("/v1/tasks/a")).json()["state"] == "running"
        await recovered(http)
        assert (await ended(http.service, "a"))["usable"] == 1
        assert http.service.workers.ran == ["a.0"]


async def test_unwritable_trajectory_ends_with_store_error_and_the_session_is_retried(
    tmp_path,
):
    async with an_app(tmp_path, FakeWorkers(held=True), store_patience_s=0.01) as http:
        await held_run(http)
        with full_disk(), capture_logs() as log:
            http.service.workers.let("a.0")
            await until(
                lambda: any(one["event"] == "a trajectory could not be written" for one in log)
            )
        await until(lambda: http.service.workers.living)
        (run_id,) = http.service.workers.living
        http.service.workers.let(run_id)
        assert (await ended(http.service, "a"))["usable"] == 1
        assert http.service.workers.ran == ["a.0", run_id]


async def test_permanently_unwritable_trajectory_ends_its_session_at_once(tmp_path):
    async with an_app(tmp_path, FakeWorkers(held=True), store_patience_s=1000) as http:
        await http.post("/v1/tasks", json={"tasks": [body("a", max_attempts=1)]})
        await until(lambda: http.service.workers.living)
        (tmp_path / "trajectories" / http.service.files.name("a.0")).mkdir(parents=True)
        http.service.workers.let("a.0")
        await ended(http.service, "a")
        (one,) = (await http.get("/rollout/task/a?include=results")).json()["results"]
        assert one["status"] == "ERROR"
        assert one["cause"] == "infrastructure"
        assert one["error"] == ("store_error: the trajectory could not be written: Is a directory")


async def test_no_session_starts_while_the_disk_is_full(tmp_path):
    async with an_app(tmp_path, FakeWorkers()) as http:
        http.service.scheduler.draining = True
        await http.post("/v1/tasks", json={"tasks": [body("a")]})
        with full_disk(), capture_logs() as log:
            await noticed(http)
            http.service.scheduler.draining = False
            http.service.scheduler.wake.notify_all()
            await until(lambda: any(one.get("doing") == "claiming sessions" for one in log))
            assert http.service.workers.ran == []
        assert (await ended(http.service, "a"))["usable"] == 1
