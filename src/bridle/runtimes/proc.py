"""Finding and ending the processes of a session.

A process group is not enough: a daemon leaves it. So every process that a runtime starts carries
marks in its environment (`BRIDLE_SESSION`, `BRIDLE_PLACE`, `BRIDLE_EXEC`), and its descendants
inherit them. A session has several places when it is scored apart from its agent. The processes of
a place are those with its marks, those of the process groups and sessions that we started, and all
their descendants. Only a process that clears its environment, leaves its session and loses its
parent escapes this; runtimes that contain do not rely on it.

Without `/proc` (macOS) only the process groups are known.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bridle.errors import RuntimeFailure

SESSION_MARK = "BRIDLE_SESSION"
PLACE_MARK = "BRIDLE_PLACE"
EXEC_MARK = "BRIDLE_EXEC"

PROC = Path("/proc")
POLL_S = 0.02
KILL_S = 10.0
"""How long processes may live on after SIGKILL (uninterruptible I/O) before we say so."""


@dataclass(frozen=True, slots=True)
class Found:
    """One living process, as `/proc/<pid>/stat` tells it."""

    pid: int
    parent: int
    group: int
    session: int


@dataclass(slots=True)
class Leaders:
    """The process groups (and sessions) that one runtime started, by their leader's id."""

    running: set[int] = field(default_factory=set)
    """Leaders that we have not collected: their numbers are ours."""
    ended: set[int] = field(default_factory=set)
    """Collected leaders whose group had other members left."""

    def add(self, pid: int) -> None:
        self.running.add(pid)

    def collected(self, pid: int) -> None:
        """A leader has ended and its number is free, unless its group lives on."""
        self.running.discard(pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, 0)
            self.ended.add(pid)

    def ours(self, pids: Collection[int]) -> set[int]:
        """Group numbers that are ours, given all living `pids`.

        An ended leader whose number lives again was given to a stranger.
        """
        self.ended.difference_update(pids)
        return self.running | self.ended


def living() -> list[Found]:
    """Every process of this machine that is not a zombie; empty without `/proc`."""
    found = []
    try:
        names = os.listdir(PROC)  # noqa: PTH208 - thousands of names, and only their text is needed
    except OSError:
        return []
    for name in names:
        if not name.isdigit():
            continue
        try:
            with Path(f"/proc/{name}/stat").open("rb") as file:
                # The command name stands in parentheses and may hold spaces and parentheses.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields and fields[0] not in (b"Z", b"X"):
            found.append(Found(int(name), int(fields[1]), int(fields[2]), int(fields[3])))
    return found


def is_marked(pid: int, marks: Collection[bytes]) -> bool:
    """Return whether a process was started with all `marks` (`NAME=value`) in its environment.

    Without marks nothing is marked.
    """
    if not marks:
        return False
    try:
        with Path(f"/proc/{pid}/environ").open("rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return False
    return all(mark in entries for mark in marks)


def members(marks: Collection[bytes], leaders: Leaders) -> set[int]:
    """Living processes with all `marks`, or in a group or session of `leaders`, and descendants.

    This process is never among them.
    """
    own = os.getpid()
    everyone = [each for each in living() if each.pid != own]
    groups = leaders.ours({each.pid for each in everyone})
    children: dict[int, list[int]] = {}
    for each in everyone:
        children.setdefault(each.parent, []).append(each.pid)
    open_ends = [
        each.pid
        for each in everyone
        if each.group in groups or each.session in groups or is_marked(each.pid, marks)
    ]
    known: set[int] = set()
    while open_ends:
        pid = open_ends.pop()
        if pid not in known:
            known.add(pid)
            open_ends.extend(children.get(pid, ()))
    return known


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal each process; those that have ended are passed over."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


async def end_all(find: Callable[[], set[int]], *, grace_s: float) -> int:
    """End all processes that `find` gives: TERM, `grace_s` of patience, then KILL to the last.

    Returns how many were found at first. Raises `RuntimeFailure` naming the processes that outlive
    SIGKILL by ten seconds. `find` runs in a thread.
    """
    first = left = await asyncio.to_thread(find)
    if not first:
        return 0
    loop = asyncio.get_running_loop()
    send(left, signal.SIGTERM)
    patience = loop.time() + grace_s
    while left and loop.time() < patience:
        await asyncio.sleep(POLL_S)
        left = await asyncio.to_thread(find)
    patience = loop.time() + KILL_S
    # One empty look is not enough: a process may fork behind the reader's back and end itself.
    empty = 0
    while empty < 2:
        send(left, signal.SIGKILL)
        if left and loop.time() > patience:
            message = f"processes that SIGKILL does not end: {sorted(left)}"
            raise RuntimeFailure(message)
        await asyncio.sleep(POLL_S if left else 0)
        left = await asyncio.to_thread(find)
        empty = 0 if left else empty + 1
    return len(first)
