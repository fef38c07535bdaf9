"""Runtimes: where an agent lives, and the only door into it.

The contract is `base`, what the kinds share is `place`, each kind is one file. `process` and `proc`
are how any runtime starts and ends processes of this machine; `conformance` is the suite that each
runtime passes; `choice` says which kind a task gets that names none.
"""

from collections.abc import Sequence
from pathlib import Path

from bridle.config import AUTO, RuntimeSpec
from bridle.plugins import load
from bridle.runtimes.base import Mount, Runtime, RuntimeFactory
from bridle.runtimes.choice import chosen, default_backend

RUNTIMES = {
    "local": "bridle.runtimes.local:LocalRuntime",
    "bubblewrap": "bridle.runtimes.bubblewrap:BubblewrapRuntime",
    "docker": "bridle.runtimes.docker:DockerRuntime",
    "apptainer": "bridle.runtimes.apptainer:ApptainerRuntime",
    "remote": "bridle.runtimes.remote:RemoteRuntime",
}
"""Short name -> `module:Class`; any other `package.module:Class` works too."""


__all__ = ["RUNTIMES", "chosen", "default_backend", "make_runtime", "runtime_class"]


def runtime_class(backend: str) -> RuntimeFactory:
    """The class that `RuntimeSpec.backend` stands for; `ConfigError` names what is known."""
    if backend == AUTO:
        backend = default_backend()[0]
    factory: RuntimeFactory = load(backend, RUNTIMES, what="runtime")
    return factory


def make_runtime(
    spec: RuntimeSpec, session_id: str, scratch: Path, mounts: Sequence[Mount] = ()
) -> Runtime:
    """A runtime that is not started yet; its owner calls `start`, later `stop`.

    Raises `ConfigError` where the backend is unknown or cannot give what `spec` asks for.
    """
    spec = chosen(spec)
    return runtime_class(spec.backend)(spec, session_id, scratch, mounts)
