import json
import subprocess
import sys

from tests.evaluators.test_swebench import GRADING, UTILS

from bridle.evaluators.swebench import RUNNER


def test_what_the_package_prints_is_kept_from_what_it_returns(tmp_path):
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
