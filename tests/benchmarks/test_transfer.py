"""Sets of real harnesses make a model that trains through one and is played through all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.transfer import HARNESSES, script
from examples.demo.lookups import lookups

ROOT = Path(__file__).parents[2]


def test_the_transfer_demonstrator_reads_the_same_files_in_every_harness():
    tasks = list(lookups(60, seed=3))
    taken = []
    for harness in HARNESSES:
        turns = [one["turns"] for one in script(tasks, harness)["conversations"]]
        said = [" ".join(of[0].get("shell", ())) for of in turns]
        taken.append([line.split("cp ")[1].split()[0] if "cp " in line else None for line in said])
    assert taken[0] == taken[1]
    right = sum(name == task.thing for name, task in zip(taken[0], tasks, strict=True))
    assert 6 <= taken[0].count(None) <= 18
    assert 15 <= right <= 33


@pytest.mark.train
@pytest.mark.timeout(600)
def test_the_transfer_benchmark_trains_a_model_and_evaluates_it_in_every_harness(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.transfer",
        "--demonstrations",
        "3",
        "--epochs",
        "1",
    ]
    command += ["--steps", "1", "--fresh", "2", "--concurrency", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    examples = [(tmp_path / name / "data.jsonl").read_text().splitlines() for name in HARNESSES]
    assert [len(lines) for lines in examples] == [3, 3]
    roles = [message["role"] for message in json.loads(examples[0][0])["messages"]]
    assert roles[:3] == ["system", "user", "assistant"]
    course = json.loads((tmp_path / "training" / "course.json").read_text())
    assert [one["step"] for one in course["evaluations"]] == [0, 1]
    for one in course["evaluations"]:
        known = {name: (it["sessions"], it["unknown"]) for name, it in one["others"].items()}
        assert known == dict.fromkeys((*HARNESSES, "system_message"), (2, 0))
