"""The `bubblewrap` runtime: unprivileged namespaces, a read-only system, a network of its own.

A session's sandbox is one set of namespaces, held open by a process that does nothing: process 1 in
them. Commands enter them, so what one leaves running is there for the next, as on any machine;
ending process 1 ends them all, whatever they did to escape. The next command after that makes the
namespaces again; the folders stay.

Inside, the system is the machine's own (`/usr` and little of `/etc`, read-only) or a root folder
given as `image`. Work, home and temp folders are the session's own. The network has a loopback and
nothing else; `base_runtime.Forwarder` forwards one of its ports to the gateway.

`base_runtime` copies files in and out and forwards to the gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure
from bridle.runtimes.base import ExecResult, Mount, binds
from bridle.runtimes.base_runtime import (
    GATEWAY_PORT,
    LAST_S,
    RESTORE_ENV,
    RunningSandbox,
    Sandbox,
    check_spec,
    prefix_names,
)
from bridle.runtimes.confinement import (
    MACHINES,
    PREFIX,
    Cgroup,
    ResourceLimits,
    begin,
    enter,
    filter_program,
    listen_inside,
    members_of,
    pid_namespace,
)
from bridle.runtimes.process import SESSION_MARK, Command, owner_mark, run_process

USER = "agent"
UID = 1000
HOME = f"/home/{USER}"
OWN = ("work", "home", "tmp", "more")
"""Folders of the session below its scratch folder, which it may write to; `more` holds one for
each path of `RuntimeSpec.kwargs["folders"]`."""

MEMORY_FILES = str(256 << 20)
"""Bytes of each of the two folders that lie in memory."""

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "nix")
ETC = (
    *("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone"),
    *("nsswitch.conf", "os-release", "debian_version", "mime.types", "services", "protocols"),
    *("ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "ca-certificates.conf", "terminfo"),
    *("fonts", "java-17-openjdk", "perl", "python3", "python3.11", "python3.12", "python3.13"),
)
"""Entries of the machine's `/etc` that are visible inside; none is secret or names the machine."""
MASKED = (
    *("interrupts", "kcore", "key-users", "keys", "latency_stats", "sched_debug"),
    *("timer_list", "timer_stats"),
)
"""Files of `/proc` about the whole machine; Docker masks most of them."""
NOT_FROM_IMAGE = frozenset({"proc", "dev", "sys", "run", "tmp", "work", "home", "root", "mnt"})
"""Top folders of an image that are replaced by the sandbox's own, or absent."""

KWARGS = frozenset({"binds", "folders"})

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": HOME,
    "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's own
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "USER": USER,
    "LOGNAME": USER,
    "SHELL": "/bin/bash",
    "TERM": "dumb",
}


def write_etc(folder: Path) -> None:
    """Write the small files (`passwd`, `hosts`, ...) that a sandbox sees in `/etc`. Raises
    `OSError`.
    """
    files = {
        "passwd": f"{USER}:x:{UID}:{UID}:{USER}:{HOME}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        "group": f"{USER}:x:{UID}:\nnogroup:x:65534:\n",
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "hostname": "sandbox\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)


def bwrap_options(spec: RuntimeSpec, scratch: Path, mounts: Sequence[Mount], top: str) -> list[str]:
    """Return the options of `bwrap` for a session; `top` is the path of its work folder inside.

    Everything not named here is absent inside: no `/root`, no other homes, no `/var`, no sockets of
    the machine. Files that are visible are readable with their owner's rights even if the caller is
    root, so none of them may be secret.
    """
    words = ["--unshare-user", "--unshare-all", "--disable-userns", "--as-pid-1"]
    words += ["--cap-drop", "ALL", "--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox"]
    words += ["--die-with-parent", "--new-session", "--clearenv"]
    if spec.network == "open":
        words.append("--share-net")
    if spec.image is None:
        words += [*_bound(Path("/"), SYSTEM), *_etc(scratch / "etc", open_=spec.network == "open")]
    else:
        image = Path(spec.image)
        words += _bound(image, sorted({entry.name for entry in image.iterdir()} - NOT_FROM_IMAGE))
    # Read-only: where the caller is root, the kernel's own switches would be its to turn.
    words += ["--proc", "/proc", "--remount-ro", "/proc"]
    for path in (Path("/proc", name) for name in MASKED):
        words += ["--ro-bind", "/dev/null", str(path)] if path.exists() else []
    words += ["--dev", "/dev", "--size", MEMORY_FILES, "--perms", "1777", "--tmpfs", "/dev/shm"]  # noqa: S108 - the sandbox's own
    words += ["--remount-ro", "/dev", "--size", MEMORY_FILES, "--tmpfs", "/run"]
    words += ["--bind", str(scratch / "tmp"), "/tmp"]  # noqa: S108 - the sandbox's own
    words += ["--bind", str(scratch / "home"), HOME, "--bind", str(scratch / "work"), top]
    for number, target in enumerate(spec.kwargs.get("folders", ())):
        folder = scratch / "more" / str(number)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        words += ["--bind", str(folder), target]
    for mount in (*mounts, *binds(spec)):
        words += ["--ro-bind", str(mount.source), mount.target]
    return [*words, "--remount-ro", "/"]


def _bound(root: Path, names: Iterable[str]) -> list[str]:
    """Return options that show entries at the top of a root folder, read-only; links stay links."""
    words: list[str] = []
    for name in names:
        entry = root / name
        if entry.is_symlink():
            words += ["--symlink", os.readlink(entry), f"/{name}"]  # noqa: PTH115 - kept as it is
        elif entry.exists():
            words += ["--ro-bind", str(entry), f"/{name}"]
    return words


def _etc(own: Path, *, open_: bool) -> list[str]:
    """Return options that show the machine's harmless files of `/etc`, and ours."""
    names = (*ETC, "resolv.conf") if open_ else ETC
    words = ["--symlink", "/proc/self/mounts", "/etc/mtab"]
    for name in names:
        if (entry := Path("/etc", name)).exists():
            words += ["--ro-bind", str(entry.resolve()), f"/etc/{name}"]
    for entry in sorted(own.iterdir()):
        words += ["--ro-bind", str(entry), f"/etc/{entry.name}"]
    return words


HOLD = "echo ready; exec >/dev/null 2>&1; while :; do sleep 86400 & wait; done"
"""Process 1: it reaps orphans, and nothing inside can kill it."""

ENTER = 'ulimit {limits} || exit 125; cd -- "$1" || exit 125; shift; exec "$@"'
"""Bash code that runs a command under limits in a folder."""

START_S = 30.0
STOP_S = 30.0
FILES = 4096
"""Open files of one process."""


@dataclass(slots=True)
class _Namespaces(RunningSandbox):
    """The namespaces of a sandbox that is up."""

    process: subprocess.Popen[bytes]
    pid: int
    """Process 1 of the sandbox, by the machine's numbers."""


class BubblewrapRuntime(Sandbox[_Namespaces]):
    """One session's sandbox; implements `base.Runtime`."""

    submittable = "binds:host_paths folders"
    home = HOME
    folders = OWN
    scraps = ("etc", "aside")
    kind = "sandbox"
    start_s = START_S
    stop_s = STOP_S
    _cgroup: Cgroup | None = None

    @classmethod
    def check(cls, spec: RuntimeSpec) -> None:
        """Raise `ConfigError` if `spec` asks for what bubblewrap cannot give: GPUs, an image that
        is no folder, unknown kwargs.
        """
        if spec.gpus is not None:
            raise ConfigError("runtime 'bubblewrap' gives no GPUs: use 'docker'")
        if spec.image is not None and not Path(spec.image, "bin").exists():
            raise ConfigError(
                f"runtime 'bubblewrap': image {spec.image!r} must be a root folder (with /bin)"
            )
        check_spec(spec, "bubblewrap", KWARGS)
        inside = (mount.target for mount in binds(spec))
        for folder in (*spec.kwargs.get("folders", ()), *inside):
            path = Path(folder if isinstance(folder, str) else "")
            if not path.is_absolute() or ".." in path.parts:
                raise ConfigError(
                    f"runtime 'bubblewrap': folder {folder!r} must be an absolute path without '..'"
                )

    # ---- start and end

    async def start(self) -> None:
        """Start the sandbox; `exec` works afterwards. `RuntimeFailure` names what this machine
        lacks.
        """
        if (missing := what_is_missing()) is not None:
            raise RuntimeFailure(missing)
        bounds = ResourceLimits(self._spec.cpus, self._memory_bytes, self._spec.max_processes)
        name = f"{PREFIX}{owner_mark()}-{self._scratch.name}"
        self._cgroup = await asyncio.to_thread(Cgroup.make, name, bounds)
        await super().start()

    def _make_folders(self) -> None:
        super()._make_folders()
        write_etc(self._scratch / "etc")

    @property
    def limits(self) -> Literal["kernel", "watched"]:
        """Return `kernel` where control groups enforce the memory and process limits, else
        `watched`.
        """
        return "watched" if self._cgroup is None else "kernel"

    def _bounds(self) -> ResourceLimits:
        return super()._bounds() if self._cgroup is None else ResourceLimits()

    def _refuse_links(self) -> None:
        """Raise `RuntimeFailure` for a link of the session's on the way to a path that is mounted.

        `bwrap` makes missing folders of that path, and follows links, out of the sandbox too.
        """
        extra = enumerate(self._spec.kwargs.get("folders", ()))
        own = {self._top: "work", HOME: "home", "/tmp": "tmp"}  # noqa: S108 - the sandbox's own
        own |= {target: f"more/{number}" for number, target in extra}
        mounted = (mount.target for mount in (*self._mounts, *binds(self._spec)))
        for target in map(PurePosixPath, (*own, *mounted)):
            for top, name in own.items():
                if not target.is_relative_to(top):
                    continue
                path, below = self._scratch / name, target.relative_to(top).parts
                if any(path.joinpath(*below[: n + 1]).is_symlink() for n in range(len(below))):
                    raise RuntimeFailure(
                        f"the session made a link in the path {target}, where its sandbox has a "
                        "mount: the sandbox cannot be started again"
                    )

    async def _begin(self) -> _Namespaces:
        await asyncio.to_thread(self._refuse_links)
        up = _Namespaces(*await asyncio.to_thread(self._spawn))
        for pipe in filter(None, (up.process.stdout, up.process.stderr)):
            up.resources.callback(pipe.close)
        return up

    async def _listen(self, up: _Namespaces) -> socket.socket:
        return await asyncio.to_thread(listen_inside, up.pid, GATEWAY_PORT, timeout_s=START_S)

    def _lives(self, up: _Namespaces) -> bool:
        return up.process.poll() is None

    def _spawn(self) -> tuple[subprocess.Popen[bytes], int]:
        """Start process 1; returns when it is up. Blocks for some 10 ms."""
        options = bwrap_options(self._spec, self._scratch, self._mounts, self._top)
        arguments = _in_memory(b"".join(f"{word}\0".encode() for word in options))
        profile, info_pipe = _in_memory(filter_program()), os.pipe()
        try:
            words = ["--args", str(arguments), "--seccomp", str(profile)]
            words += ["--info-fd", str(info_pipe[1]), "--"]
            process = subprocess.Popen(
                [*begin(self._procs_files()), "bwrap", *words, "/bin/bash", "-c", HOLD],
                pass_fds=[arguments, profile, info_pipe[1]],
                env={**ENVIRONMENT, SESSION_MARK: self._session_id},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            os.close(info_pipe[1])
            with os.fdopen(info_pipe[0], "rb") as info:
                facts = info.read()
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                _, said = process.communicate(timeout=START_S)
                raise RuntimeFailure(f"bwrap: {said.decode(errors='replace').strip()}")
            return process, int(json.loads(facts)["child-pid"])
        finally:
            os.close(arguments)
            os.close(profile)

    def _procs_files(self) -> list[str]:
        return [] if self._cgroup is None else self._cgroup.procs_files

    def _members(self, up: _Namespaces) -> list[int]:
        return members_of(pid_namespace(up.pid) or "none")

    def _end(self, up: _Namespaces) -> None:
        if up.process.poll() is None:  # its number is ours while `bwrap` lives
            with suppress(ProcessLookupError):
                os.kill(up.pid, signal.SIGKILL)

    async def _remove(self) -> None:
        if self._cgroup is not None:
            await asyncio.to_thread(self._cgroup.remove)
        await super()._remove()

    # ---- commands

    async def _run(self, inside: Command) -> ExecResult:
        held = await self._running()
        limits = f"-c 0 -n {FILES} -f {self._storage_bytes >> 10}"
        if self._cgroup is None:
            limits += f" -d {2 * self._memory_bytes >> 10}"
        begins = RESTORE_ENV + ENTER.format(limits=limits)
        if inside.cwd == self.workdir:
            begins = f'mkdir -p -- "$1" 2>/dev/null; {begins}'
        entering = [
            *enter(held.pid, self._procs_files()),
            "/bin/bash",
            "-c",
            begins,
            "bash",
            inside.cwd,
        ]
        env = prefix_names({**ENVIRONMENT, **self._spec.env, **inside.env})
        command = replace(inside, argv=[*entering, *inside.argv], cwd="/", env=env)
        result = await run_process(self._marked(command, self._marks()))
        reached = None if self._cgroup is None else self._cgroup.reached()
        if reached == "memory" and result.signal == signal.SIGKILL:
            # Memory that belongs to no process (a file in /dev/shm) costs process 1 its life, too.
            held.reached = reached if await self._is_gone(held, LAST_S) else held.reached
        result = await self._judged(result, held)
        return result if result.limit is not None else replace(result, limit=reached)


def what_is_missing() -> str | None:
    """Return what this machine lacks for bubblewrap and how to install it; `None` = nothing."""
    if platform.machine() not in MACHINES:
        known = ", ".join(MACHINES)
        return f"the bubblewrap runtime has a system call filter for {known} only"
    missing = [name for name in ("bwrap", "bash", "tar", "perl") if shutil.which(name) is None]
    if missing:
        return (
            f"the bubblewrap runtime needs {', '.join(missing)}: install the packages bubblewrap "
            "(0.8 or later), tar and perl"
        )
    return None


def _in_memory(content: bytes) -> int:
    """Return a descriptor of a file in memory, at its beginning."""
    descriptor = os.memfd_create("bridle-bwrap")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
