"""`bridle init`: a folder with a first task, ready to be changed and run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.output import console
from bridle.cli.paths import check_folder
from bridle.errors import ConfigError

TASK = """\
# One task: what to do, where, with which harness, and how it is scored.
task_id = "hello"
instruction = "Write the word hello, alone, into a file hello.txt."

[agent]
harness = "mini_swe_agent"   # `bridle harness list` names the others

[budgets]
agent_s = 120

[evaluator]
strategy = "command"

[evaluator.config]
command = 'test "$(cat hello.txt)" = hello'
"""

SCRIPT = """\
{
  "conversations": [
    {
      "turns": [
        {"reasoning": "One command does it.", "shell": ["echo hello > hello.txt"]},
        {"shell": ["echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]},
        {"content": "Done."}
      ]
    }
  ]
}
"""


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")] = Path("my-tasks"),
) -> None:
    """Make FOLDER with a first task and a script that solves it without a model."""
    task, script = folder / "hello" / "task.toml", folder / "hello" / "script.json"
    contents = {task: TASK, script: SCRIPT}
    for path in contents:
        if path.exists():
            raise ConfigError(f"{path} exists already; nothing was written")
    check_folder(folder, "FOLDER")
    task.parent.mkdir(parents=True, exist_ok=True)
    for path, text in contents.items():
        path.write_text(text)
    console.print(f"made {task} and {script}; now run", markup=False, soft_wrap=True)
    command = f"  bridle run {folder} --engine scripted:{script}"
    console.print(command, markup=False, soft_wrap=True)
