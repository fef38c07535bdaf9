"""Wall time of a training step and the engine's busy share, over a real vLLM with tool waits.

Sessions of many short turns run through the gateway in a harness that waits between its calls as
tools do, and are trained four ways: synchronously or ahead of the updates, from the traces of
`per_request` or of `prefix_merging`. vLLM and the trainer are processes of their own; on two cores
each has about one. The engine is busy while at least one call is in flight (from the capture).

    make test-vllm                          # once: it installs vLLM
    python -m benchmarks.wall_time          # one line per way, then the table
    python -m benchmarks.wall_time --ways sync:per_request async:prefix_merging
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvloop
from examples.demo.model import demo_model
from tests.vllm.serving import VllmServer

from bridle.cli.train import TrainSettings, train_here
from bridle.config import Task
from bridle.node.results import sessions
from bridle.training.loop import Course
from bridle.training.settings import GrpoSettings, LoopSettings
from bridle.types import JSON

AGENT = Path(__file__).with_name("waiting_agent.py")
AHEAD = {"sync": 0, "async": 2}
WAYS = [f"{when}:{builder}" for when in AHEAD for builder in ("per_request", "prefix_merging")]
OUTPUT_TOKENS = 24
"""Sampled tokens of a turn, at most."""


def tasks_of(options: argparse.Namespace, builder: str) -> list[Task]:
    """One task for each group; each session's waits are drawn by its own process."""
    drawn = random.Random(0)  # noqa: S311 - waits
    count = options.steps * options.groups
    return [
        Task.model_validate(
            {
                "task_id": f"t{number}",
                "instruction": "Say which number each file holds.",
                "num_samples": options.samples,
                "agent": {
                    "harness": "command",
                    "command": f"{sys.executable} -S {AGENT} {options.turns} "
                    f"{options.tools_s} {drawn.randrange(1 << 30)}",
                },
                "runtime": {"backend": "local"},
                "builder": {"strategy": builder},
                "sampling": {"max_output_tokens": OUTPUT_TOKENS},
                "evaluator": {"strategy": "command", "config": {"command": "test $(($$ % 2)) = 0"}},
            }
        )
        for number in range(count)
    ]


def train(options: argparse.Namespace, way: str, engine: str, folder: Path) -> JSON:
    """Train once; the measured numbers of the steps behind the first."""
    when, _, builder = way.partition(":")
    ends: list[float] = []

    def tell(course: Course) -> None:
        if course.steps:
            ends.append(time.time())

    settings = TrainSettings(
        model=str(demo_model()),
        tasks="waiting sessions",
        out=str(folder),
        engines=(engine,),
        samples=options.samples,
        concurrency=options.groups * options.samples * (1 + AHEAD[when]),
        grpo=GrpoSettings(learning_rate=1e-6, threads=1, flat_groups="keep"),
        loop=LoopSettings(
            steps=options.steps,
            groups_per_step=options.groups,
            max_lag=AHEAD[when],
            checkpoint_every=0,
        ),
    )
    trained = uvloop.run(train_here(settings, tasks_of(options, builder), tell=tell))
    steps = trained.course.steps[1:]
    calls = [
        (call.started_at, call.started_at + call.duration_s)
        for capture in sessions(Path(trained.rollouts))
        for call in capture.exchanges
    ]
    began, ended = ends[0], ends[len(steps)]
    return {
        "way": way,
        "step_s": (ended - began) / len(steps),
        "steps_s": [b - a for a, b in itertools.pairwise(ends)],
        "busy": busy(calls, began, ended) / (ended - began),
        "trainer_s": statistics.mean(one["update"]["seconds"] for one in steps if one["update"]),
        "traces": statistics.mean(one["update"]["traces"] for one in steps if one["update"]),
        "calls": len(calls),
    }


def busy(calls: Sequence[tuple[float, float]], began: float, ended: float) -> float:
    """Seconds between `began` and `ended` in which at least one call was in flight."""
    total, reached = 0.0, began
    for start, end in sorted(calls):
        total += max(0.0, min(end, ended) - max(start, reached))
        reached = max(reached, min(end, ended))
    return total


def table(rows: Sequence[JSON]) -> Iterator[str]:
    """The ways against the first of `rows`."""
    yield "| way | time per step, s | of the first | engine busy | update, s | traces of a step |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row['way'].replace(':', ', `')}` | {row['step_s']:.2f} | "
            f"{row['step_s'] / rows[0]['step_s']:.2f} | {row['busy']:.0%} | "
            f"{row['trainer_s']:.2f} | {row['traces']:.0f} |"
        )


def main() -> None:
    """Train in each way on one server, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--groups", type=int, default=2, help="groups of a step")
    parser.add_argument("--samples", type=int, default=4, help="sessions of a group")
    parser.add_argument("--turns", type=int, default=32)
    parser.add_argument("--tools-s", type=float, default=0.2, help="mean wait between two calls")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with VllmServer(folder, demo_model()) as server:
            server.running("--logprobs-mode", "processed_logprobs", "--max-model-len", "4096")
            rows = []
            for number, way in enumerate(options.ways):
                row = train(options, way, server.url, folder / str(number))
                print(row, file=sys.stderr, flush=True)
                rows.append(row)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
