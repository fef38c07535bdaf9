"""Bundles: each harness version is installed once per machine, whole or not at all.

A bundle is a folder `<name>-<version>-<hash>`; the hash covers its lock files, its interpreter and
this machine's kind. It is built aside and renamed into place with a marker file in it, so a folder
with the marker is whole, whatever was killed when. A lock file keeps two builders of the same
bundle apart. Sessions read bundles; only `ensure` writes them.

A process that has asked for a bundle shares a lock on it until it ends. `prune` removes a bundle
only if that lock is free, and renames it first, so a caller finds it whole or absent. It also
removes the remains of killed builders and of killed prunings.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import platform
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bridle.config import cache_dir
from bridle.errors import HarnessError, RuntimeFailure
from bridle.folders import exclusive, try_lock
from bridle.runtimes.process import Command, run_process

MARKER = "bridle-bundle.json"
STEP_TIMEOUT_S = 1800.0
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "NODE_OPTIONS")
"""Variables of the caller that would lead an installer astray."""

DAY_S = 86_400.0
UNUSED_S = 30 * DAY_S
"""A bundle that is unused for longer is removed when another one is built."""
ASIDE = ".pruned-"

Report = Callable[[str], None]

_held: dict[Path, int] = {}
"""Bundle -> the open file whose lock says that this process uses it."""


def bundles_dir() -> Path:
    """Return the folder of the bundles: `$BRIDLE_CACHE/bundles`, by default
    `~/.cache/bridle/bundles`.
    """
    return cache_dir() / "bundles"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe of a bundle: its inputs and the function that builds it."""

    name: str
    version: str
    inputs: tuple[str, ...]
    """Everything that its content depends on: lock files, interpreter version."""
    needs: str
    """Path in the bundle without which it is not usable (its interpreter)."""
    size_mb: int
    """About how much disk it takes."""
    build: Callable[[Builder], Awaitable[None]]

    @property
    def folder_name(self) -> str:
        """Name of the bundle's folder, `<name>-<version>-<hash>`; the hash covers its inputs and
        machine.
        """
        kind = (platform.system(), platform.machine(), *platform.libc_ver())
        text = json.dumps([self.name, self.version, *kind, *self.inputs])
        return f"{self.name}-{self.version}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(slots=True)
class Builder:
    """Helper that a recipe builds with: target folder and commands."""

    folder: Path
    """The bundle in the making; it is renamed later, so nothing in it may name it."""
    report: Report
    label: str

    def say(self, line: str) -> None:
        """Report a line of progress, with the bundle's name before it."""
        self.report(f"{self.label}: {line}")

    async def run(
        self, argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> bytes:
        """Run an installer's command and return its stdout.

        It gets the environment of this process (proxies, package indexes) without Bridle's own
        variables and without those that mislead installers. Raises `HarnessError` with the end of
        its output.
        """
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in FOREIGN and not name.startswith("BRIDLE_")
        }
        try:
            result = await run_process(
                Command(
                    argv,
                    cwd=str(cwd or self.folder),
                    env={**inherited, **(env or {})},
                    timeout_s=STEP_TIMEOUT_S,
                )
            )
        except RuntimeFailure as error:
            raise HarnessError(f"{self.label}: {error}") from error
        if not result.ok:
            said = (result.stderr or result.stdout).decode(errors="replace").strip()
            how = f"exit code {result.exit_code}" if not result.timed_out else "timed out"
            tail = "\n".join(said.splitlines()[-15:])
            raise HarnessError(
                f"{self.label}: {' '.join(argv[:6])} ... failed ({how}); is the network or the "
                f"package index reachable, and is there room in {self.folder.parent}?\n{tail}"
            )
        return result.stdout


def installed(name: str, version: str, bundles: Path) -> Path | None:
    """Return the folder of a completely installed bundle of this version; `None` = there is
    none.
    """
    found = (marker.parent for marker in sorted(bundles.glob(f"{name}-{version}-*/{MARKER}")))
    return next(found, None)


async def ensure(recipe: Recipe, bundles: Path, report: Report) -> Path:
    """Return the folder of the recipe's bundle; builds the bundle if it is missing or incomplete.

    Safe when several processes ask at once: one builds, the others wait. A build also prunes
    bundles that are unused for `UNUSED_S`. Raises `HarnessError`.
    """
    final = bundles / recipe.folder_name
    if _is_whole(final, recipe):
        hold(final)
        if _is_whole(final, recipe):  # it may have been pruned just before
            return final
    label = f"{recipe.name} {recipe.version}"
    try:
        free_mb = await asyncio.to_thread(_free_mb, bundles)
    except OSError as error:
        raise HarnessError(f"{label}: cannot use the bundle folder {bundles}: {error}") from error
    waiting = f"{label}: another process is building it; waiting"
    async with exclusive(bundles / f".{recipe.folder_name}.lock", lambda: report(waiting)):
        hold(final)
        if _is_whole(final, recipe):
            return final
        await asyncio.to_thread(_remove_ruins, bundles, recipe.folder_name)
        if free_mb < recipe.size_mb * 1.1:
            raise HarnessError(
                f"{label}: needs about {recipe.size_mb} MB in {bundles}, where {free_mb} MB are "
                "free; make room or set BRIDLE_CACHE to another folder"
            )
        aside = final.with_name(f".{final.name}.building-{secrets.token_hex(4)}")
        await _build(recipe, final, Builder(aside, report, label))
    for each in await asyncio.to_thread(prune, bundles, unused_s=UNUSED_S):
        report(f"removed {each.folder.name} ({each.size_mb} MB): {each.why}")
    return final


def use_lock(folder: Path) -> Path:
    """Return the path of the file that processes lock (shared) while they use the bundle in
    `folder`.
    """
    return folder.with_name(f".{folder.name}.use.lock")


def hold(folder: Path) -> None:
    """Keep the bundle in `folder` from being pruned until this process ends, and record its use
    now.

    Does nothing where this process may not write to the folder: a process with the same rights
    cannot prune it either.
    """
    with suppress(OSError):
        if folder not in _held:
            _held[folder] = os.open(use_lock(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(_held[folder], fcntl.LOCK_SH)
        os.utime(folder / MARKER)


def _free_mb(bundles: Path) -> int:
    bundles.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(bundles).free >> 20


async def _build(recipe: Recipe, final: Path, builder: Builder) -> None:
    began = time.monotonic()
    try:
        builder.folder.mkdir()
        await recipe.build(builder)
        if not (builder.folder / recipe.needs).exists():
            raise HarnessError(f"{builder.label}: the installation made no {recipe.needs}")
        size_mb = await asyncio.to_thread(_size_mb, builder.folder)
        took_s = round(time.monotonic() - began, 1)
        facts = {"name": recipe.name, "version": recipe.version, "size_mb": size_mb}
        (builder.folder / MARKER).write_text(json.dumps({**facts, "built_in_s": took_s}))
        builder.folder.rename(final)
    except OSError as error:
        raise HarnessError(
            f"{builder.label}: cannot install into {final.parent}: {error}"
        ) from error
    finally:
        # Not awaited: also when cancelled, nothing half-built stays.
        shutil.rmtree(builder.folder, ignore_errors=True)
    builder.say(f"ready: {size_mb} MB in {took_s} s")


def _is_whole(folder: Path, recipe: Recipe) -> bool:
    # `needs` is looked at too: a venv is dead when the Python it was made with has gone.
    return (folder / MARKER).is_file() and (folder / recipe.needs).exists()


def _remove_ruins(bundles: Path, name: str) -> None:
    """Remove a broken bundle and what killed builders left; the lock must be held."""
    for ruin in (bundles / name, *bundles.glob(f".{name}.building-*")):
        shutil.rmtree(ruin, ignore_errors=True)


def _size_mb(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*")) >> 20


# ---- pruning


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
    the rest takes at most `most_mb` (`None` = no limit). Blocks.

    A bundle that a living process holds is never removed, nor one that another user's rights
    protect.
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
        _remove_all_ruins(bundles)
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


def _remove_all_ruins(bundles: Path) -> None:
    """Remove what is aside: moved there, or left by builders that do not live."""
    for ruin in bundles.glob(f"{ASIDE}*"):
        shutil.rmtree(ruin, ignore_errors=True)
    for ruin in bundles.glob(".*.building-*"):
        with _alone(ruin.with_name(f"{ruin.name.partition('.building-')[0]}.lock")) as free:
            if free:
                shutil.rmtree(ruin, ignore_errors=True)
