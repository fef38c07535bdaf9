import asyncio
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.conformance.memory import MemoryStore
from tests.node.house import AGENT, BEAT, WORK, a_node, checked, nothing_lives, statuses, task

from bridle.config import Action, Limits, RuntimeSpec
from bridle.errors import StoreError
from bridle.evaluators.base import Evaluation
from bridle.node.results import result_from
from bridle.node.session import FINAL, TRANSITIONS
from bridle.testing import scripted_engine
from bridle.trajectory import rebuild
from bridle.trajectory.result import trajectory_bytes
from bridle.types import JSON, Cause, SessionStatus


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


async def test_a_result_rebuilt_from_capture_equals_the_original(tmp_path):
    async with a_node(tmp_path) as node:
        result = await node.run(task(evaluator=checked()))
        again = result_from(node.store.read(result.session_id))
    assert again.json() == result.json()
    assert trajectory_bytes(again.trajectory) == trajectory_bytes(result.trajectory)


def test_final_statuses_have_no_transitions_and_others_lead_to_cancelled_and_error():
    assert set(TRANSITIONS) == set(SessionStatus)
    for status, following in TRANSITIONS.items():
        assert (not following) == (status in FINAL)
        if status not in FINAL:
            assert {SessionStatus.CANCELLED, SessionStatus.ERROR} <= following


async def until(node, status):
    while status not in statuses(node):  # noqa: ASYNC110 - events go to plain callbacks
        await asyncio.sleep(0.005)


STAGES: dict[str, dict[str, Any]] = {
    "INITIALIZING": {
        "runtime": RuntimeSpec(prepare=(Action(type="exec", command="sleep 60"),)),
    },
    "RUNNING": {"command": f"{AGENT}; sleep 60"},
    "EVALUATING": {"evaluator": checked("sleep 60")},
}


@pytest.mark.parametrize("stage", STAGES)
async def test_a_session_cancelled_at_any_stage_ends_with_a_cancelled_result(tmp_path, stage):
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
async def test_a_cancelled_caller_leaves_only_a_recorded_outcome(tmp_path, stage):
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
        assert (await node.run(task())).status == "COMPLETED"


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
async def test_a_failing_capture_store_is_an_infrastructure_error(tmp_path, at, said):
    async with a_node(tmp_path, store=Forgetful(at)) as node:
        result = await node.run(task())
    assert (result.status, result.cause) == ("ERROR", Cause.INFRASTRUCTURE)
    assert said in result.error


async def test_the_harness_environment_has_its_session_and_no_secret_of_the_host(tmp_path):
    os.environ["BRIDLE_CONTROL_TOKEN"] = "control"
    try:
        async with a_node(tmp_path) as node:
            command = f"env > env.txt; cp env.txt $HOME/..; {AGENT}"
            evaluator = checked("cat env.txt")
            spec = {"env": {"MINE": "1"}}
            result = await node.run(task(command, evaluator=evaluator, agent=spec))
    finally:
        del os.environ["BRIDLE_CONTROL_TOKEN"]
    seen = result.metadata["evaluation"]["output"]
    assert f"/s/{result.session_id}/v1" in seen
    assert "MINE=1" in seen
    assert "control" not in seen


@pytest.mark.parametrize(
    ("prepare", "budget_s", "cause", "said"),
    [
        (
            "echo why >&2; exit 4",
            30,
            Cause.INFRASTRUCTURE,
            r"prepare step 0 \(exec\): .*code 4: why",
        ),
        ("sleep 60", 0.3, Cause.TIMEOUT, "init: its budget of 0.3 s ran out"),
    ],
)
async def test_a_failed_prepare_step_is_an_infrastructure_error_and_a_slow_one_a_timeout(
    tmp_path, prepare, budget_s, cause, said
):
    runtime = RuntimeSpec(prepare=(Action(type="exec", command=prepare),))
    async with a_node(tmp_path) as node:
        result = await node.run(task(runtime=runtime, budgets={"init_s": budget_s}))
        assert statuses(node) == ["REGISTERED", "INITIALIZING", "ERROR"]
    assert (result.status, result.cause) == ("ERROR", cause)
    assert re.search(said, result.error)
    assert result.trajectory.metadata["stats"]["exchanges"] == 0


@pytest.mark.parametrize(
    ("command", "cause", "said"),
    [
        ("echo oh no >&2; exit 3", Cause.HARNESS_CRASH, "exited with code 3: oh no"),
        ("kill -9 $$", Cause.HARNESS_CRASH, "was ended by signal 9"),
        ("no-such-agent", Cause.HARNESS_CRASH, "exited with code 127: .*no-such-agent"),
        ("true", Cause.HARNESS_NO_CALL, "exited with code 0, but never called the model"),
    ],
)
async def test_a_harness_crash_and_an_exit_without_a_model_call_have_their_own_causes(
    tmp_path, command, cause, said
):
    async with a_node(tmp_path) as node:
        result = await node.run(task(command, evaluator=checked("true")))
    assert (result.status, result.cause, result.reward) == ("ERROR", cause, None)
    assert result.trajectory.status == "ERROR"
    assert re.search(said, result.error)


async def test_a_session_whose_last_call_failed_is_not_completed(tmp_path):
    turns: list[JSON] = [{"shell": ["seq 5000"]}, {"content": "never"}]
    async with a_node(tmp_path, engine=scripted_engine(turns, context_length=2000)) as node:
        result = await node.run(task(f"{AGENT} --lenient", evaluator=checked("true")))
    assert (result.status, result.reward, result.exit_code) == ("ERROR", 1.0, 0)
    assert result.cause is Cause.HARNESS_MODEL_ERROR
    assert "last model call failed: prompt is too long" in result.error
    assert len(result.trajectory.traces) == 1


@pytest.mark.parametrize("flag", ["", "--lenient"])
async def test_an_engine_failure_is_an_infrastructure_error_whatever_the_harness_exit(
    tmp_path, flag
):
    async with a_node(tmp_path, {"shell": ["true"]}, {"fault": 500}) as node:
        result = await node.run(task(f"{AGENT} {flag}"))
    assert (result.status, result.cause) == ("ERROR", Cause.INFRASTRUCTURE)
    assert "the model is overloaded" in result.error


async def test_an_expired_agent_budget_kills_all_processes_and_keeps_the_partial_trajectory(
    tmp_path,
):
    beat = BEAT.format(file=tmp_path / "beat")
    command = f"{AGENT}; (setsid bash -c '{beat}' &) ; trap '' TERM; {beat}"
    async with a_node(tmp_path) as node:
        result = await node.run(
            task(command, budgets={"agent_s": 4}, evaluator=checked(), num_samples=1)
        )
        assert nothing_lives(result.session_id)
    size = (tmp_path / "beat").stat().st_size
    await asyncio.sleep(0.1)
    assert (tmp_path / "beat").stat().st_size == size > 0
    assert (result.status, result.cause, result.reward) == ("TIMEOUT", Cause.TIMEOUT, 1.0)
    assert result.error == "the agent's budget of 4 s ran out, after 2 model calls"
    assert result.trajectory.metadata["stats"]["tokens_trained"] > 0


async def test_model_calls_after_the_agent_budget_get_401(tmp_path):
    # On TERM it asks once more, by no program that would have to start within the grace.
    ask = (
        "rest=${OPENAI_BASE_URL#http://}; host=${rest%%/*};"
        " exec 3<>/dev/tcp/${host%:*}/${host#*:};"
        r' printf "POST /%s/chat/completions HTTP/1.0\r\nAuthorization: Bearer %s\r\n\r\n"'
        ' "${rest#*/}" "$OPENAI_API_KEY" >&3;'
        f" read -r _ code _ <&3; echo $code > {tmp_path}/late; exit"
    )
    command = f"trap '{ask}' TERM; while true; do sleep 0.02; done"
    async with a_node(tmp_path) as node:
        result = await node.run(task(command, budgets={"agent_s": 1.5}))
    assert result.error == "the agent's budget of 1.5 s ran out, without one model call"
    assert result.trajectory.metadata["stats"]["exchanges"] == 0
    assert (tmp_path / "late").read_text() == "401\n"


async def test_a_session_that_reaches_max_turns_ends_with_cause_limit(tmp_path):
    async with a_node(tmp_path, {"shell": ["true"]}) as node:
        result = await node.run(task(limits=Limits(max_turns=3)))
    assert (result.status, result.cause) == ("TIMEOUT", Cause.LIMIT)
    assert result.error == "the session's limit of turns was reached"
    assert result.trajectory.metadata["stats"]["exchanges"] == 3


async def test_a_model_call_after_max_seconds_is_refused_and_ends_the_session(tmp_path):
    turns: list[JSON] = [{"shell": ["sleep 0.3"]}, {"content": "never"}]
    async with a_node(tmp_path, *turns) as node:
        result = await node.run(task(limits=Limits(max_seconds=0.2)))
    assert (result.status, result.cause) == ("TIMEOUT", Cause.LIMIT)
    assert result.error == "the session's limit of seconds was reached"
    assert result.trajectory.metadata["stats"]["exchanges"] == 1


async def test_a_harness_that_runs_on_after_a_reached_limit_is_killed(tmp_path):
    async with a_node(tmp_path, {"shell": ["true"]}) as node:
        result = await node.run(task(f"{AGENT}; sleep 60", limits=Limits(max_turns=1)))
    assert (result.status, result.cause, result.signal) == ("TIMEOUT", Cause.LIMIT, 15)
    assert result.timing["run"] < 50


async def test_background_processes_of_a_harness_are_killed_before_the_evaluation(tmp_path):
    beat = BEAT.format(file="beat")
    command = f"(setsid bash -c '{beat}' >/dev/null 2>&1 &); {AGENT}"
    still = "a=$(wc -c < beat); sleep 0.2; test $a = $(wc -c < beat)"
    async with a_node(tmp_path) as node:
        result = await node.run(task(command, evaluator=checked(still)))
    assert (result.status, result.reward) == ("COMPLETED", 1.0)


async def test_a_full_log_disk_is_an_infrastructure_error(tmp_path):
    async with a_node(tmp_path) as node:
        plan_folder = node.folder.session_folder
        node.folder.session_folder = lambda session_id: Path("/dev/full")
        try:
            result = await node.run(task(f"echo hello; {AGENT}"))
        finally:
            node.folder.session_folder = plan_folder
    assert (result.status, result.cause) == ("ERROR", Cause.INFRASTRUCTURE)
    assert "cannot write the log of a command" in result.error


async def test_evaluation_runtime_is_prepared_and_has_the_agent_s_work_but_not_its_home(tmp_path):
    runtime = RuntimeSpec(
        prepare=(Action(type="exec", command="touch given"),),
        eval_prepare=(Action(type="exec", command="touch more"),),
    )
    spec = checked('test -e given -a -e more -a -e out.txt -a -z "$(ls -A $HOME)"')
    async with a_node(tmp_path) as node:
        result = await node.run(task(f"{AGENT}; touch $HOME/mine", runtime=runtime, evaluator=spec))
        assert list(node.scratch.folder.glob("*/*")) == []
    assert (result.status, result.reward) == ("COMPLETED", 1.0)
    assert result.metadata["evaluation"]["place"] == "apart"


async def test_a_trusted_evaluation_runs_in_the_agent_s_runtime_and_is_marked_as_trusted(tmp_path):
    spec = checked("test -e $HOME/mine", trusted=True)
    async with a_node(tmp_path) as node:
        result = await node.run(task(f"{AGENT}; touch $HOME/mine", evaluator=spec))
    assert (result.status, result.reward) == ("COMPLETED", 1.0)
    assert result.metadata["evaluation"]["place"] == "trusted"


@pytest.mark.parametrize(
    ("spec", "place", "reward"),
    [({"shared": True}, "shared", 1.0), ({"trusted": True}, "trusted", 0.0), ({}, "apart", 0.0)],
)
async def test_only_a_shared_evaluation_sees_a_live_service_of_the_agent(
    tmp_path, spec, place, reward
):
    line = "setsid tail -f /dev/null </dev/null >/dev/null 2>&1 & echo $! > served"
    service = "grep -q '^State:.[RS]' /proc/$(cat served)/status"
    async with a_node(tmp_path) as node:
        result = await node.run(task(f"{AGENT}; {line}", evaluator=checked(service, **spec)))
    assert (result.status, result.reward) == ("COMPLETED", reward), result.error
    assert result.metadata["evaluation"]["place"] == place
    assert nothing_lives(result.session_id)


async def test_a_process_that_the_kept_patch_starts_does_not_live_beside_a_trusted_evaluation(
    tmp_path,
):
    begin = "git init -q && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m a"
    runtime = RuntimeSpec(prepare=(Action(type="exec", command=begin),))
    serve = "setsid tail -f /dev/null </dev/null >/dev/null 2>&1 & echo $! > served; cat"
    left = f"echo '{serve}' > run; echo '* filter=x' > .gitattributes"
    left += '; git config filter.x.clean "bash $PWD/run"'
    spec = checked("! grep -q '^State:.[RS]' /proc/$(cat served)/status", trusted=True)
    async with a_node(tmp_path) as node:
        given = task(f"{AGENT}; {left}", evaluator=spec, runtime=runtime, artifacts={"patch": "."})
        result = await node.run(given)
    assert (result.status, result.reward) == ("COMPLETED", 1.0), result.error
    assert "patch.diff" in result.logs


async def test_unreadable_and_special_files_of_the_agent_do_not_prevent_reward_0(tmp_path):
    left = "mkdir -p out; echo 1 > out/z; chmod 000 out/z; mkfifo pipe"
    async with a_node(tmp_path) as node:
        result = await node.run(task(f"{AGENT}; {left}", evaluator=checked("grep -q no out/*")))
    assert (result.status, result.reward) == ("COMPLETED", 0.0)
    assert result.metadata["evaluation"]["stayed"] == [
        "pipe: neither a regular file nor a folder nor a link"
    ]


@pytest.mark.parametrize("depth", [120, 3000])
async def test_a_work_folder_too_deep_to_copy_has_reward_0_and_is_removed(tmp_path, depth):
    nest = f"import os\nfor _ in range({depth}): os.mkdir('d'); os.chdir('d')"
    async with a_node(tmp_path) as node:
        deep = f'{sys.executable} -c "{nest}"'
        result = await node.run(task(f"{AGENT}; {deep}", evaluator=checked("true")))
        assert list(node.scratch.folder.glob("*/*")) == []
    assert (result.status, result.reward) == ("COMPLETED", 0.0)
    assert "more than 100 folders inside each other" in result.metadata["evaluation"]["unscorable"]


HOSTILE = r"""
printf x > $'line\nbreak'; printf x > $'bad\xffname'; mkdir shut; printf x > shut/in; chmod 000 shut
mkfifo $'pipe\n\xfe'; ln -s $'nowhere\xff' link; printf '\xff\xfe' > text; ln -s loop loop
"""


@pytest.mark.parametrize(
    "evaluator",
    [
        checked("grep -q no out.txt"),
        {
            "strategy": "test_on_output",
            "config": {
                "command": "printf '%s\n' '= short test summary info =' 'FAILED t' '1 in 0.1s'",
                "fail_to_pass": ["t"],
            },
        },
    ],
)
async def test_hostile_file_names_and_contents_of_the_agent_do_not_prevent_reward_0(
    tmp_path, evaluator
):
    setup = "git init -q && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m a"
    runtime = RuntimeSpec(prepare=(Action(type="exec", command=setup),))
    async with a_node(tmp_path) as node:
        result = await node.run(task(f"{AGENT}; {HOSTILE}", evaluator=evaluator, runtime=runtime))
    assert (result.status, result.reward, result.error) == ("COMPLETED", 0.0, None)
    orjson.dumps(result.metadata)


async def test_a_fresh_runtime_that_cannot_be_prepared_is_an_evaluator_failure(tmp_path):
    flag = tmp_path / "second"
    once = f"test ! -e {flag} && touch {flag}"
    runtime = RuntimeSpec(prepare=(Action(type="exec", command=once),))
    spec = checked("true")
    async with a_node(tmp_path) as node:
        result = await node.run(task(runtime=runtime, evaluator=spec))
    assert (result.status, result.cause) == ("ERROR", Cause.EVALUATOR)


async def test_an_unused_prewarmed_evaluation_runtime_is_removed(tmp_path):
    runtime = RuntimeSpec(prepare=(Action(type="exec", command="mkdir $HOME/x && sleep 0.5"),))
    spec = checked("true")
    async with a_node(tmp_path) as node:
        result = await node.run(task("exit 1", runtime=runtime, evaluator=spec))
        assert nothing_lives(result.session_id)
        assert list(node.scratch.folder.glob("*/*")) == []
    assert result.cause is Cause.HARNESS_CRASH


@pytest.mark.parametrize(
    ("evaluator", "budget_s", "said"),
    [
        (checked("no-such-checker"), 30, r"could not be run \(exit code 127\)"),
        (checked("sleep 60"), 0.3, "did not end within its budget of 0.3 s"),
        ({"strategy": "tests.node.test_session:Strange"}, 30, "ZeroDivisionError"),
        ({"strategy": "tests.node.test_session:Infinite"}, 30, "must be a finite number"),
    ],
)
async def test_a_failing_evaluator_gives_cause_evaluator_and_no_reward(
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


async def test_a_failing_evaluator_after_an_agent_timeout_keeps_the_status_timeout(tmp_path):
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
async def test_a_session_with_a_reply_is_scored_however_its_harness_ended(
    tmp_path, command, changes, cause, checker, reward
):
    async with a_node(tmp_path) as node:
        result = await node.run(task(command, evaluator=checked(checker), **changes))
    assert (result.cause, result.reward) == (cause, reward)
    assert result.status != "COMPLETED"


async def test_a_session_without_a_reply_is_not_scored(tmp_path):
    async with a_node(tmp_path) as node:
        result = await node.run(task("exit 3", evaluator=checked("true")))
        assert "EVALUATING" not in statuses(node)
    assert (result.cause, result.reward) == (Cause.HARNESS_CRASH, None)


async def test_session_completed_gives_reward_0_to_a_session_that_reached_a_limit(tmp_path):
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
async def test_a_failed_or_slow_trajectory_build_is_an_error_and_can_be_repeated_later(
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


async def test_a_judge_has_its_own_session_which_is_not_trained(tmp_path):
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


async def test_a_judge_answer_without_json_is_an_evaluator_failure(tmp_path):
    async with a_node(tmp_path, engine=judging("Nice work!")) as node:
        result = await node.run(task(evaluator=JUDGE))
    assert (result.status, result.cause, result.reward) == ("ERROR", Cause.EVALUATOR, None)
    assert "no JSON object with a score" in result.error
