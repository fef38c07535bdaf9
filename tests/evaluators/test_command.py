import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.evaluators.made import LEAVE, evaluation, watching

from bridle.errors import EvaluatorError
from bridle.evaluators.command import CommandEvaluator, parse_reward


def evaluator(command, **config):
    return CommandEvaluator.from_config({"command": command, **config})


@pytest.mark.parametrize(("command", "reward"), [("true", 1.0), ("exit 1", 0.0), ("exit 5", 0.0)])
async def test_reward_is_1_for_exit_code_0_and_0_for_other_exit_codes(tmp_path, command, reward):
    async with evaluation(tmp_path) as context:
        found = await evaluator(f"echo said; {command}").evaluate(context)
    assert found.reward == reward
    assert found.metadata["output"] == "said"
    assert (tmp_path / "logs" / "evaluator.log").read_text() == "said\n"


@pytest.mark.parametrize(
    ("command", "config", "why"),
    [
        ("no-such-checker", {}, r"could not be run \(exit code 127\): .*no-such-checker"),
        ("exit 9", {"failure_codes": [9]}, r"could not be run \(exit code 9\)"),
        ("kill -9 $$", {}, "was ended by signal 9"),
        ("sleep 60", {"timeout_s": 0.1}, r"did not end within 0\.1 s"),
    ],
)
async def test_a_command_that_cannot_run_is_killed_or_times_out_is_an_evaluator_error(
    tmp_path, command, config, why
):
    async with evaluation(tmp_path) as context:
        with pytest.raises(EvaluatorError, match=why):
            await evaluator(command, **config).evaluate(context)


async def test_a_reward_file_gives_reward_and_metadata_whatever_the_exit_code(tmp_path):
    command = """printf '{"reward": 0.25, "passed": 1}' > out.json; exit 1"""
    async with evaluation(tmp_path) as context:
        found = await evaluator(command, reward_file="out.json").evaluate(context)
    assert (found.reward, found.metadata["passed"], found.metadata["exit_code"]) == (0.25, 1, 1)


async def test_a_reward_file_is_read_when_no_process_of_the_command_is_left(tmp_path):
    alive, pid = [], tmp_path / "pid"
    command = f"{LEAVE.format(pid)}; echo 1 > out.txt"
    async with evaluation(tmp_path, kind=watching("out.txt", pid, alive)) as context:
        found = await evaluator(command, reward_file="out.txt").evaluate(context)
    assert found.reward == 1
    assert alive == [False]


async def test_a_reward_file_that_is_not_utf_8_is_an_evaluator_error(tmp_path):
    command = """printf '{"reward": 1, "x": "\\377"}' > out.json"""
    async with evaluation(tmp_path) as context:
        with pytest.raises(EvaluatorError, match=r"left no out\.json: 'utf-8' codec"):
            await evaluator(command, reward_file="out.json").evaluate(context)


async def test_a_command_s_python_looks_for_modules_neither_in_a_home_nor_beside_the_work(tmp_path):
    async with evaluation(tmp_path) as context:
        found = await evaluator('test "$PYTHONSAFEPATH$PYTHONNOUSERSITE" = 11').evaluate(context)
    assert found.reward == 1.0


@pytest.mark.parametrize("trusted", [False, True])
async def test_a_reward_file_left_by_the_harness_is_not_read(tmp_path, trusted):
    async with evaluation(tmp_path, trusted=trusted) as context:
        await context.places.agents.write("reward.txt", b"1.0")
        with pytest.raises(EvaluatorError, match=r"left no reward\.txt"):
            await evaluator("true", reward_file="reward.txt").evaluate(context)


async def test_evaluator_env_and_cwd_apply_to_the_command(tmp_path):
    async with evaluation(tmp_path, env={"WANTED": "7"}) as context:
        await context.places.agents.write("sub/answer", b"7\n")
        found = await evaluator('test "$(cat answer)" = "$WANTED"', cwd="sub").evaluate(context)
    assert found.reward == 1.0


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-1000, 1000))
def test_any_finite_number_is_a_reward(number):
    assert parse_reward(f" {json.dumps(number)}\n", "r") == (float(number), {})


def test_true_and_false_in_a_reward_file_are_rewards_of_1_and_0():
    assert parse_reward("true", "r") == (1.0, {})
    assert parse_reward('{"reward": false, "why": "late"}', "r") == (0.0, {"why": "late"})


@pytest.mark.parametrize(
    "text", ["", "good", "NaN", "Infinity", "null", "[1]", "{}", '{"reward": ""}']
)
def test_text_without_a_finite_number_is_an_evaluator_error(text):
    with pytest.raises(EvaluatorError, match="must hold a finite number"):
        parse_reward(text, "reward.txt")
