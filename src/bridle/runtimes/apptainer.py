"""The `apptainer` runtime: an instance for each session, for clusters where no daemon may run.

An instance is a set of namespaces over an image (a `.sif` file, a root folder, or `docker://...`,
which apptainer fetches into its own cache) with an overlay of the session's own, so that all of the
image can be written to. Commands enter it with `apptainer exec`; ending its first process ends
them all, and the next command starts it again over the same overlay.

Everything is asked for without privileges (`--userns`), so its network is ours to listen in: a
loopback and nothing else, one port of which is carried to the gateway. Control groups are seldom a
user's own on a cluster, so memory, processes and storage are watched, as they are for `bubblewrap`
where it has none.

`singularity` is taken where there is no `apptainer`.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure, boundary
from bridle.runtimes.base import ExecResult, Mount, binds
from bridle.runtimes.base_runtime import (
    ENTER,
    GATEWAY_PORT,
    RESTORE_ENV,
    RunningSandbox,
    Sandbox,
    check_spec,
    prefix_names,
    with_signal,
)
from bridle.runtimes.files import remove_folders
from bridle.runtimes.limits import ResourceLimits, Watched, first_reached, members_of, pid_namespace
from bridle.runtimes.namespaces import listen_inside
from bridle.runtimes.process import (
    KILL_S,
    POLL_S,
    SESSION_MARK,
    Command,
    output_of,
    run_process,
    started_at,
)

PROGRAMS = ("apptainer", "singularity")
CALL_S = 120.0
START_S = 1800.0
"""An image may have to be fetched and unpacked."""
STOP_S = 60.0
LAST_S = 0.5
CLIENT = ("HOME", "PATH", "USER", "LOGNAME", "TMPDIR", "XDG_RUNTIME_DIR")
"""Variables of our environment that the command itself needs."""
KWARGS = frozenset({"binds"})


@dataclass(slots=True)
class _Instance(RunningSandbox):
    """An instance that runs."""

    pid: int
    """Its first process, by the machine's numbers."""


class ApptainerRuntime(Sandbox[_Instance]):
    """One session's instance; implements `base.Runtime`."""

    folders = (*Sandbox.folders, "overlay")
    kind = "instance"
    start_s = START_S
    stop_s = STOP_S

    def __init__(
        self, spec: RuntimeSpec, session_id: str, scratch: Path, mounts: Sequence[Mount] = ()
    ) -> None:
        refuse_what_apptainer_cannot(spec)
        super().__init__(spec, session_id, scratch, mounts)
        self._name = f"bridle-{os.getpid()}-{secrets.token_hex(6)}"

    # ---- start and end

    async def start(self) -> None:
        """Implement `base.Runtime.start`. `RuntimeFailure` carries apptainer's message."""
        program()
        self._check_mounts()
        with boundary(RuntimeFailure, f"cannot make the folders of session {self._session_id}"):
            for name in (*self.folders, "aside"):
                (self._scratch / name).mkdir(mode=0o700, exist_ok=True)
        self._usable = True
        await self._running()

    async def _begin(self) -> _Instance:
        words = ["instance", "start", *self.options(), str(self._spec.image), self._name]
        await _call(words, env={SESSION_MARK: self._session_id}, timeout_s=START_S)
        return _Instance(await _first_process(self._name))

    async def _listen(self, up: _Instance) -> socket.socket:
        return await asyncio.to_thread(listen_inside, up.pid, GATEWAY_PORT, timeout_s=CALL_S)

    def _lives(self, up: _Instance) -> bool:
        return started_at(up.pid) is not None

    def options(self) -> list[str]:
        own, spec = self._scratch, self._spec
        words = ["--userns", "--containall", "--no-privs", "--overlay", str(own / "overlay")]
        words += ["--home", f"{own / 'home'}:{self.home}", "--bind", f"{own / 'work'}:{self._top}"]
        words += ["--bind", f"{own / 'tmp'}:/tmp", "--hostname", "sandbox"]
        for mount in (*self._mounts, *binds(spec)):
            words += ["--bind", f"{mount.source}:{mount.target}:ro"]
        if spec.network != "open":
            words += ["--net", "--network", "none"]
        if spec.gpus is not None:
            words.append("--nv")
        return words

    @property
    def limits(self) -> Literal["kernel", "watched"]:
        return "watched"

    async def _watch(self, up: _Instance) -> None:
        """Kill the instance when it exceeds a limit."""
        up.reached = await first_reached(
            Watched(
                members=lambda: _members(up.pid),
                folders=tuple(self._scratch / name for name in self.folders),
                bounds=ResourceLimits(None, self._memory_bytes, self._spec.max_processes),
                storage_bytes=self._storage_bytes,
            )
        )
        _end(up.pid)

    async def _let_go(self, up: _Instance) -> None:
        """Kill all processes of the instance; apptainer forgets it."""
        up.let_go = True
        _end(up.pid)
        await up.resources.aclose()
        if not await _is_gone(up.pid, KILL_S):
            message = f"the instance of session {self._session_id} does not end after SIGKILL"
            raise RuntimeFailure(message)
        with suppress(RuntimeFailure):  # it has gone with its process
            await _call(["instance", "stop", self._name])

    async def _remove(self) -> None:
        folders = [self._scratch / name for name in (*self.folders, "aside")]
        await asyncio.to_thread(remove_folders, folders)

    # ---- commands

    async def _run(self, inside: Command) -> ExecResult:
        up = await self._running()
        base = {"HOME": self.home, "LANG": "C.UTF-8", "TERM": "dumb", "TMPDIR": "/tmp"}  # noqa: S108 - the instance's own
        env = client_environment() | prefix_names({**base, **self._spec.env, **inside.env})
        argv = [program(), "exec", f"instance://{self._name}", "/bin/bash", "-c"]
        argv += [RESTORE_ENV + ENTER, "bash", inside.cwd, *inside.argv]
        command = replace(inside, argv=argv, cwd="/", env=env)
        result = await run_process(self._marked(command, self._marks()))
        result = with_signal(result)
        if result.signal == signal.SIGKILL and not result.timed_out:
            # The first process ends last, a moment after the command that its end has ended.
            await _is_gone(up.pid, LAST_S)
        if up.reached is not None:
            return replace(result, limit=up.reached)
        if started_at(up.pid) is None and not up.let_go:
            message = f"the instance of session {self._session_id} was ended from outside"
            raise RuntimeFailure(message)
        return result


def _members(pid: int) -> list[int]:
    """Return an instance's processes; none where it shares the machine's process numbers."""
    space = pid_namespace(pid)
    return [] if space in {None, pid_namespace(os.getpid())} else members_of(str(space))


def program() -> str:
    """Return the path of the command. `RuntimeFailure` says what to install if there is none."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        message = "the apptainer runtime needs the command apptainer (1.1 or later) on PATH"
        raise RuntimeFailure(message)
    return found


def client_environment() -> dict[str, str]:
    """Return the variables of this process that apptainer needs: caches, settings, logins."""
    own = ("APPTAINER_", "SINGULARITY_")
    found = os.environ.items()
    return {name: value for name, value in found if name in CLIENT or name.startswith(own)}


def refuse_what_apptainer_cannot(spec: RuntimeSpec) -> None:
    """Raise `ConfigError` naming what `spec` lacks or asks for beyond what instances give."""
    if not spec.image:
        message = "runtime 'apptainer' needs an image: a .sif file, a root folder, or docker://NAME"
        raise ConfigError(message)
    if spec.cpus is not None:
        message = "runtime 'apptainer' gives no share of processors: the cluster's job has one"
        raise ConfigError(message)
    check_spec(spec, "apptainer", KWARGS)


async def _call(
    words: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = CALL_S
) -> str:
    """Run `apptainer WORDS` and return its stdout. `RuntimeFailure` carries its stderr."""
    own = {**client_environment(), **(env or {})}
    command = Command([program(), *words], cwd="/", env=own, timeout_s=timeout_s)
    return await output_of(command, f"apptainer {' '.join(words[:2])}")


async def _first_process(name: str) -> int:
    said = await _call(["instance", "list", "--json", name])
    try:
        found = {each["instance"]: int(each["pid"]) for each in json.loads(said)["instances"]}
        return found[name]
    except (ValueError, KeyError, TypeError) as error:
        message = f"apptainer instance list: no process of {name} in {said[:500]!r}"
        raise RuntimeFailure(message) from error


async def _is_gone(pid: int, patience_s: float) -> bool:
    loop = asyncio.get_running_loop()
    until = loop.time() + patience_s
    while started_at(pid) is not None and loop.time() < until:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(POLL_S)
    return started_at(pid) is None


def _end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
