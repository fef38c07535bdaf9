"""The door of a sandbox for a harness on the host: its commands go in, nothing else does.

The harness finds a `bash` and a `sh` of ours ahead of its PATH. Each hands the command line, its
working folder and its three open streams over a Unix socket; the command runs in the sandbox with
those very streams, so what it prints, reads and is signalled never passes through us, and a shim
that the harness ends (its own time limit) ends the command. What the harness was started with, its
key above all, stays outside; a variable that it sets for a command goes along.

`container` is for programs that bring a Docker client's command line (`run`, `exec`, `stop`, `rm`):
`exec` is a command in the sandbox; the others have nothing to do and say an id.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import shutil
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Self

from bridle.aio import Nursery
from bridle.errors import RuntimeFailure, boundary
from bridle.runtimes.base import ExecResult, Mount, Shares

PROGRAMS = "bin"
CONTAINER = "container"
SOCKET = "socket"
CLIENT = "client.py"
MOST_BYTES = 4 << 20
"""Of one command line with its environment; Linux takes 2 MiB."""
MOST_AT_ONCE = 128
"""Commands of one session at once; more wait."""
WAIT_S = 0.05
"""How long it waits for a free file number."""
HEAR_S = 30.0
"""How long a command line may take to arrive."""
OWN = frozenset(
    (
        "HOME",
        "PATH",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "SHELL",
        "TMPDIR",
        "USER",
        "LOGNAME",
        "_",
        "HOSTNAME",
    )
)
"""Variables that are the harness's place's, and have values of their own in the sandbox."""
STREAMS = (stat.S_ISFIFO, stat.S_ISSOCK, stat.S_ISCHR, stat.S_ISREG)
"""What a stream may be: an open folder would lead out of the sandbox."""
SHIM = """#!/bin/sh
exec {python} -I -S {seen}/{client} {seen}/{socket} {name} "$@"
"""


def python() -> Path:
    """The Python that the shims run with: the one below any virtual environment."""
    return Path(sys.executable).resolve()


def mounts_of(folder: Path, seen: str) -> list[Mount]:
    """What the harness's place must see for a door in `folder` that it sees at `seen`."""
    mounts = [Mount(folder, seen)]
    if sys.base_prefix != "/usr":
        mounts.append(Mount(Path(sys.base_prefix), sys.base_prefix))
    return mounts


class Door:
    """Takes command lines for one sandbox; an async context manager. The event loop's own."""

    def __init__(self, sandbox: Shares, folder: Path, *, seen: str, shared: str) -> None:
        """`folder` is made here; the harness sees it at `seen`, and the work folder at `shared`."""
        self.seen = seen
        self.failure: RuntimeFailure | None = None
        """The first that the sandbox had: the harness then heard of a command that never ran."""
        self.limit: str | None = None
        """The last limit of the sandbox that a command reached."""
        self.withheld: Mapping[str, str] = {}
        """Variables that the harness was started with: with these values they stay outside."""
        self._sandbox = sandbox
        self._folder = folder
        self._shared = shared
        self._room = asyncio.Semaphore(MOST_AT_ONCE)
        self._nursery = Nursery(self._unforeseen)
        self._listener: socket.socket | None = None

    async def __aenter__(self) -> Self:
        """Listen. `RuntimeFailure` where the folder can't be made."""
        with boundary(RuntimeFailure, "cannot open a door for the harness"):
            await asyncio.to_thread(self._make)
        await self._nursery.__aenter__()
        self._nursery.start(self._accept(), name="sandbox-door")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Shut it; commands that still run are ended."""
        try:
            await self._nursery.cancel()
        finally:
            if self._listener is not None:
                self._listener.close()
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    @property
    def programs(self) -> str:
        """The folder that belongs ahead of PATH, as the harness sees it."""
        return f"{self.seen}/{PROGRAMS}"

    def _make(self) -> None:
        programs = self._folder / PROGRAMS
        programs.mkdir(parents=True)
        (self._folder / CLIENT).write_bytes(Path(__file__).with_name("door_client.py").read_bytes())
        for path in (programs / "bash", programs / "sh", self._folder / CONTAINER):
            text = SHIM.format(
                python=shlex.quote(str(python())),
                seen=shlex.quote(self.seen),
                client=CLIENT,
                socket=SOCKET,
                name=path.name,
            )
            path.write_text(text)
            path.chmod(0o755)
        listener = socket.socket(socket.AF_UNIX)
        at = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # Through the folder's number: a socket's own path may have no more than 107 bytes.
            listener.bind(f"/proc/self/fd/{at}/{SOCKET}")
            listener.listen(MOST_AT_ONCE)
        except OSError:
            listener.close()
            raise
        finally:
            os.close(at)
        listener.settimeout(0)
        self._listener = listener

    async def _accept(self) -> None:
        loop, listener = asyncio.get_running_loop(), self._listener
        assert listener is not None
        while True:
            await self._room.acquire()
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # too many files are open, which commands that end will close
                self._room.release()
                await asyncio.sleep(WAIT_S)
                continue
            self._nursery.start(self._serve(client), name="sandbox-command")

    async def _serve(self, client: socket.socket) -> None:
        streams: list[int] = []
        with client:
            client.settimeout(0)
            try:
                # The harness may send anything: what is no request is not answered.
                with suppress(OSError, ValueError, LookupError, TimeoutError):
                    async with asyncio.timeout(HEAR_S):
                        body = await _heard(client, streams)
                    answer = await self._answered(client, body, streams)
                    # Before the answer: who waits for it then reads to the end of a pipe.
                    _close(streams)
                    await asyncio.get_running_loop().sock_sendall(client, f"{answer}\n".encode())
            finally:
                _close(streams)
                self._room.release()

    async def _answered(self, client: socket.socket, body: bytes, streams: Sequence[int]) -> str:
        """Run what a client asks for, until it ends or the client does; the answer's line.

        `ValueError` or `LookupError` for what asks for nothing.
        """
        cwd, count, *rest = body.decode(errors="surrogateescape").split("\0")
        words, variables = rest[: int(count)], rest[int(count) :]
        argv, env = words, self._given(variables)
        if words[0] == CONTAINER:
            cwd, argv, more = container_command(words[1:])
            env |= more
        if not argv:
            raise ValueError(words)
        given = (streams[0], streams[1], streams[2])
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self._run(argv, env, self._inside(cwd), given))
            gone = group.create_task(_gone(client))
            await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
            running.cancel()
            gone.cancel()
        if running.cancelled():
            return "failed"
        result = running.result()
        if isinstance(result, RuntimeFailure):
            if not _is_too_long(result):
                self.failure = self.failure or result
            return f"failed {' '.join(str(result).split())}"
        self.limit = result.limit or self.limit
        return f"exit {result.exit_code}" if result.signal is None else f"signal {result.signal}"

    async def _run(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, streams: tuple[int, int, int]
    ) -> ExecResult | RuntimeFailure:
        try:
            with boundary(RuntimeFailure, "running a command of the harness"):
                return await self._sandbox.attach(argv, env=env, cwd=cwd, streams=streams)
        except RuntimeFailure as error:
            return error

    def _given(self, variables: Sequence[str]) -> dict[str, str]:
        """The variables that a command gets of those that its shim had."""
        named = (entry.partition("=") for entry in variables)
        return {
            name: value
            for name, _, value in named
            if name.isidentifier()
            and name not in OWN
            and not name.startswith("BRIDLE_")
            and self.withheld.get(name) != value
        }

    def _inside(self, cwd: str) -> str:
        """A working folder of the harness as the sandbox has it; its work folder for any other."""
        path = PurePosixPath(cwd)
        if path.is_relative_to(self._shared):
            return str(PurePosixPath(self._sandbox.shared_at, path.relative_to(self._shared)))
        return self._sandbox.workdir

    def _unforeseen(self, error: BaseException) -> None:
        message = f"the door of a sandbox: {error!r}"
        self.failure = self.failure or RuntimeFailure(message)


def container_command(words: Sequence[str]) -> tuple[str, list[str], dict[str, str]]:
    """Folder, command and variables of `exec [-w FOLDER] [-e NAME=VALUE]... ID COMMAND...`.

    Raises `ValueError` for an option that is not known, `IndexError` for one without its value.
    """
    cwd, env, rest = "", {}, list(words[1:])
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        match option:
            case "-w" | "--workdir":
                cwd = rest.pop(0)
            case "-e" | "--env":
                name, _, env[name] = rest.pop(0).partition("=")
            case "-i" | "--interactive":
                pass
            case _:
                raise ValueError(option)
    return cwd, rest[1:], env


async def _heard(client: socket.socket, streams: list[int]) -> bytes:
    """A request; its open files are put into `streams`. `ValueError` for one that is none."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(client.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(client.fileno())
    head, found, _, _ = socket.recv_fds(client, 4, 3)
    streams += found
    if len(found) != 3 or not all(_is_stream(each) for each in found):
        raise ValueError(found)
    head += await _exactly(client, 4 - len(head))
    size = int.from_bytes(head, "big")
    if size > MOST_BYTES:
        raise ValueError(size)
    return await _exactly(client, size)


async def _exactly(client: socket.socket, size: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        more = await loop.sock_recv(client, size - len(data))
        if not more:
            raise ValueError(size)
        data += more
    return data


async def _gone(client: socket.socket) -> None:
    """Return when the client has ended; it says nothing more before that."""
    with suppress(OSError):
        while await asyncio.get_running_loop().sock_recv(client, 4096):
            pass


def _is_too_long(failure: RuntimeFailure) -> bool:
    """Whether the system takes no such command line, wherever it runs."""
    cause = failure.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.E2BIG


def _is_stream(number: int) -> bool:
    mode = os.fstat(number).st_mode
    return any(kind(mode) for kind in STREAMS)


def _close(streams: list[int]) -> None:
    while streams:
        with suppress(OSError):
            os.close(streams.pop())
