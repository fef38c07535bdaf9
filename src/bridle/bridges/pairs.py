"""Preference pairs from groups: a better and a worse session of one task.

Both begin with the same prompt, so that what is compared is what the model did. A task's sessions
are ordered by reward; the best is paired with the worst, the second with the last but one, as long
as their rewards differ by the margin. A session stands for itself by its largest example.

Inside a session, an answer that the harness continued from is better than one to the same question
that it rejected (`sibling_pairs`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from bridle.bridges.examples import Example, chat, tools_text, write_lines
from bridle.capture.records import SessionCapture
from bridle.trajectory.masks import rejected, shown_whole
from bridle.trajectory.result import encode
from bridle.trajectory.transcript import Transcript
from bridle.types import JSON


@dataclass(slots=True)
class PairCounts:
    """Counts of the pairs built and of the tasks left out."""

    pairs: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> tasks (`flat`: no two rewards differ enough) or pairs (`prompt_differs`)."""


def write_pairs(
    path: str | Path,
    examples: Iterable[Example],
    *,
    margin: float = 1e-6,
    per_task: int = 1,
    siblings: Iterable[JSON] = (),
) -> PairCounts:
    """Write at most `per_task` pairs of each task as JSON lines, then `siblings` (lines of
    `sibling_pairs`, read when the examples have been). `BridleError` with the path.

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
    lines = _lines(by_task, margin, per_task, counts)
    counts.pairs = write_lines(path, itertools.chain(lines, siblings))
    return counts


def sibling_pairs(capture: SessionCapture) -> Iterator[JSON]:
    """Yield a line for each rejected answer of a session of which another answer was continued.

    As a line of `write_pairs`, of one session and without rewards.
    """
    exchanges = {one.exchange_id: one for one in capture.exchanges}
    shown = shown_whole(capture.exchanges)
    transcript = Transcript(capture.exchanges, capture.bodies)
    for worse, better in rejected(capture.exchanges, capture.deliveries, shown).items():
        bad, good = exchanges[worse], exchanges[better]
        if better not in shown or bad.extra.get("other_model") or good.extra.get("other_model"):
            continue
        tools = transcript.tools(good)
        yield {
            "prompt": [chat(message) for message in transcript.prompt_messages(good)],
            "chosen": [chat(message) for message in transcript.response_messages([good])],
            "rejected": [chat(message) for message in transcript.response_messages([bad])],
            "tools": None if tools is None else encode([*tools]).decode(),
            "chosen_reward": None,
            "rejected_reward": None,
            "task_id": capture.session.task_id or "",
            "chosen_session": capture.session.session_id,
            "rejected_session": capture.session.session_id,
        }


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
