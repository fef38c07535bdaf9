"""Whole sessions of hostile harnesses: what they try fails, and the result says how they ended."""

import asyncio
import os
import shlex
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from tests.lifecycle.house import a_node, checked, task
from tests.sandbox.images import spec_of

from bridle.config import RuntimeSpec
from bridle.types import Cause

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(60)]

CLIENT = r"""
ask() { # ask METHOD PATH KEY BODY: the status of the gateway's answer
  local rest=${OPENAI_BASE_URL#http://}; local host=${rest%%/*}
  exec 3<>"/dev/tcp/${host%:*}/${host#*:}" || return 1
  printf '%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n' "$1" "$2" >&3
  printf 'Authorization: Bearer %s\r\n' "$3" >&3
  printf 'Content-Type: application/json\r\nContent-Length: %s\r\n\r\n%s' "${#4}" "$4" >&3
  cat <&3 | tr -d '\r' > answer; head -1 answer | cut -d' ' -f2
}
hi='{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
turn() { ask POST "/s/$1/v1/chat/completions" "$2" "$hi"; }
own=${OPENAI_BASE_URL#*/s/}; own=${own%%/*}
[ "$(turn "$own" "$OPENAI_API_KEY")" = 200 ] || exit 70
"""
"""A harness of bash alone: `ask` speaks HTTP; one turn is taken first, so that it counts as one."""


async def played(tmp_path, backend, script, *, another=None, **options):
    """The result of a session whose harness is `script`; `another` opens a second session."""
    (tmp_path / "node").mkdir()
    async with a_node(tmp_path / "node", {"content": "hello"}) as node:
        runtime = RuntimeSpec(**await spec_of(backend), **options.pop("runtime", {}))
        names = {}
        if another is not None:
            handle = await node.gateway.open_session(another)
            names = {"OTHER_KEY": handle.key, "OTHER": another}
        line = f"bash -c {shlex.quote(CLIENT + script)}"
        agent = {"env": names} if names else {}
        return await node.run(task(line, runtime=runtime, agent=agent, **options))


@pytest.mark.parametrize(
    ("attempt", "status"),
    [
        ('turn other "$OPENAI_API_KEY"', 401),
        ('turn "$own" wrong-key', 401),
        ("turn unknown wrong-key", 401),
        ('ask POST /sessions "$OPENAI_API_KEY" {}', "40[134]"),
        ('ask GET "/sessions/other/exchanges" "$OPENAI_API_KEY" ""', "40[134]"),
        ('ask GET "/sessions/$own/trajectory" "$OPENAI_API_KEY" ""', "40[134]"),
        ('ask DELETE "/sessions/$own" "$OPENAI_API_KEY" ""', "40[134]"),
        ('ask POST /policy "$OPENAI_API_KEY" {}', "40[134]"),
        ('ask GET /metrics "$OPENAI_API_KEY" ""', "40[134]"),
    ],
)
async def test_its_key_opens_its_own_model_and_nothing_else(tmp_path, backend, attempt, status):
    script = f'said=$({attempt}); [[ $said =~ ^{status}$ ]] || {{ echo "$said" >&2; exit 71; }}'
    result = await played(tmp_path, backend, script, another="other")
    assert (result.status, result.error) == ("COMPLETED", None)


async def test_it_cannot_leave_its_own_reward(tmp_path, backend):
    evaluator = checked("true", config={"command": "true", "reward_file": "reward.txt"})
    script = "echo 1 > reward.txt; (setsid bash -c 'while :; do echo 1 > reward.txt; done' &) "
    result = await played(tmp_path, backend, script, evaluator=evaluator)
    assert result.cause is Cause.EVALUATOR
    assert result.reward is None


async def test_the_evaluator_finds_what_was_left_and_nothing_that_runs(tmp_path, backend):
    check = "test -s out.txt && ! ps ax -o comm= | grep -q tail"
    script = "echo x > out.txt; (setsid tail -f /dev/null </dev/null >/dev/null 2>&1 &)"
    result = await played(tmp_path, backend, script, evaluator=checked(check))
    assert (result.status, result.reward) == ("COMPLETED", 1.0)


async def test_too_much_memory_is_told_apart_from_a_crash(tmp_path, backend):
    script = "head -c 400000000 /dev/zero | tail"
    result = await played(tmp_path, backend, script, runtime={"memory_mb": 64})
    assert (result.status, result.cause) == ("ERROR", Cause.LIMIT)
    assert "limit of memory" in (result.error or "")


def process_1():
    """Process 1 of the sandbox in which a `sleep 54.5` runs; `None` = not yet."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            space = os.readlink(process / "ns" / "pid")  # noqa: PTH115 - a name, no path
            found[int(process.name)] = (process / "cmdline").read_bytes(), space
    ours = found[os.getpid()][1]
    running = {space for words, space in found.values() if words == b"sleep\x0054.5\0"} - {ours}
    holds = [p for p, (words, at) in found.items() if at in running and b"sleep 86400" in words]
    return min(holds, default=None)


async def test_a_sandbox_that_is_killed_is_no_crash_of_the_harness(tmp_path, backend):
    async with asyncio.TaskGroup() as group:
        running = group.create_task(played(tmp_path, backend, "sleep 54.5"))
        async with asyncio.timeout(30):
            while (pid := await asyncio.to_thread(process_1)) is None:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
    assert running.result().cause is Cause.INFRASTRUCTURE
    assert "ended from outside" in running.result().error
