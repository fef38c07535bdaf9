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
from functools import cached_property
from typing import Literal

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure
from bridle.runtimes.base import ExecResult, binds
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
from bridle.runtimes.confinement import listen_inside, members_of, pid_namespace
from bridle.runtimes.process import (
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

    submittable = "binds:host_paths"
    folders = (*Sandbox.folders, "overlay")
    kind = "instance"
    start_s = START_S
    stop_s = STOP_S

    @classmethod
    def check(cls, spec: RuntimeSpec) -> None:
        """Raise `ConfigError` if `spec` lacks an image, or asks for what Apptainer cannot give."""
        if not spec.image:
            message = "runtime 'apptainer' needs an image: a .sif file, a root folder, or"
            raise ConfigError(f"{message} docker://NAME")
        if spec.cpus is not None:
            message = "runtime 'apptainer' gives no share of processors: the cluster's job has one"
            raise ConfigError(message)
        check_spec(spec, "apptainer", KWARGS)

    # ---- start and end

    async def start(self) -> None:
        """Start the instance; `exec` works afterwards. `RuntimeFailure` carries apptainer's
        message.
        """
        program()
        await super().start()

    @cached_property
    def _name(self) -> str:
        return f"bridle-{os.getpid()}-{secrets.token_hex(6)}"

    async def _begin(self) -> _Instance:
        words = ["instance", "start", *self.options(), str(self._spec.image), self._name]
        await _call(words, env={SESSION_MARK: self._session_id}, timeout_s=START_S)
        return _Instance(await _first_process(self._name))

    async def _listen(self, up: _Instance) -> socket.socket:
        return await asyncio.to_thread(listen_inside, up.pid, GATEWAY_PORT, timeout_s=CALL_S)

    def _lives(self, up: _Instance) -> bool:
        return started_at(up.pid) is not None

    def options(self) -> list[str]:
        """Return apptainer's options for the session: isolation, folders, mounts, network
        and GPUs.
        """
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
        """Return `watched`: memory and process limits are enforced by polling."""
        return "watched"

    def _members(self, up: _Instance) -> list[int]:
        """Return its processes; none is known where it shares the machine's process numbers."""
        space = pid_namespace(up.pid)
        return [] if space in {None, pid_namespace(os.getpid())} else members_of(str(space))

    def _end(self, up: _Instance) -> None:
        with suppress(ProcessLookupError):
            os.kill(up.pid, signal.SIGKILL)

    async def _let_go(self, up: _Instance) -> None:
        """Kill all processes of the instance; apptainer forgets it."""
        await super()._let_go(up)
        with suppress(RuntimeFailure):  # it has gone with its process
            await _call(["instance", "stop", self._name])

    # ---- commands

    async def _run(self, inside: Command) -> ExecResult:
        up = await self._running()
        base = {"HOME": self.home, "LANG": "C.UTF-8", "TERM": "dumb", "TMPDIR": "/tmp"}  # noqa: S108 - the instance's own
        env = client_environment() | prefix_names({**base, **self._spec.env, **inside.env})
        argv = [program(), "exec", f"instance://{self._name}", "/bin/bash", "-c"]
        argv += [RESTORE_ENV + ENTER, "bash", inside.cwd, *inside.argv]
        command = replace(inside, argv=argv, cwd="/", env=env)
        result = await run_process(self._marked(command, self._marks()))
        return await self._judged(with_signal(result), up)


def program() -> str:
    """Return the path of the command `apptainer`.

    Raises `RuntimeFailure`, which says what to install, if there is none.
    """
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
