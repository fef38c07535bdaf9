"""`bridle demo`: the main job on this machine, with nothing but what comes along.

Part 1: mini-swe-agent and pi, unmodified, do real jobs in git work directories through the gateway;
a scripted engine speaks for the model, so every token can be foreseen. Part 2: a small model that
Bridle makes itself samples for a light script harness on fresh tasks; no part of it is scripted.
Part 3: that model learns by GRPO from what the harness does with it, and is measured again on the
same fresh tasks. Between the last two, one session that failed is forked at its last turn.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bridle.cli.terminal import check_folder, console, print_json, print_table
from bridle.errors import ConfigError
from bridle.types import JSON

MARKER = "demo.json"
"""File that says that a folder is an earlier demo's, and may be replaced."""

FRESH_SEED = 20_000
"""Seed of the fresh lookup tasks; no demonstration was drawn with it."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the demo, run."""

    folder: Path
    sessions: list[JSON]
    seconds: float


def run(out: Path, tasks: int, fresh: int, steps: int, *, json: bool) -> int:
    """Run the three parts and write `out/summary.json`; returns the exit code."""
    began = time.monotonic()
    _clear(out)
    console.rule("1. Real harnesses, unmodified, on a scripted engine")
    real = harnesses_part(out / "harnesses", tasks)
    show_part(real)
    show_tree(real)
    console.rule("2. A small model samples for a light script harness")
    from .model import demo_model
    from .policy import policy_part, show_forks, show_policy

    model = demo_model()
    policy = policy_part(out / "policy", fresh, model)
    rate = show_policy(policy, model)
    forks = show_forks(policy, model)
    trained: JSON | None = None
    if steps:
        console.rule("3. The small model learns from what the harness does with it")
        from .training import training_part

        trained = training_part(out / "training", model, steps, policy)
    summary: JSON = {
        "sessions": real.sessions + policy.sessions,
        "forks": forks,
        "success_rate": rate,
        "model": str(model),
        "training": trained,
        "seconds": round(time.monotonic() - began, 1),
    }
    (out / "summary.json").write_text(_pretty(summary))
    if json:
        print_json(summary)
    else:
        _what_next(out, real, summary)
    done = all(line["status"] == "COMPLETED" for line in summary["sessions"])
    return 0 if done else 1


def harnesses_part(folder: Path, count: int) -> Part:
    """`count` demo tasks with each real harness, half and half interleaved, scripted."""
    from bridle.cli.run import BatchRun, run_batch
    from bridle.config import Task
    from bridle.datasets.jsonl import load_tasks

    from .tasks import demo_script, demo_tasks, write_task

    chosen = demo_tasks()[:count]
    for task in chosen:
        write_task(task, folder / "tasks")
    script = folder / "script.json"
    script.write_text(_pretty(demo_script(chosen)))

    def of(harness: str) -> Iterator[Task]:
        for task in load_tasks(folder / "tasks", overrides={"agent": {"harness": harness}}):
            yield task.model_copy(update={"task_id": f"{task.task_id}.{harness}"})

    batch = [task for pair in zip(of("mini_swe_agent"), of("pi"), strict=True) for task in pair]
    began = time.monotonic()
    run = BatchRun(batch, f"scripted:{script}", folder / "run", title="mini-swe-agent, pi")
    return Part(folder / "run", run_batch(run), time.monotonic() - began)


def show_part(part: Part) -> None:
    """The sessions of a part and their law numbers."""
    from bridle.cli.show import COLUMNS, law_line, row

    title = f"{len(part.sessions)} sessions in {part.seconds:.0f} s"
    print_table(title, COLUMNS, map(row, part.sessions))
    console.print(f"nothing lost, nothing twice: {law_line(part.sessions)}")


def show_tree(part: Part) -> None:
    """One conversation of a part as a tree."""
    from bridle.node.results import find_session
    from bridle.trajectory.transcript import draw
    from bridle.types import Kind

    session_id = part.sessions[0]["session_id"]
    _, capture = find_session(session_id, part.folder)
    console.print(f"\none conversation ({session_id}), each turn on its parent's exact ids:")
    for depth, text in draw(capture, list(Kind)):
        console.print("  " * (depth + 1) + text, markup=False, soft_wrap=True)


def light_agent_command() -> str:
    """The command line of the light script harness."""
    agent = Path(__file__).with_name("light_agent.py")
    return f"{sys.executable} {agent} {{instruction}}"


def _clear(out: Path) -> None:
    """Make `out` empty, but only if what is in it is an earlier demo's."""
    check_folder(out, "--out")
    if out.exists() and any(out.iterdir()):
        if not (out / MARKER).is_file():
            raise ConfigError(f"{out} is not an earlier demo's folder; give another with --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).write_text(_pretty({"started_at": time.time()}))


def _pretty(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _what_next(out: Path, real: Part, summary: JSON) -> None:
    session = real.sessions[0]["session_id"]
    console.rule("Where to look")
    console.print(f"{out}/summary.json                     every session's law numbers")
    console.print(f"{out}/harnesses/run, {out}/policy/run   capture.sqlite, trajectories.jsonl and")
    console.print("                                             .parquet, logs of every session")
    if summary["training"]:
        console.print(
            f"{out}/training                         curve.png, course.json, checkpoints,"
        )
        console.print("                                             the run folder of its sessions")
    console.print("\nWhat to try next (after `. .venv/bin/activate`)")
    console.print(f"  bridle dashboard {out}   (runs, conversations and tokens in a browser)")
    console.print(f"  bridle show {session} --run {out}/harnesses/run")
    console.print(f"  bridle rebuild {out}/harnesses/run --builder per_request")
    console.print(f"  bridle export {out}/policy/run --format sft --out sft.jsonl")
    console.print("  bridle run TASKS --engine http://HOST:PORT --tokenizer DIR   (your vLLM)")
    console.print(f"\ndone in {summary['seconds']:.0f} s")
