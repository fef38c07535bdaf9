import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.trajectory.result import from_packed, packed_json, trajectory_bytes
from bridle.trajectory.sample import Trace, Trajectory


def traces(rewarded):
    def make(count):
        rewards = np.linspace(0, 1, count, dtype=np.float32) if rewarded else None
        return Trace(
            "t",
            np.arange(5, dtype=np.int32),
            np.arange(count, dtype=np.int32),
            np.ones(count, dtype=np.uint8),
            np.linspace(-3, 0, count, dtype=np.float32),
            np.full(count, 7, dtype=np.int32),
            np.zeros(count, dtype=np.uint8),
            ("e",),
            (count,),
            "stop",
            "raw",
            prompt_messages=[{"role": "user", "content": "é"}],
            tools=[],
            reward=0.5,
            token_rewards=rewards,
        )

    return st.integers(0, 50).map(make)


@given(st.booleans().flatmap(lambda rewarded: st.lists(traces(rewarded), max_size=3)))
def test_a_trajectory_survives_a_round_trip_through_msgpack(made):
    whole = Trajectory("s", "COMPLETED", tuple(made), 1.0, None, {"stats": {}})
    sent = msgspec.msgpack.encode(packed_json(whole))
    assert trajectory_bytes(from_packed(msgspec.msgpack.decode(sent))) == trajectory_bytes(whole)


def test_packed_arrays_are_their_raw_little_endian_bytes():
    count = 1000
    one = Trace(
        "t",
        np.arange(count, dtype=np.int32),
        np.arange(count, dtype=np.int32),
        np.ones(count, dtype=np.uint8),
        np.zeros(count, dtype=np.float32),
        np.zeros(count, dtype=np.int32),
        np.zeros(count, dtype=np.uint8),
        (),
        (),
        "stop",
        "raw",
    )
    packed = packed_json(Trajectory("s", "COMPLETED", (one,), None, None, {}))["traces"][0]
    assert packed["prompt_ids"] == {
        "dtype": "int32",
        "data": np.arange(count, dtype="<i4").tobytes(),
    }
    assert len(packed["loss_mask"]["data"]) == count
    assert packed["token_rewards"] is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_ids": {"dtype": "int64", "data": b"\0" * 8}},
        {"response_ids": {"dtype": "float64", "data": b"\0" * 8}},
        {"loss_mask": {"dtype": "O", "data": b"\0" * 8}},
        {"prompt_ids": {"dtype": "int32", "data": b"\0" * 5}},
        {"prompt_ids": {"dtype": "int32", "data": [1, 2]}},
        {"prompt_ids": None},
        {"loss_mask": {"dtype": "uint8", "data": b"\1"}},
        {"prompt_ids": [1, 2]},
    ],
)
def test_packed_arrays_of_another_dtype_or_length_are_refused(wrong):
    ids, mask = np.zeros(0, np.int32), np.zeros(0, np.uint8)
    one = Trace("t", ids, ids, mask, np.zeros(0, np.float32), ids, mask, (), (), "stop", "raw")
    packed = packed_json(Trajectory("s", "COMPLETED", (one,), None, None, {}))
    assert len(from_packed(packed).traces) == 1
    packed["traces"][0] |= wrong
    with pytest.raises(ValueError, match=r"."):
        from_packed(packed)
