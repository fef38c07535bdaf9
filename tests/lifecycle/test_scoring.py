import re
import time

import pytest
from tests.lifecycle.house import AGENT, WORK, a_node, checked, statuses, task

from bridle.capture.store import MemoryStore
from bridle.config import Limits
from bridle.errors import StoreError
from bridle.evaluators.base import Evaluation
from bridle.testing import scripted_engine
from bridle.trajectory import rebuild
from bridle.types import Cause


@pytest.mark.parametrize(
    ("evaluator", "budget_s", "said"),
    [
        (checked("no-such-checker"), 30, r"could not be run \(exit code 127\)"),
        (checked("sleep 60"), 0.3, "its budget of 0.3 s ran out"),
        ({"strategy": "tests.lifecycle.test_scoring:Strange"}, 30, "ZeroDivisionError"),
        ({"strategy": "tests.lifecycle.test_scoring:Infinite"}, 30, "must be a finite number"),
    ],
)
async def test_an_evaluator_that_fails_is_its_own_cause_and_no_reward(
    tmp_path, evaluator, budget_s, said
):
    async with a_node(tmp_path) as node:
        result = await node.run(task(evaluator=evaluator, budgets={"evaluate_s": budget_s}))
    assert (result.status, result.cause, result.reward) == ("ERROR", Cause.EVALUATOR, None)
    assert re.search(said, result.error)
    assert len(result.trajectory.traces) == 1


class Strange:
    """An evaluator with a bug."""

    @classmethod
    def from_config(cls, config):
        return cls()

    async def evaluate(self, context):
        return 1 / 0


class Infinite(Strange):
    async def evaluate(self, context):
        return Evaluation(float("inf"))


async def test_an_evaluator_that_fails_after_the_budget_leaves_the_timeout_a_timeout(tmp_path):
    command, spec = f"{AGENT}; sleep 60", checked("no-such-checker")
    async with a_node(tmp_path) as node:
        result = await node.run(task(command, evaluator=spec, budgets={"agent_s": 4}))
    assert (result.status, result.cause) == ("TIMEOUT", Cause.TIMEOUT)
    assert "could not be run" in result.error


@pytest.mark.parametrize(
    ("command", "changes", "cause"),
    [
        (f"{AGENT}; exit 3", {}, Cause.HARNESS_CRASH),
        (f"{AGENT}; kill -KILL $$", {}, Cause.HARNESS_CRASH),
        (f"{AGENT}; sleep 60", {"budgets": {"agent_s": 4}}, Cause.TIMEOUT),
        (f"{AGENT}; {AGENT} || true", {"limits": Limits(max_turns=2)}, Cause.LIMIT),
    ],
)
@pytest.mark.parametrize(("checker", "reward"), [("grep -q done out.txt", 1.0), ("false", 0.0)])
async def test_an_agent_that_was_answered_is_scored_however_its_harness_ended(
    tmp_path, command, changes, cause, checker, reward
):
    async with a_node(tmp_path) as node:
        result = await node.run(task(command, evaluator=checked(checker), **changes))
    assert (result.cause, result.reward) == (cause, reward)
    assert result.status != "COMPLETED"


async def test_a_harness_that_got_no_reply_is_not_scored(tmp_path):
    async with a_node(tmp_path) as node:
        result = await node.run(task("exit 3", evaluator=checked("true")))
        assert "EVALUATING" not in statuses(node)
    assert (result.cause, result.reward) == (Cause.HARNESS_CRASH, None)


async def test_only_a_completed_session_has_the_reward_of_session_completed(tmp_path):
    limits = Limits(max_turns=2)
    async with a_node(tmp_path) as node:
        result = await node.run(task(f"{AGENT}; {AGENT} || true", limits=limits))
    assert (result.cause, result.reward) == (Cause.LIMIT, 0.0)


class Unreadable(MemoryStore):
    """A store that cannot be read back for a while."""

    def __init__(self, failure):
        super().__init__()
        self.failure = failure

    def read(self, session_id):
        failure, self.failure = self.failure, None
        if failure == "slow":
            time.sleep(1)
        elif failure is not None:
            raise StoreError(failure)
        return super().read(session_id)


@pytest.mark.parametrize(
    ("failure", "budget_s", "cause", "said"),
    [
        ("torn file", 30, Cause.INFRASTRUCTURE, "build: torn file"),
        ("slow", 0.1, Cause.TIMEOUT, "build: its budget of 0.1 s ran out"),
    ],
)
async def test_a_trajectory_that_cannot_be_built_is_told_and_built_later(
    tmp_path, failure, budget_s, cause, said
):
    async with a_node(tmp_path, store=Unreadable(failure)) as node:
        result = await node.run(task(budgets={"build_s": budget_s}, evaluator=checked()))
        assert "EVALUATING" not in statuses(node)
    assert (result.status, result.cause, result.error) == ("ERROR", cause, said)
    assert len(result.trajectory.traces) == 1


JUDGE = {
    "strategy": "judge",
    "config": {"rubric": "Was it done?", "model": "grader", "on_failure": "error"},
}


def judging(answer):
    """An engine that answers a judge so, and plays `WORK` for all others."""
    of_judge = {"when": {"system_contains": "You grade"}, "turns": [{"content": answer}]}
    return scripted_engine(WORK, conversations=[of_judge])


async def test_a_judge_is_asked_in_a_session_of_its_own_that_never_trains(tmp_path):
    engine = judging('{"score": 0.5}')
    async with a_node(tmp_path, engine=engine) as node:
        result = await node.run(task(evaluator=JUDGE))
        summary = node.folder.finish(node.store)
        name = result.metadata["evaluation"]["judge"]
        own = node.store.read(name)
    assert (result.status, result.reward) == ("COMPLETED", 0.5)
    assert [entry["session_id"] for entry in summary["sessions"]] == [result.session_id]
    assert own.outcome.status == "COMPLETED"
    assert len(own.exchanges) == 1
    assert rebuild(own).metadata["stats"]["tokens_trained"] == 0
    assert node.gateway.facts(name).sealed
    assert len((tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()) == 1


async def test_a_judge_that_talks_is_the_evaluator_s_failure(tmp_path):
    async with a_node(tmp_path, engine=judging("Nice work!")) as node:
        result = await node.run(task(evaluator=JUDGE))
    assert (result.status, result.cause, result.reward) == ("ERROR", Cause.EVALUATOR, None)
    assert "no JSON object with a score" in result.error
