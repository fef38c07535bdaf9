"""The Python API, used as its users do: with a provider's SDK and functions of their own."""

import asyncio
import json
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import bridle
from bridle.api import new_run_folder
from bridle.capture.sqlite import SqliteReader
from bridle.cli.config import load_config
from bridle.config import RuntimeSpec
from bridle.errors import ConfigError
from bridle.harnesses.base import SCRIPTS
from bridle.node.results import result_from

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def engine(tmp_path):
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"conversations": [{"turns": [{"content": "Four."}]}]}))
    return f"scripted:{script}"


async def ask(session, text="2 + 2?"):
    async with openai.AsyncOpenAI(
        base_url=session.openai_url, api_key=session.key, max_retries=0
    ) as client:
        reply = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": text}]
        )
    return reply.choices[0].message.content


async def agent(session):
    return await ask(session, session.task.instruction)


def right(attempt):
    """A scorer that a sandboxed run finds by its module's name."""
    return float(attempt.traces[-1]["messages"][-1]["content"] == "Four.")


def results(folder):
    with SqliteReader(folder / "capture.sqlite") as reader:
        return [result_from(reader.read(each.session_id)) for each in reader.sessions()]


def test_new_run_folder_does_not_return_an_existing_folder(tmp_path):
    first = new_run_folder(tmp_path)
    first.mkdir()
    second = new_run_folder(tmp_path)

    assert second != first
    assert not second.exists()


async def test_a_gateway_session_has_the_reward_set_in_its_block(engine, tmp_path):
    async with bridle.Gateway(engine, data=tmp_path / "run") as gateway:
        async with gateway.session("sum-1", level=3) as session:
            assert await ask(session) == "Four."
            assert len(session.trajectory().traces) == 1
            session.reward = 0.5
        with pytest.raises(ConfigError, match=r"has ended, and its reward stays 0\.5: set"):
            session.reward = 1.0
        with pytest.raises(openai.AuthenticationError):
            await ask(session)
        assert [each.reward for each in gateway.trajectories()] == [0.5]
    (trajectory,) = gateway.trajectories()
    assert session.trajectory().reward == trajectory.reward == 0.5
    with pytest.raises(ConfigError, match="the gateway is not running"):
        await session.fork(at=1).__aenter__()
    assert trajectory.status == "COMPLETED"
    assert trajectory.metadata["stats"]["tokens_trained"] == 4
    assert gateway.summary["sessions"][0]["task_id"] == "sum-1"
    assert {"trajectories.jsonl", "trajectories.parquet", "summary.json"} <= {
        path.name for path in gateway.path.iterdir()
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", [1], np.zeros(2)])
async def test_a_session_reward_must_be_a_finite_number(engine, tmp_path, value):
    async with (
        bridle.Gateway(engine, data=tmp_path / "run") as gateway,
        gateway.session() as session,
    ):
        with pytest.raises(ConfigError, match=r"^reward: .*must be a finite number"):
            session.reward = value
        with pytest.raises(ConfigError, match=r"^trace_rewards: .*must be a finite number"):
            session.trace_rewards = (1.0, value)
        with pytest.raises(ConfigError, match=r"^trace_rewards: give one number for each trace"):
            session.trace_rewards = 1.0  # type: ignore[assignment]
        session.trace_rewards = np.array([1, 2], np.float32)
        assert session.trace_rewards == (1.0, 2.0)


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ("http://127.0.0.1:9", {}, "engine http://127.0.0.1:9 needs the model's tokenizer"),
        ("http://127.0.0.1:9", {"tokenizer": 3}, "the arguments: tokenizer: Input should be a"),
        ("http://127.0.0.1:9", {"tokenizer": "gone/"}, "tokenizer 'gone/': no such folder"),
        ("localhost:8000", {}, "unknown engine 'localhost:8000'; did you mean 'http://localhost"),
        (None, {}, "the arguments: engines.0: Input should be a valid string; given: None"),
        ([], {}, "no engine is given"),
        ("scripted:gone.json", {}, "gone.json: no such file"),
        ("scripted", {"settings": {"prt": 1}}, "gateway.prt: Extra inputs are not permitted, did"),
        ("scripted", {"settings": "port = 1"}, "gateway: Input should be an object"),
        ("scripted", {"telemetry": "wandbb"}, "unknown tracker 'wandbb'"),
    ],
)  # fmt: skip
async def test_a_wrong_gateway_argument_is_refused_by_name(
    engine, tmp_path, given, settings, message
):
    given = engine if given == "scripted" else given
    with pytest.raises(ConfigError) as caught:
        async with bridle.Gateway(given, data=tmp_path / "run", **settings):
            pass
    assert message in str(caught.value)


@pytest.mark.parametrize(("history", "why"), [("exact", None), ("template", "unbridged")])
async def test_setting_history_decides_whether_reasoning_stays_in_the_prompt(
    tmp_path, history, why
):
    turns = [{"reasoning": "2 and 2", "content": "Four."}, {"content": "Five."}]
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"conversations": [{"turns": turns}]}))
    file = tmp_path / "bridle.toml"
    file.write_text(f"engines = ['scripted:{script}']\n[rendering]\nhistory = '{history}'\n")
    gateway = bridle.Gateway(load_config(file), data=tmp_path / "run")
    async with gateway, gateway.session() as session:
        client = openai.AsyncOpenAI(base_url=session.openai_url, api_key=session.key)
        messages: list[Any] = [{"role": "user", "content": "2 + 2?"}]
        for text in ("and 1?", ""):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            answer = reply.choices[0].message.model_dump(exclude_none=True)
            messages += [answer, {"role": "user", "content": text}]
        await client.close()
    [trajectory] = gateway.trajectories()
    assert len(trajectory.traces) == (1 if why is None else 2)
    with SqliteReader(tmp_path / "run" / "capture.sqlite") as reader:
        assert reader.exchanges(trajectory.session_id)[-1].root_reason == why


async def test_opening_a_session_of_a_gateway_that_is_not_running_raises(engine, tmp_path):
    gateway = bridle.Gateway(engine, data=tmp_path / "run")
    refused = pytest.raises(ConfigError, match="open its sessions inside its `async with`")
    with refused:
        async with gateway.session():
            pass
    async with gateway, gateway.session():
        pass
    with refused:
        async with gateway.session():
            pass


async def test_a_session_block_that_fails_or_is_cancelled_has_a_cause_and_no_reward(
    engine, tmp_path
):
    async with bridle.Gateway(engine, data=tmp_path / "run") as gateway:

        async def crash():
            async with gateway.session("crash") as session:
                await ask(session)
                session.reward = 1.0
                raise ZeroDivisionError("by hand")

        with pytest.raises(ZeroDivisionError):
            await crash()
        async with gateway.session("silent") as session:
            session.reward = 1.0
        started = asyncio.Event()

        async def endless():
            async with gateway.session("endless"):
                started.set()
                await asyncio.Event().wait()

        async with asyncio.TaskGroup() as group:
            task = group.create_task(endless())
            await started.wait()
            task.cancel()
    crashed, silent, cancelled = results(gateway.path)
    assert (crashed.status, crashed.cause, crashed.reward) == ("ERROR", "harness_crash", None)
    assert crashed.error == "ZeroDivisionError: by hand"
    assert (silent.status, silent.cause, silent.reward) == ("ERROR", "harness_no_call", None)
    assert (cancelled.status, cancelled.cause) == ("CANCELLED", "cancelled")


KILLED = """
import asyncio, os, bridle
from tests.test_api import ask
async def main():
    async with bridle.Gateway({engine!r}, data={data!r}) as gateway:
        async with gateway.session("t") as session:
            await ask(session)
            session.reward = 0.25
        os.kill(os.getpid(), 9)
asyncio.run(main())
"""


def test_a_session_reward_survives_sigkill_right_after_the_block(engine, tmp_path):
    program = KILLED.format(engine=engine, data=str(tmp_path / "run"))
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert killed.returncode == -9
    (result,) = results(tmp_path / "run")
    assert (result.status, result.reward) == ("COMPLETED", 0.25)


def test_a_rollout_of_an_agent_function_scores_each_session(engine, tmp_path):
    def scorer(attempt):
        assert attempt.returned == "Four."
        assert attempt["instruction"] == attempt.instruction
        return {"reward": len(attempt.instruction), "why": "length", "trace_rewards": [2]}

    tasks: list[str | dict[str, str]] = ["2 + 2?", {"task_id": "own", "instruction": "5 - 1?!"}]
    trajectories = bridle.rollout(
        agent, tasks, scorer=scorer, engine=engine, samples=2, data=tmp_path / "run"
    )
    assert [each.reward for each in trajectories] == [6, 6, 7, 7]
    found = results(tmp_path / "run")
    assert {(each.task_id, each.sample_index) for each in found} == {
        (name, sample) for name in ("task-0", "own") for sample in (0, 1)
    }
    assert found[0].metadata["evaluation"] == {"why": "length"}
    assert trajectories[0].traces[0].reward == 2


def test_an_agent_or_scorer_error_in_a_rollout_ends_only_its_session(engine, tmp_path):
    async def often(session):
        if session.task.task_id == "task-0":
            raise OSError("no disk")
        return await agent(session)

    def never(attempt):
        raise KeyError(attempt.task_id)

    bridle.rollout(often, ["a", "b"], scorer=never, engine=engine, data=tmp_path / "run")
    found = {each.task_id: each for each in results(tmp_path / "run")}
    assert (found["task-0"].cause, found["task-0"].error) == ("harness_crash", "OSError: no disk")
    assert (found["task-1"].cause, found["task-1"].reward) == ("evaluator", None)
    assert found["task-1"].error == "the scorer raised KeyError: 'task-1'"


async def test_a_rollout_can_be_called_inside_a_running_event_loop(engine, tmp_path):
    (trajectory,) = bridle.rollout(
        agent, ["2 + 2?"], scorer=lambda _: 1, engine=engine, data=tmp_path / "run"
    )
    assert trajectory.reward == 1


def test_a_rollout_of_a_command_line_is_scored_by_a_module_s_function(
    engine, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    task = bridle.Task(
        task_id="t", instruction="2 + 2?", runtime=RuntimeSpec(backend="local"),
    )  # fmt: skip
    command = f"{sys.executable} {SCRIPTS / 'shell_agent.py'}"
    (trajectory,) = bridle.rollout(
        command, [task], scorer=right, engine=engine, data=tmp_path / "run"
    )
    assert (trajectory.status, trajectory.reward) == ("COMPLETED", 1.0)
    assert bridle.Trajectory is type(trajectory)


@pytest.mark.parametrize(
    ("agent", "scorer", "match"),
    [
        (5, None, "agent: 5 is not a function, harness name"),
        (agent, lambda attempt, answer: 1.0, r"scorer\(attempt, answer\) must take one argument"),
        (agent, 5, "scorer must take one argument, the attempt: 5 is not a callable"),
        (
            "claude-code",
            None,
            "'claude-code' is no harness and no command; did you mean 'claude_code'",
        ),
        (lambda: None, None, r"agent\(\) must take one argument, the session"),
        ("true", lambda attempt: 1.0, r"scorer: .*<lambda>.* cannot be imported .* give a func"),
        ("true", 5, "scorer: 5 cannot be imported"),
        ("pythn agent.py", None, "agent.command: .* has no program 'pythn'"),
    ],
)
def test_a_rollout_refuses_a_wrong_agent_or_scorer_before_any_session(
    engine, tmp_path, agent, scorer, match
):
    with pytest.raises(ConfigError, match=match):
        bridle.rollout(agent, ["a"], scorer=scorer, engine=engine, data=tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("tasks", "settings", "message"),
    [
        ([], {}, "tasks: the list is empty"),
        ("2 + 2?", {}, "tasks: give a list, also of one task; given: '2 + 2?'"),
        (["a", 3], {}, "tasks[1]: 3 is not an instruction, a Task or its fields"),
        ([{"instruction": ""}], {}, "tasks[0]: instruction: String should have at least 1"),
        ([{"instruktion": "a"}], {}, "tasks[0]: instruktion: Extra inputs are not permitted, did"),
        ("tasks.jsonl", {}, "tasks: give a list, also of one task; given: 'tasks.jsonl'"),
        (None, {}, "tasks: give a list, also of one task; given: None"),
        (
            [{"task_id": "task-1", "instruction": "a"}, "b"],
            {},
            "another task has task_id 'task-1' too",
        ),
        (["a"], {"samples": 0}, "samples must be a whole number of at least 1, not 0"),
        (["a"], {"samples": "8"}, "samples must be a whole number of at least 1, not '8'"),
        (["a"], {"concurrency": -1}, "concurrency must be a whole number of at least 1, not -1"),
    ],
)
def test_a_rollout_refuses_wrong_tasks_before_any_session(
    engine, tmp_path, tasks, settings, message
):
    with pytest.raises(ConfigError) as caught:
        bridle.rollout(agent, tasks, engine=engine, data=tmp_path / "run", **settings)
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def late(session):
    """Return what is to be awaited."""
    return agent(session)


class Agent:
    async def __call__(self, session):
        return await agent(session)


@pytest.mark.parametrize("given", [agent, partial(agent), late, Agent()])
@pytest.mark.parametrize("one", [True, np.float64(1), np.float32(1), {"reward": np.True_}])
def test_agents_may_be_any_callables_and_scorers_may_return_numpy_numbers(
    engine, tmp_path, given, one
):
    (found,) = bridle.rollout(
        given, ["a"], scorer=lambda attempt: attempt.returned == "Four." and one,
        engine=engine, data=tmp_path / "run",
    )  # fmt: skip
    assert (found.error, found.reward) == (None, 1.0)


def test_synchronous_agents_of_a_rollout_run_concurrently_in_threads(engine, tmp_path):
    both = threading.Barrier(8, timeout=60)

    def sync(session):
        both.wait()
        with openai.OpenAI(base_url=session.openai_url, api_key=session.key) as client:
            messages: list = [{"role": "user", "content": session.task.instruction}]
            reply = client.chat.completions.create(model="policy", messages=messages)
        return reply.choices[0].message.content

    found = bridle.rollout(
        sync, ["a", "b"], scorer=lambda attempt: float(attempt.returned == "Four."),
        engine=engine, samples=4, data=tmp_path / "run",
    )  # fmt: skip
    assert [one.reward for one in found] == [1.0] * 8


SCRIPT = """
import sys
import bridle


def right(attempt):
    print("scored")
    return float(attempt.traces[-1]["messages"][-1]["content"] == "Four.")


def main():
    task = {{"instruction": "2 + 2?", "runtime": {{"backend": "local"}}}}
    command = f"{{sys.executable}} {scripts}/shell_agent.py"
    found = bridle.rollout(command, [task], scorer=right, engine={engine!r}, data={data!r})
    print([one.reward for one in found])


{call}
"""


def script_of(tmp_path, engine, call):
    script = tmp_path / "rollout.py"
    names = {"scripts": SCRIPTS, "engine": engine, "data": str(tmp_path / "run"), "call": call}
    script.write_text(SCRIPT.format(**names))
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)


@pytest.mark.timeout(120)  # it starts Python anew
def test_a_scorer_defined_in_the_main_script_scores_a_harness(engine, tmp_path):
    done = script_of(tmp_path, engine, 'if __name__ == "__main__":\n    main()')
    assert (done.returncode, done.stdout) == (0, "[1.0]\n"), done.stderr


@pytest.mark.timeout(120)  # it starts Python anew
def test_a_rollout_in_a_script_without_a_main_guard_is_refused(engine, tmp_path):
    done = script_of(tmp_path, engine, "main()")
    assert done.returncode == 1
    assert "put the call of rollout under `if __name__ == '__main__':`" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(120)  # it starts Python anew
def test_a_rollout_prints_nothing_to_stdout(engine, tmp_path):
    code = f"""
import bridle
async def agent(session):
    raise OSError("no disk")
bridle.rollout(agent, ["a"], engine={engine!r}, data={str(tmp_path / "run")!r})
bridle.rollout(agent, ["a"], engine={engine!r}, data={str(tmp_path / "run2")!r})
import structlog
structlog.get_logger().warning("a_log_line")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "sessions" in done.stderr  # the progress
    assert "a_log_line" in done.stderr


async def test_a_session_fork_replays_earlier_replies_and_refuses_a_different_prompt(tmp_path):
    turns = [{"content": "One."}, {"content": "Two."}]
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"conversations": [{"turns": turns}]}))
    async with bridle.Gateway(f"scripted:{script}", data=tmp_path / "run") as gateway:
        async with gateway.session("sum-1") as session:
            assert [await ask(session), await ask(session, "3 + 3?")] == ["One.", "One."]
        async with session.fork(at=1) as fork:
            assert await ask(fork) == "One."
            with pytest.raises(openai.BadRequestError, match="differs from token"):
                await ask(fork, "4 + 4?")
            assert await ask(fork, "3 + 3?") == "One."
        with pytest.raises(ConfigError, match="has 2 replies, fewer than at = 3"):
            async with session.fork(at=3):
                pass
    captured, forked = results(gateway.path)
    assert (captured.metadata.get("fork"), forked.task_id) == (None, "sum-1")
    assert forked.metadata["fork"] == {
        "session": captured.session_id,
        "at": 1,
        "replayed": 1,
        "left": 0,
        "verdict": "exact",
        "noise": [],
    }
    assert forked.trajectory.metadata["stats"]["tokens_excluded"] == {"replayed": 4}


def test_a_task_with_branching_is_refused_for_an_agent_function(engine, tmp_path):
    task = {"instruction": "2 + 2?", "branching": {"at": [1]}}
    with pytest.raises(ConfigError, match="branching"):
        bridle.rollout(agent, [task], engine=engine, data=tmp_path / "run")
    assert not (tmp_path / "run").exists()
