"""The wheel has the compiled part where there is a C compiler, and works without one."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILED = "bridle/engines/_core.abi3.so"


def built(folder, **environment):
    """Build a wheel into a folder; its path, and the names of its files."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        env=os.environ | environment,
        check=True,
        capture_output=True,
    )
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        return wheel, content.namelist()


def test_one_wheel_of_this_platform_has_the_compiled_part_for_all_pythons(tmp_path):
    wheel, names = built(tmp_path)
    is_compiled = (ROOT / "src" / COMPILED).exists()  # as `make setup` found
    assert (COMPILED in names) == is_compiled
    assert ("-cp311-abi3-" in wheel.name) == is_compiled


def test_a_wheel_without_a_compiler_is_pure_python(tmp_path):
    wheel, names = built(tmp_path, PATH=str(tmp_path))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in names if name.endswith(".so")]
    assert "bridle/engines/vllm.py" in names
