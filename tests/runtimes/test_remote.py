"""The whole suite over SWE-ReX is `test_rex.py`; here the host is this machine without it."""

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure
from bridle.runtimes import conformance, make_runtime
from bridle.runtimes.base import Mount
from bridle.runtimes.conformance import run_check
from bridle.runtimes.remote import RemoteRuntime


class ThisMachine:
    """Does what is asked of a host with plain files and processes."""

    stopped = 0

    async def start(self):
        pass

    async def stop(self):
        self.stopped += 1

    async def execute(self, argv):
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, check=False)
        if done.returncode != 0:
            raise RuntimeFailure(done.stderr.decode())
        return done.stdout.decode()

    async def upload(self, source, path):
        await asyncio.to_thread(shutil.copy, source, path)


class Remote(RemoteRuntime):
    def _open_host(self, deployment):
        return ThisMachine()


class Elsewhere(Remote):
    """Takes this machine for another one, where sessions have no folder of ours."""

    def __init__(self, spec, session_id, scratch, mounts=()):
        elsewhere = {"deployment": {"type": "remote"}, "gateway": "http://gate.example:1/base"}
        super().__init__(RuntimeSpec(kwargs=elsewhere), session_id, scratch, mounts)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Remote, conformance.the_signal_that_ended_a_process_is_told),
        (Remote, conformance.links_do_not_lead_out_of_the_session),
        (Elsewhere, conformance.stop_can_be_repeated_and_is_the_end),
    ],
    ids=lambda each: each.__name__,
)
async def test_a_host_conforms(check, kind, tmp_path):
    await run_check(check, kind, tmp_path)


async def test_a_session_on_a_host_leaves_nothing_there(tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "tool").write_text("tool")
    runtime = Elsewhere(RuntimeSpec(), "s-1", tmp_path, [Mount(bundle, "/opt/bridle/x")])
    assert runtime.gateway_url("http://127.0.0.1:9/s/x/v1") == "http://gate.example:1/base/s/x/v1"
    await runtime.start()
    root = Path(runtime.home).parent
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
    assert isinstance(runtime._host, ThisMachine)
    assert runtime._host.stopped == 1


async def test_a_log_that_cannot_be_written_is_told(tmp_path):
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
        ({"kwargs": {"deployment": {"type": "modal"}}}, "say network = 'open'"),
        ({"kwargs": {"deployment": {"type": "modal"}}, "network": "open"}, "needs kwargs.gateway"),
        ({"kwargs": {"deployment": {"type": "moon"}, "gateway": "http://x"}}, "say network"),
    ],
)
def test_what_a_host_cannot_give_is_refused(spec, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        make_runtime(RuntimeSpec(backend="remote", **spec), "s-1", tmp_path)
