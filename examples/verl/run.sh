#!/usr/bin/env bash
# Trains MODEL on TASKS with verl: run.sh MODEL TASKS OUT [SETTING...]; SETTINGs are verl's own.
# PORT is the rollout server's (8080).
set -euo pipefail
model=$1 tasks=$(realpath "$2") out=$(mkdir -p "$3" && realpath "$3")
shift 3

python - "$tasks" "$out" <<'END'
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bridle.datasets.jsonl import load_tasks

tasks, out = map(Path, sys.argv[1:])
rows = [
    {
        "prompt": [{"role": "user", "content": task.task_id}],
        "data_source": "bridle",
        "extra_info": {"task_id": task.task_id},
    }
    for task in load_tasks(tasks)
]
pq.write_table(pa.Table.from_pylist(rows), out / "prompts.parquet")
END
cat >"$out/agent-loops.yaml" <<'END'
[{"name": "bridle", "_target_": "bridle.bridges.verl.BridleAgentLoop"}]
END

# The server waits for the file in which verl names its engines; an old one names dead ones.
rm -f "$out/engines.yml"
bridle serve --engines-from "$out/engines.yml" --tokenizer "$model" --data "$out/server" \
  --port "${PORT:-8080}" --allow-path "$(dirname "$tasks")" &
running=$!
trap 'kill $running || true; wait' EXIT

rollout=actor_rollout_ref.rollout
python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.rollout_correction.rollout_is=token \
  algorithm.rollout_correction.rollout_is_threshold=2.0 \
  data.train_files="$out/prompts.parquet" data.val_files="$out/prompts.parquet" \
  data.train_batch_size=8 data.max_prompt_length=32768 data.max_response_length=32768 \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  $rollout.name=vllm $rollout.n=8 $rollout.calculate_log_probs=True \
  $rollout.prometheus.enable=True $rollout.prometheus.file="$out/engines.yml" \
  $rollout.disable_log_stats=False \
  $rollout.agent.default_agent_loop=bridle \
  $rollout.agent.agent_loop_config_path="$out/agent-loops.yaml" \
  ++$rollout.custom.bridle_server="http://127.0.0.1:${PORT:-8080}" \
  ++$rollout.custom.bridle_tasks="$tasks" \
  trainer.val_before_train=False trainer.default_local_dir="$out/checkpoints" "$@" &
running="$running $!"
wait -n # the server ends first only where it cannot start
