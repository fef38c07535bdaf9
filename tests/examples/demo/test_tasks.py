"""The demo task set is real: every checker refuses the start and accepts the solution."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from examples.demo.tasks import MAKERS, demo_script, demo_tasks, write_task

from bridle.config import Task

EXAMPLES = Path(__file__).parents[3] / "examples" / "demo-tasks"


def run(command: str, cwd: Path, env: dict[str, str]) -> int:
    done = subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=os.environ | env, capture_output=True, check=False
    )
    return done.returncode


@pytest.mark.parametrize("task", demo_tasks(), ids=lambda task: task.task_id)
def test_each_demo_task_s_checker_fails_before_and_passes_after_the_solution(task, tmp_path):
    home = write_task(task, tmp_path)
    spec = tomllib.loads((home / "task.toml").read_text())
    setup, env = spec["runtime"]["prepare"][1]["command"], spec["runtime"]["env"]
    work = tmp_path / "work"
    shutil.copytree(home / "files", work)
    assert run(setup, work, env) == 0
    shutil.copy(home / "check.sh", work / ".check.sh")

    before = run("bash .check.sh", work, env)
    solved = run(f"bash {home}/solution.sh", work, env)
    after = run("bash .check.sh", work, env)

    assert before != 0
    assert (solved, after) == (0, 0)


def test_the_demo_task_set_has_40_or_more_tasks_and_is_determined_by_the_seed():
    tasks = demo_tasks()

    assert len({task.task_id for task in tasks}) == len(tasks) >= 40
    assert len(MAKERS) >= 10
    assert tasks == demo_tasks()
    assert [t.instruction for t in tasks] != [t.instruction for t in demo_tasks(seed=1)]


def test_a_written_demo_task_is_a_valid_task_file(tmp_path):
    for task in demo_tasks(11):
        home = write_task(task, tmp_path)
        spec = Task.model_validate(tomllib.loads((home / "task.toml").read_text()))

        assert spec.task_id == task.task_id
        assert spec.evaluator.strategy == "command"


def test_the_shipped_demo_tasks_equal_the_generated_ones(tmp_path):
    for task in demo_tasks():
        write_task(task, tmp_path)
    made = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    shipped = {p.relative_to(EXAMPLES): p.read_bytes() for p in EXAMPLES.rglob("*") if p.is_file()}
    shipped.pop(Path("README.md"))

    assert shipped == made


def test_the_demo_script_has_a_conversation_per_task_for_each_of_two_harnesses():
    tasks = demo_tasks(3)
    conversations = demo_script(tasks)["conversations"]

    assert len(conversations) == 2 * len(tasks)
    for pi, mini in zip(conversations[::2], conversations[1::2], strict=True):
        assert pi["when"]["tools_include"] == "edit"
        assert "shell" not in pi["turns"][-1]
        assert "COMPLETE_TASK" in mini["turns"][-2]["shell"][0]
