"""TRL's example trains by its one command, and goes on from its checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.train
@pytest.mark.timeout(300)
def test_the_trl_example_trains_and_resumes_from_its_checkpoint(tmp_path):
    from examples.demo.lookups import lookups
    from examples.demo.policy import lookup_task
    from tests.cli.models import untrained

    untrained(tmp_path / "model")
    tasks = [lookup_task(one, tmp_path / "files") for one in lookups(2, seed=5)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(one.model_dump_json() for one in tasks))
    program = str(ROOT / "examples" / "trl" / "train.py")
    for steps in (1, 2):
        subprocess.run(
            [sys.executable, program, "model", "tasks.jsonl", "out", "--steps", str(steps),
             "--groups", "1", "--samples", "2"],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, check=True,
        )  # fmt: skip
    assert (tmp_path / "out" / "checkpoint-2" / "model.safetensors").is_file()
    assert sorted(path.name for path in (tmp_path / "out").glob("run-*")) == ["run-000", "run-001"]
