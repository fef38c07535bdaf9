"""Rows of the sets, graded by the sets' own packages from the package index."""

import json
import subprocess
import sys

import pytest
from tests.datasets.test_swe import CLASSIC, GYM, MULTILINGUAL, REBENCH, SMITH

from bridle.datasets.swe import swe_task
from bridle.evaluators.patch import RUNNER

pytestmark = pytest.mark.long

NEEDED = {
    "swebench": ["swebench==5.0.2"],
    "swesmith": ["swesmith==0.0.9", "swebench==4.1.0", "ghapi", "unidiff", "python-dotenv"],
}


@pytest.fixture(scope="module")
def pythons(tmp_path_factory):
    found = {}
    for name, packages in NEEDED.items():
        folder = tmp_path_factory.mktemp(name)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        found[name] = folder / "bin" / "python"
        subprocess.run([found[name], "-m", "pip", "install", "-q", *packages], check=True)
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("row", "package", "line"),
    [
        (CLASSIC, "swebench", "{name} ... {ok}"),
        (GYM, "swebench", "{status} {name}"),
        (REBENCH, "swebench", "{status} {name}"),
        (MULTILINGUAL, "swebench", "[{ok}]: {name} (1 ms)"),
        (SMITH, "swesmith", "{name} {status} [ 50%]"),
    ],
)
def test_each_dataset_row_is_graded_by_the_real_package_of_its_dataset(pythons, row, package, line):
    instance = swe_task(row, "rows:1")["evaluator"]["config"]["instance"]

    def ask(what, **more):
        said = subprocess.run(
            [pythons[package], "-P", RUNNER, what], text=True, capture_output=True, check=True,
            input=json.dumps({"instance": instance, **more}),
        )  # fmt: skip
        return json.loads(said.stdout)

    script = ask("script")["script"]
    assert script.count(": '>>>>> Start Test Output'\n") == 1
    first, *others = instance["FAIL_TO_PASS"] + instance["PASS_TO_PASS"]
    for status, ok in (("PASSED", "ok"), ("FAILED", "FAIL")):
        lines = [line.format(name=first, status=status, ok=ok)]
        lines += [line.format(name=name, status="PASSED", ok="ok") for name in others]
        marks = (f"+ : '>>>>> {word} Test Output'" for word in ("Start", "End"))
        log = "\n".join([next(marks), *lines, next(marks), ""])
        assert ask("grade", log=log, patch="x")["resolved"] is (status == "PASSED")
