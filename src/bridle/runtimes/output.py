"""Bounded output of a process: its head and tail in memory, all of it in a file.

A harness may print a gigabyte. What is kept in memory is bounded: the first half of the limit and
the last half, with one line between that says how much is missing.
"""

from __future__ import annotations

import os
from pathlib import Path

from bridle.folders import private_folder

LOG_LIMIT = 64 << 20
"""Bytes of one log file; what comes later is left out, and the file says so."""


class Kept:
    """The head and the tail of a stream of bytes."""

    def __init__(self, limit: int) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data[-self._tail_limit :] if self._tail_limit else b""
            # Trimming only at twice the limit keeps the cost per byte constant.
            if len(self._tail) > 2 * self._tail_limit:
                del self._tail[: -self._tail_limit]

    @property
    def truncated(self) -> bool:
        """Return whether bytes between head and tail were dropped."""
        return self._size > self._head_limit + self._tail_limit

    def value(self) -> bytes:
        """Head and tail; between them, if bytes are missing, a line that says how many."""
        tail = self._tail[-self._tail_limit :] if self._tail_limit else b""
        return joined(bytes(self._head), bytes(tail), self._size)


def joined(head: bytes, tail: bytes, size: int) -> bytes:
    """Join the kept head and tail of `size` bytes; a line between them counts the missing bytes."""
    missing = size - len(head) - len(tail)
    note = f"\n[bridle: {missing} bytes left out]\n".encode() if missing > 0 else b""
    return head + note + tail


class LogFile:
    """A file that output is appended to as it comes, up to `LOG_LIMIT` bytes.

    May be shared by two streams. `OSError` (disk full) escapes from `feed`.
    """

    def __init__(self, path: Path, limit: int = LOG_LIMIT) -> None:
        private_folder(path.parent)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._left = limit
        self.full = False
        """Whether the limit is reached, so that nothing more is written."""

    def feed(self, data: bytes) -> None:
        """Append; past the limit nothing but one note is written."""
        if self.full:
            return
        part = data[: self._left]
        self._left -= len(part)
        while part:
            part = part[os.write(self._file, part) :]
        if len(data) > 0 and self._left == 0:
            self.full = True
            os.write(self._file, b"\n[bridle: the log's size limit is reached]\n")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
