"""What several workers tell, as one gateway tells it: numbers added up, states at their worst."""

from __future__ import annotations

from collections.abc import Sequence

from bridle.types import JSON

_WORST = {
    "bridle_replica_up": min,
    "bridle_replica_version": max,
    "bridle_data_free_bytes": min,
}
"""Families that are no sums."""

_SUMMED = (
    "calls_in_flight",
    "sessions",
    "calls",
    "failures",
    "losses",
    "prompt_tokens",
    "cached_tokens",
)


def merged_metrics(texts: Sequence[str], more: Sequence[tuple[str, str, str, int]] = ()) -> str:
    """Prometheus texts of one shape as one: samples of the same name and labels are added.

    `more` are further numbers: name, what it is, type, value.
    """
    lines: dict[str, float | None] = {}
    families: dict[str, dict[str, float | None]] = {}
    for text in texts:
        for line in text.splitlines():
            if line.startswith("#"):
                lines = families.setdefault(line.split(" ", 3)[2], {})
                lines[line] = None
                continue
            name, _, number = line.rpartition(" ")
            before, told = lines.get(name), float(number)
            lines[name] = told if before is None else _both(name, before, told)
    parts = [
        name if number is None else f"{name} {number}"
        for family in families.values()
        for name, number in family.items()
    ]
    for name, text, kind, value in more:
        parts += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {float(value)}"]
    return "\n".join(parts) + "\n"


def _both(name: str, one: float, other: float) -> float:
    family = name.partition("{")[0]
    if family.endswith("_created"):
        return min(one, other)
    if (chosen := _WORST.get(family)) is not None:
        return chosen(one, other)
    return one + other


def merged_replicas(told: Sequence[Sequence[JSON]]) -> list[JSON]:
    """The replicas as all workers see them: what they count is added, one's trouble is told."""
    merged: dict[str, JSON] = {}
    for replicas in told:
        for one in replicas:
            before = merged.get(one["name"])
            if before is None:
                merged[one["name"]] = one
                continue
            worse = one if before["state"] == "live" else before
            sums = {name: before[name] + one[name] for name in _SUMMED}
            version = max(before["version"], one["version"])
            merged[one["name"]] = {**worse, **sums, "version": version}
    return list(merged.values())
