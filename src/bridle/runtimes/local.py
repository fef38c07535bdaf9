"""The `local` runtime: processes of this machine, under this user. It does not contain.

For harnesses that you trust, for tests and for demos. It gives a session a private home, temp and
work folder, a minimal environment (nothing of the caller's: no keys, tokens, proxies), and ends
every process of the session. It keeps nothing from reading what this user can read; `contains` is
False and results say so. What it cannot give (an image, limits, no network) it refuses.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bridle.aio import run_shielded
from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure, boundary
from bridle.runtimes.base import ExecResult, Mount
from bridle.runtimes.base_runtime import OnThisMachine
from bridle.runtimes.files import CopyLimits, remove_folders, take_out
from bridle.runtimes.process import KILL_S, Command, Leaders, end_all, members, run_process

KILL_GRACE_S = 1.0
STOP_S = 30.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The PATH for a caller that has none."""


class LocalRuntime(OnThisMachine):
    """One session's folders and processes on this machine; implements `base.Runtime`."""

    contains = False

    def __init__(
        self, spec: RuntimeSpec, session_id: str, scratch: Path, mounts: Sequence[Mount] = ()
    ) -> None:
        super().__init__(spec, session_id, scratch, mounts)
        self._home, self._tmp, self._work = scratch / "home", scratch / "tmp", scratch / "work"
        self.home = str(self._home)
        self.workdir = str(self._work / (spec.workdir or ""))
        self._leaders = Leaders()

    @classmethod
    def check(cls, spec: RuntimeSpec) -> None:
        """Raise `ConfigError` naming what `spec` asks for and this runtime cannot give."""
        asked = [
            name
            for name in ("image", "cpus", "memory_mb", "storage_mb", "max_processes", "gpus")
            if getattr(spec, name) is not None
        ]
        if spec.network == "none":
            asked.append("network = 'none'")
        if asked:
            raise ConfigError(
                f"runtime 'local' cannot give {', '.join(asked)}: it does not contain its "
                "processes; use 'bubblewrap' or 'docker'"
            )
        workdir = Path(spec.workdir or ".")
        if workdir.is_absolute() or ".." in workdir.parts:
            raise ConfigError(
                f"runtime 'local': workdir {spec.workdir!r} must lie inside the session's own "
                "folder: give a relative path"
            )
        if spec.kwargs:
            raise ConfigError(f"runtime 'local' takes no kwargs; given: {sorted(spec.kwargs)}")

    async def start(self) -> None:
        """Make the session's folders. Raises `RuntimeFailure` (no bash, no disk space, no
        permission).
        """
        with boundary(RuntimeFailure, f"cannot make the folders of session {self._session_id}"):
            for folder in (self._home, self._tmp, Path(self.workdir)):
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o700)
        self._check_mounts()
        if shutil.which("bash", path=self._environment()["PATH"]) is None:
            raise RuntimeFailure("the local runtime needs bash, which is not on PATH")
        self._usable = True

    def _environment(self) -> dict[str, str]:
        """Return the environment that every process gets; `RuntimeSpec.env` overrides it."""
        return {
            "PATH": search_path(),
            "HOME": self.home,
            "TMPDIR": str(self._tmp),
            "LANG": "C.UTF-8",
            "LC_ALL": "C.UTF-8",
            "USER": os.environ.get("USER", "agent"),
            "LOGNAME": os.environ.get("USER", "agent"),
            "SHELL": "/bin/bash",
            "TERM": "dumb",
            **self._spec.env,
        }

    async def _run(self, inside: Command) -> ExecResult:
        self._must_be_usable()
        if inside.cwd == self.workdir:
            with suppress(OSError):
                Path(self.workdir).mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - quick
        env = {**self._environment(), **inside.env}
        command = replace(inside, env=env, leaders=self._leaders)
        return await run_process(self._marked(command, self._marks()))

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder into the session's folders; modes and symbolic links
        are kept.
        """
        self._must_be_usable()
        with boundary(RuntimeFailure, f"cannot upload {source} to {target}"):
            await asyncio.to_thread(_copy_in, source, Path(self.workdir, target))

    async def write(self, target: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file of the session. A symbolic link at `target` is replaced, not followed."""
        self._must_be_usable()
        with boundary(RuntimeFailure, f"cannot write {target}"):
            await asyncio.to_thread(_write, Path(self.workdir, target), content, mode)

    async def download(
        self, source: str, target: Path, *, most: int | None = None
    ) -> tuple[str, ...]:
        """Copy a file or folder of the session to `target`, and return the paths that were not
        copied.

        The size limits are those of a copy of the work folder.
        """
        self._must_be_usable()
        path, room = Path(self.workdir, source), CopyLimits().bytes if most is None else most
        with boundary(RuntimeFailure, f"cannot download {source}"):
            _, left = await asyncio.to_thread(take_out, path, target, self._scratch, room)
        return left

    @property
    def _work_folder(self) -> Path:
        return Path(self.workdir)

    def inside(self, path: Path) -> str:
        """Return `path` unchanged: programs of the session see the machine's own paths."""
        return str(path)

    def gateway_url(self, url: str) -> str:
        """Return `url` unchanged: programs of the session use the machine's own network."""
        return url

    async def kill(self) -> None:
        """Kill all processes of the session, including daemons that left their process group."""
        marks = [f"{name}={value}".encode() for name, value in self._own_marks.items()]
        await run_shielded(
            end_all(lambda: members(marks, self._leaders), grace_s=KILL_GRACE_S),
            timeout_s=KILL_GRACE_S + 2 * KILL_S,
        )

    async def stop(self) -> None:
        """Kill all processes and delete the session's folders; the empty scratch folder remains."""
        self._usable = False
        try:
            await self.kill()
        finally:
            await run_shielded(
                asyncio.to_thread(remove_folders, (self._home, self._tmp, self._work)),
                timeout_s=STOP_S,
            )


def search_path() -> str:
    """Return the `PATH` of programs in a local runtime: this process's, or a default one."""
    return os.environ.get("PATH", PATH)


def _copy_in(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


def _write(target: Path, content: bytes, mode: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.bridle")
    aside.write_bytes(content)
    aside.chmod(mode)
    aside.replace(target)
