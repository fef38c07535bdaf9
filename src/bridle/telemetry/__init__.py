"""Export of a run's numbers, samples and traces to trackers: `--telemetry wandb,otel`.

`base` has the interface, `trackers` and `otel` the adapters of packages, each configured (project,
server, key, offline mode) by the package's own environment variables.
`package.module:Class` names any other tracker.
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
    "mlflow": "bridle.telemetry.trackers:Mlflow",
    "otel": "bridle.telemetry.otel:Otel",
    "tensorboard": "bridle.telemetry.trackers:Tensorboard",
    "trackio": "bridle.telemetry.trackers:Trackio",
    "wandb": "bridle.telemetry.trackers:Wandb",
}

PACKAGES: Final = {"otel": "opentelemetry", "tensorboard": "tensorboardX"}
"""Packages whose name is not their tracker's."""


def check(names: Sequence[str]) -> None:
    """Raise `ConfigError` for an experiment tracker that is unknown or whose package is missing."""
    for name in names:
        package = PACKAGES.get(name, name)
        if name in TRACKERS and find_spec(package) is None:
            message = f"telemetry {name} needs the package {package}: run {install_extra(name)}"
            raise ConfigError(message)
        load(name, TRACKERS, what="tracker")


@contextmanager
def open_trackers(names: Sequence[str], folder: Path, config: JSON) -> Iterator[Telemetry]:
    """Open experiment trackers for the run in `folder`; leaving waits until all is logged.

    Raises `ConfigError` for an unknown tracker or a missing package, and if a package fails (no
    key, no server). User info of URLs in `config` does not leave the machine.
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
