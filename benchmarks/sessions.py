"""Sessions on one node: how busy run slots are with and without a READY buffer, and what 200 cost.

`slots`: sessions that only take time (`tests/node/simulated.py`): run times are log-normal
with sigma 1, making a runtime ready takes a fifth of the mean run, log-normal with sigma 0.5. The
node is the real one; its clock jumps, so hours take seconds and the machine's load means nothing.

`memory`: real sessions of a Python agent with a shell tool on runtime `local`, all at once, each
waiting for the model: the memory of this process and of all that it started, when all of them run.
`light` speaks over a bare socket, `stdlib` over urllib, as users write it. `rss` counts a page that
processes share once for each of them, `pss` once.

    python -m benchmarks.sessions slots [--sessions 2000] [--slots 4 16 64]
    python -m benchmarks.sessions memory [--sessions 200] [--agent light|stdlib]

`interpreter`: of what a waiting Python agent's memory is, by what it has imported.

    python -m benchmarks.sessions interpreter
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.node.house import AGENT, a_node, checked, task
from tests.node.simulated import Busy, simulate

from bridle.aio import Nursery
from bridle.capture.sqlite import SqliteStore
from bridle.config import RuntimeSpec
from bridle.node.local import LocalExecutor
from bridle.types import SessionStatus

MIB = 1 << 20
AGENTS = {
    "light": f"{sys.executable} -S -I {Path(__file__).with_name('light_agent.py')}",
    "stdlib": AGENT,
}
LOCAL = RuntimeSpec(backend="local")


def slots(args: argparse.Namespace) -> None:
    """Print how busy run slots are, by the size of the buffer."""
    print("| run slots | READY buffer | busy | ready on average | the batch, h |")
    print("|---|---|---|---|---|")
    for run_slots in args.slots:
        sizes = {0: "0 (none)", run_slots // 4: "", run_slots // 2: " (the default)"}
        for buffer, said in sorted(sizes.items()):
            seen: Busy = simulate(args.sessions, run_slots=run_slots, ready_buffer=buffer)
            numbers = f"{seen.share:.1%} | {seen.ready:.1f} | {seen.hours:.2f}"
            print(f"| {run_slots} | {said if buffer == 0 else f'{buffer}{said}'} | {numbers} |")


async def memory(args: argparse.Namespace) -> None:
    """Print the memory of a node and its sessions when all of them run."""
    turns = [{"shell": ["echo done > out.txt"], "delay_s": args.wait}, {"content": "It is done."}]
    most: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="bridle-memory-") as name:
        folder = Path(name)
        store = await SqliteStore.open(folder / "capture.sqlite")
        settings = {"run_slots": args.sessions}
        async with a_node(folder, *turns, store=store, settings=settings) as node:

            async def watch() -> None:
                while True:
                    running = node.stages().get(SessionStatus.RUNNING, 0)
                    if running >= most["running"]:
                        seen = await asyncio.to_thread(footprint)
                        if (running, seen["rss"]) > (most["running"], most["rss"]):
                            most.update(Counter({**seen, "running": running}) - most)
                    await asyncio.sleep(0.25)

            began = time.monotonic()
            batch = [
                task(
                    AGENTS[args.agent],
                    num_samples=args.sessions,
                    evaluator=checked(),
                    runtime=LOCAL,
                    budgets={"agent_s": 300},
                )
            ]
            async with Nursery(on_error=print) as nursery:
                nursery.start(watch(), name="watch")
                async with LocalExecutor(node).run(batch) as results:
                    ended = Counter([str(result.status) async for result in results])
        await store.aclose()
    print(
        f"{args.sessions} sessions: {dict(ended)} in {time.monotonic() - began:.1f} s of wall time"
    )
    print(f"at once: {most['running']} running, {most['processes']} processes")
    for kind in ("node rss", "rss", "pss"):
        print(f"{kind}: {most[kind] / MIB:.0f} MiB")


def footprint() -> Counter[str]:
    """Bytes of this process (`node rss`) and of it and all its descendants (`rss`, `pss`)."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    mine, seen = {own_pid()}, Counter({"processes": 0})
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    for pid in mine:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        sizes = {key: 1024 * int(kb) for key, kb in re.findall(r"(?m)^(Rss|Pss): +(\d+) kB", text)}
        seen.update({"rss": sizes["Rss"], "pss": sizes["Pss"], "processes": 1})
        if pid == own_pid():
            seen["node rss"] = sizes["Rss"]
    return seen


IMPORTS = {
    "nothing": "",
    "what a light agent needs": "import json, os, subprocess, socket",
    "http.client beside that": "import json, os, subprocess, http.client",
    "urllib.request instead": "import json, os, subprocess, urllib.request",
}


def interpreter(args: argparse.Namespace) -> None:
    """Print the PSS of one of many waiting interpreters, by what it imported."""
    print("| imported | MiB each, of its own |")
    print("|---|---|")
    for name, line in IMPORTS.items():
        program = f"{line}\nimport sys\nprint(1, flush=True)\nsys.stdin.read()"
        several = [
            subprocess.Popen(
                [sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for _ in range(args.processes)
        ]
        for each in several:
            assert each.stdout is not None
            each.stdout.readline()
        before = footprint()
        for each in several:
            each.communicate()
        size = (before["pss"] - footprint()["pss"]) / args.processes
        print(f"| {name} | {size / MIB:.1f} |")


def own_pid() -> int:
    """This process."""
    return int(Path("/proc/self").readlink().name)


def main() -> None:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True)
    of_slots = what.add_parser("slots")
    of_slots.add_argument("--sessions", type=int, default=2000)
    of_slots.add_argument("--slots", type=int, nargs="+", default=[4, 16, 64])
    of_memory = what.add_parser("memory")
    of_memory.add_argument("--sessions", type=int, default=200)
    of_memory.add_argument(
        "--wait", type=float, default=30, help="seconds of the model's first turn"
    )
    of_memory.add_argument("--agent", choices=sorted(AGENTS), default="light")
    of_interpreter = what.add_parser("interpreter")
    of_interpreter.add_argument("--processes", type=int, default=20)
    args = parser.parse_args()
    if args.what == "slots":
        slots(args)
    elif args.what == "interpreter":
        interpreter(args)
    else:
        asyncio.run(memory(args))


if __name__ == "__main__":
    main()
