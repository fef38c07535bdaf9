"""A real `AsyncGRPOTrainer` with a checkpoint at each step, in a process that may be killed.

    python trl_async_loop.py FOLDER STEPS

FOLDER has `model` and `tasks.jsonl`. A group is two sessions, a step three rows, so that groups lie
across steps. A checkpoint's `trained.json`, written last, has the group and the reward of each row
that was trained; `flat.txt` has the groups without rows. Says a line for each group and checkpoint.
"""

import json
import sys
from pathlib import Path

from tests.bridges.test_trl_async import without_a_gpu
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from bridle.bridges.local import LocalSessions
from bridle.bridges.trl import EveryGroupOnce, TrlAsyncRollouts
from bridle.datasets.jsonl import load_tasks
from datasets import Dataset

TRAINED = "trained.json"


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Noting(TrlAsyncRollouts):
    flat: Path
    rows_trained: list

    def _give(self, number, rows):
        if not rows:
            with self.flat.open("a") as file:
                file.write(f"{number}\n")
        super()._give(number, rows)
        say(f"group {number}: {len(rows)} rows")

    def trained(self, rows):
        for number, count in rows.items():
            of = self._queued[number][:count]
            self.rows_trained += [(number, row.metrics["reward"]) for row in of]
        super().trained(rows)


class Saving(EveryGroupOnce):
    rollout_worker: Noting

    def _save_checkpoint(self, *given):
        super()._save_checkpoint(*given)
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        (folder / TRAINED).write_text(json.dumps(self.rollout_worker.rows_trained))
        say(f"saved {folder.name}")


def main(folder, steps):
    whole = [path.parent for path in (folder / "out").glob(f"checkpoint-*/{TRAINED}")]
    last = max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)
    run = folder / f"run-{len([*folder.glob('run-*')])}"
    with LocalSessions(f"embedded:{folder / 'model'}", run) as sessions, without_a_gpu():
        rollouts = Noting(
            sessions, load_tasks(folder / "tasks.jsonl"), num_generations=2, groups_at_once=2
        )
        rollouts.flat = folder / "flat.txt"
        rollouts.rows_trained = json.loads((last / TRAINED).read_text()) if last else []
        type("Trainer", (Saving, AsyncGRPOTrainer), {})(
            model=str(folder / "model"),
            args=AsyncGRPOConfig(
                output_dir=str(folder / "out"), per_device_train_batch_size=3, token_budget=0,
                num_generations=2, max_steps=steps, save_steps=1, max_staleness=100, bf16=False,
                dtype="float32", use_cpu=True, report_to=[], disable_tqdm=True,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list(rollouts.rows()),
            rollout_worker=rollouts,
            weight_transfer=rollouts,
        ).train(resume_from_checkpoint=str(last) if last else None)  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
