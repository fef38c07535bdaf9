import asyncio
import os
import subprocess
import sys

import pytest

from bridle.runtimes.confinement import (
    PREFIX,
    Cgroup,
    ResourceLimits,
    available_cores,
    disk_use,
    first_reached,
    members_of,
    pid_namespace,
    remove_empty,
)
from bridle.runtimes.process import owner_mark

BOUNDS = ResourceLimits(cpus=1.5, memory_bytes=1 << 20, processes=7)


@pytest.fixture
def unified(tmp_path):
    """Version 2: our own group is `/ours`."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "ours" / "cgroup.subtree_control").write_text("memory\n")
    (tmp_path / "own").write_text("0::/ours\n")
    return tmp_path


@pytest.fixture
def version_1(tmp_path):
    for controller in ("memory", "pids", "cpu"):
        (tmp_path / controller / "ours").mkdir(parents=True)
    (tmp_path / "own").write_text("4:memory:/ours\n3:cpu,cpuacct:/ours\n2:pids:/ours\n0::/\n")
    return tmp_path


def made(mount, bounds=BOUNDS):
    return Cgroup.make("s1", bounds, mount=mount, own=mount / "own")


def files(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_cgroup_v2_limits_are_written_in_one_folder_below_the_process_s_own(unified):
    group = made(unified)
    assert files(unified / "ours" / "s1") == {
        "memory.max": "1048576",
        "pids.max": "7",
        "cpu.max": "150000 100000",
    }
    assert (unified / "ours" / "cgroup.subtree_control").read_text() == "+cpu +pids"
    assert group.procs_files == [str(unified / "ours" / "s1" / "cgroup.procs")]


def test_cgroup_v1_limits_are_written_in_a_folder_per_controller(version_1):
    group = made(version_1)
    assert files(version_1 / "memory" / "ours" / "s1") == {"memory.limit_in_bytes": "1048576"}
    assert files(version_1 / "pids" / "ours" / "s1") == {"pids.max": "7"}
    assert files(version_1 / "cpu" / "ours" / "s1") == {
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "150000",
    }
    assert len(group.procs_files) == 3


def test_an_unset_limit_uses_no_cgroup_controller(version_1):
    group = made(version_1, ResourceLimits(processes=3))
    assert group.procs_files == [str(version_1 / "pids" / "ours" / "s1" / "cgroup.procs")]


def test_make_returns_none_where_a_cgroup_cannot_be_created(tmp_path, version_1):
    assert Cgroup.make("s1", BOUNDS, mount=tmp_path / "no", own=tmp_path / "own") is None
    assert Cgroup.make("s1", BOUNDS, mount=version_1, own=tmp_path / "missing") is None
    (version_1 / "pids" / "ours").rmdir()
    assert made(version_1) is None
    assert not (version_1 / "memory" / "ours" / "s1").exists() or not files(
        version_1 / "memory" / "ours" / "s1"
    ).get("pids.max")


@pytest.mark.parametrize(
    ("file", "before", "after", "named"),
    [
        ("memory.events", "max 3\noom 0\noom_kill 0\n", "max 9\noom 1\noom_kill 1\n", "memory"),
        ("pids.events", "max 0\n", "max 2\n", "processes"),
    ],
)
def test_a_reached_cgroup_limit_is_reported_once(unified, file, before, after, named):
    group = made(unified)
    path = unified / "ours" / "s1" / file
    path.write_text(before)
    assert group.reached() is None
    path.write_text(after)
    assert group.reached() == named
    assert group.reached() is None


def test_cgroup_v1_oom_kills_are_read_from_memory_oom_control(version_1):
    group = made(version_1)
    path = version_1 / "memory" / "ours" / "s1" / "memory.oom_control"
    path.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert group.reached() == "memory"


def test_an_empty_cgroup_is_removed_and_removal_can_be_repeated(version_1):
    group = made(version_1)
    for folder in set(group.folders.values()):
        for path in folder.iterdir():
            path.unlink()
    group.remove()
    group.remove()
    assert not any(folder.exists() for folder in group.folders.values())


@pytest.mark.parametrize("version", ["unified", "version_1"])
def test_only_empty_cgroups_of_dead_owners_on_this_machine_are_removed(version, request):
    mount = request.getfixturevalue(version)
    place = owner_mark().split(".", 2)[2]
    names = {
        "dead": f"{PREFIX}999999999.5.{place}-ab12",
        "ours": f"{PREFIX}{owner_mark()}-ab12",
        "elsewhere": f"{PREFIX}999999999.5.0badcafe.1-ab12",
        "full": f"{PREFIX}999999999.6.{place}-ab12",
    }
    at = mount / ("ours" if version == "unified" else "pids/ours")
    for name in (*names.values(), "bridle"):
        (at / name).mkdir()
    (at / names["full"] / "child").mkdir()
    assert remove_empty(mount=mount, own=mount / "own") == 1
    left = {path.name for path in at.iterdir() if path.is_dir()}
    assert left == {*names.values(), "bridle"} - {names["dead"]}


def test_without_control_groups_there_is_nothing_to_remove(tmp_path):
    assert remove_empty(mount=tmp_path, own=tmp_path / "none") == 0


@pytest.mark.parametrize("at", ["ours", "."])
def test_available_cores_are_those_of_the_smallest_cgroup_v2_limit_rounded_up(unified, at):
    all_of_them = available_cores(mount=unified, own=unified / "own")
    (unified / at / "cpu.max").write_text("max 100000\n")
    assert available_cores(mount=unified, own=unified / "own") == all_of_them >= 1
    (unified / at / "cpu.max").write_text("50000 100000\n")
    assert available_cores(mount=unified, own=unified / "own") == 1
    (unified / at / "cpu.max").write_text("150000 100000\n")
    assert available_cores(mount=unified, own=unified / "own") == min(2, all_of_them)


def test_available_cores_follow_the_cgroup_v1_quota_and_period(version_1):
    all_of_them = available_cores(mount=version_1, own=version_1 / "own")
    quota, period = (version_1 / "cpu" / "ours" / f"cpu.cfs_{n}_us" for n in ("quota", "period"))
    period.write_text("100000\n")
    quota.write_text("-1\n")
    assert available_cores(mount=version_1, own=version_1 / "own") == all_of_them
    quota.write_text("20000\n")
    assert available_cores(mount=version_1, own=version_1 / "own") == 1


def test_available_cores_without_cgroups_are_at_least_one(tmp_path):
    assert available_cores(mount=tmp_path, own=tmp_path / "none") >= 1


NOTHING = ResourceLimits()


async def reached(*, members=(), folders=(), bounds=NOTHING, storage=1 << 40):
    return await first_reached(lambda: members, folders, bounds, storage)


@pytest.fixture
def child():
    """A process with 60 MB of memory and 5 threads."""
    code = (
        "import threading, sys; kept = bytearray(60_000_000); stop = threading.Event()\n"
        "[threading.Thread(target=stop.wait, daemon=True).start() for _ in range(4)]\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        yield process.pid
        process.stdin.close()


@pytest.mark.parametrize(
    ("bounds", "named"),
    [(ResourceLimits(memory_bytes=50 << 20), "memory"), (ResourceLimits(processes=4), "processes")],
)
async def test_polling_detects_too_much_memory_or_too_many_threads(child, bounds, named):
    async with asyncio.timeout(15):
        assert await reached(members=[child], bounds=bounds) == named


async def test_polling_reports_nothing_within_the_limits(child, tmp_path):
    within = ResourceLimits(memory_bytes=4 << 30, processes=100)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await reached(
                members=[child, 2**22], folders=[tmp_path], bounds=within, storage=1 << 30
            )


async def test_polling_detects_too_much_disk_use(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "big").write_bytes(b"x" * (1 << 20))
    async with asyncio.timeout(15):
        assert await reached(folders=[tmp_path], storage=1 << 19) == "storage"


def test_disk_use_counts_hard_links_once_and_holes_not_at_all(tmp_path):
    (tmp_path / "one").write_bytes(os.urandom(1 << 20))
    os.link(tmp_path / "one", tmp_path / "two")
    (tmp_path / "link").symlink_to("/usr")
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 30)
    assert 1 << 20 <= disk_use([tmp_path]) < 3 << 19


def test_processes_of_a_pid_namespace_are_found():
    ours = pid_namespace(os.getpid())
    assert ours is not None
    assert os.getpid() in members_of(ours)
    assert members_of("pid:[0]") == []
    assert pid_namespace(2**22 + 1) is None
