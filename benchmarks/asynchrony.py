"""Benchmark of asynchronous training: synchronous, one step off-policy, and further ahead.

Each session of the light script harness first waits as tools do, a time drawn with a long tail, so
a step that waits for its slowest session leaves engine and trainer idle. `max_lag` 0 alternates,
1 samples the next batch during an update, 4 goes on over several; calls in flight are resumed under
the new weights. Time per step is wall clock, so read ratios of runs on a quiet machine; the
staleness of the tokens is exact anywhere.

One run per call; each appends a line to `OUT/asynchrony.jsonl`. Without `--max-lag` the table of
all that is there is printed.

    python -m benchmarks.asynchrony --max-lag 1
    python -m benchmarks.asynchrony
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import uvloop
from examples.demo.lookups import lookups
from examples.demo.model import demo_model
from examples.demo.policy import lookup_task
from examples.demo.training import GRPO, TRAIN_SEED

from bridle.cli.train import TrainSettings, train_here
from bridle.config import Task
from bridle.training.loop import Course
from bridle.training.settings import LoopSettings
from bridle.types import JSON

NAME = "asynchrony.jsonl"
NAMES = {0: "synchronous", 1: "one step off"}
GROUPS, SAMPLES = 4, 4


def tasks_of(folder: Path, count: int, tools_s: float) -> list[Task]:
    """Lookups whose sessions begin with a wait: exponential, at most five times its mean."""
    drawn = random.Random(0)  # noqa: S311 - waits
    made = []
    for one in lookups(count, seed=TRAIN_SEED):
        task = lookup_task(one, folder)
        waits = min(drawn.expovariate(1 / tools_s), 5 * tools_s)
        agent = task.agent.model_copy(
            update={"command": f"sleep {waits:.2f}; {task.agent.command}"}
        )
        made.append(task.model_copy(update={"agent": agent, "num_samples": SAMPLES}))
    return made


def measured(options: argparse.Namespace) -> JSON:
    """Train once; a line of the file."""
    ends: list[float] = []

    def tell(course: Course) -> None:
        if course.steps:
            ends.append(time.monotonic())

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings = TrainSettings(
            model=str(demo_model()),
            tasks="lookups",
            out=str(folder / "run"),
            samples=SAMPLES,
            concurrency=GROUPS * SAMPLES * 2,
            grpo=GRPO.model_copy(update={"flat_groups": "keep"}),
            loop=LoopSettings(
                steps=options.steps,
                groups_per_step=GROUPS,
                max_lag=options.max_lag,
                checkpoint_every=0,
            ),
        )
        tasks = tasks_of(folder / "tasks", options.steps * GROUPS, options.tools_s)
        began = time.monotonic()
        course = uvloop.run(train_here(settings, tasks, tell=tell)).course
    updates = [one["update"] for one in course.steps if one["update"]]
    lags: Counter[str] = Counter()
    for update in updates:
        lags.update(update["lags"])
    errors = [one["logprob_error"] for one in updates if one["logprob_error"] is not None]
    return {
        "max_lag": options.max_lag,
        "steps": course.step,
        "tools_s": options.tools_s,
        "seconds": ends[-1] - began,
        "step_s": [b - a for a, b in zip([began, *ends], ends, strict=False)],
        "waited_s": [one["waited_s"] for one in course.steps],
        "update_s": [one["seconds"] for one in updates],
        "published_s": [one["published_s"] for one in course.steps],
        "lags": dict(sorted(lags.items())),
        "stale": sum(one["left_out"].get("stale", 0) for one in course.steps),
        "logprob_error": max(errors, default=None),
    }


def table(runs: list[JSON]) -> Iterator[str]:
    """A line per run, against the first synchronous one; its first step, the start, is left out."""
    yield (
        "| rollouts | time per step, s | of synchronous | waiting for groups | update, s | "
        "weights, s | tokens by updates since sampled | sessions too old |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    base = next((statistics.mean(one["step_s"][1:]) for one in runs if not one["max_lag"]), None)
    for one in sorted(runs, key=lambda run: int(run["max_lag"])):
        per_step = statistics.mean(one["step_s"][1:])
        waited = sum(one["waited_s"][1:]) / sum(one["step_s"][1:])
        every = sum(one["lags"].values())
        shares = ", ".join(f"{lag}: {count / every:.0%}" for lag, count in one["lags"].items())
        name = NAMES.get(one["max_lag"], f"asynchronous, up to {one['max_lag']}")
        ratio = "" if base is None else f"{per_step / base:.2f}"
        yield (
            f"| {name} | {per_step:.2f} | {ratio} | {waited:.0%} | "
            f"{statistics.median(one['update_s']):.2f} | "
            f"{statistics.median(one['published_s']):.2f} | {shares} | {one['stale']} |"
        )


def main() -> None:
    """One run, or the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--max-lag", type=int)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tools-s", type=float, default=2.0, help="mean wait of a session")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    path = options.out / NAME
    if options.max_lag is None:
        runs = [json.loads(line) for line in path.open()] if path.exists() else []
        print("\n".join(table(runs)))
        return
    line = measured(options)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line))


if __name__ == "__main__":
    main()
