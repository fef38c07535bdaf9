"""TensorBoard: numbers as scalars, samples as text, written by tensorboardX without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
from tensorboardX import SummaryWriter

from bridle.telemetry.base import Tracker
from bridle.types import JSON


class Tensorboard(Tracker):
    """Writes event files to `tensorboard` in the run folder."""

    def __init__(self, folder: Path, config: JSON) -> None:
        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("config", _code(config))
        self._samples = 0

    def numbers(self, axis: str, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002 - the names begin with it
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, rows: Sequence[JSON]) -> None:
        for row in rows:
            self._samples += 1
            self._writer.add_text("samples", _code(row), self._samples)

    def close(self) -> None:
        self._writer.close()


def _code(value: JSON) -> str:
    lines = orjson.dumps(value, option=orjson.OPT_INDENT_2).decode().splitlines()
    return "\n".join(f"    {line}" for line in lines)
