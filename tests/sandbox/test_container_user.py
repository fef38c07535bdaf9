"""The escape suite of Docker once more as an ordinary user of the container."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sandbox.conftest import CONTAINER_USER

PYTEST = ("-m", "pytest", "-q", "--no-skips", "--timeout=120", "-m", "sandbox", "-k", "docker")

pytestmark = pytest.mark.sandbox


@pytest.mark.timeout(600)
def test_the_docker_escape_suite_passes_as_an_unprivileged_container_user():
    suite = [Path(__file__).with_name(name) for name in ("test_escapes.py", "test_profile.py")]
    done = subprocess.run(
        [sys.executable, *PYTEST, *suite],
        env={**os.environ, CONTAINER_USER: "1000:1000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
