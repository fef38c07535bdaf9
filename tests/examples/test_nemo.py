"""NeMo RL's example: both of its programs, up to steps on the traces of real sessions."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bridle.config import builtin_tokenizer_dir

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "nemo"
CONFIG = """
policy:
  model_name: x
  tokenizer: {name: x}
  max_total_sequence_length: 512
  train_micro_batch_size: 1
  make_sequence_length_divisible_by: 1
  generation:
    backend: sglang
    sglang_cfg: {context_length: 512, sglang_server_config: {num_gpus: 2}}
loss_fn: {token_level_loss: true, reference_policy_kl_penalty: 0}
grpo:
  num_prompts_per_step: 2
  num_generations_per_prompt: 2
  max_num_steps: 2
  normalize_rewards: true
cluster: {gpus_per_node: 2, num_nodes: 1}
checkpointing: {save_period: 1}
logger: {log_dir: x}
"""
"""The fields of NeMo RL's `grpo_math_1B_sglang.yaml` (commit 7ea279a) that the example reads."""


@pytest.mark.train
@pytest.mark.timeout(300)  # 20 s of a core of one's own
def test_the_nemo_rl_example_trains_on_real_sessions_and_resumes_from_its_checkpoint(tmp_path):
    from examples.demo.lookups import lookups
    from examples.demo.policy import lookup_task

    tasks = [lookup_task(one, tmp_path / "files") for one in lookups(2, seed=5)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(one.model_dump_json() for one in tasks))
    configs = tmp_path / "examples" / "configs"
    configs.mkdir(parents=True)
    (configs / "grpo_math_1B_sglang.yaml").write_text(CONFIG)
    shutil.copy(FOLDER / "run.sh", tmp_path / "run.sh")
    # The script starts the train.py beside it: here NeMo RL's stand-in, which runs the example's.
    (tmp_path / "train.py").symlink_to(Path(__file__).with_name("nemo_trainer.py"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # The environment of the trainers sees our own, but has no `bridle`.
    programs = (str(Path(sys.executable).parent), str(ROOT / ".venv" / "bin"), os.environ["PATH"])
    environment = {
        "PATH": os.pathsep.join(programs), "PYTHONPATH": str(ROOT), "PORT": str(port),
        "TRAINER_DIR": str(tmp_path), "EXAMPLE": str(FOLDER / "train.py"),
        "SAID": str(tmp_path / "said.json"),
    }  # fmt: skip
    for steps, trained in ((2, 2), (3, 1)):
        subprocess.run(
            [tmp_path / "run.sh", builtin_tokenizer_dir(), "tasks.jsonl", "out",
             f"grpo.max_num_steps={steps}"],
            env={**os.environ, **environment}, cwd=tmp_path, check=True,
        )  # fmt: skip
        said = json.loads((tmp_path / "said.json").read_text())
        assert len(said["trained"]) == trained
        assert all(said["trained"])
        assert said["touches"] == []
        assert said["calls"][-1] == f"log {steps}"
    assert (tmp_path / "out" / "checkpoints" / "step_3" / "policy" / "weights").is_dir()
