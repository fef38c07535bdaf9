"""The escape suite of `bubblewrap` once more as an ordinary user, where the tests run as root."""

import os
import subprocess

import pytest
from tests.sandbox.ordinary import a_user

pytestmark = pytest.mark.sandbox


@pytest.mark.timeout(600)
def test_the_bubblewrap_escape_suite_passes_as_an_unprivileged_user():
    if os.geteuid() != 0:
        return  # all tests here run as one
    with a_user() as (python, place):
        checkout = place / "checkout"
        suite = checkout / "tests/sandbox/test_escapes.py"
        done = subprocess.run(
            [
                *(*python, "-m", "pytest", "-q", "--no-skips"),
                *("-c", checkout / "pyproject.toml", "--rootdir", checkout),
                *("--basetemp", place / "scratch/pytest", "-o", f"cache_dir={place}/scratch/cache"),
                *("--timeout=120", "-m", "sandbox", "-k", "bubblewrap", suite),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
