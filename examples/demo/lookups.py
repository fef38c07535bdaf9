"""Lookup tasks: the smallest honest tool use, for a model of a million parameters.

A work directory holds one file per thing with its number in it; the instruction asks for one of
them. The model must call the tool `cat` with the right name, read the result, and answer with it.
`weak_script` plays a deliberately weak demonstrator: it calls the right file one time in four and
gives up at once four times in ten, so a model trained on it succeeds seldom, but not never.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bridle.types import JSON

THINGS = (
    "apple", "cloud", "color", "north", "owner", "pear", "plum", "price",
    "river", "south", "stock", "stone", "table", "title", "voice", "weather",
)  # fmt: skip
FILES_PER_TASK = 4
GIVE_UP = 0.4
RIGHT_FILE = 0.25


@dataclass(frozen=True, slots=True)
class Lookup:
    """One lookup task."""

    task_id: str
    thing: str
    numbers: dict[str, int]
    """Every file of the work directory and its number."""

    @property
    def instruction(self) -> str:
        """What the user asks."""
        return f'{self.task_id}: which number does "{self.thing}" hold?'

    @property
    def answer(self) -> str:
        """The right last word."""
        return str(self.numbers[self.thing])


def lookups(count: int, *, seed: int) -> Iterator[Lookup]:
    """`count` tasks; another seed gives fresh ones."""
    rng = random.Random(seed)  # noqa: S311 - a reproducible task set
    for i in range(count):
        things = rng.sample(THINGS, FILES_PER_TASK)
        numbers = {thing: rng.randint(10, 99) for thing in things}
        yield Lookup(f"q{i}", rng.choice(things), numbers)


def write_files(task: Lookup, folder: Path) -> None:
    """Write the work directory of a task."""
    folder.mkdir(parents=True, exist_ok=True)
    for thing, number in task.numbers.items():
        (folder / thing).write_text(f"{number}")


def weak_script(tasks: list[Lookup], *, seed: int) -> JSON:
    """A scripted engine's script that plays the weak demonstrator on `tasks`."""
    rng = random.Random(seed)  # noqa: S311
    return {"conversations": [_demonstration(task, rng) for task in tasks]}


def _demonstration(task: Lookup, rng: random.Random) -> JSON:
    when = {"user_contains": task.instruction}
    if rng.random() < GIVE_UP:
        return {"when": when, "turns": [{"content": "I do not know."}]}
    others = [thing for thing in task.numbers if thing != task.thing]
    thing = task.thing if rng.random() < RIGHT_FILE else rng.choice(others)
    call = {"name": "cat", "arguments": {"name": thing}}
    return {
        "when": when,
        "turns": [{"content": "", "tool_calls": [call]}, {"content": str(task.numbers[thing])}],
    }
