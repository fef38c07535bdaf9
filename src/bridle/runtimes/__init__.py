"""Runtimes: sandboxes in which harnesses run.

`base` is the contract, `base_runtime` has the base classes, and each kind is one file: `local`,
`bubblewrap`, `docker`, `apptainer`, `remote`. They share `process` (starting, finding and killing
processes of this machine), `files` (copies and archives) and `confinement` (control groups, polling
of limits, and entering a sandbox under its system call filter). `conformance` is the suite that
every runtime passes.

The backend "auto" is the runtime that isolates, where possible: `docker` for a task with an image
(other than a folder) or a GPU, `bubblewrap` for any other where it works on this machine, else
`local`, with a warning. `$BRIDLE_RUNTIME` names the one for tasks that do not need `docker`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import structlog

from bridle.aio import run_shielded
from bridle.config import AUTO, RuntimeSpec
from bridle.errors import RuntimeFailure
from bridle.plugins import load
from bridle.runtimes.base import Mount, Runtime, RuntimeFactory

RUNTIMES = {
    "local": "bridle.runtimes.local:LocalRuntime",
    "bubblewrap": "bridle.runtimes.bubblewrap:BubblewrapRuntime",
    "docker": "bridle.runtimes.docker:DockerRuntime",
    "apptainer": "bridle.runtimes.apptainer:ApptainerRuntime",
    "remote": "bridle.runtimes.remote:RemoteRuntime",
}
"""Short name -> `module:Class`; any other `package.module:Class` works too."""


__all__ = [
    "RUNTIMES",
    "check_machine",
    "default_backend",
    "make_runtime",
    "opened",
    "runtime_class",
]


def runtime_class(backend: str) -> RuntimeFactory:
    """Return the runtime class of that name (`RuntimeSpec.backend`).

    Raises `ConfigError`, which lists the known names.
    """
    if backend == AUTO:
        backend = default_backend()[0]
    factory: RuntimeFactory = load(backend, RUNTIMES, what="runtime")
    return factory


def make_runtime(
    spec: RuntimeSpec, session_id: str, scratch: Path, mounts: Sequence[Mount] = ()
) -> Runtime:
    """Return a runtime that is not started yet; the caller calls its `start`, later its `stop`.

    Raises `ConfigError` where the backend is unknown or cannot give what `spec` asks for.
    """
    spec = resolve_auto(spec)
    return runtime_class(spec.backend)(spec, session_id, scratch, mounts)


@asynccontextmanager
async def opened(
    spec: RuntimeSpec, name: str, mounts: Sequence[Mount] = ()
) -> AsyncIterator[Runtime]:
    """Yield a started runtime in a temporary folder, outside any session; it is stopped at
    the end.
    """
    with tempfile.TemporaryDirectory(prefix=f"bridle-{name}-") as scratch:
        runtime = make_runtime(spec, f"{name}-{secrets.token_hex(4)}", Path(scratch), mounts)
        try:
            await runtime.start()
            yield runtime
        finally:
            await run_shielded(runtime.stop(), timeout_s=STOP_S)


STOP_S = 30.0
VARIABLE = "BRIDLE_RUNTIME"
TRIAL_S = 20.0
ALL = ("--unshare-user", "--unshare-all", "--disable-userns", "--uid", "1000", "--gid", "1000")
BOUND = ("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--die-with-parent")

log = structlog.get_logger(__name__)


def resolve_auto(spec: RuntimeSpec, *, contained: bool = False) -> RuntimeSpec:
    """Return `spec` with backend `auto` replaced by the best one of this machine; others unchanged.

    `contained` = by a backend that contains its programs, even where this machine has none (then
    another machine runs the session).
    """
    if spec.backend != AUTO:
        return spec
    if (spec.image is not None and not Path(spec.image).is_dir()) or spec.gpus is not None:
        backend = "docker"
    elif contained:
        backend = os.environ.get(VARIABLE) or "bubblewrap"
    else:
        backend = default_backend()[0]
    return spec.model_copy(update={"backend": backend})


def default_backend() -> tuple[str, str]:
    """Return the backend for tasks that name none and need no image, and the reason for the choice.

    Tries `bwrap` once per process, for some 10 ms.
    """
    if named := os.environ.get(VARIABLE):
        return named, f"${VARIABLE} names it"
    reason = _no_bubblewrap()
    if reason is None:
        return "bubblewrap", "bwrap is there and works"
    _warn_once(reason)
    return "local", f"NOTHING IS CONTAINED: {reason}"


def check_machine(backend: str) -> None:
    """Raise `RuntimeFailure` if this machine lacks what sessions with this backend need."""
    from bridle.runtimes import apptainer, docker

    if backend == "bubblewrap" and (reason := _no_bubblewrap()) is not None:
        raise RuntimeFailure(reason)
    if backend == "docker":
        docker.check_daemon()
    if backend == "apptainer":
        apptainer.program()


def _no_bubblewrap() -> str | None:
    from bridle.runtimes.bubblewrap import what_is_missing

    return what_is_missing() or _refusal(shutil.which("bwrap") or "bwrap")


@cache
def _refusal(bwrap: str) -> str | None:
    """Return why `bwrap` cannot create namespaces on this machine; `None` = it can."""
    line = [bwrap, *ALL, *BOUND, "true"]
    try:
        done = subprocess.run(line, capture_output=True, check=False, timeout=TRIAL_S, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not start: {error}"
    if done.returncode == 0:
        return None
    return f"bwrap is there and cannot make a sandbox: {done.stderr.strip()[-300:]}"


@cache
def _warn_once(reason: str) -> None:
    log.warning("harnesses run in 'local', which contains nothing", reason=reason)
