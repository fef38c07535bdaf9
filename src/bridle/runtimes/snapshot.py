"""Copies of what a session left, made by this process: entry by entry, links never followed.

No program of the session's place takes part, so nothing that an agent left there has a say in what
is copied. The session must have no process: a tree that changes meanwhile is copied as found.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from bridle.errors import RuntimeFailure
from bridle.runtimes.archive import Keep, stays

OF_THE_ENTRY = frozenset(
    {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR}
    | {errno.EEXIST, errno.EISDIR}
)
"""Errors that come of one entry; any other is the machine's."""

NOT_BETWEEN = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of `copy_file_range` between file systems that it does not serve."""


EMPTY = """
shopt -s dotglob nullglob
all=(*)
for ((at = 0; at < ${#all[@]}; at += 500)); do rm -rf -- "${all[@]:at:500}" || exit; done
"""
"""Empties the folder that it is run in."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one copy."""

    entries: int = 200_000
    depth: int = 100
    bytes: int = 8 << 30
    """Sum of all sizes, with holes, since what takes a copy further writes them out."""


class TooMuch(RuntimeFailure):
    """A tree is over the bounds of a copy; the text says which."""


def check_archive(archive: Path, bounds: Bounds) -> int:
    """Bytes of all files of an archive with their holes, read before anything of it is taken out.

    Raises `TooMuch`, and `RuntimeFailure` if it is no whole archive.
    """
    size = 0
    try:
        with tarfile.open(archive, "r:") as tar:
            for count, entry in enumerate(tar, 1):
                size += entry.size
                if count > bounds.entries:
                    raise TooMuch(f"there are more than {bounds.entries} files")
                if size > bounds.bytes:
                    raise TooMuch(f"there are more than {bounds.bytes >> 20} MiB")
                if len(PurePosixPath(entry.name).parts) > bounds.depth + 2:
                    top = entry.name.partition("/")[0]
                    raise TooMuch(f"{top} is deeper than {bounds.depth} folders")
    except tarfile.TarError as error:
        message = f"what comes out is no whole archive: {error}"
        raise RuntimeFailure(message) from error
    return size


def replace_tree(
    source: Path,
    target: Path,
    *,
    keep: Keep | None = None,
    bounds: Bounds | None = None,
    link: bool = False,
) -> tuple[str, ...]:
    """Make the folder `target` hold what the folder `source` holds, and nothing else.

    Paths that `keep` names stay as `target` has them and are not taken from `source`. Regular
    files, folders and links are copied, with modes and times; their owner may read all of them, and
    write to the folders. With `link`, files of `target` are hard links to those of `source`, with
    their modes: both must be ours, and on one file system. Returns the paths that stayed behind,
    each with its reason. Raises `TooMuch`; `OSError` of the machine (a full disk) escapes.
    """
    copier = _Copier(keep or _nothing, bounds or Bounds(), link=link)
    target.mkdir(parents=True, exist_ok=True)
    copier.clear(target, PurePosixPath())
    copier.copy(source, target, PurePosixPath())
    return tuple(copier.left)


def copy_tree(source: Path, target: Path, top: Path | None = None) -> tuple[str, ...]:
    """Copy a session's folder as `replace_tree` does; one that the harness deleted is empty.

    So is one that is reached from the folder `top` (`None` = itself) through a link.
    """
    if not is_folder_in(top or source, source):
        target.mkdir(parents=True, exist_ok=True)
        return ()
    return replace_tree(source, target)


def is_folder_in(top: Path, path: Path) -> bool:
    """Return whether `path` (`top` or below it) and all folders between are real folders, not
    links.
    """
    steps = [path, *path.parents][: 1 + len(path.relative_to(top).parts)]
    return not any(step.is_symlink() for step in steps) and path.is_dir()


def _nothing(path: PurePosixPath, *, is_folder: bool) -> bool:
    del path, is_folder
    return False


class _Ended(Protocol):
    @property
    def ok(self) -> bool: ...

    @property
    def stderr(self) -> bytes: ...


class _Filled(Protocol):
    """Methods of a runtime that `put_by_archive` calls."""

    async def exec(self, command: str) -> _Ended: ...

    async def copy_kept(self, folder: Path, keep: Keep) -> tuple[str, ...]: ...

    async def upload(self, source: Path, target: str) -> None: ...


async def put_by_archive(runtime: _Filled, folder: Path, keep: Keep) -> tuple[str, ...]:
    """Do what `Runtime.put_work` says where the work folder is no folder of this machine."""
    with tempfile.TemporaryDirectory(prefix="bridle-work-", dir=folder.parent) as aside:
        whole = Path(aside, "work")
        await runtime.copy_kept(whole, keep)
        left = await asyncio.to_thread(replace_tree, folder, whole, keep=keep, link=True)
        emptied = await runtime.exec(EMPTY)
        if not emptied.ok:
            raise RuntimeFailure(emptied.stderr.decode(errors="replace").strip())
        await runtime.upload(whole, ".")
    return left


def copy_out(source: Path, target: Path, allowed: Path) -> None:
    """Copy a file or folder of the folder `allowed`; links to files that lie there become files.

    Entries that are neither regular files nor folders stay behind. Raises `RuntimeFailure` if
    `source` is such an entry or lies elsewhere; `OSError` escapes.
    """
    allowed = allowed.resolve()
    real = source.resolve(strict=True)
    if not real.is_relative_to(allowed):
        message = f"{source} lies outside the session's own folder"
        raise RuntimeFailure(message)
    target.parent.mkdir(parents=True, exist_ok=True)

    def strange(folder: str, names: list[str]) -> set[str]:
        paths = {name: Path(folder, name) for name in names}
        return {name for name, path in paths.items() if not _may_leave(path, allowed)}

    room = Bounds().bytes

    def copied(given: str, made: str) -> str:
        nonlocal room
        room -= Path(given).stat().st_size
        if room < 0:
            raise TooMuch(f"there are more than {Bounds().bytes >> 20} MiB, with those of links")
        return str(shutil.copy2(given, made))

    if real.is_dir():
        shutil.copytree(real, target, ignore=strange, dirs_exist_ok=True, copy_function=copied)
    elif _may_leave(real, allowed):
        _copy_file(str(real), target, real.stat())
    else:
        message = f"{source} is not a regular file"
        raise RuntimeFailure(message)


def take_out(source: Path, target: Path, top: Path, most: int) -> tuple[int, tuple[str, ...]]:
    """Copy a file or folder that lies in the session's folder `top`: `most` bytes, with holes.

    Only links that stay inside the copy are copied. Returns the bytes and the paths that stayed
    behind, each with its reason. Raises `RuntimeFailure` where `source` itself cannot leave; then
    nothing is at `target`. `OSError` of the machine escapes.
    """
    if not source.is_relative_to(top) or ".." in source.relative_to(top).parts:
        message = f"{source} lies outside the session's own folder"
        raise RuntimeFailure(message)
    copier = _Copier(_nothing, Bounds(bytes=most), inner_links=True)
    try:
        above = [source.parent, *source.parent.parents]
        for folder in reversed(above[: len(source.relative_to(top).parts)]):
            _readable(folder)
        facts = source.lstat()
        target.parent.mkdir(parents=True, exist_ok=True)
        if stat.S_ISDIR(facts.st_mode):
            target.mkdir(exist_ok=True)
            copier.copy(source, target, PurePosixPath())
        elif stat.S_ISREG(facts.st_mode):
            copier.copy_file(source, target, facts)
        else:
            message = f"{source.name} is not a regular file or folder"
            raise RuntimeFailure(message)
    except FileNotFoundError:
        message = f"{source.name} is not there"
        raise RuntimeFailure(message) from None
    except NotADirectoryError as error:
        raise RuntimeFailure(f"{source.name}: {error}") from error
    except TooMuch:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return copier.bytes, tuple(copier.left)


def _may_leave(path: Path, allowed: Path) -> bool:
    """A regular file or folder; a link only to a regular file of the same session."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        real = path.resolve()
        return real.is_relative_to(allowed) and real.is_file()
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


class _Copier:
    def __init__(
        self, keep: Keep, bounds: Bounds, *, inner_links: bool = False, link: bool = False
    ) -> None:
        self.left: list[str] = []
        self.bytes = 0
        self._keep = keep
        self._bounds = bounds
        self._inner_links = inner_links
        self._link = link
        self._entries = 0

    def clear(self, folder: Path, at: PurePosixPath) -> None:
        """Empty a folder of ours, except for what is kept and the folders that it lies in."""
        for entry in list(os.scandir(folder)):
            path, is_folder = at / entry.name, entry.is_dir(follow_symlinks=False)
            if self._keep(path, is_folder=is_folder):
                continue
            if not is_folder:
                Path(entry.path).unlink()
                continue
            self.clear(Path(entry.path), path)
            with suppress(OSError):  # something in it is kept
                Path(entry.path).rmdir()

    def copy(self, source: Path, target: Path, at: PurePosixPath) -> None:
        """Copy a folder's entries, those of folders below it too."""
        if len(at.parts) > self._bounds.depth:
            raise TooMuch(f"{at.parts[0]} is deeper than {self._bounds.depth} folders")
        with os.scandir(_readable(source)) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            self._entries += 1
            if self._entries > self._bounds.entries:
                raise TooMuch(f"there are more than {self._bounds.entries} files")
            path = at / entry.name
            try:
                self._copy_one(entry, target / entry.name, path)
            except OSError as error:
                if error.errno not in OF_THE_ENTRY:
                    raise
                self.left.append(f"{path}: {error.strerror}")

    def _copy_one(self, entry: os.DirEntry[str], target: Path, path: PurePosixPath) -> None:
        facts = entry.stat(follow_symlinks=False)
        kind, mode = stat.S_IFMT(facts.st_mode), stat.S_IMODE(facts.st_mode) & 0o777
        if self._keep(path, is_folder=kind == stat.S_IFDIR):
            self.left.append(f"{path}: the checker's own is used")
        elif kind == stat.S_IFDIR:
            target.mkdir(exist_ok=True)
            self.copy(Path(entry.path), target, path)
            target.chmod(mode | 0o700)
        elif kind == stat.S_IFLNK:
            to = Path(entry.path).readlink()
            if self._inner_links and not stays(str(to), len(path.parts)):
                self.left.append(f"{path}: a link that leads elsewhere")
            else:
                target.symlink_to(to)
        elif kind == stat.S_IFREG:
            self.copy_file(Path(entry.path), target, facts)
        else:
            self.left.append(f"{path}: neither a regular file nor a folder nor a link")

    def copy_file(self, source: Path, target: Path, facts: os.stat_result) -> None:
        self.bytes += facts.st_size
        if self.bytes > self._bounds.bytes:
            raise TooMuch(f"there are more than {self._bounds.bytes >> 20} MiB")
        if self._link:
            os.link(source, target)
            return
        mode = stat.S_IMODE(facts.st_mode) & 0o777 | 0o400
        _copy_file(str(source), target, facts, mode)


def _readable(folder: Path) -> Path:
    """The folder, with its owner's right to read it."""
    mode = folder.lstat().st_mode
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(folder))
    if mode & 0o500 != 0o500:
        folder.chmod(stat.S_IMODE(mode) | 0o500)
    return folder


def _copy_file(source: str, target: Path, facts: os.stat_result, mode: int | None = None) -> None:
    """Copy a file's contents, and `mode` and times unless it is `None`; holes stay holes.

    The kernel copies, and shares the blocks where the file system can.
    """
    if not facts.st_mode & 0o400:
        Path(source).chmod(0o600)
    with (
        _opened(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as given,
        _opened(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as made,
    ):
        if facts.st_blocks * 512 >= facts.st_size:
            _copy_range(given, made, 0, facts.st_size)
        else:
            os.ftruncate(made, facts.st_size)
            end = 0
            while (start := _next_data(given, end)) is not None:
                end = os.lseek(given, start, os.SEEK_HOLE)
                _copy_range(given, made, start, end)
        if mode is not None:
            os.fchmod(made, mode)
            os.utime(made, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@contextmanager
def _opened(path: str | Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield file
    finally:
        os.close(file)


def _copy_range(given: int, made: int, start: int, end: int) -> None:
    """Copy the bytes from `start` to `end`, or to the end of a file that was cut meanwhile."""
    try:
        while copied := os.copy_file_range(given, made, end - start, start, start):
            start += copied
    except OSError as error:
        if error.errno not in NOT_BETWEEN:
            raise
        os.lseek(made, start, os.SEEK_SET)
        while copied := os.sendfile(made, given, start, end - start):
            start += copied


def _next_data(file: int, start: int) -> int | None:
    try:
        return os.lseek(file, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole is left
            return None
        raise
