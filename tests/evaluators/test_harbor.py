from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.evaluators.made import evaluation

from bridle.errors import ConfigError, EvaluatorError
from bridle.evaluators.base import Unscorable
from bridle.evaluators.command import HarborEvaluator, parse_json, parse_text

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def written(folder, line):
    """Write `test.sh` beside the task; it finds its folders as scripts in Harbor's format do."""
    script = folder / "tests" / "test.sh"
    script.parent.mkdir()
    script.write_text(f'#!/bin/bash\nout="$LOGS_DIR/verifier"\necho said\n{line}\n')


async def found(folder, line, *, before=(), **config):
    """Return what the evaluator says of a session that did the shell lines `before`."""
    written(folder, line)
    async with evaluation(folder, env={"WANTED": "7"}) as context:
        for command in before:
            assert (await context.places.agents.exec(command)).ok
        return await HarborEvaluator.from_config(config).evaluate(context)


@pytest.mark.parametrize(
    ("line", "reward"),
    [
        ('echo 1 > "$out/reward.txt"; exit 3', 1.0),
        ("""echo '{"reward": 0.5, "style": 1}' > "$out/reward.json" """, 0.5),
        ("""echo '{"tests": true}' > "$out/reward.json" """, 1.0),
        ('echo 0.25 > "$out/reward.json"; echo 1 > "$out/reward.txt"', 0.25),
        ('echo $WANTED > "$out/reward.txt"', 7.0),
        ('cp "$TESTS_DIR/test.sh" copy; test -x copy && echo 1 > "$out/reward.txt"', 1.0),
    ],
)
async def test_the_reward_file_decides_and_the_exit_code_does_not(tmp_path, line, reward):
    evaluated = await found(tmp_path, line)
    assert evaluated.reward == reward
    assert evaluated.metadata["output"] == "said"
    assert (tmp_path / "logs" / "evaluator.log").read_text() == "said\n"


@pytest.mark.parametrize(
    ("line", "config", "why"),
    [
        ("true", {}, r"left no reward\.json or reward\.txt in .*: said"),
        ('echo good > "$out/reward.txt"', {}, r"reward\.txt must hold a finite number"),
        ('echo "[1]" > "$out/reward.json"', {}, r"reward\.json must hold finite numbers by name"),
        ('mkdir "$out/reward.txt"', {}, r"reward\.txt cannot be read"),
        ('ln -s /etc/hostname "$out/reward.txt"', {}, r"reward\.txt cannot be read"),
        ("""echo '{"a": 1, "b": 0}' > "$out/reward.json" """, {}, "several rewards"),
        ('echo 1 > "$out/reward.txt"', {"weights": {"a": 1}}, r"gave no rewards named \['a'\]"),
        ("sleep 60", {"timeout_s": 0.1}, r"did not end within 0\.1 s"),
        ("true", {"tests": "gone"}, "gone/test.sh: no such file"),
    ],
)
async def test_a_missing_or_malformed_reward_file_or_a_timeout_is_an_evaluator_error(
    tmp_path, line, config, why
):
    with pytest.raises(EvaluatorError, match=why):
        await found(tmp_path, line, **config)


async def test_named_rewards_are_summed_by_weight(tmp_path):
    line = """echo '{"a": 1, "b": 0.5, "c": 9}' > "$out/reward.json" """
    evaluated = await found(tmp_path, line, weights={"a": 0.5, "b": 1})
    assert evaluated.reward == 1.0
    assert evaluated.metadata["rewards"] == {"a": 1.0, "b": 0.5, "c": 9.0}


async def test_reward_and_test_files_left_by_the_harness_are_removed_before_the_tests(tmp_path):
    harbor = "$HOME/.harbor"
    left = (
        f"mkdir -p {harbor}/logs/verifier {harbor}/tests",
        f"echo 1 > {harbor}/logs/verifier/reward.txt",
        f"echo 'echo 1 > $LOGS_DIR/verifier/reward.json' > {harbor}/tests/extra.sh",
    )
    line = (
        '[ "$(ls "$TESTS_DIR")" = test.sh ] && [ -z "$(ls "$out")" ] || echo 1 > "$out/reward.txt"'
    )
    with pytest.raises(EvaluatorError, match="left no reward"):
        await found(tmp_path, line, before=left)


async def test_a_symbolic_link_in_place_of_the_log_folder_is_removed_and_not_followed(tmp_path):
    (tmp_path / "host").mkdir()
    left = f'mkdir -p "$HOME/.harbor/logs"; ln -s {tmp_path}/host "$HOME/.harbor/logs/verifier"'
    evaluated = await found(tmp_path, 'echo 0 > "$out/reward.txt"', before=(left,))
    assert evaluated.reward == 0.0
    assert list((tmp_path / "host").iterdir()) == []


async def test_an_agent_file_that_blocks_the_log_folder_makes_the_session_unscorable(tmp_path):
    left = 'mkdir -p "$HOME/.harbor"; echo x > "$HOME/.harbor/logs"'
    with pytest.raises(Unscorable, match="cannot empty"):
        await found(tmp_path, "true", before=(left,))


def test_an_unknown_harbor_setting_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"evaluator\.config of 'harbor': timeout"):
        HarborEvaluator.from_config({"timeout": 1})


@given(FINITE)
def test_any_finite_number_is_a_reward(number):
    assert parse_text(f" {number!r}\n") == {"reward": number} == parse_json(repr(number))


@given(st.text())
def test_parsed_rewards_are_always_finite(text):
    for parse in (parse_text, parse_json):
        with suppress(EvaluatorError):
            assert all(abs(value) < float("inf") for value in parse(text).values())
