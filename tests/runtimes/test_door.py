"""A door over the local runtime: who may hand a command over, and what goes along."""

import asyncio
import os
import resource
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridle.config import RuntimeSpec
from bridle.errors import RuntimeFailure
from bridle.runtimes.base import ExecResult
from bridle.runtimes.door import WAIT_S, Door, container_command, mounts_of, python
from bridle.runtimes.door_client import ask, request
from bridle.runtimes.local import LocalRuntime
from bridle.runtimes.process import Command, run_process


@pytest.fixture
async def sandbox(tmp_path):
    runtime = LocalRuntime(RuntimeSpec(), f"door-{tmp_path.name}", tmp_path / "a" / "scratch")
    await runtime.start()
    yield runtime
    await runtime.stop()


@pytest.fixture
async def door(sandbox, tmp_path):
    # Longer than a socket's path may be.
    at = tmp_path / ("long-" * 25) / "door"
    async with Door(sandbox, at, seen=str(at), shared=str(sandbox.share())) as door:
        yield door
    assert not at.exists()


async def through(door, argv, cwd, **env):
    shims = {"PATH": f"{door.programs}:{os.environ['PATH']}"}
    return await run_process(Command(argv, cwd=str(cwd), env={**shims, **env}, timeout_s=15))


async def test_what_it_was_started_with_stays_outside_and_what_it_sets_goes_along(door, sandbox):
    door.withheld = {"KEY": "secret", "MODE": "a"}
    line = 'echo "$KEY|$MODE|$MORE|$PATH"'
    env = {"KEY": "secret", "MODE": "b", "MORE": "c"}
    result = await through(door, ["bash", "-c", line], sandbox.workdir, **env)
    key, mode, more, path = result.stdout.decode().strip().split("|")
    assert (key, mode, more) == ("", "b", "c")
    assert door.programs not in path


async def test_a_folder_that_is_not_shared_becomes_the_work_folder(door, sandbox, tmp_path):
    result = await through(door, ["bash", "-c", "pwd"], tmp_path)
    assert result.stdout.decode().strip() == sandbox.workdir


async def test_docker_s_own_command_line_is_understood(door, sandbox):
    Path(sandbox.workdir, "inner").mkdir()  # noqa: ASYNC240 - quick
    docker = f"{door.seen}/container"
    made = await through(door, [docker, "run", "-d", "--rm", "image"], "/")
    assert (made.exit_code, made.stdout) == (0, b"sandbox\n")
    line = ["exec", "-w", f"{sandbox.workdir}/inner", "-e", "A=b=c", "id", "bash", "-c"]
    result = await through(door, [docker, *line, 'echo "$A $PWD"; exit 3'], "/")
    assert result.exit_code == 3
    assert result.stdout.decode() == f"b=c {sandbox.workdir}/inner\n"
    assert (await through(door, [docker, "stop", "id"], "/")).ok
    refused = await through(door, [docker, "exec", "--privileged", "id", "true"], "/")
    assert refused.exit_code == 125
    assert door.failure is None


def test_an_option_that_is_not_known_is_refused():
    assert container_command(["exec", "-i", "id", "true"]) == ("", ["true"], {})
    with pytest.raises(ValueError, match="--privileged"):
        container_command(["exec", "--privileged", "id", "true"])


@pytest.mark.parametrize("streams", [1, 3])
async def test_an_open_folder_is_no_stream(door, sandbox, streams):
    folder = os.open(sandbox.workdir, os.O_RDONLY)
    body = request("bash", ["-c", "touch ran"])
    with socket.socket(socket.AF_UNIX) as client:
        at = os.open(door.seen, os.O_RDONLY)
        client.connect(f"/proc/self/fd/{at}/socket")
        socket.send_fds(client, [body[:1]], [folder] * streams)
        os.close(at)
        os.close(folder)
        client.settimeout(10)
        assert await asyncio.to_thread(client.recv, 100) == b""
    assert not Path(sandbox.workdir, "ran").exists()  # noqa: ASYNC240 - quick


def answer_of(door, frame, streams=3):
    """What the door says to these bytes, sent with so many open files; nothing follows them."""
    with socket.socket(socket.AF_UNIX) as client:
        at = os.open(door.seen, os.O_RDONLY)
        client.connect(f"/proc/self/fd/{at}/socket")
        os.close(at)
        null = os.open(os.devnull, os.O_RDWR)
        socket.send_fds(client, [frame], [null] * streams)
        os.close(null)
        client.shutdown(socket.SHUT_WR)
        client.settimeout(10)
        try:
            return client.recv(100)
        except ConnectionResetError:  # it did not read to the end
            return b""


def framed(body):
    return len(body).to_bytes(4, "big") + body


async def test_a_request_that_is_too_long_is_not_read(door):
    assert await asyncio.to_thread(answer_of, door, b"\xff\xff\xff\xff") == b""


class Ready:
    """A sandbox in which every command does well."""

    workdir = shared_at = "/work"

    def share(self):
        return Path(self.workdir)

    async def attach(self, argv, *, env, cwd, streams):
        assert argv
        return ExecResult(
            exit_code=0,
            signal=None,
            timed_out=False,
            stdout=b"",
            stderr=b"",
            truncated=False,
            duration_s=0.0,
        )


NO_REQUESTS = (
    *("", "/", "/ 0", "/ 1", "/ -1 sh", "/ many sh"),
    *("/ 1 container", "/ 2 container exec", "/ 3 container exec id"),
    *("/ 3 container exec -w", "/ 3 container exec -e"),
)
WORDS = st.sampled_from([b"container", b"exec", b"-w", b"-e", b"-i", b"-x", b"id", b"sh", b""])
BODIES = st.binary() | st.builds(
    lambda count, words: b"\0".join([b"/", str(count).encode(), *words]),
    st.integers(-2, 7),
    st.lists(WORDS, max_size=7),
)


@pytest.mark.parametrize("words", NO_REQUESTS)
async def test_what_asks_for_no_command_has_no_answer(door, words):
    frame = framed(words.replace(" ", "\0").encode())
    assert await asyncio.to_thread(answer_of, door, frame) == b""
    assert door.failure is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary() | BODIES.map(framed), st.integers(1, 3))
async def test_no_bytes_of_a_harness_end_a_door_or_are_a_failure_of_its_sandbox(
    tmp_path_factory, frame, streams
):
    at = tmp_path_factory.mktemp("door") / "door"
    async with Door(Ready(), at, seen=str(at), shared="/shared") as door:
        for sent in (frame or b"\0", framed(b"/\x001\x00sh")):
            answer = await asyncio.to_thread(answer_of, door, sent, streams)
        assert answer in (b"exit 0\n", b"failed\n") if streams == 3 else answer == b""
        assert door.failure is None


async def test_a_door_without_a_free_file_number_waits_for_one(door):
    with socket.socket(socket.AF_UNIX) as client:
        at = os.open(door.seen, os.O_RDONLY)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(at)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            client.connect(f"/proc/self/fd/{at}/socket")
            socket.send_fds(client, [request("sh", ["-c", "exit 4"])], [0, 1, 2])
            await asyncio.sleep(3 * WAIT_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.close(at)
        client.settimeout(10)
        assert await asyncio.to_thread(client.recv, 100) == b"exit 4\n"


async def test_a_command_line_that_no_system_takes_is_no_failure_of_the_sandbox(door):
    body = b"/\x002\x00sh\x00" + b"x" * (3 << 20)
    answer = await asyncio.to_thread(answer_of, door, framed(body))
    assert answer.startswith(b"failed cannot start 'sh'")
    assert door.failure is None


async def test_a_sandbox_that_cannot_run_it_is_remembered(door, sandbox):
    await sandbox.stop()
    result = await through(door, ["sh", "-c", "true"], "/")
    assert result.exit_code == 125
    assert b"not started, or was stopped" in result.stderr
    assert isinstance(door.failure, RuntimeFailure)


async def test_a_shut_door_is_told(sandbox, tmp_path):
    at = tmp_path / "door"
    async with Door(sandbox, at, seen=str(at), shared=str(sandbox.share())):
        path = f"{at}/socket"
    with pytest.raises(FileNotFoundError):
        ask(path, request("bash", []))


async def test_a_folder_that_cannot_be_made_is_a_failure_of_the_runtime(sandbox, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeFailure, match="cannot open a door"):
        async with Door(sandbox, tmp_path / "file" / "door", seen="/", shared="/"):
            pass


def test_a_contained_harness_sees_the_door_and_the_python_that_opens_it(tmp_path):
    targets = {mount.target for mount in mounts_of(tmp_path, "/opt/door")}
    assert "/opt/door" in targets
    assert all(not mount.writable for mount in mounts_of(tmp_path, "/opt/door"))
    assert any(python().is_relative_to(target) for target in {*targets, "/usr"})
