"""Marks of ownership on what a session leaves outside its own processes: containers, control
groups, folders.

A mark names a process in a form that no later process has, on a machine and among the processes
that it can see. Only a process of the same place can say that an owner is dead: a daemon may serve
several machines, and a container's processes do not see their neighbours'.
"""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

MACHINE = Path("/etc/machine-id")


def owner_mark() -> str:
    """This process: its number, when it was started, and where."""
    return f"{os.getpid()}.{started_at(os.getpid())}.{_place()}"


def is_dead(mark: str) -> bool:
    """Return whether the process of a mark has certainly ended; False for a mark of another
    machine.
    """
    pid, _, rest = mark.partition(".")
    started, _, place = rest.partition(".")
    return place == _place() and not (pid.isdigit() and started_at(int(pid)) == started)


def started_at(pid: int) -> str | None:
    """When a process was started, in clock ticks since boot; `None` if it does not live."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[19] if fields[0] not in ("Z", "X") else None


@cache
def _place() -> str:
    """This machine, and the processes of it that are seen here."""
    machine = socket.gethostname()
    with suppress(OSError):
        machine += MACHINE.read_text().strip()
    space = 0
    with suppress(OSError):
        space = Path("/proc/self/ns/pid").stat().st_ino
    return f"{hashlib.sha256(machine.encode()).hexdigest()[:8]}.{space}"
