"""Trackers that a run's numbers, samples and traces go to: `--telemetry wandb,otel`.

Each adapter leaves what its package is told (project, server, key, offline mode) to that package's
own environment variables. `package.module:Class` names a tracker of one's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import orjson

from bridle.errors import ConfigError, boundary, install_extra
from bridle.plugins import load
from bridle.telemetry.base import Telemetry
from bridle.types import JSON, without_user_info

TRACKERS: Final[Mapping[str, str]] = {
    "mlflow": "bridle.telemetry.mlflow:Mlflow",
    "otel": "bridle.telemetry.otel:Otel",
    "tensorboard": "bridle.telemetry.tensorboard:Tensorboard",
    "trackio": "bridle.telemetry.wandb:Trackio",
    "wandb": "bridle.telemetry.wandb:Wandb",
}

PACKAGES: Final = {"otel": "opentelemetry", "tensorboard": "tensorboardX"}
"""Packages that are not called as their tracker is."""


def check(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a tracker that is unknown or whose package is not installed."""
    for name in names:
        package = PACKAGES.get(name, name)
        if name in TRACKERS and find_spec(package) is None:
            message = f"telemetry {name} needs the package {package}: run {install_extra(name)}"
            raise ConfigError(message)
        load(name, TRACKERS, what="tracker")


@contextmanager
def opened(names: Sequence[str], folder: Path, config: JSON) -> Iterator[Telemetry]:
    """Open the named trackers for the run in `folder`; at the end they have got everything.

    Raises `ConfigError` as `check` does, and for what a package refuses (no key, no server).
    User info of URLs in `config` does not leave the machine.
    """
    check(names)
    config = orjson.loads(without_user_info(orjson.dumps(config).decode()))
    trackers = {}
    for name in names:
        with boundary(ConfigError, f"telemetry {name}"):
            trackers[name] = load(name, TRACKERS, what="tracker")(folder, config)
    telemetry = Telemetry(trackers)
    try:
        yield telemetry
    finally:
        telemetry.close()
