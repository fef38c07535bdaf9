"""Removing bundles that nobody uses: by the time since their last use, and by the room they take.

A process that has asked for a bundle shares a lock on it until it ends; only a bundle whose lock is
free is removed, and it is renamed first, so that it is whole or not there for anybody who asks.
What killed builders and killed prunings left goes too.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bridle.harnesses.bundles import MARKER, try_lock, use_lock

DAY_S = 86_400.0
UNUSED_S = 30 * DAY_S
"""What is unused for longer goes by itself when another bundle is built."""
ASIDE = ".pruned-"


@dataclass(frozen=True, slots=True)
class Pruned:
    """A bundle that was removed, or would be."""

    folder: Path
    size_mb: int
    why: str


@dataclass(frozen=True, slots=True)
class _Kept:
    folder: Path
    size_mb: int
    used_at: float


def prune(
    bundles: Path,
    *,
    unused_s: float,
    most_mb: int | None = None,
    dry_run: bool = False,
    now: float | None = None,
) -> list[Pruned]:
    """Remove the bundles unused for more than `unused_s` seconds, and the longest unused ones until
    the rest takes at most `most_mb` (`None` = whatever they take). Blocks.

    Never one that a living process has asked for. What can't be removed (another user's) stays.
    """
    found = sorted(_found(bundles), key=lambda each: each.used_at)
    total_mb = sum(each.size_mb for each in found)
    now = time.time() if now is None else now
    pruned = []
    for each in found:
        idle_s = now - each.used_at
        if idle_s > unused_s:
            why = f"unused for {idle_s / DAY_S:.0f} days"
        elif most_mb is not None and total_mb > most_mb:
            why = f"all together took {total_mb} MB"
        else:
            continue
        with _alone(use_lock(each.folder)) as free:
            if free and (dry_run or _moved_aside(each.folder)):
                pruned.append(Pruned(each.folder, each.size_mb, why))
                total_mb -= each.size_mb
    if not dry_run:
        _remove_ruins(bundles)
    return pruned


def _found(bundles: Path) -> Iterator[_Kept]:
    for marker in bundles.glob(f"[!.]*/{MARKER}"):
        try:
            size_mb = int(json.loads(marker.read_text()).get("size_mb", 0))
            yield _Kept(marker.parent, size_mb, marker.stat().st_mtime)
        except (OSError, ValueError, AttributeError):
            continue


@contextmanager
def _alone(lock: Path) -> Iterator[bool]:
    """Try to take the lock for the block; yield whether it was free."""
    try:
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        yield False
        return
    try:
        yield try_lock(file)
    finally:
        os.close(file)


def _moved_aside(folder: Path) -> bool:
    try:
        folder.rename(folder.with_name(f"{ASIDE}{secrets.token_hex(4)}"))
    except OSError:
        return False
    return True


def _remove_ruins(bundles: Path) -> None:
    """Remove what is aside: moved there, or left by builders that do not live."""
    for ruin in bundles.glob(f"{ASIDE}*"):
        shutil.rmtree(ruin, ignore_errors=True)
    for ruin in bundles.glob(".*.building-*"):
        with _alone(ruin.with_name(f"{ruin.name.partition('.building-')[0]}.lock")) as free:
            if free:
                shutil.rmtree(ruin, ignore_errors=True)
