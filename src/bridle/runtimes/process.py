"""One process of this machine: started in its own session, read as it speaks, ended for certain.

Every runtime that runs programs here (also through `bwrap` or a container's command line) and every
installer of a harness goes through `run_process`. Output never blocks the process and never fills
our memory; at a timeout or a cancellation nothing that it started stays.

`asyncio`'s own subprocesses are not used: on Python 3.11 they cost one thread per child. A pidfd
tells the end, where the system has it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Self

from bridle.aio import run_shielded
from bridle.errors import RuntimeFailure
from bridle.runtimes.base import ExecResult
from bridle.runtimes.output import Kept, LogFile
from bridle.runtimes.proc import KILL_S, POLL_S, Leaders, end_all, members

READ_BYTES = 1 << 18
TERM_GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL."""
DRAIN_S = 0.25
"""How long output is still read after the end, if a process left behind holds the pipe open."""
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
    """`NAME=value` entries of `env` that name what this process starts (see `proc`)."""
    grace_s: float = TERM_GRACE_S
    leaders: Leaders = field(default_factory=Leaders)
    """Told of the process, which leads its own group and session; whoever runs many keeps it."""


async def run_process(command: Command) -> ExecResult:
    """Run one process to its end.

    A program that does not exist gives exit code 127 and one that can't be executed 126, as from a
    shell. At `timeout_s`, or when the caller is cancelled, everything that it started is ended.
    Raises `RuntimeFailure` where this machine cannot start it or cannot write the log.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    with _Logs(command) as logs:
        try:
            child = _spawn(command)
        except FileNotFoundError:
            return _not_run(command, NOT_FOUND, "not found", logs)
        except PermissionError:
            return _not_run(command, NOT_EXECUTABLE, "cannot be executed", logs)
        except OSError as error:
            message = f"cannot start {command.argv[0]!r}: {error}"
            raise RuntimeFailure(message) from error
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


def _not_run(command: Command, code: int, why: str, logs: _Logs) -> ExecResult:
    said = f"bridle: {command.argv[0]}: {why}\n".encode()
    if logs.error is not None:
        logs.error.feed(said)
    return ExecResult(
        exit_code=code,
        signal=None,
        timed_out=False,
        stdout=b"",
        stderr=said,
        truncated=False,
        duration_s=0.0,
    )


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
    """`_end`, even if the caller is cancelled, within bounds."""
    try:
        await run_shielded(_end(child, command), timeout_s=command.grace_s + 2 * KILL_S)
    except TimeoutError:
        message = f"process {child.pid} ({command.argv[0]}) does not end after SIGKILL"
        raise RuntimeFailure(message) from None


async def _end(child: subprocess.Popen[bytes], command: Command) -> None:
    """End the process, its group, and whatever carries its marks; collect it."""

    def find() -> set[int]:
        return members(command.marks, Leaders({child.pid}))

    def signal_group(number: signal.Signals) -> None:
        if child.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)

    signal_group(signal.SIGTERM)
    loop = asyncio.get_running_loop()
    patience = loop.time() + command.grace_s
    while child.poll() is None and loop.time() < patience:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(POLL_S)
    signal_group(signal.SIGKILL)
    # What outlives its leader (behind `nsenter`, the program itself) has the rest of the grace.
    await end_all(find, grace_s=max(0.0, patience - loop.time()))
    while child.poll() is None:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(POLL_S)


class _Logs:
    """The log files of one process; stdout and stderr may share one."""

    def __init__(self, command: Command) -> None:
        self.out: LogFile | None = None
        self.error: LogFile | None = None
        self._command = command

    def __enter__(self) -> Self:
        try:
            if self._command.log is not None:
                self.out = self.error = LogFile(self._command.log)
            if self._command.error_log is not None:
                self.error = LogFile(self._command.error_log)
        except OSError as error:
            self.__exit__()
            message = f"cannot write a log: {error}"
            raise RuntimeFailure(message) from error
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.out, self.error):
            if file is not None:
                file.close()


class _Streams:
    """The pipes of one process, served by the event loop's readers."""

    def __init__(self, child: subprocess.Popen[bytes], command: Command, logs: _Logs) -> None:
        self._loop = asyncio.get_running_loop()
        self.stdout = Kept(command.output_limit)
        self.stderr = Kept(command.output_limit)
        self.over = asyncio.Event()
        """Set when the process has ended, or when going on makes no sense."""
        self.failure: OSError | None = None
        self._open: dict[int, IO[bytes]] = {}
        self._all_closed = asyncio.Event()
        if child.stdout is not None:
            self._read(child.stdout, self.stdout, logs.out)
        if child.stderr is not None:
            self._read(child.stderr, self.stderr, logs.error)
        if not self._open:
            self._all_closed.set()
        self._stdin = child.stdin
        given = command.stdin
        self._to_write = memoryview(given if isinstance(given, bytes) else b"")
        if self._stdin is not None:
            os.set_blocking(self._stdin.fileno(), False)
            self._loop.add_writer(self._stdin.fileno(), self._write)

    def _read(self, pipe: IO[bytes], kept: Kept, log: LogFile | None) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._open[pipe.fileno()] = pipe
        self._loop.add_reader(pipe.fileno(), partial(self._readable, pipe, kept, log))

    def _readable(self, pipe: IO[bytes], kept: Kept, log: LogFile | None) -> None:
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
            message = f"cannot write a log: {self.failure}"
            raise RuntimeFailure(message) from self.failure
