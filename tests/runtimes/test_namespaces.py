"""Entering namespaces that `unshare` made, with and without privileges."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridle.errors import RuntimeFailure
from bridle.runtimes.confinement import begin, enter, is_privileged, listen_inside

HOLD = "echo up; exec sleep 60"


def test_a_process_of_another_user_than_root_is_not_privileged():
    assert is_privileged() in {True, False}
    assert os.geteuid() == 0 or not is_privileged()


@pytest.mark.parametrize("privileged", [True, False])
def test_listening_in_the_network_of_a_dead_sandbox_is_a_runtime_failure(privileged):
    with pytest.raises(RuntimeFailure, match=r"(?s)sandbox's network: .*No such file"):
        listen_inside(2**22 + 1, 4000, timeout_s=10, privileged=privileged)


def test_a_command_in_a_dead_sandbox_fails():
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


KEY = "bridle-probe"
WITH_A_KEY = f"""
import ctypes, os, platform, sys
add, control = {{"x86_64": (248, 250), "aarch64": (217, 219)}}[platform.machine()]
call = ctypes.CDLL(None, use_errno=True).syscall
assert call(control, 1, None) > 0  # a session keyring
key = call(add, b"user", b"{KEY}", b"secret", 6, -3)
assert key > 0
assert call(control, 5, key, 0x3F000000) == 0  # for those who possess it alone
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Runs a command whose session keyring holds a key."""


def keys_of(*command):
    words = [sys.executable, "-c", WITH_A_KEY, *command, "/bin/cat", "/proc/keys"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.mark.sandbox
def test_a_started_sandbox_has_no_kernel_keys_of_its_starter():
    assert KEY in keys_of()
    assert KEY not in keys_of(*begin())


@pytest.mark.sandbox
class TestEntering:
    def test_a_command_in_a_sandbox_has_no_kernel_keys_of_its_starter(self, sandbox):
        assert KEY not in keys_of(*enter(sandbox))

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

    def test_stdin_and_environment_reach_a_command_in_the_sandbox(self, sandbox):
        done = self.run(sandbox, "cat; echo $GIVEN", input="in ", env={"GIVEN": "b"})
        assert done.stdout == "in b\n"

    @pytest.mark.parametrize(
        "privileged",
        [pytest.param(is_privileged(), id="as-we-are"), pytest.param(False, id="plain")],
    )
    def test_listen_inside_opens_a_socket_in_the_sandbox_network_and_keeps_our_own_network(
        self, sandbox, privileged
    ):
        ours = Path("/proc/self/ns/net").stat().st_ino
        listener = listen_inside(sandbox, 4123, timeout_s=10, privileged=privileged)
        assert Path("/proc/self/ns/net").stat().st_ino == ours
        with listener:
            assert listener.getsockname() == ("127.0.0.1", 4123)
            seen = self.run(sandbox, "cat /proc/net/tcp")
        assert f"0100007F:{4123:04X}" in seen.stdout
