"""Runs commands beside a host's SWE-ReX server: `python3 remote_runner.py WHAT ARGUMENT...`.

SWE-ReX runs one command at a time and tells nothing before its end. So `start FOLDER` leaves a
process behind that runs the command of `FOLDER/request` and writes what is said to files there for
the client to read: `out.0`, `out.1`... and `err.N`, base64, and `status`, JSON, which tells how
many there are and, at last, how it ended. A file `over` there means that the client has given up.
`kill MARK SECONDS` ends all processes with a mark, `pack PATH FOLDER [ALLOWED]` makes an archive of
a file or folder, in pieces of base64.

Only the standard library, for any Python from 3.8 on; it knows nothing of Bridle.
"""

from __future__ import annotations

import base64
import io
import json
import os
import selectors
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, Callable  # noqa: UP035 - collections.abc's cannot be read by Python 3.8

PIECE = 256 << 10
"""Bytes in one file for the client."""
FLUSH_S = 0.2
"""How long bytes may wait for company."""
DRAIN_S = 0.5
"""How long pipes that others hold open are read after the end."""
GRACE_S = 1.0
KILL_S = 10.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Stream:
    """Output pipe of a process: its first bytes go to files in pieces, its head and tail stay in
    memory.
    """

    def __init__(self, folder: Path, name: str, streamed: int, limit: int) -> None:
        self._at = folder / name
        self._left = streamed
        self._head_limit, self._tail_limit = (limit + 1) // 2, limit // 2
        self._head, self._tail, self._waiting = bytearray(), bytearray(), bytearray()
        self._size = 0
        self._since = 0.0
        self.pieces = 0

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        if self._left > 0:
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting += data[: self._left]
            self._left -= min(self._left, len(data))
        room = self._head_limit - len(self._head)
        self._head += data[: max(room, 0)]
        rest = data[max(room, 0) :]
        if rest and self._tail_limit:
            self._tail += rest[-self._tail_limit :]
            if len(self._tail) > 2 * self._tail_limit:
                del self._tail[: -self._tail_limit]

    def flush(self, *, all_of_it: bool = False) -> bool:
        """Write out what is due; whether there was something."""
        due = len(self._waiting) >= PIECE or time.monotonic() - self._since >= FLUSH_S
        if not self._waiting or not (due or all_of_it):
            return False
        for start in range(0, len(self._waiting), PIECE):
            put(f"{self._at}.{self.pieces}", base64.b64encode(self._waiting[start : start + PIECE]))
            self.pieces += 1
        self._waiting.clear()
        return True

    def kept(self) -> dict[str, Any]:
        """Its head and tail, base64, and how many bytes it had."""
        tail = bytes(self._tail[-self._tail_limit :]) if self._tail_limit else b""
        said = {
            name: base64.b64encode(part).decode()
            for name, part in (("head", bytes(self._head)), ("tail", tail))
        }
        return {**said, "size": self._size}


def put(path: str, content: bytes) -> None:
    """Write a file so that nobody reads half of it."""
    aside = Path(path + ".part")
    aside.write_bytes(content)
    aside.replace(path)


def run(folder: Path) -> None:
    """Run the command of `folder` and write what comes of it."""
    given = json.loads((folder / "request").read_text())
    out = Stream(folder, "out", given["streamed"], given["output_limit"])
    err = Stream(folder, "err", given["streamed"], given["output_limit"])

    def tell(ended: dict[str, Any] | None) -> None:
        status = {"out": out.pieces, "err": err.pieces, "ended": ended}
        put(str(folder / "status"), json.dumps(status).encode())

    began = time.monotonic()
    ended: dict[str, Any] = {"code": None, "timed_out": False, "failed": None}
    try:
        Path(given["make"] or "/").mkdir(parents=True, exist_ok=True)
        child = started(folder, given)
    except (FileNotFoundError, PermissionError) as error:
        missing = not Path(given["cwd"]).is_dir()
        if missing:
            ended["failed"] = f"working folder {given['cwd']} does not exist"
        else:
            found = isinstance(error, FileNotFoundError)
            ended["code"], why = (127, "not found") if found else (126, "cannot be executed")
            err.feed(f"bridle: {given['argv'][0]}: {why}\n".encode())
    except OSError as error:
        ended["failed"] = str(error)
    else:
        if (folder / "over").exists():
            end(given["mark"], 0, child.pid)
        ended["timed_out"] = followed(child, given, (out, err), lambda: tell(None))
        ended["code"] = child.returncode
    for stream in (out, err):
        stream.flush(all_of_it=True)
    tell({**ended, "out": out.kept(), "err": err.kept(), "seconds": time.monotonic() - began})


def started(folder: Path, given: dict[str, Any]) -> subprocess.Popen[bytes]:
    """The process; its input is a file, or nothing."""
    source = folder / "stdin" if given["stdin"] else Path(os.devnull)
    if given["stdin"]:
        source.write_bytes(base64.b64decode((folder / "input").read_text()))
    env = {"PATH": os.environ.get("PATH", PATH), **given["env"]}
    with source.open("rb") as stdin:
        child: subprocess.Popen[bytes] = subprocess.Popen(
            given["argv"],
            cwd=given["cwd"],
            env=env,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    return child


def followed(
    child: subprocess.Popen[bytes],
    given: dict[str, Any],
    streams: tuple[Stream, Stream],
    tell: Callable[[], None],
) -> bool:
    """Read what a process says until it has ended; whether its time ran out."""
    began, over, timed_out = time.monotonic(), None, False
    most = given["timeout_s"] or float("inf")
    with selectors.DefaultSelector() as reading:
        for pipe, stream in zip((child.stdout, child.stderr), streams):  # noqa: B905 - not in 3.8
            assert pipe is not None
            reading.register(os.dup(pipe.fileno()), selectors.EVENT_READ, stream)
            pipe.close()
        while over is None or (reading.get_map() and time.monotonic() - over < DRAIN_S):
            heard(reading)
            written = [stream.flush() for stream in streams]
            if any(written):
                tell()
            if child.poll() is not None:
                over = over or time.monotonic()
            elif not timed_out and time.monotonic() - began > most:
                timed_out = True
                end(given["mark"], GRACE_S, child.pid)
        for key in [*reading.get_map().values()]:
            os.close(key.fd)
    return timed_out


def heard(reading: selectors.BaseSelector) -> None:
    """Read what can be read; a pipe at its end is closed."""
    for key, _ in reading.select(0.05):
        data = os.read(key.fd, 1 << 16)
        key.data.feed(data)
        if not data:
            reading.unregister(key.fileobj)
            os.close(key.fd)


def marked(mark: str, leader: int = -1) -> set[int]:
    """Living processes with `mark` in their environment or of a leader's group, and descendants."""
    children: dict[int, list[int]] = {}
    open_ends: list[int] = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - only the names are needed
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
            entries = Path("/proc", name, "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if fields[0] in (b"Z", b"X"):
            continue
        children.setdefault(int(fields[1]), []).append(int(name))
        if mark.encode() in entries or leader in (int(fields[2]), int(fields[3])):
            open_ends.append(int(name))
    known: set[int] = set()
    while open_ends:
        pid = open_ends.pop()
        if pid not in known:
            known.add(pid)
            open_ends += children.get(pid, [])
    return known


def end(mark: str, grace_s: float, leader: int = -1) -> None:
    """End all of `marked`: TERM, a grace, then KILL to the last."""
    began, empty, number = time.monotonic(), 0, signal.SIGTERM
    asked: set[int] = set()
    while empty < 2 and time.monotonic() - began < grace_s + KILL_S:
        found = marked(mark, leader)
        empty = 0 if found else empty + 1
        if time.monotonic() - began >= grace_s:
            number, asked = signal.SIGKILL, set()
        for pid in found - asked:
            try:
                os.kill(pid, number)
            except OSError:
                continue
        asked |= found
        time.sleep(0.02 if found else 0)


def pack(path: str, folder: Path, allowed: str) -> int:
    """Archive `path` in pieces, named as it is; how many. `OSError` if it is not there.

    If `allowed` is given, it must lie in that folder, links followed.
    """
    source = Path(path)
    parent = source.parent.resolve()
    if allowed and not str(parent / "").startswith(str(Path(allowed).resolve() / "")):
        message = f"{path} lies outside the session's own folder"
        raise OSError(message)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        add(tar, source, source.name)
    data = made.getbuffer()
    folder.mkdir()
    count = 0
    for start in range(0, len(data), PIECE):
        put(str(folder / f"tar.{count}"), base64.b64encode(data[start : start + PIECE]))
        count += 1
    return count


def add(tar: tarfile.TarFile, source: Path, name: str) -> None:
    """Add a file or folder to an archive. `OSError` of `source`; below it, what fails is left."""
    info = tar.gettarinfo(str(source), name)
    if info is None:  # a socket
        return
    needed = 0o500 if info.isdir() else 0o400
    if (info.isdir() or info.isreg()) and info.mode & needed != needed:
        source.chmod(info.mode | needed)
    if info.isreg():
        with source.open("rb") as file:
            tar.addfile(info, file)
        return
    tar.addfile(info)
    for entry in sorted(source.iterdir()) if info.isdir() else ():
        try:
            add(tar, entry, f"{name}/{entry.name}")
        except OSError:
            continue


def left_behind(work: Callable[[], None]) -> None:
    """Do `work` in a process that nobody waits for."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for at in (0, 1, 2):
        os.dup2(nothing, at)
    try:
        work()
    finally:
        os._exit(0)


def main() -> None:
    """Do what the command line says."""
    what, *given = sys.argv[1:]
    if what == "start":
        left_behind(lambda: run(Path(given[0])))
    elif what == "kill":
        end(given[0], float(given[1]))
    elif what == "pack":
        print(pack(given[0], Path(given[1]), given[2]))  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
