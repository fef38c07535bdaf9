import asyncio
from typing import Any

import pytest
from tests.lifecycle.house import AGENT, a_node, checked, nothing_lives, statuses, task

from bridle.capture.store import MemoryStore
from bridle.config import Action, RuntimeSpec
from bridle.errors import StoreError
from bridle.lifecycle.results import result_from
from bridle.lifecycle.session import FINAL, TRANSITIONS
from bridle.trajectory.result import trajectory_bytes
from bridle.types import Cause, SessionStatus


async def test_a_session_goes_from_a_task_to_a_scored_trajectory(tmp_path):
    async with a_node(tmp_path) as node:
        result = await node.run(task(evaluator=checked(), metadata={"from": "me"}))
        assert statuses(node) == [
            "REGISTERED", "INITIALIZING", "READY", "RUNNING", "BUILDING", "EVALUATING", "COMPLETED",
        ]  # fmt: skip
        *_, last, ended = node.seen
        assert last.reward == ended.result.reward == 1.0
        assert list(node.scratch.folder.glob("*/*")) == []
        assert nothing_lives(result.session_id)
    assert (result.status, result.cause, result.error) == ("COMPLETED", None, None)
    assert (result.reward, result.exit_code, result.signal) == (1.0, 0, None)
    assert result.trajectory.reward == 1.0
    stats = result.trajectory.metadata["stats"]
    assert (stats["exchanges"], stats["merge_ratio"]) == (2, 1.0)
    assert stats["tokens_captured"] == stats["tokens_trained"] > 0
    assert result.timing.keys() == {"queue", "init", "ready", "run", "build", "evaluate"}
    assert result.metadata["from"] == "me"
    assert result.metadata["evaluation"]["exit_code"] == 0
    assert (tmp_path / "run" / result.logs["stdout"]).read_text() == "It is done.\n"
    assert list((tmp_path / "scratch").iterdir()) == []


async def test_the_same_result_is_built_from_capture_at_any_later_time(tmp_path):
    async with a_node(tmp_path) as node:
        result = await node.run(task(evaluator=checked()))
        again = result_from(node.store.read(result.session_id))
    assert again.json() == result.json()
    assert trajectory_bytes(again.trajectory) == trajectory_bytes(result.trajectory)


def test_final_statuses_lead_nowhere_and_every_other_one_to_an_end():
    assert set(TRANSITIONS) == set(SessionStatus)
    for status, following in TRANSITIONS.items():
        assert (not following) == (status in FINAL)
        if status not in FINAL:
            assert {SessionStatus.CANCELLED, SessionStatus.ERROR} <= following


async def until(node, status):
    while status not in statuses(node):  # noqa: ASYNC110 - events are told to plain callbacks
        await asyncio.sleep(0.005)


STAGES: dict[str, dict[str, Any]] = {
    "INITIALIZING": {
        "runtime": RuntimeSpec(prepare=(Action(type="exec", command="sleep 60"),)),
    },
    "RUNNING": {"command": f"{AGENT}; sleep 60"},
    "EVALUATING": {"evaluator": checked("sleep 60")},
}


@pytest.mark.parametrize("stage", STAGES)
async def test_a_cancelled_session_ends_at_any_stage_with_a_result(tmp_path, stage):
    async with a_node(tmp_path) as node:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(node.run(task(**STAGES[stage])))
            await until(node, stage)
            (session_id,) = node.session_ids()
            assert node.cancel(session_id)
        result = running.result()
        assert nothing_lives(session_id)
        assert list(node.scratch.folder.glob("*/*")) == []
        assert not node.cancel(session_id)
    assert (result.status, result.cause) == ("CANCELLED", Cause.CANCELLED)
    assert result.error == f"cancelled while {stage}"


@pytest.mark.parametrize("stage", STAGES)
async def test_a_cancelled_caller_leaves_a_recorded_end_and_nothing_else(tmp_path, stage):
    async with a_node(tmp_path) as node:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(node.run(task(**STAGES[stage])))
            await until(node, stage)
            (session_id,) = node.session_ids()
            running.cancel()
        assert running.cancelled()
        outcome = node.store.outcome(session_id)
        assert (outcome.status, outcome.cause) == ("CANCELLED", "cancelled")
        assert nothing_lives(session_id)
        assert node.session_ids() == ()
        assert node.gateway.facts(session_id).sealed


async def test_a_session_waiting_for_a_slot_can_be_cancelled(tmp_path):
    async with a_node(tmp_path, settings={"run_slots": 1}) as node:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(node.run(task("sleep 60")))
            await until(node, "RUNNING")
            second = group.create_task(node.run(task("sleep 60")))
            while statuses(node).count("READY") < 2:  # noqa: ASYNC110 - plain callbacks
                await asyncio.sleep(0.005)
            for session_id in node.session_ids():
                node.cancel(session_id)
        assert first.result().error == "cancelled while RUNNING"
        assert second.result().error == "cancelled while READY"
        assert node.pools.run._value == 1


@pytest.mark.parametrize(
    ("keep", "command", "kept"),
    [
        ("always", AGENT, True),
        ("failed", AGENT, False),
        ("failed", "echo x; exit 1", True),
        ("never", "echo x; exit 1", False),
    ],
)
async def test_logs_are_kept_by_policy(tmp_path, keep, command, kept):
    async with a_node(tmp_path, settings={"keep_logs": keep}) as node:
        result = await node.run(task(command))
        assert node.folder.session_folder(result.session_id).exists() is kept
    assert ("stdout" in result.logs) is kept


class Forgetful(MemoryStore):
    """A store on a full disk."""

    def __init__(self, at):
        super().__init__()
        self._at = at

    async def open_session(self, session):
        if self._at == "open":
            raise StoreError("no space left")
        await super().open_session(session)

    async def close_session(self, outcome):
        if self._at == "close":
            raise StoreError("no space left")
        await super().close_session(outcome)


@pytest.mark.parametrize(
    ("at", "said"),
    [("open", "init: no space left"), ("close", "the outcome could not be recorded: no space")],
)
async def test_a_store_that_fails_is_infrastructure(tmp_path, at, said):
    async with a_node(tmp_path, store=Forgetful(at)) as node:
        result = await node.run(task())
    assert (result.status, result.cause) == ("ERROR", Cause.INFRASTRUCTURE)
    assert said in result.error
