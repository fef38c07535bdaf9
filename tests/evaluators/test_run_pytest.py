"""Starts of pytest that no module of the work can take the place of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridle.evaluators.base import RUN_PYTEST, start_pytest

SPAWNED = """
import concurrent.futures, multiprocessing
def double(number):
    return 2 * number
def test_it():
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        assert pool.submit(double, 2).result() == 4
"""
PATCH = "git apply - <<'EOF_1'\n-run python -m pytest here\n+pytest\nEOF_1\n"


def run(folder, *words, start=(), **env):
    """Run pytest on the tests of a folder by the program; what it printed."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, *start, str(RUN_PYTEST), "-q", "-p", "no:cacheprovider", *words],
        cwd=folder, env={**own, **env}, capture_output=True, check=False, text=True,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("command", "changed"),
    [
        ("python -m pytest t.py", "python RUN t.py"),
        ("cd a && /opt/py/bin/python3.9 -B -X dev -m  pytest -rA", None),
        ('"$VENV/bin/python" -m pytest', '"$VENV/bin/python" RUN'),
        (f"{PATCH}python -m pytest", f"{PATCH}python RUN"),
    ],
)
def test_python_m_pytest_in_a_command_is_replaced_by_our_runner(command, changed):
    changed = changed or "cd a && /opt/py/bin/python3.9 -B -X dev RUN -rA"
    assert start_pytest(command, "RUN") == changed


@pytest.mark.parametrize(
    "command",
    [
        *("pytest t.py", "python -m pytest.foo", "python -m pytest-3", PATCH),
        *("coverage run -m pytest", "su nobody -c 'python -m pytest'"),
    ],
)
def test_a_command_without_python_m_pytest_is_unchanged(command):
    assert start_pytest(command, "RUN") == command


@pytest.mark.parametrize(
    ("place", "path"), [(".", ""), ("src", "src"), ("..", ".."), (".", os.curdir)]
)
@pytest.mark.parametrize("name", ["pytest.py", "pluggy.py"])
def test_a_module_of_the_work_folder_named_pytest_or_pluggy_is_not_imported(
    tmp_path, name, place, path
):
    work = tmp_path / "work" / "tests"
    (work / "src").mkdir(parents=True)
    (work / place / name).write_text("raise SystemExit('forged')")
    (work / place / "mine.py").write_text("")
    (work / "test_it.py").write_text("import mine\ndef test_it(): pass")
    assert "1 passed" in run(work, PYTHONPATH=path)


def test_a_test_file_that_spawns_processes_runs_once(tmp_path):
    (tmp_path / "test_it.py").write_text(SPAWNED)
    assert "1 passed" in run(tmp_path)


def test_python_in_isolated_mode_does_not_import_from_the_work_folder(tmp_path):
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "test_it.py").write_text("def test_it():\n    import mine")
    assert "No module named 'mine'" in run(tmp_path, "--import-mode=importlib", start=("-I",))


def test_pytest_installed_on_pythonpath_in_the_work_folder_is_found(tmp_path):
    (tmp_path / "site").mkdir()
    installed = Path(pytest.__file__).parents[1]
    for name in ("pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments"):
        (tmp_path / "site" / name).symlink_to(installed / name)
    (tmp_path / "test_it.py").write_text("def test_it(): pass")
    assert "1 passed" in run(tmp_path, start=("-S",), PYTHONPATH="site")
