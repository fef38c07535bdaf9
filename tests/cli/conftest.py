"""The command line in this process: `say("run", ...)` gives code, stdout and stderr."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import examples.demo.light_agent
import pytest
from examples.demo.lookups import lookups, write_files

from bridle.cli import terminal
from bridle.cli.__main__ import main

AGENT = Path(examples.demo.light_agent.__file__)


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def say():
    """Call the command line; consoles write to what is captured."""

    def call(*arguments: object) -> Said:
        out, err = io.StringIO(), io.StringIO()
        before = terminal.console.file, terminal.notes.file
        terminal.console.file, terminal.notes.file = out, err
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        terminal.console.file, terminal.notes.file = before
        return Said(int(ended.value.code or 0), out.getvalue(), err.getvalue())

    return call


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A finished run of 3 lookups by the light agent: its folder. Read only."""
    folder = tmp_path_factory.mktemp("finished")
    conversations, lines = [], []
    for task in lookups(3, seed=11):
        write_files(task, folder / "files" / task.task_id)
        call = {"name": "cat", "arguments": {"name": task.thing}}
        turns = [{"tool_calls": [call]}, {"content": task.answer}]
        conversations.append({"when": {"user_contains": task.instruction}, "turns": turns})
        lines.append(
            {
                "task_id": task.task_id,
                "instruction": task.instruction,
                "agent": {
                    "harness": "command",
                    "command": f"{sys.executable} {AGENT} {{instruction}}",
                },
                "runtime": {
                    "prepare": [
                        {
                            "type": "upload_dir",
                            "source": f"files/{task.task_id}",
                            "target": ".",
                        }
                    ]
                },
                "evaluator": {
                    "strategy": "command",
                    "config": {"command": f'test "$(cat answer.txt)" = {task.answer}'},
                },
            }
        )
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "script.json").write_text(json.dumps({"conversations": conversations}))
    with pytest.raises(SystemExit) as ended:
        main(
            [
                *("run", str(folder / "tasks.jsonl"), "--out", str(folder / "run"), "--json"),
                *("--engine", f"scripted:{folder / 'script.json'}"),
            ]
        )
    assert ended.value.code == 0
    return folder / "run"
