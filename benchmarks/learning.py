"""Learning of the demo model through the light script harness, over seeds and ways.

A way is a builder, and what a later call of a session is sampled under: the `ids` of the call
before (token in, token out), or the `messages` rendered anew, as an engine behind a chat route does
it; the drift that this makes is trained on as it was sampled. Each run draws its own tasks, trains
as the demo does, and is measured before and after on the same fresh tasks.

One run per call, so that it can be done in pieces; each appends a line to `OUT/learning.jsonl`, and
one that is there is not done again. Without `--seed` the table of all that is there is printed.

    python -m benchmarks.learning --seed 0 --builder per_request --context ids
    python -m benchmarks.learning
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvloop
from examples.demo.lookups import lookups
from examples.demo.main import FRESH_SEED
from examples.demo.model import demo_model
from examples.demo.policy import lookup_task
from examples.demo.training import AT_ONCE, GRPO, LOOP, SAMPLES, TRAIN_SEED

from bridle.cli.config import EngineSetup
from bridle.cli.train import TrainSettings, local_backend, train_here
from bridle.config import BuilderSpec, Task
from bridle.prompting.renderer import PromptRenderer
from bridle.training.loop import Course
from bridle.types import JSON

NAME = "learning.jsonl"


class AnewRenderer(PromptRenderer):
    """Extends nothing: every call is the root of a conversation, rendered from its messages."""

    def extend(self, *_: object, **__: object) -> None:
        """`None` = render all of it."""
        return


def rendered_anew(parts: EngineSetup) -> EngineSetup:
    """The same parts with such a renderer."""
    renderer = object.__new__(AnewRenderer)
    vars(renderer).update(vars(parts.renderer))
    return replace(parts, renderer=renderer)


def tasks_of(folder: Path, name: str, count: int, seed: int, builder: str) -> list[Task]:
    """Lookups for the light agent, built by `builder`."""
    made = (lookup_task(task, folder / name) for task in lookups(count, seed=seed))
    spec = BuilderSpec(strategy=builder)
    return [
        task.model_copy(update={"task_id": f"{name}-{task.task_id}", "builder": spec})
        for task in made
    ]


def train(folder: Path, options: argparse.Namespace) -> Course:
    """One training; its course."""
    loop = LOOP.model_copy(update={"steps": options.steps, "max_lag": options.max_lag})
    settings = TrainSettings(
        model=str(demo_model()),
        tasks="lookups",
        out=str(folder / "run"),
        samples=SAMPLES,
        concurrency=AT_ONCE,
        grpo=GRPO,
        loop=loop,
        seed=options.seed,
    )
    count, seed = options.steps * loop.groups_per_step, TRAIN_SEED + 1000 * options.seed
    drawn = tasks_of(folder, "train", count, seed, options.builder)
    fresh = tasks_of(folder, "fresh", options.fresh, FRESH_SEED, options.builder)
    several = [task.model_copy(update={"num_samples": SAMPLES}) for task in drawn]
    change = {"ids": lambda parts: parts, "messages": rendered_anew}[options.context]
    opener = partial(local_backend, change=change)
    return uvloop.run(train_here(settings, several, fresh, opener=opener)).course


def cpu_seconds() -> float:
    """Of this process and of all harnesses that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def key_of(options: argparse.Namespace) -> JSON:
    """Return the key of a run."""
    names = ("builder", "context", "seed", "steps", "max_lag", "fresh")
    return {name: getattr(options, name) for name in names}


def measured(options: argparse.Namespace) -> JSON:
    """Train once; a line of the file."""
    began = cpu_seconds()
    with tempfile.TemporaryDirectory() as scratch:
        course = train(Path(scratch), options)
    updates = [one["update"] for one in course.steps if one["update"]]
    errors = [one["logprob_error"] for one in updates if one["logprob_error"] is not None]
    return {
        **key_of(options),
        "before": course.evaluations[0]["reward"],
        "after": course.evaluations[-1]["reward"],
        "rewards": [one["reward"] for one in course.steps],
        "updates": len(updates),
        "traces": sum(one["traces"] for one in updates),
        "tokens": sum(one["tokens"] for one in updates),
        "computed": sum(one["computed"] for one in updates),
        "logprob_error": max(errors, default=None),
        "steps_compared": len(errors),
        "cpu_s": round(cpu_seconds() - began, 1),
    }


def table(runs: list[JSON]) -> Iterator[str]:
    """A line per way: means over its seeds."""
    yield (
        "| builder | context | seeds | before | after | rise, mean | rise of each seed | traces "
        "| tokens computed | largest logprob error | CPU, s |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    ways = {(one["builder"], one["context"]): None for one in runs}
    for builder, context in ways:
        of = [one for one in runs if (one["builder"], one["context"]) == (builder, context)]
        of.sort(key=lambda one: int(one["seed"]))
        rises = [one["after"] - one["before"] for one in of]
        mean = {
            name: statistics.mean(one[name] for one in of)
            for name in ("before", "after", "traces", "computed", "cpu_s")
        }
        yield (
            f"| `{builder}` | {context} | {len(of)} | {mean['before']:.3f} | {mean['after']:.3f} | "
            f"{statistics.mean(rises):+.3f} | {', '.join(f'{rise:+.2f}' for rise in rises)} | "
            f"{mean['traces']:,.0f} | {mean['computed']:,.0f} | "
            f"{max(one['logprob_error'] for one in of):.1e} | {mean['cpu_s']:.0f} |"
        )


def main() -> None:
    """One run, or the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--builder", default="prefix_merging")
    parser.add_argument("--context", choices=["ids", "messages"], default="ids")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--max-lag", type=int, default=LOOP.max_lag)
    parser.add_argument("--fresh", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    path = options.out / NAME
    runs = [json.loads(line) for line in path.open()] if path.exists() else []
    if options.seed is None:
        print("\n".join(table(runs)))
        return
    known = key_of(options)
    if any(known.items() <= run.items() for run in runs):
        print(f"{known} is there already")
        return
    line = measured(options)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line))


if __name__ == "__main__":
    main()
