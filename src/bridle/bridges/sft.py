"""Examples as lines of JSON for supervised training.

Each line holds the exact tokens (`input_ids`, and `loss_mask` of the same length: 1 = the policy
sampled it and it trains) and, for people and for trainers that tokenise themselves, `messages` in
the form of OpenAI Chat with their tool calls. `tools` is the tool list as JSON text, as trainers of
this field take it: a column whose rows have parameters of different types has no type of its own.

A line of an engine that gives text only has `null` for ids and mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridle.bridges.examples import Example
from bridle.errors import BridleError, boundary
from bridle.trajectory.result import encode
from bridle.types import JSON, one_line


@dataclass(frozen=True, slots=True)
class SftCounts:
    """Counts of what an export wrote."""

    examples: int
    tokens: int
    """Tokens that train."""
    texts: int = 0
    """Examples without ids, which an engine without ids left; counted as `examples` too."""


def write_sft(path: str | Path, examples: Iterable[Example]) -> SftCounts:
    """Write each example as a line, the file whole or not at all. `BridleError` with the path."""
    count = tokens = texts = 0

    def lines() -> Iterable[JSON]:
        nonlocal count, tokens, texts
        for one in examples:
            count += 1
            tokens += one.trained
            texts += one.trace is None
            yield line(one)

    write_lines(path, lines())
    return SftCounts(count, tokens, texts)


def write_lines(path: str | Path, lines: Iterable[JSON]) -> int:
    """Write JSON lines, the file whole or not at all; how many. `BridleError` with the path."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    count = 0
    with boundary(BridleError, f"{path}: cannot write examples"):
        try:
            with part.open("wb") as file:
                for one in lines:
                    file.write(one_line(encode(one)) + b"\n")
                    count += 1
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return count


def line(example: Example) -> JSON:
    """Return one line: exact tokens beside readable messages."""
    ids = mask = None
    if (trace := example.trace) is not None:
        ids = np.concatenate([trace.prompt_ids, trace.response_ids]).tolist()
        mask = [0] * len(trace.prompt_ids) + trace.loss_mask.tolist()
    return {
        "messages": [chat(message) for message in example.messages],
        "tools": tools_text(example),
        "input_ids": ids,
        "loss_mask": mask,
        "reward": example.reward,
        "task_id": example.trajectory.metadata.get("task_id"),
        "session_id": example.trajectory.session_id,
        "trace_id": example.trace_id,
    }


def tools_text(example: Example) -> str | None:
    """Return the tool list as JSON; `None` = none was sent."""
    return None if example.tools is None else encode([*example.tools]).decode()


def chat(message: JSON) -> JSON:
    """Return a message whose `content` is never null, so that every line has the same types."""
    return {**message, "content": message.get("content") or ""}
