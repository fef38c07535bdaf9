"""Trajectory files, one per run: in a folder, or in any file system of fsspec (`s3://...`).

A file is complete before its session's row names it: in a folder it is written under another name
and renamed, and object stores show only complete objects. The caller passes the codec
(`bridle.bridges.parquet`).
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
from pathlib import Path
from typing import Final, Protocol

from bridle.aio import Checkup
from bridle.errors import StoreError, boundary
from bridle.folders import check_room, private_file, private_folder
from bridle.trajectory.sample import Trajectory


class Codec(Protocol):
    """Serialization of trajectories."""

    def pack(self, trajectory: Trajectory) -> bytes: ...

    def unpack(self, packed: bytes) -> Trajectory: ...

    def arrow(self, trajectory: Trajectory) -> bytes:
        """Return an Arrow stream of its traces, one row each."""


class UnwritableError(StoreError):
    """A trajectory cannot be written, and a retry would fail too."""


LASTING: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR})
"""Errors of a file system that are not temporary."""


class TrajectoryFiles:
    """Trajectory files below a root. All failures are `StoreError`; threads do the I/O."""

    def __init__(self, root: str | Path, codec: Codec) -> None:
        self.root = str(root)
        self.codec = codec
        self._local = None if "://" in self.root else Path(self.root)
        self.check = Checkup(self._check)
        """Raises `StoreError` while a local root has less than 1 MiB of free disk."""

    def name(self, run_id: str) -> str:
        """Return the path of a run's trajectory, relative to the root."""
        return f"{hashlib.sha256(run_id.encode()).hexdigest()[:2]}/{run_id}.parquet"

    async def write(self, name: str, trajectory: Trajectory) -> int:
        """Write a trajectory, and return its size in bytes."""
        return await asyncio.to_thread(self._write, name, trajectory)

    async def read(self, name: str) -> Trajectory:
        return await asyncio.to_thread(self._read, name)

    async def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        await asyncio.to_thread(self._remove, name)

    async def _check(self) -> None:
        if self._local is not None:
            with boundary(StoreError, f"{self.root}: cannot write"):
                await asyncio.to_thread(check_room, private_folder(self._local))

    def _write(self, name: str, trajectory: Trajectory) -> int:
        doing = f"{self.root}/{name}: cannot write"
        try:
            packed = self.codec.pack(trajectory)
        except Exception as error:  # a codec may raise any error
            raise UnwritableError(f"{doing}: {type(error).__name__}: {error}") from error
        try:
            with boundary(StoreError, doing):
                self._put(name, packed)
        except StoreError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in LASTING:
                raise UnwritableError(str(error)) from cause
            raise
        return len(packed)

    def _put(self, name: str, packed: bytes) -> None:
        if self._local is None:
            import fsspec

            with fsspec.open(f"{self.root}/{name}", "wb") as file:
                file.write(packed)
            return
        path = self._local / name
        private_folder(path.parent)
        aside = private_file(path.with_name(f"{path.name}.part"))
        try:
            aside.write_bytes(packed)
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)  # it takes space
            raise

    def _read(self, name: str) -> Trajectory:
        with boundary(StoreError, f"{self.root}/{name}: cannot read"):
            if self._local is not None:
                return self.codec.unpack((self._local / name).read_bytes())
            import fsspec

            with fsspec.open(f"{self.root}/{name}", "rb") as file:
                return self.codec.unpack(file.read())

    def _remove(self, name: str) -> None:
        with boundary(StoreError, f"{self.root}/{name}: cannot remove"):
            if self._local is not None:
                (self._local / name).unlink(missing_ok=True)
                return
            import fsspec

            system, path = fsspec.core.url_to_fs(f"{self.root}/{name}")
            if system.exists(path):
                system.rm(path)
