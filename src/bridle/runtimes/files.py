"""A session's files on their way in and out: tar archives, copies, removal.

Inside a containing runtime, paths are resolved by the runtime itself, so a link that a harness
planted leads nowhere but where the harness could go anyway. An archive that comes out is not
trusted: regular files, folders and links that stay inside it are extracted; devices, sockets, links
and names that lead elsewhere are left behind.

Copies are made by this process, entry by entry, and follow no links. No program of the session
takes part, so nothing that an agent left has a say in what is copied. The session must have no
process: a tree that changes during the copy is copied as found.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import shutil
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Protocol

from bridle.errors import RuntimeFailure


class Keep(Protocol):
    """Says which paths of a folder stay in it."""

    def __call__(self, path: PurePosixPath, *, is_folder: bool) -> bool:
        """Return whether to keep `path` (relative to the top) and everything below it."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Numbers of the user and the group that own what is put inside."""

    user: int = 0
    group: int = 0

    def taking(self, entry: tarfile.TarInfo) -> tarfile.TarInfo:
        """Set the user and group of an archive's entry to this owner; returns the entry."""
        entry.uid, entry.gid = self.user, self.group
        entry.uname = entry.gname = ""
        return entry


ROOT = Owner()


def pack(source: Path, target: PurePosixPath, archive: Path, owner: Owner = ROOT) -> PurePosixPath:
    """Write the file or folder `source` to the tar file `archive`; returns the folder to extract it
    in.

    Extracted there, it is at `target`; a folder is merged into an existing one. Modes and symbolic
    links are kept; all entries belong to `owner`. `OSError` escapes.
    """
    whole = source.is_dir()
    with tarfile.open(archive, "w") as tar:
        tar.add(source, arcname="." if whole else target.name, filter=owner.taking)
    return target if whole else target.parent


def pack_bytes(content: bytes | None, name: str, mode: int, owner: Owner = ROOT) -> bytes:
    """Return a tar archive of one file, or of an empty folder where `content` is `None`."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        entry = owner.taking(tarfile.TarInfo(name))
        entry.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
        entry.size, entry.mode = len(content or b""), mode
        tar.addfile(entry, io.BytesIO(content or b""))
    return made.getvalue()


def size_of(archive: Path) -> int:
    """Return the size of the archive file in bytes; 0 if it does not exist."""
    return archive.stat().st_size if archive.exists() else 0


def unpack(
    archive: Path, name: str, target: Path, *, any_link: bool = False, only: Keep | None = None
) -> None:
    """Extract the entry `name` of `archive` as `target`; a folder is merged into an existing one.

    With `only`, all folders are extracted, but only the files and links that it keeps.

    With `any_link`, symbolic links are extracted wherever they point to: for a copy that goes into
    another sandbox and that nobody here reads by following links. The folder that contains
    `archive` is used for temporary files. Raises `RuntimeFailure` when `name` is missing or may not
    be extracted; `OSError` escapes.
    """
    aside = archive.parent / "unpacked"
    aside.mkdir()
    try:
        with tarfile.open(archive, "r:") as tar:
            entries = None if only is None else _kept(tar.getmembers(), only)
            tar.extractall(aside, entries, filter=_any_link if any_link else safe_entry)  # noqa: S202 - the filters leave out what leads elsewhere
    except tarfile.TarError as error:
        raise RuntimeFailure(f"the archive of copied files is incomplete: {error}") from error
    found = aside / name
    if found.is_symlink() or not found.exists():
        raise RuntimeFailure(f"{name} does not exist, or is not a regular file or folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    if found.is_dir() and target.exists():
        shutil.copytree(found, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.move(found, target)


def _kept(entries: list[tarfile.TarInfo], keep: Keep) -> list[tarfile.TarInfo]:
    """Return the folders, what `keep` names, and the files that a kept hard link links to."""

    def is_kept(entry: tarfile.TarInfo) -> bool:
        path = PurePosixPath(*PurePosixPath(entry.name).parts[1:])
        above = (keep(folder, is_folder=True) for folder in path.parents[:-1])
        return keep(path, is_folder=entry.isdir()) or any(above)

    kept = {entry.name: entry for entry in entries if is_kept(entry)}
    linked = {entry.linkname for entry in kept.values() if entry.islnk()}
    return [one for one in entries if one.isdir() or one.name in kept or one.name in linked]


def safe_entry(entry: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Return the archive's entry if it may be extracted below `folder`; `None` if it leads
    elsewhere.
    """
    if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
        return None
    if not _is_direct(entry.name, folder) or (entry.issym() and not _stays(entry)):
        return None
    if entry.islnk() and not (
        _is_direct(entry.linkname, folder) and Path(folder, entry.linkname).is_file()
    ):
        return None
    try:
        return tarfile.data_filter(entry, folder)
    except tarfile.FilterError:
        return None


def _any_link(entry: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    if not entry.issym():
        return safe_entry(entry, folder)
    return entry.replace(deep=False) if _is_direct(entry.name, folder) else None


def _is_direct(name: str, folder: str) -> bool:
    """Return whether `name` lies below `folder` and no parent folder on the way is a symbolic link.

    Python's own filter resolves links, and before 3.11.13 and 3.12.11 fails on paths of more
    than 4096 bytes, which then lead anywhere (CVE-2025-4517).
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return False
    steps = [path, *path.parents]
    return not any(Path(folder, step).is_symlink() for step in steps[:-1])


def link_stays_inside(link: str, above: int) -> bool:
    """Return whether a link's target stays inside a folder tree: `..` occurs only at its beginning,
    fewer than `above` times.

    As the folders above a link are no links, and other links stay inside too, so does this one.
    """
    to = PurePosixPath(link)
    ups = to.parts.count("..")
    return not to.is_absolute() and ups < above and ".." not in to.parts[ups:]


def _stays(entry: tarfile.TarInfo) -> bool:
    """Return whether a link stays inside the archive's one top entry, which may be renamed."""
    return link_stays_inside(entry.linkname, len(PurePosixPath(entry.name).parent.parts))


OF_THE_ENTRY = frozenset(
    {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR}
    | {errno.EEXIST, errno.EISDIR}
)
"""Errors that come of one entry; any other is the machine's."""

NOT_BETWEEN = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of `copy_file_range` between file systems that it does not serve."""


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Limits of one copy."""

    entries: int = 200_000
    depth: int = 100
    bytes: int = 8 << 30
    """Sum of all sizes, with holes, since what takes a copy further writes them out."""


class TooMuch(RuntimeFailure):
    """A tree is over the limits of a copy; the text says which."""


def check_archive(archive: Path, limits: CopyLimits) -> int:
    """Return the size of all files in an archive, holes counted, before anything of it is
    extracted.

    Raises `TooMuch`, and `RuntimeFailure` if the archive is incomplete.
    """
    size = 0
    try:
        with tarfile.open(archive, "r:") as tar:
            for count, entry in enumerate(tar, 1):
                size += entry.size
                if count > limits.entries:
                    raise TooMuch(f"there are more than {limits.entries} files to copy")
                if size > limits.bytes:
                    raise TooMuch(f"there are more than {limits.bytes >> 20} MiB to copy")
                if len(PurePosixPath(entry.name).parts) > limits.depth + 2:
                    top = entry.name.partition("/")[0]
                    raise TooMuch(
                        f"the folder {top} has more than {limits.depth} folders inside each other"
                    )
    except tarfile.TarError as error:
        raise RuntimeFailure(f"the archive of copied files is incomplete: {error}") from error
    return size


def replace_tree(
    source: Path,
    target: Path,
    *,
    keep: Keep | None = None,
    limits: CopyLimits | None = None,
    link: bool = False,
) -> tuple[str, ...]:
    """Replace the content of the folder `target` by that of the folder `source`.

    Paths that `keep` names stay as `target` has them and are not taken from `source`. Regular
    files, folders and links are copied, with modes and times; their owner may read all of them, and
    write to the folders. With `link`, files of `target` are hard links to those of `source`, with
    their modes: both must belong to this user, and lie on one file system. Returns the paths that
    were not copied, each with its reason. Raises `TooMuch`; `OSError` of the machine (a full disk)
    escapes.
    """
    copier = _Copier(keep or _nothing, limits or CopyLimits(), link=link)
    target.mkdir(parents=True, exist_ok=True)
    copier.clear(target, PurePosixPath())
    copier.copy(source, target, PurePosixPath())
    return tuple(copier.left)


def copy_tree(source: Path, target: Path, top: Path | None = None) -> tuple[str, ...]:
    """Copy the folder `source` of a session to `target`; one that the harness deleted is empty.

    A folder that is reached from the folder `top` (`None` = itself) through a link is empty, too.
    Returns the paths that were not copied, each with its reason.
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


def copy_out(source: Path, target: Path, allowed: Path) -> None:
    """Copy a file or folder that lies in `allowed`; links to files in there become files.

    Entries that are neither regular files nor folders are not copied. Raises `RuntimeFailure` if
    `source` is such an entry or lies elsewhere; `OSError` escapes.
    """
    allowed = allowed.resolve()
    real = Path(os.path.realpath(source, strict=True))  # `resolve` raises no OSError for a loop
    if not real.is_relative_to(allowed):
        raise RuntimeFailure(f"{source} lies outside the session's own folder, and is not copied")
    target.parent.mkdir(parents=True, exist_ok=True)

    def strange(folder: str, names: list[str]) -> set[str]:
        paths = {name: Path(folder, name) for name in names}
        return {name for name, path in paths.items() if not _may_leave(path, allowed)}

    room = CopyLimits().bytes

    def copied(given: str, made: str) -> str:
        nonlocal room
        room -= Path(given).stat().st_size
        if room < 0:
            raise TooMuch(
                f"there are more than {CopyLimits().bytes >> 20} MiB to copy, with the files that "
                "links lead to"
            )
        return str(shutil.copy2(given, made))

    if real.is_dir():
        shutil.copytree(real, target, ignore=strange, dirs_exist_ok=True, copy_function=copied)
    elif _may_leave(real, allowed):
        _copy_file(str(real), target, real.stat())
    else:
        raise RuntimeFailure(f"{source} is not a regular file")


def take_out(source: Path, target: Path, top: Path, most: int) -> tuple[int, tuple[str, ...]]:
    """Copy a file or folder out of a session's folder `top`, at most `most` bytes, holes counted.

    Only links that stay inside the copy are copied. Returns the bytes, and the paths that were not
    copied, each with its reason. Raises `RuntimeFailure` where `source` itself may not be copied;
    then nothing is at `target`. `OSError` of the machine escapes.
    """
    if not source.is_relative_to(top) or ".." in source.relative_to(top).parts:
        raise RuntimeFailure(f"{source} lies outside the session's own folder, and is not copied")
    copier = _Copier(_nothing, CopyLimits(bytes=most), inner_links=True)
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
            raise RuntimeFailure(f"{source.name} is not a regular file or folder")
    except FileNotFoundError:
        raise RuntimeFailure(f"{source.name} does not exist") from None
    except NotADirectoryError as error:
        raise RuntimeFailure(f"{source.name}: {error}") from error
    except TooMuch:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return copier.bytes, tuple(copier.left)


def _may_leave(path: Path, allowed: Path) -> bool:
    """Return whether it is a regular file or folder, or a link to a file of the same session."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        real = Path(os.path.realpath(path))
        return real.is_relative_to(allowed) and real.is_file()
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


class _Copier:
    def __init__(
        self, keep: Keep, limits: CopyLimits, *, inner_links: bool = False, link: bool = False
    ) -> None:
        self.left: list[str] = []
        self.bytes = 0
        self._keep = keep
        self._limits = limits
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
        if len(at.parts) > self._limits.depth:
            raise TooMuch(
                f"the folder {at.parts[0]} has more than {self._limits.depth} folders inside each "
                "other"
            )
        with os.scandir(_readable(source)) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            self._entries += 1
            if self._entries > self._limits.entries:
                raise TooMuch(f"there are more than {self._limits.entries} files to copy")
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
            if self._inner_links and not link_stays_inside(str(to), len(path.parts)):
                self.left.append(f"{path}: a link that leads elsewhere")
            else:
                target.symlink_to(to)
        elif kind == stat.S_IFREG:
            self.copy_file(Path(entry.path), target, facts)
        else:
            self.left.append(f"{path}: neither a regular file nor a folder nor a link")

    def copy_file(self, source: Path, target: Path, facts: os.stat_result) -> None:
        self.bytes += facts.st_size
        if self.bytes > self._limits.bytes:
            raise TooMuch(f"there are more than {self._limits.bytes >> 20} MiB to copy")
        if self._link:
            os.link(source, target)
            return
        mode = stat.S_IMODE(facts.st_mode) & 0o777 | 0o400
        _copy_file(str(source), target, facts, mode)


def _readable(folder: Path) -> Path:
    """Return the folder, after giving its owner the right to read it."""
    mode = folder.lstat().st_mode
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, "the path is not a folder", str(folder))
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


def remove_folders(folders: Iterable[Path]) -> None:
    """Remove folders, also where the harness removed its own permissions on them.

    Raises `RuntimeFailure`, which names a folder that could not be removed.
    """
    for folder in folders:
        if folder.is_symlink() or not folder.is_dir():  # a harness put it there, if it is there
            folder.unlink(missing_ok=True)
            continue
        _remove_tree(folder)
        if folder.exists():
            raise RuntimeFailure(f"the folder {folder} could not be removed")


def _remove_tree(top: Path) -> None:
    """Remove a folder of any depth, as far as that is possible; no link is followed.

    Folders in a folder of `top` are moved up into `top` first: `shutil.rmtree` calls itself for
    each level, and a path has at most 4096 bytes.
    """
    mark, moved = secrets.token_hex(8), count()
    with suppress(OSError):
        top.chmod(0o700)
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        with suppress(OSError):
            with _opened(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as at:
                for entry in list(os.scandir(at)):
                    name = entry.name
                    with suppress(OSError):
                        if not entry.is_dir(follow_symlinks=False):
                            os.unlink(name, dir_fd=at)
                            continue
                        os.chmod(name, 0o700, dir_fd=at)
                        if folder != top:
                            name = f"{mark}-{next(moved)}"
                            os.rename(entry.name, top / name, src_dir_fd=at)
                        waiting.append(top / name)
            if folder != top:
                folder.rmdir()
    with suppress(OSError):
        top.rmdir()


def host_path(path: PurePosixPath, folders: Mapping[str, Path]) -> Path | None:
    """Return the path on this machine of a path inside a runtime; `None` = no shared folder has it.

    `folders` maps the shared folders' paths inside to those on this machine.
    """
    for top, folder in folders.items():
        if path.is_relative_to(top) and ".." not in path.parts:
            return folder / path.relative_to(top)
    return None
