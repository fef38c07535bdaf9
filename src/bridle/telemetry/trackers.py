"""Trackers: Weights & Biases, Trackio, MLflow and TensorBoard, each by its own package.

A package is imported when its tracker is opened.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import orjson

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


class Mlflow(Tracker):
    """Logs to a run with the name of the run folder; `MLFLOW_TRACKING_URI` and
    `MLFLOW_EXPERIMENT_NAME` say where.
    """

    def __init__(self, folder: Path, config: JSON) -> None:
        from mlflow import MlflowClient, start_run
        from mlflow.entities import Metric

        self._metric = Metric
        with start_run(run_name=folder.name) as run:
            self._run = run.info.run_id
        self._client = MlflowClient()
        self._client.update_run(self._run, status="RUNNING")
        self._client.log_dict(self._run, config, "bridle.json")
        self._tables = 0

    def numbers(self, axis: str, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002 - the names begin with it
        at = int(time.time() * 1000)
        metrics = [self._metric(name, value, at, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def samples(self, rows: Sequence[JSON]) -> None:
        """Log a table of sessions to MLflow, as a file in the form of `mlflow.log_table`."""
        self._tables += 1
        table = {"columns": [*rows[0]], "data": [[*row.values()] for row in rows]}
        self._client.log_dict(self._run, table, f"samples/{self._tables:04d}.json")

    def close(self) -> None:
        """Mark the run in MLflow as ended."""
        self._client.set_terminated(self._run)


class Tensorboard(Tracker):
    """Writes event files to `tensorboard` in the run folder, without TensorFlow."""

    def __init__(self, folder: Path, config: JSON) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("config", _code(config))
        self._samples = 0

    def numbers(self, axis: str, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002 - the names begin with it
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, rows: Sequence[JSON]) -> None:
        """Log sessions as texts to TensorBoard."""
        for row in rows:
            self._samples += 1
            self._writer.add_text("samples", _code(row), self._samples)

    def close(self) -> None:
        self._writer.close()


def _code(value: JSON) -> str:
    lines = orjson.dumps(value, option=orjson.OPT_INDENT_2).decode().splitlines()
    return "\n".join(f"    {line}" for line in lines)
