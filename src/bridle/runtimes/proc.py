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
import resource
import signal
import stat
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bridle.errors import RuntimeFailure
from bridle.runtimes.cgroups import Bounds

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


LOOK_S = 0.25
"""Between two looks at processes, and the least time between two at the disk."""
PATIENCE = 20.0
"""The disk is not looked at more often than takes this share of the time: 1 / (1 + PATIENCE)."""


@dataclass(frozen=True, slots=True)
class Watched:
    """Processes and folders that a watch polls, and their limits."""

    members: Callable[[], Iterable[int]]
    """Processes of the sandbox, by the machine's numbers."""
    folders: tuple[Path, ...]
    bounds: Bounds
    """What no control group keeps already."""
    storage_bytes: int | None


async def first_reached(watched: Watched) -> str:
    """Return when a limit is exceeded: `memory`, `processes` or `storage`."""
    loop = asyncio.get_running_loop()
    next_disk = loop.time()
    while True:
        if (found := await asyncio.to_thread(_processes, watched)) is not None:
            return found
        if watched.storage_bytes is not None and loop.time() >= next_disk:
            began = loop.time()
            used = await asyncio.to_thread(disk_use, watched.folders)
            if used > watched.storage_bytes:
                return "storage"
            next_disk = loop.time() + max(LOOK_S, PATIENCE * (loop.time() - began))
        await asyncio.sleep(LOOK_S)


def pid_namespace(pid: int) -> str | None:
    """Name of the process-number space of a process; `None` if it has ended or is not ours."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115 - a name, no path
    except OSError:
        return None


def members_of(namespace: str) -> list[int]:
    """Living processes in a process-number space, by the machine's numbers."""
    return [each.pid for each in living() if pid_namespace(each.pid) == namespace]


def disk_use(folders: Iterable[Path]) -> int:
    """Bytes on disk of all files below `folders`; a file with several names counts once.

    What vanishes meanwhile or may not be read counts nothing.
    """
    seen: set[tuple[int, int]] = set()
    total = 0
    waiting = [str(folder) for folder in folders]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(facts.st_mode):
                        waiting.append(entry.path)
                    elif (facts.st_dev, facts.st_ino) in seen:
                        continue
                    elif facts.st_nlink > 1:
                        seen.add((facts.st_dev, facts.st_ino))
                    total += facts.st_blocks * 512
    return total


def _processes(watched: Watched) -> str | None:
    bounds = watched.bounds
    if bounds.memory_bytes is None and bounds.processes is None:
        return None
    pids = list(watched.members())
    if bounds.processes is not None and sum(map(_threads, pids)) > bounds.processes:
        return "processes"
    if bounds.memory_bytes is not None and sum(map(_resident, pids)) > bounds.memory_bytes:
        return "memory"
    return None


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - only the names count
    except OSError:
        return 0


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0
