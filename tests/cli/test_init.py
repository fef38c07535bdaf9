"""First steps: `bridle init` writes a task, for agents of one's own too; `bridle demo`."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from examples.demo.main import Part, harnesses_part, light_agent_command, show_part, show_tree

from bridle.cli.init import find_agent
from bridle.cli.terminal import console
from bridle.datasets.jsonl import load_tasks
from bridle.errors import ConfigError
from bridle.scripted.script import load_script

ROOT = Path(__file__).resolve().parents[2]
AGENT = "import my_helper\n" + (ROOT / "examples" / "my_agent.py").read_text()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with an agent, a module of its own and a virtual environment."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "my_agent.py").write_text(AGENT)
    (folder / "pyproject.toml").write_text("")
    venv.create(folder / ".venv", symlinks=True)
    (site,) = (folder / ".venv").glob("lib/*/site-packages")
    (site / "my_helper.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return folder


def test_init_task_runs_an_agent_of_a_virtual_environment_in_the_sandbox(say, project):
    said = say("init", "mine", "--agent", "project/my_agent.py", "--json")
    assert said.code == 0, said.out + said.err
    assert "proved: 1 scripted model call(s) answered" in said.err
    made = sorted(path.name for path in (project.parent / "mine" / "hello").iterdir())
    assert made == ["score.py", "script.json", "task.toml"]
    assert sorted(Path(one).name for one in said.json["files"]) == made
    command = said.json["command"].split()
    ran = say(*command[1:], "--out", "run", "--json")
    assert [line["reward"] for line in ran.json["sessions"]] == [1.0]


def test_init_and_doctor_show_the_error_of_an_agent_that_does_not_start(say, project):
    (project / "my_agent.py").write_text("import no_such_module")
    said = say("init", "mine", "--agent", "project/my_agent.py")
    assert said.code == 1
    assert "No module named 'no_such_module'" in said.out
    assert "now run" not in said.out
    (finding,) = say("doctor", "mine", "--json").json
    assert not finding["ok"]
    assert "no_such_module" in finding["advice"]


def test_init_finds_the_interpreter_and_the_folders_that_an_agent_needs(
    project, tmp_path, monkeypatch
):
    found = find_agent("project/my_agent.py:ask")
    assert found.agent["harness"] == "function"
    assert found.agent["settings"] == {"python": str(project / ".venv/bin/python")}
    assert str(project) in found.binds
    assert not any(one.startswith("/usr") for one in found.binds)
    monkeypatch.chdir(project)
    through_uv = find_agent("uv run my_agent.py {instruction}")
    start = f"{project}/.venv/bin/python {project}/my_agent.py '{{instruction}}'"
    assert through_uv.agent["command"] == start
    assert find_agent(".venv/bin/python my_agent.py {instruction}") == through_uv


def test_init_binds_the_folder_of_a_python_link_that_leads_to_another_link(say, project, tmp_path):
    """Python 3.13 makes such an environment where `python3` itself is a link."""
    python = project / ".venv" / "bin" / "python"
    link = tmp_path / "links" / "python3"
    link.parent.mkdir()
    link.symlink_to(python.resolve())
    python.unlink()
    python.symlink_to(link)

    said = say("init", "mine", "--agent", "project/my_agent.py")

    assert said.code == 0, said.out + said.err
    assert str(link.parent) in find_agent("project/my_agent.py").binds


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        ("gone.py", "there is no file"),
        ("no_such_program --x", "no program 'no_such_program' on PATH"),
        ("a 'b", "No closing quotation"),
        ("uvp/agent.py", "run `uv sync` there"),
        ("nodep/agent.js", "run `npm install` there"),
        ("agent.py", "move the agent to a folder of its own"),
    ],
)
def test_an_agent_that_cannot_be_found_is_refused_with_advice(tmp_path, monkeypatch, agent, why):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("agent.py", "uvp/agent.py", "uvp/uv.lock", "nodep/agent.js"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "nodep" / "package.json").write_text(json.dumps({"dependencies": {"x": "1"}}))
    with pytest.raises(ConfigError, match=why):
        find_agent(agent)


def test_the_folder_that_init_makes_is_a_task_set_and_the_script_it_prints_exists(say, tmp_path):
    said = say("init", tmp_path / "mine")

    command = said.out.replace("\n", " ").split()
    script = command[command.index("--engine") + 1].removeprefix("scripted:")
    assert said.code == 0
    assert [task.task_id for task in load_tasks(tmp_path / "mine")] == ["hello"]
    assert load_script(tmp_path / script).conversations


def test_init_on_an_existing_task_folder_is_refused_and_changes_nothing(say, tmp_path):
    say("init", tmp_path)
    (tmp_path / "hello" / "task.toml").write_text("mine")

    said = say("init", tmp_path)

    assert said.code == 2
    assert (tmp_path / "hello" / "task.toml").read_text() == "mine"


def test_init_names_a_folder_that_cannot_be_created(say, tmp_path):
    (tmp_path / "mine").write_text("a file")

    said = say("init", tmp_path / "mine")

    assert said.code == 2
    assert str(tmp_path / "mine") in said.err


def test_demo_refuses_an_output_folder_that_is_no_earlier_demo(say, tmp_path):
    (tmp_path / "precious").write_text("mine")

    said = say("demo", "--out", tmp_path)

    assert said.code == 2
    assert "not an earlier demo" in said.err
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.timeout(120)
def test_wheel_contains_the_demo(tmp_path):
    """Built from the checkout; the demo that is loaded is the wheel's own."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "installed")
    code = (
        "from importlib import import_module; from bridle.cli.init import load_demo;"
        "demo = load_demo();"
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


def test_light_agent_of_the_demo_starts_with_the_current_python():
    assert light_agent_command().startswith(sys.executable)


def test_demo_prints_sessions_token_balance_and_conversation_tree(finished_run):
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
def test_demo_tasks_are_solved_by_pi_and_mini_swe_agent_and_every_captured_token_trains(tmp_path):
    part = harnesses_part(tmp_path, 2)

    assert sorted(line["harness"] for line in part.sessions) == ["mini_swe_agent"] * 2 + ["pi"] * 2
    for line in part.sessions:
        assert (line["status"], line["reward"], line["merge_ratio"]) == ("COMPLETED", 1.0, 1.0)
        assert line["tokens_captured"] == line["tokens_trained"] > 0
