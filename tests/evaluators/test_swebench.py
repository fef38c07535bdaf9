"""The evaluator around the package `swebench`, with a stand-in of the two functions it calls.

Their names, arguments and results are those of swebench 5.0.2.
"""

import sys

import pytest
from tests.evaluators.test_test_on_output import BEGIN, two_runtimes

from bridle.errors import ConfigError, EvaluatorError
from bridle.evaluators.base import Unscorable, evaluate_with_control
from bridle.evaluators.patch import SwebenchEvaluator

UTILS = """
from types import SimpleNamespace
def make_test_spec(instance):
    lines = ["#!/bin/bash", "set -x", instance["eval_script"]]
    return SimpleNamespace(instance_id=instance["instance_id"], eval_script="\\n".join(lines))
"""
GRADING = """
def get_eval_report(test_spec, prediction, test_log_path, include_tests_status):
    print("printed by the package")
    with open(test_log_path) as file:
        log = file.read()
    report = {"resolved": "PASSED new" in log, "infra_failure": "DISK" in log}
    report["infra_failure_reason"] = "disk full"
    assert prediction["model_patch"] and include_tests_status
    return {prediction["instance_id"]: report}
"""
CHECK = "grep -q 2 code.txt && echo PASSED new >&2; echo done"


@pytest.fixture
def python(tmp_path):
    """A Python that has the stand-in."""
    package = tmp_path / "site" / "swebench" / "harness"
    package.mkdir(parents=True)
    (package / "utils.py").write_text(UTILS)
    (package / "grading.py").write_text(GRADING)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return str(program)


def evaluator(python, *, script=CHECK, base="HEAD^{tree}", **config):
    instance = {"instance_id": "a__b-1", "base_commit": base, "eval_script": script}
    given = {"instance": instance, "python": python, **config}
    return SwebenchEvaluator.from_config(given)


@pytest.mark.parametrize(("work", "reward"), [("echo 2 > code.txt", 1.0), ("echo 3 > code.txt", 0)])
async def test_the_patch_is_graded_in_a_fresh_runtime(tmp_path, python, work, reward):
    async with two_runtimes(tmp_path, work) as context:
        found = await evaluator(python).evaluate(context)
    assert found.reward == reward
    assert (found.metadata["resolved"], found.metadata["changed"]) == (reward == 1, True)
    assert "done" in (tmp_path / "logs" / "evaluator.log").read_text()


async def test_patch_is_the_difference_to_the_initial_state_of_the_fresh_runtime(tmp_path, python):
    """Images have changes of their own since the base commit, committed or not."""
    begin = f"{BEGIN}; echo setup > own.txt; git add .; git commit -qm own; echo more >> own.txt"
    async with two_runtimes(tmp_path, "echo 2 > code.txt", begin) as context:
        found = await evaluator(python, base="HEAD~1").evaluate(context)
    assert found.reward == 1.0


async def test_a_pytest_module_of_the_agent_does_not_replace_the_installed_one(tmp_path, python):
    script = f"{sys.executable} -m pytest --version"
    work = "echo 'print(\"PASSED new\")' > pytest.py"
    async with two_runtimes(tmp_path, work) as context:
        found = await evaluator(python, script=script).evaluate(context)
    assert found.reward == 0.0
    assert f"pytest {pytest.__version__}" in (tmp_path / "logs" / "evaluator.log").read_text()


async def test_excluded_harness_files_are_left_out_of_the_patch(tmp_path, python):
    work = "echo 2 > code.txt; mkdir .codex; echo x > .codex/log"
    script = f"[ -e .codex ] || {{ {CHECK}; }}"
    async with two_runtimes(tmp_path, work) as context:
        found = await evaluator(python, script=script, exclude=[".codex/**"]).evaluate(context)
    assert found.reward == 1.0


async def test_a_patch_made_in_a_copy_is_graded_in_the_repository_of_the_image(tmp_path, python):
    begin = f"mkdir image; cd image; {BEGIN}; cp -a . ../copy"
    async with two_runtimes(tmp_path, "echo 2 > copy/code.txt", begin) as context:
        found = await evaluator(python, repo="copy", tested="image").evaluate(context)
    assert found.reward == 1.0


async def test_a_patch_with_bytes_that_are_not_utf_8_is_graded(tmp_path, python):
    async with two_runtimes(tmp_path, r"printf '3\n\377\n' > code.txt") as context:
        assert (await evaluator(python).evaluate(context)).reward == 0.0


@pytest.mark.parametrize(("script", "blamed"), [("echo DISK", False), ("cat code.txt", True)])
async def test_an_environment_failure_caused_only_by_the_patch_makes_the_session_unscorable(
    tmp_path, python, script, blamed
):
    async with two_runtimes(tmp_path, "echo DISK > code.txt") as context:
        with pytest.raises(EvaluatorError, match="its environment failed") as caught:
            await evaluate_with_control(evaluator(python, script=script), context)
    assert isinstance(caught.value, Unscorable) == blamed


async def test_a_session_without_changes_has_reward_0_and_no_tests_are_run(tmp_path):
    async with two_runtimes(tmp_path, "true") as context:
        found = await evaluator("/no/such/python").evaluate(context)
    assert (found.reward, found.metadata) == (0.0, {"resolved": False, "changed": False})


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"script": "echo DISK"}, "its environment failed: disk full"),
        ({"script": "sleep 60", "timeout_s": 0.1}, "it did not end within 0.1 s"),
        ({"python": sys.executable}, r"run pip install .*\[swebench\]'"),
        ({"python": "/no/such/python"}, "swebench .*/no/such/python"),
    ],
)
async def test_an_environment_failure_a_timeout_or_a_missing_package_is_an_evaluator_error(
    tmp_path, python, config, why
):
    async with two_runtimes(tmp_path, "echo 2 > code.txt") as context:
        with pytest.raises(EvaluatorError, match=f"(?s){why}"):
            await evaluator(config.pop("python", python), **config).evaluate(context)


def test_swebench_config_requires_an_instance():
    with pytest.raises(ConfigError, match="instance: Field required"):
        SwebenchEvaluator.from_config({})
