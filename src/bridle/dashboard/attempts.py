"""The tree of attempts: a session, its forks, their forks, and where they part. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bridle.dashboard.summaries import SessionRow

Place = tuple[str, str]
"""Run and session id."""


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """A session of the tree, or one of its replies: the place where forks begin."""

    line: SessionRow
    depth: int
    """Forks between it and the first session."""
    at: int | None = None
    """The reply's number; `None` = the session itself."""
    forks: int = 0
    """Forks that begin there."""
    mean: float | None = None
    """Mean reward of the sessions that pass there: its own, and the forks from there on."""
    rewarded: int = 0
    """Sessions that this is the mean of."""


@dataclass(frozen=True, slots=True)
class AttemptTree:
    """All attempts that began with one session."""

    rows: Sequence[AttemptRow]
    sessions: int
    mean: float | None
    """Mean reward of those that have one."""


def place_of(line: SessionRow) -> Place:
    return line.run, line.session_id


def attempts_of(
    wanted: Place,
    lines: Sequence[SessionRow],
    origins: Mapping[Place, tuple[Place, int]],
    replies: Collection[int] = (),
) -> AttemptTree:
    """Return the tree that session `wanted` is in.

    `origins` has, for each fork, the session that it was made of and the number of its replies;
    `replies` are those of `wanted` that get a row though nothing forks there.
    """
    known = {place_of(line): line for line in lines}
    points: defaultdict[Place, dict[int, list[Place]]] = defaultdict(lambda: defaultdict(list))
    for fork, (above, reply) in origins.items():
        if fork in known and above in known:
            points[above][reply].append(fork)
    points[wanted] = defaultdict(list, {reply: [] for reply in replies}) | points[wanted]
    root = _root(wanted, known, origins)
    below: dict[Place, tuple[float, int]] = {}
    rows: list[AttemptRow] = []
    # Backwards: a reply comes after all that begins behind it.
    for place, depth, at in reversed(_in_order(root, points)):
        line = known[place]
        own = (0.0, 0) if line.reward is None else (line.reward, 1)
        total, count = below.setdefault(place, own)
        if at is None:
            rows.append(AttemptRow(line, depth))
            continue
        forks = points[place][at]
        for more, further in (below.get(fork, (0.0, 0)) for fork in forks):
            total, count = total + more, count + further
        below[place] = (total, count)
        mean = total / count if forks and count else None
        rows.append(AttemptRow(line, depth, at, len(forks), mean, count))
    total, count = below[root]
    return AttemptTree(rows[::-1], len(below), total / count if count else None)


def _root(
    wanted: Place, known: Mapping[Place, SessionRow], origins: Mapping[Place, tuple[Place, int]]
) -> Place:
    """Return the session that `wanted` descends from; a circle of origins ends where it began."""
    root, seen = wanted, {wanted}
    while (above := origins.get(root)) is not None and above[0] in known and above[0] not in seen:
        root = above[0]
        seen.add(root)
    return root


def _in_order(
    root: Place, points: defaultdict[Place, dict[int, list[Place]]]
) -> list[tuple[Place, int, int | None]]:
    """Return each session, followed by its replies with the forks from there: (session, depth,
    reply), depth first.
    """
    found: list[tuple[Place, int, int | None]] = []
    seen: set[Place] = set()
    waiting: list[tuple[Place, int, int | None]] = [(root, 0, None)]
    while waiting:
        place, depth, at = waiting.pop()
        if at is None:
            if place in seen:
                continue
            seen.add(place)
            waiting += [(place, depth, reply) for reply in sorted(points[place], reverse=True)]
        else:
            waiting += [(fork, depth + 1, None) for fork in reversed(points[place][at])]
        found.append((place, depth, at))
    return found
