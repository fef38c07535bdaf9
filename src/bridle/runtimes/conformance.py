"""The suite that every runtime passes: ours, and yours (`bridle doctor --runtime NAME`).

Each check states one truth about the contract of `base`. It gets `Fixtures` with a started runtime.
Checks use nothing inside but bash and coreutils, so they run in any image. A check that does not
hold raises `Nonconformity`, which says what was seen instead.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bridle.config import RuntimeSpec
from bridle.errors import RuntimeFailure
from bridle.runtimes.base import ExecResult, Mount, Runtime, RuntimeFactory

BEAT = "while true; do echo x >> beat; sleep 0.02; done"
"""A command that appends to the file `beat` as long as it lives."""


BEGUN_S = (1.5, 6.0, 24.0)
"""Timeouts by which a command has begun to write to `beat`, tried in this order."""


class Nonconformity(AssertionError):
    """A runtime does not do what the contract says."""


@dataclass(slots=True)
class Fixtures:
    """Fixtures that a conformance check works with."""

    runtime: Runtime
    """Started; stopped by the suite."""
    another: Callable[[], Awaitable[Runtime]]
    """Start a second runtime of the same kind, for another session."""
    folder: Path
    """Host folder for files of the check."""
    mount: Mount
    """A host folder with the file `given` (text `mounted`), mounted in `runtime`."""


Check = Callable[[Fixtures], Awaitable[None]]

CHECKS: list[Check] = []
"""All checks, in order; each name states what must hold."""


def _check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def expect(truth: object, seen: object) -> None:
    """Raise `Nonconformity` with `seen` in its message if `truth` does not hold."""
    if not truth:
        raise Nonconformity(str(seen))


async def run_check(
    check: Check, factory: RuntimeFactory, folder: Path, spec: RuntimeSpec | None = None
) -> None:
    """Run one check against a fresh runtime that `factory` makes from `spec` (its defaults).

    `folder` is an empty host folder of its own. Raises `Nonconformity` if the check does not
    hold, `BridleError` if the runtime fails altogether.
    """
    mount, host = Mount(folder / "bundle", "/opt/bundle"), folder / "host"
    for each in (mount.source, host):
        each.mkdir(parents=True)
    (mount.source / "given").write_text("mounted")
    async with AsyncExitStack() as stack:

        async def started(name: str, mounts: tuple[Mount, ...] = ()) -> Runtime:
            scratch = folder / name
            scratch.mkdir()
            session_id = f"conformance-{name}-{os.getpid()}-{time.time_ns()}"
            runtime = factory(spec or RuntimeSpec(), session_id, scratch, mounts)
            stack.push_async_callback(runtime.stop)
            await runtime.start()
            return runtime

        runtime = await started("first", (mount,))
        await check(Fixtures(runtime, lambda: started("second"), host, mount))


# ---- endings


@_check
async def exit_codes_are_true(bench: Fixtures) -> None:
    for code in (0, 1, 3, 255):
        result = await bench.runtime.exec(f"exit {code}")
        expect((result.exit_code, result.signal) == (code, None), result)
        expect(result.ok == (code == 0), result)


@_check
async def the_signal_that_ended_a_process_is_reported(bench: Fixtures) -> None:
    result = await bench.runtime.exec(["bash", "-c", "kill -KILL $$"])
    expect((result.exit_code, result.signal) == (None, signal.SIGKILL), result)


@_check
async def a_pipeline_fails_with_any_of_its_parts(bench: Fixtures) -> None:
    result = await bench.runtime.exec("exit 4 | cat")
    expect(result.exit_code == 4, result)


@_check
async def a_program_that_does_not_exist_is_exit_code_127(bench: Fixtures) -> None:
    result = await bench.runtime.exec(["no-such-program"])
    expect(result.exit_code == 127, result)


# ---- what goes in and comes out


@_check
async def stdout_and_stderr_come_apart(bench: Fixtures) -> None:
    result = await bench.runtime.exec("echo out; echo err >&2")
    expect((result.stdout, result.stderr) == (b"out\n", b"err\n"), result)


@_check
async def a_list_is_not_read_by_a_shell(bench: Fixtures) -> None:
    result = await bench.runtime.exec(["echo", "$HOME", "a b", "'*'"])
    expect(result.stdout == b"$HOME a b '*'\n", result)


@_check
async def stdin_is_closed_unless_given(bench: Fixtures) -> None:
    closed = await bench.runtime.exec("cat", timeout_s=20)
    expect(closed.ok and closed.stdout == b"", closed)
    given = os.urandom(300_000)
    result = await bench.runtime.exec("cat", stdin=given, timeout_s=20)
    expect(result.stdout == given, f"{len(result.stdout)} of {len(given)} bytes came back")
    unread = await bench.runtime.exec("true", stdin=given, timeout_s=20)
    expect(unread.ok, unread)


@_check
async def the_environment_is_what_was_given(bench: Fixtures) -> None:
    """Check that a command sees the variables given to it and none of this process's."""
    os.environ["BRIDLE_CONTROL_TOKEN"] = "secret"  # noqa: S105 - it must not arrive
    try:
        result = await bench.runtime.exec("env", env={"GIVEN": "a b"})
    finally:
        del os.environ["BRIDLE_CONTROL_TOKEN"]
    lines = result.stdout.decode().splitlines()
    expect("GIVEN=a b" in lines, result)
    expect(f"HOME={bench.runtime.home}" in lines, result)
    names = {line.partition("=")[0].upper() for line in lines}
    leaked = names & {"BRIDLE_CONTROL_TOKEN", "HTTP_PROXY", "HTTPS_PROXY", "OPENAI_API_KEY"}
    expect(not leaked, f"leaked into the runtime: {leaked}")


@_check
async def output_over_the_limit_keeps_head_and_tail(bench: Fixtures) -> None:
    result = await bench.runtime.exec(
        "echo first; head -c 3000000 /dev/zero; echo last", output_limit=1000, timeout_s=30
    )
    expect(result.truncated, "truncated is not set")
    expect(result.stdout.startswith(b"first\n"), result.stdout[:20])
    expect(result.stdout.endswith(b"last\n"), result.stdout[-20:])
    expect(len(result.stdout) < 1200, len(result.stdout))


@_check
async def a_log_gets_everything(bench: Fixtures) -> None:
    log, errors = bench.folder / "logs" / "all.log", bench.folder / "logs" / "err.log"
    result = await bench.runtime.exec(
        "head -c 50000 /dev/zero; echo err >&2", output_limit=100, log=log, error_log=errors
    )
    expect(result.ok and log.stat().st_size == 50000, (result.exit_code, log.stat().st_size))
    expect(errors.read_bytes() == b"err\n", errors.read_bytes())
    await bench.runtime.exec("echo out; echo err >&2", log=log)
    expect(sorted(log.read_bytes()[50000:].split()) == [b"err", b"out"], log.read_bytes()[50000:])


@_check
async def commands_run_in_the_workdir_by_default(bench: Fixtures) -> None:
    runtime = bench.runtime
    result = await runtime.exec("pwd -P; mkdir sub")
    expect(result.stdout.decode().strip().endswith(runtime.workdir), result)
    result = await runtime.exec("pwd -P", cwd="sub")
    expect(result.stdout.decode().strip().endswith(f"{runtime.workdir}/sub"), result)


@_check
async def a_deleted_workdir_does_not_end_the_session(bench: Fixtures) -> None:
    await bench.runtime.exec('rm -rf "$PWD"')
    result = await bench.runtime.exec("pwd")
    expect(result.ok, result)


@_check
async def home_is_private_and_empty(bench: Fixtures) -> None:
    result = await bench.runtime.exec('ls -A "$HOME" && touch "$HOME/mine" && mktemp')
    expect(result.ok, result)
    expect(len(result.stdout.split()) == 1, result)
    other = await (await bench.another()).exec('ls -A "$HOME"')
    expect(other.stdout == b"", other)


# ---- files


@_check
async def files_and_folders_go_in_with_their_modes(bench: Fixtures) -> None:
    (bench.folder / "tree" / "deep").mkdir(parents=True)
    tool = bench.folder / "tree" / "deep" / "tool"
    tool.write_text("#!/bin/bash\necho ran\n")
    tool.chmod(0o755)
    await bench.runtime.upload(bench.folder / "tree", "a/b")
    await bench.runtime.upload(tool, "c/tool")
    result = await bench.runtime.exec("a/b/deep/tool && c/tool")
    expect(result.stdout == b"ran\nran\n", result)


@_check
async def written_files_make_their_parents(bench: Fixtures) -> None:
    content = bytes(range(256)) * 100
    await bench.runtime.write("x/y/z.bin", content, mode=0o600)
    await bench.runtime.write(f"{bench.runtime.home}/.config/tool.json", b"{}")
    result = await bench.runtime.exec('stat -c %a x/y/z.bin; cat "$HOME/.config/tool.json"')
    expect(result.stdout == b"600\n{}", result)
    await bench.runtime.download("x/y/z.bin", bench.folder / "back" / "z.bin")
    expect((bench.folder / "back" / "z.bin").read_bytes() == content, "content differs")


@_check
async def folders_come_out(bench: Fixtures) -> None:
    await bench.runtime.exec("mkdir -p out/deep && echo 1 > out/one && echo 2 > out/deep/two")
    await bench.runtime.download("out", bench.folder / "out")
    expect((bench.folder / "out" / "deep" / "two").read_text() == "2\n", "out/deep/two is missing")


@_check
async def a_file_that_nobody_may_read_keeps_no_other_one_inside(bench: Fixtures) -> None:
    """Check that a file without read permission does not keep its folder's other files from
    download.
    """
    shut = "chmod 000 out/shut/two out/shut"
    await bench.runtime.exec(f"mkdir -p out/shut; echo 1 > out/one; echo 2 > out/shut/two; {shut}")
    await bench.runtime.kill()
    await bench.runtime.download("out", bench.folder / "out")
    expect((bench.folder / "out" / "one").read_text() == "1\n", "out/one is missing")


@_check
async def more_than_was_asked_for_does_not_come_out(bench: Fixtures) -> None:
    await bench.runtime.exec("truncate -s 3M out || dd if=/dev/zero of=out bs=1M count=3")
    await _fails(bench.runtime.download("out", bench.folder / "out", most=2 << 20))
    expect(not (bench.folder / "out").exists(), "something of it came out")


@_check
async def what_is_not_there_cannot_be_downloaded(bench: Fixtures) -> None:
    await _fails(bench.runtime.download("nowhere", bench.folder / "nowhere"))


@_check
async def links_do_not_lead_out_of_the_session(bench: Fixtures) -> None:
    secret = bench.folder / "secret"
    secret.write_text("host's own")
    await bench.runtime.exec(
        f"mkdir out && echo in > out/own && ln -s own out/fine && ln -s {secret} out/evil"
        f" && ln -s {bench.folder} out/folder && mkfifo out/pipe && ln -s {secret} alone"
    )
    await bench.runtime.download("out", bench.folder / "out")
    names = {path.name for path in (bench.folder / "out").iterdir()}
    expect(names <= {"own", "fine"}, names)
    with suppress(RuntimeFailure):
        await bench.runtime.download("alone", bench.folder / "alone")
        expect((bench.folder / "alone").read_text() != "host's own", "a link was followed")


@_check
async def a_link_is_replaced_when_written(bench: Fixtures) -> None:
    secret = bench.folder / "secret"
    secret.write_text("untouched")
    await bench.runtime.exec(f"ln -s {secret} reward.txt")
    await bench.runtime.write("reward.txt", b"mine")
    expect(secret.read_text() == "untouched", "a link was written through")


@_check
async def mounts_are_readable_inside(bench: Fixtures) -> None:
    result = await bench.runtime.exec(["cat", bench.runtime.inside(bench.mount.source) + "/given"])
    expect(result.stdout == b"mounted", result)


@_check
async def the_gateway_is_reached(bench: Fixtures) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"here\n")
        await writer.drain()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        url = urlsplit(bench.runtime.gateway_url(f"http://127.0.0.1:{port}/s/x/v1"))
        expect(url.path == "/s/x/v1", url)
        line = f"exec 3<>/dev/tcp/{url.hostname}/{url.port}; echo hello >&3; cat <&3"
        result = await bench.runtime.exec(line, timeout_s=10)
    expect(result.stdout == b"here\n", result)


# ---- ends


@_check
async def a_timeout_ends_all_that_was_started(bench: Fixtures) -> None:
    command = f"({BEAT}) & setsid bash -c '{BEAT}' & {BEAT}"
    result = await _timed_out(bench.runtime, command)
    expect(result.timed_out and result.exit_code is None and not result.ok, result)
    await _has_stopped(bench.runtime)


@_check
async def a_process_that_ignores_sigterm_is_ended(bench: Fixtures) -> None:
    result = await _timed_out(bench.runtime, f"trap '' TERM; {BEAT}")
    expect(result.timed_out and not result.ok and result.exit_code is None, result)
    await _has_stopped(bench.runtime)


@_check
async def a_cancelled_caller_leaves_nothing(bench: Fixtures) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(bench.runtime.exec(BEAT))
        await _until(bench.runtime, "test -s beat")
        running.cancel()
    await _has_stopped(bench.runtime)


@_check
async def what_a_command_leaves_running_is_there_for_the_next(bench: Fixtures) -> None:
    daemon = f"(setsid bash -c '{BEAT}' </dev/null >/dev/null 2>&1 &) &"
    await bench.runtime.exec(f"{daemon} until [ -s beat ]; do sleep 0.02; done")
    size = (await bench.runtime.exec("wc -c < beat")).stdout.decode().strip()
    await _until(bench.runtime, f"test $(wc -c < beat) -gt {size}")


@_check
async def kill_ends_daemons_and_can_be_repeated(bench: Fixtures) -> None:
    daemon = f"(setsid bash -c \"trap '' TERM; {BEAT}\" </dev/null >/dev/null 2>&1 &) &"
    started = await bench.runtime.exec(f"{daemon} until [ -s beat ]; do sleep 0.02; done")
    expect(started.ok, started)
    await bench.runtime.kill()
    await _has_stopped(bench.runtime)
    await bench.runtime.kill()


@_check
async def kill_ends_a_running_exec(bench: Fixtures) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(bench.runtime.exec(f"touch up; {BEAT}"))
        await _until(bench.runtime, "test -s beat")
        await bench.runtime.kill()
    expect(running.result().exit_code != 0, running.result())
    await _has_stopped(bench.runtime)


@_check
async def one_session_does_not_end_another(bench: Fixtures) -> None:
    other = await bench.another()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(other.exec("touch up; sleep 0.5; echo alive"))
        await _until(other, "test -e up")
        await bench.runtime.kill()
    expect(running.result().stdout == b"alive\n", running.result())


@_check
async def many_commands_run_at_once(bench: Fixtures) -> None:
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(bench.runtime.exec(f"echo {n}")) for n in range(16)]
    expect([int(each.result().stdout) for each in running] == list(range(16)), running)


@_check
async def stop_can_be_repeated_and_is_the_end(bench: Fixtures) -> None:
    await bench.runtime.exec("mkdir -m 000 locked; touch file")
    await bench.runtime.stop()
    await bench.runtime.stop()
    await _fails(bench.runtime.exec("true"))


async def _fails(work: Awaitable[object]) -> None:
    try:
        result = await work
    except RuntimeFailure:
        return
    raise Nonconformity(f"the runtime must raise RuntimeFailure here, and it returned {result}")


async def _timed_out(runtime: Runtime, command: str) -> ExecResult:
    """Return the result of a command that had begun to write to `beat` when it timed out."""
    for timeout_s in BEGUN_S:
        result = await runtime.exec(command, timeout_s=timeout_s)
        if (await runtime.exec("test -s beat")).ok:
            return result
    raise Nonconformity(f"a command did not begin within {timeout_s} s; its result: {result}")


async def _until(runtime: Runtime, condition: str) -> None:
    result = await runtime.exec(f"until {condition}; do sleep 0.02; done", timeout_s=30)
    expect(result.ok, f"never came true: {condition}")


async def _has_stopped(runtime: Runtime) -> None:
    """Expect that the process that wrote to `beat` writes no more."""
    result = await runtime.exec("sleep 0.1; wc -c < beat; sleep 0.2; wc -c < beat")
    first, second = result.stdout.split()
    expect(first == second and first != b"0", f"beat grew from {first!r} to {second!r}")
