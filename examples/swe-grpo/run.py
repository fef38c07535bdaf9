"""The paper's run: GRPO on SWE tasks through codex, claude_code, qwen_code or pi, by slime or verl.

    python run.py --harness codex --trainer slime --dry-run   # checks all but GPUs, images, weights
    python run.py --harness codex --trainer slime             # checks all, and starts the trainer

Reads run.toml beside it; writes what the programs read to `out/HARNESS-TRAINER`: `tasks.jsonl`
(the tasks with their harness and budgets), `server.toml` (the rollout server), `slime.yaml` or the
verl data set, and `command.sh`, the trainer's command line. Start the rollout server in another
shell: `bridle serve --config out/HARNESS-TRAINER/server.toml`.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

from bridle.cli.config import load_config
from bridle.config import Task
from bridle.datasets.jsonl import load_tasks
from bridle.errors import BridleError
from bridle.harnesses import open_harness

HERE = Path(__file__).resolve().parent
HARNESSES = ("codex", "claude_code", "qwen_code", "pi")
TRAINERS = ("slime", "verl")


def overrides(settings: dict, harness: str) -> dict:
    """Return the fields that the run sets in every task."""
    rollouts = settings["rollouts"]
    return {
        "agent": {"harness": harness},
        "num_samples": 1,  # the trainer asks for each sample
        "runtime": {"backend": settings["tasks"]["images"]},
        "budgets": {"agent_s": rollouts["agent_s"]},
        "builder": {
            "strategy": rollouts["builder"],
            "config": {"max_tokens": settings["model"]["context"]},
        },
    }


def read_tasks(settings: dict, harness: str) -> list[Task]:
    """The tasks of the set; they are graded in fresh runtimes."""
    tasks = load_tasks(Path(settings["tasks"]["path"]), overrides=overrides(settings, harness))
    return tasks[: settings["tasks"]["count"]]


def write_tasks(tasks: list[Task], folder: Path) -> Path:
    """The tasks as Bridle reads them."""
    path = folder / "tasks.jsonl"
    lines = [task.model_dump_json(exclude_unset=True) for task in tasks]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_server(settings: dict, folder: Path, engine: str, server: str) -> Path:
    """The rollout server's config."""
    path = folder / "server.toml"
    path.write_text(
        f"engines = [{json.dumps(engine)}]\n"
        f"tokenizer = {json.dumps(settings['model']['path'])}\n\n"
        f"[server]\ndata = {json.dumps(str(folder / 'server'))}\nport = {urlsplit(server).port}\n"
    )
    return path


def slime_command(settings: dict, folder: Path, tasks: list[Task], server: str) -> list[str]:
    """The command line of slime's train.py, its data set (a row per task) and settings."""
    rollouts, training, hardware = (settings[k] for k in ("rollouts", "training", "hardware"))
    rows = [{"prompt": t.task_id, "metadata": {"task_id": t.task_id}} for t in tasks]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "slime.yaml").write_text(
        f"bridle_server: {server}\nbridle_tasks: {folder / 'tasks.jsonl'}\n"
    )
    options = {
        "--hf-checkpoint": settings["model"]["path"],
        "--ref-load": f"{settings['model']['path']}_torch_dist",
        "--save": folder / "checkpoints",
        "--save-interval": 20,
        "--prompt-data": folder / "prompts.jsonl",
        "--input-key": "prompt",
        "--metadata-key": "metadata",
        "--rollout-function-path": "bridle.bridges.slime.generate_rollout",
        "--custom-reward-post-process-path": "bridle.bridges.slime.post_process_rewards",
        "--custom-config-path": folder / "slime.yaml",
        "--num-rollout": training["steps"],
        "--rollout-batch-size": rollouts["prompts_per_step"],
        "--n-samples-per-prompt": rollouts["samples"],
        "--global-batch-size": rollouts["prompts_per_step"] * rollouts["samples"],
        "--rollout-temperature": 1,
        "--rollout-max-context-len": settings["model"]["context"],
        "--actor-num-nodes": 1,
        "--actor-num-gpus-per-node": hardware["gpus"],
        "--rollout-num-gpus-per-engine": hardware["engine_gpus"],
        "--sglang-router-port": 30000,
        "--tensor-model-parallel-size": 2,
        "--max-tokens-per-gpu": settings["model"]["context"],
        "--advantage-estimator": "grpo",
        "--eps-clip": training["clip_low"],
        "--eps-clip-high": training["clip_high"],
        "--tis-clip": training["importance_cap"],
        "--kl-loss-coef": training["kl"],
        "--lr": training["learning_rate"],
        "--lr-decay-style": "constant",
    }
    flags = ("--colocate", "--use-tis", "--rollout-shuffle", "--use-dynamic-batch-size")
    pairs = [word for name, value in options.items() for word in (name, str(value))]
    start = (
        'source "$SLIME_DIR/scripts/models/qwen3.5-4B.sh" && '
        'exec python3 "$SLIME_DIR/train.py" "${MODEL_ARGS[@]}" "$@"'
    )
    return ["bash", "-c", start, "train", *flags, *pairs]


def verl_command(settings: dict, folder: Path, tasks: list[Task], server: str) -> list[str]:
    """The command line of verl's main_ppo, and its data set (a row per task)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rollouts, training, hardware = (settings[k] for k in ("rollouts", "training", "hardware"))
    rows = [
        {
            "prompt": [{"role": "user", "content": task.task_id}],
            "data_source": "bridle",
            "extra_info": {"task_id": task.task_id},
        }
        for task in tasks
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    loops = [{"name": "bridle", "_target_": "bridle.bridges.verl.BridleAgentLoop"}]
    (folder / "agent-loops.yaml").write_text(json.dumps(loops) + "\n")
    rollout = "actor_rollout_ref.rollout"
    response = settings["model"]["context"] // 2
    options = {
        "trainer.n_gpus_per_node": hardware["gpus"],
        "trainer.nnodes": 1,
        "trainer.total_training_steps": training["steps"],
        "trainer.default_local_dir": folder / "checkpoints",
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": training["importance_cap"],
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "data.train_batch_size": rollouts["prompts_per_step"],
        "data.max_prompt_length": settings["model"]["context"] - response,
        "data.max_response_length": response,
        "actor_rollout_ref.model.path": settings["model"]["path"],
        "actor_rollout_ref.actor.optim.lr": training["learning_rate"],
        "actor_rollout_ref.actor.clip_ratio_low": training["clip_low"],
        "actor_rollout_ref.actor.clip_ratio_high": training["clip_high"],
        "actor_rollout_ref.actor.kl_loss_coef": training["kl"],
        "actor_rollout_ref.actor.ppo_mini_batch_size": rollouts["prompts_per_step"],
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        f"{rollout}.name": "vllm",
        f"{rollout}.mode": "async",
        f"{rollout}.n": rollouts["samples"],
        f"{rollout}.tensor_model_parallel_size": hardware["engine_gpus"],
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.agent.default_agent_loop": "bridle",
        f"{rollout}.agent.agent_loop_config_path": folder / "agent-loops.yaml",
        f"++{rollout}.custom.bridle_server": server,
        f"++{rollout}.custom.bridle_tasks": folder / "tasks.jsonl",
    }
    result = [f"{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *result]


def check(settings: dict, tasks: list[Task], server: Path, *, dry: bool) -> list[str]:
    """Return what is wrong; a dry run leaves out GPUs, images and weights."""
    wanted = settings["tasks"]["count"]
    wrong = [] if len(tasks) == wanted else [f"{len(tasks)} tasks, not {wanted}"]
    for task in tasks:
        open_harness(task.agent)
        if task.evaluator.strategy not in ("swebench", "test_on_output"):
            wrong.append(f"{task.task_id}: graded by {task.evaluator.strategy}")
        if not task.runtime.image:
            wrong.append(f"{task.task_id}: names no image")
    load_config(server)
    if not dry:
        if not (Path(settings["model"]["path"]) / "config.json").is_file():
            wrong.append(f"no model in {settings['model']['path']}")
        smi = shutil.which("nvidia-smi")
        listed = subprocess.run([smi, "-L"], capture_output=True, text=True) if smi else None  # noqa: PLW1510
        found = listed.stdout.count("GPU ") if listed else 0
        if found < settings["hardware"]["gpus"]:
            wrong.append(f"{found} GPUs, not {settings['hardware']['gpus']}")
        if shutil.which("docker") is None:
            wrong.append("no docker")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--harness", choices=HARNESSES, required=True)
    parser.add_argument("--trainer", choices=TRAINERS, required=True)
    parser.add_argument("--config", type=Path, default=HERE / "run.toml")
    parser.add_argument("--tasks", help="another task set than run.toml's")
    parser.add_argument("--count", type=int, help="another number of tasks than run.toml's")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--engine", help="default: slime's router, or verl's vLLM on port 8000")
    parser.add_argument("--server", default="http://127.0.0.1:8080")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(arguments)
    settings = tomllib.loads(given.config.read_text())
    settings["tasks"] |= {"path": given.tasks} if given.tasks else {}
    settings["tasks"] |= {"count": given.count} if given.count else {}
    folder = (given.out / f"{given.harness}-{given.trainer}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    usual = "sglang:http://127.0.0.1:30000" if given.trainer == "slime" else "http://127.0.0.1:8000"
    try:
        tasks = read_tasks(settings, given.harness)
        write_tasks(tasks, folder)
        server = write_server(settings, folder, given.engine or usual, given.server)
        wrong = check(settings, tasks, server, dry=given.dry_run)
    except BridleError as error:
        wrong, tasks = [str(error)], []
    if wrong:
        sys.stderr.write("\n".join(wrong) + "\n")
        return 1
    make = slime_command if given.trainer == "slime" else verl_command
    command = make(settings, folder, tasks, given.server)
    (folder / "command.sh").write_text(shlex.join(command) + "\n")
    sys.stdout.write(f"{len(tasks)} tasks, {given.harness}, {given.trainer}: {folder}\n")
    if not given.dry_run:
        os.execvp(command[0], command)  # noqa: S606 - the trainer takes this process's place
    sys.stdout.write(shlex.join(command) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
