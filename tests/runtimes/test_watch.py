"""Limits that are kept by looking."""

import asyncio
import os
import subprocess
import sys

import pytest

from bridle.runtimes.cgroups import Bounds
from bridle.runtimes.proc import Watched, disk_use, first_reached, members_of, pid_namespace

NOTHING = Bounds()


def watched(*, members=(), folders=(), bounds=NOTHING, storage=None):
    return Watched(lambda: members, tuple(folders), bounds, storage)


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
    [(Bounds(memory_bytes=50 << 20), "memory"), (Bounds(processes=4), "processes")],
)
async def test_too_much_memory_or_too_many_threads_are_found(child, bounds, named):
    async with asyncio.timeout(15):
        assert await first_reached(watched(members=[child], bounds=bounds)) == named


async def test_within_its_limits_nothing_is_found(child, tmp_path):
    within = Bounds(memory_bytes=4 << 30, processes=100)
    looked = watched(members=[child, 2**22], folders=[tmp_path], bounds=within, storage=1 << 30)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await first_reached(looked)


async def test_too_much_on_disk_is_found(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "big").write_bytes(b"x" * (1 << 20))
    async with asyncio.timeout(15):
        assert await first_reached(watched(folders=[tmp_path], storage=1 << 19)) == "storage"


def test_a_file_with_two_names_takes_its_room_once_and_holes_take_none(tmp_path):
    (tmp_path / "one").write_bytes(os.urandom(1 << 20))
    os.link(tmp_path / "one", tmp_path / "two")
    (tmp_path / "link").symlink_to("/usr")
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 30)
    assert 1 << 20 <= disk_use([tmp_path]) < 3 << 19


def test_processes_of_one_number_space_are_found():
    ours = pid_namespace(os.getpid())
    assert ours is not None
    assert os.getpid() in members_of(ours)
    assert members_of("pid:[0]") == []
    assert pid_namespace(2**22 + 1) is None
