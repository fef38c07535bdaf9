"""`python -m bridle.cli` is `bridle`."""

import subprocess
import sys


def test_the_module_runs_and_its_exit_code_is_the_command_lines():
    command = [sys.executable, "-m", "bridle.cli", "show", "nothing", "--run", "/nonexistent"]
    done = subprocess.run(command, capture_output=True, check=False, text=True)

    assert done.returncode == 2
    assert "no session" in done.stderr
