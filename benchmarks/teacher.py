"""On-policy distillation against GRPO: tokens until a weak policy is as good as its teacher.

The policy is the demo model, which succeeds in one lookup of six through the light script harness.
The teacher is that model after a longer training by GRPO on tasks of its own. Each seed draws its
own tasks and trains the demo model twice: by rewards alone (`grpo`, as the demo does) and pulled
to the teacher on its own samples (`distill`). Success is measured on held-out tasks between steps.

A run that is in `OUT/teacher.jsonl` is not done again, so it can be stopped and goes on.

    python -m benchmarks.teacher --seeds 0 1 2 3 4
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from benchmarks.curves import Results, interval, measured, reached
from examples.demo.lookups import lookups
from examples.demo.main import FRESH_SEED
from examples.demo.model import demo_model
from examples.demo.policy import lookup_task
from examples.demo.training import AT_ONCE, GRPO, LOOP, SAMPLES, TRAIN_SEED

from bridle.cli.train import TrainSettings
from bridle.config import Task
from bridle.training.loop import checkpoints
from bridle.training.settings import GrpoSettings, LoopSettings
from bridle.types import JSON

TEACHER_SEED = 900
AS_GOOD = 0.95
"""Share of the teacher's success that counts as reaching it."""

WAYS = ("grpo", "distill")


def settings_of(way: str, options: argparse.Namespace) -> tuple[GrpoSettings, LoopSettings, int]:
    """Objective, schedule and group size of a way."""
    if way == "grpo":
        schedule = {"steps": options.steps, "evaluate_every": options.every}
        loop = LOOP.model_copy(update={**schedule, "groups_per_step": options.groups})
        return GRPO, loop, SAMPLES
    taught = {
        "teacher": str(options.out / "teacher"),
        "flat_groups": "keep",
        "learning_rate": options.rate,
        "warmup_steps": 4,
    }
    schedule = {"steps": options.taught_steps, "evaluate_every": options.taught_every}
    loop = LOOP.model_copy(update={**schedule, "groups_per_step": options.taught_groups})
    return GRPO.model_copy(update=taught), loop, 2


def tasks_of(folder: Path, name: str, count: int, seed: int) -> list[Task]:
    """Lookups for the light agent, each once."""
    made = (lookup_task(task, folder / name) for task in lookups(count, seed=seed))
    return [task.model_copy(update={"task_id": f"{name}-{task.task_id}"}) for task in made]


def train(way: str, seed: int, options: argparse.Namespace, keep: Path | None = None) -> JSON:
    """Train the demo model once; its curve. `keep` gets the model that comes out."""
    grpo, loop, samples = settings_of(way, options)
    if keep is not None:
        loop = loop.model_copy(update={"steps": options.teacher_steps, "evaluate_every": 0})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings = TrainSettings(
            model=str(options.model or demo_model()),
            tasks="lookups",
            out=str(folder / "run"),
            samples=samples,
            concurrency=AT_ONCE,
            grpo=grpo,
            loop=loop,
            seed=seed,
        )
        drawn = tasks_of(
            folder, "train", loop.steps * loop.groups_per_step, TRAIN_SEED + 1000 * seed
        )
        fresh = tasks_of(folder, "fresh", options.fresh, FRESH_SEED)
        several = [task.model_copy(update={"num_samples": samples}) for task in drawn]
        curve = measured(settings, several, fresh)
        if keep is not None:
            shutil.copytree(checkpoints(folder / "run" / "checkpoints")[-1], keep)
    return curve


def teach(options: argparse.Namespace) -> JSON:
    """Make the teacher; its success before and after, and what it cost."""
    folder = options.out / "teacher"
    shutil.rmtree(folder, ignore_errors=True)
    return train("grpo", TEACHER_SEED, options, keep=folder)


def table(results: Results) -> Iterator[str]:
    """The teacher, both ways over all seeds, and each seed's tokens."""
    teacher = results.of(way="teacher")[0]["points"][-1]
    goal = AS_GOOD * teacher["success"]
    yield (
        f"teacher: {teacher['success']:.3f} on held-out tasks, made with {teacher['sampled']:,} "
        f"sampled tokens; {goal:.3f} counts as reached\n"
    )
    yield (
        "| way | seeds | before | after | tokens to the goal | CPU to the goal, s | tokens in all |"
    )
    yield "|---|---|---|---|---|---|---|"
    spent = {}
    for way in filter(lambda way: results.of(way=way), WAYS):
        of = sorted(results.of(way=way), key=lambda run: int(run["seed"]))
        curves = [run["points"] for run in of]
        spent[way] = {run["seed"]: reached(run["points"], goal, "sampled") for run in of}
        cpu = [reached(points, goal, "cpu_s") for points in curves]
        yield (
            f"| `{way}` | {len(of)} | {interval([one[0]['success'] for one in curves])} "
            f"| {interval([one[-1]['success'] for one in curves])} "
            f"| {interval(list(spent[way].values()), ',.0f')} | {interval(cpu, '.0f')} "
            f"| {statistics.mean(one[-1]['sampled'] for one in curves):,.0f} |"
        )
    yield "\n| seed | `grpo`, tokens | `distill`, tokens | of `grpo` |"
    yield "|---|---|---|---|"
    for seed in sorted(set(spent.get("grpo", ())) & set(spent.get("distill", ()))):
        alone, taught = (spent[way][seed] for way in WAYS)
        share = f"{taught / alone:.2f}" if 0 < alone < math.inf else "-"
        yield f"| {seed} | {alone:,.0f} | {taught:,.0f} | {share} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Do the runs that are not there, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--every", type=int, default=8, help="steps of grpo between evaluations")
    parser.add_argument("--teacher-steps", type=int, default=40)
    parser.add_argument("--taught-steps", type=int, default=60)
    parser.add_argument("--taught-every", type=int, default=12)
    parser.add_argument("--groups", type=int, default=LOOP.groups_per_step, help="of an update")
    parser.add_argument("--taught-groups", type=int, default=4)
    parser.add_argument("--rate", type=float, default=6e-4, help="learning rate of distill")
    parser.add_argument("--fresh", type=int, default=64)
    parser.add_argument("--model", type=Path, help="another policy than the demo model")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args(arguments)
    results = Results(options.out / "teacher.jsonl")
    if options.seeds:
        results.once({"way": "teacher"}, lambda: teach(options))
    for seed, way in product(options.seeds, options.ways):
        results.once({"way": way, "seed": seed}, lambda: train(way, seed, options))  # noqa: B023 - called at once
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
