import json
import subprocess
import sys

from bridle.evaluators.function import RUNNER


def test_what_a_function_prints_is_kept_from_what_it_returns():
    done = subprocess.run(
        [sys.executable, "-P", RUNNER, "json:dumps"], input='{"a": 1}', capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    assert json.loads(json.loads(done.stdout)) == {"a": 1}
    assert done.stderr == ""
