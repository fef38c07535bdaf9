"""Takes the place of prime-rl's orchestrator: its trainer trains on sessions of a rollout server.

python orchestrate.py TASKS OUT --engine http://127.0.0.1:8000 --steps 100

OUT is the trainer's `output_dir`, of which it reads batches and into which it writes weights.
"""

import argparse
import asyncio
import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from prime_rl.trainer.batch import build_bin_cost, prepare_batch
from prime_rl.transports.rollouts.filesystem import FileSystemMicroBatchSender
from prime_rl.transports.rollouts.types import RoutedExperts, TrainingSample
from prime_rl.utils.pathing import get_broadcast_dir, get_step_path, sync_wait_for_path

from bridle.bridges.base import Row, SessionGroup, play, rows_of
from bridle.bridges.remote import open_server
from bridle.experts import complete_rows
from bridle.trajectory.credit import grpo_advantages
from bridle.trajectory.sample import refuse_images


def whole(row: Row, values: np.ndarray, before: float) -> list:
    """Return values for all ids; those of the prompt are `before`."""
    return [*[before] * len(row.prompt_ids), *values.tolist()]


def experts(row: Row) -> RoutedExperts | None:
    """Return the experts of a mixture's tokens, where all are known; the last id has none."""
    rows = complete_rows(row.trace.routed_experts)
    if rows is None:
        return None
    rows = np.concatenate([rows, rows[-1:]])
    return RoutedExperts(data=rows.tobytes(), shape=list(rows.shape), dtype="int16")


def samples_of(groups: Sequence[SessionGroup]) -> list[TrainingSample]:
    """Return a sample for each trace."""
    for group in groups:
        for session in group.sessions:
            refuse_images("prime-rl", session)
    rows, _ = rows_of(groups)
    advantages = [
        grpo_advantages([float("nan") if s.reward is None else s.reward for s in group.sessions])
        for group in groups
    ]
    return [
        TrainingSample(
            token_ids=[*row.prompt_ids.tolist(), *row.response_ids.tolist()],
            mask=whole(row, row.mask == 1, before=False),
            logprobs=whole(row, row.logprobs, 0.0),
            temperatures=whole(row, row.temperatures, 1.0),
            env_name=row.task_id,
            advantages=whole(row, row.mask * advantages[row.group][row.sample], 0.0),
            routed_experts=experts(row),
        )
        for row in rows
    ]


def load_weights(engines: Sequence[str], folder: Path) -> None:
    """Have prime-rl's inference servers load weights, and forget what they cached under the old."""
    for engine in engines:
        for path, body in (
            ("/pause?mode=abort&clear_cache=true", {}),
            ("/update_weights", {"weight_dir": folder.as_posix()}),
            ("/resume", {}),
        ):
            request = urllib.request.Request(
                engine + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=1800).close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("tasks", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", action="append", required=True, help="of an inference server")
    parser.add_argument("--server", default="http://127.0.0.1:8080")
    parser.add_argument("--first", type=int, default=1, help="step that the trainer begins with")
    parser.add_argument("--steps", type=int, required=True, help="the trainer's max_steps")
    parser.add_argument("--groups", type=int, default=8, help="tasks of a step")
    parser.add_argument("--samples", type=int, default=8, help="sessions of a task")
    parser.add_argument("--workers", type=int, default=1, help="the trainer's data-parallel ranks")
    parser.add_argument("--seq-len", type=int, default=32768, help="the trainer's model.seq_len")
    given = parser.parse_args()
    sessions, tasks = open_server(given.server, str(given.tasks))
    names = list(tasks)
    sender = FileSystemMicroBatchSender(given.out, given.workers, given.first)
    for step in range(given.first, given.steps + 1):
        folder = get_step_path(get_broadcast_dir(given.out), step - 1)
        sync_wait_for_path(folder / "STABLE")
        load_weights(given.engine, folder)
        sessions.set_version(step - 1)
        at = (step - 1) * given.groups
        wanted = [names[number % len(names)] for number in range(at, at + given.groups)]
        groups = play(sessions, wanted, given.samples)
        samples = [one for one in samples_of(groups) if any(one.mask)]
        rewards = [s.reward for group in groups for s in group.sessions if s.reward is not None]
        batch = prepare_batch(samples, given.seq_len, given.workers, build_bin_cost(None))
        asyncio.run(sender.send(batch))
        print(f"step {step}: {len(samples)} traces, mean reward {np.mean(rewards):.3f}", flush=True)


if __name__ == "__main__":
    main()
