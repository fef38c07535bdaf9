"""Forks of real harnesses: how far a session replays, and what a replayed turn costs.

Each packaged harness runs a few shell commands on a script in the default sandbox. Its session is
then forked at its last call: every reply is given again from capture while its tools run in a fresh
work folder. A row says how many calls were given again, whether each fork is exact or equivalent,
the seconds of both runs (from the harness's start to its end), and what was different. `--loops`
does the same with the agent loops of SDKs and frameworks in `tests/agent_loops` (without a sandbox,
as their suite runs them), whose environments have been installed by `make test-agents`.

    python -m benchmarks.forks [NAME...] [--turns 8] [--again 3]
    python -m benchmarks.forks --loops [NAME...] [--again 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.agent_loops.loops import LOOPS, Loop
from tests.agent_loops.running import PROGRAMS, command, run_program

from bridle.capture.sqlite import SqliteReader
from bridle.cli.harness import EDITS, SUBMIT
from bridle.cli.run import BatchRun, run_batch
from bridle.config import EvaluatorSpec, ForkSpec, Task
from bridle.gateway.replay import replay_of, replies_of
from bridle.harnesses import ANY_PROGRAM, HARNESSES, default_agent


def script(name: str, turns: int) -> dict[str, Any]:
    """Commands whose output is the same in every run, then the end."""
    steps: list[dict[str, Any]] = [
        {"content": "", "shell": [f"echo {n} >> log.txt; wc -c < log.txt; seq {n + 3}"]}
        for n in range(turns)
    ]
    ended = [{"content": "Done.", "shell": [SUBMIT]}, {"content": "Done."}]
    return {"conversations": [{"turns": EDITS[name][1] if name in EDITS else [*steps, *ended]}]}


def tried(name: str, turns: int, again: int, scratch: Path) -> dict[str, Any]:
    """Run a harness once and fork its session `again` times at its last reply."""
    agent = default_agent(name)
    settings = EDITS[name][0] if name in EDITS else {}
    task = Task(
        task_id=f"fork-{name}",
        instruction="Do what has to be done.",
        agent=agent.model_copy(update={"settings": settings}),
        evaluator=EvaluatorSpec(strategy="session_completed"),
    )
    path = scratch / "script.json"
    path.write_text(json.dumps(script(name, turns)))
    engine = f"scripted:{path}"
    run = scratch / "run"
    (first,) = run_batch(BatchRun([task], engine, run, 1, name))
    with SqliteReader(run / "capture.sqlite") as reader:
        replies = sum(
            one.state == "delivered" for one in reader.read(first["session_id"]).deliveries.values()
        )
    spec = ForkSpec(capture=str(run / "capture.sqlite"), session=first["session_id"], at=replies)
    forked = task.model_copy(update={"fork": spec, "num_samples": again})
    lines = run_batch(BatchRun([forked], engine, scratch / "forks", 1, f"{name} again"))
    return {
        "harness": name,
        "replies": replies,
        "given again": [line["fork"]["replayed"] for line in lines],
        "verdicts": [
            ": ".join((line["fork"]["verdict"], *line["fork"]["noise"])) for line in lines
        ],
        "first s": first["timing"]["run"],
        "again s": statistics.median(line["timing"]["run"] for line in lines),
        "error": next((line["error"] for line in lines if line["error"]), ""),
    }


async def looped(loop: Loop, again: int, scratch: Path) -> dict[str, Any]:
    """Run an agent loop once and fork its session `again` times at its last reply."""
    shutil.copytree(PROGRAMS, scratch / "programs")
    argv = await command(loop, scratch / "programs")
    home = scratch / "work"
    runs, seconds, facts, replies = [], [], [], 0
    for _ in range(again + 1):
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        replay = None
        if runs:
            replies, _ = replies_of(runs[0].capture)
            replay = replay_of(runs[0].capture, replies)
        began = time.monotonic()
        runs.append(await run_program(argv, home, loop, replay))
        seconds.append(time.monotonic() - began)
        facts += [replay.facts()] if replay else []
    answer = re.search("the fork's call .*", runs[-1].output)
    return {
        "harness": loop.name,
        "replies": f"{replies} of {len(runs[0].exchanges)}",
        "given again": [one["replayed"] for one in facts],
        "verdicts": [": ".join((one["verdict"], *one["noise"])) for one in facts],
        "first s": seconds[0],
        "again s": statistics.median(seconds[1:]),
        "error": answer[0][:300] if answer else "",
    }


def main() -> None:
    """Try harnesses one after another and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--again", type=int, default=3)
    parser.add_argument("--loops", action="store_true", help="agent loops; names are their files")
    options = parser.parse_args()
    print("| harness | replies | given again | forks | first, s | again, s | what differs |")
    print("|---|---|---|---|---|---|---|", flush=True)
    loops = [one for one in LOOPS if not options.names or one.program in options.names]
    names = options.names or sorted(set(HARNESSES) - set(ANY_PROGRAM))
    for each in loops if options.loops else names:
        with tempfile.TemporaryDirectory(prefix="bridle-forks-") as scratch:
            if isinstance(each, Loop):
                row = asyncio.run(looped(each, options.again, Path(scratch)))
            else:
                row = tried(each, options.turns, options.again, Path(scratch))
        given = ", ".join(map(str, row["given again"]))
        print(
            f"| {row['harness']} | {row['replies']} | {given} | {', '.join(row['verdicts'])} "
            f"| {row['first s']:.2f} | {row['again s']:.2f} | {row['error']} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
