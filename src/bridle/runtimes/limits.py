"""Limits on memory, processes, CPU and storage of a sandbox.

The kernel enforces them with control groups, of version 2, or of version 1 where that is what the
machine has. A sandbox's group lies below our own, so it never gets more than we have. Where we may
not make groups (an ordinary user without delegation), `Cgroup.make` returns `None` and the sandbox
is polled instead (`first_reached`).
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bridle.runtimes.process import is_dead, running_processes

PREFIX = "bridle-"
"""Of the names of groups; the mark of their owner follows, and a dash."""
PERIOD_US = 100_000
REMOVE_S = 2.0
MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Resource limits of a sandbox; `None` = unlimited."""

    cpus: float | None = None
    memory_bytes: int | None = None
    processes: int | None = None


@dataclass(slots=True)
class Cgroup:
    """One sandbox's group: a folder, or with version 1 one folder per controller."""

    folders: Mapping[str, Path]
    """Controller -> folder; version 2 has the same folder for each."""
    _seen: dict[str, int] = field(default_factory=dict)

    @classmethod
    def make(
        cls, name: str, bounds: ResourceLimits, *, mount: Path = MOUNT, own: Path = OWN
    ) -> Cgroup | None:
        """Make a group with these limits; `None` where this process may not make one."""
        wanted = _settings(bounds)
        unified = (mount / "cgroup.controllers").exists()
        try:
            ours = _own_groups(own)
            if unified:
                folder = mount / ours.get("", "").lstrip("/") / name
                _enable(folder.parent, wanted)
                folders = dict.fromkeys(wanted, folder)
            else:
                folders = {
                    controller: mount / controller / ours.get(controller, "").lstrip("/") / name
                    for controller in wanted
                }
                if not all((mount / controller).is_dir() for controller in wanted):
                    return None
        except OSError:
            return None
        group = cls(folders)
        try:
            for controller, folder in folders.items():
                folder.mkdir(exist_ok=True)
                for file, value in wanted[controller][2 if unified else 1].items():
                    (folder / file).write_text(value)
        except OSError:
            group.remove()
            return None
        return group

    @property
    def procs_files(self) -> list[str]:
        """Return the files into which a process writes its number to join the group."""
        return sorted({str(folder / "cgroup.procs") for folder in self.folders.values()})

    def reached(self) -> str | None:
        """Return the limit that was reached since the last call: `memory` or `processes`."""
        counts = {
            "memory": self._count("memory", ("memory.events", "memory.oom_control"), "oom_kill"),
            "processes": self._count("pids", ("pids.events",), "max"),
        }
        grown = [name for name, count in counts.items() if count > self._seen.get(name, 0)]
        self._seen.update(counts)
        return grown[0] if grown else None

    def remove(self) -> None:
        """Remove the group; its processes have ended. Idempotent."""
        patience = time.monotonic() + REMOVE_S
        for folder in set(self.folders.values()):
            while folder.exists():
                with suppress(OSError):
                    folder.rmdir()
                    break
                if time.monotonic() > patience:
                    break
                time.sleep(0.01)

    def _count(self, controller: str, files: tuple[str, ...], name: str) -> int:
        folder = self.folders.get(controller)
        if folder is None:
            return 0
        for file in files:
            with suppress(OSError):
                for line in (folder / file).read_text().splitlines():
                    if line.split()[0] == name:
                        return int(line.split()[1])
        return 0


def remove_empty(*, mount: Path = MOUNT, own: Path = OWN) -> int:
    """Remove the groups of dead processes beside which ours would be made; returns how many.

    Only empty ones go: their sandboxes have ended.
    """
    try:
        ours = _own_groups(own)
    except OSError:
        return 0
    unified = (mount / "cgroup.controllers").exists()
    beside = {mount / ("" if unified else name) / path.lstrip("/") for name, path in ours.items()}
    removed = 0
    for folder in [each for at in beside for each in at.glob(f"{PREFIX}*-*")]:
        if is_dead(folder.name.removeprefix(PREFIX).partition("-")[0]):
            with suppress(OSError):
                folder.rmdir()
                removed += 1
    return removed


def _settings(bounds: ResourceLimits) -> dict[str, dict[int, dict[str, str]]]:
    """Return controller -> version -> file -> content."""
    found: dict[str, dict[int, dict[str, str]]] = {}
    if bounds.memory_bytes is not None:
        limit = str(bounds.memory_bytes)
        found["memory"] = {2: {"memory.max": limit}, 1: {"memory.limit_in_bytes": limit}}
    if bounds.processes is not None:
        found["pids"] = {v: {"pids.max": str(bounds.processes)} for v in (1, 2)}
    if bounds.cpus is not None:
        quota = str(max(1000, int(bounds.cpus * PERIOD_US)))
        found["cpu"] = {
            2: {"cpu.max": f"{quota} {PERIOD_US}"},
            1: {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota},
        }
    return found


def _own_groups(own: Path) -> dict[str, str]:
    """Return controller (empty for version 2) -> path of our own group."""
    groups: dict[str, str] = {}
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _enable(parent: Path, wanted: Mapping[str, object]) -> None:
    """Enable these controllers for children of `parent`. `OSError` if that is not possible."""
    switch = parent / "cgroup.subtree_control"
    missing = set(wanted) - set(switch.read_text().split())
    if missing:
        if not os.access(switch, os.W_OK):
            raise PermissionError(switch)
        switch.write_text(" ".join(f"+{name}" for name in sorted(missing)))


def available_cores(*, mount: Path = MOUNT, own: Path = OWN) -> int:
    """Cores that this process may use: those it may run on, or as many as its groups' limits (a
    container's) come to, rounded up.
    """
    spread = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = (os.cpu_count() or 1) if spread is None else len(spread(0))
    groups: Mapping[str, str] = {}
    with suppress(OSError):
        groups = _own_groups(own)
    for top, path in ((mount, groups.get("", "")), (mount / "cpu", groups.get("cpu", ""))):
        folder = top / path.lstrip("/")
        for one in (folder, *folder.parents):
            if not one.is_relative_to(top):
                break
            cores = min(cores, math.ceil(_limit(one) or cores))
    return cores


def _limit(folder: Path) -> float | None:
    """Return the most cores that a group may use; `None` = any number, or no such group."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        given = int((folder / "cpu.cfs_quota_us").read_text())
        return given / int((folder / "cpu.cfs_period_us").read_text()) if given > 0 else None
    return None


LOOK_S = 0.25
"""Between two looks at processes, and the least time between two at the disk."""
PATIENCE = 20.0
"""The disk is not looked at more often than takes this share of the time: 1 / (1 + PATIENCE)."""


async def first_reached(
    members: Callable[[], Iterable[int]],
    folders: Sequence[Path],
    bounds: ResourceLimits,
    storage_bytes: int,
) -> str:
    """Poll a sandbox; return when a limit is exceeded: `memory`, `processes` or `storage`.

    `members` gives its processes, by the machine's numbers; `bounds` are the limits that no control
    group keeps already.
    """
    loop = asyncio.get_running_loop()
    next_disk = loop.time()
    while True:
        if (found := await asyncio.to_thread(_processes, members, bounds)) is not None:
            return found
        if loop.time() >= next_disk:
            began = loop.time()
            if await asyncio.to_thread(disk_use, folders) > storage_bytes:
                return "storage"
            next_disk = loop.time() + max(LOOK_S, PATIENCE * (loop.time() - began))
        await asyncio.sleep(LOOK_S)


def pid_namespace(pid: int) -> str | None:
    """Return the name of a process's PID namespace; `None` if it has ended or is not ours."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115 - a name, no path
    except OSError:
        return None


def members_of(namespace: str) -> list[int]:
    """Return the living processes of a PID namespace, by the machine's numbers."""
    return [each.pid for each in running_processes() if pid_namespace(each.pid) == namespace]


def disk_use(folders: Iterable[Path]) -> int:
    """Return bytes on disk of all files below `folders`; a file with several names counts once.

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


def _processes(members: Callable[[], Iterable[int]], bounds: ResourceLimits) -> str | None:
    if bounds.memory_bytes is None and bounds.processes is None:
        return None
    pids = list(members())
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
