"""Trajectories and session results as JSON, in the shape that Polar's clients read.

Field names are those of its `Trace`, `Trajectory` and `SessionResult`; what Bridle adds stands
beside them under new keys. The same trajectory always gives the same bytes: keys in a fixed order,
float32 logprobs in the shortest form that reads back to the same float32.

For msgpack (`packed_json`) every array is `{"dtype": "int32", "data": bytes}`, little-endian and
without a copy per token; all else has the names and values of the JSON.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from bridle.experts import npy_rows, npy_text
from bridle.trajectory.sample import MaskReason, Trace, Trajectory
from bridle.trajectory.transcript import Messages
from bridle.types import JSON, one_line


def trace_json(trace: Trace) -> JSON:
    """Return a trace as a JSON object, with Polar's names for the fields that Polar has."""
    rows = trace.routed_experts
    return {
        "prompt_ids": trace.prompt_ids.tolist(),
        "response_ids": trace.response_ids.tolist(),
        "loss_mask": trace.loss_mask.tolist(),
        "prompt_messages": [*trace.prompt_messages],
        "response_messages": [*trace.response_messages],
        "tools": None if trace.tools is None else [*trace.tools],
        "finish_reason": str(trace.finish_reason),
        "response_logprobs": _shortest(trace.response_logprobs),
        "reward": trace.reward,
        "metadata": trace_metadata(trace),
        "trace_id": trace.trace_id,
        "versions": trace.versions.tolist(),
        "reasons": trace.reasons.tolist(),
        "exchange_ids": list(trace.exchange_ids),
        "turn_ends": list(trace.turn_ends),
        "logprob_mode": str(trace.logprob_mode),
        "token_rewards": None if trace.token_rewards is None else _shortest(trace.token_rewards),
        "media": [*trace.media],
        **({} if rows is None else {"routed_experts": npy_text(rows)}),
    }


def trace_metadata(trace: Trace) -> JSON:
    """Return a trace's metadata; with `messages_missing` where its messages cannot be read."""
    for part in (trace.prompt_messages, trace.response_messages, trace.tools, trace.media):
        if isinstance(part, Messages) and part.missing is not None:
            return trace.metadata | {"messages_missing": part.missing}
    return trace.metadata


def trajectory_json(trajectory: Trajectory) -> JSON:
    """Return a trajectory and its traces as a JSON object, with Polar's names where Polar
    has one.
    """
    return {
        "status": str(trajectory.status),
        "metadata": trajectory.metadata,
        "traces": [trace_json(trace) for trace in trajectory.traces],
        "error": trajectory.error,
        "session_id": trajectory.session_id,
        "reward": trajectory.reward,
        "mask_reasons": [reason.key for reason in MaskReason],
    }


def trajectory_of(value: JSON) -> Trajectory:
    """Return a trajectory from its JSON; members that Bridle adds to Polar's may be missing.

    Raises `KeyError` or `ValueError` for JSON that is no trajectory.
    """
    return Trajectory(
        session_id=value.get("session_id") or "",
        status=value["status"],
        traces=tuple(map(_trace_of, value["traces"])),
        reward=value.get("reward"),
        error=value.get("error"),
        metadata=value["metadata"],
    )


def _trace_of(value: JSON) -> Trace:
    mask = np.asarray(value["loss_mask"], dtype=np.uint8)
    rewards, experts = value.get("token_rewards"), value.get("routed_experts")
    sampled = np.where(mask == 1, MaskReason.TRAINED, MaskReason.PROMPT)
    return Trace(
        trace_id=value.get("trace_id") or "",
        prompt_ids=np.asarray(value["prompt_ids"], dtype=np.int32),
        response_ids=np.asarray(value["response_ids"], dtype=np.int32),
        loss_mask=mask,
        response_logprobs=_array(value, "response_logprobs", np.zeros(len(mask)), np.float32),
        versions=_array(value, "versions", np.full(len(mask), -1), np.int32),
        reasons=_array(value, "reasons", sampled, np.uint8),
        exchange_ids=tuple(value.get("exchange_ids") or ()),
        turn_ends=tuple(value.get("turn_ends") or ()),
        finish_reason=value.get("finish_reason") or "",
        logprob_mode=value.get("logprob_mode") or "",
        prompt_messages=value["prompt_messages"],
        response_messages=value["response_messages"],
        tools=value.get("tools"),
        reward=value.get("reward"),
        metadata=value["metadata"],
        token_rewards=None if rewards is None else np.asarray(rewards, dtype=np.float32),
        media=value.get("media") or (),
        routed_experts=None if experts is None else npy_rows(experts),
    )


def _array(value: JSON, key: str, missing: npt.NDArray[Any], dtype: type) -> npt.NDArray[Any]:
    given = value.get(key)
    return np.asarray(missing if given is None else given, dtype=dtype)


def encode(value: object) -> bytes:
    """Return an object of traces or trajectories as the bytes of one line of JSON, without line
    end.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        return orjson.dumps(writable(value), option=orjson.OPT_SERIALIZE_NUMPY)


def writable(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return the JSON value with lone surrogates, which UTF-8 cannot hold, as backslash escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {writable(key): writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [writable(item) for item in value]
    return value


def trajectory_bytes(trajectory: Trajectory) -> bytes:
    """Return a trajectory as one line of `trajectories.jsonl`, without its line end."""
    return one_line(encode(trajectory_json(trajectory)))


def _shortest(values: npt.NDArray[Any]) -> list[float]:
    """Return floats whose shortest decimal form as float64 is that of the float32 values."""
    decoded: list[float] = orjson.loads(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY))
    return decoded


# ---- msgpack


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
    """Return a trajectory as an object that msgpack can encode."""
    whole = trajectory_json(replace(trajectory, traces=()))
    return whole | {"traces": [_packed(trace) for trace in trajectory.traces]}


def from_packed(value: JSON) -> Trajectory:
    """Return a trajectory from the object that msgpack decoded.

    Raises `KeyError` or `ValueError` for anything else.
    """
    try:
        return trajectory_of(value | {"traces": [_unpacked(trace) for trace in value["traces"]]})
    except TypeError as error:
        raise ValueError(f"not a packed trajectory: {error}") from error


def _packed(trace: Trace) -> JSON:
    light: dict[str, Any] = {name: np.empty(0, dtype=kind) for name, kind in ARRAYS.items()}
    plain = trace_json(replace(trace, **light, routed_experts=None))
    if trace.routed_experts is not None:
        plain["routed_experts"] = npy_text(trace.routed_experts)
    for name, kind in ARRAYS.items():
        values = getattr(trace, name)
        little = np.dtype(kind).newbyteorder("<")
        data = None if values is None else values.astype(little).tobytes()
        plain[name] = None if data is None else {"dtype": kind, "data": data}
    return plain


def _unpacked(trace: JSON) -> JSON:
    return trace | {name: _values(name, kind, trace.get(name)) for name, kind in ARRAYS.items()}


def _values(name: str, kind: str, packed: JSON | None) -> npt.NDArray[Any] | None:
    if packed is None:
        return None
    if packed["dtype"] != kind:
        raise ValueError(
            f"array {name} of a packed trajectory has dtype {packed['dtype']!r}, not {kind!r}"
        )
    return np.frombuffer(packed["data"], np.dtype(kind).newbyteorder("<")).astype(kind)
