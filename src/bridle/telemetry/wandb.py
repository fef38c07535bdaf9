"""Weights & Biases, and Trackio, whose interface is the same."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from bridle.telemetry.base import Tracker
from bridle.types import JSON


class Wandb(Tracker):
    """Logs to a W&B run with the name of the run folder, in project `WANDB_PROJECT` or `bridle`."""

    module: ClassVar = "wandb"

    def __init__(self, folder: Path, config: JSON) -> None:
        self._package = import_module(self.module)
        project = os.environ.get(f"{self.module.upper()}_PROJECT", "bridle")
        self._run = self._begin(project, folder, config)

    def _begin(self, project: str, folder: Path, config: JSON) -> Any:  # noqa: ANN401 - a run of either package
        run = self._package.init(project=project, name=folder.name, dir=folder, config=config)
        for axis in ("rollout", "train", "eval"):
            run.define_metric(f"{axis}/*", step_metric=f"{axis}/step")
        return run

    def numbers(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, f"{axis}/step": step})

    def samples(self, rows: Sequence[JSON]) -> None:
        table = self._package.Table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
        self._run.log({"samples": table})

    def close(self) -> None:
        self._run.finish()


class Trackio(Wandb):
    """Logs to Trackio's local database, or to the space `TRACKIO_SPACE_ID`."""

    module = "trackio"

    def _begin(self, project: str, folder: Path, config: JSON) -> Any:  # noqa: ANN401 - a run of either package
        return self._package.init(project=project, name=folder.name, config=config, embed=False)
