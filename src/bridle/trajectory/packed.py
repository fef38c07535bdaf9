"""Trajectories for msgpack: the JSON of `result` with every array as bytes.

An array is `{"dtype": "int32", "data": bytes}`, little-endian and without a copy per token; all
else has the names and values of the JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bridle.experts import npy_text
from bridle.trajectory.result import trace_json, trajectory_json, trajectory_of
from bridle.trajectory.sample import Trace, Trajectory
from bridle.types import JSON

if TYPE_CHECKING:
    import numpy.typing as npt

ARRAYS = {
    "prompt_ids": "int32",
    "response_ids": "int32",
    "loss_mask": "uint8",
    "response_logprobs": "float32",
    "versions": "int32",
    "reasons": "uint8",
    "token_rewards": "float32",
}
"""Name -> dtype of what is packed; a missing `token_rewards` stays null."""


def packed_json(trajectory: Trajectory) -> JSON:
    """A trajectory as msgpack takes it."""
    whole = trajectory_json(Trajectory(**_without_traces(trajectory)))
    return whole | {"traces": [_packed(trace) for trace in trajectory.traces]}


def from_packed(value: JSON) -> Trajectory:
    """A trajectory from what `packed_json` gave. `KeyError` or `ValueError` for anything else."""
    try:
        return trajectory_of(value | {"traces": [_unpacked(trace) for trace in value["traces"]]})
    except TypeError as error:
        raise ValueError(f"no trajectory: {error}") from error


def _without_traces(trajectory: Trajectory) -> JSON:
    names = ("session_id", "status", "reward", "error", "metadata")
    return {name: getattr(trajectory, name) for name in names} | {"traces": ()}


def _packed(trace: Trace) -> JSON:
    light = {name: np.empty(0, dtype=kind) for name, kind in ARRAYS.items()}
    values = {name: getattr(trace, name) for name in Trace.__slots__}
    rows = values.pop("routed_experts")
    plain = trace_json(Trace(**values | light))
    if rows is not None:
        plain["routed_experts"] = npy_text(rows)
    return plain | {name: _array(values[name], kind) for name, kind in ARRAYS.items()}


def _array(values: npt.NDArray[Any] | None, kind: str) -> JSON | None:
    if values is None:
        return None
    return {"dtype": kind, "data": values.astype(np.dtype(kind).newbyteorder("<")).tobytes()}


def _unpacked(trace: JSON) -> JSON:
    return trace | {name: _values(name, kind, trace.get(name)) for name, kind in ARRAYS.items()}


def _values(name: str, kind: str, packed: JSON | None) -> npt.NDArray[Any] | None:
    if packed is None:
        return None
    if packed["dtype"] != kind:
        raise ValueError(f"{name}: dtype {packed['dtype']!r}, not {kind!r}")
    return np.frombuffer(packed["data"], np.dtype(kind).newbyteorder("<")).astype(kind)
