"""Training examples from a session: one per trace, or per conversation of text.

Every export begins here, so that a filter means the same in each of them. An example has its
messages in the form of OpenAI Chat and, where the engine gave ids, its exact tokens.

An engine that gives text only leaves no traces. Each conversation that it had is an example then,
without ids: every turn of the model in it is what it said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from bridle.capture.records import Exchange, SessionCapture
from bridle.trajectory.masks import rejected, shown_whole
from bridle.trajectory.sample import Trace, Trajectory
from bridle.trajectory.transcript import Transcript
from bridle.types import JSON, DeliveryState, FinishReason, LogprobMode

RUN = 8
"""Length of the runs that `repetition` counts: longer than what a template repeats."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One conversation of a session; made by `examples_of`."""

    trajectory: Trajectory
    trace_id: str
    trace: Trace | None
    """`None` = text only."""
    prompt_messages: Sequence[JSON]
    """Before the model's first turn."""
    response_messages: Sequence[JSON]
    """From the model's first turn on."""
    tools: Sequence[JSON] | None
    reward: float | None
    """The trace's own where it has one, else the session's; `None` = not known."""
    finish_reason: str
    """Of the last turn."""
    turns: int
    """Turns of the model."""
    rejected: bool = False
    """True if it ends in a reply that the harness read and did not continue from."""

    @property
    def task_id(self) -> str:
        return str(self.trajectory.metadata.get("task_id") or "")

    @property
    def messages(self) -> list[JSON]:
        return [*self.prompt_messages, *self.response_messages]

    @property
    def tokens(self) -> int | None:
        """Prompt and response together; `None` = not known."""
        trace = self.trace
        return None if trace is None else len(trace.prompt_ids) + len(trace.response_ids)

    @property
    def trained(self) -> int:
        return 0 if self.trace is None else int(np.count_nonzero(self.trace.loss_mask))

    @property
    def digest(self) -> bytes:
        """Equal for two examples of one task in which the model sampled, or said, the same."""
        said = self.trace.response_ids[self.trace.loss_mask == 1].tobytes() if self.trace else b""
        text = said or orjson.dumps([_said(m) for m in self.response_messages if _is_model(m)])
        return hashlib.sha256(self.task_id.encode() + b"\0" + text).digest()

    @property
    def repetition(self) -> float:
        """Share of the runs of 8 sampled tokens (without ids: words) that stood there before.

        0 for what never repeats and for what is too short to; near 1 for a loop.
        """
        if self.trace is not None:
            return _repeated(self.trace.response_ids[self.trace.loss_mask == 1].tolist())
        words = [_said(message) for message in self.response_messages if _is_model(message)]
        return _repeated(" ".join("\n".join(one) for one in words).split())


def examples_of(trajectory: Trajectory, capture: SessionCapture | None = None) -> list[Example]:
    """Return a session's examples.

    `capture` is what text without ids is read from; without, none is.
    """
    if trajectory.traces or capture is None:
        return [
            Example(
                trajectory,
                trace.trace_id,
                trace,
                trace.prompt_messages,
                trace.response_messages,
                trace.tools,
                trajectory.reward if trace.reward is None else trace.reward,
                str(trace.finish_reason),
                len(trace.turn_ends),
                bool(trace.metadata.get("rejected")),
            )
            for trace in trajectory.traces
        ]
    return list(_texts(trajectory, capture))


def _texts(trajectory: Trajectory, capture: SessionCapture) -> Iterator[Example]:
    """Yield one example for each conversation whose turns an engine gave as text."""
    kinds = trajectory.metadata["train"]
    said = [one for one in capture.exchanges if _was_said(one, capture) and one.kind in kinds]
    by_id = {one.exchange_id: one for one in said}
    continued = {one.continues for one in said}
    transcript = Transcript(capture.exchanges, capture.bodies)
    shown = shown_whole(capture.exchanges)
    passed_over = rejected(capture.exchanges, capture.deliveries, shown)
    for last in said:
        if last.exchange_id in continued:
            continue
        path = [last]
        while (before := by_id.get(path[0].continues or "")) is not None:
            path.insert(0, before)
        whole = [*transcript.prompt_messages(last), *transcript.response_messages([last])]
        start = min(len(transcript.prompt_messages(path[0])), len(whole) - 1)
        yield Example(
            trajectory,
            f"{trajectory.session_id}/text/{last.exchange_id}",
            None,
            whole[:start],
            whole[start:],
            transcript.tools(last),
            trajectory.reward,
            str(last.finish_reason),
            len(path),
            last.exchange_id in passed_over,
        )


def _was_said(exchange: Exchange, capture: SessionCapture) -> bool:
    """Return whether the policy's engine returned the whole reply as text and the harness received
    it.
    """
    delivery = capture.deliveries.get(exchange.exchange_id)
    return (
        exchange.logprob_mode is LogprobMode.NONE
        and exchange.finish_reason is not FinishReason.ABORT
        and not exchange.extra.get("other_model")
        and delivery is not None
        and delivery.state is DeliveryState.DELIVERED
    )


def _is_model(message: JSON) -> bool:
    return bool(message["role"] == "assistant")


def _said(message: JSON) -> list[str]:
    """Return the model's output in a message: its text, then each call."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    content = message.get("content") or ""
    text = content if isinstance(content, str) else orjson.dumps(content).decode()
    return [text, *(f"{call['name']} {call['arguments']}" for call in calls)]


def _repeated(items: Sequence[Hashable]) -> float:
    runs = [tuple(items[at : at + RUN]) for at in range(len(items) - RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
