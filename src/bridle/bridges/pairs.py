"""Preference pairs from groups: a better and a worse session of one task.

Both begin with the same prompt, so that what is compared is what the model did. A task's sessions
are ordered by reward; the best is paired with the worst, the second with the last but one, as long
as their rewards differ by the margin. A session stands for itself by its largest example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from bridle.bridges.examples import Example
from bridle.bridges.sft import chat, tools_text, write_lines
from bridle.types import JSON


@dataclass(slots=True)
class PairCounts:
    """What became of the tasks."""

    pairs: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> tasks (`flat`: no two rewards differ enough) or pairs (`prompt_differs`)."""


def write_pairs(
    path: str | Path, examples: Iterable[Example], *, margin: float = 1e-6, per_task: int = 1
) -> PairCounts:
    """Write at most `per_task` pairs of each task as JSON lines. `BridleError` with the path.

    A line has `prompt`, `chosen`, `rejected` (messages), `tools`, `chosen_reward`,
    `rejected_reward`, and, where ids are known, `prompt_ids`, `chosen_ids`, `rejected_ids` with
    `chosen_mask`, `rejected_mask`. Examples of unknown reward are passed over.
    """
    by_task: dict[str, dict[str, Example]] = {}
    for one in examples:
        if one.reward is None:
            continue
        of = by_task.setdefault(one.task_id, {})
        session_id = one.trajectory.session_id
        if session_id not in of or _size(one) > _size(of[session_id]):
            of[session_id] = one
    counts = PairCounts()
    counts.pairs = write_lines(path, _lines(by_task, margin, per_task, counts))
    return counts


def _size(example: Example) -> tuple[int, int]:
    return example.trained, example.turns


def _lines(
    by_task: dict[str, dict[str, Example]], margin: float, per_task: int, counts: PairCounts
) -> Iterator[JSON]:
    for of in by_task.values():
        ranked = sorted(of.values(), key=lambda e: -(e.reward or 0.0))
        found = 0
        flat = True
        for good, bad in zip(ranked, reversed(ranked), strict=True):
            if found == per_task or (good.reward or 0.0) - (bad.reward or 0.0) < margin:
                break
            flat = False
            if _prompt(good) != _prompt(bad):
                counts.left_out["prompt_differs"] += 1
                continue
            found += 1
            yield _pair(good, bad)
        counts.left_out["flat"] += flat
    counts.left_out = +counts.left_out


def _prompt(example: Example) -> bytes:
    return orjson.dumps([*example.prompt_messages]) + (tools_text(example) or "").encode()


def _pair(good: Example, bad: Example) -> JSON:
    line: JSON = {
        "prompt": [chat(message) for message in good.prompt_messages],
        "chosen": [chat(message) for message in good.response_messages],
        "rejected": [chat(message) for message in bad.response_messages],
        "tools": tools_text(good),
        "chosen_reward": good.reward,
        "rejected_reward": bad.reward,
        "task_id": good.task_id,
        "chosen_session": good.trajectory.session_id,
        "rejected_session": bad.trajectory.session_id,
    }
    if good.trace is not None and bad.trace is not None:
        line |= {
            "prompt_ids": good.trace.prompt_ids.tolist(),
            "chosen_ids": good.trace.response_ids.tolist(),
            "chosen_mask": good.trace.loss_mask.tolist(),
            "rejected_ids": bad.trace.response_ids.tolist(),
            "rejected_mask": bad.trace.loss_mask.tolist(),
        }
    return line
