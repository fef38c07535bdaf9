"""The second part of the demo: a small model of our own behind a light script harness."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from bridle.cli.run import BatchRun, forked_task, run_batch
from bridle.cli.terminal import console
from bridle.config import BuilderSpec, Task
from bridle.node.results import find_session, sessions
from bridle.trajectory import rebuild
from bridle.trajectory.transcript import Transcript, excerpt
from bridle.types import JSON

from .lookups import Lookup, lookups, write_files
from .main import FRESH_SEED, Part, light_agent_command, show_part

SHOWN = 6
"""Sessions of this part that are listed one by one."""

FORKS = 4
"""Forks of the session that is shown."""


def policy_part(folder: Path, count: int, model: Path) -> Part:
    """Run `count` fresh lookups with the model in a folder."""
    tasks = [lookup_task(task, folder / "tasks") for task in lookups(count, seed=FRESH_SEED)]
    began = time.monotonic()
    batch = BatchRun(tasks, f"embedded:{model}", folder / "run", 8, "light agent, small model")
    return Part(folder / "run", run_batch(batch), time.monotonic() - began)


def lookup_task(task: Lookup, folder: Path) -> Task:
    """A lookup as a task for the light agent; its files are written below `folder`."""
    files = folder / task.task_id
    write_files(task, files)
    return Task.model_validate(
        {
            "task_id": task.task_id,
            "instruction": task.instruction,
            "agent": {"harness": "command", "command": light_agent_command()},
            # Its program is a script of ours, run by the Python that runs Bridle.
            "runtime": {
                "backend": "local",
                "prepare": [{"type": "upload_dir", "source": str(files.resolve()), "target": "."}],
            },
            "sampling": {"max_output_tokens": 64},
            "budgets": {"agent_s": 120},
            "evaluator": {
                "strategy": "command",
                "config": {"command": f'test "$(cat answer.txt)" = {task.answer}'},
            },
        }
    )


def show_policy(part: Part, model: Path) -> float:
    """Print what came of it; returns the share of right answers."""
    show_part(Part(part.folder, part.sessions[:SHOWN], part.seconds))
    rate = sum(line["reward"] or 0.0 for line in part.sessions) / len(part.sessions)
    calls = sum(line["exchanges"] for line in part.sessions)
    if (more := len(part.sessions) - SHOWN) > 0:
        console.print(f"... and {more} more")
    console.print(f"model: {model}")
    console.print(
        f"{rate:.0%} of {len(part.sessions)} fresh tasks right, {calls} model calls; the "
        "model learned from a demonstrator that is weak on purpose"
    )
    for builder in ("prefix_merging", "per_request"):
        traces = Counter(
            len(rebuild(capture, builder=BuilderSpec(strategy=builder)).traces)
            for capture in sessions(part.folder)
        )
        shape = ", ".join(f"{n} x {count}" for n, count in sorted(traces.items()))
        total = sum(n * count for n, count in traces.items())
        console.print(f"{builder}: {total} traces (traces per session x sessions: {shape})")
    return rate


def show_forks(part: Part, model: Path) -> list[JSON]:
    """Fork a session that failed at its last turn, and print what its forks did there instead."""
    failed = (one for one in part.sessions if one["reward"] == 0 and one["exchanges"] > 1)
    session = next(failed, None)
    if session is None:
        return []
    at = session["exchanges"] - 1
    task, _ = forked_task(session["session_id"], part.folder, at, FORKS)
    folder = part.folder.with_name("forks")
    forks = run_batch(BatchRun([task], f"embedded:{model}", folder, FORKS, "forks"))
    console.print(f"\nsession {session['session_id']} failed; {FORKS} forks after call {at}:")
    *before, last = said_in(part.folder, session["session_id"])
    for text in before:
        console.print(f"  {text}   (given again, id for id)", markup=False)
    console.print(f"    {last}   (the session) reward {session['reward']}", markup=False)
    for fork in forks:
        *_, last = said_in(folder, fork["session_id"])
        verdict = f"({fork['fork']['verdict']} fork) reward {fork['reward']}"
        console.print(f"    {last}   {verdict}", markup=False)
    better = sum(bool(fork["reward"]) for fork in forks)
    decided = "its last turn" if better else "an earlier turn"
    console.print(f"{better} of {FORKS} forks did better: {decided} decided")
    return forks


def said_in(folder: Path, session_id: str) -> list[str]:
    """The beginning of each reply of a session."""
    _, capture = find_session(session_id, folder)
    transcript = Transcript(capture.exchanges, capture.bodies)
    return [excerpt(exchange, transcript) for exchange in capture.exchanges]
