"""A real `GRPOTrainer` with a checkpoint at each step, in a process that may be killed.

    python trl_loop.py FOLDER STEPS

FOLDER has `model` and `tasks.jsonl`. Two tasks a step; a checkpoint's `trained.json`, written last,
has the tasks that it was trained on. Says a line around each batch and after each checkpoint.
"""

import json
import sys
from pathlib import Path

from trl import GRPOConfig, GRPOTrainer

from bridle.bridges.local import LocalSessions
from bridle.bridges.trl import EveryTrace, TrlRollouts, session_reward
from bridle.datasets.jsonl import load_tasks
from datasets import Dataset

TRAINED = "trained.json"


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Noting(TrlRollouts):
    trained: list

    def __call__(self, prompts, trainer):
        say("play")
        rows = super().__call__(prompts, trainer)
        self.trained += sorted({*prompts})
        say("played")
        return rows


class Saving(EveryTrace):
    rollout_func: Noting

    def _save_checkpoint(self, *given):
        super()._save_checkpoint(*given)  # type: ignore[misc]
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")  # type: ignore[attr-defined]
        (folder / TRAINED).write_text(json.dumps(self.rollout_func.trained))
        say("saved")


def main(folder, steps):
    whole = [path.parent for path in (folder / "out").glob(f"checkpoint-*/{TRAINED}")]
    last = max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)
    run = folder / f"run-{len([*folder.glob('run-*')])}"
    with LocalSessions(f"embedded:{folder / 'model'}", run) as sessions:
        rollouts = Noting(sessions, load_tasks(folder / "tasks.jsonl"))
        rollouts.trained = json.loads((last / TRAINED).read_text()) if last else []
        type("Trainer", (Saving, GRPOTrainer), {})(
            model=str(folder / "model"),
            args=GRPOConfig(
                output_dir=str(folder / "out"), per_device_train_batch_size=4, num_generations=2,
                max_steps=steps, save_steps=1, beta=0.0, bf16=False, use_cpu=True, report_to=[],
                disable_tqdm=True, gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list(rollouts.rows()),
            reward_funcs=session_reward,
            rollout_func=rollouts,
        ).train(resume_from_checkpoint=str(last) if last else None)  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
