"""Serving until a signal."""

import asyncio
import gc
import os
import pty
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest

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

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
{at_start}

async def work():
    try:
        os.kill(os.getpid(), signal.{number})
        await asyncio.sleep({seconds})
    finally:
        await asyncio.sleep(0)
        print("closed")
        {at_end}

try:
    run_to_end(work())
except KeyboardInterrupt:
    print("interrupted")
"""


def ends_once(number, *, seconds=3600, at_start="", at_end=""):
    script = ENDS_ONCE.format(number=number, seconds=seconds, at_start=at_start, at_end=at_end)
    argv = [sys.executable, "-u", "-c", script]
    ended = subprocess.run(argv, capture_output=True, timeout=120, check=False, text=True)
    return ended.returncode, ended.stdout


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_the_first_signal_ends_work_as_ctrl_c_does_and_a_second_one_kills_it(number):
    assert ends_once(number) == (0, "closed\ninterrupted\n")
    twice = ends_once(number, at_end=f"os.kill(os.getpid(), signal.{number})")
    assert twice == (-getattr(signal, number), "closed\n")


def test_work_under_nohup_does_not_end_with_its_terminal():
    ignore = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    assert ends_once("SIGHUP", seconds=0.1, at_start=ignore) == (0, "closed\n")


ENDS_WITH_TERMINAL = """
import asyncio, fcntl, signal, sys, termios
from pathlib import Path
from bridle.cli.process import run_to_end

signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)

async def work():
    state = Path(sys.argv[1])
    try:
        state.write_text("started")
        await asyncio.sleep(3600)
    finally:
        print("closing", flush=True)
        state.write_text("closed")

run_to_end(work())
"""


def test_work_closes_its_resources_when_its_terminal_closes(tmp_path):
    state = tmp_path / "state"
    state.touch()
    ours, terminal = pty.openpty()
    argv = [sys.executable, "-c", ENDS_WITH_TERMINAL, str(state)]
    with subprocess.Popen(
        argv, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    ) as process:
        os.close(terminal)
        while not state.read_text():
            time.sleep(0.01)
        os.close(ours)
        process.wait(60)
    assert state.read_text() == "closed"


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
