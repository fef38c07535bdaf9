"""Costs of learning curves, and the benchmarks of teachers and trees up to their tables."""

import json
import math
import random

import pytest
from benchmarks.choices import Table
from benchmarks.curves import Results, at_cost, interval, reached
from benchmarks.teacher import main as teach
from benchmarks.trees import DECISIVE, OUT, TURNS, WAYS, demonstration, walks
from benchmarks.trees import main as grow_trees
from tests.cli.models import untrained

from bridle.cli.run import BatchRun, run_batch

CURVE = [
    {"success": 0.2, "sampled": 0},
    {"success": 0.4, "sampled": 100},
    {"success": 0.3, "sampled": 200},
    {"success": 0.9, "sampled": 400},
]


def test_costs_to_a_success_rate_are_interpolated_between_evaluations():
    assert reached(CURVE, 0.3, "sampled") == pytest.approx(50)
    assert reached(CURVE, 0.6, "sampled") == pytest.approx(300)
    assert reached(CURVE, 0.95, "sampled") == math.inf
    assert reached([{"success": 0.5, "sampled": 0}, *CURVE[1:]], 0.3, "sampled") == 0
    assert at_cost(CURVE, 50, "sampled") == pytest.approx(0.3)
    assert at_cost(CURVE, 300, "sampled") == pytest.approx(0.6)
    assert at_cost(CURVE, 500, "sampled") == 0.9


def test_a_printed_interval_is_student_s_t_interval():
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0], ".2f") == "3.00 ± 1.96"
    assert interval([1.0, math.inf]) == "1 of 2 not reached"


def test_a_benchmark_run_with_a_stored_result_is_not_repeated(tmp_path):
    made = iter(range(9))
    for _ in range(2):
        results = Results(tmp_path / "runs" / "runs.jsonl")
        for seed in (0, 1):
            results.once({"way": "a", "seed": seed}, lambda: {"number": next(made)})
    assert next(made) == 2
    assert [run["seed"] for run in Results(results.path).of(way="a")] == [0, 1]


@pytest.mark.timeout(120)
def test_the_teacher_benchmark_trains_with_grpo_and_distillation_and_prints_a_table(
    tmp_path, capsys
):
    model = untrained(tmp_path / "model")
    teach(
        f"--seeds 0 --steps 1 --every 1 --teacher-steps 1 --taught-steps 1 --fresh 2 "
        f"--groups 1 --taught-groups 1 --model {model} --out {tmp_path}".split()
    )
    runs = [json.loads(line) for line in (tmp_path / "teacher.jsonl").read_text().splitlines()]
    assert [run["way"] for run in runs] == ["teacher", "grpo", "distill"]
    for run in runs:
        first, last = run["points"]
        assert (first["step"], first["sampled"], last["step"]) == (0, 0, 1)
        assert last["sampled"] > 0
    assert runs[1]["points"][1]["sampled"] > runs[2]["points"][1]["sampled"], "8 sessions, 2"
    printed = capsys.readouterr().out
    assert "| `grpo` | 1 |" in printed
    assert "| `distill` | 1 |" in printed


@pytest.mark.timeout(120)
def test_a_walk_forked_at_its_decisive_turn_replays_earlier_turns_exactly(tmp_path):
    [walk] = walks(1, seed=4)
    script = tmp_path / "script.json"
    turns = demonstration(walk, random.Random(0))
    script.write_text(json.dumps({"conversations": [turns]}))
    branching = WAYS["decisive"].branching
    assert branching is not None
    task = walk.task(tmp_path / "files", "t", branching=branching)
    lines = run_batch(BatchRun([task], f"scripted:{script}", tmp_path / "run", 4, "walk"))
    root, *forks = sorted(lines, key=lambda line: "fork" in line and line["fork"] is not None)
    assert len(forks) == branching["samples"]
    assert root["exchanges"] == TURNS + 1
    right = json.loads(json.dumps(turns))["turns"][DECISIVE - 1]["tool_calls"][0]
    assert root["reward"] == float(right["arguments"]["command"] == f"sh go {OUT}")
    for fork in forks:
        assert fork["fork"]["verdict"] == "exact"
        assert fork["fork"]["replayed"] == DECISIVE - 1
        assert fork["reward"] == root["reward"]


@pytest.mark.timeout(120)
def test_the_tree_benchmark_trains_trees_and_flat_groups_and_prints_a_table(tmp_path, capsys):
    grow_trees(
        f"--seeds 0 --ways flat decisive --steps 2 --fresh 1 --groups 1 "
        f"--demonstrations 2 --sft-steps 1 1 --out {tmp_path}".split()
    )
    runs = [json.loads(line) for line in (tmp_path / "trees.jsonl").read_text().splitlines()]
    assert [run["way"] for run in runs] == ["model", "flat", "decisive"]
    assert runs[0]["examples"] == 2
    for run in runs[1:]:
        first, last = run["played"]
        assert (first["step"], first["sampled"], last["step"]) == (0, 0, 1)
        assert 0 < last["sampled"] < run["points"][-1]["sampled"]
    assert "| `decisive` | 1 |" in capsys.readouterr().out


def test_trees_reach_the_goal_with_fewer_turns_by_more_updates_of_smaller_batches():
    table = Table(13, 10)
    flat = table.turns_to_goal("flat", 2, 0.8)
    assert table.turns_to_goal("decisive", 2, 0.8) < flat / 2
    as_large = 2 * table.size("flat") // table.size("decisive")
    assert table.turns_to_goal("decisive", as_large, 0.8) > 0.8 * flat
