"""A short training on a real server: what it samples trains, each update goes into it as it runs.

The task is easy, so that a few updates suffice: not to give up. The demo's model gives up in a
third of all sessions. Rollouts run ahead of the updates, so sessions are under way at each.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from examples.demo.lookups import lookups
from examples.demo.policy import lookup_task

from bridle.capture.records import SessionCapture
from bridle.cli.train import TrainSettings, train_here
from bridle.node.results import sessions
from bridle.training.settings import GrpoSettings, LoopSettings, LoraSettings

from .checks import plain_logprobs, prompts

STEPS, GROUPS, SAMPLES = 7, 6, 8
SEED = 40_000
UNTRAINED = 0.64
"""Share of these tasks that the demo's model solves. So hot a training rises fast and may dip."""
CLOSE = 1e-4
"""Nats between what an engine says of a token and the trainer's own forward pass, in float32."""
TRIED = 'grep -q . answer.txt && ! grep -q "do not know" answer.txt'


def easy(lookup, folder):
    """A lookup that any answer but giving up solves."""
    task = lookup_task(lookup, folder)
    evaluator = task.evaluator.model_copy(update={"config": {"command": TRIED}})
    return task.model_copy(update={"num_samples": SAMPLES, "evaluator": evaluator})


async def check_learning(
    engine: str, model: Path, folder: Path, lora: LoraSettings | None = None, rate: float = 8e-4
) -> int:
    """Train `model`, or an adapter of it, on a server of it, into `folder`; the number of updates.

    Two steps in a row are well above the untrained model; each token of each session has the
    logprob that the weights give it which its version names.
    """
    tasks = [easy(one, folder / "tasks") for one in lookups(STEPS * GROUPS, seed=SEED)]
    kept = {0: model}

    def keep(_: Any) -> None:
        """The weights of each version as they were written for the server."""
        written = max((folder / "out" / "weights").iterdir())
        if (version := int(written.name)) not in kept:
            kept[version] = shutil.copytree(written, folder / "kept" / written.name)

    settings = TrainSettings(
        model=str(model),
        tasks=f"{len(tasks)} easy lookups",
        out=str(folder / "out"),
        engines=(engine,),
        samples=SAMPLES,
        concurrency=16,
        grpo=GrpoSettings(learning_rate=rate),
        lora=lora,
        loop=LoopSettings(steps=STEPS, groups_per_step=GROUPS, max_lag=1, checkpoint_every=0),
    )
    trained = await train_here(settings, tasks, tell=keep)

    rewards = [one["reward"] for one in trained.course.steps]
    best = max(np.mean(rewards[at : at + 2]) for at in range(2, STEPS - 1))
    assert best > UNTRAINED + 0.1, rewards
    updates = [update for one in trained.course.steps if (update := one["update"])]
    assert max(kept) == len(updates) > 2
    errors = [error for one in updates if (error := one["logprob_error"]) is not None]
    assert max(errors) < CLOSE
    found: Counter[int] = Counter()
    for capture in sessions(Path(trained.rollouts)):
        found += check_versions(capture, kept)
    # Groups run ahead by an update, so where training is quick every other one samples nothing.
    assert len(found) >= len(updates) / 2, found
    return len(updates)


def check_versions(capture: SessionCapture, weights: dict[int, Path]) -> Counter[int]:
    """Each token's logprob is that of the very weights that its version names; spans by version."""
    whole = prompts(capture.exchanges)
    found: Counter[int] = Counter()
    for exchange in capture.exchanges:
        for span in exchange.versions:
            before = [*whole[exchange.exchange_id], *exchange.output_ids[: span.start]]
            sampled = exchange.output_ids[span.start : span.end]
            expected = plain_logprobs(weights[span.version], before, sampled)
            assert np.abs(expected - exchange.logprobs[span.start : span.end]).max() < CLOSE
            found[span.version] += 1
    return found
