#!/usr/bin/env bash
# Trains MODEL on TASKS with NeMo RL: run.sh MODEL TASKS OUT [SETTING...]; SETTINGs are NeMo RL's own.
# TRAINER_DIR is its checkout; PORT is the rollout server's (8080).
set -euo pipefail
model=$(realpath "$1") tasks=$(realpath "$2") out=$(mkdir -p "$3" && realpath "$3")
shift 3

# The server waits for the file in which train.py names the engines; an old one names dead ones.
rm -f "$out/engines.json"
bridle serve --engines-from "sglang:$out/engines.json" --tokenizer "$model" --data "$out/server" \
  --port "${PORT:-8080}" --allow-path "$(dirname "$tasks")" &
running=$!
trap 'kill $running || true; wait' EXIT

python "$(dirname "$0")/train.py" "$model" "$tasks" "$out" \
  --server "http://127.0.0.1:${PORT:-8080}" \
  --config "$TRAINER_DIR/examples/configs/grpo_math_1B_sglang.yaml" "$@" &
running="$running $!"
wait -n # the server ends first only where it cannot start
