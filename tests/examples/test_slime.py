"""slime's and Miles' example: what its script starts, up to the samples of real sessions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ports import free_port

from bridle.config import builtin_tokenizer_dir

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slime" / "run.sh"


def run(tmp_path, *options):
    """Run the script with a stand-in for the trainer; what that was given and got."""
    from examples.demo.lookups import lookups
    from examples.demo.policy import lookup_task

    tasks = [lookup_task(one, tmp_path / "files") for one in lookups(2, seed=5)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(one.model_dump_json() for one in tasks))
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("train.py", "train_async.py"):
        (checkout / name).symlink_to(Path(__file__).with_name("slime_trainer.py"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "engines.json").write_text('["http://127.0.0.1:9"]')  # of a run that ended
    environment = {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": str(ROOT),
        "TRAINER_DIR": str(checkout),
        "PORT": str(free_port()),
    }
    few = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "2")
    subprocess.run(
        [SCRIPT, builtin_tokenizer_dir(), "tasks.jsonl", "out", *few, *options],
        env={**os.environ, **environment}, cwd=tmp_path, check=True,
    )  # fmt: skip
    return json.loads((tmp_path / "out" / "checkpoints" / "said.json").read_text())


@pytest.mark.timeout(300)  # 15 s of a core of its own
@pytest.mark.parametrize("options", [("--rollout-num-gpus", "4"), ("--colocate",)])
def test_the_slime_example_starts_a_trainer_that_gets_samples_of_real_sessions(tmp_path, options):
    said = run(tmp_path, *options)
    assert said["samples"] == [4, 4]
    assert said["touches"] == []
    args = said["args"]
    together = "" if args["colocate"] else "_async"
    assert args["rollout_function_path"] == f"bridle.bridges.slime.generate_rollout{together}"
    assert (args["load"], args["use_tis"]) == (str(tmp_path / "out" / "checkpoints"), True)
    assert args["bridle_tasks"] == str(tmp_path / "tasks.jsonl")
