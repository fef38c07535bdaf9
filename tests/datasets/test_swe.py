import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bridle.datasets.jsonl import load_tasks
from bridle.datasets.swe import is_swe, swe_task
from bridle.errors import ConfigError
from bridle.evaluators import open_evaluator

PATCH = (
    "diff --git a/t/test_a.py b/t/test_a.py\n--- a/t/test_a.py\n+++ b/t/test_a.py\n@@ -1 +1 @@\n"
)
ROW = {
    "instance_id": "org__repo-12",
    "repo": "org/repo",
    "version": "1.0",
    "base_commit": "abc",
    "problem_statement": "It breaks.",
    "hints_text": "look there",
    "patch": "the solution",
    "test_patch": PATCH,
    "FAIL_TO_PASS": '["t/test_a.py::new"]',
    "PASS_TO_PASS": ["t/test_a.py::old"],
}
GRADED = {
    "image": "org/image:1",
    "eval_script": "pytest -rA",
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
}


def test_a_row_that_brings_its_script_is_graded_by_the_package(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({**ROW, **GRADED}) + "\n")
    (task,) = load_tasks(tmp_path / "rows.jsonl", overrides={"agent": {"harness": "pi"}})
    assert (task.task_id, task.instruction) == ("org__repo-12", "It breaks.")
    runtime = task.runtime
    assert (runtime.backend, runtime.image, runtime.workdir) == (
        "docker",
        "org/image:1",
        "/testbed",
    )
    assert (task.evaluator.strategy, task.evaluator.trusted) == ("swebench", False)
    instance = task.evaluator.config["instance"]
    assert instance["eval_script"] == "pytest -rA"
    assert "patch" not in instance
    assert task.metadata == {"repo": "org/repo", "version": "1.0", "base_commit": "abc"}


def test_any_other_row_is_graded_by_the_names_of_its_tests():
    task = swe_task(ROW, "rows:1")
    assert task["runtime"]["image"] == "swebench/sweb.eval.x86_64.org_1776_repo-12:latest"
    config = task["evaluator"]["config"]
    assert task["evaluator"]["strategy"] == "test_on_output"
    assert config["command"].endswith("python -m pytest -rA t/test_a.py")
    assert (config["fail_to_pass"], config["exclude"]) == (["t/test_a.py::new"], ["t/test_a.py"])
    assert (config["base"], config["test_patch"]) == ("abc", PATCH)


def test_what_it_makes_can_be_opened(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps([ROW, {**ROW, **GRADED, "instance_id": "b"}]))
    for task in load_tasks(tmp_path):
        assert callable(open_evaluator(task.evaluator).evaluate)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"FAIL_TO_PASS": "[]"}, "rows:1: FAIL_TO_PASS: names no test"),
        ({"PASS_TO_PASS": "no json"}, "PASS_TO_PASS: must be a list"),
        ({"FAIL_TO_PASS": [1]}, "FAIL_TO_PASS: must be a list"),
        ({"test_patch": None}, "test_patch: changes no file"),
    ],
)
def test_a_row_that_cannot_be_graded_is_named(changes, why):
    with pytest.raises(ConfigError, match=why):
        swe_task({**ROW, **changes}, "rows:1")


def test_a_task_is_no_row():
    assert is_swe(ROW)
    assert not is_swe({"task_id": "a", "instruction": "b"})
    assert not is_swe([])


def test_parquet_holds_rows_and_tasks_alike(tmp_path):
    task = {"task_id": "plain", "instruction": "x", "num_samples": 2, "repo": None}
    task["evaluator"] = json.dumps({"strategy": "command", "config": {"command": "true"}})
    task["metadata"] = "not json"
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "a.parquet")
    task.pop("metadata")
    pq.write_table(pa.Table.from_pylist([task | {"metadata": None}]), tmp_path / "b.parquet")
    first, second = load_tasks(tmp_path)
    assert (first.task_id, first.evaluator.strategy) == ("org__repo-12", "test_on_output")
    assert (second.num_samples, second.evaluator.config) == (2, {"command": "true"})


def test_a_mistake_in_parquet_is_named_with_its_row(tmp_path):
    rows = [{"task_id": "a", "instruction": "x", "metadata": "{"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet:1: metadata"):
        load_tasks(tmp_path)
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: cannot be read"):
        load_tasks(tmp_path)
