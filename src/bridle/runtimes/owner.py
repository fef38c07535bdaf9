"""Owners and folders of a session on this machine: owner marks, folder names, removal of folders.

Containers, control groups and folders carry the mark of the process that made them. A mark names
that process in a form that no later process has, on a machine and among the processes that it can
see. Only a process of the same place can say that an owner is dead: a daemon may serve several
machines, and a container's processes do not see those of other containers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

from bridle.errors import RuntimeFailure

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


def remove_folders(folders: Iterable[Path]) -> None:
    """Remove folders, also where the harness took its own permissions away.

    Raises `RuntimeFailure` naming one that stays.
    """
    for folder in folders:
        if folder.is_symlink() or not folder.is_dir():  # a harness put it there, if it is there
            folder.unlink(missing_ok=True)
            continue
        with suppress(OSError):
            folder.chmod(0o700)
        for parent, names, _ in os.walk(folder):
            for name in names:
                path = Path(parent, name)
                if not path.is_symlink():
                    with suppress(OSError):
                        path.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            message = f"cannot remove {folder}"
            raise RuntimeFailure(message)


def beside(path: PurePosixPath, folders: Mapping[str, Path]) -> Path | None:
    """The path on this machine of one inside a runtime, by the folders that it shares; `None` = it
    lies in none of them.
    """
    for top, folder in folders.items():
        if path.is_relative_to(top) and ".." not in path.parts:
            return folder / path.relative_to(top)
    return None
