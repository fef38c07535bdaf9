"""Cost of a Ray cluster beside one process: per session, and in throughput.

    python -m benchmarks.ray [--sessions 60] [--machines 4] [--slots 4]

The same light sessions (one model call on a scripted engine) run on a node of this process, and on
machines of a Ray cluster that are processes of this one, with as many slots in all. Overhead is the
median of sessions one after the other; throughput that of sessions which mostly sleep, all at once.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bridle.cli.config import FileConfig, load_config
from bridle.cli.serve import workers_of
from bridle.config import AgentSpec, RuntimeSpec, Task
from bridle.node.base import SessionRunner

STORE_BYTES = 80 << 20
AGENT = f"{sys.executable} -S {Path(__file__).with_name('light_agent.py')}"


@contextmanager
def machines(count: int) -> Iterator[str]:
    """A head that computes nothing, and `count` machines."""
    from ray.cluster_utils import Cluster

    from bridle.node.ray import HEALTH

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": HEALTH}
    cluster = Cluster(
        initialize_head=True,
        connect=False,
        head_node_args={**head, "object_store_memory": STORE_BYTES},
    )
    try:
        for _ in range(count):
            offers = {"bridle_node": 1.0}
            cluster.add_node(num_cpus=1, resources=offers, object_store_memory=STORE_BYTES)
        yield cluster.address
    finally:
        cluster.shutdown()


def task(command: str) -> Task:
    """One light session."""
    return Task(
        task_id="t",
        instruction="Say it.",
        runtime=RuntimeSpec(backend="local"),
        agent=AgentSpec(harness="command", command=command),
    )


async def one(workers: SessionRunner, command: str, name: str) -> float:
    """Return the seconds from a session's submission to its result."""
    began = time.perf_counter()
    result = await workers.run(task(command), 0, name, frozenset())
    took = time.perf_counter() - began
    workers.release(name)
    assert result.status == "COMPLETED", result.error
    return took


async def measure(
    config: FileConfig, folder: Path, given: argparse.Namespace
) -> tuple[float, float]:
    """Medians of sessions one by one, and how long many of them take together."""
    async with workers_of(config, folder, "bench") as workers:
        workers.settle()
        for number in range(2 * given.machines):
            await one(workers, AGENT, f"warm-{number}")
        singles = [await one(workers, AGENT, f"single-{n}") for n in range(given.sessions)]
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(given.sessions):
                command = f"sleep {given.sleep_s}; {AGENT}"
                group.create_task(one(workers, command, f"many-{number}"))
        return statistics.median(singles), given.sessions / (time.perf_counter() - began)


def main() -> None:
    """Measure both, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--slots", type=int, default=4, help="run slots of each machine")
    parser.add_argument("--sleep-s", type=float, default=2.0)
    given = parser.parse_args()
    os.environ["BRIDLE_RUNTIME"] = "local"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        script = folder / "script.json"
        script.write_text(json.dumps({"conversations": [{"turns": [{"content": "Well."}]}]}))

        def config(kind: str, slots: int) -> FileConfig:
            buffers = {"run_slots": slots, "ready_buffer": slots // 2, "post_slots": slots // 4}
            flags = {"kind": kind, "node": buffers}
            return load_config(None, engines=[f"scripted:{script}"], executor=flags)

        here = config("local", given.slots * given.machines)
        local = asyncio.run(measure(here, folder / "local", given))
        with machines(given.machines) as address:
            os.environ["RAY_ADDRESS"] = address
            ray = asyncio.run(measure(config("ray", given.slots), folder / "ray", given))
    result = {
        "local_ms": 1e3 * local[0],
        "ray_ms": 1e3 * ray[0],
        "overhead_ms": 1e3 * (ray[0] - local[0]),
        "local_per_s": local[1],
        "ray_per_s": ray[1],
        "throughput": ray[1] / local[1],
    }
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
