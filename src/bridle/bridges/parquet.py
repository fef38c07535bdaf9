"""Trajectories as Parquet: one row per trace, with the names of the JSON.

Any reader of Parquet can use the file (pyarrow, pandas, polars, `datasets`). `SCHEMA` has the
columns; `docs/reference/trajectory.md` says what they mean. The names of `reasons` are in the
file's metadata `mask_reasons`. `routed_experts` has the shape (ids, layers, top_k), row after row.

A session without any trace has no row; it stands, as its JSON, in the file's metadata under
`sessions_without_traces`, so that reading gives back every trajectory that was written.

`write_logprobs` and `read_logprobs` are for the file in which a trainer sends its logprobs of our
ids to `bridle certify`: one row per trace, which any trainer can write without Bridle, too.
`docs/guides/certify.md` has the columns. The file's metadata holds the trainer's facts
(`bridle.trajectory.fidelity.Facts`) as a JSON object under `bridle_trainer`. What is not sent is
not guessed: some causes cannot be distinguished then.

`rebuild_all` makes a run's trajectories again from its capture file. Sessions are independent, so
each is built in one of some processes and encoded there, as a line of JSON and as rows of Parquet;
only their bytes come back, in the order in which the sessions were opened. What is written is
therefore the same for any number of processes, and the same as a run writes.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from bridle.capture.sqlite import SqliteReader
from bridle.config import BuilderSpec
from bridle.errors import BridleError, ConfigError, boundary
from bridle.folders import private_file
from bridle.node import results
from bridle.runtimes.confinement import available_cores
from bridle.trajectory.fidelity import Facts, Recomputed
from bridle.trajectory.result import (
    ARRAYS,
    encode,
    trace_metadata,
    trajectory_bytes,
    trajectory_json,
    trajectory_of,
    writable,
)
from bridle.trajectory.sample import MaskReason, Trace, Trajectory
from bridle.types import JSON

FORMAT = "1"
"""Version of these columns, in the file's metadata as `bridle_trajectories`."""

GROUP_TOKENS = 2_000_000
"""A row group is written when its traces hold this many ids: about 26 MB in memory."""

_ARRAYS = {
    name: pa.from_numpy_dtype(kind) for name, kind in ARRAYS.items() if name != "token_rewards"
}
_OF_SESSION = ("session_id", "task_id", "status", "error")
_PLAIN = ("trace_id", "finish_reason", "logprob_mode")
_JSON = ("prompt_messages", "response_messages", "tools", "metadata")

SCHEMA = pa.schema(
    [(name, pa.string()) for name in _OF_SESSION]
    + [("session_reward", pa.float64()), ("trajectory_metadata", pa.string())]
    + [("trace_id", pa.string())]
    + [(name, pa.list_(kind)) for name, kind in _ARRAYS.items()]
    + [("exchange_ids", pa.list_(pa.string())), ("turn_ends", pa.list_(pa.int32()))]
    + [("finish_reason", pa.string()), ("logprob_mode", pa.string())]
    + [(name, pa.string()) for name in _JSON[:3]]
    + [("reward", pa.float64()), ("metadata", pa.string())]
    + [("token_rewards", pa.list_(pa.float32())), ("media", pa.string())]
    + [
        (
            "routed_experts",
            pa.struct({"shape": pa.list_(pa.int32()), "values": pa.list_(pa.int16())}),
        )
    ]
)


@dataclass(frozen=True, slots=True)
class TrajectoryRows:
    """One trajectory as a file holds it; can be sent to another process."""

    table: pa.Table | None
    """A row per trace; `None` without traces."""
    tokens: int
    """Ids in all traces."""
    without_traces: JSON | None
    """The whole trajectory, where there is no trace."""


def rows_of(trajectory: Trajectory) -> TrajectoryRows:
    """Return a trajectory as rows of a table, one per trace."""
    traces = trajectory.traces
    if not traces:
        return TrajectoryRows(None, 0, trajectory_json(trajectory))
    tokens = sum(trace.size for trace in traces)
    return TrajectoryRows(_table([(trajectory, trace) for trace in traces]), tokens, None)


class TrajectoryWriter:
    """Writes trajectories as they come. The file appears, whole, when the writer is closed.

    A `with` block that ends by an exception leaves no file. Failures are `BridleError` with the
    path.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._part = self.path.with_name(self.path.name + ".part")
        self._tables: list[pa.Table] = []
        self._tokens = 0
        self._without_traces: list[JSON] = []
        with self._writing():
            self._writer = pq.ParquetWriter(private_file(self._part), SCHEMA, compression="zstd")

    def write(self, trajectory: Trajectory) -> None:
        self.add(rows_of(trajectory))

    def add(self, rows: TrajectoryRows) -> None:
        """Append a trajectory, given as rows, to the file."""
        if rows.without_traces is not None:
            self._without_traces.append(rows.without_traces)
        if rows.table is not None:
            self._tables.append(rows.table)
            self._tokens += rows.tokens
        if self._tokens >= GROUP_TOKENS:
            self._write_group()

    def close(self) -> None:
        """Write the remaining rows and move the finished file to its path."""
        self._write_group()
        with self._writing():
            self._writer.add_key_value_metadata(_about(self._without_traces))
            self._writer.close()
            self._part.replace(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._writer.close()
            self._part.unlink(missing_ok=True)

    def _write_group(self) -> None:
        if self._tables:
            with self._writing():
                self._writer.write_table(pa.concat_tables(self._tables).combine_chunks())
            self._tables, self._tokens = [], 0

    def _writing(self) -> AbstractContextManager[None]:
        return boundary(BridleError, f"{self.path}: cannot write trajectories")


def write_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write all of `trajectories` to one file, in order. Raises `BridleError`."""
    with TrajectoryWriter(path) as writer:
        for trajectory in trajectories:
            writer.write(trajectory)


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """Return the trajectories of a file, those with traces first, in the order they were written.

    Raises `BridleError` for what is not such a file or has a newer format.
    """
    return _read(path, path)


def pack(trajectory: Trajectory) -> bytes:
    """Return a Parquet file of one trajectory, as bytes."""
    sink = pa.BufferOutputStream()
    rows = rows_of(trajectory)
    table = SCHEMA.empty_table() if rows.table is None else rows.table
    lacking = [] if rows.without_traces is None else [rows.without_traces]
    pq.write_table(table.replace_schema_metadata(_about(lacking)), sink, compression="zstd")
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def unpack(packed: bytes) -> Trajectory:
    """Return the one trajectory of a Parquet file, given as bytes. Raises `BridleError`."""
    found = _read(pa.BufferReader(packed), "a packed trajectory")
    if len(found) != 1:
        raise BridleError(f"a packed trajectory: expected one trajectory, found {len(found)}")
    return found[0]


def arrow(trajectory: Trajectory) -> bytes:
    """Return a trajectory as an Arrow IPC stream, one row per trace, with the Parquet file's
    columns.
    """
    rows = rows_of(trajectory)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as stream:
        if rows.table is not None:
            stream.write_table(rows.table)
    streamed: bytes = sink.getvalue().to_pybytes()
    return streamed


def _about(without_traces: list[JSON]) -> dict[str, bytes]:
    return {
        "bridle_trajectories": FORMAT.encode(),
        "mask_reasons": encode([reason.key for reason in MaskReason]),
        "sessions_without_traces": encode(without_traces),
    }


def _read(source: Any, name: str | Path) -> list[Trajectory]:  # noqa: ANN401 - a path or a buffer of pyarrow's
    with boundary(BridleError, f"{name}: cannot read trajectories"):
        file = pq.ParquetFile(source)
        about = file.metadata.metadata or {}
        found = about.get(b"bridle_trajectories")
        if found != FORMAT.encode():
            raise BridleError(
                f"{name}: expected a file of trajectories in format {FORMAT}, but its metadata "
                f"name {found!r}"
            )
        whole = list(_grouped(file))
        empty = orjson.loads(about[b"sessions_without_traces"])
        return whole + [trajectory_of(value) for value in empty]


def _table(rows: Sequence[tuple[Trajectory, Trace]]) -> pa.Table:
    """Return rows as columns.

    Token arrays are laid end to end without a Python object per token.
    """
    sessions = [trajectory for trajectory, _ in rows]
    traces = [trace for _, trace in rows]
    columns: dict[str, Any] = {
        "session_id": [t.session_id for t in sessions],
        "task_id": [t.metadata.get("task_id") for t in sessions],
        "status": [str(t.status) for t in sessions],
        "error": [writable(t.error) for t in sessions],
        "session_reward": [t.reward for t in sessions],
        "trajectory_metadata": [encode(t.metadata).decode() for t in sessions],
        "exchange_ids": [list(t.exchange_ids) for t in traces],
        "turn_ends": [list(t.turn_ends) for t in traces],
        "reward": [t.reward for t in traces],
    }
    for name in _PLAIN:
        columns[name] = [str(getattr(trace, name)) for trace in traces]
    columns["metadata"] = [encode(trace_metadata(trace)).decode() for trace in traces]
    for name in _JSON[:3]:
        values = [getattr(trace, name) for trace in traces]
        columns[name] = [None if value is None else encode([*value]).decode() for value in values]
    columns["token_rewards"] = [trace.token_rewards for trace in traces]
    columns["media"] = [encode([*trace.media]).decode() for trace in traces]
    columns["routed_experts"] = [_shaped(trace.routed_experts) for trace in traces]
    for name, kind in _ARRAYS.items():
        columns[name] = _lists([getattr(trace, name) for trace in traces], kind)
    arrays = [pa.array(columns[field.name], type=field.type) for field in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _shaped(rows: npt.NDArray[np.int16] | None) -> JSON | None:
    return None if rows is None else {"shape": rows.shape, "values": rows.reshape(-1)}


def _lists(arrays: Sequence[npt.NDArray[Any]], kind: pa.DataType) -> pa.Array:
    ends = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    values = np.concatenate(arrays)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values, type=kind))


def _grouped(file: pq.ParquetFile) -> Iterator[Trajectory]:
    """Yield one trajectory for neighbouring rows of one session."""
    session: dict[str, Any] | None = None
    traces: list[Trace] = []
    for batch in file.iter_batches():
        for row in range(batch.num_rows):
            values = {name: batch.column(name)[row] for name in batch.schema.names}
            about = {name: values[name].as_py() for name in _OF_SESSION}
            about["reward"] = values["session_reward"].as_py()
            about["metadata"] = values["trajectory_metadata"].as_py()
            if session is not None and session != about:
                yield _trajectory(session, traces)
                traces = []
            session = about
            traces.append(_trace(values))
    if session is not None:
        yield _trajectory(session, traces)


def _trajectory(about: dict[str, Any], traces: list[Trace]) -> Trajectory:
    return Trajectory(
        session_id=about["session_id"],
        status=about["status"],
        traces=tuple(traces),
        reward=about["reward"],
        error=about["error"],
        metadata=orjson.loads(about["metadata"]),
    )


def _trace(values: dict[str, Any]) -> Trace:
    fields: dict[str, Any] = {
        name: values[name].values.to_numpy(zero_copy_only=False) for name in _ARRAYS
    }
    for name in (*_PLAIN, "reward"):
        fields[name] = values[name].as_py()
    for name in _JSON:
        text = values[name].as_py()
        fields[name] = None if text is None else orjson.loads(text)
    for name in ("exchange_ids", "turn_ends"):
        fields[name] = tuple(values[name].as_py())
    if "token_rewards" in values:
        rewards = values["token_rewards"].as_py()
        given = None if rewards is None else np.array(rewards, dtype=np.float32)
        fields |= {"token_rewards": given, "media": orjson.loads(values["media"].as_py())}
    if "routed_experts" in values and values["routed_experts"].is_valid:
        shape, flat = (values["routed_experts"][name].values for name in ("shape", "values"))
        rows = flat.to_numpy(zero_copy_only=False).reshape(shape.to_pylist())
        fields["routed_experts"] = rows
    return Trace(**fields)


# ---- the logprobs of a trainer


FACTS = "bridle_trainer"
"""Key of the trainer's facts in the file's metadata."""

_COLUMNS = pa.schema(
    [
        ("trace_id", pa.string()),
        ("positions", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("ids", pa.list_(pa.int32())),
        ("entropies", pa.list_(pa.float32())),
        ("padding", pa.int32()),
    ]
)


def write_logprobs(path: str | Path, answers: Iterable[Recomputed], facts: Facts) -> None:
    """Write a trainer's logprobs and facts to one file, which is replaced. Raises `BridleError`.

    For a logprob per token of a response, `Recomputed.of` makes the entries of `answers`.
    """
    rows = [{name: getattr(one, name) for name in _COLUMNS.names} for one in answers]
    with boundary(BridleError, f"{path}: cannot write logprobs"):
        table = pa.Table.from_pylist(rows, schema=_COLUMNS)
        about = {FACTS: orjson.dumps(facts.json())}
        pq.write_table(table.replace_schema_metadata(about), path, compression="zstd")


def read_logprobs(path: str | Path) -> tuple[list[Recomputed], Facts]:
    """Return a trainer's logprobs and facts from a file; columns that may be null may be absent.

    Raises `BridleError` for what is not such a file, and `ConfigError` if there is none, and for
    values that are wrong.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file")
    with boundary(BridleError, f"{path}: cannot read logprobs"):
        table = pq.read_table(path)
        missing = {"trace_id", "positions", "logprobs"} - set(table.column_names)
        if missing:
            raise BridleError(
                f"{path}: the file of logprobs lacks these columns: {', '.join(sorted(missing))}"
            )
        facts = orjson.loads((table.schema.metadata or {}).get(FACTS.encode(), b"{}"))
        names = [name for name in _COLUMNS.names if name in table.column_names]
        wanted = pa.schema([_COLUMNS.field(name) for name in names])
        columns = table.select(names).cast(wanted)
        answers = [_answer(columns, row) for row in range(columns.num_rows)]
    return answers, Facts.of(facts, str(path))


def _answer(columns: pa.Table, row: int) -> Recomputed:
    fields: dict[str, object] = {}
    for name in columns.column_names:
        value = columns.column(name)[row]
        if value.is_valid and name not in ("trace_id", "padding"):
            fields[name] = value.values.to_numpy(zero_copy_only=False)
        else:
            fields[name] = value.as_py()
    return Recomputed(**fields)  # type: ignore[arg-type]


# ---- a run's trajectories again


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
    """Yield each captured session's trajectory, built again, in the order given.

    `spec` = `None` uses each session's own builder. `workers` = `None` uses every core that this
    process may use where there are enough sessions; 1 stays in this process. Raises `BridleError`.
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
            raise BridleError(
                f"{path}: a worker process that rebuilt its trajectories died: {error}"
            ) from error
        finally:
            for future in waiting:
                future.cancel()


def _batch(path: Path, session_ids: Sequence[str], spec: BuilderSpec | None) -> list[Rebuilt]:
    """Build some sessions' trajectories again; runs in a process of its own."""
    with SqliteReader(path) as reader:
        return [_rebuilt(reader, session_id, spec) for session_id in session_ids]


def _rebuilt(reader: SqliteReader, session_id: str, spec: BuilderSpec | None) -> Rebuilt:
    trajectory = results.trajectory_of(reader.read(session_id), spec)
    return Rebuilt(trajectory_bytes(trajectory), rows_of(trajectory), trajectory.metadata["stats"])
