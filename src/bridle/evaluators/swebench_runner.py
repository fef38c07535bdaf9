"""Calls the package `swebench`: `python swebench_runner.py script|grade`, JSON on stdin and stdout.

`script` gives the instance's evaluation script, `grade` the package's report on a log. Runs with
any Python that has the package; it knows nothing of Bridle.
"""

import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path


def main() -> None:
    """Do what the command line says."""
    with redirect_stdout(sys.stderr):
        given = json.load(sys.stdin)
        from swebench.harness.grading import get_eval_report
        from swebench.harness.utils import make_test_spec

        spec = make_test_spec(given["instance"])
        if sys.argv[1] == "script":
            answer = {"script": spec.eval_script}
        else:
            name = spec.instance_id
            prediction = {"instance_id": name, "model_patch": given["patch"]}
            prediction["model_name_or_path"] = "bridle"
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder, "log.txt")
                log.write_text(given["log"], encoding="utf-8")
                answer = get_eval_report(spec, prediction, str(log), include_tests_status=True)[
                    name
                ]
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
