import asyncio
import errno
import os
import secrets
import signal
import subprocess
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import RuntimeFailure
from bridle.runtimes import process
from bridle.runtimes.process import (
    BoundedOutput,
    Command,
    Leaders,
    LogFile,
    end_all,
    is_dead,
    is_marked,
    members,
    owner_mark,
    run_process,
    running_processes,
    signal_all,
    started_at,
)

ENV = {"PATH": os.environ["PATH"]}


def command(line, tmp_path, **options):
    return Command(["bash", "-c", line], cwd=str(tmp_path), env=ENV, **options)


async def test_a_file_that_cannot_be_executed_gives_exit_code_126(tmp_path):
    (tmp_path / "text").write_text("no program")
    log = tmp_path / "log"
    result = await run_process(Command([str(tmp_path / "text")], str(tmp_path), ENV, log=log))
    assert result.exit_code == 126
    assert b"cannot be executed" in result.stderr
    assert log.read_bytes() == result.stderr


async def test_an_unknown_program_gives_exit_code_127(tmp_path):
    result = await run_process(Command(["no-such"], str(tmp_path), ENV))
    assert (result.exit_code, result.stderr) == (127, b"bridle: no-such: not found\n")


async def test_a_missing_working_folder_is_named(tmp_path):
    with pytest.raises(RuntimeFailure, match=r"working folder .*/gone does not exist"):
        await run_process(command("true", tmp_path / "gone"))


async def test_a_command_too_long_for_the_system_is_a_runtime_failure(tmp_path):
    with pytest.raises(RuntimeFailure, match=r"cannot start 'echo': .*too long"):
        await run_process(Command(["echo", "x" * 3_000_000], str(tmp_path), ENV))


async def test_a_log_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeFailure, match="cannot write the log of a command"):
        await run_process(command("true", tmp_path, log=tmp_path / "file" / "log"))
    with pytest.raises(RuntimeFailure, match="cannot write the log of a command"):
        await run_process(
            command("true", tmp_path, log=tmp_path / "ok", error_log=tmp_path / "file" / "log")
        )


async def test_a_full_disk_kills_the_process_and_raises(tmp_path):
    began = time.monotonic()
    with pytest.raises(RuntimeFailure, match=r"cannot write the log of a command: .*No space left"):
        await run_process(command("echo hello; sleep 60", tmp_path, log=Path("/dev/full")))
    assert time.monotonic() - began < 50


async def test_a_background_child_does_not_delay_the_result(tmp_path):
    pid_file = tmp_path / "pid"
    began = time.monotonic()
    result = await run_process(command(f"sleep 60 & echo $! > {pid_file}; echo said", tmp_path))
    assert result.stdout == b"said\n"
    assert time.monotonic() - began < 50
    os.kill(int(pid_file.read_text()), 9)


async def test_a_timeout_has_no_exit_code_even_if_the_process_exits_well(tmp_path):
    line = "trap 'exit 0' TERM; while true; do sleep 0.01; done"
    result = await run_process(command(line, tmp_path, timeout_s=0.2))
    assert (result.exit_code, result.signal, result.timed_out) == (None, None, True)


async def test_exit_of_a_process_is_detected_without_pidfd(tmp_path):
    kept = os.pidfd_open
    del os.pidfd_open
    try:
        result = await run_process(command("sleep 0.1; exit 5", tmp_path))
    finally:
        os.pidfd_open = kept
    assert result.exit_code == 5


async def test_a_program_that_stops_reading_stdin_does_not_block_the_result(tmp_path):
    result = await run_process(command("head -c 10; exit 3", tmp_path, stdin=b"y" * 10_000_000))
    assert (result.exit_code, result.stdout) == (3, b"y" * 10)


async def test_stdin_can_be_read_from_a_file_and_stdout_written_to_a_file(tmp_path):
    (tmp_path / "in").write_bytes(b"x" * 3_000_000)
    result = await run_process(
        command("cat; echo noted >&2", tmp_path, stdin=tmp_path / "in", stdout=tmp_path / "out")
    )
    assert (result.stdout, result.stderr) == (b"", b"noted\n")
    assert (tmp_path / "out").stat().st_size == 3_000_000


async def test_children_of_a_dead_group_leader_get_the_rest_of_the_grace_period(tmp_path):
    late = "trap 'sleep 0.2; echo done > late; exit' TERM; touch up; while :; do sleep 0.02; done"
    leader = f"({late}) & until [ -e up ]; do sleep 0.02; done; sleep 60"
    result = await run_process(command(leader, tmp_path, timeout_s=4))
    assert result.timed_out
    assert (tmp_path / "late").read_text() == "done\n"


def test_run_process_works_under_uvloop(tmp_path):
    async def work():
        fine = await run_process(command("cat; exit 7", tmp_path, stdin=b"text"))
        late = await run_process(command("sleep 60", tmp_path, timeout_s=0.1))
        return fine, late

    fine, late = uvloop.run(work())
    assert (fine.exit_code, fine.stdout) == (7, b"text")
    assert late.timed_out


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_run_process_leaves_no_open_descriptor(tmp_path):
    await run_process(command("true", tmp_path))
    before = open_files()
    for _ in range(5):
        await run_process(command("cat", tmp_path, stdin=b"x", log=tmp_path / "log"))
        await run_process(command("sleep 9", tmp_path, timeout_s=0.01))
        await run_process(Command(["nothing"], str(tmp_path), ENV))
    await asyncio.sleep(0)
    assert open_files() <= before


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


def test_an_empty_set_of_marks_matches_no_process():
    assert not is_marked(os.getpid(), ())
    assert members((), Leaders()) == set()


def test_a_mark_matches_only_a_whole_environment_entry(sleeper):
    assert is_marked(sleeper.pid, (MINE,))
    assert not is_marked(sleeper.pid, (MINE[:-1],))
    assert not is_marked(sleeper.pid, (MINE, b"OTHER=1"))


def test_a_missing_pid_is_not_marked():
    assert not is_marked(2**22 + 1, (MINE,))


def test_members_include_descendants_of_marked_processes(sleeper):
    found = members((MINE,), Leaders())
    assert sleeper.pid in found
    assert len(found) == 2  # bash and sleep
    assert os.getpid() not in found


def test_an_unmarked_process_is_found_by_its_process_group():
    process = spawn("env -i /bin/bash -c 'sleep 60 & echo up; wait' & exit", env={"MARK": MARK})
    process.stdout.readline()
    leaders = Leaders()
    leaders.add(process.pid)
    process.wait()
    leaders.collected(process.pid)
    assert leaders.ended == {process.pid}
    left = members((b"MARK=never",), leaders)
    assert len(left) == 2
    signal_all(left, signal.SIGKILL)
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


def test_a_reused_pid_of_an_ended_leader_is_not_a_member(sleeper):
    leaders = Leaders(ended={sleeper.pid})
    assert members((), leaders) == set()
    assert leaders.ended == set()


def test_running_processes_excludes_zombies():
    process = spawn("exit")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.pid not in {each.pid for each in running_processes()}
    process.wait()
    process.stdout.close()


async def test_end_all_returns_the_number_of_ended_processes(sleeper):
    find = lambda: members((MINE,), Leaders())  # noqa: E731
    assert await end_all(find, grace_s=5) == 2
    assert await end_all(find, grace_s=5) == 0
    assert sleeper.wait() in {-signal.SIGTERM, 0}, "0: its child was ended first"


async def test_end_all_kills_a_process_that_ignores_sigterm():
    process = spawn("trap '' TERM; echo up; while true; do sleep 0.01; done", env={"MARK": MARK})
    process.stdout.readline()
    await end_all(lambda: members((MINE,), Leaders()), grace_s=0.1)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()


async def test_a_process_that_survives_sigkill_is_named():
    kept = process.KILL_S
    process.KILL_S = 0.05
    try:
        with pytest.raises(RuntimeFailure, match=r"still alive after SIGKILL: \[4194999\]"):
            await end_all(lambda: {4194999}, grace_s=0)
    finally:
        process.KILL_S = kept
    await asyncio.sleep(0)


def test_no_process_is_found_without_proc(tmp_path):
    kept = process.PROC
    process.PROC = tmp_path / "none"
    try:
        assert running_processes() == []
    finally:
        process.PROC = kept


def test_owner_mark_of_this_process_is_not_dead():
    assert not is_dead(owner_mark())
    assert owner_mark().startswith(f"{os.getpid()}.{started_at(os.getpid())}.")


def test_a_zombie_owner_is_dead():
    place = owner_mark().split(".", 2)[2]
    with subprocess.Popen(["sleep", "60"]) as process:
        mark = f"{process.pid}.{started_at(process.pid)}.{place}"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert started_at(process.pid) is None
        assert is_dead(mark)


def test_a_reused_pid_is_a_dead_owner():
    pid, _, place = owner_mark().split(".", 2)
    assert is_dead(f"{pid}.1.{place}")


def test_an_owner_mark_of_another_machine_or_form_is_not_dead():
    pid, started, _ = owner_mark().split(".", 2)
    assert not is_dead(f"{pid}.{started}.0badcafe.1")
    assert not is_dead("999999999.5")
    assert not is_dead("of somebody else")


def test_an_owner_mark_without_a_start_time_is_not_dead():
    pid, _, place = owner_mark().split(".", 2)
    assert not is_dead(f"{pid}.{None}.{place}")


@given(st.lists(st.binary(max_size=40)), st.integers(0, 60))
def test_bounded_output_keeps_head_and_tail(pieces, limit):
    kept = BoundedOutput(limit)
    for piece in pieces:
        kept.feed(piece)
    whole = b"".join(pieces)
    value = kept.value()
    assert kept.truncated == (len(whole) > limit)
    if not kept.truncated:
        assert value == whole
        return
    head, tail = whole[: (limit + 1) // 2], whole[len(whole) - limit // 2 :]
    note = f"\n[bridle: {len(whole) - limit} bytes left out]\n".encode()
    assert value == head + note + tail


def test_bounded_output_keeps_bounded_memory_under_a_flood():
    kept, piece = BoundedOutput(1000), b"x" * 10_000
    tracemalloc.start()
    try:
        for _ in range(1000):
            kept.feed(piece)
        assert tracemalloc.get_traced_memory()[0] < 10_000
    finally:
        tracemalloc.stop()


def test_a_log_stops_at_its_size_limit_with_a_note(tmp_path):
    log = LogFile(tmp_path / "deep" / "log", limit=10)
    log.feed(b"12345")
    log.feed(b"67890abc")
    log.feed(b"more")
    log.close()
    log.close()
    text = (tmp_path / "deep" / "log").read_text()
    assert text == "1234567890\n[bridle: the log's size limit is reached]\n"


def test_a_log_on_a_full_disk_raises_enospc():
    log = LogFile(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left") as failure:
        log.feed(b"text")
    log.close()
    assert failure.value.errno == errno.ENOSPC
