"""One tool call of a real harness against the scripted engine: does it work on this machine?"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from bridle.cli.batch import Batch, run_batch
from bridle.config import Task
from bridle.harnesses import open_harness
from bridle.types import JSON

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How mini-swe-agent says that it is done; harmless elsewhere."""


def check_harness(name: str) -> JSON:
    """Install harness `name`, let it write a file by its own tool, and say how it went.

    `ConfigError` for an unknown name.
    """
    harness = open_harness(name)
    script = {
        "conversations": [
            {
                "turns": [
                    {"content": "", "shell": ["echo bridle > proof.txt"]},
                    {"content": "Done.", "shell": [SUBMIT]},
                    {"content": "Done."},
                ]
            }
        ]
    }
    agent = {"harness": name}
    if name == "command":
        agent["command"] = "echo bridle > proof.txt"
    task = Task.model_validate(
        {
            "task_id": f"check-{name}",
            "instruction": "Write the word bridle into proof.txt.",
            "agent": agent,
            "evaluator": {
                "strategy": "command",
                "config": {"command": 'test "$(cat proof.txt)" = bridle'},
            },
        }
    )
    with tempfile.TemporaryDirectory(prefix="bridle-check-") as scratch:
        path = Path(scratch) / "script.json"
        path.write_text(json.dumps(script))
        run = Path(scratch) / "run"
        [line] = run_batch(Batch([task], f"scripted:{path}", None, run, 1, f"check {name}"))
    return {
        "harness": name,
        "version": harness.version,
        "dialect": str(harness.dialect),
        "status": line["status"],
        "cause": line["cause"],
        "error": line["error"],
        "tool call": "made" if line["reward"] == 1.0 else "not made",
        "model calls": line["exchanges"],
        "merge ratio": line["merge_ratio"],
    }
