"""Accepted trajectories as supervised examples: one JSON line per trace.

Each line holds the exact tokens (`input_ids`, and `loss_mask` of the same length: 1 = the policy
sampled it and it trains) and, for people and for trainers that tokenise themselves, `messages` of
`role` and `content` only, with reasoning and tool calls as text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from bridle.errors import BridleError, boundary
from bridle.trajectory.result import encode
from bridle.trajectory.sample import Trace, Trajectory
from bridle.types import JSON, SessionStatus


@dataclass(frozen=True, slots=True)
class SftCounts:
    """What an export did."""

    examples: int
    tokens: int
    """Tokens that train."""
    rejected: int
    """Trajectories whose status or reward was not accepted."""
    too_long: int
    """Traces over the length limit."""


def export_sft(
    path: str | Path,
    trajectories: Iterable[Trajectory],
    *,
    min_reward: float = 1.0,
    max_tokens: int | None = None,
) -> SftCounts:
    """Write every trace of the accepted `trajectories` to a JSONL file, whole or not at all.

    Accepted = COMPLETED with a known reward of at least `min_reward` (a trace's own reward, where
    it has one). `max_tokens` leaves out longer traces. Raises `BridleError` with the path.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    examples = tokens = rejected = too_long = 0
    with boundary(BridleError, f"{path}: cannot write examples"):
        try:
            with part.open("wb") as file:
                for trajectory in trajectories:
                    traces = _accepted(trajectory, min_reward)
                    rejected += not traces
                    for trace in traces:
                        size = len(trace.prompt_ids) + len(trace.response_ids)
                        if max_tokens is not None and size > max_tokens:
                            too_long += 1
                            continue
                        file.write(encode(example(trajectory, trace)) + b"\n")
                        examples += 1
                        tokens += int(trace.loss_mask.sum())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return SftCounts(examples, tokens, rejected, too_long)


def _accepted(trajectory: Trajectory, min_reward: float) -> list[Trace]:
    if trajectory.status != SessionStatus.COMPLETED:
        return []
    return [
        trace
        for trace in trajectory.traces
        if trace.reward is not None and trace.reward >= min_reward
    ]


def example(trajectory: Trajectory, trace: Trace) -> JSON:
    """One line: exact tokens beside readable messages."""
    ids = np.concatenate([trace.prompt_ids, trace.response_ids])
    mask = np.concatenate([np.zeros(len(trace.prompt_ids), np.uint8), trace.loss_mask])
    return {
        "messages": [_plain(m) for m in (*trace.prompt_messages, *trace.response_messages)],
        "tools": None if trace.tools is None else [*trace.tools],
        "input_ids": ids.tolist(),
        "loss_mask": mask.tolist(),
        "reward": trace.reward,
        "task_id": trajectory.metadata.get("task_id"),
        "session_id": trajectory.session_id,
        "trace_id": trace.trace_id,
    }


def _plain(message: JSON) -> JSON:
    """`role` and `content`; reasoning and calls in the Hermes form that Qwen's templates use."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        return {"role": message["role"], "content": content}
    lines = [content] if content else []
    if reasoning := message.get("reasoning_content"):
        lines.insert(0, f"<think>\n{reasoning}\n</think>\n")
    for call in message.get("tool_calls") or []:
        name = orjson.dumps(call["function"]["name"]).decode()
        arguments = call["function"]["arguments"] or "{}"
        lines.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return {"role": message["role"], "content": "\n".join(lines)}
