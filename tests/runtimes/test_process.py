import asyncio
import os
import time
from pathlib import Path

import pytest
import uvloop

from bridle.errors import RuntimeFailure
from bridle.runtimes.process import Command, run_process

ENV = {"PATH": os.environ["PATH"]}


def command(line, tmp_path, **options):
    return Command(["bash", "-c", line], cwd=str(tmp_path), env=ENV, **options)


async def test_a_file_that_is_no_program_is_exit_code_126(tmp_path):
    (tmp_path / "text").write_text("no program")
    log = tmp_path / "log"
    result = await run_process(Command([str(tmp_path / "text")], str(tmp_path), ENV, log=log))
    assert result.exit_code == 126
    assert b"cannot be executed" in result.stderr
    assert log.read_bytes() == result.stderr


async def test_an_unknown_program_is_told_without_a_log(tmp_path):
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
    with pytest.raises(RuntimeFailure, match="cannot write a log"):
        await run_process(command("true", tmp_path, log=tmp_path / "file" / "log"))
    with pytest.raises(RuntimeFailure, match="cannot write a log"):
        await run_process(
            command("true", tmp_path, log=tmp_path / "ok", error_log=tmp_path / "file" / "log")
        )


async def test_a_full_disk_ends_the_process_and_is_told(tmp_path):
    began = time.monotonic()
    with pytest.raises(RuntimeFailure, match=r"cannot write a log: .*No space left"):
        await run_process(command("echo hello; sleep 60", tmp_path, log=Path("/dev/full")))
    assert time.monotonic() - began < 50


async def test_a_process_left_behind_does_not_hold_the_result(tmp_path):
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


async def test_without_pidfd_the_end_is_seen_all_the_same(tmp_path):
    kept = os.pidfd_open
    del os.pidfd_open
    try:
        result = await run_process(command("sleep 0.1; exit 5", tmp_path))
    finally:
        os.pidfd_open = kept
    assert result.exit_code == 5


async def test_a_program_that_stops_reading_does_not_hang_us(tmp_path):
    result = await run_process(command("head -c 10; exit 3", tmp_path, stdin=b"y" * 10_000_000))
    assert (result.exit_code, result.stdout) == (3, b"y" * 10)


async def test_input_can_be_a_file_and_output_can_go_to_one(tmp_path):
    (tmp_path / "in").write_bytes(b"x" * 3_000_000)
    result = await run_process(
        command("cat; echo told >&2", tmp_path, stdin=tmp_path / "in", stdout=tmp_path / "out")
    )
    assert (result.stdout, result.stderr) == (b"", b"told\n")
    assert (tmp_path / "out").stat().st_size == 3_000_000


async def test_what_outlives_its_leader_has_the_rest_of_the_grace(tmp_path):
    late = "trap 'sleep 0.2; echo done > late; exit' TERM; touch up; while :; do sleep 0.02; done"
    leader = f"({late}) & until [ -e up ]; do sleep 0.02; done; sleep 60"
    result = await run_process(command(leader, tmp_path, timeout_s=4))
    assert result.timed_out
    assert (tmp_path / "late").read_text() == "done\n"


def test_uvloop_runs_processes_as_well(tmp_path):
    async def work():
        fine = await run_process(command("cat; exit 7", tmp_path, stdin=b"text"))
        late = await run_process(command("sleep 60", tmp_path, timeout_s=0.1))
        return fine, late

    fine, late = uvloop.run(work())
    assert (fine.exit_code, fine.stdout) == (7, b"text")
    assert late.timed_out


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_no_descriptor_stays_open(tmp_path):
    await run_process(command("true", tmp_path))
    before = open_files()
    for _ in range(5):
        await run_process(command("cat", tmp_path, stdin=b"x", log=tmp_path / "log"))
        await run_process(command("sleep 9", tmp_path, timeout_s=0.01))
        await run_process(Command(["nothing"], str(tmp_path), ENV))
    await asyncio.sleep(0)
    assert open_files() <= before
