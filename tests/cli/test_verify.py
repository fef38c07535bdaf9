"""Manifests of verified tasks, with tasks in runtime `local`."""

import json

import pytest

from bridle.config import AgentSpec, Task
from bridle.datasets.jsonl import load_tasks, require_verified, task_digest
from bridle.errors import ConfigError
from bridle.server.settings import ServerSettings, SubmissionPolicy


@pytest.fixture
def tasks(tmp_path):
    """A sound task, one whose solution works once, and one whose solution does nothing.

    They have a harness of their own, which takes no part in their verification.
    """
    folder = tmp_path / "tasks"
    solutions = {
        "sound": "echo right > out.txt",
        "flaky": f"mkdir {tmp_path}/once && echo right > out.txt || true",
        "idle": "true",
    }
    for name, line in solutions.items():
        (folder / name / "solution").mkdir(parents=True)
        (folder / name / "solution" / "solve.sh").write_text(line + "\n")
        task = {
            "task_id": name,
            "instruction": "Write right.",
            "agent": {"harness": "command", "command": "false"},
            "runtime": {"backend": "local"},
            "evaluator": {"strategy": "command", "config": {"command": "grep -q right out.txt"}},
        }
        (folder / name / "task.json").write_text(json.dumps(task))
    return folder


def rows_of(manifest):
    return {row["task"]: row for row in map(json.loads, manifest.read_text().splitlines())}


def test_verify_writes_each_verdict_to_the_manifest_and_repeats_only_changed_tasks(
    tasks, say, tmp_path
):
    manifest = tmp_path / "manifest.jsonl"
    assert say("tasks", "verify", tasks, "--manifest", manifest, "--json").code == 1
    rows = rows_of(manifest)
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "sound": "sound",
        "flaky": "oracle is not 1 each time",
        "idle": "oracle is not 1",
    }
    assert all(row["seconds"] > 0 and len(row["digest"]) == 64 for row in rows.values())
    before = manifest.read_text()
    again = say("tasks", "verify", tasks, "--manifest", manifest, "--json")
    assert (again.code, manifest.read_text()) == (1, before)
    (tasks / "idle" / "solution" / "solve.sh").write_text("echo right > out.txt\n")
    say("tasks", "verify", tasks, "--manifest", manifest)
    assert rows_of(manifest)["idle"]["verdict"] == "sound"
    assert len(manifest.read_text().splitlines()) == 4


SUMMARY = "=== short test summary info ===\nFAILED t.py::a - no\n=== 1 failed in 0.01s ==="


@pytest.mark.parametrize(
    ("command", "detail"),
    [
        (f"echo '{SUMMARY}'; exit 1", "reward 0.0, COMPLETED: t.py::a"),
        ("test ! -e out.txt || exit 3", "the tests ended with code 3 and name no failure"),
    ],
)
def test_the_detail_of_a_verdict_says_what_the_evaluator_found(tasks, say, command, detail):
    path = tasks / "sound" / "task.json"
    task = json.loads(path.read_text())
    task["runtime"]["prepare"] = [{"type": "exec", "command": "git init -q"}]
    task["evaluator"] = {"strategy": "test_on_output"}
    task["evaluator"]["config"] = {"command": command, "fail_to_pass": ["t.py::a"]}
    path.write_text(json.dumps(task))
    (row,) = say("tasks", "verify", tasks / "sound", "--json").json
    assert row["verdict"] == "oracle is not 1"
    assert detail in row["detail"]


@pytest.mark.parametrize(
    ("solution", "budgets", "config", "verdict"),
    [
        ("true", {}, {"command": "sleep 600", "timeout_s": 1}, "out of time"),
        ("true", {"evaluate_s": 1}, {"command": "sleep 600"}, "out of time"),
        ("sleep 600", {"agent_s": 1}, {"command": "false"}, "out of time"),
        (
            "true",
            {},
            {"command": "mkdir PLACE/once && sleep 600; false", "timeout_s": 5},
            "oracle is not 1",
        ),
    ],
    ids=["tests", "evaluation", "solution", "tests that fail, too"],
)
def test_a_task_that_only_times_out_has_the_verdict_out_of_time(
    tasks, say, tmp_path, solution, budgets, config, verdict
):
    path = tasks / "sound" / "task.json"
    task = json.loads(path.read_text())
    task |= {"budgets": budgets, "evaluator": {"strategy": "command", "config": config}}
    path.write_text(json.dumps(task).replace("PLACE", str(tmp_path)))
    (tasks / "sound" / "solution" / "solve.sh").write_text(solution)
    (row,) = say("tasks", "verify", tasks / "sound", "--json").json
    assert row["verdict"] == verdict, row["detail"]


def test_a_run_with_a_manifest_refuses_tasks_that_are_not_verified_as_sound(tasks, say, tmp_path):
    manifest = tmp_path / "manifest.jsonl"
    say("tasks", "verify", tasks, "--manifest", manifest)
    words = ("--harness", "empty", "--verified", manifest, "--out")
    assert say("run", tasks / "sound", *words, tmp_path / "a").code == 0
    refused = say("run", tasks, *words, tmp_path / "b")
    assert refused.code != 0
    said = " ".join((refused.out + refused.err).split())
    assert "2 of 3 tasks are not verified as they are" in said
    assert "idle (oracle is not 1)" in said
    task = tasks / "sound" / "task.json"
    task.write_text(task.read_text().replace("Write right.", "Write wrong."))
    said = say("run", tasks / "sound", *words, tmp_path / "c")
    assert "sound (not verified)" in " ".join((said.out + said.err).split())


def test_a_training_refuses_tasks_and_held_out_tasks_that_are_not_verified(tasks, say, tmp_path):
    manifest = tmp_path / "manifest.jsonl"
    say("tasks", "verify", tasks, "--manifest", manifest)
    words = ("train", "--model", tmp_path, "--verified", manifest, "--out", tmp_path / "out")
    sound, idle = tasks / "sound", tasks / "idle"
    for chosen in (("--tasks", idle), ("--tasks", sound, "--held-out", idle)):
        refused = say(*words, *chosen)
        assert refused.code != 0
        said = " ".join((refused.out + refused.err).split())
        assert "1 of 1 tasks are not verified as they are" in said
        assert "idle (oracle is not 1)" in said


def test_a_server_with_a_manifest_accepts_only_verified_tasks(tmp_path):
    manifest = tmp_path / "manifest.jsonl"
    with pytest.raises(ConfigError, match="no such file"):
        ServerSettings(permits=SubmissionPolicy(verified=manifest)).checked()
    task = Task(task_id="one", instruction="Write.", agent=AgentSpec(harness="empty"))
    other = task.model_copy(update={"instruction": "Write more."})
    row = {"task": "one", "verdict": "sound", "digest": task_digest(task)}
    manifest.write_text(json.dumps(row) + "\n")
    policy = ServerSettings(permits=SubmissionPolicy(verified=manifest)).checked().permits

    assert dict(policy.refused(task.model_copy(update={"task_id": "own-name"}))) == {}
    assert "not verified" in dict(policy.refused(other))["task_id"]

    with manifest.open("a") as file:
        file.write(json.dumps(row | {"digest": task_digest(other), "verdict": "oracle is not 1"}))
    assert "oracle is not 1" in dict(policy.refused(other))["task_id"]


@pytest.mark.parametrize("changed", ["answer.txt", "scores.py", "tests/check.sh"])
def test_a_task_whose_file_has_changed_is_no_longer_verified(tmp_path, changed):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "check.sh").write_text("true")
    (tmp_path / "answer.txt").write_text("right")
    (tmp_path / "scores.py").write_text("def score(attempt):\n    return 1.0\n")
    part = {"strategy": "function", "config": {"function": "scores.py:score"}}
    uploads = [
        {"type": "upload_file", "source": "answer.txt", "target": "a"},
        {"type": "upload_dir", "source": "tests", "target": "t"},
    ]
    task = {
        "task_id": "one",
        "instruction": "Write.",
        "runtime": {"backend": "local", "eval_prepare": uploads},
        "evaluator": {"strategy": "composite", "config": {"parts": [part]}},
    }
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task))
    (verified,) = load_tasks(tmp_path / "tasks.jsonl")
    row = {"task": "one", "verdict": "sound", "digest": task_digest(verified)}
    (tmp_path / "manifest").write_text(json.dumps(row))
    require_verified([verified], tmp_path / "manifest")

    (tmp_path / changed).write_text("def score(attempt):\n    return 0.5\n")
    with pytest.raises(ConfigError, match=r"one .not verified."):
        require_verified([verified], tmp_path / "manifest")
