"""The file in which a trainer sends its logprobs of our ids, for `bridle certify`.

Parquet, one row per trace; any trainer can write it, with `write_logprobs` or without Bridle:

| column | type | meaning |
|---|---|---|
| trace_id | string | of `trajectories.parquet` |
| positions | list<int32> | places of the scored tokens in `prompt_ids + response_ids` |
| logprobs | list<float> | the trainer's, after its temperature; one per position |
| ids | list<int32> | the row of ids as the trainer had it, without padding; null = not sent |
| entropies | list<float> | of the trainer's distribution at each position; null = not sent |
| padding | int32 | tokens of padding in its row of the batch; null = not sent |

The file's metadata holds the trainer's facts (`bridle.trajectory.fidelity.Facts`) as a JSON object
under `bridle_trainer`. What is not sent is not guessed: some causes cannot be distinguished then.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from bridle.errors import BridleError, boundary
from bridle.trajectory.fidelity import Facts, Recomputed

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

    A bridge that has a logprob for each token of a response makes an answer by `Recomputed.of`.
    """
    rows = [{name: getattr(one, name) for name in _COLUMNS.names} for one in answers]
    with boundary(BridleError, f"{path}: cannot write logprobs"):
        table = pa.Table.from_pylist(rows, schema=_COLUMNS)
        about = {FACTS: orjson.dumps(facts.json())}
        pq.write_table(table.replace_schema_metadata(about), path, compression="zstd")


def read_logprobs(path: str | Path) -> tuple[list[Recomputed], Facts]:
    """Return the answers and the facts of a file; columns that may be null may be absent.

    Raises `BridleError` for what is not such a file, and `ConfigError` for values that are wrong.
    """
    with boundary(BridleError, f"{path}: cannot read logprobs"):
        table = pq.read_table(path)
        missing = {"trace_id", "positions", "logprobs"} - set(table.column_names)
        if missing:
            raise BridleError(f"{path}: no column {', '.join(sorted(missing))}")
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
