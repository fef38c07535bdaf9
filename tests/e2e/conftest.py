"""A batch for the command line: light agents on a scripted engine, in processes of their own."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import examples.demo.light_agent
import pytest
from examples.demo.lookups import lookups, write_files

AGENT = Path(examples.demo.light_agent.__file__)


def bridle_process(*arguments: object, env=None, **options) -> subprocess.Popen:
    """`bridle ARGUMENTS` in a process of its own, with `env` added to its environment."""
    command = [sys.executable, "-m", "bridle.cli", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "200", **(env or {})}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def call(*arguments: object, timeout: float = 120, env=None) -> subprocess.CompletedProcess:
    """Run `bridle ARGUMENTS` to its end."""
    with bridle_process(*arguments, env=env) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def write_batch(
    folder: Path, count: int = 4, *, delay_s: float = 0.0, samples: int = 1, **task_fields
) -> Path:
    """Lookup tasks of the light agent in `folder`, and a script that does them right."""
    conversations, lines = [], []
    for task in lookups(count, seed=11):
        write_files(task, folder / "files" / task.task_id)
        call = {"name": "cat", "arguments": {"name": task.thing}}
        turns = [{"tool_calls": [call]}, {"content": task.answer, "delay_s": delay_s}]
        conversations.append({"when": {"user_contains": task.instruction}, "turns": turns})
        upload = {"type": "upload_dir", "source": f"files/{task.task_id}", "target": "."}
        line = {
            "task_id": task.task_id,
            "instruction": task.instruction,
            "num_samples": samples,
            "agent": {
                "harness": "command",
                "command": f"{sys.executable} {AGENT} {{instruction}}",
            },
            "runtime": {"prepare": [upload]},
            "evaluator": {
                "strategy": "command",
                "config": {"command": f'test "$(cat answer.txt)" = {task.answer}'},
            },
        }
        lines.append(line | task_fields)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "script.json").write_text(json.dumps({"conversations": conversations}))
    return folder


@pytest.fixture
def batch(tmp_path):
    """A folder with 4 lookup tasks of the light agent and a script that does them right."""
    return functools.partial(write_batch, tmp_path)


def arguments_of(folder: Path, *more: object) -> list[object]:
    """The command line that runs a batch."""
    script = f"scripted:{folder / 'script.json'}"
    return ["run", folder / "tasks.jsonl", "--engine", script, "--out", folder / "run", *more]


@pytest.fixture
def run_arguments():
    """The command line that runs a batch."""
    return arguments_of
