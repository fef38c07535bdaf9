"""Base classes of runtimes: running a command, copying files in and out, reaching the gateway.

`BaseRuntime` has what all kinds share. Files of an `Archived` runtime go in and out as archives
that a `tar` inside writes or reads, so this process never follows a link that a harness planted. A
`Contained` runtime also has limits, and one address inside that is forwarded to the gateway.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import ClassVar, Final, Generic, Literal, Self, TypeVar, Unpack
from urllib.parse import urlsplit, urlunsplit

from bridle.aio import Nursery, run_shielded
from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure, boundary
from bridle.runtimes.base import ExecOptions, ExecResult, Mount
from bridle.runtimes.confinement import ResourceLimits, first_reached
from bridle.runtimes.files import (
    ROOT,
    CopyLimits,
    Keep,
    TooMuch,
    check_archive,
    copy_tree,
    host_path,
    pack,
    pack_bytes,
    remove_folders,
    replace_tree,
    size_of,
    take_out,
    unpack,
)
from bridle.runtimes.process import EXEC_MARK, KILL_S, PLACE_MARK, POLL_S, SESSION_MARK, Command

PACK = """
ulimit -f "$3" || exit
case $(tar --version 2>&1) in *GNU*) holes=-S ;; esac
exec tar $holes -cf - -C "$1" -- "$2"
"""
"""Makes an archive of at most `$3` KiB; where `tar` can, holes of a file take no room in it."""
EXTRACT = 'umask 022; mkdir -p -- "$1" && exec tar --no-same-owner -p -U -xf - -C "$1"'
END = """
marked() { for at in /proc/[0-9]*; do while IFS= read -r -d '' word; do
  [ "$word" = "$1" ] && echo "${at#/proc/}" && break; done < "$at/environ"; done 2>/dev/null; }
found=$(marked "$1"); [ -z "$found" ] && exit
kill -TERM $found
for i in {1..40}; do sleep 0.05; found=$(marked "$1"); [ -z "$found" ] && exit; done
while [ -n "$found" ]; do kill -KILL $found; sleep 0.02; found=$(marked "$1"); done
true
"""
"""Kills all processes with a mark in their environment, after two seconds of grace."""
EMPTY = """
shopt -s dotglob nullglob
all=(*)
for ((at = 0; at < ${#all[@]}; at += 500)); do rm -rf -- "${all[@]:at:500}" || exit; done
"""
"""Empties the folder that it is run in."""
ENTER = 'mkdir -p -- "$1" 2>/dev/null; cd -- "$1" || exit 125; shift; exec "$@"'
"""Bash code that runs a command in a folder, which is made if it is missing."""
CHANGED = 1
"""Exit code of a `tar` that saw files change while it read them."""
GATEWAY_PORT = 4000
LAST_S = 0.5
"""Time in which a sandbox's first process ends after a command that was killed with it."""

LIMITS: Final = {"memory_mb": 4 << 10, "storage_mb": 10 << 10, "max_processes": 512}
"""Default limits of a `RuntimeSpec`."""
DOWNLOAD_BYTES: Final = 256 << 20
"""Bytes that may be copied out of a session, for artifacts and evaluators together."""
TOO_MUCH: Final = f"at most {DOWNLOAD_BYTES >> 20} MiB of files may be copied out of a session"
FRAME_BYTES: Final = 1 << 20
"""Headers of an archive beside its contents; what needs more is cut."""


class BaseRuntime(ABC):
    """One session's runtime; each kind adds what is missing of `base.Runtime`."""

    contains: bool
    workdir: str
    home: str
    submittable: ClassVar[str] = ""
    """Keyword arguments that a submitted task may give, as `bridle.server.settings` reads them."""

    def __init__(
        self, spec: RuntimeSpec, session_id: str, scratch: Path, mounts: Sequence[Mount] = ()
    ) -> None:
        self.check(spec)
        self._spec = spec
        self._session_id = session_id
        self._scratch = scratch
        self._mounts = tuple(mounts)
        self._execs = 0
        self._own_marks = {SESSION_MARK: session_id, PLACE_MARK: secrets.token_hex(8)}
        """Marks of all processes here, and of none in another runtime of the session."""
        self._usable = False
        """Between `start` and `stop`."""

    @classmethod  # noqa: B027 - not every kind refuses something
    def check(cls, spec: RuntimeSpec) -> None:
        """Raise `ConfigError` naming what `spec` lacks, or asks for and this runtime cannot
        give.
        """

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        **options: Unpack[ExecOptions],
    ) -> ExecResult:
        """Run a command inside, see `Runtime.exec`; makes the work folder again if it is gone."""
        argv = ("bash", "-o", "pipefail", "-c", command) if isinstance(command, str) else command
        path = str(PurePosixPath(self.workdir, cwd or ""))
        return await self._run(Command(argv, path, env or {}, **options))

    @abstractmethod
    async def start(self) -> None:
        """Start the runtime; `exec` works afterwards."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill every process inside; idempotent."""

    @abstractmethod
    async def _run(self, inside: Command) -> ExecResult:
        """Run a command whose folder and program are those of the runtime."""

    @property
    def _mark(self) -> bytes:
        return f"{SESSION_MARK}={self._session_id}".encode()

    def _marks(self) -> dict[str, str]:
        """Return the variables that mark the processes of the next command."""
        self._execs += 1
        return {**self._own_marks, EXEC_MARK: f"{self._session_id}/{self._execs}"}

    def _marked(self, command: Command, marks: Mapping[str, str]) -> Command:
        """Return the command with `marks` in its environment, by which its processes are found."""
        entries = tuple(f"{name}={value}".encode() for name, value in marks.items())
        return replace(command, env={**command.env, **marks}, marks=entries)

    def _check_mounts(self) -> None:
        for mount in self._mounts:
            if not mount.source.exists():
                raise RuntimeFailure(f"the folder to mount does not exist: {mount.source}")

    def _must_be_usable(self) -> None:
        if not self._usable:
            message = f"the runtime of session {self._session_id} is not started, or was stopped"
            raise RuntimeFailure(message)


class OnThisMachine(BaseRuntime):
    """A runtime whose files lie in the session's scratch folder."""

    folders: tuple[str, ...] = ("work", "home", "tmp")
    """Folders of the session below its scratch folder, which it may write to."""

    @property
    @abstractmethod
    def _work_folder(self) -> Path:
        """Return the work folder's path on this machine."""

    async def copied(self, scratch: Path) -> Self:
        """End this runtime's processes and start another in `scratch` with copies of its files."""
        await self.kill()
        copy = type(self)(self._spec, self._session_id, scratch, self._mounts)
        with boundary(RuntimeFailure, f"cannot copy session {self._session_id}"):
            for name in self.folders:
                await asyncio.to_thread(copy_tree, self._scratch / name, scratch / name)
        await copy.start()
        return copy

    async def snapshot(self, folder: Path) -> tuple[str, ...]:
        """Copy the work folder to `folder`; returns the paths that were left out, with reasons."""
        with boundary(RuntimeFailure, "cannot copy the work folder"):
            return await asyncio.to_thread(copy_tree, self._work_folder, folder, self._scratch)

    async def put_work(self, folder: Path, keep: Keep) -> tuple[str, ...]:
        self._must_be_usable()
        with boundary(RuntimeFailure, "cannot fill the work folder"):
            return await asyncio.to_thread(replace_tree, folder, self._work_folder, keep=keep)


class Archived(BaseRuntime):
    """A runtime whose files go in and out as archives of `tar`, which runs inside."""

    _download_room = DOWNLOAD_BYTES
    """Bytes that may still be copied out."""
    _owner = ROOT

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder into the runtime; modes and symbolic links are kept."""
        with (
            boundary(RuntimeFailure, f"cannot upload {source} to {target}"),
            self._aside() as aside,
        ):
            archive = Path(aside, "in.tar")
            path = PurePosixPath(self.workdir, target)
            folder = await asyncio.to_thread(pack, source, path, archive, self._owner)
            await self._put(archive, folder)

    async def write(self, target: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file inside the runtime; a link at `target` is replaced, not followed."""
        path = PurePosixPath(self.workdir, target)
        with boundary(RuntimeFailure, f"cannot write {target}"):
            await self._put(pack_bytes(content, path.name, mode, self._owner), path.parent)

    async def download(
        self, source: str, target: Path, *, most: int | None = None
    ) -> tuple[str, ...]:
        """Copy a file or folder to the host (entry by entry, or by an archive); see
        `Runtime.download`.

        `RuntimeFailure` if more than `DOWNLOAD_BYTES`, with holes, would come out in one session.
        """
        path, room = PurePosixPath(self.workdir, source), self._download_room
        too_much = TOO_MUCH
        if most is not None and most < room:
            room, too_much = most, f"{source} has more than {most >> 20} MiB"
        self._must_be_usable()
        left: tuple[str, ...] = ()
        with boundary(RuntimeFailure, f"cannot download {source}"):
            try:
                here = self._here(path)
                if here is None:
                    size = await self._fetch(path, target, CopyLimits(bytes=room))
                else:
                    size, left = await asyncio.to_thread(
                        take_out, here, target, self._scratch, room
                    )
            except TooMuch as error:
                raise RuntimeFailure(f"{too_much}: {error}") from error
        self._download_room -= size
        return left

    def _here(self, path: PurePosixPath) -> Path | None:
        """Return the path on this machine of `path` inside; `None` = it comes as an archive."""
        del path
        return None

    async def _fetch(
        self,
        path: PurePosixPath,
        target: Path,
        limits: CopyLimits,
        *,
        any_link: bool = False,
        only: Keep | None = None,
    ) -> int:
        """Copy a file or folder out in an archive (`files.unpack`); returns its size in bytes."""
        with self._aside() as aside:
            archive = Path(aside, "out.tar")
            try:
                await self._get(path, archive, limits.bytes)
            except RuntimeFailure as error:
                if size_of(archive) >= limits.bytes:
                    raise TooMuch(
                        f"there are more than {limits.bytes >> 20} MiB to copy"
                    ) from error
                raise
            size = await asyncio.to_thread(check_archive, archive, limits)
            await asyncio.to_thread(
                unpack, archive, path.name, target, any_link=any_link, only=only
            )
            return size

    async def snapshot(self, folder: Path) -> tuple[str, ...]:
        """Copy the work folder to `folder`; of what an archive leaves out nothing is known."""
        await self.copy_kept(folder)
        return ()

    async def copy_kept(self, folder: Path, keep: Keep | None = None) -> None:
        """Copy the files and links of the work folder that `keep` names (`None` = all) to `folder`.

        Entries that lead elsewhere, or are neither files, folders nor links, are left out.
        """
        path = PurePosixPath(self.workdir)
        with boundary(RuntimeFailure, "cannot copy the work folder"):
            await self._fetch(path, folder, CopyLimits(), any_link=True, only=keep)

    async def put_work(self, folder: Path, keep: Keep) -> tuple[str, ...]:
        with (
            boundary(RuntimeFailure, "cannot fill the work folder"),
            tempfile.TemporaryDirectory(prefix="bridle-work-", dir=folder.parent) as aside,
        ):
            whole = Path(aside, "work")
            await self.copy_kept(whole, keep)
            left = await asyncio.to_thread(replace_tree, folder, whole, keep=keep, link=True)
            emptied = await self.exec(EMPTY)
            if not emptied.ok:
                raise RuntimeFailure(emptied.stderr.decode(errors="replace").strip())
            await self.upload(whole, ".")
        return left

    async def _put(self, archive: bytes | Path, folder: PurePosixPath) -> None:
        """Extract an archive in a folder inside, which is made."""
        argv = ["bash", "-c", EXTRACT, "bash", str(folder)]
        result = await self._run(Command(argv=argv, env={}, cwd="/", stdin=archive))
        if not result.ok:
            raise RuntimeFailure(result.stderr.decode(errors="replace").strip() or "tar failed")

    async def _get(self, path: PurePosixPath, archive: Path, most: int) -> None:
        """Make an archive of a file or folder inside, of at most `most` bytes and headers.

        `RuntimeFailure` if it would be larger, or `tar` failed.
        """
        room = str((most + FRAME_BYTES) >> 10)
        argv = ["bash", "-c", PACK, "bash", str(path.parent), path.name, room]
        result = await self._run(Command(argv=argv, env={}, cwd="/", stdout=archive))
        if not result.ok and result.exit_code != CHANGED:
            raise RuntimeFailure(result.stderr.decode(errors="replace").strip())

    def _aside(self) -> tempfile.TemporaryDirectory[str]:
        self._must_be_usable()
        return tempfile.TemporaryDirectory(dir=self._scratch / "aside")

    def inside(self, path: Path) -> str:
        """Return the path inside the runtime of a mounted host path; other paths unchanged."""
        for mount in self._mounts:
            if path.is_relative_to(mount.source):
                return str(PurePosixPath(self._target_of(mount), path.relative_to(mount.source)))
        return str(path)

    def _target_of(self, mount: Mount) -> str:
        return mount.target


@dataclass(slots=True)
class RunningSandbox:
    """The processes of a contained runtime, from one start to their end."""

    resources: AsyncExitStack = field(default_factory=AsyncExitStack, kw_only=True)
    reached: str | None = field(default=None, kw_only=True)
    """The limit that ended it."""
    let_go: bool = field(default=False, kw_only=True)
    """True if we kill it, or have killed it."""


RunningT = TypeVar("RunningT", bound=RunningSandbox)


class Contained(Archived, Generic[RunningT]):
    """A runtime whose paths and network are its own."""

    contains = True
    kind: ClassVar[str]
    """Its name in messages."""
    start_s: ClassVar[float]
    stop_s: ClassVar[float]

    def __init__(
        self, spec: RuntimeSpec, session_id: str, scratch: Path, mounts: Sequence[Mount] = ()
    ) -> None:
        given = {name: getattr(spec, name) or limit for name, limit in LIMITS.items()}
        super().__init__(spec.model_copy(update=given), session_id, scratch, mounts)
        self._memory_bytes = given["memory_mb"] << 20
        self._storage_bytes = given["storage_mb"] << 20
        self.workdir = str(PurePosixPath("/work", spec.workdir or ""))
        self._lock = asyncio.Lock()
        self._address = ("127.0.0.1", GATEWAY_PORT)
        """The gateway's address inside."""
        self._target: tuple[str, int] | None = None
        """The gateway's address on this machine."""
        self._forwarder: Forwarder | None = None
        self._up: RunningT | None = None

    # ---- start and end

    async def _running(self) -> RunningT:
        """Return the running processes, started now if there are none."""
        async with self._lock:
            self._must_be_usable()
            if self._up is not None and not self._lives(self._up):
                await self._let_go(self._up)
                self._up = None
            if self._up is None:
                # Not to be cancelled: the processes would have no owner.
                await run_shielded(self._start_up(), timeout_s=2 * self.start_s)
            assert self._up is not None
            return self._up

    async def _start_up(self) -> None:
        with boundary(RuntimeFailure, f"cannot start the {self.kind} of {self._session_id}"):
            up = await self._begin()
            try:
                if self._forwards():
                    forwarder = Forwarder(await self._listen(up))
                    self._forwarder = await up.resources.enter_async_context(forwarder)
                    self._forwarder.target = self._target
                nursery = await up.resources.enter_async_context(Nursery(_ignored))
                nursery.start(self._watch(up), name=f"{self.kind}-watch")
            except BaseException:
                await run_shielded(self._let_go(up), timeout_s=self.stop_s)
                raise
            self._up = up

    @abstractmethod
    async def _begin(self) -> RunningT:
        """Start the first process."""

    @abstractmethod
    async def _listen(self, up: RunningT) -> socket.socket:
        """Return a listener at `_address` inside."""

    @abstractmethod
    async def _watch(self, up: RunningT) -> None:
        """Kill it when it exceeds a limit that the kernel does not enforce."""

    def _lives(self, up: RunningT) -> bool:
        """Return whether the first process still runs, as far as that is known here."""
        del up
        return True

    @abstractmethod
    async def _let_go(self, up: RunningT) -> None:
        """Kill all its processes and close its resources."""

    @abstractmethod
    async def _remove(self) -> None:
        """Delete everything but the empty scratch folder; all processes are dead."""

    async def kill(self) -> None:
        """Kill every process inside, also when the caller is cancelled."""
        await run_shielded(self._kill(), timeout_s=self.stop_s)

    async def _kill(self) -> None:
        async with self._lock:
            up, self._up = self._up, None
            if up is not None:
                await self._let_go(up)

    async def stop(self) -> None:
        """Kill all processes and delete the files; the empty scratch folder remains."""
        self._usable = False
        try:
            await self.kill()
        finally:
            await run_shielded(self._remove(), timeout_s=self.stop_s)

    @property
    def limits(self) -> Literal["kernel", "watched"]:
        """Return who enforces the memory and process limits: control groups (`kernel`) or polling
        (`watched`).
        """
        return "kernel"

    def gateway_url(self, url: str) -> str:
        """Return the gateway's URL with an address inside the runtime that is forwarded to the
        gateway.
        """
        if not self._forwards():
            return url
        parts = urlsplit(url)
        target = (parts.hostname or "127.0.0.1", parts.port or 80)
        if self._target not in (None, target):
            message = f"a {self.kind} has one gateway: {self._target}, not also {target}"
            raise RuntimeFailure(message)
        self._target = target
        if self._forwarder is not None:
            self._forwarder.target = target
        return urlunsplit(parts._replace(netloc=f"{self._address[0]}:{self._address[1]}"))

    def _forwards(self) -> bool:
        """Return whether this process forwards connections from the sandbox to the gateway."""
        return self._spec.network == "gateway_only"


class Sandbox(OnThisMachine, Contained[RunningT]):
    """A contained runtime over folders of this machine; its processes end with the first one."""

    home = "/home/agent"
    scraps: ClassVar[tuple[str, ...]] = ("aside",)
    """Folders below the scratch folder that are not the session's."""

    async def start(self) -> None:
        """Start the sandbox, so that `exec` works. `RuntimeFailure` says what is missing."""
        self._check_mounts()
        with boundary(RuntimeFailure, f"cannot make the folders of session {self._session_id}"):
            await asyncio.to_thread(self._make_folders)
        self._usable = True
        await self._running()

    def _make_folders(self) -> None:
        for name in (*self.folders, *self.scraps):
            (self._scratch / name).mkdir(exist_ok=True)
            (self._scratch / name).chmod(0o700)

    async def _remove(self) -> None:
        folders = [self._scratch / name for name in (*self.folders, *self.scraps)]
        await asyncio.to_thread(remove_folders, folders)

    @abstractmethod
    def _members(self, up: RunningT) -> list[int]:
        """Return its living processes, by the machine's numbers."""

    @abstractmethod
    def _end(self, up: RunningT) -> None:
        """Kill the first process, and with it all of them."""

    def _bounds(self) -> ResourceLimits:
        """Return the limits that the kernel does not enforce."""
        return ResourceLimits(None, self._memory_bytes, self._spec.max_processes)

    async def _watch(self, up: RunningT) -> None:
        folders = [self._scratch / name for name in self.folders]
        up.reached = await first_reached(
            lambda: self._members(up), folders, self._bounds(), self._storage_bytes
        )
        self._end(up)

    async def _let_go(self, up: RunningT) -> None:
        up.let_go = True
        self._end(up)
        gone = await self._is_gone(up, KILL_S)
        await up.resources.aclose()
        if not gone:
            message = f"the {self.kind} of session {self._session_id} does not end after SIGKILL"
            raise RuntimeFailure(message)

    async def _is_gone(self, up: RunningT, patience_s: float) -> bool:
        loop = asyncio.get_running_loop()
        until, wait_s = loop.time() + patience_s, POLL_S / 16
        while self._lives(up) and loop.time() < until:  # no event tells
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, POLL_S)
        return not self._lives(up)

    async def _judged(self, result: ExecResult, up: RunningT) -> ExecResult:
        """Add the limit that ended a command; `RuntimeFailure` if others ended the sandbox."""
        if result.signal == signal.SIGKILL and not result.timed_out:
            # The first process ends last, a moment after the command that its end has ended.
            await self._is_gone(up, LAST_S)
        if up.reached is None and not up.let_go and not self._lives(up):
            message = f"the {self.kind} of session {self._session_id} was ended from outside"
            raise RuntimeFailure(message)
        return result if up.reached is None else replace(result, limit=up.reached)

    @property
    def _top(self) -> str:
        """Return the path inside of the scratch folder's `work`."""
        return self.workdir if PurePosixPath(self._spec.workdir or "").is_absolute() else "/work"

    @property
    def _work_folder(self) -> Path:
        return self._scratch / "work" / PurePosixPath(self.workdir).relative_to(self._top)

    def _here(self, path: PurePosixPath) -> Path | None:
        return host_path(
            path, {self._top: self._scratch / "work", self.home: self._scratch / "home"}
        )


def check_spec(spec: RuntimeSpec, backend: str, kwargs: Collection[str]) -> None:
    """Raise `ConfigError` for a workdir with `..` and for names of `spec.kwargs` not in
    `kwargs`.
    """
    if ".." in PurePosixPath(spec.workdir or "").parts:
        raise ConfigError(f"runtime {backend!r}: workdir {spec.workdir!r} must not contain '..'")
    if unknown := sorted(set(spec.kwargs) - set(kwargs)):
        raise ConfigError(
            f"runtime {backend!r} takes the kwargs {sorted(kwargs)}; given: {unknown}"
        )


def with_signal(result: ExecResult) -> ExecResult:
    """Return the result with the signal that its exit code (129 to 159) stands for in a shell."""
    code = result.exit_code
    if code is None or not 128 < code < 160:
        return result
    return replace(result, exit_code=None, signal=code - 128)


CHUNK = 1 << 16
MAX_CONNECTIONS = 1024
"""Open connections of one sandbox; more wait to be accepted."""

LINGER_S = 5.0
"""Time in which a client may still send after the gateway has closed its side."""

FULL_S = 0.1
"""Wait before the next attempt when no descriptor is free to accept a connection."""


class Forwarder:
    """Forwards connections from a sandbox's own network to the gateway, the only way out of it.

    The listening socket belongs to the sandbox's network namespace; this process accepts on it and
    copies bytes to one fixed address. None of our processes runs inside, so a harness can neither
    end nor change the forwarding.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.target: tuple[str, int] | None = None
        """Host and port; `None` = connections are closed at once."""
        self._listener = listener
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)
        self.linger_s = LINGER_S
        self._nursery = Nursery(_ignored)

    async def __aenter__(self) -> Self:
        await self._nursery.__aenter__()
        self._nursery.start(self._accept(), name="sandbox-forwarder")
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._nursery.cancel()
        finally:
            self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                inside, _ = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor is free
                self._room.release()
                await asyncio.sleep(FULL_S)
                continue
            self._nursery.start(self._carried(inside), name="sandbox-connection")

    async def _carried(self, inside: socket.socket) -> None:
        with inside:
            try:
                if self.target is not None:
                    with suppress(OSError):
                        await self._carry(inside, self.target)
            finally:
                self._room.release()

    async def _carry(self, inside: socket.socket, target: tuple[str, int]) -> None:
        inside.settimeout(0)
        inside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        outside = socket.socket()
        with outside:
            outside.settimeout(0)
            outside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(outside, target)
            async with asyncio.TaskGroup() as group:
                sent = group.create_task(_pump(inside, outside))
                await _pump(outside, inside)
                await asyncio.wait({sent}, timeout=self.linger_s)
                sent.cancel()


async def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copy until `source` ends, then close the writing half of `sink`."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while data := await loop.sock_recv(source, CHUNK):
            await loop.sock_sendall(sink, data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def _ignored(_error: BaseException) -> None:
    """Ignore the failure of a connection, which its two ends see, or of a watch."""


ENV_PREFIX = "BRIDLE_IN_"

RESTORE_ENV = (
    f'for BRIDLE_ in "${{!{ENV_PREFIX}@}}"; do export "${{BRIDLE_#{ENV_PREFIX}}}=${{!BRIDLE_}}"; '
    'unset "$BRIDLE_"; done; unset BRIDLE_; '
)
"""Bash code before a command that gives the variables of `prefix_names` their own names."""


def prefix_names(env: Mapping[str, str]) -> dict[str, str]:
    """Prefix each name, so that no variable affects the host's programs that pass it on."""
    return {f"{ENV_PREFIX}{name}": value for name, value in env.items()}
