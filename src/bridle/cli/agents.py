"""Finds how an agent of the user's own starts, and which folders of this machine it needs."""

from __future__ import annotations

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

from bridle.errors import ConfigError
from bridle.types import JSON

SYSTEM = tuple(Path(each) for each in ("/usr", "/bin", "/sbin", "/lib", "/lib64"))
"""Folders that every sandbox without an image shows."""

ROOTS = ("pyproject.toml", "uv.lock", "package.json", "requirements.txt", "setup.py", ".git")
"""Files that mark the folder of a project."""

SHELL = set("|&;<>$`(")
"""Characters of a command line that is more than one program with arguments."""

FOLDERS = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, *sys.path]))"


@dataclass(frozen=True, slots=True)
class FoundAgent:
    """An agent of the user's own, found on this machine."""

    agent: JSON
    """`[agent]` of its task."""
    runs: str
    """The program that runs it, in words."""
    binds: tuple[str, ...]
    """Folders that a sandbox must show, read-only."""


def find_agent(words: str) -> FoundAgent:
    """Find a script, a `file.py:function`, or the program of a command line.

    Raises `ConfigError` for what is not there, or would show a whole home to the sandbox.
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
    """A command line; one program's paths are made absolute, a shell's stay as they are."""
    try:
        parts = shlex.split(words)
    except ValueError as error:
        raise ConfigError(f"--agent {words!r}: {error}") from None
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
        if any(folder.is_relative_to(one) for one in SYSTEM):
            continue
        if home.is_relative_to(folder):
            message = (
                f"--agent: the sandbox would show all of {folder}; put the agent into a folder"
            )
            raise ConfigError(f"{message} of its own")
        wanted.append(folder)
    outer = [one for one in wanted if not any(o != one and one.is_relative_to(o) for o in wanted)]
    return FoundAgent(agent, str(program), tuple(map(str, outer)))


def _of_program(program: Path) -> Iterator[Path]:
    """The folders that a program needs: those of its Python or Node, or its own."""
    python = program if re.match(r"python[\d.]*$", program.name) else program.parent / "python"
    if python.exists() and (python == program or not _is_system(program)):
        said = subprocess.run(
            [python, "-I", "-c", FOLDERS], capture_output=True, check=False, text=True
        )
        if said.returncode:
            raise ConfigError(f"--agent: {python} does not run: {said.stderr.strip()[-300:]}")
        folders = [Path(each) for each in json.loads(said.stdout) if each]
        yield from (each for each in folders if each.is_dir())
        yield python.resolve().parent.parent
    real = program.resolve()
    if python != program and not _is_system(real):
        installed = real.parent.name == "bin" or "node_modules" in real.parts
        yield real.parent.parent if installed else _project(real.parent)
        if not _is_system(program):
            yield program.parent


def _is_system(path: Path) -> bool:
    return any(path.is_relative_to(one) for one in SYSTEM)


def _file(name: str) -> Path:
    path = Path(name).absolute()
    if not path.is_file():
        raise ConfigError(f"--agent: there is no file {path}")
    return path


def _project(folder: Path) -> Path:
    """The nearest folder that is a project's, or the folder itself."""
    around = (folder, *folder.parents)
    return next((one for one in around if any((one / name).exists() for name in ROOTS)), folder)


def _python(folder: Path) -> Path:
    """The Python of a project's virtual environment, of the active one, or Bridle's own."""
    for one in (folder, *folder.parents):
        for name in (".venv", "venv"):
            if (one / name / "bin" / "python").exists():
                return one / name / "bin" / "python"
        if (one / "uv.lock").exists():
            raise ConfigError(f"{one} is a uv project without an environment: run `uv sync` there")
    active = (os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX"))
    given = (Path(one, "bin", "python") for one in active if one)
    return next((one for one in given if one.exists()), Path(sys.executable))


def _node(folder: Path) -> Path:
    """Node, once the packages of the script's project are there."""
    package = _project(folder) / "package.json"
    if package.exists() and not (package.parent / "node_modules").exists():
        try:
            needs = bool(json.loads(package.read_bytes()).get("dependencies"))
        except (ValueError, AttributeError):
            raise ConfigError(f"{package} is no JSON object") from None
        if needs:
            raise ConfigError(f"{package.parent} lacks node_modules: run `npm install` there")
    path = shutil.which("node")
    if path is None:
        raise ConfigError("--agent: node is not on PATH")
    return Path(path).resolve()
