"""Trees against flat groups: long tasks with one decisive turn and a reward at the end alone.

A session goes through rooms, one call of its shell tool each, and chooses left or right, which is
all the same. In one room, late, there are four doors in any order, of which one leads out; nothing
says so before the end. The light script agent plays it with a small model that has seen
demonstrations of someone who takes any door. Three ways train it by GRPO: `flat` groups of four
sessions, trees that fork at the decisive turn (`decisive`), and trees that fork at every fourth
turn and know nothing of it (`every`).

Each update compares about as many choices of a door in each way (24 or 25), and all ways have the
same learning rate, so an update says as much in each; a tree samples fewer tokens for it, and so it
makes more updates with the same tokens. (Updates of equally many tokens hide the gain, as
`benchmarks.choices` shows: an optimiser that divides by the gradient's size, as AdamW does, moves
as far by a rough gradient as by a precise one.)

No task comes twice, so the mean reward of each step's sessions is the policy's success on tasks
that it has not seen; a fork goes on by the same policy from where that policy came, so forks count
too. At the end the success on held-out tasks is measured by itself.

A run that is in `OUT/trees.jsonl` is not done again, so it can be stopped and goes on.

    python -m benchmarks.trees --seeds 0 1 2 3 4
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.curves import Results, at_cost, interval, measured, reached, smooth
from examples.demo.recipe import make_demo_model

from bridle.bridges.examples import examples_of, write_sft
from bridle.cli.run import BatchRun, run_batch
from bridle.cli.train import TrainSettings
from bridle.config import Task
from bridle.node.results import sessions
from bridle.training.groups import HeldOutEvaluation
from bridle.training.settings import GrpoSettings, LoopSettings
from bridle.training.sft import SftSettings
from bridle.trajectory import rebuild
from bridle.types import JSON

TURNS = 12
"""Calls that move on; then the model says that it is there."""
DECISIVE = 11
"""The call that chooses a door."""
DOORS = ("north", "plum", "stone", "weather")
OUT = "plum"
"""The door that leads out."""

GO = f"""read n < n
n=$((n + 1))
echo $n > n
[ $n = {DECISIVE} ] && echo $1 > door
case $n in
{DECISIVE - 1}) read doors < doors; echo doors: $doors;;
{TURNS}) echo end;;
*) echo room $n;;
esac
"""
AGENT = f"{sys.executable} -S -I {Path(__file__).with_name('light_agent.py')} {{instruction}}"
AT_ONCE = 16
DEMO_SEED, TRAIN_SEED, FRESH_SEED = 10_000, 30_000, 20_000


@dataclass(frozen=True, slots=True)
class Way:
    """Origin of the sessions of a group."""

    roots: int
    """Sessions of a group that begin by themselves."""
    groups: int
    """Of an update."""
    steps: int
    """Updates, for about as many sampled tokens in each way."""
    branching: JSON | None = None


WAYS = {
    "flat": Way(4, 6, 11),
    "decisive": Way(1, 5, 30, {"at": [DECISIVE - 1], "samples": 4}),
    "every": Way(2, 4, 15, {"at": "every:4", "samples": 1}),
}
KL = 0.2
"""Weight of the divergence from the model of the beginning. Without it AdamW's noise breaks the
form of the tool calls once most groups are flat, in every way."""


@dataclass(frozen=True, slots=True)
class Walk:
    """One task."""

    number: int
    doors: tuple[str, ...]
    """In the order in which the room shows them."""

    @property
    def instruction(self) -> str:
        """Instruction of the user."""
        return f"q{self.number}: find the way out"

    def task(self, folder: Path, name: str, **more: object) -> Task:
        """Its task; the files are written below `folder`."""
        files = folder / f"{name}-{self.number}"
        files.mkdir(parents=True)
        for path, text in {"n": "0", "doors": " ".join(self.doors), "go": GO}.items():
            (files / path).write_text(text + "\n")
        upload = {"type": "upload_dir", "source": str(files.resolve()), "target": "."}
        check = f'test "$(cat n) $(cat door)" = "{TURNS} {OUT}"'
        task = {
            "task_id": f"{name}-{self.number}",
            "instruction": self.instruction,
            "agent": {"harness": "command", "command": AGENT},
            "runtime": {"backend": "local", "prepare": [upload]},
            "sampling": {"max_output_tokens": 48},
            "limits": {"max_turns": TURNS + 1},
            "budgets": {"agent_s": 300},
            "evaluator": {"strategy": "command", "config": {"command": check}},
        }
        return Task.model_validate(task | more)


def walks(count: int, seed: int) -> Iterator[Walk]:
    """`count` tasks; another seed gives fresh ones."""
    rng = random.Random(seed)  # noqa: S311 - a reproducible task set
    for number in range(count):
        yield Walk(number, tuple(rng.sample(DOORS, len(DOORS))))


def demonstration(walk: Walk, rng: random.Random) -> JSON:
    """Someone who goes anywhere, and through any door."""
    ways = [rng.choice(("left", "right")) for _ in range(TURNS)]
    ways[DECISIVE - 1] = rng.choice(walk.doors)
    calls = [{"name": "bash", "arguments": {"command": f"sh go {way}"}} for way in ways]
    turns = [{"content": "", "tool_calls": [call]} for call in calls]
    when = {"user_contains": f"{walk.instruction}"}
    return {"when": when, "turns": [*turns, {"content": "there"}]}


def make_model(folder: Path, options: argparse.Namespace) -> JSON:
    """Make the model from demonstrations; its success on held-out tasks."""
    count, steps = options.demonstrations, options.sft_steps
    rng = random.Random(DEMO_SEED)  # noqa: S311
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        drawn = list(walks(count, DEMO_SEED))
        script = place / "script.json"
        script.write_text(json.dumps({"conversations": [demonstration(one, rng) for one in drawn]}))
        tasks = [one.task(place / "files", "demo") for one in drawn]
        run_batch(BatchRun(tasks, f"scripted:{script}", place / "run", AT_ONCE, "demonstrations"))
        captured = sessions(place / "run")
        examples = (one for capture in captured for one in examples_of(rebuild(capture)))
        written = write_sft(place / "sft.jsonl", examples)
        short, whole = (
            SftSettings(
                epochs=1000,
                max_steps=most,
                batch_tokens=2048,
                learning_rate=rate,
                share_prefix=share,
            )
            for most, rate, share in zip(steps, (1.5e-3, 1e-3), (False, True), strict=True)
        )
        make_demo_model(place / "sft.jsonl", folder, short=short, whole=whole)
        fresh = [one.task(place / "files", "fresh") for one in walks(options.fresh, FRESH_SEED)]
        batch = BatchRun(fresh, f"embedded:{folder}", place / "fresh", AT_ONCE, "before")
        rewards = [line["reward"] for line in run_batch(batch)]
    return {"examples": written.examples, "success": statistics.mean(rewards)}


def train(way: Way, seed: int, options: argparse.Namespace, before: float) -> JSON:
    """Train the model once; its curve. `before` = its success on held-out tasks."""
    groups, steps = options.groups or way.groups, options.steps or way.steps
    loop = LoopSettings(
        steps=steps,
        groups_per_step=groups,
        max_lag=0,
        checkpoint_every=0,
        keep_checkpoints=1,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings = TrainSettings(
            model=str(options.out / "walker"),
            tasks="walks",
            out=str(folder / "run"),
            concurrency=AT_ONCE,
            grpo=GrpoSettings(learning_rate=options.rate, warmup_steps=3, kl=KL),
            loop=loop,
            seed=seed,
        )
        grown = {"num_samples": way.roots, "branching": way.branching}
        drawn = walks(steps * groups, TRAIN_SEED + seed)
        tasks = [one.task(folder / "files", "train", **grown) for one in drawn]
        fresh = [one.task(folder / "files", "fresh") for one in walks(options.fresh, FRESH_SEED)]
        return measured(settings, tasks, fresh, HeldOutEvaluation(before, len(fresh), 0, {}))


def table(results: Results, goal: float) -> Iterator[str]:
    """A line per way, and the curves."""
    runs = {name: results.of(way=name) for name in WAYS if results.of(way=name)}
    ways = {name: [smooth(run["played"]) for run in of] for name, of in runs.items()}
    ends = {name: [run["points"][-1]["success"] for run in of] for name, of in runs.items()}
    spent = {
        cost: min(curve[-1][cost] for curves in ways.values() for curve in curves)
        for cost in ("sampled", "cpu_s")
    }
    yield (
        f"| way | seeds | success at {spent['sampled']:,} sampled tokens | success at "
        f"{spent['cpu_s']:.0f} s of CPU | tokens to {goal:.2f} | CPU to {goal:.2f}, s "
        "| at the end, on held-out tasks | tokens in all | CPU in all, s |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, curves in ways.items():
        alike = [interval([at_cost(one, spent[cost], cost) for one in curves]) for cost in spent]
        tokens, cpu = ([reached(one, goal, cost) for one in curves] for cost in spent)
        total = [statistics.mean(run["points"][-1][cost] for run in runs[name]) for cost in spent]
        yield (
            f"| `{name}` | {len(curves)} | {alike[0]} | {alike[1]} | {interval(tokens, ',.0f')} "
            f"| {interval(cpu, '.0f')} | {interval(ends[name])} | {total[0]:,.0f} "
            f"| {total[1]:.0f} |"
        )
    marks = [share * spent["sampled"] / 6 for share in range(7)]
    yield "\n| sampled tokens | " + " | ".join(f"{mark:,.0f}" for mark in marks) + " |"
    yield "|---|" + "---|" * len(marks)
    for name, curves in ways.items():
        means = [statistics.mean(at_cost(one, mark, "sampled") for one in curves) for mark in marks]
        yield f"| `{name}` | " + " | ".join(f"{mean:.2f}" for mean in means) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Do the runs that are not there, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, help="updates, in place of the way's own")
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate")
    parser.add_argument("--groups", type=int, help="of an update, in place of the way's own")
    parser.add_argument("--fresh", type=int, default=64)
    parser.add_argument("--goal", type=float, default=0.6)
    parser.add_argument("--demonstrations", type=int, default=300)
    parser.add_argument("--sft-steps", type=int, nargs=2, default=(400, 150))
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args(arguments)
    results = Results(options.out / "trees.jsonl")
    if options.seeds:
        folder = options.out / "walker"
        if not results.of(way="model"):
            shutil.rmtree(folder, ignore_errors=True)
        results.once({"way": "model"}, lambda: make_model(folder, options))
        (model,) = results.of(way="model")
    for seed, name in product(options.seeds, options.ways):
        results.once(
            {"way": name, "seed": seed},
            lambda: train(WAYS[name], seed, options, model["success"]),  # noqa: B023 - at once
        )
    print("\n".join(table(results, options.goal)))


if __name__ == "__main__":
    main()
