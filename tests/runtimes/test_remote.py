import asyncio
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from tests.ports import free_port

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure
from bridle.runtimes import conformance, make_runtime
from bridle.runtimes.base import Mount
from bridle.runtimes.conformance import CHECKS, run_check
from bridle.runtimes.remote import KINDS, RemoteRuntime, RexHost


class ThisMachine:
    """Does what is asked of a host with plain files and processes."""

    stopped = 0
    """How often one was."""

    async def start(self):
        pass

    async def stop(self):
        ThisMachine.stopped += 1

    async def execute(self, argv):
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, check=False)
        if done.returncode != 0:
            raise RuntimeFailure(done.stderr.decode())
        return done.stdout.decode()

    async def upload(self, source, path):
        await asyncio.to_thread(shutil.copy, source, path)


class Remote(RemoteRuntime):
    def open_host(self, deployment):
        return ThisMachine()


class Elsewhere(Remote):
    """Takes this machine for another one, where sessions have no folder of ours."""

    def __init__(self, spec, session_id, scratch, mounts=()):
        elsewhere = {"deployment": {"type": "remote"}, "gateway": "http://gate.example:1/base"}
        super().__init__(RuntimeSpec(kwargs=elsewhere), session_id, scratch, mounts)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Remote, conformance.the_signal_that_ended_a_process_is_reported),
        (Remote, conformance.links_do_not_lead_out_of_the_session),
        (Elsewhere, conformance.stop_can_be_repeated_and_is_the_end),
    ],
    ids=lambda each: each.__name__,
)
async def test_a_remote_host_passes_three_conformance_checks(check, kind, tmp_path):
    await run_check(check, kind, tmp_path)


async def test_stop_removes_the_session_folder_on_the_remote_host(tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "tool").write_text("tool")
    runtime = Elsewhere(RuntimeSpec(), "s-1", tmp_path, [Mount(bundle, "/opt/bridle/x")])
    assert runtime.gateway_url("http://127.0.0.1:9/s/x/v1") == "http://gate.example:1/base/s/x/v1"
    await runtime.start()
    root, before = Path(runtime.home).parent, ThisMachine.stopped
    try:
        seen = await runtime.exec(["cat", runtime.inside(bundle / "tool")])
        assert seen.stdout == b"tool"
        assert runtime.inside(tmp_path) == str(tmp_path)
        await runtime.exec("(setsid sleep 60 </dev/null >/dev/null 2>&1 &); touch out")
        await runtime.download("out", tmp_path / "out")
        with pytest.raises(RuntimeFailure, match=r"working folder .*/nowhere does not exist"):
            await runtime.exec("true", cwd="nowhere")
    finally:
        await runtime.stop()
    assert (tmp_path / "out").exists()
    assert not root.exists()
    assert ThisMachine.stopped == before + 1


async def test_an_unwritable_log_is_a_runtime_failure(tmp_path):
    runtime = Remote(RuntimeSpec(), "s-1", tmp_path)
    await runtime.start()
    with pytest.raises(RuntimeFailure, match="running a command"):
        await runtime.exec("echo x", log=Path("/dev/full/log"))
    await runtime.stop()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"image": "x"}, "cannot give image"),
        ({"network": "none"}, "cannot keep network = 'none'"),
        ({"workdir": "/etc"}, "must be relative"),
        ({"kwargs": {"python3": "x"}}, "kwargs: python3"),
        ({"kwargs": {"deployment": {"type": "modal"}}}, "set network = 'open'"),
        ({"kwargs": {"deployment": {"type": "modal"}}, "network": "open"}, "needs kwargs.gateway"),
        ({"kwargs": {"deployment": {"type": "moon"}, "gateway": "http://x"}}, "set network"),
    ],
)
def test_unsupported_options_of_a_host_are_refused(spec, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        make_runtime(RuntimeSpec(backend="remote", **spec), "s-1", tmp_path)


def test_an_unknown_deployment_type_is_refused_with_the_known_types():
    with pytest.raises(ConfigError, match=rf"one of .*{KINDS[-1]}.*, not 'moon'"):
        RexHost({"type": "moon"})


def test_a_missing_remote_package_is_refused_with_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "swerex.deployment", None)
    with pytest.raises(ConfigError, match=r"run pip install .*\[remote\]'"):
        RexHost({"type": "local"})


@pytest.mark.sandbox
def test_an_unknown_deployment_field_is_named():
    with pytest.raises(ConfigError, match="type 'docker': memory"):
        RexHost({"type": "docker", "image": "x", "memory": 1})


@pytest.fixture(scope="module")
def server():
    """A server of SWE-ReX on this machine: the `kwargs` of a runtime on it."""
    port = free_port()
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
async def test_swe_rex_local_deployment_passes_each_conformance_check(check, tmp_path):
    await run_check(check, RemoteRuntime, tmp_path)


@pytest.mark.sandbox
@pytest.mark.timeout(180)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_swe_rex_server_passes_each_conformance_check(check, server, tmp_path):
    await run_check(check, RemoteRuntime, tmp_path, RuntimeSpec(kwargs=server))
