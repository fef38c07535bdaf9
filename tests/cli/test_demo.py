"""The demo's verb and its first part; all of it is run by CI as `make demo`."""

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from examples.demo.main import Part, harnesses_part, light_agent_command, show_part, show_tree

from bridle.cli.output import console

ROOT = Path(__file__).parents[2]


def test_a_folder_that_is_no_demos_is_not_touched(say, tmp_path):
    (tmp_path / "precious").write_text("mine")

    said = say("demo", "--out", tmp_path)

    assert said.code == 2
    assert "not an earlier demo" in said.err
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.timeout(120)
def test_a_wheel_brings_the_demo(tmp_path):
    """Built from the checkout; the demo that is loaded is the wheel's own."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "installed")
    code = (
        "from importlib import import_module; from bridle.cli.demo import load; demo = load();"
        "parts = 'model', 'policy', 'training', 'recipe', 'tasks', 'demonstrations';"
        "[import_module(f'{demo.__package__}.{part}') for part in parts];"
        "print(demo.__file__, callable(demo.run))"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.stdout.split() == [
        str(tmp_path / "installed" / "bridle" / "assets" / "demo" / "main.py"),
        "True",
    ], done.stderr


def test_the_light_agent_is_started_with_this_python():
    assert light_agent_command().startswith(sys.executable)


def test_a_part_shows_its_sessions_and_law_2(finished_run):
    sessions = json.loads((finished_run / "summary.json").read_text())["sessions"]
    written, before = io.StringIO(), console.file
    console.file = written
    try:
        show_part(Part(finished_run, sessions, 1.0))
        show_tree(Part(finished_run, sessions, 1.0))
    finally:
        console.file = before

    assert "3 sessions in 1 s" in written.getvalue()
    assert "excluded 0: holds" in written.getvalue()
    assert "root: first" in written.getvalue()


@pytest.mark.harnesses
@pytest.mark.timeout(1800)
def test_both_real_harnesses_solve_their_jobs_and_nothing_is_lost(tmp_path):
    part = harnesses_part(tmp_path, 2)

    assert sorted(line["harness"] for line in part.sessions) == ["mini_swe_agent"] * 2 + ["pi"] * 2
    for line in part.sessions:
        assert (line["status"], line["reward"], line["merge_ratio"]) == ("COMPLETED", 1.0, 1.0)
        assert line["tokens_captured"] == line["tokens_trained"] > 0
