"""The example of a runtime of one's own, on the service that it is written for."""

import os
import re
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.ports import free_port

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure
from bridle.plugins import load
from bridle.runtimes import conformance, make_runtime, runtime_class
from bridle.runtimes.conformance import CHECKS, run_check

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own-runtime"
BACKEND = "hosted:HostedRuntime"


@pytest.fixture(scope="module")
def service():
    """The service in a process of its own: the `kwargs` of a runtime on it."""
    port = free_port()
    token = secrets.token_hex(8)
    process = subprocess.Popen([sys.executable, EXAMPLE / "service.py", str(port), token])
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            assert process.poll() is None, "the service ended"
            time.sleep(0.05)
    url = f"http://127.0.0.1:{port}"
    yield {"deployment": {"type": "remote", "url": url, "token": token}}
    process.terminate()
    process.wait(timeout=30)


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)


def test_example_runtime_has_at_most_100_lines():
    assert len((EXAMPLE / "hosted.py").read_text().splitlines()) <= 100


@pytest.mark.parametrize(
    "check",
    [
        conformance.exit_codes_are_true,
        conformance.files_and_folders_go_in_with_their_modes,
        conformance.stop_can_be_repeated_and_is_the_end,
    ],
    ids=lambda each: each.__name__,
)
async def test_example_runtime_passes_three_conformance_checks(check, service, tmp_path):
    await run_check(check, runtime_class(BACKEND), tmp_path, RuntimeSpec(kwargs=service))


@pytest.mark.sandbox
@pytest.mark.timeout(600)
def test_conformance_program_in_the_guide_passes_on_the_example_runtime(service, tmp_path):
    page = (ROOT / "docs" / "guides" / "remote-sandboxes.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    at = service["deployment"]
    for shown, given in (("http://127.0.0.1:8900", at["url"]), ("secret", at["token"])):
        assert shown in program
        program = program.replace(shown, given)
    (tmp_path / "test_mine.py").write_text(program)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:schemathesis"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(EXAMPLE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"{len(CHECKS)} passed" in done.stdout


def test_missing_deployment_fields_are_named(tmp_path):
    spec = RuntimeSpec(
        backend=BACKEND, kwargs={"deployment": {"type": "remote", "url": "http://x"}}
    )
    with pytest.raises(ConfigError, match=r"needs url and token, not \['url'\]"):
        make_runtime(spec, "s-1", tmp_path)


async def test_a_service_that_refuses_the_token_fails_the_start(service, tmp_path):
    deployment = service["deployment"] | {"token": "another"}
    spec = RuntimeSpec(backend=BACKEND, kwargs={"deployment": deployment})
    runtime = make_runtime(spec, "s-1", tmp_path)
    with pytest.raises(RuntimeFailure, match=r"cannot start the host of session s-1: .*401"):
        await runtime.start()
    await runtime.stop()


async def test_error_of_a_failed_host_command_contains_its_output(service):
    host = load(BACKEND, {}, what="runtime").open_host(None, service["deployment"])
    await host.start()
    try:
        with pytest.raises(OSError, match=r"ls: exit code 2: .*nowhere"):
            await host.execute(["ls", "/nowhere"])
    finally:
        await host.stop()
