"""Entering namespaces that `unshare` made, with and without privileges."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from bridle.errors import RuntimeFailure
from bridle.runtimes.namespaces import enter, is_privileged, listen_inside

HOLD = "echo up; exec sleep 60"


def test_only_root_with_all_powers_is_privileged():
    assert is_privileged() in {True, False}
    assert os.geteuid() == 0 or not is_privileged()


@pytest.mark.parametrize("privileged", [True, False])
def test_a_sandbox_that_is_gone_cannot_be_listened_in(privileged):
    with pytest.raises(RuntimeFailure, match=r"(?s)sandbox's network: .*No such file"):
        listen_inside(2**22 + 1, 4000, timeout_s=10, privileged=privileged)


def test_entering_what_is_gone_fails():
    command = [*enter(2**22 + 1), "/bin/true"]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


@pytest.fixture
def sandbox():
    """Namespaces of every kind, and a process in them."""
    spaces = ["-U", "-m", "-p", "-n", "-i", "-u", "-C", "--fork", "--mount-proc", "-r"]
    with subprocess.Popen(
        ["unshare", "--kill-child", *spaces, "/bin/bash", "-c", HOLD], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        pid = int(children.read_text().split()[0])
        while not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep"):
            time.sleep(0.01)
        yield pid
        process.kill()


@pytest.mark.sandbox
class TestEntering:
    def run(self, sandbox, script, **options):
        command = [*enter(sandbox), "/bin/bash", "-c", script]
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)

    def test_a_command_sees_the_sandboxs_processes_and_network(self, sandbox):
        done = self.run(sandbox, "cat /proc/1/cmdline; cat /proc/net/dev | wc -l")
        assert done.stdout.startswith("sleep\x0060")
        assert done.stdout.rstrip().endswith("3")

    def test_exit_codes_and_signals_are_those_of_the_command(self, sandbox):
        assert self.run(sandbox, "exit 7").returncode == 7
        assert self.run(sandbox, "kill -KILL $$").returncode == -9
        assert self.run(sandbox, "kill -SEGV $$").returncode == -11

    def test_input_and_environment_reach_it(self, sandbox):
        done = self.run(sandbox, "cat; echo $GIVEN", input="in ", env={"GIVEN": "b"})
        assert done.stdout == "in b\n"

    @pytest.mark.parametrize(
        "privileged",
        [pytest.param(is_privileged(), id="as-we-are"), pytest.param(False, id="plain")],
    )
    def test_a_socket_in_its_network_is_ours_to_accept_on(self, sandbox, privileged):
        ours = Path("/proc/self/ns/net").stat().st_ino
        listener = listen_inside(sandbox, 4123, timeout_s=10, privileged=privileged)
        assert Path("/proc/self/ns/net").stat().st_ino == ours
        with listener:
            assert listener.getsockname() == ("127.0.0.1", 4123)
            seen = self.run(sandbox, "cat /proc/net/tcp")
        assert f"0100007F:{4123:04X}" in seen.stdout
