"""Trajectories and session results as JSON, in the shape that Polar's clients read.

Field names are those of its `Trace`, `Trajectory` and `SessionResult`; what Bridle adds stands
beside them under new keys. The same trajectory always gives the same bytes: keys in a fixed order,
float32 logprobs in the shortest form that reads back to the same float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from bridle.trajectory.sample import MaskReason, Trace, Trajectory
from bridle.types import JSON

if TYPE_CHECKING:
    import numpy.typing as npt


def trace_json(trace: Trace) -> JSON:
    """One trace as plain JSON values."""
    return {
        "prompt_ids": trace.prompt_ids.tolist(),
        "response_ids": trace.response_ids.tolist(),
        "loss_mask": trace.loss_mask.tolist(),
        "prompt_messages": trace.prompt_messages,
        "response_messages": trace.response_messages,
        "tools": trace.tools,
        "finish_reason": str(trace.finish_reason),
        "response_logprobs": _shortest(trace.response_logprobs),
        "reward": trace.reward,
        "metadata": trace.metadata,
        "trace_id": trace.trace_id,
        "versions": trace.versions.tolist(),
        "reasons": trace.reasons.tolist(),
        "exchange_ids": list(trace.exchange_ids),
        "turn_ends": list(trace.turn_ends),
        "logprob_mode": str(trace.logprob_mode),
    }


def trajectory_json(trajectory: Trajectory) -> JSON:
    """A trajectory as plain JSON values."""
    return {
        "status": str(trajectory.status),
        "metadata": trajectory.metadata,
        "traces": [trace_json(trace) for trace in trajectory.traces],
        "error": trajectory.error,
        "session_id": trajectory.session_id,
        "reward": trajectory.reward,
        "mask_reasons": [reason.key for reason in MaskReason],
    }


def session_result_json(
    trajectory: Trajectory,
    *,
    task_id: str | None,
    status: str,
    timing: Mapping[str, float],
    node_id: str | None = None,
    error: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    **additions: object,
) -> JSON:
    """A session's result as plain JSON values; `additions` (cause, harness...) become keys."""
    return {
        "session_id": trajectory.session_id,
        "task_id": task_id,
        "status": str(status),
        "trajectory": trajectory_json(trajectory),
        "timing": dict(timing),
        "node_id": node_id,
        "error": error,
        "metadata": dict(metadata or {}),
        "reward": trajectory.reward,
        **additions,
    }


def encode(value: JSON) -> bytes:
    """The bytes of what the functions above give, without a line end."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        return orjson.dumps(_writable(value), option=orjson.OPT_SERIALIZE_NUMPY)


def _writable(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """The value with lone surrogates, which UTF-8 cannot hold, as backslash escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return value


def trajectory_bytes(trajectory: Trajectory) -> bytes:
    """One line of `trajectories.jsonl`, without its line end."""
    return encode(trajectory_json(trajectory))


def _shortest(values: npt.NDArray[Any]) -> list[float]:
    """Floats whose shortest decimal form as float64 is that of the float32 values."""
    decoded: list[float] = orjson.loads(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY))
    return decoded
