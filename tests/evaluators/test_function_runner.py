import json
import subprocess
import sys

from bridle.evaluators.function import RUNNER


def test_runner_prints_only_the_return_value_of_the_function_to_stdout():
    done = subprocess.run(
        [sys.executable, "-P", RUNNER, "json:dumps"], input='{"a": 1}', capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    assert json.loads(json.loads(done.stdout)) == {"a": 1}
    assert done.stderr == ""
