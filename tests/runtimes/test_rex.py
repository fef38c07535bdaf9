"""SWE-ReX itself, its local deployment and a server of its own: `make test-sandbox`."""

import secrets
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError
from bridle.runtimes.conformance import CHECKS, run_check
from bridle.runtimes.remote import KINDS, RemoteRuntime, RexHost


def test_a_deployment_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=rf"one of .*{KINDS[-1]}.*, not 'moon'"):
        RexHost({"type": "moon"})


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "swerex.deployment", None)
    with pytest.raises(ConfigError, match=r"run pip install .*\[remote\]'"):
        RexHost({"type": "local"})


@pytest.mark.sandbox
def test_a_field_that_a_deployment_does_not_have_is_named():
    with pytest.raises(ConfigError, match="type 'docker': memory"):
        RexHost({"type": "docker", "image": "x", "memory": 1})


@pytest.fixture(scope="module")
def server():
    """A server of SWE-ReX on this machine: the `kwargs` of a runtime on it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(8)
    words = ["--host", "127.0.0.1", "--port", str(port), "--auth-token", token]
    process = subprocess.Popen(
        [sys.executable, "-m", "swerex.server", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    host = "http://127.0.0.1"
    alive, key = f"{host}:{port}/is_alive", {"X-API-Key": token}
    request = urllib.request.Request(alive, headers=key)  # noqa: S310 - loopback
    for _ in range(600):
        try:
            urllib.request.urlopen(request, timeout=5).close()  # noqa: S310 - loopback
            break
        except OSError:
            assert process.poll() is None, "the server ended"
            time.sleep(0.1)
    deployment = {"type": "remote", "host": host, "port": port, "auth_token": token, "timeout": 30}
    yield {"deployment": deployment}
    process.terminate()
    process.wait(timeout=30)


@pytest.mark.sandbox
@pytest.mark.timeout(180)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_local_deployment_conforms(check, tmp_path):
    await run_check(check, RemoteRuntime, tmp_path)


@pytest.mark.sandbox
@pytest.mark.timeout(180)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_a_server_conforms(check, server, tmp_path):
    await run_check(check, RemoteRuntime, tmp_path, RuntimeSpec(kwargs=server))
