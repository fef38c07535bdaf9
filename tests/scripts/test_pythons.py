"""scripts/pythons knows what pyproject.toml declares, and finds it."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def shell(line):
    """Words, complaints and exit code of a line after scripts/pythons is sourced."""
    done = subprocess.run(
        ["bash", "-uc", f". scripts/pythons; {line}"],
        cwd=ROOT,
        env={"PATH": f"{Path(sys.executable).parent}{os.pathsep}/usr/bin{os.pathsep}/bin"},
        capture_output=True,
        check=False,
        text=True,
    )
    return done.stdout.split(), done.stderr, done.returncode


def test_declared_pythons_are_those_of_the_pyproject_classifiers():
    named = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if " :: 3." in one]

    assert shell("declared_pythons")[0] == [f"python{version}" for version in named]
    assert len(named) >= 3


def test_a_python_is_found_by_name_and_a_missing_python_is_reported():
    own = f"python{sys.version_info.major}.{sys.version_info.minor}"

    assert shell(f"find_python {own}")[0] == [str(Path(sys.executable).parent / own)]
    _, said, code = shell("find_python python3.99")
    assert code != 0
    assert "python3.99 is not installed" in said
