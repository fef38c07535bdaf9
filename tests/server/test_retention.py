"""Tests of the removal of old groups, and of the bounds of those that stay."""

import asyncio

from tests.server.house import FakeWorkers, a_service, ended, failure, submission

from bridle.server.schemas import RetentionLevel


async def a_group(service, name, samples=1, **more):
    """A group that has ended."""
    await service.submit([submission(name, samples, **more)], owner="o")
    return await ended(service, name)


async def ack(service, *names):
    await service.ack(cursor=None, task_ids=names)


async def kept(service, name):
    return RetentionLevel((await service.queries.task(name))["kept"])


def files(tmp_path):
    return sorted(path.stem for path in (tmp_path / "trajectories").rglob("*.parquet"))


async def test_retention_removes_the_oldest_files_over_the_size_limit(tmp_path):
    workers = FakeWorkers(answers={"b.0": failure()})
    async with a_service(tmp_path, workers, keep_gb=1e-9) as service:
        for name in "abc":
            await a_group(service, name)
        assert await service.retention.remove_old() == 0
        await ack(service, "b")
        assert await service.retention.remove_old() == 1
        assert files(tmp_path) == ["a.0", "c.0"]
        assert workers.removed == ["b.0", "b.0.r2"]  # every run of it
        assert (await service.queries.session("b.0"))["file"] is None
        assert (await kept(service, "b"), await kept(service, "a")) == (
            RetentionLevel.ROWS,
            RetentionLevel.ALL,
        )


async def test_retention_removes_no_more_than_the_size_limit_needs(tmp_path):
    async with a_service(tmp_path) as service:
        for name in "abcd":
            await a_group(service, name)
            await ack(service, name)
        size = await service.retention.size()
        service.settings = service.settings.model_copy(update={"keep_gb": 0.6 * size / 1e9})
        assert await service.retention.remove_old() == 2
        assert files(tmp_path) == ["c.0", "d.0"]


async def test_retention_removes_files_by_age_and_rows_later(tmp_path):
    async with a_service(tmp_path, keep_days=1.0) as service:
        await a_group(service, "a", 2)
        await ack(service, "a")
        assert await service.retention.remove_old() == 0
    async with a_service(tmp_path, keep_days=1e-9) as service:
        await service.retention.remove_old()
        assert files(tmp_path) == []
        row = await service.queries.task("a")
        assert len(await service.queries.sessions(row["seq"])) == 2
    async with a_service(tmp_path, keep_rows_days=1e-9) as service:
        await service.retention.remove_old()
        row = await service.queries.task("a")
        assert (row["spec"], row["state"], row["usable"]) == ("", "completed", 2)
        assert await service.queries.sessions(row["seq"]) == []
        # The same task again is still the same task, and nothing is run.
        assert await service.submit([submission("a", 2)], owner="o") == [False]
        await asyncio.sleep(0)
        assert service.workers.ran == []


async def test_group_with_pending_callbacks_is_kept(tmp_path):
    async with a_service(tmp_path, keep_days=1e-9, keep_rows_days=1e-9) as service:
        await a_group(service, "a", callback_url="http://127.0.0.1:1/x")
        await ack(service, "a")
        assert await service.retention.remove_old() == 0
        rows = await service.queries.callbacks(after=0, limit=9)
        for row in rows:
            await service.store.record_attempt(
                row["delivery_id"], tries=1, fault=None, dead=False, now=1.0, next_at=1.0
            )
        assert await service.retention.remove_old() == 1
        assert await service.queries.callbacks(after=0, limit=9) == []


async def test_retention_acknowledges_abandoned_groups(tmp_path):
    async with a_service(tmp_path, keep_unacked_days=1e-9, keep_days=1e-9) as service:
        await a_group(service, "a")
        await service.retention.remove_old()
        assert await service.queries.groups(after=0, limit=9) == []
        await service.retention.remove_old()
        assert files(tmp_path) == []


async def test_retention_bounds_disk_rows_and_memory_of_a_long_run(tmp_path):
    """Groups come and are acknowledged; disk, rows and memory stay as they were."""
    settings = {"keep_gb": 1e-9, "keep_rows_days": 1e-9}
    workers = FakeWorkers(capacity=8)
    async with a_service(tmp_path, workers, **settings) as service:
        for number in range(6):
            names = [f"t{number}-{one}" for one in range(4)]
            await service.submit([submission(name, 2) for name in names], owner="o")
            for name in names:
                await ended(service, name)
            await ack(service, *names)
            await service.retention.remove_old()
            await service.retention.remove_old()
            assert files(tmp_path) == []
            assert (await service.queries.counts()).sessions == {}
        assert sorted(workers.released) == sorted(workers.ran)
        assert sorted(workers.removed) == sorted(workers.ran)
        assert service.scheduler.running == ()
