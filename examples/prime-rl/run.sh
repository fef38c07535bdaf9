#!/usr/bin/env bash
# Trains MODEL on TASKS with prime-rl: run.sh MODEL TASKS OUT STEPS [SETTING...]; SETTINGs are its trainer's.
# Runs in prime-rl's environment. INFERENCE_GPUS and TRAINER_GPUS are device numbers, PORT is the rollout server's (8080).
set -euo pipefail
model=$(realpath "$1") tasks=$(realpath "$2") out=$(mkdir -p "$3" && realpath "$3") steps=$4
shift 4
engine=http://127.0.0.1:${ENGINE_PORT:-8000}
gpus=${TRAINER_GPUS:-1}
workers=$(tr , '\n' <<<"$gpus" | wc -l)

# A killed run goes on from its last checkpoint; what it wrote later is not used again.
last=$(find "$out" -path '*/checkpoints/step_*' -prune -name 'step_*' | sed 's/.*_//' | sort -n | tail -n 1)
for folder in "$out"/rollouts/step_* "$out"/broadcasts/step_*; do
  [[ ${folder##*_} == "*" ]] || ((${folder##*_} < ${last:-0})) || rm -r "$folder"
done

CUDA_VISIBLE_DEVICES=${INFERENCE_GPUS:-0} inference --vllm.model "$model" --server.port "${engine##*:}" &
inference=$! running=$!
trap 'kill $running || true; wait' EXIT
CUDA_VISIBLE_DEVICES=$gpus torchrun --standalone --nproc-per-node "$workers" -m prime_rl.trainer.rl.train \
  --model.name "$model" --model.seq-len 32768 --output-dir "$out" --max-steps "$steps" \
  --rollout-transport.type filesystem --ckpt.interval "${CHECKPOINT_EVERY:-10}" ${last:+--resume.step "$last"} "$@" &
trainer=$! running="$running $!"
until curl --silent --fail --output /dev/null "$engine/health"; do
  kill -0 "$inference" "$trainer"
  sleep 1
done
bridle serve --engine "$engine" --tokenizer "$model" --data "$out/server" \
  --port "${PORT:-8080}" --allow-path "$(dirname "$tasks")" &
running="$running $!"
python "$(dirname "$0")/orchestrate.py" "$tasks" "$out" --engine "$engine" --workers "$workers" \
  --first $((${last:-0} + 1)) --steps "$steps" --server "http://127.0.0.1:${PORT:-8080}" &
orchestrator=$! running="$running $!"

wait -n -p ended # with the error of one that cannot go on
for one in "$orchestrator" "$trainer"; do
  [[ $ended == "$one" ]] || wait "$one"
done
