#!/usr/bin/env bash
# Trains MODEL on TASKS with slime or Miles: run.sh MODEL TASKS OUT [OPTION...]; OPTIONs are the trainer's
# own. TRAINER_DIR is its checkout; PORT is the rollout server's (8080). With --colocate, where engines share
# the trainer's GPUs, sessions run while it waits; otherwise also while it trains.
set -euo pipefail
model=$(realpath "$1") tasks=$(realpath "$2") out=$(mkdir -p "$3" && realpath "$3")
shift 3

python - "$tasks" "$out" "http://127.0.0.1:${PORT:-8080}" <<'END'
import json
import sys
from pathlib import Path

from bridle.datasets.jsonl import load_tasks

tasks, out = map(Path, sys.argv[1:3])
names = [task.task_id for task in load_tasks(tasks)]
rows = [{"prompt": name, "metadata": {"task_id": name}} for name in names]
(out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
settings = {
    "bridle_server": sys.argv[3],
    "bridle_tasks": str(tasks),
    "bridle_engines": str(out / "engines.json"),
    "bridle_run": "run",
}
(out / "bridle.yaml").write_text(json.dumps(settings))
END

# The server waits for the file in which the rollout function names the engines; an old one names dead ones.
rm -f "$out/engines.json"
bridle serve --engines-from "sglang:$out/engines.json" --tokenizer "$model" --data "$out/server" \
  --port "${PORT:-8080}" --allow-path "$(dirname "$tasks")" &
running=$!
trap 'kill $running || true; wait' EXIT

program=train_async.py function=generate_rollout_async
case " $* " in *" --colocate "*) program=train.py function=generate_rollout ;; esac
python "$TRAINER_DIR/$program" \
  --hf-checkpoint "$model" --ref-load "$model" \
  --load "$out/checkpoints" --save "$out/checkpoints" --save-interval 20 \
  --prompt-data "$out/prompts.jsonl" --input-key prompt --metadata-key metadata --rollout-shuffle \
  --rollout-function-path "bridle.bridges.slime.$function" \
  --custom-reward-post-process-path bridle.bridges.slime.post_process_rewards \
  --custom-config-path "$out/bridle.yaml" \
  --num-rollout 1000 --rollout-batch-size 8 --n-samples-per-prompt 8 --global-batch-size 64 \
  --rollout-max-context-len 65536 --use-dynamic-batch-size --max-tokens-per-gpu 65536 \
  --advantage-estimator grpo --use-tis --lr 1e-6 --lr-decay-style constant "$@" &
running="$running $!"
wait -n # the server ends first only where it cannot start
