"""Proves that agents start where their tasks run them: one scripted model call each."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bridle.cli.batch import Batch, run_batch
from bridle.config import EvaluatorSpec, Limits, Task
from bridle.types import JSON

MAX_TURNS = 4
"""Model calls of a proof; an agent that never ends by itself is ended."""

AGENT_S = 120.0

TAIL_CHARS = 600


@dataclass(frozen=True, slots=True)
class Proof:
    """A session of one task against the scripted engine."""

    task_id: str
    calls: int
    """Model calls that were answered."""
    status: str
    reward: float | None
    error: str | None
    said: str
    """The end of the agent's stderr, or of its stdout."""

    @property
    def ok(self) -> bool:
        """Return whether the agent started and its model call was answered."""
        return self.calls > 0


def distinct(tasks: Sequence[Task]) -> list[Task]:
    """One task of each agent in each runtime; scored by nothing but its end."""
    found: dict[str, Task] = {}
    for task in tasks:
        kind = task.model_dump_json(include={"agent", "runtime"})
        found.setdefault(kind, task.model_copy(update={"evaluator": EvaluatorSpec()}))
    return list(found.values())


def prove(tasks: Sequence[Task], answer: str = "hello") -> list[Proof]:
    """Run one session of each task, in which the model's only words are `answer`.

    `ConfigError` for a mistake in the tasks, before anything runs.
    """
    limited = [_limited(task) for task in tasks]
    with tempfile.TemporaryDirectory(prefix="bridle-proof-") as scratch:
        script, run = Path(scratch, "script.json"), Path(scratch, "run")
        script.write_text(json.dumps({"conversations": [{"turns": [{"content": answer}]}]}))
        lines = run_batch(Batch(limited, f"scripted:{script}", None, run, None, "proofs"))
        return [_proof(line, run) for line in lines]


def _limited(task: Task) -> Task:
    budgets = task.budgets.model_copy(update={"agent_s": min(AGENT_S, task.budgets.agent_s)})
    limits = Limits(max_turns=MAX_TURNS)
    return task.model_copy(update={"num_samples": 1, "limits": limits, "budgets": budgets})


def _proof(line: JSON, run: Path) -> Proof:
    logs = run / "sessions" / line["session_id"]
    texts = (_tail(logs / f"{name}.log") for name in ("stderr", "stdout"))
    said = next((text for text in texts if text), "")
    return Proof(
        line["task_id"], line["exchanges"] or 0, line["status"], line["reward"], line["error"], said
    )


def _tail(log: Path) -> str:
    return log.read_text("utf-8", "replace").strip()[-TAIL_CHARS:] if log.exists() else ""
