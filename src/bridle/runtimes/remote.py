"""The `remote` runtime: a session on a host elsewhere, through SWE-ReX.

A `Host` runs short commands and takes files; a class that opens another one than SWE-ReX's is a
runtime of your own (`docs/guides/remote-sandboxes.md`). `execute` answers only after the end of a
command, one at a time. So `RUN` starts a command on the host in the background, with files for its
output, and `LOOK` is executed until the command has ended.

A session cannot reach a gateway that listens on this machine's loopback: `kwargs.gateway` is its
address on the host. The sandbox, the limits and the network are the host's; `contains` says only
that no other session shares the host.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, ValidationError

from bridle.aio import run_shielded
from bridle.config import RuntimeSpec, Settings, explain, validated
from bridle.errors import ConfigError, RuntimeFailure, boundary, install_extra
from bridle.runtimes.base import ExecResult, Mount, Runtime
from bridle.runtimes.base_runtime import END, Archived
from bridle.runtimes.process import (
    EXEC_MARK,
    SESSION_MARK,
    Command,
    LogFile,
    join_output,
    open_logs,
)
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

RUN = """
import json, os, subprocess, sys
os.chdir(sys.argv[1])
given = json.load(open("request"))
code = failed = None
stdin = open("stdin" if given["stdin"] else os.devnull, "rb")
with open("out", "wb") as out, open("err", "wb") as err:
    try:
        if given["make"]:
            os.makedirs(given["make"], exist_ok=True)
        env = {"PATH": os.environ.get("PATH", os.defpath), **given["env"]}
        child = subprocess.Popen(given["argv"], cwd=given["cwd"], env=env, stdin=stdin,
                                 stdout=out, stderr=err, start_new_session=True)
        if os.path.exists("over"):
            child.kill()
        code = child.wait()
    except OSError as error:
        if not os.path.isdir(given["cwd"]):
            failed = "working folder %s does not exist" % given["cwd"]
        elif isinstance(error, (FileNotFoundError, PermissionError)):
            code = 127 if isinstance(error, FileNotFoundError) else 126
            err.write(("bridle: %s: %s\\n" % (given["argv"][0], error.strerror)).encode())
        else:
            failed = str(error)
with open("ended.part", "w") as file:
    json.dump({"code": code, "failed": failed}, file)
os.rename("ended.part", "ended")
"""
"""Runs the command in the file `request` of a folder; the file `ended` has its exit code."""
START = 'setsid "$1" -c "$2" "$3" </dev/null >/dev/null 2>&1 &'
LOOK = """cd -- "$1" || exit
ended=$(cat ended 2>/dev/null)
for each in "out $2" "err $3"; do
  set -- $each
  [ "$2" = - ] || tail -c "+$(($2 + 1))" "$1" 2>/dev/null | head -c 1048576 | base64 | tr -d '\\n'
  echo
done
echo "$ended"
"""
"""Prints the next piece of stdout and of stderr (`-` = none of it), then how the command ended."""
KEPT = """cd -- "$1" || exit
for each in "out $2 $3" "err $4 $5"; do
  set -- $each
  head -c "$2" "$1" | base64 | tr -d '\\n'; echo
  tail -c "$3" "$1" | base64 | tr -d '\\n'; echo
  wc -c < "$1"
done
rm -rf -- "$PWD"
"""
"""Prints head, tail and size of stdout and of stderr, and deletes the folder."""
READABLE = """top=$(realpath -- "$2") && at=$(realpath -- "$(dirname -- "$1")") || exit
[[ $at/ == "${top%/}"/* ]] || { echo "$1 lies outside the session's own folder" >&2; exit 1; }
[ -e "$1" ] || [ -L "$1" ] || { echo "$1 is not there" >&2; exit 1; }
find "$1" ! -type l ! -perm -400 -exec chmod u+rwX {} ';' || true
"""
"""Fails for a path outside a folder, and makes everything below it readable for its owner."""
REMOVE = 'chmod -R u+rwx -- "$1" 2>/dev/null; rm -rf -- "$1"'


class Host(Protocol):
    """A machine or sandbox elsewhere. What its methods raise becomes a `RuntimeFailure`."""

    async def start(self) -> None:
        """Start the remote host, or connect to it."""

    async def stop(self) -> None:
        """Release the remote host, also where `start` failed."""

    async def execute(self, argv: Sequence[str]) -> str:
        """Run a short command on the host and return its stdout; raise with its stderr if it fails.

        Calls may overlap.
        """

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file of this machine to an absolute path on the host."""


class RemoteSettings(Settings):
    """`RuntimeSpec.kwargs` of runtime `remote`; all of it is the operator's to set."""

    deployment: JSON = Field(default_factory=lambda: {"type": "local"})
    """A `type` (any but `SHARED` = a host of the session's own), and the fields of the host that
    `open_host` opens: SWE-ReX's."""
    gateway: str | None = None
    """The gateway's address on the host; `None` = its own, on a host that shares this machine's
    loopback."""
    python: str = "python3"


@dataclass(slots=True)
class _Stream:
    """An output file of a command and the log that it is copied to."""

    sink: LogFile | None
    read: int = 0

    @property
    def offset(self) -> str:
        return "-" if self.sink is None or self.sink.full else str(self.read)

    def feed(self, piece: bytes) -> None:
        if self.sink is not None:
            self.sink.feed(piece)
        self.read += len(piece)


class RemoteRuntime(Archived):
    """One session's folders and processes on a host; implements `base.Runtime`."""

    submittable = "deployment gateway python"

    def __init__(
        self, spec: RuntimeSpec, session_id: str, scratch: Path, mounts: Sequence[Mount] = ()
    ) -> None:
        self._settings = settings = _settings_of(spec)
        super().__init__(spec, session_id, scratch, mounts)
        self._host = self.open_host(settings.deployment)
        self._is_local = settings.deployment.get("type") == "local"
        self.contains = settings.deployment.get("type") not in SHARED
        self._root = str(scratch / "remote") if self._is_local else "/"
        self.home = self.workdir = ""
        self._count = 0
        self._started = False

    def open_host(self, deployment: JSON) -> Host:
        """Return the session's remote host, not started. `ConfigError` names the wrong setting."""
        return RexHost(deployment)

    async def start(self) -> None:
        """Start the remote host, make the session's folders and copy the mounts there."""
        with boundary(RuntimeFailure, f"cannot start the host of session {self._session_id}"):
            self._started = True
            (self._scratch / "aside").mkdir(exist_ok=True)
            await self._host.start()
            if not self._is_local:
                made = await self._host.execute(["mktemp", "-d", "-t", "bridle-XXXXXXXX"])
                self._root = made.strip()
            self.home = f"{self._root}/home"
            self.workdir = str(PurePosixPath(self._root, "work", self._spec.workdir or ""))
            folders = [self.home, self._environment()["TMPDIR"], self.workdir]
            await self._host.execute(["mkdir", "-p", "-m", "700", "--", *folders])
            self._usable = True
            if not self._is_local:
                for mount in self._mounts:
                    await self.upload(mount.source, self._target_of(mount))

    # ---- commands

    async def _run(self, inside: Command) -> ExecResult:
        self._must_be_usable()
        marks, began = self._marks(), asyncio.get_running_loop().time()
        self._count += 1
        folder = f"{self._root}/{self._count}-run"
        ended = False
        try:
            with (
                boundary(RuntimeFailure, f"running a command in session {self._session_id}"),
                ExitStack() as files,
            ):
                streams = _streams(inside, files)
                await self._begin(inside, folder, marks)
                end, timed_out = await self._wait(inside, folder, streams, marks[EXEC_MARK])
                outputs, truncated = await self._kept(inside, folder)
                ended = True
        finally:
            if not ended:
                await run_shielded(self._end_command(folder, marks[EXEC_MARK]), timeout_s=STOP_S)
        if end["failed"] is not None:
            raise RuntimeFailure(f"the remote host could not start the command: {end['failed']}")
        code = end["code"]
        return ExecResult(
            exit_code=code if code >= 0 and not timed_out else None,
            signal=-code if code < 0 else None,
            timed_out=timed_out,
            stdout=outputs[0],
            stderr=outputs[1],
            truncated=truncated,
            duration_s=asyncio.get_running_loop().time() - began,
        )

    async def _begin(self, inside: Command, folder: str, marks: dict[str, str]) -> None:
        """Put the command on the host and start it."""
        request = {
            "argv": list(inside.argv),
            "env": {**self._environment(), **inside.env, **marks},
            "cwd": inside.cwd,
            "make": self.workdir if inside.cwd == self.workdir else None,
            "stdin": inside.stdin is not None,
        }
        await self._host.execute(["mkdir", "--", folder])
        with self._aside() as aside:
            await self._send(json.dumps(request).encode(), f"{folder}/request", aside)
            if inside.stdin is not None:
                await self._send(inside.stdin, f"{folder}/stdin", aside)
        await self._shell(START, self._settings.python, RUN, folder)

    async def _send(self, content: bytes | Path, path: str, aside: str) -> None:
        """Upload a file to the host; `aside` is a folder for one that is not a file yet."""
        if isinstance(content, bytes):
            file = Path(aside, PurePosixPath(path).name)
            await asyncio.to_thread(file.write_bytes, content)
            content = file
        await self._host.upload(content, path)

    async def _wait(
        self, inside: Command, folder: str, streams: tuple[_Stream, _Stream], execution: str
    ) -> tuple[JSON, bool]:
        """Return how the command ended, and whether its time ran out."""
        try:
            async with asyncio.timeout(inside.timeout_s):
                return await self._follow(folder, streams), False
        except TimeoutError:
            await self._end_command(folder, execution)
        async with asyncio.timeout(STOP_S):
            return await self._follow(folder, streams), True

    async def _follow(self, folder: str, streams: tuple[_Stream, _Stream]) -> JSON:
        """Copy a command's output to its logs until it has ended."""
        wait_s = FIRST_LOOK_S
        while True:
            offsets = [stream.offset for stream in streams]
            *pieces, ended = (await self._shell(LOOK, folder, *offsets)).split("\n")[:3]
            for stream, piece in zip(streams, pieces, strict=True):
                stream.feed(base64.b64decode(piece))
            if any(pieces):
                wait_s = FIRST_LOOK_S
            elif ended:
                return dict(json.loads(ended))
            await asyncio.sleep(wait_s)
            wait_s = min(1.5 * wait_s, LAST_LOOK_S)

    async def _kept(self, inside: Command, folder: str) -> tuple[list[bytes], bool]:
        """Return what stays in memory of stdout and stderr, and whether that is less than all."""
        limits = [0 if inside.stdout is not None else inside.output_limit, inside.output_limit]
        halves = [half for limit in limits for half in ((limit + 1) // 2, limit // 2)]
        lines = (await self._shell(KEPT, folder, *map(str, halves))).split("\n")
        outputs, truncated = [], False
        for limit, (head64, tail64, count) in zip(limits, (lines[:3], lines[3:6]), strict=True):
            head, tail, size = base64.b64decode(head64), base64.b64decode(tail64), int(count)
            rest = min(size - len(head), len(tail))
            outputs.append(join_output(head, tail[len(tail) - rest :], size) if limit else b"")
            truncated = truncated or (size > limit > 0)
        return outputs, truncated

    async def _end_command(self, folder: str, execution: str) -> None:
        with boundary(RuntimeFailure, "ending a command"):
            await self._host.execute(["mkdir", "-p", "--", folder])
            await self._host.execute(["touch", "--", f"{folder}/over"])
            await self._shell(END, f"{EXEC_MARK}={execution}")

    async def _shell(self, script: str, *words: str) -> str:
        return await self._host.execute(["bash", "-c", script, "bash", *words])

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

    # ---- files and addresses

    async def _get(self, path: PurePosixPath, archive: Path, most: int) -> None:
        """Implement `Archived._get`. On a shared host only the session's own folder is read."""
        await self._shell(READABLE, str(path), "/" if self.contains else self._root)
        await super()._get(path, archive, most)

    async def copied(self, scratch: Path) -> Runtime:
        """Raise `RuntimeFailure`: a remote host cannot be copied."""
        del scratch
        message = "runtime 'remote' cannot be copied: evaluator.trusted = true scores in it"
        raise RuntimeFailure(message)

    def inside(self, path: Path) -> str:
        """Return the path on the remote host of a mounted path of this machine."""
        return str(path) if self._is_local else super().inside(path)

    def _target_of(self, mount: Mount) -> str:
        """Return where a mount is copied to: the session's own folder if the host is shared."""
        return mount.target if self.contains else f"{self._root}/mounts/{mount.target}"

    def gateway_url(self, url: str) -> str:
        """Return the gateway's URL as the setting `kwargs.gateway` gives it, or `url` unchanged."""
        if self._settings.gateway is None:
            return url
        at, path = urlsplit(self._settings.gateway), urlsplit(url).path
        return urlunsplit((at.scheme, at.netloc, at.path.rstrip("/") + path, "", ""))

    # ---- the end

    async def kill(self) -> None:
        """Kill every process of the session on the remote host; nothing if it was not started."""
        if self._usable:
            await run_shielded(self._kill(), timeout_s=CALL_S)

    async def _kill(self) -> None:
        with boundary(RuntimeFailure, f"ending the processes of session {self._session_id}"):
            mark = f"{SESSION_MARK}={self._session_id}"
            await self._shell(END, mark)

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
                    await self._shell(REMOVE, self._root)
        finally:
            self._usable = False
            with boundary(RuntimeFailure, f"giving the host of {self._session_id} back"):
                await self._host.stop()


def _settings_of(spec: RuntimeSpec) -> RemoteSettings:
    """Return the kwargs of a spec that a host can keep; `ConfigError` names what it cannot."""
    settings = validated(RemoteSettings, spec.kwargs, "runtime 'remote': kwargs")
    limits = ("cpus", "memory_mb", "storage_mb", "max_processes", "gpus", "image")
    if asked := [name for name in limits if getattr(spec, name) is not None]:
        raise ConfigError(
            f"runtime 'remote' cannot give {', '.join(asked)}: set it in the deployment, as "
            "SWE-ReX names it (kwargs.deployment)"
        )
    kind = settings.deployment.get("type")
    if spec.network == "none" or (spec.network == "gateway_only" and kind not in SHARED):
        raise ConfigError(
            f"runtime 'remote' cannot keep network = {spec.network!r}: it does not control the "
            "host's network; set network = 'open'"
        )
    if kind not in SHARED and settings.gateway is None:
        raise ConfigError(
            f"runtime 'remote': a host of type {kind!r} needs kwargs.gateway, the gateway's "
            "address on the host"
        )
    workdir = PurePosixPath(spec.workdir or ".")
    if workdir.is_absolute() or ".." in workdir.parts:
        message = f"runtime 'remote': workdir {spec.workdir!r} must be relative, without '..'"
        raise ConfigError(message)
    return settings


def _streams(command: Command, files: ExitStack) -> tuple[_Stream, _Stream]:
    """Open the files that stdout and stderr are copied to; both may have the same log."""
    out, error = open_logs(command, files)
    if command.stdout is not None:
        out = LogFile(command.stdout, sys.maxsize)
        files.callback(out.close)
    return _Stream(out), _Stream(error)


T = TypeVar("T")

KINDS = ("local", "remote", "docker", "modal", "fargate", "daytona")
"""SWE-ReX's deployments, by the `type` of their configuration."""
SAID_CHARS = 500


class RexHost:
    """A deployment of SWE-ReX (package `swe-rex`); implements `Host`.

    SWE-ReX's calls may block their event loop and leave tasks open, so each call gets a thread and
    a loop of its own.
    """

    def __init__(self, deployment: JSON) -> None:
        """`deployment` has a `type` of `KINDS` and that deployment's fields. `ConfigError`."""
        self._deployment: AbstractDeployment = _open(deployment)

    async def start(self) -> None:
        await _aside(self._deployment.start)

    async def stop(self) -> None:
        await _aside(self._deployment.stop)

    async def execute(self, argv: Sequence[str]) -> str:
        from swerex.runtime.abstract import Command as RexCommand

        command = RexCommand(command=list(argv))
        answer = await _aside(lambda: self._runtime.execute(command))
        if answer.exit_code != 0:
            said = (answer.stderr or answer.stdout).strip()[-SAID_CHARS:]
            raise RuntimeFailure(
                f"{argv[0]} failed on the remote host with exit code {answer.exit_code}: {said}"
            )
        return str(answer.stdout)

    async def upload(self, source: Path, path: str) -> None:
        from swerex.runtime.abstract import UploadRequest

        request = UploadRequest(source_path=str(source), target_path=path)
        await _aside(lambda: self._runtime.upload(request))

    @property
    def _runtime(self) -> AbstractRuntime:
        return self._deployment.runtime


def _open(deployment: JSON) -> AbstractDeployment:
    kind, fields = deployment.get("type"), {k: v for k, v in deployment.items() if k != "type"}
    if kind not in KINDS:
        raise ConfigError(
            f"runtime 'remote': kwargs.deployment.type must be one of {KINDS}, not {kind!r}"
        )
    # Its loggers would print every call.
    os.environ.setdefault("SWE_REX_LOG_STREAM_LEVEL", "100")
    try:
        from swerex.deployment import config
    except ImportError as error:
        raise ConfigError(
            f"runtime 'remote' needs the package swe-rex ({error}): run {install_extra('remote')}"
        ) from None
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
