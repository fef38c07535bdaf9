"""Limits that are kept by looking: disk always, the rest where there is no control group.

A look now and then is slower than a burst of writing, so a file's own size is limited by the kernel
as well (`ulimit -f`), and a sandbox that was over its limit is ended for certain at the next look.
"""

from __future__ import annotations

import asyncio
import os
import resource
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bridle.runtimes.cgroups import Bounds
from bridle.runtimes.proc import living

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
