"""A trainer's logprobs come back from their file as they were sent, whoever wrote it."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bridle.bridges.parquet import FACTS, read_logprobs, write_logprobs
from bridle.errors import BridleError, ConfigError
from bridle.trajectory.fidelity import Facts, Recomputed


def ints(*values):
    return np.array(values, dtype=np.int32)


def floats(*values):
    return np.array(values, dtype=np.float32)


def test_recomputed_logprobs_and_facts_survive_a_round_trip_with_missing_ones_none(tmp_path):
    whole = Recomputed(
        "a", ints(3, 4), floats(-1, -2), ints(1, 2, 3, 4, 5), floats(0.5, 0.25), padding=7
    )
    least = Recomputed("b", ints(1), floats(-np.inf))
    facts = Facts(version=3, dtype="bfloat16", temperature=0.7)
    write_logprobs(tmp_path / "l.parquet", [whole, least], facts)
    (first, second), result = read_logprobs(tmp_path / "l.parquet")
    assert result == facts
    for name in ("trace_id", "positions", "logprobs", "ids", "entropies", "padding"):
        assert np.array_equal(getattr(first, name), getattr(whole, name))
    assert second.logprobs.tolist() == [-np.inf]
    assert (second.ids, second.entropies, second.padding) == (None, None, None)
    assert [str(first.positions.dtype), str(first.logprobs.dtype)] == ["int32", "float32"]


def test_a_logprobs_file_needs_only_trace_id_positions_and_logprobs(tmp_path):
    table = pa.table({"trace_id": ["a"], "positions": [[4, 5]], "logprobs": [[-1.0, -0.5]]})
    pq.write_table(table, tmp_path / "l.parquet")
    (answer,), facts = read_logprobs(tmp_path / "l.parquet")
    assert (answer.positions.tolist(), answer.logprobs.tolist()) == ([4, 5], [-1.0, -0.5])
    assert facts == Facts()


def test_a_file_without_valid_logprobs_or_facts_is_refused(tmp_path):
    (tmp_path / "text").write_text("no")
    with pytest.raises(BridleError, match="cannot read logprobs"):
        read_logprobs(tmp_path / "text")
    pq.write_table(pa.table({"trace_id": ["a"]}), tmp_path / "few.parquet")
    with pytest.raises(BridleError, match="lacks these columns: logprobs, positions"):
        read_logprobs(tmp_path / "few.parquet")
    table = pa.table({"trace_id": ["a"], "positions": [[4]], "logprobs": [[-1.0]]})
    wrong = table.replace_schema_metadata({FACTS: b'{"color": 1}'})
    pq.write_table(wrong, tmp_path / "wrong.parquet")
    with pytest.raises(ConfigError, match="unknown fact 'color'"):
        read_logprobs(tmp_path / "wrong.parquet")
