"""`bridle run` in this process; as a process of its own it is in tests/e2e."""

import json
from pathlib import Path

import pytest

HARBOR = Path(__file__).parents[2] / "examples" / "harbor-tasks"


def test_overrides_apply_to_every_task_and_the_run_folder_says_so(say, finished_run, tmp_path):
    tasks = finished_run.parent / "tasks.jsonl"
    script = finished_run.parent / "script.json"

    said = say(
        "run", tasks, "--engine", f"scripted:{script}", "--out", tmp_path / "run", "--samples", 2,
        "--first", 1, "--builder", "per_request", "--concurrency", 2,
        "--stream", "live", "--prompt", "engine",
    )  # fmt: skip

    assert said.code == 0
    assert "2 sessions" in said.out
    assert "mean reward 1.000 over 2 scored of 2" in said.out
    config = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert (config["concurrency"], config["stream"], config["prompt"]) == (2, "live", "engine")
    assert [task["num_samples"] for task in config["tasks"]] == [2]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [line["traces"] for line in summary["sessions"]] == [2, 2]


def test_a_template_stands_around_every_instruction(say, finished_run, tmp_path):
    (tmp_path / "around.txt").write_text("Be quick.\n{{ instruction }}")
    script = finished_run.parent / "script.json"
    said = say(
        "run", finished_run.parent / "tasks.jsonl", "--engine", f"scripted:{script}", "--first", 1,
        "--template", tmp_path / "around.txt", "--out", tmp_path / "run",
    )  # fmt: skip
    assert said.code == 0
    (task,) = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["tasks"]
    assert task["instruction"].startswith("Be quick.\n")


def test_a_run_without_success_ends_with_code_1_and_unknown_reward(say, finished_run, tmp_path):
    task = {
        "task_id": "none",
        "instruction": "nothing",
        "agent": {"harness": "command", "command": "true"},
    }
    (tmp_path / "task.json").write_text(json.dumps(task))

    said = say(
        "run", tmp_path / "task.json", "--engine",
        f"scripted:{finished_run.parent / 'script.json'}", "--out", tmp_path / "run",
    )  # fmt: skip

    assert said.code == 1
    assert "harness_no_call" in said.out
    assert "mean reward unknown" in said.out


@pytest.mark.parametrize(("harness", "mean"), [("oracle", "1.000"), ("empty", "0.000")])
def test_a_task_set_is_checked_without_an_engine(say, tmp_path, harness, mean):
    said = say(
        "run", HARBOR, "--harness", harness, "--runtime", "local", "--network", "open",
        "--first", 2, "--out", tmp_path / "run", "--report",
    )  # fmt: skip
    assert said.code == 0
    assert "pass@1" in said.out
    assert "harbor-tasks" in said.out
    assert f"mean reward {mean} over 2 scored of 2" in said.out
