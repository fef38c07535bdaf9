import asyncio
import os
import secrets
import signal
import subprocess
from contextlib import suppress

import pytest

from bridle.errors import RuntimeFailure
from bridle.runtimes import proc
from bridle.runtimes.proc import Leaders, end_all, is_marked, living, members, send

MARK = secrets.token_hex(8)
MINE = f"MARK={MARK}".encode()
"""Of this run alone: another run of these tests may be under way."""


def spawn(command, *, env=None, session=True):
    return subprocess.Popen(
        ["bash", "-c", command],
        env={"PATH": os.environ["PATH"], **(env or {})},
        start_new_session=session,
        stdout=subprocess.PIPE,
    )


def end(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


@pytest.fixture
def sleeper():
    process = spawn("sleep 60 & echo up; wait", env={"MARK": MARK})
    process.stdout.readline()
    yield process
    end(process)


def test_without_marks_nothing_is_marked_and_nobody_is_a_member():
    assert not is_marked(os.getpid(), ())
    assert members((), Leaders()) == set()


def test_a_mark_is_the_whole_entry(sleeper):
    assert is_marked(sleeper.pid, (MINE,))
    assert not is_marked(sleeper.pid, (MINE[:-1],))
    assert not is_marked(sleeper.pid, (MINE, b"OTHER=1"))


def test_a_process_that_has_gone_is_not_marked():
    assert not is_marked(2**22 + 1, (MINE,))


def test_marked_processes_bring_their_descendants(sleeper):
    found = members((MINE,), Leaders())
    assert sleeper.pid in found
    assert len(found) == 2  # bash and sleep
    assert os.getpid() not in found


def test_a_process_without_marks_is_found_by_its_group():
    process = spawn("env -i /bin/bash -c 'sleep 60 & echo up; wait' & exit", env={"MARK": MARK})
    process.stdout.readline()
    leaders = Leaders()
    leaders.add(process.pid)
    process.wait()
    leaders.collected(process.pid)
    assert leaders.ended == {process.pid}
    left = members((b"MARK=never",), leaders)
    assert len(left) == 2
    send(left, signal.SIGKILL)
    process.stdout.close()


def test_a_group_that_has_ended_is_forgotten():
    process = spawn("true")
    leaders = Leaders()
    leaders.add(process.pid)
    assert leaders.ours(()) == {process.pid}
    process.wait()
    process.stdout.close()
    leaders.collected(process.pid)
    assert leaders.ours(()) == set()


def test_a_number_that_lives_again_belongs_to_a_stranger(sleeper):
    leaders = Leaders(ended={sleeper.pid})
    assert members((), leaders) == set()
    assert leaders.ended == set()


def test_zombies_are_not_living():
    process = spawn("exit")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.pid not in {each.pid for each in living()}
    process.wait()
    process.stdout.close()


async def test_end_all_says_how_many_it_found(sleeper):
    find = lambda: members((MINE,), Leaders())  # noqa: E731
    assert await end_all(find, grace_s=5) == 2
    assert await end_all(find, grace_s=5) == 0
    assert sleeper.wait() in {-signal.SIGTERM, 0}, "0: its child was ended first"


async def test_end_all_kills_what_ignores_sigterm():
    process = spawn("trap '' TERM; echo up; while true; do sleep 0.01; done", env={"MARK": MARK})
    process.stdout.readline()
    await end_all(lambda: members((MINE,), Leaders()), grace_s=0.1)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()


async def test_what_sigkill_does_not_end_is_named():
    kept = proc.KILL_S
    proc.KILL_S = 0.05
    try:
        with pytest.raises(RuntimeFailure, match=r"SIGKILL does not end: \[4194999\]"):
            await end_all(lambda: {4194999}, grace_s=0)
    finally:
        proc.KILL_S = kept
    await asyncio.sleep(0)


def test_without_proc_nobody_is_found(tmp_path):
    kept = proc.PROC
    proc.PROC = tmp_path / "none"
    try:
        assert living() == []
    finally:
        proc.PROC = kept
