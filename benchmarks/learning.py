"""How much the demo model learns through the light script harness, over seeds and builders.

Each run draws its own tasks, trains as the demo does, and is measured before and after on the same
fresh tasks. Success, the largest difference between trainer and rollout logprobs, and CPU time
(this process and the harnesses) are printed as a table.

    python -m benchmarks.learning --seeds 0 1 2 3 4 --builders prefix_merging per_request
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path

import uvloop

from bridle.cli.demo import FRESH_SEED
from bridle.cli.demo_model import demo_model
from bridle.cli.demo_policy import lookup_task
from bridle.cli.demo_training import AT_ONCE, GRPO, LOOP, SAMPLES, TRAIN_SEED
from bridle.cli.training import TrainSettings, train_here
from bridle.config import BuilderSpec, Task
from bridle.datasets.lookups import lookups
from bridle.training.loop import Course


def tasks_of(folder: Path, name: str, count: int, seed: int, builder: str) -> list[Task]:
    """Lookups for the light agent, built by `builder`."""
    made = (lookup_task(task, folder / name) for task in lookups(count, seed=seed))
    spec = BuilderSpec(strategy=builder)
    return [
        task.model_copy(update={"task_id": f"{name}-{task.task_id}", "builder": spec})
        for task in made
    ]


def train(
    model: Path, folder: Path, builder: str, seed: int, options: argparse.Namespace
) -> Course:
    """One training; its course."""
    groups = LOOP.groups_per_step
    settings = TrainSettings(
        model=str(model),
        tasks="lookups",
        out=str(folder / "run"),
        samples=SAMPLES,
        concurrency=AT_ONCE,
        grpo=GRPO,
        loop=LOOP.model_copy(update={"steps": options.steps, "max_lag": options.max_lag}),
        seed=seed,
    )
    drawn = tasks_of(folder, "train", options.steps * groups, TRAIN_SEED + 1000 * seed, builder)
    fresh = tasks_of(folder, "fresh", options.fresh, FRESH_SEED, builder)
    several = [task.model_copy(update={"num_samples": SAMPLES}) for task in drawn]
    return uvloop.run(train_here(settings, several, fresh)).course


def cpu_seconds() -> float:
    """Of this process and of all harnesses that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    """Run all of it and print one line per training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--builders", nargs="+", default=["prefix_merging"])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--max-lag", type=int, default=LOOP.max_lag)
    parser.add_argument("--fresh", type=int, default=128)
    options = parser.parse_args()
    model = demo_model()
    print("| builder | seed | before | after | rise | tokens computed | logprob error | CPU, s |")
    print("|---|---|---|---|---|---|---|---|")
    for builder in options.builders:
        for seed in options.seeds:
            began = cpu_seconds()
            with tempfile.TemporaryDirectory() as scratch:
                course = train(model, Path(scratch), builder, seed, options)
            before, after = (course.evaluations[at]["reward"] for at in (0, -1))
            updates = [one["update"] for one in course.steps if one["update"]]
            errors = [one["logprob_error"] for one in updates if one["logprob_error"] is not None]
            print(
                f"| `{builder}` | {seed} | {before:.2f} | {after:.2f} | {after - before:+.2f} | "
                f"{sum(one['computed'] for one in updates):,} | {max(errors, default=0.0):.1e} | "
                f"{cpu_seconds() - began:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
