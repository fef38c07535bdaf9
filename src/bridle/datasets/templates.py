"""Instruction templates: one text around the instructions of a whole task set.

`{{ instruction }}`, `{{ task_id }}` and `{{ metadata.NAME }}` are filled; what they hold is put in
as it is and never read as a template itself.
"""

from __future__ import annotations

import re
from pathlib import Path

from bridle.config import Task
from bridle.errors import ConfigError

HOLE = re.compile(r"\{\{\s*([\w.-]+)\s*\}\}")


def read_template(path: Path) -> str:
    """A template's text. `ConfigError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def with_template(task: Task, template: str) -> Task:
    """The task with its instruction put into `template`.

    `ConfigError` names a hole that nothing fills, and a template that leaves the instruction out.
    """
    known = {"instruction": task.instruction, "task_id": task.task_id}
    known |= {f"metadata.{name}": str(value) for name, value in task.metadata.items()}
    holes = HOLE.findall(template)
    if "instruction" not in holes:
        raise ConfigError("the template has no {{ instruction }}")
    if missing := sorted(set(holes) - known.keys()):
        message = f"task {task.task_id!r}: the template wants {missing}; known: {sorted(known)}"
        raise ConfigError(message)
    text = HOLE.sub(lambda hole: known[hole[1]], template)
    return task.model_copy(update={"instruction": text})
