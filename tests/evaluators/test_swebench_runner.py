import json
import subprocess
import sys

from tests.evaluators.test_swebench import GRADING, UTILS

from bridle.evaluators.patch import RUNNER


def test_output_of_the_swebench_package_does_not_mix_with_the_runner_s_answer(tmp_path):
    package = tmp_path / "swebench" / "harness"
    package.mkdir(parents=True)
    (package / "utils.py").write_text(UTILS)
    (package / "grading.py").write_text(GRADING)
    given = {
        "instance": {"instance_id": "i", "eval_script": "true"},
        "log": "PASSED new",
        "patch": "x",
    }
    answers = {}
    for what in ("script", "grade"):
        done = subprocess.run(
            [sys.executable, "-P", RUNNER, what], input=json.dumps(given), capture_output=True,
            text=True, check=True, env={"PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        answers[what] = json.loads(done.stdout)
    assert answers["script"] == {"script": "#!/bin/bash\nset -x\ntrue"}
    assert answers["grade"]["resolved"] is True


SMITH_CONSTANTS = "TEST_OUTPUT_START, TEST_OUTPUT_END = '>>> Start', '>>> End'"
PROFILES = """
class Profile:
    def get_test_cmd(self, instance):
        return "pytest --verbose", []
    def get_test_files(self, instance):
        return ["tests/b.py"], ["tests/a b.py", "tests/b.py"]
class registry:
    @staticmethod
    def get_from_inst(instance):
        return Profile()
"""
SMITH_GRADING = """
def get_eval_report(prediction, inst, test_log_path):
    return {"resolved": "PASSED" in open(test_log_path).read(), "by": "swesmith"}
"""


def test_an_instance_without_an_eval_script_is_graded_by_swesmith(tmp_path):
    """With a stand-in of the functions of swesmith 0.0.9; `long` runs the package itself."""
    package = tmp_path / "swesmith"
    (package / "harness").mkdir(parents=True)
    (package / "constants.py").write_text(SMITH_CONSTANTS)
    (package / "profiles.py").write_text(PROFILES)
    (package / "harness" / "grading.py").write_text(SMITH_GRADING)
    given = {"instance": {"instance_id": "i"}, "log": "a PASSED", "patch": "x"}
    answers = {}
    for what in ("script", "grade"):
        done = subprocess.run(
            [sys.executable, "-P", RUNNER, what], input=json.dumps(given), capture_output=True,
            text=True, check=True, env={"PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        answers[what] = json.loads(done.stdout)
    assert answers["script"]["script"].splitlines()[2:] == [
        "git checkout HEAD~1 -- 'tests/a b.py' tests/b.py",
        ": '>>> Start'",
        "pytest --verbose",
        ": '>>> End'",
    ]
    assert answers["grade"] == {"resolved": True, "by": "swesmith"}
