"""First steps: `bridle demo` runs the example, `bridle init` writes a first task.

The demo is an example (`examples/demo`) and not part of the library; a wheel contains it as data.
For an agent of the user's own, `bridle init` finds the program that starts it and the folders of
this machine that its sandbox must show.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console

from bridle.cli.terminal import JsonOption, check_folder, console, notes, print_json
from bridle.errors import ConfigError
from bridle.types import JSON

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
        typer.Option(help="Your agent: a script, file.py:function, or a command line in quotes."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make FOLDER with a first task and a script that solves it without a model.

    With --agent the task runs your agent in place, in its virtual environment, and one scripted
    model call proves that it works in the sandbox. Exit code 1 if it does not.
    """
    to = notes if json else console
    files = {"task.toml": TASK, "script.json": SCRIPT} if agent is None else _own_files(agent, to)
    contents = {folder / "hello" / name: text for name, text in files.items()}
    for path in contents:
        if path.exists():
            raise ConfigError(
                f"{path} exists already, and nothing was written; give another folder"
            )
    check_folder(folder, "FOLDER")
    (folder / "hello").mkdir(parents=True, exist_ok=True)
    for path, text in contents.items():
        path.write_text(text)
    task, *others, script = sorted(contents, key=lambda path: path.name != "task.toml")
    made = [str(one) for one in (task, *others, script)]
    command = f"bridle run {folder} --engine scripted:{folder / 'hello' / 'script.json'}"
    works = agent is None or _proved(folder, to)
    end = "; now run" if works else ", but the agent did not work (see above)"
    _say(to, "made " + " and ".join(made) + end)
    if works:
        _say(to, f"  {command}")
    if json:
        print_json({"files": made, "works": works, "command": command})
    if not works:
        raise typer.Exit(1)


def _say(to: Console, line: str) -> None:
    to.print(line, markup=False, soft_wrap=True)


def _own_files(words: str, to: Console) -> dict[str, str]:
    from bridle.runtimes import default_backend

    found = find_agent(words)
    _say(to, f"the agent runs with {found.runs}")
    settings = found.agent.pop("settings", None)
    lines = [f"{name} = {json.dumps(value)}" for name, value in found.agent.items()]
    if settings:
        lines += ["", "[agent.settings]"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    backend, _ = default_backend()
    runtime = ""
    if backend != "local" and found.binds:
        runtime = OWN_RUNTIME.format(backend=backend, binds=json.dumps(found.binds))
        _say(to, "shown to it, read-only: " + ", ".join(found.binds))
    task = OWN_TASK.format(agent="\n".join(lines), runtime=runtime)
    return {"task.toml": task, "script.json": OWN_SCRIPT, "score.py": SCORE}


def _proved(folder: Path, to: Console) -> bool:
    """Run the task once against its script; return whether it worked."""
    from bridle.cli.doctor import prove
    from bridle.datasets.jsonl import load_tasks

    (proof,) = prove(load_tasks(folder / "hello"))
    shutil.rmtree(folder / "hello" / "__pycache__", ignore_errors=True)  # of the scorer's import
    if proof.ok and proof.error is None:
        _say(to, f"proved: {proof.calls} scripted model call(s) answered, reward {proof.reward}")
        return True
    _say(to, f"{proof.status} after {proof.calls} model calls: {proof.error}")
    if proof.output:
        _say(to, proof.output)
    return False


DEMO_PACKAGE = "bridle_demo"
"""Package name that the example is imported under."""


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the demo.")] = Path("runs/demo"),
    tasks: Annotated[int, typer.Option(min=1, max=44, help="Tasks for each real harness.")] = 6,
    fresh: Annotated[int, typer.Option(min=1, help="New tasks for the small model.")] = 64,
    steps: Annotated[
        int, typer.Option(min=0, help="Updates of the small model; 0 skips the training.")
    ] = 32,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run real agents and a small model on this machine: trajectories, and a model that learns."""
    run = load_demo().run
    raise typer.Exit(run(out, tasks, fresh, steps, json=json))


def load_demo() -> ModuleType:
    """Import the demo's main module: from the installed package, else from the checkout."""
    from bridle.config import assets_dir

    folder = assets_dir() / "demo"
    if not folder.is_dir():
        folder = Path(__file__).parents[3] / "examples" / "demo"
    if DEMO_PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            DEMO_PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        sys.modules[DEMO_PACKAGE] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{DEMO_PACKAGE}.main")


ROOTS = ("pyproject.toml", "uv.lock", "package.json", "requirements.txt", "setup.py", ".git")
"""Files that mark the root of a project."""

SHELL = set("|&;<>$`(")
"""Characters of command lines that need a shell."""

FOLDERS = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, *sys.path]))"


@dataclass(frozen=True, slots=True)
class FoundAgent:
    """An agent of the user's own that was found on this machine."""

    agent: JSON
    """Table `[agent]` of its task."""
    runs: str
    """Path of the program that runs it."""
    binds: tuple[str, ...]
    """Folders that its sandbox must show, read-only."""


def find_agent(words: str) -> FoundAgent:
    """Return the agent that `words` name: a script, a `file.py:function`, or a command line.

    Raises `ConfigError` if it is missing, or its sandbox would show the whole home directory.
    """
    file, _, name = words.rpartition(":")
    if file.endswith(".py") and name.isidentifier():
        script = _file(file)
        python = _python(script.parent)
        agent = {"harness": "function", "function": f"{script}:{name}"}
        settings: JSON = {"settings": {"python": str(python)}}
        return _found(agent | settings, python, [script])
    if Path(words).suffix in (".py", ".js", ".mjs", ".cjs", ".ts"):
        program = _python if words.endswith(".py") else _node
        script = _file(words)
        line = [str(program(script.parent)), str(script)]
        return _found(_command(shlex.join(line) + " {instruction}"), Path(line[0]), [script])
    return _of_line(words)


def _of_line(words: str) -> FoundAgent:
    """Find the program of a command line; paths become absolute unless a shell runs it."""
    try:
        parts = shlex.split(words)
    except ValueError as error:
        raise ConfigError(f"--agent {words!r} is not a command line: {error}") from None
    through_uv = parts[:2] == ["uv", "run"]
    parts = parts[2:] if through_uv else parts
    if not parts:
        raise ConfigError("--agent: give a script, file.py:function, or a command line")
    python = _python(Path.cwd()) if through_uv or parts[0].endswith(".py") else None
    if parts[0].endswith(".py"):
        parts = ["python", *parts]
    program = python.parent / parts[0] if python is not None else None
    if program is None or not program.exists():
        path = shutil.which(parts[0])
        if path is None:
            raise ConfigError(f"--agent: there is no file and no program {parts[0]!r} on PATH")
        program = Path(path).absolute()
    files = [Path(each).absolute() for each in parts[1:] if Path(each).is_file()]
    if not through_uv and set(words) & SHELL:
        return _found(_command(words), program, files)
    line = [str(Path(each).absolute()) if Path(each).is_file() else each for each in parts[1:]]
    return _found(_command(shlex.join([str(program), *line])), program, files)


def _command(line: str) -> JSON:
    return {"harness": "command", "command": line}


def _found(agent: JSON, program: Path, files: Iterable[Path]) -> FoundAgent:
    needed = [*_of_program(program), *(_project(each.parent) for each in files)]
    home = Path.home()
    wanted: list[Path] = []
    for folder in dict.fromkeys(needed):
        if _is_system(folder):
            continue
        if home.is_relative_to(folder):
            raise ConfigError(
                f"--agent: the sandbox would show all of {folder}; move the agent to a folder"
                " of its own"
            )
        wanted.append(folder)
    outer = [one for one in wanted if not any(o != one and one.is_relative_to(o) for o in wanted)]
    return FoundAgent(agent, str(program), tuple(map(str, outer)))


def _of_program(program: Path) -> Iterator[Path]:
    """Yield the folders that a program needs: of its Python or Node, or its own."""
    python = program if re.match(r"python[\d.]*$", program.name) else program.parent / "python"
    if python.exists() and (python == program or not _is_system(program)):
        said = subprocess.run(
            [python, "-I", "-c", FOLDERS], capture_output=True, check=False, text=True
        )
        if said.returncode:
            raise ConfigError(f"--agent: {python} does not run: {said.stderr.strip()[-300:]}")
        folders = [Path(each) for each in json.loads(said.stdout) if each]
        yield from (each for each in folders if each.is_dir())
        yield from (link.parent for link in _links(python))
        yield python.resolve().parent.parent
    real = program.resolve()
    if python != program and not _is_system(real):
        installed = real.parent.name == "bin" or "node_modules" in real.parts
        yield real.parent.parent if installed else _project(real.parent)
        if not _is_system(program):
            yield program.parent


def _links(path: Path) -> Iterator[Path]:
    """Yield the files that symbolic links lead to from `path`, one after the other."""
    while path.is_symlink():
        path = path.parent / path.readlink()
        yield path


def _is_system(path: Path) -> bool:
    """Return whether every sandbox without an image shows `path`."""
    from bridle.cli.run import SANDBOX_FOLDERS

    return any(path.is_relative_to(folder) for folder in SANDBOX_FOLDERS)


def _file(name: str) -> Path:
    path = Path(name).absolute()
    if not path.is_file():
        raise ConfigError(f"--agent: there is no file {path}")
    return path


def _project(folder: Path) -> Path:
    """Return the nearest project root above a folder, or the folder itself."""
    around = (folder, *folder.parents)
    return next((one for one in around if any((one / name).exists() for name in ROOTS)), folder)


def _python(folder: Path) -> Path:
    """Return the Python of the project's virtual environment, the active one, or Bridle's own."""
    for one in (folder, *folder.parents):
        for name in (".venv", "venv"):
            if (one / name / "bin" / "python").exists():
                return one / name / "bin" / "python"
        if (one / "uv.lock").exists():
            raise ConfigError(
                f"{one} is a uv project without a virtual environment: run `uv sync` there"
            )
    active = (os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX"))
    given = (Path(one, "bin", "python") for one in active if one)
    return next((one for one in given if one.exists()), Path(sys.executable))


def _node(folder: Path) -> Path:
    """Return Node. `ConfigError` if the packages of the script's project are not installed."""
    package = _project(folder) / "package.json"
    if package.exists() and not (package.parent / "node_modules").exists():
        try:
            needs = bool(json.loads(package.read_bytes()).get("dependencies"))
        except (ValueError, AttributeError):
            raise ConfigError(f"{package} is not a JSON object") from None
        if needs:
            raise ConfigError(f"{package.parent} lacks node_modules: run `npm install` there")
    path = shutil.which("node")
    if path is None:
        raise ConfigError("--agent: this script needs Node, and `node` is not on PATH: install it")
    return Path(path).resolve()
