"""The `function` harness: an agent that is a Python function, given base URLs and a key.

`AgentSpec.function` is `package.module:name`, or `file.py:name` relative to the task file. The
function runs in a process of its own inside the runtime, so its exit, its time limit, its end and
its logs are as true as any program's. Nothing of it is imported here: its own source (the file, or
the whole top-level package) is copied into the private home, and read as text to see that the name
is in it. What else it imports must be there for the Python that runs it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.machinery import PathFinder
from pathlib import Path

from bridle.config import AgentSpec, Settings
from bridle.errors import ConfigError
from bridle.harnesses.base import (
    SCRIPTS,
    Launch,
    LaunchContext,
    Unpackaged,
    as_json,
    parse_settings,
    refuse_extras,
)
from bridle.harnesses.command import sdk_environment
from bridle.types import Dialect

RUNNER = "function_runner.py"
MODULES = "modules"
PYTHON = tuple(Path(each) for each in sorted({sys.prefix, sys.base_prefix} - {"/usr"}))
"""Folders of the Python that runs Bridle."""
WITHHELD = ("bundle", "home", "key", "model_name")
"""Members of the launch context that the function does not get, or gets by another name."""


class FunctionHarnessSettings(Settings):
    """Settings of harness `function`."""

    python: str | None = None
    """The Python that runs it, as found inside the runtime; `None` = the one that runs Bridle."""
    modules: tuple[str, ...] = ()
    """More modules or packages of yours that it imports, copied in likewise."""


class FunctionHarness(Unpackaged):
    """One function; implements `base.Harness`."""

    name = "function"
    submittable = "python modules:modules"
    dialect = Dialect.OPENAI_CHAT

    def __init__(self, agent: AgentSpec) -> None:
        self._settings = parse_settings(agent, FunctionHarnessSettings)
        refuse_extras(agent, transports=(), skills=False)
        if not agent.function:
            raise ConfigError("agent.function: harness 'function' needs 'package.module:name'")
        self._module, self._name, source = _found(agent.function)
        self._sources = {source.name: source}
        for module in self._settings.modules:
            source = _top_level(module)
            self._sources[source.name] = source
        self.version = agent.version or _digest(self._sources)
        """The given one, else a digest of the source that is copied."""
        self.sees = () if self._settings.python else PYTHON
        """Folders of the machine that it needs where the system is the machine's own."""

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process `python function_runner.py <config>`, with the function's own modules
        in the home.
        """
        folder = f"{context.home}/.function"
        config = f"{folder}/config.json"
        task = {k: v for k, v in asdict(context).items() if k not in WITHHELD}
        config_values = {
            "module": self._module,
            "name": self._name,
            "task": {**task, "model": context.model_name},
        }
        files = {
            config: as_json(config_values),
            f"{folder}/{RUNNER}": (SCRIPTS / RUNNER).read_bytes(),
            f"{folder}/{MODULES}/.keep": b"",
        }
        folders = {}
        for name, source in self._sources.items():
            if source.is_dir():
                folders[f"{folder}/{MODULES}/{name}"] = source
            else:
                files[f"{folder}/{MODULES}/{name}"] = source.read_bytes()
        env = {
            **sdk_environment(context),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        python = self._settings.python or sys.executable
        return Launch((python, f"{folder}/{RUNNER}", config), env, files, folders=folders)


def import_path(function: Callable[..., object], what: str = "agent.function") -> str:
    """Return the path `module:name` under which a task refers to this function.

    Raises `ConfigError`, which names the setting `what`, for one that no module holds under its
    name (a lambda, a method, an inner function).
    """
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not name.isidentifier():
        raise ConfigError(
            f"{what}: {function!r} cannot be imported by the process that calls it: give a"
            " function that a module defines at its top level"
        )
    if module == "__main__" and (script := getattr(sys.modules[module], "__file__", None)):
        module = str(Path(script).absolute())
    return f"{module}:{name}"


def _found(path: str) -> tuple[str, str, Path]:
    """Module, name, and the file or folder that holds them. Raises `ConfigError`."""
    module, colon, name = path.rpartition(":")
    if not colon or not name.isidentifier():
        raise ConfigError(f"agent.function: {path!r} is not 'package.module:name'")
    if module.endswith(".py"):
        file = Path(module)
        source, module = file, file.stem
    else:
        source = _top_level(module.partition(".")[0])
        file = _file_of(source, module)
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except OSError as error:
        raise ConfigError(f"agent.function: the file of {path!r} cannot be read: {error}") from None
    except SyntaxError as error:
        raise ConfigError(f"agent.function: {path!r} is not Python: {error}") from None
    if name not in _names(tree):
        raise ConfigError(f"agent.function: {file} defines no {name!r}")
    return module, name, source


def _top_level(module: str) -> Path:
    """Find the file or folder of a top-level module without importing it. Raises `ConfigError`."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # such as that of `__main__`
        spec = None
    # A command's search path, unlike a script's, does not begin where it is started.
    spec = spec or PathFinder.find_spec(module, [str(Path.cwd())])
    if spec is None:
        raise ConfigError(f"agent.function: there is no module {module!r} to import")
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(
            f"agent.function: module {module!r} has no source file to copy into the sandbox"
        )
    return Path(spec.origin)


def _file_of(source: Path, module: str) -> Path:
    """Return the file of `module`, whose top-level module lies at `source`."""
    inner = source.joinpath(*module.split(".")[1:])
    if inner == source and source.is_file():
        return source
    return inner / "__init__.py" if inner.is_dir() else inner.with_suffix(".py")


def _names(tree: ast.Module) -> set[str]:
    """Return every name that a module may bind at any place in its text."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names.add(asname or name)
    return names


def _digest(sources: dict[str, Path]) -> str:
    """Return a short digest of the Python in these files and folders."""
    whole = hashlib.sha256()
    for name, source in sorted(sources.items()):
        files = sorted(source.rglob("*.py")) if source.is_dir() else [source]
        for file in files:
            whole.update(f"{name}/{file.name}\0".encode() + file.read_bytes() + b"\0")
    return whole.hexdigest()[:12]
