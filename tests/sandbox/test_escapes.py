"""Escapes of a hostile harness, one test each: contained, and named in the result."""

import asyncio
import http.server
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.peaks import peak_kib
from tests.sandbox.images import spec_of

from bridle.config import RuntimeSpec
from bridle.errors import RuntimeFailure
from bridle.runtimes import make_runtime
from bridle.runtimes.confinement import MOUNT, PREFIX, remove_empty
from bridle.runtimes.docker import remove_left_behind

SPARSE = "dd bs=1M count=0 status=none of="
"""Makes a file that is nothing but a hole of `seek` MiB."""

TOPS = ("/", "/usr", "/etc", "/usr/bin", "/root", "/var/tmp")
"""Folders of the machine, at the same path."""

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]


@contextmanager
def listening():
    """A server of this machine, on all its addresses that are loopback's; gives its port."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def reaches(runtime, host, port, *, within_s=3):
    """Return whether a connection from inside comes about."""
    script = f"exec 3<>/dev/tcp/{host}/{port}"
    return (await runtime.exec(script, timeout_s=within_s)).ok


# ---- processes


async def test_killing_a_sandbox_ends_a_daemonised_process(place, tmp_path):
    runtime = await place()
    hidden = "env -i setsid bash -c '(while :; do echo x >> /work/beat; sleep 0.02; done) &' "
    started = await runtime.exec(
        f"{hidden} </dev/null >/dev/null 2>&1; until [ -s beat ]; do :; done"
    )
    assert started.ok
    await runtime.kill()
    result = await runtime.exec("sleep 0.1; wc -c < beat; sleep 0.2; wc -c < beat")
    first, second = result.stdout.split()
    assert first == second


async def test_processes_of_the_host_and_of_other_sessions_are_invisible_in_a_sandbox(place):
    first, second = await place(), await place()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(first.exec(["sleep", "3.21"]))
        seen = await second.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '; kill -9 -1; true")
        assert b"3.21" not in seen.stdout
        assert b"pytest" not in seen.stdout
    assert running.result().ok


async def test_a_fork_bomb_is_bounded_and_the_sandbox_stays_usable(place):
    runtime = await place(max_processes=64)
    bomb = "f() { sleep 5 & f; }; f"
    result = await runtime.exec(bomb, timeout_s=8)
    assert not result.ok
    await runtime.kill()
    assert (await runtime.exec("echo alive")).stdout == b"alive\n"


# ---- amounts


async def test_a_gigabyte_of_output_is_truncated_and_takes_bounded_memory_and_disk(place, tmp_path):
    runtime = await place()
    before = peak_kib(reset=True)
    log = tmp_path / "log"
    result = await runtime.exec("head -c 1073741824 /dev/zero", log=log, timeout_s=50)
    grown_mb = (peak_kib() - before) / 1024
    assert (result.ok, result.truncated) == (True, True)
    assert len(result.stdout) < 2 << 20
    assert log.stat().st_size < 65 << 20
    assert grown_mb < 100


async def test_opening_ten_thousand_files_fails_in_a_sandbox(place):
    runtime = await place()
    script = "for ((i = 0; i < 10000; i++)); do exec {fd}</dev/null || exit 9; done"
    result = await runtime.exec(script, timeout_s=30)
    assert not result.ok
    assert (await runtime.exec("true")).ok


async def test_a_command_over_the_memory_limit_is_ended_with_limit_memory(place):
    runtime = await place(memory_mb=64)
    # More than the limit, less than the twice as much at which an allocation of it fails.
    result = await runtime.exec("(head -c 100000000 /dev/zero; sleep 3) | tail", timeout_s=30)
    assert not result.ok
    assert result.limit == "memory"
    assert (await runtime.exec("echo alive")).stdout == b"alive\n"


async def test_files_in_memory_over_the_memory_limit_end_a_command_with_limit_memory(place):
    runtime = await place(memory_mb=48)
    more = "(head -c 70000000 /dev/zero; sleep 3) | tail"
    fill = f"head -c 200000000 /dev/zero > /dev/shm/file; {more}"
    result = await runtime.exec(fill, timeout_s=30)
    assert not result.ok
    assert result.limit == "memory"
    assert (await runtime.exec("echo alive")).stdout == b"alive\n"


async def test_a_command_over_the_storage_limit_is_ended_with_limit_storage(place):
    runtime = await place(storage_mb=20)
    fill = "for ((i = 0; ; i++)); do head -c 4000000 /dev/zero > file$i || exit 3; sleep 0.02; done"
    result = await runtime.exec(fill, timeout_s=30)
    assert not result.ok
    assert result.limit == "storage"


async def test_a_file_larger_than_the_storage_limit_is_cut_off(place):
    runtime = await place(storage_mb=10)
    result = await runtime.exec("head -c 500000000 /dev/zero > file; stat -c %s file")
    assert int(result.stdout) <= 10 << 20


async def test_downloading_a_sparse_file_over_the_limit_fails_and_leaves_no_file(place, tmp_path):
    runtime = await place()
    await runtime.exec(f"{SPARSE}sparse seek=3072; echo 42 > answer.txt")
    taken = tmp_path / "taken"
    with pytest.raises(RuntimeFailure, match="at most 256 MiB of files may be copied out"):
        await runtime.download("sparse", taken)
    assert not taken.exists()
    await runtime.download("answer.txt", taken)
    assert taken.read_text() == "42\n"


async def test_the_downloads_of_a_session_are_limited_to_256_mib_in_total(place, tmp_path):
    runtime = await place()
    await runtime.exec(f"{SPARSE}big seek=200; {SPARSE}small seek=50")
    await runtime.download("big", tmp_path / "big")
    with pytest.raises(RuntimeFailure, match="at most 256 MiB of files may be copied out"):
        await runtime.download("big", tmp_path / "again")
    await runtime.download("small", tmp_path / "small")


# ---- files


async def test_host_files_can_neither_be_read_nor_written_from_a_sandbox(place, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    runtime = await place()
    script = (
        f"cat {secret} /etc/shadow /root/.bashrc /proc/{os.getpid()}/environ;"
        f" for at in {' '.join(TOPS)}; do touch $at/mine; done;"
        " ls /home /root /var/run/docker.sock /sys/fs"
    )
    result = await runtime.exec(script)
    assert b"s3cret" not in result.stdout
    assert not re.search(rb"root:[*!$]", result.stdout)
    assert [folder for folder in TOPS if was_written(folder)] == []


def was_written(folder):
    """Return whether the harness above made its file there; False for an unreadable folder."""
    with suppress(PermissionError):
        return Path(folder, "mine").exists()
    return False


@pytest.mark.parametrize(
    "spec",
    [
        {"kwargs": {"folders": ["/tmp/a/mine"]}},
        {"kwargs": {"binds": ["/usr:/tmp/a/mine"]}},
        {"workdir": "/tmp/a/mine"},
    ],
)
async def test_a_link_in_the_path_of_a_mount_does_not_lead_bwrap_to_the_host(tmp_path, spec):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (tmp_path / "scratch").mkdir()
    runtime = make_runtime(RuntimeSpec(backend="bubblewrap", **spec), "link", tmp_path / "scratch")
    await runtime.start()
    try:
        # While bwrap makes the sandbox, the machine's files are in /oldroot.
        left = await runtime.exec(f"cd /tmp; mv a b; ln -s /oldroot{theirs} a; readlink a")
        assert left.stdout.decode() == f"/oldroot{theirs}\n"
        await runtime.kill()
        with pytest.raises(RuntimeFailure, match="made a link in the path /tmp/a/mine"):
            await runtime.exec("true")
    finally:
        await runtime.stop()
    assert list(theirs.iterdir()) == []


async def test_a_task_s_environment_variables_do_not_affect_host_programs(place, tmp_path):
    spy = tmp_path / "spy.so"
    spy.write_text("no library")
    own = {"LD_PRELOAD": str(spy), "DOCKER_HOST": "unix:///nowhere", "BASH_ENV": "/nowhere"}
    runtime = await place(env=own)
    result = await runtime.exec('echo "$LD_PRELOAD $DOCKER_HOST $BASH_ENV"')
    assert result.stdout.decode().split() == list(own.values())
    # Only what runs inside got the path of the library, and found nothing there.
    assert result.stderr.decode().count("cannot be preloaded") <= 1


async def test_files_of_another_session_are_invisible_in_a_sandbox(place):
    first, second = await place(), await place()
    await first.exec("echo theirs > /tmp/mine; echo theirs > $HOME/mine; echo theirs > mine")
    seen = await second.exec("cat /tmp/mine $HOME/mine mine; find / -name mine 2>/dev/null")
    assert seen.stdout == b""


async def test_mounts_namespaces_devices_and_kernel_settings_are_refused_in_a_sandbox(place):
    runtime = await place()
    tries = [
        "mount -t tmpfs none /mnt",
        "mount -o remount,rw /usr",
        "unshare -U true",
        "unshare -m true",
        "mknod /tmp/disk b 8 0",
        "chroot /tmp true",
        "hostname mine",
        "echo 1 > /proc/sys/kernel/panic",
        "echo x > /proc/sys/kernel/core_pattern",
        "echo b > /proc/sysrq-trigger",
        "nsenter -t 1 -m true",
    ]
    for attempt in tries:
        assert not (await runtime.exec(attempt)).ok, attempt
    switches = "for at in $(find /proc/sys /sys -type f); do [ -w $at ] && echo $at; done; true"
    assert (await runtime.exec(f"{switches} 2>/dev/null")).stdout == b""


async def test_uploads_do_not_follow_symbolic_links_out_of_a_sandbox(place, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    runtime = await place()
    await runtime.exec(f"ln -s {outside} out; ln -s /etc etc; ln -s {outside}/x file")
    given = tmp_path / "given"
    given.write_text("given")
    for target in ("out/mine", "etc/mine", "file"):
        for put in (runtime.upload(given, target), runtime.write(target, b"given")):
            with suppress(RuntimeFailure):
                await put
    assert list(outside.iterdir()) == []


# ---- network


async def test_the_host_s_network_is_unreachable_from_a_sandbox(place):
    runtime = await place()
    with listening() as port:
        assert not await reaches(runtime, "127.0.0.1", port)
        for address in {each[4][0] for each in socket.getaddrinfo(socket.gethostname(), port)}:
            assert not await reaches(runtime, address, port)
    assert not await reaches(runtime, "192.0.2.1", 80)
    assert not await reaches(runtime, "10.0.2.2", 22)


async def test_a_sandbox_reaches_the_gateway_and_no_other_host_port(place):
    runtime = await place()
    with listening() as gateway, listening() as engine:
        url = runtime.gateway_url(f"http://127.0.0.1:{gateway}/s/x")
        host, port = url.split("/")[2].split(":")
        assert await reaches(runtime, host, port, within_s=20)
        assert not await reaches(runtime, "127.0.0.1", engine)
        assert not await reaches(runtime, host, engine)


async def test_a_sandbox_without_a_network_cannot_reach_the_gateway(place):
    runtime = await place(network="none")
    with listening() as gateway:
        runtime.gateway_url(f"http://127.0.0.1:{gateway}/s/x")
        for port in (gateway, 4000):
            assert not await reaches(runtime, "127.0.0.1", port)


# ---- ends

ORPHAN = """
import asyncio, json, pathlib, sys
from bridle.config import RuntimeSpec
from bridle.runtimes import make_runtime
async def main(folder, **spec):
    runtime = make_runtime(RuntimeSpec(**spec), "orphan", pathlib.Path(folder))
    await runtime.start()
    await runtime.exec("echo x > up; env -i setsid sleep 4321.5 & sleep 4321.5")
asyncio.run(main(sys.argv[1], **json.loads(sys.argv[2])))
"""


def sleepers():
    """Processes that only the orphaned sandbox has."""
    return [pid for pid in Path("/proc").glob("[0-9]*/cmdline") if b"4321.5\0" in read(pid)]


def read(path):
    with suppress(OSError):
        return path.read_bytes()
    return b""


def until(condition, what):
    deadline = time.monotonic() + 45
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


def test_a_sandbox_of_a_killed_owner_is_removed_at_once_or_at_the_next_start(backend, tmp_path):
    spec = json.dumps(asyncio.run(spec_of(backend)))
    scratch = tmp_path / secrets.token_hex(8)
    scratch.mkdir()
    with subprocess.Popen([sys.executable, "-c", ORPHAN, str(scratch), spec]) as process:
        until(lambda: len(sleepers()) >= 2, "the sandbox has begun")
        process.kill()
    if backend == "docker":
        assert asyncio.run(remove_left_behind()) == 1
    until(lambda: sleepers() == [], "nothing of it lives")
    until(lambda: remove_empty() + len(groups(scratch.name)) == 0, "its groups are gone")


def groups(name):
    """The control groups of a sandbox by the name of its scratch folder."""
    return list(MOUNT.rglob(f"{PREFIX}*-{name}"))
