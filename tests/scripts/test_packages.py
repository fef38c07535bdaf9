"""scripts/packages: uv installs, and pip where it has a package index of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USE = f"set -euo pipefail; . {ROOT}/scripts/packages; uv_installed; install .venv --no-deps six"
PYTHON = f"""#!/bin/sh
# Lists pip's configuration, and notes what pip is to install.
case "$*" in
*"pip config list") exec {sys.executable} "$@" ;;
*requirements/uv.txt)
  printf '#!/bin/sh\necho uv "$@" >>installed\n' >.venv/bin/uv
  chmod +x .venv/bin/uv ;;
*) echo pip "$@" >>installed ;;
esac
"""


@pytest.fixture
def installed(tmp_path):
    """Installs one package with these variables of pip; returns the command that did it."""

    def call(**variables):
        python = tmp_path / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON)
        python.chmod(0o755)
        subprocess.run(
            ["bash", "-c", USE],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **variables},
            check=True,
        )
        return (tmp_path / "installed").read_text().split()

    return call


def test_packages_are_installed_with_uv_by_default(installed):
    command = installed(PIP_CONFIG_FILE=os.devnull)
    assert command[:3] == ["uv", "pip", "install"]
    assert command[-2:] == ["--no-deps", "six"]


def test_packages_are_installed_with_pip_when_pip_has_its_own_index(installed):
    command = installed(PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert command[:4] == ["pip", "-m", "pip", "install"]
    assert command[-2:] == ["--no-deps", "six"]
