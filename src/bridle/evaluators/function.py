"""The `function` evaluator: a Python function says what the session was worth.

`config.function` is `package.module:name`, found where the operator's Python finds modules, or
`file.py:name` beside the task file (a server takes no file of a submitted task). It runs in a
process of its own that is ended at its timeout: outside every sandbox, or, with `config.sandbox`,
in one of its own. Before a run it is imported and its signature checked. It gets one object:

    {"session_id", "task_id", "instruction", "metadata",      the task
     "exit_code", "stdout", "stderr",                         how the harness ended
     "traces": [{"messages": [...]}],                         what was said, one per trace
     "folder": PATH or null}                                  copies of `config.files`

It returns a number or a truth value, or an object with `reward` and perhaps `trace_rewards`; all
else in the object is kept as metadata. An exception, another value or a timeout is the evaluator's
failure.

The sandbox (`bwrap`) has no network, and shows the system, the Python that runs Bridle and the
function's own modules.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath
from typing import TypeGuard

import orjson
from pydantic import Field, field_validator

from bridle.config import RuntimeSpec, Settings, Task
from bridle.errors import ConfigError, EvaluatorError, RuntimeFailure
from bridle.evaluators.base import (
    LATE,
    CheckerFailure,
    Configured,
    Evaluation,
    EvaluationContext,
    Unscorable,
)
from bridle.evaluators.command import TAIL_CHARS
from bridle.runtimes import opened
from bridle.runtimes.base import ExecResult, Mount, Runtime
from bridle.runtimes.files import copy_out
from bridle.runtimes.process import Command, run_process
from bridle.types import JSON

CHECK_S = 120
"""Time for importing a scoring function before a run."""

RUNNER = Path(__file__).with_name("function_runner.py")


class FunctionSettings(Settings):
    """Config of evaluator `function`."""

    function: str = Field(pattern=r"^([A-Za-z_][\w.]*|[^:\x00]+\.py):[A-Za-z_]\w*$")
    """`package.module:name`, or `file.py:name` relative to the task file."""
    files: tuple[str, ...] = ()
    """Paths of the work folder that are copied out for it; missing ones are skipped."""
    timeout_s: float = Field(default=60, gt=0)
    sandbox: bool = False
    """Run it in a sandbox without network, which sees its package and `files` and no other file of
    this machine's users; needs `bwrap`. A server does so unless its operator trusts the function
    (`permits.trusted`)."""

    @field_validator("files")
    @classmethod
    def _inside(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(
                    f"{name!r} must be inside the work folder: give a relative path without '..'"
                )
        return files


class FunctionEvaluator(Configured[FunctionSettings]):
    """Implements `base.Evaluator`."""

    strategy = "function"
    settings_class = FunctionSettings
    submittable = "function:copied files timeout_s sandbox"

    def check(self, task: Task) -> None:
        """Import the scoring function in another process and check that it takes one argument.

        One that runs in a sandbox is not imported. Raises `ConfigError`.
        """
        if not self._settings.sandbox:
            env = {**_environment(), **task.evaluator.env}
            _check_import(self._located(Path(task.task_dir or "")), tuple(env.items()))

    def _located(self, folder: Path) -> str:
        """Return the function's path with its file, if it names one, below `folder`."""
        function = self._settings.function
        return str((folder / function).absolute()) if ".py:" in function else function

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Call the scoring function and return its reward; its output goes to `evaluator.log`.

        Raises `EvaluatorError`.
        """
        settings = self._settings
        with tempfile.TemporaryDirectory(prefix="bridle-function-") as folder:
            if settings.files:
                left = await context.places.left()
                await asyncio.to_thread(_copied, left, settings.files, Path(folder))
            called = self._confined if settings.sandbox else self._called
            result = await called(context, Path(folder))
        if not result.ok:
            said = result.stderr.decode(errors="replace").strip()[-TAIL_CHARS:]
            how = f"{LATE} {settings.timeout_s:g} s" if result.timed_out else "failed"
            raised = said.rpartition("\n")[2].partition(":")[0]
            way = f"function {settings.function} {how}" + (f" ({raised})" if raised else "")
            raise CheckerFailure(way, said)
        return evaluation_of(result.stdout, settings.function)

    async def _called(self, context: EvaluationContext, folder: Path) -> ExecResult:
        """Call the function on this machine."""
        return await run_process(
            Command(
                argv=[sys.executable, *self._arguments(context)],
                cwd=str(folder),
                env={**_environment(), **context.task.evaluator.env},
                stdin=await asyncio.to_thread(self._input, context, str(folder)),
                timeout_s=self._settings.timeout_s,
                error_log=context.logs / "evaluator.log",
            )
        )

    async def _confined(self, context: EvaluationContext, folder: Path) -> ExecResult:
        """Call the function in a sandbox of its own."""
        function = self._settings.function
        try:
            module = self._located(context.task_dir).rpartition(":")[0]
            async with sandboxed(module, RUNNER) as runtime:
                inside = runtime.workdir
                await runtime.upload(folder, inside)
                return await runtime.exec(
                    [sys.executable, *self._arguments(context)],
                    env=context.task.evaluator.env,
                    stdin=await asyncio.to_thread(self._input, context, inside),
                    timeout_s=self._settings.timeout_s,
                    error_log=context.logs / "evaluator.log",
                )
        except RuntimeFailure as error:
            raise EvaluatorError(f"function {function}: its sandbox failed: {error}") from error

    def _arguments(self, context: EvaluationContext) -> list[str]:
        return ["-P", str(RUNNER), self._located(context.task_dir)]

    def _input(self, context: EvaluationContext, folder: str) -> bytes:
        return orjson.dumps(_session(context, folder if self._settings.files else None))


@lru_cache
def _check_import(function: str, env: tuple[tuple[str, str], ...]) -> None:
    """Raise `ConfigError` unless the function can be called; asked once per function."""
    argv = [sys.executable, "-P", str(RUNNER), function, "--check"]
    try:
        done = subprocess.run(
            argv, env=dict(env), capture_output=True, text=True, check=False, timeout=CHECK_S
        )
        fault = done.stderr.strip()[-TAIL_CHARS:] if done.returncode else None
    except subprocess.TimeoutExpired:
        fault = f"{function} cannot be imported within {CHECK_S} s"
    if fault is not None:
        raise ConfigError(f"evaluator.config.function: {fault}")


def evaluation_of(text: bytes, who: str) -> Evaluation:
    """Return the evaluation that a scoring function's return value, as JSON text, stands for.

    `EvaluatorError` quotes a value that is no reward. `true` and `false` are rewards of 1 and 0.
    """
    try:
        given = orjson.loads(text)
    except ValueError:
        given = None
    whole = dict(given) if isinstance(given, dict) else {"reward": given}
    reward, traces = whole.pop("reward", None), whole.pop("trace_rewards", None)
    reward = float(reward) if isinstance(reward, bool) else reward
    if not is_number(reward) or not (
        traces is None or (isinstance(traces, list) and all(map(is_number, traces)))
    ):
        said = text[:80].decode(errors="replace") or "nothing: it ended its process"
        message = f"{who} must return a finite number or {{'reward': number}}, not {said}"
        raise EvaluatorError(message)
    trace_rewards = None if traces is None else tuple(map(float, traces))
    return Evaluation(float(reward), trace_rewards, whole)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite number and no `bool`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _copied(left: Path, files: tuple[str, ...], folder: Path) -> None:
    """Copy what is there. `Unscorable` where an agent's link leads out of its work folder."""
    for name in files:
        if not os.path.lexists(left / name):
            continue
        try:
            copy_out(left / name, folder / name, left)
        except (RuntimeFailure, OSError) as error:
            raise Unscorable(
                f"the agent's {name} cannot be copied for the evaluator: {error}"
            ) from error


def _session(context: EvaluationContext, folder: str | None) -> JSON:
    harness = context.harness
    return {
        "session_id": context.session_id,
        "task_id": context.task.task_id,
        "instruction": context.task.instruction,
        "metadata": context.task.metadata,
        "exit_code": None if harness is None else harness.exit_code,
        "stdout": "" if harness is None else harness.stdout.decode(errors="replace"),
        "stderr": "" if harness is None else harness.stderr.decode(errors="replace"),
        "traces": [{"messages": messages} for messages in trace_messages(context)],
        "folder": folder,
    }


def trace_messages(context: EvaluationContext) -> list[list[JSON]]:
    """Return the messages of each trace, in the form of OpenAI Chat."""
    return [
        [*trace.prompt_messages, *trace.response_messages] for trace in context.trajectory.traces
    ]


def _environment() -> dict[str, str]:
    """Return the environment variables that find modules and programs; no secrets of ours."""
    names = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


PYTHON = tuple(Path(each) for each in sorted({sys.prefix, sys.base_prefix} - {"/usr"}))
"""Folders of the Python that runs Bridle."""


@asynccontextmanager
async def sandboxed(module: str, *files: Path) -> AsyncIterator[Runtime]:
    """Open a sandbox with the outermost package of `module` and with `files`, at their paths here.

    Python in the sandbox finds the module. `EvaluatorError` where there is no such module,
    `RuntimeFailure` where there can be no sandbox.
    """
    source, top = _source(module)
    seen = [*PYTHON, *(one for one in (source, *files) if not _within(one, PYTHON))]
    found = [str(top), *(one for one in sys.path if _within(Path(one), PYTHON))]
    path = os.pathsep.join(dict.fromkeys(found))
    env = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    spec = RuntimeSpec(backend="bubblewrap", network="none", env=env)
    async with opened(spec, "confined", [Mount(one, str(one)) for one in seen]) as runtime:
        yield runtime


def _source(module: str) -> tuple[Path, Path]:
    """Return the file or package folder of a module, and the folder in which its first name is
    found.

    Nothing is imported. Folders without `__init__.py` are passed through, and never the answer.
    """
    if module.endswith(".py"):
        return Path(module).absolute(), Path(module).absolute().parent
    first, *names = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # such as that of `__main__`
        spec = None
    top: Path | None = None
    while spec is not None:
        inner = spec.submodule_search_locations
        where = Path(spec.origin) if spec.origin else Path(next(iter(inner or ()), "/"))
        own = where.parent if inner and spec.origin else where
        top = top or own.parent
        if spec.origin is not None:
            return own, top
        spec = PathFinder.find_spec(names.pop(0), list(inner or ())) if names else None
    raise EvaluatorError(
        f"the evaluator's module {module!r} does not exist, or is a folder without __init__.py"
    )


def _within(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
