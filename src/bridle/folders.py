"""Data folders: one process owns each, and only its user can read the contents.

Ownership is a lock (`flock`) on the file `.lock` in the folder. The kernel drops it when its
process ends, however that happens, so nothing has to be cleaned up after a crash. The file names
its holder for the process that comes second (`tests/test_folders.py`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Self

from bridle.errors import ConfigError

LOCK: Final = ".lock"
RETRY_S: Final = 0.05
POLL_S: Final = 0.2

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a write for which the disk, a quota or a limit has no room left."""

ROOM: Final = 1 << 20
"""Bytes of free disk below which a folder counts as full."""


class FolderLock:
    """Ownership of a folder, from the constructor until `close`. A context manager."""

    def __init__(self, folder: Path, *, patience_s: float = 0.0) -> None:
        """Take the folder, which is made if it is missing.

        `ConfigError` names the process that still owns it after `patience_s`.
        """
        path = private_folder(folder) / LOCK
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot lock folder {folder}: {path}: {error.strerror or error}"
            ) from error
        until = time.monotonic() + patience_s
        while not try_lock(self._descriptor):
            if time.monotonic() >= until:
                self.close()
                raise ConfigError(
                    f"{folder} is in use by {_holder(path)}: end that process, or name another"
                    " folder"
                )
            time.sleep(RETRY_S)
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)

    def close(self) -> None:
        """Release the lock on the folder; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process alone; return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@asynccontextmanager
async def exclusive(path: Path, waiting: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
    """Hold a lock on a file within the context; `waiting` is called once if another process holds
    it.

    The system drops the lock when this process ends.
    """
    import asyncio  # which `bridle show` does without

    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        announced = False
        while not try_lock(file):
            if not announced:
                waiting()
                announced = True
            await asyncio.sleep(POLL_S)
        yield
    finally:
        os.close(file)


def _holder(path: Path) -> str:
    try:
        found = json.loads(path.read_bytes())
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock, and is about to write
        return "another process"


def private_folder(path: Path) -> Path:
    """Make a folder and its missing parents for this user alone (0700); return `path`.

    Folders that exist keep their mode. `OSError` escapes.
    """
    for one in reversed((path, *path.parents)):
        if not one.is_dir():
            one.mkdir(mode=0o700, exist_ok=True)
    return path


def private_file(path: Path) -> Path:
    """Make an empty file for this user alone (0600) if there is none; return `path`.

    A library that opens it by name later keeps that mode. `OSError` escapes.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return path


def check_room(folder: Path) -> None:
    """Check that a disk has room: write `ROOM` bytes into `folder` and remove them.

    Raises the `OSError` of a failed write.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(ROOM))
        file.flush()
