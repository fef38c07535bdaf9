"""A Docker daemon that is killed under a session: a failure of the surroundings, and no hang."""

import asyncio
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from tests.node.house import a_node, statuses, task
from tests.sandbox.images import bring_image

from bridle.config import RuntimeSpec
from bridle.node.results import Fault, blame
from bridle.runtimes.docker import docker
from bridle.runtimes.process import running_processes
from bridle.types import Cause

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

OPTIONS = ("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false")


GROUP = f"bridle-daemon-{os.getpid()}"
"""The control group above its containers'."""


def those_of(folder, *, begin=b""):
    """Living processes whose command line begins so and names `folder`."""
    for each in running_processes():
        with suppress(OSError):
            words = Path(f"/proc/{each.pid}/cmdline").read_bytes()
            if words.startswith(begin) and str(folder).encode() in words:
                yield each.pid


def contained():
    """Living processes of its containers, which outlive it."""
    for each in running_processes():
        with suppress(OSError):
            if f"/{GROUP}/" in Path(f"/proc/{each.pid}/cgroup").read_text():
                yield each.pid


def kill(pids):
    as_root("kill", "-KILL", *map(str, pids))


def as_root(*words):
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    subprocess.run([*sudo, *words], check=False, capture_output=True)


@pytest.fixture
async def daemon(tmp_path_factory, monkeypatch):
    """The folder of a daemon of this test's own, in its own mounts: killing it harms nobody."""
    folder = tmp_path_factory.mktemp("d")
    socket = f"unix://{folder}/s"
    places = ("--data-root", folder / "data", "--exec-root", folder / "exec", "-p", folder / "pid")
    own = ("-H", socket, "--group", str(os.getgid()), "--cgroup-parent", f"/{GROUP}")
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(  # noqa: ASYNC220 - quick
            [*sudo, "unshare", "--mount", "dockerd", *own, *OPTIONS, *places],
            stdout=log,
            stderr=log,
        ) as process,
    ):
        monkeypatch.setenv("DOCKER_HOST", socket)
        try:
            while not (folder / "s").exists() or not await answers():
                assert process.poll() is None, (folder / "log").read_text()
                await asyncio.sleep(0.1)
            yield folder
        finally:
            while left := [*those_of(folder), *contained()]:
                kill(left)
                await asyncio.sleep(0.05)
    as_root("rm", "-rf", folder)
    as_root("find", "/sys/fs/cgroup", "-depth", "-path", f"*/{GROUP}*", "-type", "d", "-delete")


async def answers():
    with suppress(Exception):
        return await docker(["version", "--format", "{{.Server.Version}}"])
    return None


async def test_a_killed_docker_daemon_ends_the_session_with_cause_infrastructure(daemon, tmp_path):
    image = await asyncio.to_thread(bring_image)
    spec = RuntimeSpec(backend="docker", image=image)
    async with a_node(tmp_path) as node, asyncio.TaskGroup() as group:
        running = group.create_task(node.run(task("sleep 55.75", runtime=spec)))
        while "RUNNING" not in statuses(node):
            assert not running.done(), running.result().error
            await asyncio.sleep(0.05)
        kill(those_of(daemon, begin=b"dockerd"))
        async with asyncio.timeout(40):
            result = await running
    assert (result.status, result.cause) == ("ERROR", Cause.INFRASTRUCTURE), result.error
    assert blame(result.status, result.cause) is Fault.INFRASTRUCTURE
    assert "run: " in result.error
