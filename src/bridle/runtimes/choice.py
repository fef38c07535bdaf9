"""Choice of the runtime for a task that names none.

`auto` is the runtime that contains, wherever it can: `docker` for a task with an image or a GPU,
`bubblewrap` for any other where it works on this machine, else `local`, which is said loudly. An
operator who wants another one for such tasks names it in `$BRIDLE_RUNTIME`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import structlog

from bridle.config import AUTO, RuntimeSpec

VARIABLE = "BRIDLE_RUNTIME"
TRIAL_S = 20.0
ALL = ("--unshare-user", "--unshare-all", "--disable-userns", "--uid", "1000", "--gid", "1000")
BOUND = ("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--die-with-parent")

log = structlog.get_logger(__name__)


def chosen(spec: RuntimeSpec) -> RuntimeSpec:
    """`spec` with the runtime that `auto` stands for on this machine; any other as it is."""
    if spec.backend != AUTO:
        return spec
    in_image = spec.image is not None and not Path(spec.image).is_dir()
    backend = "docker" if in_image or spec.gpus is not None else default_backend()[0]
    return spec.model_copy(update={"backend": backend})


def default_backend() -> tuple[str, str]:
    """The runtime of tasks that name none and want no image, and why it is that one.

    Tries `bwrap` once per process, for some 10 ms.
    """
    from bridle.runtimes.bubblewrap import what_is_missing

    if named := os.environ.get(VARIABLE):
        return named, f"${VARIABLE} names it"
    reason = what_is_missing() or _refusal(shutil.which("bwrap") or "bwrap")
    if reason is None:
        return "bubblewrap", "bwrap is there and works"
    _say_loudly(reason)
    return "local", f"NOTHING IS CONTAINED: {reason}"


@cache
def _refusal(bwrap: str) -> str | None:
    """Why the machine does not let `bwrap` make namespaces; `None` = it does."""
    line = [bwrap, *ALL, *BOUND, "true"]
    try:
        done = subprocess.run(line, capture_output=True, check=False, timeout=TRIAL_S, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not start: {error}"
    if done.returncode == 0:
        return None
    return f"bwrap is there and cannot make a sandbox: {done.stderr.strip()[-300:]}"


@cache
def _say_loudly(reason: str) -> None:
    log.warning("harnesses run in 'local', which contains nothing", reason=reason)
