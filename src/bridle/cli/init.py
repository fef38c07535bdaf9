"""`bridle init`: a folder with a first task, ready to be changed and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.output import check_folder, console
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


OWN_TASK = """\
# One task for an agent of your own. It gets the instruction, and its model by the variables that
# the SDKs read (OPENAI_BASE_URL, OPENAI_API_KEY, MODEL, ...).
task_id = "hello"
instruction = "Answer with the word hello."

[agent]
{agent}
{runtime}
[budgets]
agent_s = 120

[evaluator]
strategy = "function"

[evaluator.config]
function = "score.py:score"   # beside this file
"""

OWN_RUNTIME = """
[runtime]
backend = "{backend}"

[runtime.kwargs]
binds = {binds}   # shown to the agent, read-only
"""

OWN_SCRIPT = """\
{"conversations": [{"turns": [{"content": "hello"}]}]}
"""

SCORE = """\
def score(attempt):
    \"""Return the reward of one session: 1 if its last words hold the right one.

    `attempt` has task_id, instruction, metadata, exit_code, stdout, stderr and traces.
    \"""
    last = attempt.traces[-1]["messages"][-1] if attempt.traces else {}
    return float("hello" in str(last.get("content")).lower())
"""


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")] = Path("my-tasks"),
    agent: Annotated[
        str | None,
        typer.Option(help="Your own: a script, file.py:function, or a command line in quotes."),
    ] = None,
) -> None:
    """Make FOLDER with a first task and a script that solves it without a model.

    With --agent the task runs your agent where it is, with its virtual environment, and one
    scripted model call shows that it works in the sandbox. Ends with code 1 if it does not.
    """
    files = {"task.toml": TASK, "script.json": SCRIPT} if agent is None else _own_files(agent)
    contents = {folder / "hello" / name: text for name, text in files.items()}
    for path in contents:
        if path.exists():
            raise ConfigError(f"{path} exists already; nothing was written")
    check_folder(folder, "FOLDER")
    (folder / "hello").mkdir(parents=True, exist_ok=True)
    for path, text in contents.items():
        path.write_text(text)
    task, *others, script = sorted(contents, key=lambda path: path.name != "task.toml")
    made = " and ".join(str(one) for one in (task, *others, script))
    if agent is not None and not _proved(folder):
        _say(f"made {made}, but the agent did not work (above)")
        raise typer.Exit(1)
    _say(f"made {made}; now run")
    _say(f"  bridle run {folder} --engine scripted:{folder / 'hello' / 'script.json'}")


def _say(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


def _own_files(words: str) -> dict[str, str]:
    from bridle.cli.agents import find_agent
    from bridle.runtimes import default_backend

    found = find_agent(words)
    _say(f"the agent runs with {found.runs}")
    settings = found.agent.pop("settings", None)
    lines = [f"{name} = {json.dumps(value)}" for name, value in found.agent.items()]
    if settings:
        lines += ["", "[agent.settings]"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    backend, _ = default_backend()
    runtime = ""
    if backend != "local" and found.binds:
        runtime = OWN_RUNTIME.format(backend=backend, binds=json.dumps(found.binds))
        _say("shown to it, read-only: " + ", ".join(found.binds))
    task = OWN_TASK.format(agent="\n".join(lines), runtime=runtime)
    return {"task.toml": task, "script.json": OWN_SCRIPT, "score.py": SCORE}


def _proved(folder: Path) -> bool:
    """Run the task once against its script and say how it went."""
    from bridle.cli.proving import prove
    from bridle.datasets.jsonl import load_tasks

    (proof,) = prove(load_tasks(folder / "hello"))
    if proof.ok and proof.error is None:
        _say(f"proved: {proof.calls} scripted model call(s) answered, reward {proof.reward}")
        return True
    _say(f"{proof.status} after {proof.calls} model calls: {proof.error}")
    if proof.said:
        _say(proof.said)
    return False
