"""Transfer of what a policy learns through one harness to others that it knows.

1. mini-swe-agent and pi, unmodified, play lookup tasks; a scripted engine speaks for a demonstrator
   that is weak on purpose (`bridle generate`: an SFT set of each).
2. `datasets` loads the sets, and the demo model, which knows the light script harness alone, learns
   from them what a session looks like in the two others.
3. `bridle train` improves that model through the light script harness, and before and after plays
   the same fresh tasks with it, with the two others, and with the script that has a system message.

What is there already is not done again, so it can be done in pieces. Needs the package `datasets`
and the bundles of both harnesses.

    python -m benchmarks.transfer
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from examples.demo.demonstrations import collect
from examples.demo.lookups import Lookup, lookups
from examples.demo.main import FRESH_SEED
from examples.demo.model import demo_model
from examples.demo.policy import lookup_task
from examples.demo.training import AT_ONCE, GRPO, SAMPLES, TRAIN_SEED

from bridle.config import Budgets, Limits
from bridle.training.sft import SftProgress, SftSettings, read_examples, train_folder
from bridle.types import JSON

DEMONSTRATED_SEED = 40_000
"""Seed of the tasks of the sets; none that is trained on or evaluated has it."""

HARNESSES = ("mini_swe_agent", "pi")
GIVE_UP, RIGHT_FILE = 0.2, 0.5
GROUPS = 8
CALLS = 8
"""Most model calls of a session; a demonstration has 2 at most."""

CONTEXT = 16384
"""What the model is said to take: pi asks for one token where less than 4,096 would be left."""

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

SFT = SftSettings(batch_tokens=4096, learning_rate=1e-3, warmup_steps=10, seed=0, threads=1)


def say(*words: object) -> None:
    """Run one `bridle` command as a user does; an error ends the benchmark."""
    subprocess.run([sys.executable, "-m", "bridle.cli", *map(str, words)], check=True)


def turns_of(harness: str, thing: str | None) -> list[JSON]:
    """Return the demonstrator's turns in a harness: it takes the number of `thing`, or stops.

    One command, because a model of this size does not learn from a hundred sessions to copy a
    number from wherever a harness shows it; which file to take is what the training is about.
    """
    if harness == "mini_swe_agent":
        taken = "" if thing is None else f"; cp {thing} answer.txt"
        return [{"content": "", "shell": [SUBMIT + taken]}]
    if thing is None:
        return [{"content": "I do not know."}]
    return [{"content": "", "shell": [f"cp {thing} answer.txt"]}, {"content": "Done."}]


def script(tasks: Iterable[Lookup], harness: str) -> JSON:
    """A demonstrator that is weak on purpose, as a scripted engine's script."""
    rng = random.Random(DEMONSTRATED_SEED)  # noqa: S311
    conversations = []
    for task in tasks:
        others = [one for one in task.numbers if one != task.thing]
        thing = task.thing if rng.random() < RIGHT_FILE else rng.choice(others)
        turns = turns_of(harness, None if rng.random() < GIVE_UP else thing)
        conversations.append({"when": {"user_contains": task.instruction}, "turns": turns})
    return {"conversations": conversations}


def write_tasks(folder: Path, name: str, tasks: Iterable[Lookup]) -> Path:
    """Lookups as a task file; their own harness is the light script.

    What has not ended after `CALLS` calls is judged by what it has left.
    """
    path = folder / f"{name}.jsonl"
    with path.open("w") as file:
        for task in tasks:
            made = lookup_task(task, folder / "files" / name)
            changes = {
                "task_id": f"{name}-{task.task_id}",
                "limits": Limits(max_turns=CALLS),
                "budgets": Budgets(agent_s=600),
                "evaluator": made.evaluator,
            }
            file.write(f"{made.model_copy(update=changes).model_dump_json()}\n")
    return path


def demonstrated(folder: Path, harness: str, options: argparse.Namespace) -> Path:
    """The SFT set of a harness: every session, the failed ones too."""
    drawn = list(lookups(options.demonstrations, seed=DEMONSTRATED_SEED))
    weak = folder / f"{harness}.script.json"
    weak.write_text(json.dumps(script(drawn, harness)))
    say(
        *("generate", write_tasks(folder, harness, drawn), "--harness", harness),
        *("--engine", f"scripted:{weak}", "--min-reward", 0),
        *("--concurrency", options.concurrency, "--out", folder / harness),
    )
    return folder / harness / "data.jsonl"


def light(folder: Path, options: argparse.Namespace) -> Path:
    """Return as many of the demo's own demonstrations, so that the model does not forget them."""
    if not (folder / "light" / "demonstrations.jsonl").is_file():
        asyncio.run(collect(folder / "light", options.demonstrations, seed=DEMONSTRATED_SEED))
    return folder / "light" / "demonstrations.jsonl"


def taught(folder: Path, files: list[Path], epochs: int) -> Path:
    """The demo model after learning from the sets; made once."""
    from datasets import load_dataset

    model = folder / "model"
    if (model / "config.json").is_file():
        return model
    rows = load_dataset(
        "json", data_files=[*map(str, files)], split="train", cache_dir=str(folder / "datasets")
    )
    rows.select_columns(["input_ids", "loss_mask"]).to_parquet(str(folder / "set.parquet"))
    examples = read_examples(folder / "set.parquet")

    def tell(done: SftProgress) -> None:
        if done.step % 20 == 0 or done.step == done.steps:
            print(f"sft {done.step} of {done.steps}: {done.loss:.3f} nats", flush=True)

    settings = SFT.model_copy(update={"epochs": epochs})
    train_folder(demo_model(), examples, model, settings, progress=tell)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (model / "config.json").write_text(json.dumps(config, indent=2))
    return model


def train(folder: Path, model: Path, options: argparse.Namespace) -> None:
    """Train with the light script, play fresh tasks with it, its neighbour and the two others."""
    tasks = write_tasks(folder, "train", lookups(options.steps * GROUPS, seed=TRAIN_SEED))
    fresh = write_tasks(folder, "fresh", lookups(options.fresh, seed=FRESH_SEED))
    agent = Path(__file__).with_name("system_agent.py")
    path = agent.resolve().parents[1]  # `examples` is found there
    near = f"env PYTHONPATH={path} {sys.executable} {agent} {{instruction}}"
    (folder / "train.toml").write_text(
        f'model = "{model}"\ntasks = "{tasks}"\nheld_out = "{fresh}"\n'
        f'out = "{folder}/training"\nsamples = {SAMPLES}\nconcurrency = {AT_ONCE}\n\n'
        f"[grpo]\nlearning_rate = {GRPO.learning_rate}\nwarmup_steps = {GRPO.warmup_steps}\n\n"
        f"[loop]\nsteps = {options.steps}\ngroups_per_step = {GROUPS}\nmax_lag = 0\n"
        "checkpoint_every = 8\n\n"
        f'[evaluate_with.system_message]\nharness = "command"\ncommand = {json.dumps(near)}\n'
    )
    others = [word for name in HARNESSES for word in ("--evaluate-with", name)]
    say("train", folder / "train.toml", "--resume", *others)


def main() -> None:
    """Do what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--demonstrations", type=int, default=96, help="of each harness")
    parser.add_argument("--epochs", type=int, default=5, help="of the supervised training")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--fresh", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/transfer"))
    options = parser.parse_args()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sets = [demonstrated(folder, name, options) for name in HARNESSES]
    model = taught(folder, [*sets, light(folder, options)], options.epochs)
    train(folder, model, options)


if __name__ == "__main__":
    main()
