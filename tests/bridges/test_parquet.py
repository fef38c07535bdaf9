"""Trajectories come back from Parquet as they went in, and any reader can use the file."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from tests.capture.made import MadeSession
from tests.trajectory.conversations import sessions

from bridle.bridges.parquet import (
    GROUP_TOKENS,
    SCHEMA,
    TrajectoryWriter,
    arrow,
    pack,
    read_trajectories,
    unpack,
    write_trajectories,
)
from bridle.errors import BridleError
from bridle.trajectory import rebuild
from bridle.trajectory.result import trajectory_bytes
from bridle.trajectory.sample import MaskReason, Trajectory


def made_trajectory(session_id="s1", turns=3, **fields):
    made = MadeSession(session_id, **fields)
    for turn in range(turns):
        made.call(f"x{turn - 1}" if turn else None)
    made.end(0.25)
    return rebuild(made.capture())


def test_a_parquet_file_has_one_row_per_trace_with_the_json_field_names(tmp_path):
    trajectory = made_trajectory()
    write_trajectories(tmp_path / "t.parquet", [trajectory, made_trajectory("s2")])
    table = pq.read_table(tmp_path / "t.parquet")
    assert table.schema.equals(SCHEMA)
    assert table["session_id"].to_pylist() == ["s1", "s2"]
    (trace,) = trajectory.traces
    row = table.to_pylist()[0]
    for name in ("prompt_ids", "response_ids", "loss_mask", "versions", "reasons"):
        assert row[name] == getattr(trace, name).tolist()
    assert np.array_equal(np.float32(row["response_logprobs"]), trace.response_logprobs)
    assert (row["status"], row["reward"], row["session_reward"]) == ("COMPLETED", 0.25, 0.25)
    assert json.loads(row["response_messages"]) == trace.response_messages
    assert json.loads(row["trajectory_metadata"])["stats"]["exchanges"] == 3


def test_parquet_keeps_a_trace_s_own_reward_beside_its_session_s(tmp_path):
    trajectory = made_trajectory()
    (trace,) = trajectory.traces
    traces = [dataclasses.replace(trace, reward=reward) for reward in (0.75, None)]
    given = dataclasses.replace(trajectory, traces=tuple(traces))
    write_trajectories(tmp_path / "t.parquet", [given])
    (read,) = read_trajectories(tmp_path / "t.parquet")
    assert (read.reward, [one.reward for one in read.traces]) == (0.25, [0.75, None])


@pytest.mark.train
def test_the_datasets_package_loads_a_parquet_file_with_every_value(tmp_path):
    from datasets import load_dataset

    trajectory = made_trajectory()
    path = tmp_path / "t.parquet"
    write_trajectories(path, [trajectory, made_trajectory("s2")])
    rows = load_dataset(
        "parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert rows["session_id"] == ["s1", "s2"]
    assert set(rows.column_names) == set(SCHEMA.names)
    (trace,) = trajectory.traces
    for name in ("prompt_ids", "response_ids", "loss_mask", "versions", "reasons"):
        assert rows[0][name] == getattr(trace, name).tolist()
    assert np.array_equal(np.float32(rows[0]["response_logprobs"]), trace.response_logprobs)


def test_parquet_metadata_names_the_mask_reasons(tmp_path):
    write_trajectories(tmp_path / "t.parquet", [made_trajectory()])
    about = pq.read_metadata(tmp_path / "t.parquet").metadata
    assert json.loads(about[b"mask_reasons"])[MaskReason.SUPERSEDED] == "superseded"


@settings(max_examples=20)
@given(made=sessions())
def test_trajectories_survive_a_parquet_round_trip_bit_for_bit(tmp_path_factory, made):
    path = tmp_path_factory.mktemp("p") / "t.parquet"
    trajectory = rebuild(made.capture())
    write_trajectories(path, [trajectory])
    (read,) = read_trajectories(path)
    assert trajectory_bytes(read) == trajectory_bytes(trajectory)


def test_parquet_keeps_sessions_without_traces_or_messages(tmp_path):
    empty = made_trajectory("empty", turns=0)
    without = rebuild(MadeSession("other").capture())
    path = tmp_path / "t.parquet"
    write_trajectories(path, [empty, made_trajectory(), without, made_trajectory("s2")])
    read = read_trajectories(path)
    assert [t.session_id for t in read] == ["s1", "s2", "empty", "other"]
    assert trajectory_bytes(read[2]) == trajectory_bytes(empty)
    write_trajectories(path, [])
    assert read_trajectories(path) == []
    assert pq.read_table(path).num_rows == 0


def test_a_parquet_row_group_ends_at_its_token_limit(tmp_path):
    made = MadeSession(texts=False)
    made.call(None, new=GROUP_TOKENS // 2, output=10)
    made.end()
    trajectory = rebuild(made.capture())
    with TrajectoryWriter(tmp_path / "t.parquet") as writer:
        for _ in range(4):
            writer.write(trajectory)
    assert pq.ParquetFile(tmp_path / "t.parquet").num_row_groups == 2


def test_undecodable_text_is_escaped_in_parquet(tmp_path):
    made = MadeSession()
    made.call()
    made.end(None, status="ERROR", error="bad byte \udcff")
    write_trajectories(tmp_path / "t.parquet", [rebuild(made.capture())])
    (read,) = read_trajectories(tmp_path / "t.parquet")
    assert read.error == "bad byte \\udcff"


def test_a_failed_parquet_write_leaves_no_file(tmp_path):
    path = tmp_path / "t.parquet"

    def one_and_no_more():
        yield made_trajectory()
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        write_trajectories(path, one_and_no_more())
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_or_unreadable_parquet_file_raises_an_error_with_its_path(tmp_path):
    missing = tmp_path / "no" / "t.parquet"
    with pytest.raises(BridleError, match=f"{missing}: cannot write"):
        write_trajectories(missing, [])
    with pytest.raises(BridleError, match=f"{missing}: cannot read"):
        read_trajectories(missing)
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1]}), other)
    with pytest.raises(BridleError, match="expected a file of trajectories in format 1"):
        read_trajectories(other)
    other.write_bytes(b"PAR1 no")
    with pytest.raises(BridleError, match="cannot read"):
        read_trajectories(other)


def test_token_rewards_and_media_survive_a_parquet_round_trip(tmp_path):
    made = MadeSession()
    made.call(output=3)
    made.call(None, continues=None, output=2)
    made.end(1.0, metadata={"token_rewards": [[0.5, 0.25, 0.0], [1.0, 2.0]]})
    one = rebuild(made.capture())
    first, *others = one.traces
    media = [{"digest": "d", "start": 2, "length": 4}]
    one = dataclasses.replace(one, traces=(dataclasses.replace(first, media=media), *others))
    write_trajectories(tmp_path / "t.parquet", [one])
    (read,) = read_trajectories(tmp_path / "t.parquet")
    rewards = [[*(t.token_rewards if t.token_rewards is not None else ())] for t in read.traces]
    assert rewards == [[0.5, 0.25, 0.0], [1.0, 2.0]]
    assert read.traces[0].media == [{"digest": "d", "start": 2, "length": 4}]


def test_a_parquet_file_without_the_newer_columns_is_read(tmp_path):
    made = MadeSession()
    made.call()
    write_trajectories(tmp_path / "t.parquet", [rebuild(made.capture())])
    file = pq.ParquetFile(tmp_path / "t.parquet")
    table = file.read().drop_columns(["token_rewards", "media"])
    about = file.metadata.metadata
    pq.write_table(table.replace_schema_metadata(about), tmp_path / "old.parquet")
    (trace,) = read_trajectories(tmp_path / "old.parquet")[0].traces
    assert (trace.token_rewards, trace.media) == (None, ())


def test_a_trajectory_packed_as_parquet_bytes_is_unpacked_unchanged():
    for whole in (made_trajectory(), Trajectory("s", "ERROR", (), None, "it broke", {})):
        assert trajectory_bytes(unpack(pack(whole))) == trajectory_bytes(whole)


def test_bytes_that_are_no_packed_trajectory_are_refused():
    with pytest.raises(BridleError, match="a packed trajectory: cannot read"):
        unpack(b"something else")


def test_an_arrow_stream_has_a_row_for_each_trace():
    whole = made_trajectory()
    table = pa.ipc.open_stream(arrow(whole)).read_all()
    assert table.column("response_ids").to_pylist() == [
        trace.response_ids.tolist() for trace in whole.traces
    ]
    empty = Trajectory("s", "ERROR", (), None, None, {})
    assert pa.ipc.open_stream(arrow(empty)).read_all().num_rows == 0
