"""scripts/setup makes .venv with the interpreter that is asked for."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
# Says a version, and makes environments that have only itself.
case "$*" in
"-m venv "*) mkdir -p "$3/bin" && ln -s "{path}" "$3/bin/python" ;;
*print*) echo {version} ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    for name in (
        *("scripts/setup", "scripts/packages", "pyproject.toml", "requirements"),
        *("hatch_build.py", "src/bridle/engines/_core.c"),
    ):
        place = tmp_path / "checkout" / name
        place.parent.mkdir(exist_ok=True, parents=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, place)
    return tmp_path / "checkout"


def a_python(folder, version):
    path = folder / f"python{version}"
    path.write_text(PYTHON.format(path=path, version=version))
    path.chmod(0o755)
    return path


def set_up(checkout, python=None):
    wanted = {} if python is None else {"BRIDLE_PYTHON": str(python)}
    ran = subprocess.run(
        ["scripts/setup"],
        cwd=checkout,
        env={"PATH": os.environ["PATH"], **wanted},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ran.stdout.splitlines()


def test_setup_recreates_the_venv_only_for_another_interpreter(checkout, tmp_path):
    old, new = a_python(tmp_path, "3.11"), a_python(tmp_path, "3.13")
    of_a_suite = checkout / ".cache/some-venv"
    assert set_up(checkout, old) == ["setup: installing core into .venv"]
    of_a_suite.mkdir()
    assert set_up(checkout, old) == []
    assert of_a_suite.is_dir()
    assert set_up(checkout, new) == [
        f"setup: making .venv anew with {new}",
        "setup: installing core into .venv",
    ]
    assert (checkout / ".venv/bin/python").readlink() == new
    assert not of_a_suite.exists()
    assert set_up(checkout) == []
