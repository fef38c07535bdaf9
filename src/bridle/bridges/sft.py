"""Accepted trajectories as supervised examples: one JSON line per trace.

Each line holds the exact tokens (`input_ids`, and `loss_mask` of the same length: 1 = the policy
sampled it and it trains) and, for people and for trainers that tokenise themselves, `messages` of
`role` and `content` only, with reasoning and tool calls as text.

An engine that gives text only leaves no traces. Each conversation that it had is a line of
`messages` then, with `null` for ids and mask: every turn of the model in it is what it said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from bridle.capture.records import Exchange, SessionCapture
from bridle.errors import BridleError, boundary
from bridle.trajectory.result import encode
from bridle.trajectory.sample import Trace, Trajectory
from bridle.trajectory.transcript import Transcript
from bridle.types import JSON, DeliveryState, FinishReason, LogprobMode, SessionStatus


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
    texts: int = 0
    """Examples without ids, which an engine without ids left; counted as `examples` too."""


def export_sft(
    path: str | Path,
    trajectories: Iterable[Trajectory],
    *,
    min_reward: float = 1.0,
    max_tokens: int | None = None,
    captures: Mapping[str, SessionCapture] | None = None,
) -> SftCounts:
    """Write every trace of the accepted `trajectories` to a JSONL file, whole or not at all.

    Accepted = COMPLETED with a known reward of at least `min_reward` (a trace's own reward, where
    it has one). `max_tokens` leaves out longer traces; it does not look at texts. `captures` are
    what the trajectories were built from, by session id: sessions without tokens give the words of
    their conversations. Raises `BridleError` with the path.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    examples = tokens = rejected = too_long = texts = 0
    with boundary(BridleError, f"{path}: cannot write examples"):
        try:
            with part.open("wb") as file:
                for trajectory in trajectories:
                    traces = _accepted(trajectory, min_reward)
                    told = _text_examples(trajectory, captures or {}, min_reward)
                    rejected += not traces and not told
                    file.writelines(encode(line) + b"\n" for line in told)
                    texts += len(told)
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
    return SftCounts(examples + texts, tokens, rejected, too_long, texts)


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
        **_from(trajectory, trace.trace_id),
    }


def _from(trajectory: Trajectory, trace_id: str) -> JSON:
    """Where a line comes from."""
    return {
        "task_id": trajectory.metadata.get("task_id"),
        "session_id": trajectory.session_id,
        "trace_id": trace_id,
    }


def _text_examples(
    trajectory: Trajectory, captures: Mapping[str, SessionCapture], min_reward: float
) -> list[JSON]:
    """A line for each conversation of a session whose engine gave text only."""
    capture, reward = captures.get(trajectory.session_id), trajectory.reward
    accepted = trajectory.status == SessionStatus.COMPLETED and not trajectory.traces
    if capture is None or not accepted or reward is None or reward < min_reward:
        return []
    kinds = trajectory.metadata["train"]
    said = [one for one in capture.exchanges if _was_said(one, capture) and one.kind in kinds]
    continued = {one.continues for one in said}
    transcript = Transcript(capture.exchanges, capture.bodies)
    return [
        {
            "messages": [
                _plain(message)
                for message in (
                    *transcript.prompt_messages(last),
                    *transcript.response_messages([last]),
                )
            ],
            "tools": transcript.tools(last),
            "input_ids": None,
            "loss_mask": None,
            "reward": reward,
            **_from(trajectory, f"{trajectory.session_id}/text/{last.exchange_id}"),
        }
        for last in said
        if last.exchange_id not in continued
    ]


def _was_said(exchange: Exchange, capture: SessionCapture) -> bool:
    """Whether the policy's engine gave a whole reply as text, and a harness received it."""
    delivery = capture.deliveries.get(exchange.exchange_id)
    return (
        exchange.logprob_mode is LogprobMode.NONE
        and exchange.finish_reason is not FinishReason.ABORT
        and not exchange.extra.get("other_model")
        and delivery is not None
        and delivery.state is DeliveryState.DELIVERED
    )


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
