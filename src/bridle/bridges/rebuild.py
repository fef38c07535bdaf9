"""A run's trajectories again from its capture file, in bulk and in parallel.

Sessions are independent, so each is built in one of some processes and encoded there, as a line of
JSON and as rows of Parquet; only their bytes come back, in the order in which the sessions were
opened. What is written is therefore the same for any number of processes, and the same as a run
writes.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from bridle.bridges.parquet import TrajectoryRows, rows_of
from bridle.capture.sqlite import SqliteReader
from bridle.config import BuilderSpec
from bridle.errors import BridleError
from bridle.node.results import trajectory_of
from bridle.runtimes.limits import available_cores
from bridle.trajectory.result import trajectory_bytes
from bridle.types import JSON

BATCH = 8
"""Sessions that go to a process at once."""

WORTH_A_PROCESS = 4 * BATCH
"""Fewer sessions than this are built here: a process takes half a second to start."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """One session's trajectory, encoded."""

    line: bytes
    """Its JSON, without a line end."""
    rows: TrajectoryRows
    stats: JSON
    """`metadata.stats`."""


def rebuild_all(
    path: Path, session_ids: Sequence[str], spec: BuilderSpec | None, *, workers: int | None = None
) -> Iterator[Rebuilt]:
    """Yield each session's trajectory, in the order given.

    `spec` = `None` builds each as it was run. `workers` = `None` uses every core that this process
    may use where there are enough sessions; 1 stays in this process. Raises `BridleError`.
    """
    if workers is None:
        workers = available_cores() if len(session_ids) >= WORTH_A_PROCESS else 1
    if workers == 1:
        with SqliteReader(path) as reader:
            for session_id in session_ids:
                yield _rebuilt(reader, session_id, spec)
        return
    starts = range(0, len(session_ids), BATCH)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        waiting: deque[Future[list[Rebuilt]]] = deque()
        try:
            for start in starts:
                batch = session_ids[start : start + BATCH]
                waiting.append(pool.submit(_batch, path, batch, spec))
                if len(waiting) > 2 * workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool as error:
            raise BridleError(f"{path}: a process that rebuilt it ended: {error}") from error
        finally:
            for future in waiting:
                future.cancel()


def _batch(path: Path, session_ids: Sequence[str], spec: BuilderSpec | None) -> list[Rebuilt]:
    """Some sessions; runs in a process of its own."""
    with SqliteReader(path) as reader:
        return [_rebuilt(reader, session_id, spec) for session_id in session_ids]


def _rebuilt(reader: SqliteReader, session_id: str, spec: BuilderSpec | None) -> Rebuilt:
    trajectory = trajectory_of(reader.read(session_id), spec)
    return Rebuilt(trajectory_bytes(trajectory), rows_of(trajectory), trajectory.metadata["stats"])
