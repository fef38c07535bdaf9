import asyncio
import os
import resource
import socket
import struct
import subprocess
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure
from bridle.runtimes.base import ExecResult, Mount
from bridle.runtimes.base_runtime import (
    ENV_PREFIX,
    RESTORE_ENV,
    Archived,
    Forwarder,
    check_spec,
    prefix_names,
)
from bridle.runtimes.bubblewrap import BubblewrapRuntime
from bridle.runtimes.docker import DockerRuntime
from bridle.runtimes.process import run_process

CONTAINING = (BubblewrapRuntime, DockerRuntime)


class Folder(Archived):
    """Commands run in `scratch`, whatever folder they name, and see it as `TOP`."""

    contains = True
    workdir = "/work"
    home = "/home/agent"

    async def start(self):
        self._usable = True

    async def kill(self):
        pass

    async def _run(self, inside):
        self._must_be_usable()
        (self._scratch / "aside").mkdir(exist_ok=True)
        self.asked = inside
        at = self._scratch / PurePosixPath(inside.cwd).relative_to("/")
        argv = [word.replace("/work", f"{self._scratch}/work") for word in inside.argv]
        at.mkdir(parents=True, exist_ok=True)
        env = {"PATH": "/usr/bin:/bin", **inside.env, **self._marks()}
        return await run_process(replace(inside, argv=argv, cwd=str(at), env=env))


@pytest.fixture
async def place(tmp_path):
    made = Folder(RuntimeSpec(), "s", tmp_path)
    (tmp_path / "aside").mkdir()
    await made.start()
    return made


async def test_a_command_string_runs_in_bash_and_a_relative_cwd_is_below_the_workdir(place):
    result = await place.exec("exit 4 | cat; pwd", cwd="deep", env={"A": "b"}, stdin=b"x")
    assert result.stdout.endswith(b"/work/deep\n")
    assert (place.asked.cwd, place.asked.env, place.asked.stdin) == ("/work/deep", {"A": "b"}, b"x")
    await place.exec(["true"], cwd="/elsewhere")
    assert (place.asked.cwd, place.asked.argv) == ("/elsewhere", ["true"])


async def test_every_command_gets_a_unique_mark_in_its_environment(place):
    first = await place.exec("echo $BRIDLE_SESSION $BRIDLE_EXEC")
    second = await place.exec("echo $BRIDLE_SESSION $BRIDLE_EXEC")
    assert [first.stdout, second.stdout] == [b"s s/1\n", b"s s/2\n"]


async def test_files_go_in_and_out_as_archives(place, tmp_path):
    source = tmp_path / "given"
    source.mkdir()
    (source / "file").write_text("given")
    await place.upload(source, "deep/folder")
    await place.write("deep/other", b"written", mode=0o755)
    await place.download("deep", tmp_path / "out")
    assert (tmp_path / "out/folder/file").read_text() == "given"
    assert (tmp_path / "out/other").stat().st_mode & 0o777 == 0o755
    assert list((tmp_path / "aside").iterdir()) == []
    with pytest.raises(RuntimeFailure, match="nothing: Cannot stat"):
        await place.download("nothing", tmp_path / "out")
    with pytest.raises(RuntimeFailure, match="deep/other"):
        await place.write("deep/other/x", b"")


async def test_before_its_start_a_runtime_refuses_commands_and_files(tmp_path):
    place = Folder(RuntimeSpec(), "s", tmp_path)
    for work in (place.exec("true"), place.upload(tmp_path, "x"), place.download("x", tmp_path)):
        with pytest.raises(RuntimeFailure, match="session s is not started, or was stopped"):
            await work


@pytest.mark.parametrize("kind", CONTAINING)
def test_a_mounted_path_is_seen_at_its_target(kind, tmp_path):
    runtime = kind(RuntimeSpec(image="/"), "s", tmp_path, [Mount(tmp_path / "b", "/opt/b")])
    assert runtime.inside(tmp_path / "b" / "bin" / "x") == "/opt/b/bin/x"
    assert runtime.inside(tmp_path / "other") == str(tmp_path / "other")


@pytest.mark.parametrize("kind", CONTAINING)
async def test_a_missing_mount_is_named(kind, tmp_path):
    gone = Mount(tmp_path / "gone", "/opt/b")
    with pytest.raises(RuntimeFailure, match=f"does not exist: {tmp_path}/gone|needs bwrap"):
        await kind(RuntimeSpec(image="/"), "s", tmp_path, [gone]).start()


@pytest.mark.parametrize("kind", CONTAINING)
def test_gateway_url_inside_a_sandbox_has_one_fixed_address(kind, tmp_path):
    runtime = kind(RuntimeSpec(image="/"), "s", tmp_path)
    assert runtime.gateway_url("http://127.0.0.1:81/s/x/v1") == "http://127.0.0.1:4000/s/x/v1"
    with pytest.raises(RuntimeFailure, match="has one gateway"):
        runtime.gateway_url("http://127.0.0.1:82/")
    closed = kind(RuntimeSpec(image="/", network="none"), "s", tmp_path)
    assert closed.gateway_url("http://127.0.0.1:81/") == "http://127.0.0.1:81/"


def test_a_workdir_that_leads_upwards_is_refused():
    check_spec(RuntimeSpec(workdir="/a/b", kwargs={"user": 1}), "x", {"user"})
    with pytest.raises(ConfigError, match=r"runtime 'x': workdir '/a/\.\./b' must not contain"):
        check_spec(RuntimeSpec(workdir="/a/../b"), "x", ())


def test_environment_names_are_prefixed_outside_the_sandbox():
    assert prefix_names({"LD_PRELOAD": "x", "PATH": "y"}) == {
        "BRIDLE_IN_LD_PRELOAD": "x",
        "BRIDLE_IN_PATH": "y",
    }


def test_environment_names_are_restored_inside_the_sandbox():
    given = {"PATH": "/usr/bin:/bin", "A": "a b\nc 'd' $HOME", "EMPTY": ""}
    done = subprocess.run(
        ["/bin/bash", "-c", f"{RESTORE_ENV} exec env -0"],
        env=prefix_names(given),
        capture_output=True,
        text=True,
        check=True,
    )
    seen = dict(word.split("=", 1) for word in done.stdout.split("\0") if word)
    assert given.items() <= seen.items()
    assert not [name for name in seen if name.startswith((ENV_PREFIX, "BRIDLE_"))]


@pytest.mark.parametrize(
    ("exit_code", "timed_out", "ok"),
    [(0, False, True), (0, True, False), (1, False, False), (None, False, False)],
)
def test_ok_means_exit_code_0_in_time(exit_code, timed_out, ok):
    assert ExecResult(exit_code, None, timed_out, b"", b"", False, 0.1).ok is ok


def listening():
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0)
    return listener, listener.getsockname()[1]


@asynccontextmanager
async def a_forwarder(serve):
    """A forwarder in front of a server; gives it and the port that it listens on."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    listener, port = listening()
    async with server, Forwarder(listener) as forwarder:
        forwarder.target = ("127.0.0.1", server.sockets[0].getsockname()[1])
        yield forwarder, port


async def echo(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_forwarder_passes_bytes_and_half_closes_both_ways():
    async with a_forwarder(echo) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = bytes(range(256)) * 4000
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent
        writer.close()


@pytest.mark.parametrize("busy", ["reading", "writing"])
async def test_forwarder_closes_the_upstream_connection_of_a_vanished_client(busy):
    arrived = asyncio.get_running_loop().create_future()

    async def serve(reader, writer):
        got = await reader.readexactly(1)
        with suppress(ConnectionError):
            if busy == "writing":
                while True:
                    writer.write(b"y" * 65536)
                    await writer.drain()
            got += await reader.read()
        writer.close()
        arrived.set_result(got)

    async with a_forwarder(serve) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x")
        if busy == "writing":
            await reader.readexactly(1)
        # It ends without a word: what it had not read is answered with a reset.
        client = writer.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        async with asyncio.timeout(15):
            assert await arrived == b"x"


async def test_forwarder_keeps_100_concurrent_connections_apart():
    async with a_forwarder(echo) as (_, port):

        async def one(number):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{number}\n".encode())
            answer = await reader.readline()
            writer.close()
            return int(answer)

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(number)) for number in range(100)]
    assert [task.result() for task in running] == list(range(100))


@pytest.mark.parametrize("target", [None, "closed"])
async def test_forwarder_without_a_reachable_target_closes_the_connection(target):
    async with a_forwarder(echo) as (forwarder, port):
        closed, number = listening()
        closed.close()
        forwarder.target = None if target is None else ("127.0.0.1", number)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(15):
            assert await reader.read() == b""
        writer.close()


async def test_a_closed_forwarder_accepts_no_connection():
    async with a_forwarder(echo) as (_, port):
        pass
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_forwarder_survives_running_out_of_file_descriptors():
    async with a_forwarder(echo) as (_, port):
        client = socket.create_connection(("127.0.0.1", port))
        with every_descriptor_taken():
            for _ in range(20):  # it tries to accept meanwhile
                await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection(sock=client)
        writer.write(b"x")
        async with asyncio.timeout(15):
            assert await reader.readexactly(1) == b"x"
        writer.close()


@contextmanager
def every_descriptor_taken():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.open(os.devnull, os.O_RDONLY)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, hard))  # it was the lowest free one
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(taken)


def descriptors():
    """Return the number of descriptors that this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_forwarder_frees_a_connection_that_the_gateway_closed_and_the_client_keeps_open():
    async def close(reader, writer):
        await reader.readexactly(1)
        writer.close()

    async with a_forwarder(close) as (forwarder, port):
        forwarder.linger_s = 0.01
        before = descriptors()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x")
        async with asyncio.timeout(15):
            assert await reader.read() == b""
            while descriptors() > before + 1:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.005)
        writer.close()
