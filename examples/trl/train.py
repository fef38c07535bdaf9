"""Train a model on tasks with TRL's GRPOTrainer, through the tasks' own harnesses.

python train.py MODEL TASKS OUT [--steps 40] [--groups 8] [--samples 8]

Started again with the same OUT, it goes on from the last checkpoint.
"""

import argparse
from pathlib import Path

import torch
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

from bridle.bridges.local import LocalSessions
from bridle.bridges.trl import EveryTrace, TrlRollouts, session_reward
from bridle.datasets.jsonl import load_tasks
from datasets import Dataset


class Trainer(EveryTrace, GRPOTrainer):
    """TRL's trainer, with every trace of a session as a row."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=8, help="tasks of a step")
    parser.add_argument("--samples", type=int, default=8, help="sessions of a task")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    # Sessions of an earlier start stay where they are: a run folder holds one run.
    run = given.out / f"run-{len(list(given.out.glob('run-*'))):03d}"
    with LocalSessions(f"embedded:{given.model}", run) as sessions:
        rollouts = TrlRollouts(sessions, load_tasks(given.tasks))
        trainer = Trainer(
            model=str(given.model),
            args=GRPOConfig(
                output_dir=str(given.out),
                per_device_train_batch_size=given.groups * given.samples,
                num_generations=given.samples,
                max_steps=given.steps,
                save_steps=10,
                beta=0.0,
                bf16=torch.cuda.is_available(),
                report_to=[],
            ),
            train_dataset=Dataset.from_list(rollouts.rows()),
            reward_funcs=session_reward,
            rollout_func=rollouts,
        )
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(given.out)))


if __name__ == "__main__":
    main()
