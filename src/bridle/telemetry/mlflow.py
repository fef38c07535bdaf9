"""MLflow: numbers as metrics, samples as JSON artiattributes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlflow import MlflowClient, start_run
from mlflow.entities import Metric

from bridle.telemetry.base import Tracker
from bridle.types import JSON


class Mlflow(Tracker):
    """Logs to a run with the name of the run folder; `MLFLOW_TRACKING_URI` and
    `MLFLOW_EXPERIMENT_NAME` say where.
    """

    def __init__(self, folder: Path, config: JSON) -> None:
        with start_run(run_name=folder.name) as run:
            self._run = run.info.run_id
        self._client = MlflowClient()
        self._client.update_run(self._run, status="RUNNING")
        self._client.log_dict(self._run, config, "bridle.json")
        self._tables = 0

    def numbers(self, axis: str, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002 - the names begin with it
        at = int(time.time() * 1000)
        metrics = [Metric(name, value, at, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def samples(self, rows: Sequence[JSON]) -> None:
        """Log a file in the form of `mlflow.log_table`."""
        self._tables += 1
        table = {"columns": [*rows[0]], "data": [[*row.values()] for row in rows]}
        self._client.log_dict(self._run, table, f"samples/{self._tables:04d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run)
