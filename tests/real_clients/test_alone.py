"""Programs in `alone` reach the gateway and nothing else: not this machine, not the net."""

import asyncio
import contextlib
import socket
import sys
import threading

import pytest
from tests.real_clients.alone import BACKEND, Alone

from bridle.config import RuntimeSpec
from bridle.runtimes import make_runtime
from bridle.runtimes.conformance import CHECKS, run_check
from bridle.runtimes.process import Leaders, members

pytestmark = pytest.mark.harnesses

REACH = """
import socket, sys
family, *address = eval(sys.argv[1])
try:
    with socket.socket(getattr(socket, family)) as found:
        found.settimeout(5)
        found.connect(*address)
        print(found.recv(100).decode())
except OSError as error:
    sys.exit(repr(error))
"""
"""A program that says what a server greets with, or why it cannot be reached."""


@contextlib.contextmanager
def greeting(text, *, family=socket.AF_INET, address=("127.0.0.1", 0)):
    """A server that says `text` to whoever connects; yields its address."""
    with socket.socket(family) as server:
        server.bind(address)
        server.listen()

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(text)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextlib.asynccontextmanager
async def a_runtime(tmp_path, *ports):
    spec = RuntimeSpec(backend=BACKEND, kwargs={"doors": [ports[0]]})
    runtime = make_runtime(spec, "s-alone", tmp_path)
    for port in ports[1:]:
        assert runtime.gateway_url(f"http://127.0.0.1:{port}/v1") == f"http://127.0.0.1:{port}/v1"
    await runtime.start()

    async def reach(*address):
        return await runtime.exec([sys.executable, "-c", REACH, repr(address)], timeout_s=20)

    try:
        yield reach
    finally:
        await runtime.stop()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_isolated_runtime_passes_every_runtime_check(check, tmp_path):
    await run_check(check, Alone, tmp_path)


async def test_an_isolated_program_reaches_the_gateway_and_the_given_port(tmp_path):
    with greeting(b"a door") as (_, door), greeting(b"the gateway") as (_, port):
        async with a_runtime(tmp_path, door, port) as reach:
            for number, said in ((door, b"a door\n"), (port, b"the gateway\n")):
                result = await reach("AF_INET", ("127.0.0.1", number))
                assert (result.stdout, result.exit_code) == (said, 0), result


async def test_an_isolated_program_reaches_no_other_port_or_socket_of_the_host(tmp_path):
    hidden = "\0bridle-test-alone"
    with (
        greeting(b"open") as (_, door),
        greeting(b"another") as (_, port),
        greeting(b"hidden", family=socket.AF_UNIX, address=hidden),
    ):
        async with a_runtime(tmp_path, door) as reach:
            for address in (("AF_INET", ("127.0.0.1", port)), ("AF_UNIX", hidden)):
                result = await reach(*address)
                assert (result.stdout, result.exit_code) == (b"", 1)
                assert b"Connection refused" in result.stderr


@pytest.mark.parametrize(
    "address", [("AF_INET", ("192.0.2.1", 80)), ("AF_INET6", ("2001:db8::1", 80))]
)
async def test_an_isolated_program_has_no_route_to_external_addresses(tmp_path, address):
    async with a_runtime(tmp_path, 1) as reach:
        result = await reach(*address)
    assert (result.stdout, result.exit_code) == (b"", 1)
    assert b"unreachable" in result.stderr


async def test_an_isolated_program_cannot_resolve_host_names(tmp_path):
    async with a_runtime(tmp_path, 1) as reach:
        result = await reach("AF_INET", ("example.com", 80))
    assert (result.stdout, result.exit_code) == (b"", 1)
    assert b"gaierror" in result.stderr


async def test_the_port_forwarder_of_an_isolated_program_ends_with_its_command(tmp_path):
    async with a_runtime(tmp_path, 1) as reach:
        result = await reach("AF_INET", ("127.0.0.1", 1))
        assert (result.stdout, result.exit_code) == (b"\n", 0), result
        left = members((b"BRIDLE_SESSION=s-alone",), Leaders())
        async with asyncio.timeout(15):
            while left:
                await asyncio.sleep(0.01)
                left &= members((b"BRIDLE_SESSION=s-alone",), Leaders())
        assert left == set()
