"""Bridle trains language agents by reinforcement learning through their own, unmodified harness.

Every agent must call a model; Bridle stands at that call. A harness changes its model base URL and
its key, nothing else. The gateway answers in four providers' wire formats, keeps the exact tokens
that were sampled, and the trajectory builders turn them into training sequences.

`Gateway`, `rollout` and `fork` run agents from Python, `Client` and `AsyncClient` talk to a rollout
server; `Task` and `Trajectory` are what goes in and comes out. Each loads when it is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridle.api import Gateway, Session, fork, rollout
    from bridle.client import AsyncClient, Client
    from bridle.config import Task
    from bridle.trajectory.sample import Trace, Trajectory

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "Client",
    "Gateway",
    "Session",
    "Task",
    "Trace",
    "Trajectory",
    "__version__",
    "fork",
    "rollout",
]

_HOMES = {
    "AsyncClient": "bridle.client",
    "Client": "bridle.client",
    "Gateway": "bridle.api",
    "Session": "bridle.api",
    "Task": "bridle.config",
    "Trace": "bridle.trajectory.sample",
    "Trajectory": "bridle.trajectory.sample",
    "fork": "bridle.api",
    "rollout": "bridle.api",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'bridle' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
