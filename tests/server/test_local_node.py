"""The real node behind the service: what ends, what was cut off, what a file is."""

from pathlib import Path

import pytest
from tests.node.house import a_node, checked, task
from tests.server.house import ended, submission, until

from bridle.bridges import parquet
from bridle.capture.reader import SqliteReader
from bridle.capture.records import Outcome
from bridle.capture.sqlite import SqliteStore
from bridle.errors import ConfigError
from bridle.gateway.weights import SetPolicy
from bridle.node.local import KILLED
from bridle.node.results import CAPTURE, RunFolder, ServerFolder
from bridle.server.service import Service
from bridle.server.settings import ServiceSettings
from bridle.server.storage import Database, TrajectoryFiles
from bridle.trajectory import rebuild


def work(task_id="t", samples=1):
    """A task that a real agent does in a real runtime."""
    whole = submission(task_id, samples)
    real = task(task_id=task_id, evaluator=checked())
    return whole.model_copy(
        update={"agent": real.agent, "evaluator": real.evaluator, "budgets": real.budgets}
    )


async def test_a_task_runs_on_a_local_node_and_its_trajectory_and_log_are_kept(tmp_path):
    async with a_node(tmp_path) as node, await Database.open(tmp_path / "s.sqlite") as database:
        files = TrajectoryFiles(tmp_path / "trajectories", parquet)
        async with Service(database=database, files=files, workers=node) as service:
            await service.submit([work()], owner="o")
            row = await ended(service, "t")
            (session,) = await service.queries.sessions(row["seq"])
            assert (row["state"], session["state"]) == ("completed", "COMPLETED")
            trajectory = await files.read(session["file"])
            assert trajectory.metadata["stats"]["tokens_trained"] > 0
            assert trajectory.reward == 1.0
            log = await node.artifact("t.0", "stdout.log")
            assert isinstance(log, Path)
            assert log.read_text().strip() == "It is done."
            assert await node.artifact("t.0", "../../run.json") is None
            assert await node.artifact("t.0", "none.log") is None
            assert service.stage("t.0", 1) is None


async def test_capture_of_one_run_is_served_as_a_separate_file(tmp_path):
    store = await SqliteStore.open(tmp_path / "capture.sqlite")
    async with store, a_node(tmp_path, store=store) as node:
        result = await node.run(work(), 0, "t.0", frozenset())
        content = await node.artifact("t.0", CAPTURE)
        assert isinstance(content, bytes)
        (tmp_path / "copy.sqlite").write_bytes(content)
        with SqliteReader(tmp_path / "copy.sqlite") as reader:
            copy = rebuild(reader.read("t.0"))
        assert copy.metadata["stats"] == result.trajectory.metadata["stats"]
        assert await node.artifact("u.0", CAPTURE) is None


async def test_ended_runs_leave_the_gateway_and_removed_groups_leave_the_disk(tmp_path):
    async with a_node(tmp_path) as node, await Database.open(tmp_path / "s.sqlite") as database:
        files = TrajectoryFiles(tmp_path / "trajectories", parquet)
        settings = ServiceSettings(keep_gb=1e-9)
        async with Service(
            database=database, files=files, workers=node, settings=settings
        ) as service:
            await service.submit([work(samples=2)], owner="o")
            await ended(service, "t")
            await until(lambda: node.gateway.session_ids() == [])
            assert [one.session_id for one in node.store.sessions()] == ["t.0", "t.1"]
            assert await node.kept_bytes() > 0
            assert await node.artifact("t.0", "stdout.log") is not None
            await service.ack(cursor=None, task_ids=["t"])
            assert await service.retention.remove_old() == 1
            assert node.store.sessions() == []
            assert await node.kept_bytes() == 0
            assert await node.artifact("t.0", "stdout.log") is None
            assert await service.queries.file_bytes() == 0
            assert list((tmp_path / "trajectories").rglob("*.parquet")) == []


async def test_a_run_id_with_a_parent_path_removes_no_other_folder(tmp_path):
    async with a_node(tmp_path) as node:
        (node.folder.path / "precious").mkdir()
        await node.remove("../precious")
        assert (node.folder.path / "precious").exists()


async def test_a_restarted_node_closes_earlier_sessions_and_keeps_none_in_memory(tmp_path):
    async with (
        await SqliteStore.open(tmp_path / "capture.sqlite") as store,
        a_node(tmp_path, store=store) as node,
    ):
        for name in ("ended", "left"):
            await node.gateway.open_session(name)
        await node.gateway.seal("ended")
    (tmp_path / "again").mkdir()
    async with (
        await SqliteStore.open(tmp_path / "capture.sqlite") as store,
        a_node(tmp_path / "again", store=store) as node,
    ):
        await node.gateway.open_session("new")
        await node.settle()
        assert node.gateway.session_ids() == ["new"]
        outcome = store.outcome("left")
        assert outcome is not None
        assert outcome.error == KILLED


async def test_recall_returns_an_ended_run_and_closes_a_killed_one(tmp_path):
    async with (
        await SqliteStore.open(tmp_path / "capture.sqlite") as store,
        a_node(tmp_path, store=store) as node,
    ):
        await node.run(task(task_id="whole"), 0, "whole.0")
        await node.gateway.open_session("cut.0", task_id="cut")
    async with await SqliteStore.open(tmp_path / "capture.sqlite") as store:
        (tmp_path / "again").mkdir()
        async with a_node(tmp_path / "again", store=store) as node:
            found = await node.recall("whole.0")
            assert found is not None
            assert (found.status, found.task_id) == ("COMPLETED", "whole")
            assert await node.recall("never.0") is None
            assert await node.recall("cut.0") is None
            outcome = store.outcome("cut.0")
            assert outcome is not None
            assert outcome.error == KILLED
            assert await node.recall("cut.0") is None  # and at the next start again


async def test_recall_of_a_run_cancelled_by_a_stopping_server_returns_none(tmp_path):
    async with a_node(tmp_path) as node:
        await node.gateway.open_session("a.0", task_id="a")
        await node.gateway.seal("a.0")
        await node.store.close_session(
            Outcome(session_id="a.0", status="CANCELLED", ended_at=1.0, reward=None)
        )
        assert await node.recall("a.0") is None


async def test_set_policy_of_a_local_node_reaches_its_gateway(tmp_path):
    async with a_node(tmp_path) as node:
        assert (await node.set_policy(SetPolicy(version=5)))["version"] == 5
        assert node.gateway.policy()["version"] == 5


def test_a_server_folder_can_be_reopened_but_not_opened_twice_at_once(tmp_path):
    with ServerFolder.open(tmp_path / "node"), pytest.raises(ConfigError, match="in use"):
        ServerFolder.open(tmp_path / "node")
    with ServerFolder.open(tmp_path / "node") as folder:
        folder.append(None)  # type: ignore[arg-type]  # it looks at nothing
        assert isinstance(folder, RunFolder)
        assert not folder.trajectories.exists()
