"""Serving until a signal."""

import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
import threading

from bridle.cli.process import OPEN_FILES, long_running, open_files_limit, run_until_signal


def test_sigterm_sets_the_stop_event_and_open_resources_are_closed():
    seen = []

    async def serve(stop: asyncio.Event) -> None:
        try:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
            await stop.wait()
            seen.append("stopped")
        finally:
            seen.append("closed")

    run_until_signal(serve)

    assert seen == ["stopped", "closed"]


NEVER_ENDS = """
import asyncio, os, signal
from bridle.cli.process import run_until_signal

async def serve(stop):
    os.kill(os.getpid(), signal.SIGTERM)
    await stop.wait()
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

run_until_signal(serve, end_s=0.1)
"""


def test_a_process_that_does_not_close_in_time_after_a_signal_exits_with_code_1():
    ended = subprocess.run(
        [sys.executable, "-c", NEVER_ENDS], capture_output=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert b"not closed within 0.1 s of the signal" in ended.stderr


ENDS_ONCE = """
import asyncio, os, signal
from bridle.cli.process import run_to_end

async def work():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(0)
        print("closed")
        {at_end}

try:
    run_to_end(work())
except KeyboardInterrupt:
    print("interrupted")
"""


def test_the_first_sigterm_ends_work_as_ctrl_c_does_and_a_second_one_kills_it():
    def ended(at_end):
        script = ENDS_ONCE.format(at_end=at_end)
        argv = [sys.executable, "-u", "-c", script]
        return subprocess.run(argv, capture_output=True, timeout=120, check=False, text=True)

    once = ended("")
    assert (once.returncode, once.stdout) == (0, "closed\ninterrupted\n"), once.stderr
    twice = ended("os.kill(os.getpid(), signal.SIGTERM)")
    assert (twice.returncode, twice.stdout) == (-signal.SIGTERM, "closed\n")


def test_long_running_raises_the_gc_threshold_and_restores_it_at_the_end():
    before = gc.get_threshold()
    frozen = gc.get_freeze_count()
    with long_running():
        assert gc.get_threshold() > before
        assert gc.get_freeze_count() > frozen
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_long_running_raises_the_open_file_limit_and_restores_it_at_the_end():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with long_running():
            meanwhile = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert meanwhile == (open_files_limit(256, before[1]), before[1])


def test_open_file_limit_is_never_lowered_and_never_above_the_hard_limit():
    without = resource.RLIM_INFINITY
    assert open_files_limit(1024, 4096) == 4096
    assert open_files_limit(1024, 1 << 20) == open_files_limit(1024, without) == OPEN_FILES
    assert open_files_limit(1 << 20, 1 << 20) == open_files_limit(1 << 20, without) == 1 << 20
    assert open_files_limit(without, without) == without
