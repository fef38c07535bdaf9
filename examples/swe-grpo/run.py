"""The paper's run: GRPO on SWE tasks through codex, claude_code, qwen_code or pi, by slime or verl.

    python run.py --harness codex --trainer slime --dry-run   # checks all but GPUs, images, weights
    python run.py --harness codex --trainer slime             # checks all, and starts the trainer
    python run.py --smoke --out out/smoke                     # every piece here, with a small model

Reads run.toml beside it; writes what the programs read to `out/HARNESS-TRAINER`: `tasks.jsonl`
(the tasks with their harness and budgets), `held-out.jsonl`, `server.toml` (the rollout server),
`slime.yaml` or the verl data sets, `prepare.sh` (pulls the images and converts the weights),
`command.sh` (the trainer's command line), and `export.sh` (the last checkpoint as a model folder
that engines load). Start the rollout server in another
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


def read_tasks(settings: dict, part: str, harness: str) -> list[Task]:
    """The tasks of a set (`tasks`, `held_out`); they are graded in fresh runtimes."""
    tasks = load_tasks(Path(settings[part]["path"]), overrides=overrides(settings, harness))
    return tasks[: settings[part]["count"]]


def write_tasks(tasks: list[Task], path: Path) -> None:
    """The tasks as Bridle reads them."""
    lines = [task.model_dump_json(exclude_unset=True) for task in tasks]
    path.write_text("\n".join(lines) + "\n")


CONVERT = """source "$SLIME_DIR/scripts/models/qwen3.5-4B.sh"
python3 "$SLIME_DIR/tools/convert_hf_to_torch_dist.py" "${MODEL_ARGS[@]}" \\
  --hf-checkpoint "$model" --save "${model}_torch_dist"
"""
EXPORTS = {
    "slime": """python3 "$SLIME_DIR/tools/convert_torch_dist_to_hf.py" --origin-hf-dir "$model" \\
  --input-dir "$checkpoints/$(printf iter_%07d "$last")" --output-dir "$exported"
""",
    "verl": """python3 -m verl.model_merger merge --backend fsdp \\
  --local_dir "$checkpoints/global_step_$last/actor" --target_dir "$exported"
""",
}
"""Trainer -> shell lines that make a model folder of its last checkpoint."""


def write_steps(settings: dict, folder: Path, trainer: str, images: set[str]) -> None:
    """Write what is done before the training, and with its last checkpoint."""
    begin = (
        f"#!/usr/bin/env bash\nset -euo pipefail\nmodel={shlex.quote(settings['model']['path'])}\n"
    )
    pulls = [f"{shlex.join(['docker', 'pull', '--quiet', image])}\n" for image in sorted(images)]
    convert = CONVERT if trainer == "slime" else ""  # verl reads the model folder itself
    (folder / "prepare.sh").write_text(begin + "".join(pulls) + convert)
    names = f"checkpoints={shlex.quote(str(folder / 'checkpoints'))}\n"
    names += f"exported={shlex.quote(str(folder / 'exported'))}\n"
    names += 'last=$(cat "$checkpoints/latest_checkpointed_iteration.txt")\n'
    (folder / "export.sh").write_text(begin + names + EXPORTS[trainer])


def write_server(settings: dict, folder: Path, engine: str, server: str) -> Path:
    """The rollout server's config."""
    path = folder / "server.toml"
    path.write_text(
        f"engines = [{json.dumps(engine)}]\n"
        f"tokenizer = {json.dumps(settings['model']['path'])}\n\n"
        f"[server]\ndata = {json.dumps(str(folder / 'server'))}\nport = {urlsplit(server).port}\n"
    )
    return path


def slime_command(settings: dict, folder: Path, sets: dict, server: str) -> list[str]:
    """The command line of slime's train.py, its data sets (a row per task) and settings."""
    rollouts, training, hardware = (settings[k] for k in ("rollouts", "training", "hardware"))
    for name, tasks in sets.items():
        rows = [{"prompt": t.task_id, "metadata": {"task_id": t.task_id}} for t in tasks]
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}-prompts.jsonl").write_text("".join(lines))
    (folder / "slime.yaml").write_text(
        f"bridle_server: {server}\nbridle_tasks: {folder / 'tasks.jsonl'}\n"
        f"bridle_eval_tasks: {folder / 'held-out.jsonl'}\n"
    )
    options = {
        "--hf-checkpoint": settings["model"]["path"],
        "--ref-load": f"{settings['model']['path']}_torch_dist",
        "--save": folder / "checkpoints",
        "--save-interval": 20,
        "--prompt-data": folder / "tasks-prompts.jsonl",
        "--eval-interval": settings["held_out"]["every"],
        "--n-samples-per-eval-prompt": settings["held_out"]["samples"],
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
    pairs += ["--eval-prompt-data", "held-out", str(folder / "held-out-prompts.jsonl")]
    start = (
        'source "$SLIME_DIR/scripts/models/qwen3.5-4B.sh" && '
        'exec python3 "$SLIME_DIR/train.py" "${MODEL_ARGS[@]}" "$@"'
    )
    return ["bash", "-c", start, "train", *flags, *pairs]


def verl_command(settings: dict, folder: Path, sets: dict, server: str) -> list[str]:
    """The command line of verl's main_ppo, and its data sets (a row per task)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rollouts, training, hardware = (settings[k] for k in ("rollouts", "training", "hardware"))
    for name, tasks in sets.items():
        rows = [
            {
                "prompt": [{"role": "user", "content": task.task_id}],
                "data_source": "bridle",
                "extra_info": {"task_id": task.task_id},
            }
            for task in tasks
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}-prompts.parquet")
    write_tasks([task for tasks in sets.values() for task in tasks], folder / "all.jsonl")
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
        "trainer.val_before_train": True,
        "trainer.test_freq": settings["held_out"]["every"],
        "data.train_files": folder / "tasks-prompts.parquet",
        "data.val_files": folder / "held-out-prompts.parquet",
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
        f"{rollout}.val_kwargs.n": settings["held_out"]["samples"],
        f"{rollout}.tensor_model_parallel_size": hardware["engine_gpus"],
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.agent.default_agent_loop": "bridle",
        f"{rollout}.agent.agent_loop_config_path": folder / "agent-loops.yaml",
        f"++{rollout}.custom.bridle_server": server,
        f"++{rollout}.custom.bridle_tasks": folder / "all.jsonl",
    }
    result = [f"{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *result]


def check(settings: dict, sets: dict, server: Path, *, dry: bool) -> list[str]:
    """Return what is wrong; a dry run leaves out GPUs, images and weights."""
    wanted, found = settings["tasks"]["count"], len(sets["tasks"])
    wrong = [] if found == wanted else [f"{found} tasks, not {wanted}"]
    both = {task.task_id for task in sets["tasks"]} & {task.task_id for task in sets["held-out"]}
    wrong += [f"{name}: it is held out, and trains" for name in sorted(both)]
    for task in [*sets["tasks"], *sets["held-out"]]:
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
        gpus = listed.stdout.count("GPU ") if listed else 0
        if gpus < settings["hardware"]["gpus"]:
            wrong.append(f"{gpus} GPUs, not {settings['hardware']['gpus']}")
        if shutil.which("docker") is None:
            wrong.append("no docker")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if "--smoke" in words:
        return subprocess.run([sys.executable, HERE / "smoke.py", *words], check=False).returncode
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--harness", choices=HARNESSES, required=True)
    parser.add_argument("--trainer", choices=TRAINERS, required=True)
    parser.add_argument("--config", type=Path, default=HERE / "run.toml")
    parser.add_argument("--smoke", action="store_true", help="see smoke.py, which takes the rest")
    parser.add_argument("--tasks", help="another task set than run.toml's")
    parser.add_argument("--held-out", help="another held-out set than run.toml's")
    parser.add_argument("--count", type=int, help="another number of tasks than run.toml's")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--engine", help="default: slime's router, or verl's vLLM on port 8000")
    parser.add_argument("--server", default="http://127.0.0.1:8080")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(arguments)
    settings = tomllib.loads(given.config.read_text())
    settings["tasks"] |= {"path": given.tasks} if given.tasks else {}
    settings["tasks"] |= {"count": given.count} if given.count else {}
    settings["held_out"] |= {"path": given.held_out} if given.held_out else {}
    folder = (given.out / f"{given.harness}-{given.trainer}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    usual = "sglang:http://127.0.0.1:30000" if given.trainer == "slime" else "http://127.0.0.1:8000"
    sets: dict[str, list[Task]] = {}
    try:
        for part in ("tasks", "held_out"):
            name = part.replace("_", "-")
            sets[name] = read_tasks(settings, part, given.harness)
            write_tasks(sets[name], folder / f"{name}.jsonl")
        server = write_server(settings, folder, given.engine or usual, given.server)
        wrong = check(settings, sets, server, dry=given.dry_run)
    except BridleError as error:
        wrong = [str(error)]
    if wrong:
        sys.stderr.write("\n".join(wrong) + "\n")
        return 1
    images = {str(task.runtime.image) for tasks in sets.values() for task in tasks}
    write_steps(settings, folder, given.trainer, images)
    make = slime_command if given.trainer == "slime" else verl_command
    command = make(settings, folder, sets, given.server)
    (folder / "command.sh").write_text(shlex.join(command) + "\n")
    counts = ", ".join(f"{len(tasks)} {name}" for name, tasks in sets.items())
    sys.stdout.write(f"{counts}, {given.harness}, {given.trainer}: {folder}\n")
    if not given.dry_run:
        os.execvp(command[0], command)  # noqa: S606 - the trainer takes this process's place
    sys.stdout.write(shlex.join(command) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
