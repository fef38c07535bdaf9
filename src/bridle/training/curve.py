"""A training's course as a picture: in the terminal, and as PNG with matplotlib (extra `train`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.errors import TrainingError, install_extra

if TYPE_CHECKING:
    from bridle.training.loop import Course

BLOCKS = " ▁▂▃▄▅▆▇█"

AVERAGED = 5
"""Steps of the running mean."""


def rewards_of(course: Course) -> list[tuple[int, float]]:
    """(step, mean reward of its sessions), where one is known."""
    return [(one["step"], one["reward"]) for one in course.steps if one["reward"] is not None]


def smoothed(values: Sequence[float], width: int = AVERAGED) -> list[float]:
    """The mean of each value and up to `width - 1` before it."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - width) : end]
        means.append(sum(part) / len(part))
    return means


def draw_text(values: Sequence[float], *, height: int = 6, low: float = 0.0) -> list[str]:
    """Values as columns of blocks, `height` lines, top first; the scale is from `low` to 1 or more.

    Nothing for no values.
    """
    if not values:
        return []
    top = max(1.0, *values)
    eighths = [round((value - low) / (top - low) * height * 8) for value in values]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = "".join(BLOCKS[min(8, max(0, count - 8 * row))] for count in eighths)
        mark = f"{low + (top - low) * (row + 1) / height:4.2f} "
        lines.append(f"{mark}┤{cells}")
    lines.append(f"     └{'─' * len(values)}")
    return lines


def draw_png(path: Path, course: Course, *, title: str) -> Path:
    """Write the learning curve: reward per step, its running mean, and the evaluations.

    Raises `TrainingError` if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TrainingError(
            f"the curve as PNG needs matplotlib: run {install_extra('train')}"
        ) from error
    points = rewards_of(course)
    steps = [step for step, _ in points]
    rewards = [reward for _, reward in points]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, rewards, ".", color="#9db4c8", label="sessions of the step")
    axes.plot(steps, smoothed(rewards), color="#1f5f8b", label=f"mean of {AVERAGED} steps")
    known = [one for one in course.evaluations if one["reward"] is not None]
    if known:
        axes.errorbar(
            [one["step"] for one in known],
            [one["reward"] for one in known],
            yerr=[one.get("half_width") or 0.0 for one in known],
            fmt="D--",
            capsize=3,
            color="#c0392b",
            label="held-out tasks, 95% intervals",
        )
    axes.set(xlabel="step", ylabel="mean reward", title=title)
    axes.set_ylim(bottom=min(0.0, *rewards, 0.0), top=max(1.02, *rewards, 0.0))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
