"""Calls the sets' own packages: `python swebench_runner.py script|grade`, JSON on stdin and stdout.

`script` gives the instance's evaluation script, `grade` the report on a log. An instance with an
`eval_script` is for the package `swebench` (5.0 or later), any other for `swesmith`. Runs with any
Python that has the package; it knows nothing of Bridle.
"""

import json
import shlex
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

Instance = dict[str, Any]


def swebench_script(instance: Instance) -> str:
    """Return the shell script that runs the tests of a SWE-bench instance."""
    from swebench.harness.utils import make_test_spec

    return str(make_test_spec(instance).eval_script)


def swebench_report(instance: Instance, prediction: Instance, log: str) -> Instance:
    """Return SWE-bench's report on a prediction, from the log of the instance's tests."""
    from swebench.harness.grading import get_eval_report
    from swebench.harness.utils import make_test_spec

    spec = make_test_spec(instance)
    report = get_eval_report(spec, prediction, log, include_tests_status=True)
    return dict(report[spec.instance_id])


def swesmith_script(instance: Instance) -> str:
    """Return the shell script that runs the tests of a SWE-smith instance, as before the last
    commit.
    """
    from swesmith.constants import TEST_OUTPUT_END, TEST_OUTPUT_START
    from swesmith.profiles import registry

    profile = registry.get_from_inst(instance)
    command, _ = profile.get_test_cmd(instance)
    files = sorted({str(file) for some in profile.get_test_files(instance) for file in some})
    lines = ["#!/bin/bash", "set -uxo pipefail", f"git checkout HEAD~1 -- {shlex.join(files)}"]
    return "\n".join([*lines, f": '{TEST_OUTPUT_START}'", command, f": '{TEST_OUTPUT_END}'", ""])


def swesmith_report(instance: Instance, prediction: Instance, log: str) -> Instance:
    """Return SWE-smith's report on a prediction, from the log of the instance's tests."""
    from swesmith.harness.grading import get_eval_report

    return dict(get_eval_report(prediction, instance, log))


def main() -> None:
    """Print, as JSON, the test script or the report of the instance on stdin."""
    with redirect_stdout(sys.stderr):
        given = json.load(sys.stdin)
        instance = given["instance"]
        by_row = "eval_script" in instance
        if sys.argv[1] == "script":
            script = swebench_script if by_row else swesmith_script
            answer: Instance = {"script": script(instance)}
        else:
            prediction = {"instance_id": instance["instance_id"], "model_patch": given["patch"]}
            prediction["model_name_or_path"] = "bridle"
            report = swebench_report if by_row else swesmith_report
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder, "log.txt")
                log.write_text(given["log"], encoding="utf-8")
                answer = report(instance, prediction, str(log))
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
