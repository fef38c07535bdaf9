"""The profile of a sandbox: system calls, powers, keys, as every command inside meets them."""

import json
import subprocess
import sys

import pytest
from tests.sandbox.images import spec_of
from tests.sandbox.ordinary import a_user

from bridle.config import RuntimeSpec
from bridle.runtimes import make_runtime
from bridle.runtimes.confinement import MOUNT, PREFIX, refused_calls
from bridle.runtimes.docker import docker
from bridle.runtimes.process import owner_mark

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

STATUS = "grep -E '^(NoNewPrivs|Seccomp|Cap(Inh|Prm|Eff|Bnd|Amb)):' /proc/self/status"
CALLS = """
for my $call (@ARGV) {
    my ($name, @words) = split /,/, $call;
    my $done = syscall(shift(@words), map { int } @words);
    print "$name ", $done < 0 ? $! + 0 : 0, "\\n";
}
"""
"""Perl, which every Debian has: does system calls and prints their errors."""
NO_KEYS = "test ! -s /proc/keys"

ROUND = """
import asyncio, json, sys
from pathlib import Path
from bridle.config import RuntimeSpec
from bridle.runtimes import make_runtime
async def main(folder, command):
    runtime = make_runtime(RuntimeSpec(backend="bubblewrap"), "profile", Path(folder))
    try:
        await runtime.start()
        done = await runtime.exec(command, timeout_s=60)
    finally:
        await runtime.stop()
    said = [done.stdout.decode(), done.stderr.decode(), done.exit_code]
    print(json.dumps(said))
asyncio.run(main(*sys.argv[1:]))
"""
"""A program that starts a sandbox for one command."""


@pytest.fixture(params=["as we are", "ordinary user"])
def inside(request):
    """Run a command in a sandbox that is started by us or, where we are root, by another user."""
    with a_user() as (python, place):
        words = python if request.param == "ordinary user" else [sys.executable]

        def run(command):
            whole = [*words, "-c", ROUND, str(place / "scratch"), command]
            done = subprocess.run(whole, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            out, err, code = json.loads(done.stdout)
            return out + err, code

        yield run


def perl(calls):
    words = " ".join(f"'{','.join(map(str, call))}'" for call in calls)
    return f"perl -e '{CALLS}' {words}"


def test_every_refused_system_call_fails_in_a_sandbox_and_threads_still_start(inside):
    kinds = [(f"namespace{bit}", 56, 1 << bit | 17, 0, 0, 0, 0) for bit in (17, 28)]
    calls = [(name, number, 0, 0, 0, 0, 0) for name, number in refused_calls("x86_64").items()]
    others = [("vsock", 41, 40, 1, 0), ("newer", 500), ("getpid", 39), ("clone3", 435, 0, 0)]
    said, _ = inside(perl([*calls, *kinds, *others]))
    seen = dict(line.split() for line in said.splitlines())
    names = [*refused_calls("x86_64"), "namespace17", "namespace28", "vsock"]
    assert {name: seen.get(name) for name in names} == dict.fromkeys(names, "1")
    assert (seen["newer"], seen["clone3"], seen["getpid"]) == ("38", "38", "0")


def test_sandbox_commands_have_no_capabilities_and_cannot_gain_any(inside):
    said, _ = inside(f"{STATUS}; cat /proc/1/status | {STATUS.removesuffix(' /proc/self/status')}")
    lines = said.splitlines()
    nothing = "0" * 16
    powers = [f"Cap{kind}:\t{nothing}" for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")]
    expected = [*powers, "NoNewPrivs:\t1", "Seccomp:\t2"]
    assert lines == expected * 2  # of a command, and of process 1


def test_kernel_keys_of_the_host_are_invisible_in_a_sandbox(inside):
    assert inside(f"cat /proc/keys 2>/dev/null; {NO_KEYS} && echo none") == ("none\n", 0)


def test_i386_programs_are_killed_in_a_sandbox(inside, tmp_path):
    program = bytes.fromhex(  # ELF for i386 that calls exit(0)
        "7f454c46010101000000000000000000020003000100000054800408340000000000000000000000"
        "34002000010000000000000001000000000000000080040800800408600000006000000005000000"
        "00100000b801000000bb00000000cd80"
    )
    text = "".join(f"\\x{byte:02x}" for byte in program)
    said, code = inside(f"printf '{text}' > p; chmod +x p; ./p; echo $?")
    assert "159" in said.splitlines()  # 128 + SIGSYS
    assert code == 0
    own = tmp_path / "p"
    own.write_bytes(program)
    own.chmod(0o755)
    assert subprocess.run([own], check=False).returncode == 0


async def test_a_task_without_limits_gets_4_gib_512_processes_and_10_gib_of_disk(place, backend):
    runtime = await place()
    file_kib = int((await runtime.exec("ulimit -f")).stdout)
    assert file_kib == 10 << 20
    if backend == "docker":
        words = ["inspect", "--format", "{{.HostConfig.Memory}} {{.HostConfig.PidsLimit}}"]
        containers = (await docker(["ps", "-q", "--filter", "label=bridle.session"])).split()
        found = [await docker([*words, one]) for one in containers]
        assert f"{4 << 30} 512" in found
        return
    if runtime.limits == "watched":
        assert int((await runtime.exec("ulimit -d")).stdout) == 8 << 20
        return
    groups = [*MOUNT.rglob(f"{PREFIX}{owner_mark()}-scratch-0")]
    limits = [path for group in groups for path in group.glob("*.max")]
    limits += [path for group in groups for path in group.glob("memory.limit_in_bytes")]
    kept = {path.name: path.read_text().strip() for path in limits}
    assert kept["pids.max"] == "512"
    assert str(4 << 30) in {kept.get("memory.max"), kept.get("memory.limit_in_bytes")}


async def test_containers_keep_docker_s_seccomp_filter_and_no_new_privileges(place, backend):
    runtime = await place()
    said = (await runtime.exec(STATUS)).stdout.decode()
    assert "NoNewPrivs:\t1\nSeccomp:\t2\n" in said
    assert backend == "docker" or "CapBnd:\t0000000000000000" in said
    done = await runtime.exec("unshare -U true")
    assert not done.ok


async def test_a_checker_s_runtime_shares_no_namespace_with_the_agent_s(place, backend):
    agents, checkers = await place(), await place()
    names = ["ipc", "mnt", "net", "pid", "uts"] + ["user"] * (backend == "bubblewrap")
    command = f"for at in {' '.join(names)}; do readlink /proc/self/ns/$at; done"
    here, there = [(await one.exec(command)).stdout.split() for one in (agents, checkers)]
    assert len(here) == len(there) == len(names)
    assert not {*here} & {*there}


@pytest.mark.parametrize("workdir", ["/srv/new/folder", "/usr"])
async def test_an_unprivileged_container_user_owns_its_home_uploads_and_new_work_folder(
    tmp_path, workdir
):
    spec = {**await spec_of("docker"), "workdir": workdir, "kwargs": {"user": "1234:1235"}}
    runtime = make_runtime(RuntimeSpec(**spec), "profile", tmp_path)
    await runtime.start()
    try:
        await runtime.write("given", b"x")
        said = await runtime.exec('echo y >> given && stat -c %u:%g . given "$HOME"; id -u')
    finally:
        await runtime.stop()
    folder = "0:0" if workdir == "/usr" else "1234:1235"  # a folder of the image stays the image's
    assert said.stdout.decode().split() == [folder, "1234:1235", "1234:1235", "1234"]
