"""Processes of this machine: started, read, found again and killed for certain.

Every runtime that runs programs here (also through `bwrap` or a container's command line) and every
installer of a harness goes through `run_process`. Output never blocks the process and never fills
memory: its head and its tail are kept, all of it goes to a log file. At a timeout or a cancellation
nothing that the process started survives. `asyncio`'s own subprocesses are not used: on Python 3.11
they cost one thread per child. A pidfd reports the end, where the system has it.

A process group is not enough to find a session's processes: a daemon leaves it. So every process
that a runtime starts carries marks in its environment (`BRIDLE_SESSION`, `BRIDLE_PLACE`,
`BRIDLE_EXEC`), and its descendants inherit them. A session has several runtimes when it is scored
apart from its agent. The processes of a runtime are those with its marks, those of the process
groups and sessions that we started, and all their descendants. Only a process that clears its
environment, leaves its session and loses its parent escapes this; runtimes that contain do not rely
on it. Without `/proc` (macOS) only the process groups are known.

Containers, control groups and folders carry an owner mark: it names the process that made them in a
form that no later process has. Only a process of the same machine and process namespace can tell
that an owner is dead: a daemon may serve several machines, and a container's processes do not see
those of other containers.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import IO

from bridle.aio import run_shielded
from bridle.errors import RuntimeFailure
from bridle.folders import private_folder
from bridle.runtimes.base import ExecResult

LOG_LIMIT = 64 << 20
"""Bytes of one log file; what comes later is left out, and the file says so."""


class BoundedOutput:
    """The head and the tail of a stream of bytes."""

    def __init__(self, limit: int) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Take more output; only the beginning and the end of all of it are kept."""
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
        """Return whether bytes between the kept beginning and end were dropped."""
        return self._size > self._head_limit + self._tail_limit

    def value(self) -> bytes:
        """Return the kept beginning and end; a line between them says how many bytes are
        missing.
        """
        tail = self._tail[-self._tail_limit :] if self._tail_limit else b""
        return join_output(bytes(self._head), bytes(tail), self._size)


def join_output(head: bytes, tail: bytes, size: int) -> bytes:
    """Return the kept beginning and end of an output of `size` bytes, joined by a line that counts
    the missing bytes.
    """
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
        """True if the limit is reached, so that nothing more is written."""

    def feed(self, data: bytes) -> None:
        """Append bytes to the log file; past its size limit only one note is written."""
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
        """Close the log file; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


MACHINE = Path("/etc/machine-id")


def owner_mark() -> str:
    """Return a mark that identifies this process: its number, its start time, and its machine."""
    return f"{os.getpid()}.{started_at(os.getpid())}.{_machine()}"


def is_dead(mark: str) -> bool:
    """Return whether the process that a mark identifies has certainly ended.

    False for a mark of another machine, and on a machine without `/proc`.
    """
    pid, _, rest = mark.partition(".")
    started, _, machine = rest.partition(".")
    if machine != _machine() or not pid.isdigit() or started == str(None):
        return False
    return started_at(int(pid)) != started


def started_at(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot; `None` if it does not live."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[19] if fields[0] not in ("Z", "X") else None


@cache
def _machine() -> str:
    """Return a name of this machine and this process namespace."""
    machine = socket.gethostname()
    with suppress(OSError):
        machine += MACHINE.read_text().strip()
    space = 0
    with suppress(OSError):
        space = Path("/proc/self/ns/pid").stat().st_ino
    return f"{hashlib.sha256(machine.encode()).hexdigest()[:8]}.{space}"


SESSION_MARK = "BRIDLE_SESSION"
PLACE_MARK = "BRIDLE_PLACE"
EXEC_MARK = "BRIDLE_EXEC"

PROC = Path("/proc")
POLL_S = 0.02
KILL_S = 10.0
"""Time that processes may live on after SIGKILL (uninterruptible I/O) before we say so."""


@dataclass(frozen=True, slots=True)
class Found:
    """One living process, as `/proc/<pid>/stat` tells it."""

    pid: int
    parent: int
    group: int
    session: int


@dataclass(slots=True)
class Leaders:
    """The process groups (and sessions) that one runtime started, by their leader's id."""

    running: set[int] = field(default_factory=set)
    """Leaders that we have not collected: their numbers are ours."""
    ended: set[int] = field(default_factory=set)
    """Collected leaders whose group had other members left."""

    def add(self, pid: int) -> None:
        """Record the number of a process that the runtime started as leader of a new group."""
        self.running.add(pid)

    def collected(self, pid: int) -> None:
        """Record that a process that led a group has ended; its number is free if no group member
        lives.
        """
        self.running.discard(pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, 0)
            self.ended.add(pid)

    def ours(self, pids: Collection[int]) -> set[int]:
        """Return the numbers of process groups that this runtime started, given all living `pids`.

        An ended leader's number that is alive again belongs to another program and is dropped.
        """
        self.ended.difference_update(pids)
        return self.running | self.ended


def running_processes() -> list[Found]:
    """Return every process of this machine that is not a zombie; none without `/proc`."""
    found = []
    try:
        names = os.listdir(PROC)  # noqa: PTH208 - thousands of names, and only their text is needed
    except OSError:
        return []
    for name in names:
        if not name.isdigit():
            continue
        try:
            with Path(f"/proc/{name}/stat").open("rb") as file:
                # The command name stands in parentheses and may hold spaces and parentheses.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields and fields[0] not in (b"Z", b"X"):
            found.append(Found(int(name), int(fields[1]), int(fields[2]), int(fields[3])))
    return found


def is_marked(pid: int, marks: Collection[bytes]) -> bool:
    """Return whether a process was started with all `marks` (`NAME=value`) in its environment.

    False if `marks` is empty.
    """
    if not marks:
        return False
    try:
        with Path(f"/proc/{pid}/environ").open("rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return False
    return all(mark in entries for mark in marks)


def members(marks: Collection[bytes], leaders: Leaders) -> set[int]:
    """Return the living processes that a runtime started: those with all `marks` in their
    environment or in a process group or session of `leaders`, and their descendants.

    This process is never among them.
    """
    own = os.getpid()
    everyone = [each for each in running_processes() if each.pid != own]
    groups = leaders.ours({each.pid for each in everyone})
    children: dict[int, list[int]] = {}
    for each in everyone:
        children.setdefault(each.parent, []).append(each.pid)
    open_ends = [
        each.pid
        for each in everyone
        if each.group in groups or each.session in groups or is_marked(each.pid, marks)
    ]
    known: set[int] = set()
    while open_ends:
        pid = open_ends.pop()
        if pid not in known:
            known.add(pid)
            open_ends.extend(children.get(pid, ()))
    return known


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send the signal to each process; those that have ended are passed over."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


async def end_all(find: Callable[[], set[int]], *, grace_s: float) -> int:
    """Kill all processes that `find` returns: SIGTERM first, SIGKILL to those alive after
    `grace_s`.

    Returns how many were found at first. Raises `RuntimeFailure` naming the processes that outlive
    SIGKILL by ten seconds. `find` runs in a thread.
    """
    first = left = await asyncio.to_thread(find)
    if not first:
        return 0
    loop = asyncio.get_running_loop()
    signal_all(left, signal.SIGTERM)
    patience = loop.time() + grace_s
    while left and loop.time() < patience:
        await asyncio.sleep(POLL_S)
        left = await asyncio.to_thread(find)
    patience = loop.time() + KILL_S
    # One empty look is not enough: a process may fork behind the reader's back and end itself.
    empty = 0
    while empty < 2:
        signal_all(left, signal.SIGKILL)
        if left and loop.time() > patience:
            raise RuntimeFailure(
                f"processes of the session are still alive after SIGKILL: {sorted(left)}"
            )
        await asyncio.sleep(POLL_S if left else 0)
        left = await asyncio.to_thread(find)
        empty = 0 if left else empty + 1
    return len(first)


READ_BYTES = 1 << 18
TERM_GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL."""
DRAIN_S = 0.25
"""Time in which output is still read after the end, while another process holds the pipe open."""
NOT_FOUND = 127
NOT_EXECUTABLE = 126
"""Exit codes that a shell gives for these; we give the same."""


@dataclass(frozen=True, slots=True)
class Command:
    """Command line, environment and limits of a process to run."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    """The whole environment; nothing is inherited."""
    stdin: bytes | Path | None = None
    """`None` = closed (reads end at once); a path is a file that is read."""
    stdout: Path | None = None
    """A file that gets stdout instead of memory and log."""
    stdout_limit: int | None = None
    """Bytes of that file after which the process gets SIGXFSZ."""
    timeout_s: float | None = None
    output_limit: int = 1 << 20
    log: Path | None = None
    """Gets stdout, and stderr too unless `error_log` is given."""
    error_log: Path | None = None
    marks: tuple[bytes, ...] = ()
    """`NAME=value` entries of `env` by which the processes are found again."""
    leaders: Leaders = field(default_factory=Leaders)
    """Records the process as leader of its own group and session."""


async def output_of(command: Command, name: str) -> str:
    """Run a process and return its stdout. `RuntimeFailure` has `name` and its stderr."""
    result = await run_process(command)
    if result.ok:
        return result.stdout.decode(errors="replace").strip()
    said = result.stderr.decode(errors="replace").strip()[-1000:]
    how = f"did not end within {command.timeout_s:g} s" if result.timed_out else said
    raise RuntimeFailure(f"{name}: {how}")


async def run_process(command: Command) -> ExecResult:
    """Run one process to its end.

    A program that does not exist gives exit code 127 and one that can't be executed 126, as from a
    shell. At `timeout_s`, or when the caller is cancelled, everything that it started is ended.
    Raises `RuntimeFailure` where this machine cannot start it or cannot write the log.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    with ExitStack() as files:
        try:
            logs = open_logs(command, files)
        except OSError as error:
            raise RuntimeFailure(f"cannot write the log of a command: {error}") from error
        try:
            child = _spawn(command)
        except FileNotFoundError:
            return _not_run(command, NOT_FOUND, "not found", logs[1])
        except PermissionError:
            return _not_run(command, NOT_EXECUTABLE, "cannot be executed", logs[1])
        except OSError as error:
            raise RuntimeFailure(f"cannot start {command.argv[0]!r}: {error}") from error
        command.leaders.add(child.pid)
        streams = _Streams(child, command, logs)
        timed_out = False
        try:
            try:
                async with asyncio.timeout(command.timeout_s):
                    await _ended(child, streams)
            except TimeoutError:
                timed_out = True
                await _end_for_certain(child, command)
            await streams.drain()
        finally:
            if child.poll() is None:
                await _end_for_certain(child, command)
            streams.close()
            command.leaders.collected(child.pid)
        streams.check()
    code = child.returncode
    return ExecResult(
        exit_code=code if code >= 0 and not timed_out else None,
        signal=-code if code < 0 else None,
        timed_out=timed_out,
        stdout=streams.stdout.value(),
        stderr=streams.stderr.value(),
        truncated=streams.stdout.truncated or streams.stderr.truncated,
        duration_s=loop.time() - began,
    )


def _spawn(command: Command) -> subprocess.Popen[bytes]:
    if not Path(command.cwd).is_dir():
        message = f"cannot start {command.argv[0]!r}: working folder {command.cwd} does not exist"
        raise RuntimeFailure(message)
    with ExitStack() as files:
        stdin: int | IO[bytes] = subprocess.PIPE
        stdout: int | IO[bytes] = subprocess.PIPE
        if command.stdin is None:
            stdin = subprocess.DEVNULL
        elif isinstance(command.stdin, Path):
            stdin = files.enter_context(command.stdin.open("rb"))
        if command.stdout is not None:
            stdout = files.enter_context(command.stdout.open("wb"))
        child = subprocess.Popen(
            list(command.argv),
            cwd=command.cwd,
            env=dict(command.env),
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    if command.stdout_limit is not None:
        with suppress(ProcessLookupError):  # it has ended already
            most = resource.prlimit(child.pid, resource.RLIMIT_FSIZE)[1]
            limits = (command.stdout_limit, most)
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, limits)
    return child


def _not_run(command: Command, code: int, why: str, log: LogFile | None) -> ExecResult:
    said = f"bridle: {command.argv[0]}: {why}\n".encode()
    if log is not None:
        log.feed(said)
    return ExecResult(code, stderr=said)


async def _ended(child: subprocess.Popen[bytes], streams: _Streams) -> None:
    """Return when the process has ended and is collected, or when its log can't be written."""
    try:
        pidfd = os.pidfd_open(child.pid)
    except (AttributeError, OSError):  # macOS, or a kernel without it
        while child.poll() is None and streams.failure is None:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(POLL_S)
        return
    loop = asyncio.get_running_loop()
    try:
        loop.add_reader(pidfd, streams.over.set)
        await streams.over.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    child.poll()


async def _end_for_certain(child: subprocess.Popen[bytes], command: Command) -> None:
    """Call `_end`, even if the caller is cancelled, within a time limit."""
    try:
        await run_shielded(_end(child, command), timeout_s=TERM_GRACE_S + 2 * KILL_S)
    except TimeoutError:
        message = f"process {child.pid} ({command.argv[0]}) does not end after SIGKILL"
        raise RuntimeFailure(message) from None


async def _end(child: subprocess.Popen[bytes], command: Command) -> None:
    """Kill the process, its group, and whatever carries its marks; collect it."""

    def find() -> set[int]:
        return members(command.marks, Leaders({child.pid}))

    def signal_group(number: signal.Signals) -> None:
        if child.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)

    signal_group(signal.SIGTERM)
    loop = asyncio.get_running_loop()
    patience = loop.time() + TERM_GRACE_S
    while child.poll() is None and loop.time() < patience:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(POLL_S)
    signal_group(signal.SIGKILL)
    # What outlives its leader (behind `nsenter`, the program itself) has the rest of the grace.
    await end_all(find, grace_s=max(0.0, patience - loop.time()))
    while child.poll() is None:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(POLL_S)


def open_logs(command: Command, files: ExitStack) -> tuple[LogFile | None, LogFile | None]:
    """Open a command's log files for stdout and stderr, which may be one file; `files`
    closes them.
    """

    def opened(path: Path) -> LogFile:
        file = LogFile(path)
        files.callback(file.close)
        return file

    out = None if command.log is None else opened(command.log)
    return out, out if command.error_log is None else opened(command.error_log)


class _Streams:
    """The pipes of one process, served by the event loop's readers."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        command: Command,
        logs: tuple[LogFile | None, LogFile | None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.stdout = BoundedOutput(command.output_limit)
        self.stderr = BoundedOutput(command.output_limit)
        self.over = asyncio.Event()
        """Set when the process has ended, or its log cannot be written."""
        self.failure: OSError | None = None
        self._open: dict[int, IO[bytes]] = {}
        self._all_closed = asyncio.Event()
        if child.stdout is not None:
            self._read(child.stdout, self.stdout, logs[0])
        if child.stderr is not None:
            self._read(child.stderr, self.stderr, logs[1])
        if not self._open:
            self._all_closed.set()
        self._stdin = child.stdin
        given = command.stdin
        self._to_write = memoryview(given if isinstance(given, bytes) else b"")
        if self._stdin is not None:
            os.set_blocking(self._stdin.fileno(), False)
            self._loop.add_writer(self._stdin.fileno(), self._write)

    def _read(self, pipe: IO[bytes], kept: BoundedOutput, log: LogFile | None) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._open[pipe.fileno()] = pipe
        self._loop.add_reader(pipe.fileno(), partial(self._readable, pipe, kept, log))

    def _readable(self, pipe: IO[bytes], kept: BoundedOutput, log: LogFile | None) -> None:
        try:
            data = os.read(pipe.fileno(), READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            self._close(pipe)
            return
        kept.feed(data)
        if log is not None and self.failure is None:
            try:
                log.feed(data)
            except OSError as error:
                self.failure = error
                self.over.set()

    def _write(self) -> None:
        assert self._stdin is not None
        try:
            self._to_write = self._to_write[
                os.write(self._stdin.fileno(), self._to_write[:65536]) :
            ]
        except (BlockingIOError, InterruptedError):
            return
        except BrokenPipeError:  # it does not want to read: its own affair
            self._to_write = memoryview(b"")
        if not self._to_write:
            self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin is not None:
            self._loop.remove_writer(self._stdin.fileno())
            self._stdin.close()
            self._stdin = None

    def _close(self, pipe: IO[bytes]) -> None:
        self._loop.remove_reader(pipe.fileno())
        del self._open[pipe.fileno()]
        pipe.close()
        if not self._open:
            self._all_closed.set()

    async def drain(self) -> None:
        """Read what is still in the pipes; a process left behind may hold them open."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._all_closed.wait()

    def close(self) -> None:
        self._close_stdin()
        for pipe in list(self._open.values()):
            self._close(pipe)

    def check(self) -> None:
        """Raise `RuntimeFailure` if the log could not be written."""
        if self.failure is not None:
            raise RuntimeFailure(
                f"cannot write the log of a command: {self.failure}"
            ) from self.failure
