"""Two processes are one run: in its counts, its failures and its exit status."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOOD = "def test_one(): pass\n\ndef test_two(): pass\n"


@pytest.fixture
def told(tmp_path):
    """Runs pytest on one file with another beside it; the exit status and the output."""

    def run(source, *arguments):
        (tmp_path / "test_here.py").write_text(GOOD)
        there = str(tmp_path / "test_there.py")
        Path(there).write_text(source)
        settings = ("-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "tests.parts")
        beside = (f"--config-file={ROOT}/pyproject.toml", f"--rootdir={tmp_path}", there)
        command = [
            *(sys.executable, "-m", "pytest", *settings, "-o", f"cache_dir={tmp_path}/cache"),
            *(tmp_path, f"--beside={' '.join([*beside, *arguments])}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        return done.returncode, done.stdout

    return run


def test_the_closing_line_counts_the_tests_of_both(told):
    status, output = told(GOOD + "\ndef test_other(): pass\n", "-k", "'not other'")
    assert status == 0
    assert output.splitlines()[-1].startswith("=")
    assert " 4 passed, 1 deselected in " in output.splitlines()[-1]


def test_a_failure_beside_is_a_failure_of_the_run_with_its_trace(told):
    status, output = told(GOOD + "\ndef test_sum():\n    assert 1 + 1 == 3\n")
    assert status == 1
    assert "assert (1 + 1) == 3" in output
    assert "test_there.py::test_sum" in output
    assert " 1 failed, 4 passed in " in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import os\nos.write(2, b'no more')\nos._exit(0)", "ended before its last test"),
        ("def test_it():\n    import os\n    os._exit(7)", "ended with code 7"),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
    ],
)
def test_a_process_that_does_not_end_after_its_tests_is_an_error(told, source, why):
    status, output = told(source)
    assert status == 1
    assert why in output
    assert " error in " in output.splitlines()[-1]
