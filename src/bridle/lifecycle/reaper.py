"""Scratch folders of a node, and the removal of what killed processes left behind.

A node's sessions live under one scratch folder in the system's temp folder. It names the process
that owns it, and the sessions in it, so that the next node can tell whether the owner still lives;
if not, the sessions' processes are ended and the folder goes.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from bridle.errors import RuntimeFailure
from bridle.runtimes.cgroups import remove_empty
from bridle.runtimes.docker_client import remove_left_behind
from bridle.runtimes.folders import remove_folders
from bridle.runtimes.owner import started_at
from bridle.runtimes.proc import SESSION_MARK, Leaders, end_all, members

PREFIX = "bridle-"
OWNER = "owner.json"
SESSIONS = "sessions"
GRACE_S = 1.0

log = structlog.get_logger(__name__)


class Scratch:
    """The scratch folder of one node; its sessions get folders of their own in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, base: Path | None = None) -> Scratch:
        """A new one in `base` (the system's temp folder). `RuntimeFailure` if it can't be made."""
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            owner = {"pid": os.getpid(), "started": started_at(os.getpid())}
            (folder / OWNER).write_text(json.dumps(owner))
        except OSError as error:
            where = base or tempfile.gettempdir()
            raise RuntimeFailure(f"cannot make a scratch folder in {where}: {error}") from error
        return cls(folder)

    def session(self, session_id: str) -> Path:
        """A new folder for a session; its name is short, because the model sees it."""
        with (self.folder / SESSIONS).open("a") as file:
            file.write(f"{session_id}\n")
        folder = self.folder / secrets.token_hex(4)
        folder.mkdir()
        return folder

    def remove(self) -> None:
        """Remove it all; idempotent."""
        with suppress(RuntimeFailure):  # the next reaper tries again
            remove_folders([self.folder])


async def reap(base: Path | None = None) -> int:
    """End and remove what dead nodes left: containers, folders in `base` (the system's temp folder)
    with their sessions' processes, control groups.

    Mounts and namespaces end with the processes that hold them. Returns how many scratch folders
    were removed. Folders of other users are left alone.
    """
    if containers := await remove_left_behind():
        log.info("removed what a killed process left", containers=containers)
    removed = 0
    for folder in list(_abandoned(base or Path(tempfile.gettempdir()))):
        marks = [f"{SESSION_MARK}={name}".encode() for name in _sessions(folder)]

        def find(marks: list[bytes] = marks) -> set[int]:
            return {pid for mark in marks for pid in members((mark,), Leaders())}

        ended = await end_all(find, grace_s=GRACE_S) if marks else 0
        Scratch(folder).remove()
        removed += 1
        log.info("removed what a killed process left", folder=str(folder), processes=ended)
    await asyncio.to_thread(remove_empty)
    return removed


def _abandoned(base: Path) -> Iterator[Path]:
    for owner in base.glob(f"{PREFIX}*/{OWNER}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            facts = json.loads(owner.read_text())
            lives = started_at(facts["pid"])
            # Without /proc nobody can be proven dead.
            dead = lives is None or lives != facts["started"]
            if dead and facts["started"] is not None and os.access(owner.parent, os.W_OK):
                yield owner.parent


def _sessions(folder: Path) -> list[str]:
    try:
        return (folder / SESSIONS).read_text().split()
    except OSError:
        return []
