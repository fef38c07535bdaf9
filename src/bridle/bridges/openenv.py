"""OpenEnv: sessions as `TrainingTrace`, version 1.

A turn per model call with the whole prompt, the sampled ids, their logprobs and a mask over both.
A call that lies on several traces stands there once, where it trains.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bridle.bridges.base import turns_of
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON


def training_trace(trajectory: Trajectory) -> JSON:
    """Return a session in the fields of `openenv.core.harness.training.TrainingTrace`."""
    turns: dict[str, JSON] = {}
    for trace in trajectory.traces:
        for turn in turns_of(trace):
            mask = trace.loss_mask[turn.start : turn.end]
            if turn.exchange_id in turns and not mask.any():
                continue
            given = np.concatenate([trace.prompt_ids, trace.response_ids[: turn.start]])
            versions = trace.versions[turn.start : turn.end]
            turns[turn.exchange_id] = {
                "node_id": turn.exchange_id,
                "prompt_token_ids": given.tolist(),
                "completion_token_ids": trace.response_ids[turn.start : turn.end].tolist(),
                "per_token_logps": trace.response_logprobs[turn.start : turn.end].tolist(),
                "loss_mask": [0] * len(given) + mask.tolist(),
                "response": {"messages": [*turn.said]},
                "metadata": {
                    "trace_id": trace.trace_id,
                    "reward": trace.reward,
                    "versions": sorted(set(versions[versions >= 0].tolist())),
                },
            }
    return {"schema_version": 1, "turns": list(turns.values())}


def openenv_trace(trajectory: Trajectory) -> Any:  # noqa: ANN401 - OpenEnv's own
    """Return a session as OpenEnv's own `TrainingTrace`; its validator's error if one is wrong."""
    from openenv.core.harness.training import TrainingTrace

    return TrainingTrace.model_validate(training_trace(trajectory))
