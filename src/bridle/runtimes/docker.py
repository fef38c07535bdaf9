"""The `docker` runtime: a container for each session, through the `docker` command.

The container's process 1 does nothing but live; commands are `docker exec`s. Ending the container
ends them all, and the next command starts it again: the files stay until `stop`.

The gateway is the only address there is (`network = "gateway_only"`). Where this process may enter
the container's network (root, with the daemon on this machine) the container has no network at all
but a loopback, one port of which is carried to the gateway. Anywhere else it is put into an
internal network of Docker's, in which containers do not hear each other, and the gateway listens at
that network's own address: other services that listen on every address of the machine are then
reached too.

What the command line gives for a command that a signal ended is 128 plus the signal's number;
codes from 129 to 159 are reported as signals.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Self
from weakref import WeakKeyDictionary

import structlog

from bridle.aio import Nursery, run_shielded
from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure, boundary
from bridle.runtimes.base import ExecResult, binds
from bridle.runtimes.base_runtime import (
    END,
    ENTER,
    FRAME_BYTES,
    RESTORE_ENV,
    Contained,
    RunningSandbox,
    check_spec,
    prefix_names,
    with_signal,
)
from bridle.runtimes.confinement import is_privileged, listen_inside
from bridle.runtimes.files import Keep, Owner, pack_bytes, remove_folders
from bridle.runtimes.process import (
    EXEC_MARK,
    SESSION_MARK,
    Command,
    is_dead,
    is_marked,
    output_of,
    owner_mark,
    run_process,
)
from bridle.types import JSON

OWNER_LABEL = "bridle.owner"
SESSION_LABEL = "bridle.session"
CALL_S = 120.0
"""Time limit for a call of the daemon, except for pulling and building an image."""
OUTPUT = 16 << 20
DONE = ("Pull complete", "Already exists")
CLIENT = ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY")

Locks = dict[str, asyncio.Lock]
_pulls: WeakKeyDictionary[asyncio.AbstractEventLoop, Locks] = WeakKeyDictionary()
"""A lock for each image, of each event loop: a lock works in one loop alone."""
log = structlog.get_logger(__name__)


async def docker(
    words: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = CALL_S,
    **more: Any,  # noqa: ANN401 - as `Command` takes it
) -> str:
    """Run `docker WORDS` and return its stdout. `RuntimeFailure` carries its stderr."""
    argv, own = [program(), *words], {**(env or {}), **client_environment()}
    command = Command(argv, "/", own, timeout_s=timeout_s, output_limit=OUTPUT, **more)
    return await output_of(command, f"docker {words[0]}")


def program() -> str:
    """Return the path of the `docker` command. `RuntimeFailure` if there is none."""
    found = shutil.which("docker")
    if found is None:
        raise RuntimeFailure(
            "the docker runtime needs the command docker on PATH, and a daemon it may speak to"
        )
    return found


def check_daemon() -> None:
    """Raise `RuntimeFailure` unless the daemon answers; takes some 50 ms."""
    words = [program(), "version", "--format", "{{.Server.Version}}"]
    env = client_environment()
    with boundary(RuntimeFailure, "docker version"):
        done = subprocess.run(
            words, capture_output=True, check=False, env=env, text=True, timeout=CALL_S
        )
    if done.returncode != 0:
        said = done.stderr.strip()[-300:]
        raise RuntimeFailure(
            f"the docker daemon cannot be used: {said}; start it or set DOCKER_HOST"
        )


def client_environment() -> dict[str, str]:
    """Return the variables of this process that the docker client needs: daemon address and
    logins.
    """
    config = os.environ.get("DOCKER_CONFIG") or str(Path("~/.docker").expanduser())
    found = {name: os.environ[name] for name in CLIENT if name in os.environ}
    return {**found, "DOCKER_CONFIG": config, "PATH": os.environ.get("PATH", "/usr/bin:/bin")}


async def image_facts(image: str, *, build: str | None = None) -> dict[str, Any]:
    """Return the daemon's metadata of an image; a missing image is built or pulled first.

    `build` is a folder with a `Dockerfile` to build it from; `None` = it is pulled. Calls for one
    image wait for each other, so that it is built or pulled once.
    """
    locks = _pulls.setdefault(asyncio.get_running_loop(), {})
    async with locks.setdefault(image, asyncio.Lock()):
        with suppress(RuntimeFailure):
            return await _inspected(image)
        if build is not None:
            log.info("building an image", image=image, folder=build)
            try:
                words = ["build", "--quiet", "--force-rm", "--tag", image, build]
                await docker(words, timeout_s=None)
            except RuntimeFailure as error:
                message = f"image {image!r} cannot be built of {build}: {error}"
                raise RuntimeFailure(message) from error
            return await _inspected(image)
        log.info("pulling an image", image=image)
        try:
            await _pull(image)
        except RuntimeFailure as error:
            message = f"image {image!r} is not here and cannot be pulled: {error}"
            raise RuntimeFailure(message) from error
        log.info("pulled an image", image=image)
        return await _inspected(image)


async def _pull(image: str) -> None:
    """Pull an image and log the progress."""
    with tempfile.TemporaryDirectory(prefix="bridle-pull-") as folder:
        said = Path(folder, "said")
        async with Nursery(lambda _error: None) as nursery:  # a failed report ends no pull
            nursery.start(_tell_layers(image, said), name="image-pull")
            await docker(["pull", image], timeout_s=None, log=said)


async def _tell_layers(image: str, said: Path) -> None:
    logged = (0, 0)
    while True:
        await asyncio.sleep(LOOK_S)
        found = layers(said.read_text(errors="replace")) if said.exists() else logged  # noqa: ASYNC240 - quick
        if found != logged:
            logged = found
            log.info("pulling an image", image=image, layers_done=found[0], layers=found[1])


def layers(said: str) -> tuple[int, int]:
    """Return how many layers of an image are complete, and of how many, from the output of `docker
    pull` so far.
    """
    states = dict(re.findall(r"^([0-9a-f]{12}): (.+?)\s*$", said, re.MULTILINE))
    return sum(state in DONE for state in states.values()), len(states)


async def _inspected(image: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(await docker(["image", "inspect", image]))[0]
    return facts


async def remove_left_behind() -> int:
    """Remove the containers of sessions whose Bridle process has ended; returns how many.

    Without a `docker` command or its daemon there are none.
    """
    if shutil.which("docker") is None:
        return 0
    try:
        form = f'{{{{.ID}}}} {{{{.Label "{OWNER_LABEL}"}}}}'
        words = ["ps", "--all", "--no-trunc", "--filter", f"label={OWNER_LABEL}", "--format", form]
        lines = (await docker(words, timeout_s=10)).splitlines()
    except RuntimeFailure:
        return 0
    dead = [line.split()[0] for line in lines if is_dead(line.split()[1])]
    if dead:
        with suppress(RuntimeFailure):  # another process removes it at the same moment
            await docker(["rm", "--force", "--volumes", *dead])
    return len(dead)


HOLD = "exec >/dev/null 2>&1; while :; do sleep 86400 & wait; done"
"""Process 1: it reaps orphans, and nothing inside can kill it."""

FOLDERS = 'mkdir -p -- "$1" "$2"; chmod 700 -- "$2"'
ABOUT = 'id -u; id -g; if [ -d "$1" ]; then echo there; fi'
NETWORK = "bridle-gateway-only"
HOME = "/home/agent"
FILES = 4096
STOP_S = 120.0
LOOK_S = 2.0
PATIENCE = 20.0
"""The daemon is not asked for more than this share of the time: 1 / (1 + PATIENCE)."""
HERE_S = 5.0
"""Time that a container's first process may take to be itself, on a busy machine."""
MISSING = "Could not find the file"
"""The answer of `docker cp` for a path that the container does not have."""

EXIT_SEEN_TRIES = 50
"""Looks, 0.1 s apart, for the end of a container that starts no commands any more; one at its
limit of processes starts none either, and lives."""
DROPPED = ("AUDIT_WRITE", "MKNOD", "NET_RAW", "SETFCAP", "SYS_CHROOT")
"""Powers that Docker leaves to a container's root and that no task needs."""
ROOT = (None, "", "0", 0, "root")
"""A container's user, where it is root."""
KWARGS = frozenset({"binds", "build", "user"})


class DockerRuntime(Contained[RunningSandbox]):
    """One session's container; implements `base.Runtime`."""

    submittable = "binds:host_paths build:host_path user"
    home = HOME
    kind = "container"
    start_s = CALL_S
    stop_s = STOP_S
    made_of: str | None = None
    """An image of its own, to be removed with it."""
    _container: str | None = None
    _kills = 0

    @classmethod
    def check(cls, spec: RuntimeSpec) -> None:
        """Raise `ConfigError` if `spec` lacks an image, or asks for what Docker cannot give."""
        if not spec.image:
            raise ConfigError("runtime 'docker' needs an image: set runtime.image")
        check_spec(spec, "docker", KWARGS)

    # ---- start and end

    async def start(self) -> None:
        """Pull the image, or build it from `kwargs.build`, if it is missing, and start a container.

        `RuntimeFailure` carries the daemon's message.
        """
        self._check_mounts()
        image = await image_facts(str(self._spec.image), build=self._spec.kwargs.get("build"))
        if self._spec.workdir is None and image["Config"].get("WorkingDir") not in (None, "", "/"):
            self.workdir = image["Config"]["WorkingDir"]
        with boundary(RuntimeFailure, f"cannot make the container of session {self._session_id}"):
            (self._scratch / "aside").mkdir(exist_ok=True)
            await run_shielded(self._create(await self._options()), timeout_s=2 * CALL_S)
        self._usable = True
        await self._running()
        if self._spec.kwargs.get("user", image["Config"].get("User")) not in ROOT:
            await self._make_folders()
        elif self.made_of is None:  # else they are there
            argv = ["bash", "-c", FOLDERS, "bash", self.workdir, HOME]
            await self._run(Command(argv, env={}, cwd="/"))

    async def _make_folders(self) -> None:
        """Make the work folder and the home of a user who cannot: the daemon does, and no program
        of the image has the powers of root for it.
        """
        about = ["exec", self._id, "/bin/bash", "-c", ABOUT, "bash", self.workdir]
        user, group, *there = (await docker(about)).split()
        self._owner = Owner(int(user), int(group))
        for folder, mode in ((HOME, 0o700), (self.workdir, 0o755))[: 1 if there else 2]:
            made = pack_bytes(None, folder.removeprefix("/"), mode, self._owner)
            await docker(["cp", "-", f"{self._id}:/"], stdin=made)

    async def _create(self, options: Sequence[str]) -> None:
        words = ["create", *options, str(self._spec.image), "/bin/bash", "-c", HOLD]
        self._container = await docker(words, env={SESSION_MARK: self._session_id})

    async def _options(self) -> list[str]:
        spec = self._spec
        words = ["--label", f"{SESSION_LABEL}={self._session_id}", "--hostname", "sandbox"]
        words += ["--label", f"{OWNER_LABEL}={owner_mark()}", "--env", SESSION_MARK]
        words += ["--security-opt", "no-new-privileges"]
        words += [f"--cap-drop={power}" for power in DROPPED]
        words += ["--pids-limit", str(spec.max_processes), "--entrypoint", ""]
        words += ["--ulimit", f"nofile={FILES}:{FILES}", "--ulimit", "core=0:0"]
        words += ["--network", await self._network()]
        words += ["--memory", f"{spec.memory_mb}m", "--memory-swap", f"{spec.memory_mb}m"]
        if spec.cpus is not None:
            words += ["--cpus", str(spec.cpus)]
        words += ["--ulimit", f"fsize={self._storage_bytes}:{self._storage_bytes}"]
        if spec.gpus is not None:
            words += ["--gpus", str(spec.gpus)]
        if "user" in spec.kwargs:
            words += ["--user", str(spec.kwargs["user"])]
        for mount in (*self._mounts, *binds(spec)):
            words += ["--volume", f"{mount.source}:{mount.target}:ro"]
        return words

    async def _network(self) -> str:
        """Return the network to join, made if it is missing; sets the gateway's `_address`."""
        if self._spec.network == "none" or (
            self._spec.network == "gateway_only" and is_privileged()
        ):
            return "none"
        if self._spec.network == "open" and is_privileged():
            return "bridge"
        name = "bridge" if self._spec.network == "open" else NETWORK
        with suppress(RuntimeFailure):
            return await self._listening_in(name)
        alone = ["--internal", "--opt", "com.docker.network.bridge.enable_icc=false"]
        with suppress(RuntimeFailure):  # another session makes it at the same moment
            await docker(["network", "create", *alone, name])
        return await self._listening_in(name)

    async def _listening_in(self, network: str) -> str:
        facts = json.loads(await docker(["network", "inspect", network]))[0]
        self._address = (facts["IPAM"]["Config"][0]["Gateway"], 0)
        return network

    async def _begin(self) -> RunningSandbox:
        await docker(["start", self._id])
        return RunningSandbox()

    async def _listen(self, up: RunningSandbox) -> socket.socket:
        del up
        if is_privileged():
            pid = int(await docker(["inspect", "--format", "{{.State.Pid}}", self._id]))
            await self._is_here(pid)
            return await asyncio.to_thread(listen_inside, pid, self._address[1], timeout_s=CALL_S)
        listener = socket.create_server(self._address)
        listener.settimeout(0)
        self._address = listener.getsockname()
        return listener

    async def _is_here(self, pid: int) -> None:
        """Wait until a process is seen to be the container's first: it has yet to become that."""
        try:
            async with asyncio.timeout(HERE_S):
                while not is_marked(pid, [self._mark]):  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise RuntimeFailure(
                "the Docker daemon runs on another machine, where Bridle cannot listen inside a "
                "container; set network = 'open'"
            ) from None

    async def _watch(self, up: RunningSandbox) -> None:
        """Kill the container when its files take too much room."""
        words = ["inspect", "--size", "--format", "{{.SizeRw}}", self._id]
        loop = asyncio.get_running_loop()
        began = loop.time()
        while int(await docker(words)) <= self._storage_bytes:
            await asyncio.sleep(max(LOOK_S, PATIENCE * (loop.time() - began)))
            began = loop.time()
        up.reached = "storage"
        await docker(["kill", self._id])

    async def _let_go(self, up: RunningSandbox) -> None:
        up.let_go = True
        try:
            with suppress(RuntimeFailure):  # it has ended by itself
                await docker(["kill", self._id])
            await docker(["wait", self._id])
        finally:  # also where there is no daemon any more
            await up.resources.aclose()

    async def _remove(self) -> None:
        container, self._container = self._container, None
        if container is not None:
            await docker(["rm", "--force", "--volumes", container])
        if self.made_of is not None:
            await docker(["image", "rm", "--force", self.made_of])
        await asyncio.to_thread(remove_folders, [self._scratch / "aside"])

    # ---- commands

    async def _run(self, inside: Command) -> ExecResult:
        up = await self._running()
        marks = self._marks()
        execution = f"{EXEC_MARK}={marks[EXEC_MARK]}"
        base = {"HOME": HOME, "LANG": "C.UTF-8", "TERM": "dumb"}
        env = prefix_names({**base, **self._spec.env, **inside.env})
        reads = inside.stdin is not None
        words = [program(), "exec", *(["--interactive"] if reads else [])]
        # By name only: the values stay out of this machine's process list.
        for name in (*env, *marks):
            words += ["--env", name]
        words += [self._id, "/bin/bash", "-c", RESTORE_ENV + ENTER, "bash", inside.cwd]
        argv, env = [*words, *inside.argv], {**client_environment(), **env}
        command = self._marked(replace(inside, argv=argv, cwd="/", env=env), marks)
        ended = False
        try:
            result = await run_process(command)
            ended = not result.timed_out
        finally:
            if not ended:
                await run_shielded(self._end(execution), timeout_s=STOP_S)
        return await self._judged(with_signal(result), up)

    async def _end(self, execution: str) -> None:
        """Kill the processes of one command, by its mark."""
        if self._up is not None and self._container is not None:
            with suppress(RuntimeFailure):
                await docker(["exec", self._id, "/bin/bash", "-c", END, "bash", execution])

    async def _judged(self, result: ExecResult, up: RunningSandbox) -> ExecResult:
        """Add the limit that ended a command; `RuntimeFailure` if the container ended."""
        if result.ok or up.let_go:
            return result
        if up.reached is None and (result.signal == signal.SIGKILL or result.exit_code == 1):
            with boundary(RuntimeFailure, f"looking after session {self._session_id}"):
                up.reached = await self._ended_by_memory()
        if up.reached is None:
            return result
        reached, up.reached = up.reached, None if self._up is up else up.reached
        return replace(result, limit=reached)

    async def _ended_by_memory(self) -> str | None:
        state = await self._state()
        tries = EXIT_SEEN_TRIES
        # The daemon reports a container as running until it has seen its first process exit.
        while state["Running"] and tries and not await self._starts_commands():
            await asyncio.sleep(0.1)
            state, tries = await self._state(), tries - 1
        if not state["Running"]:
            await self.kill()
            if state["OOMKilled"]:
                return "memory"
            message = f"the container of session {self._session_id} was ended from outside"
            raise RuntimeFailure(message)
        counters = "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control"
        said = await docker(["exec", self._id, "/bin/bash", "-c", f"{counters} 2>/dev/null; true"])
        counts = [line.split()[1] for line in said.splitlines() if line.startswith("oom_kill ")]
        kills, before = max(map(int, counts), default=0), self._kills
        self._kills = kills
        return "memory" if kills > before else None

    async def _state(self) -> JSON:
        state: JSON = json.loads(await docker(["inspect", "--format", "{{json .State}}", self._id]))
        return state

    async def _starts_commands(self) -> bool:
        try:
            await docker(["exec", self._id, "/bin/bash", "-c", "true"])
        except RuntimeFailure:
            return False
        return True

    # ---- files

    async def copy_kept(self, folder: Path, keep: Keep | None = None) -> None:
        """Copy the work folder to `folder`, but only the files and links that `keep` names (`None`
        = all).

        A work folder that the harness deleted gives an empty copy.
        """
        try:
            await super().copy_kept(folder, keep)
        except RuntimeFailure as error:
            if MISSING not in str(error):
                raise
            await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)

    async def copied(self, scratch: Path) -> Self:
        """Start a second container from an image of this one's files; the copy deletes the image at
        its end.
        """
        await self.kill()
        image = await docker(["commit", "--pause=false", self._id])
        spec = self._spec.model_copy(update={"image": image, "workdir": self.workdir})
        copy = type(self)(spec, self._session_id, scratch, self._mounts)
        copy.made_of = image
        try:
            await copy.start()
        except BaseException:
            await run_shielded(copy.stop(), timeout_s=STOP_S)
            raise
        return copy

    async def _put(self, archive: bytes | Path, folder: PurePosixPath) -> None:
        words = ["cp", "-", f"{self._id}:{folder}"]
        with suppress(RuntimeFailure):  # the folder is not there yet, or the next try says why
            await docker(words, stdin=archive)
            return
        made = await self._run(Command(["mkdir", "-p", "--", str(folder)], env={}, cwd="/"))
        if not made.ok:
            raise RuntimeFailure(made.stderr.decode(errors="replace").strip())
        await docker(words, stdin=archive)

    async def _get(self, path: PurePosixPath, archive: Path, most: int) -> None:
        room = most + FRAME_BYTES
        await docker(["cp", f"{self._id}:{path}", "-"], stdout=archive, stdout_limit=room)

    # ---- addresses

    def _forwards(self) -> bool:
        return self._spec.network != "none"

    @property
    def _id(self) -> str:
        if self._container is None:
            raise RuntimeFailure(
                f"session {self._session_id} has no container: its runtime is not started, or has "
                "ended"
            )
        return self._container
