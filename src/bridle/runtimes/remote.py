"""The `remote` runtime: a session on a host elsewhere, through SWE-ReX.

The host needs bash, coreutils, tar and Python 3.8 or later. `remote_runner` is put there; it runs
the commands, and what they say comes back in pieces that are asked for (`status`), so a session can
be watched, timed out and ended, which SWE-ReX alone cannot do.

A session cannot reach a gateway that listens on this machine's loopback: `kwargs.gateway` says
where it is reached from there. What keeps a session in, and which limits and network it has, is the
host's; `contains` says only that it is no host of others.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, ValidationError

from bridle.aio import run_shielded
from bridle.config import RuntimeSpec, Settings, explain
from bridle.errors import ConfigError, RuntimeFailure, boundary, install_extra
from bridle.runtimes import remote_runner
from bridle.runtimes.archive import Keep, pack, pack_bytes, unpack
from bridle.runtimes.base import ExecResult, Mount, Runtime
from bridle.runtimes.output import LOG_LIMIT, LogFile, joined
from bridle.runtimes.place import DOWNLOAD_BYTES, FRAME_BYTES
from bridle.runtimes.proc import EXEC_MARK, SESSION_MARK
from bridle.runtimes.snapshot import Bounds, TooMuch, check_archive, put_by_archive
from bridle.types import JSON

if TYPE_CHECKING:
    from swerex.deployment.abstract import AbstractDeployment
    from swerex.runtime.abstract import AbstractRuntime


SHARED = ("local", "remote")
"""Kinds of host that other sessions may be on too."""
CALL_S = 60.0
STOP_S = 120.0
FIRST_LOOK_S = 0.01
LAST_LOOK_S = 0.5
NOTHING = '{"out": 0, "err": 0, "ended": null}'

TAKE_OUT = """mkdir -p -- "$2" && tar --no-same-owner -xpf "$1" -C "$2"
code=$?; rm -f -- "$1"; exit $code"""
REMOVE = 'chmod -R u+rwx -- "$1" 2>/dev/null; rm -rf -- "$1"'


class RemoteSettings(Settings):
    """`RuntimeSpec.kwargs` of runtime `remote`; all of it is the operator's to set."""

    deployment: JSON = Field(default_factory=lambda: {"type": "local"})
    """SWE-ReX's own: its `type` and that deployment's fields."""
    gateway: str | None = None
    """Where the gateway is reached from there; `None` = at its own address, on a host that shares
    this machine's loopback."""
    python: str = "python3"


class Host(Protocol):
    """Interface of a remote host (`RexHost`)."""

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Give it back; idempotent."""

    async def execute(self, argv: Sequence[str]) -> str:
        """Run a short command and return its stdout. `RuntimeFailure` if it fails."""

    async def read(self, path: str) -> str:
        """A file of text that is there."""

    async def write(self, path: str, text: str) -> None:
        """Make or overwrite a file of text."""

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file of ours there."""


class RemoteRuntime:
    """One session's folders and processes on a host; implements `base.Runtime`."""

    def __init__(
        self, spec: RuntimeSpec, session_id: str, scratch: Path, mounts: Sequence[Mount] = ()
    ) -> None:
        self._settings = settings = _settings_of(spec)
        self._host: Host = self._open_host(settings.deployment)
        self._spec = spec
        self._session_id = session_id
        self._scratch = scratch
        self._mounts = tuple(mounts)
        self._here = settings.deployment.get("type") == "local"
        self.contains = settings.deployment.get("type") not in SHARED
        self._root = str(scratch / "remote") if self._here else "/"
        self.home = self.workdir = ""
        self._count = 0
        self._usable = self._started = False

    def _open_host(self, deployment: JSON) -> Host:
        return RexHost(deployment)

    async def start(self) -> None:
        """Start the host and put the folders, the runner and the mounts there."""
        with boundary(RuntimeFailure, f"cannot start the host of session {self._session_id}"):
            self._started = True
            await self._host.start()
            if not self._here:
                made = await self._host.execute(["mktemp", "-d", "-t", "bridle-XXXXXXXX"])
                self._root = made.strip()
            self.home = f"{self._root}/home"
            self.workdir = str(PurePosixPath(self._root, "work", self._spec.workdir or ""))
            folders = [self.home, self._environment()["TMPDIR"], self.workdir]
            await self._host.execute(["mkdir", "-p", "-m", "700", "--", *folders])
            source = await asyncio.to_thread(Path(remote_runner.__file__).read_text)
            await self._host.write(self._runner, source)
            self._usable = True
            if not self._here:
                for mount in self._mounts:
                    await self.upload(mount.source, self._target(mount))

    # ---- commands

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        output_limit: int = 1 << 20,
        log: Path | None = None,
        error_log: Path | None = None,
    ) -> ExecResult:
        """Run a command (`base.Runtime.exec`); a workdir that the harness deleted is recreated."""
        self._must_be_usable()
        folder, execution = self._next("run"), f"{self._session_id}/{self._count}"
        marks = {SESSION_MARK: self._session_id, EXEC_MARK: execution}
        request = {
            "argv": ["bash", "-o", "pipefail", "-c", command]
            if isinstance(command, str)
            else list(command),
            "env": {**self._environment(), **(env or {}), **marks},
            "cwd": str(PurePosixPath(self.workdir, cwd or "")),
            "make": self.workdir if cwd is None else None,
            "stdin": stdin is not None,
            "timeout_s": timeout_s,
            "output_limit": output_limit,
            "streamed": 0 if log is None and error_log is None else LOG_LIMIT + 1,
            "mark": f"{EXEC_MARK}={execution}",
        }
        ended = False
        try:
            with (
                boundary(RuntimeFailure, f"running a command in session {self._session_id}"),
                ExitStack() as files,
            ):
                logs = _logs(log, error_log, files)
                if stdin is not None:
                    given = base64.b64encode(stdin).decode()
                    await self._host.write(f"{folder}/input", given)
                await self._host.write(f"{folder}/status", NOTHING)
                await self._host.write(f"{folder}/request", json.dumps(request))
                await self._run("start", folder)
                result = await self._followed(folder, logs)
                ended = True
                return result
        finally:
            if not ended:
                await run_shielded(self._give_up(folder, request["mark"]), timeout_s=STOP_S)

    async def _followed(self, folder: str, logs: Mapping[str, LogFile | None]) -> ExecResult:
        """Read what a command says into `logs` until it has ended."""
        read, wait_s = {"out": 0, "err": 0}, FIRST_LOOK_S
        while True:
            status = json.loads(await self._host.read(f"{folder}/status"))
            for name, log in logs.items():
                if read[name] < status[name]:
                    wait_s = FIRST_LOOK_S
                for piece in range(read[name], status[name]):
                    data = base64.b64decode(await self._host.read(f"{folder}/{name}.{piece}"))
                    if log is not None:
                        log.feed(data)
                read[name] = status[name]
            if status["ended"] is not None:
                return _result(status["ended"])
            await asyncio.sleep(wait_s)
            wait_s = min(1.5 * wait_s, LAST_LOOK_S)

    async def _give_up(self, folder: str, mark: object) -> None:
        with suppress(RuntimeFailure), boundary(RuntimeFailure, "giving a command up"):
            await self._host.write(f"{folder}/over", "")
            await self._run("kill", str(mark), "1")

    def _environment(self) -> dict[str, str]:
        return {
            "HOME": self.home,
            "TMPDIR": str(PurePosixPath(self._root, "tmp")),
            "LANG": "C.UTF-8",
            "LC_ALL": "C.UTF-8",
            "SHELL": "/bin/bash",
            "TERM": "dumb",
            **self._spec.env,
        }

    async def _run(self, *words: str) -> str:
        return await self._host.execute([self._settings.python, self._runner, *words])

    # ---- files

    async def upload(self, source: Path, target: str) -> None:
        """Implement `base.Runtime.upload`. Modes and symbolic links are kept."""
        self._must_be_usable()
        path = PurePosixPath(self.workdir, target)
        with (
            boundary(RuntimeFailure, f"cannot upload {source} to {target}"),
            tempfile.TemporaryDirectory(dir=self._scratch) as aside,
        ):
            archive = Path(aside, "in.tar")
            folder = await asyncio.to_thread(pack, source, path, archive)
            await self._put(archive, folder)

    async def write(self, target: str, content: bytes, *, mode: int = 0o644) -> None:
        """Implement `base.Runtime.write`. A symbolic link at `target` is replaced, not followed."""
        self._must_be_usable()
        path = PurePosixPath(self.workdir, target)
        with (
            boundary(RuntimeFailure, f"cannot write {target}"),
            tempfile.TemporaryDirectory(dir=self._scratch) as aside,
        ):
            archive = Path(aside, "in.tar")
            await asyncio.to_thread(archive.write_bytes, pack_bytes(content, path.name, mode))
            await self._put(archive, path.parent)

    async def _put(self, archive: Path, folder: PurePosixPath) -> None:
        there = self._next("in.tar")
        await self._host.upload(archive, there)
        await self._host.execute(["bash", "-c", TAKE_OUT, "bash", there, str(folder)])

    async def download(
        self, source: str, target: Path, *, most: int | None = None
    ) -> tuple[str, ...]:
        """Implement `base.Runtime.download`. What comes out is taken apart as `archive` says."""
        room = DOWNLOAD_BYTES if most is None else most
        try:
            await self._copy_out(source, target, room)
        except TooMuch as error:
            raise RuntimeFailure(f"{source} has more than {room >> 20} MiB") from error
        return ()

    async def snapshot(self, folder: Path) -> tuple[str, ...]:
        """Implement `base.Runtime.snapshot`. The remote runner reads the files."""
        return await self.copy_kept(folder)

    async def copy_kept(self, folder: Path, keep: Keep | None = None) -> tuple[str, ...]:
        await self._copy_out(".", folder, Bounds().bytes, any_link=True, only=keep)
        return ()

    async def copied(self, scratch: Path) -> Runtime:
        """Raises `RuntimeFailure`: such a host makes no copies of itself."""
        del scratch
        message = "runtime 'remote' cannot be copied: evaluator.trusted = true scores in it"
        raise RuntimeFailure(message)

    async def put_work(self, folder: Path, keep: Keep) -> tuple[str, ...]:
        return await put_by_archive(self, folder, keep)

    async def _copy_out(
        self,
        source: str,
        target: Path,
        most: int,
        *,
        any_link: bool = False,
        only: Keep | None = None,
    ) -> None:
        self._must_be_usable()
        path, there = PurePosixPath(self.workdir, source), self._next("out")
        with boundary(RuntimeFailure, f"cannot download {source}"):
            pieces = int(
                await self._run("pack", str(path), there, "" if self.contains else self._root)
            )
            if (pieces - 1) * remote_runner.PIECE > most + FRAME_BYTES:
                raise TooMuch(f"there are more than {most >> 20} MiB")
            with tempfile.TemporaryDirectory(dir=self._scratch) as aside:
                archive = Path(aside, "out.tar")
                for piece in range(pieces):
                    text = await self._host.read(f"{there}/tar.{piece}")
                    await asyncio.to_thread(_append, archive, base64.b64decode(text))
                await asyncio.to_thread(check_archive, archive, Bounds(bytes=most))
                await asyncio.to_thread(
                    unpack, archive, path.name, target, any_link=any_link, only=only
                )

    # ---- addresses

    def inside(self, path: Path) -> str:
        """Return the path on the remote host of a mounted host path; any other path is returned
        unchanged.
        """
        if not self._here:
            for mount in self._mounts:
                if path.is_relative_to(mount.source):
                    return str(PurePosixPath(self._target(mount), path.relative_to(mount.source)))
        return str(path)

    def _target(self, mount: Mount) -> str:
        """Return the path where a mount is put: inside the session's own folder if the host is
        shared.
        """
        return mount.target if self.contains else f"{self._root}/mounts/{mount.target}"

    def gateway_url(self, url: str) -> str:
        """The URL as `kwargs.gateway` says, or as it is."""
        if self._settings.gateway is None:
            return url
        at, path = urlsplit(self._settings.gateway), urlsplit(url).path
        return urlunsplit((at.scheme, at.netloc, at.path.rstrip("/") + path, "", ""))

    # ---- the end

    async def kill(self) -> None:
        if self._usable:
            await run_shielded(self._kill(), timeout_s=CALL_S)

    async def _kill(self) -> None:
        with boundary(RuntimeFailure, f"ending the processes of session {self._session_id}"):
            await self._run("kill", f"{SESSION_MARK}={self._session_id}", "1")

    async def stop(self) -> None:
        """Delete the session's folders and release the host."""
        started, self._started = self._started, False
        if started:
            await run_shielded(self._stop(), timeout_s=STOP_S)

    async def _stop(self) -> None:
        try:
            if self._usable:
                await self._kill()
                with boundary(RuntimeFailure, f"removing the folders of {self._session_id}"):
                    await self._host.execute(["bash", "-c", REMOVE, "bash", self._root])
        finally:
            self._usable = False
            with boundary(RuntimeFailure, f"giving the host of {self._session_id} back"):
                await self._host.stop()

    @property
    def _runner(self) -> str:
        return f"{self._root}/runner.py"

    def _next(self, name: str) -> str:
        """A path there that nothing uses yet."""
        self._count += 1
        return f"{self._root}/{self._count}-{name}"

    def _must_be_usable(self) -> None:
        if not self._usable:
            message = f"the runtime of session {self._session_id} is not started, or was stopped"
            raise RuntimeFailure(message)


def _settings_of(spec: RuntimeSpec) -> RemoteSettings:
    """The kwargs of a spec that a host can keep; `ConfigError` names what it cannot."""
    try:
        settings = RemoteSettings.model_validate(spec.kwargs)
    except ValidationError as error:
        raise explain(error, "runtime 'remote': kwargs") from None
    limits = ("cpus", "memory_mb", "storage_mb", "max_processes", "gpus", "image")
    if asked := [name for name in limits if getattr(spec, name) is not None]:
        message = (
            f"runtime 'remote' cannot give {', '.join(asked)}: say it to the deployment, as "
            "SWE-ReX names it (kwargs.deployment)"
        )
        raise ConfigError(message)
    kind = settings.deployment.get("type")
    if spec.network == "none" or (spec.network == "gateway_only" and kind not in SHARED):
        message = (
            f"runtime 'remote' cannot keep network = {spec.network!r}: the host's network is the "
            "host's; say network = 'open'"
        )
        raise ConfigError(message)
    if kind not in SHARED and settings.gateway is None:
        message = (
            f"runtime 'remote': a host of {kind!r} needs kwargs.gateway, an address of ours there"
        )
        raise ConfigError(message)
    workdir = PurePosixPath(spec.workdir or ".")
    if workdir.is_absolute() or ".." in workdir.parts:
        message = f"runtime 'remote': workdir {spec.workdir!r} must be relative, without '..'"
        raise ConfigError(message)
    return settings


def _logs(
    log: Path | None, error_log: Path | None, files: ExitStack
) -> Mapping[str, LogFile | None]:
    """The log file of each stream; both may have the same."""

    def opened(path: Path) -> LogFile:
        file = LogFile(path)
        files.callback(file.close)
        return file

    out = None if log is None else opened(log)
    return {"out": out, "err": out if error_log is None else opened(error_log)}


def _result(ended: JSON) -> ExecResult:
    if ended["failed"] is not None:
        raise RuntimeFailure(f"the command could not be started: {ended['failed']}")
    said, truncated = {}, False
    for name in ("out", "err"):
        head, tail = (base64.b64decode(ended[name][part]) for part in ("head", "tail"))
        said[name] = joined(head, tail, ended[name]["size"])
        truncated = truncated or len(head) + len(tail) < ended[name]["size"]
    code = ended["code"]
    return ExecResult(
        exit_code=code if code >= 0 and not ended["timed_out"] else None,
        signal=-code if code < 0 else None,
        timed_out=ended["timed_out"],
        stdout=said["out"],
        stderr=said["err"],
        truncated=truncated,
        duration_s=ended["seconds"],
    )


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


T = TypeVar("T")

KINDS = ("local", "remote", "docker", "modal", "fargate", "daytona")
"""SWE-ReX's deployments, by the `type` of their configuration."""
SAID_CHARS = 500


class RexHost:
    """A deployment of SWE-ReX (package `swe-rex`), started and stopped with its session.

    SWE-ReX runs only short commands, small texts and one archive here. Its calls may block their
    event loop and leave tasks open, so each call gets a thread and a loop of its own.
    """

    def __init__(self, deployment: JSON) -> None:
        """`deployment` has a `type` of `KINDS` and that deployment's fields. `ConfigError`."""
        self._deployment: AbstractDeployment = _open(deployment)

    async def start(self) -> None:
        """Start it; its own errors escape."""
        await _aside(self._deployment.start)

    async def stop(self) -> None:
        await _aside(self._deployment.stop)

    async def execute(self, argv: Sequence[str]) -> str:
        """Run a short command and return its stdout. `RuntimeFailure` carries its output if it
        fails.
        """
        from swerex.runtime.abstract import Command

        command = Command(command=list(argv))
        answer = await _aside(lambda: self._runtime.execute(command))
        if answer.exit_code != 0:
            said = (answer.stderr or answer.stdout).strip()[-SAID_CHARS:]
            raise RuntimeFailure(f"{argv[0]}: exit code {answer.exit_code}: {said}")
        return str(answer.stdout)

    async def read(self, path: str) -> str:
        """A file of text that is there."""
        from swerex.runtime.abstract import ReadFileRequest

        request = ReadFileRequest(path=path, encoding="utf-8")
        answer = await _aside(lambda: self._runtime.read_file(request))
        return str(answer.content)

    async def write(self, path: str, text: str) -> None:
        """Make or overwrite a file of text; parents are made."""
        from swerex.runtime.abstract import WriteFileRequest

        request = WriteFileRequest(path=path, content=text)
        await _aside(lambda: self._runtime.write_file(request))

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file of ours there."""
        from swerex.runtime.abstract import UploadRequest

        request = UploadRequest(source_path=str(source), target_path=path)
        await _aside(lambda: self._runtime.upload(request))

    @property
    def _runtime(self) -> AbstractRuntime:
        return self._deployment.runtime


def _open(deployment: JSON) -> AbstractDeployment:
    kind, fields = deployment.get("type"), {k: v for k, v in deployment.items() if k != "type"}
    if kind not in KINDS:
        message = f"runtime 'remote': kwargs.deployment.type: one of {KINDS}, not {kind!r}"
        raise ConfigError(message)
    # Its loggers would print every call.
    os.environ.setdefault("SWE_REX_LOG_STREAM_LEVEL", "100")
    try:
        from swerex.deployment import config
    except ImportError as error:
        message = (
            f"runtime 'remote' needs the package swe-rex ({error}): run {install_extra('remote')}"
        )
        raise ConfigError(message) from None
    try:
        made = getattr(config, f"{kind.capitalize()}DeploymentConfig")(**fields)
    except ValidationError as error:
        raise explain(error, f"runtime 'remote': kwargs.deployment of type {kind!r}") from None
    try:
        opened: AbstractDeployment = made.get_deployment()
    except ImportError as error:
        message = f"runtime 'remote': {kind!r} needs pip install 'swe-rex[{kind}]' ({error})"
        raise ConfigError(message) from None
    return opened


async def _aside(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return await asyncio.to_thread(lambda: asyncio.run(work()))
