"""Runs Python of this machine in a sandbox of its own: no network, no files but its own modules.

What it sees of the machine is the system, the Python that runs Bridle, and the module that it is
asked for. Needs `bwrap`.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.aio import run_shielded
from bridle.config import RuntimeSpec
from bridle.errors import EvaluatorError
from bridle.runtimes import make_runtime
from bridle.runtimes.base import Mount

if TYPE_CHECKING:
    from bridle.runtimes.base import ExecResult, Runtime

PYTHON = tuple(Path(each) for each in sorted({sys.prefix, sys.base_prefix} - {"/usr"}))
"""Where the Python that runs Bridle lies."""
STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Confined:
    """A sandbox in which Python finds one module."""

    runtime: Runtime
    path: str
    """`PYTHONPATH`."""

    async def python(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: bytes,
        timeout_s: float,
        error_log: Path,
    ) -> ExecResult:
        """Run the Python that runs Bridle; stderr goes to `error_log`."""
        return await self.runtime.exec(
            [sys.executable, *arguments],
            env={"PYTHONPATH": self.path, "PYTHONDONTWRITEBYTECODE": "1", **env},
            stdin=stdin,
            timeout_s=timeout_s,
            error_log=error_log,
        )


@asynccontextmanager
async def confined(module: str, *files: Path) -> AsyncIterator[Confined]:
    """A sandbox inside, with the outermost package of `module` and `files` where they lie here.

    `EvaluatorError` where there is no such module, `RuntimeFailure` where there can be no sandbox.
    """
    source, top = _source(module)
    with tempfile.TemporaryDirectory(prefix="bridle-confined-") as scratch:
        seen = [*PYTHON, *(one for one in (source, *files) if not _within(one, PYTHON))]
        runtime = make_runtime(
            RuntimeSpec(backend="bubblewrap", network="none"),
            f"confined-{secrets.token_hex(4)}",
            Path(scratch),
            [Mount(one, str(one)) for one in seen],
        )
        found = [str(top), *(one for one in sys.path if _within(Path(one), PYTHON))]
        try:
            await runtime.start()
            yield Confined(runtime, os.pathsep.join(dict.fromkeys(found)))
        finally:
            await run_shielded(runtime.stop(), timeout_s=STOP_S)


def _source(module: str) -> tuple[Path, Path]:
    """The file or package folder of a module, and the folder in which its first name is found.

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
    message = f"there is no module {module!r}, or it is a folder without __init__.py"
    raise EvaluatorError(message)


def _within(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
