"""Whole sessions of hostile harnesses: what they try fails, and the result says how they ended."""

import asyncio
import os
import shlex
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from tests.node.house import a_node, checked, nothing_lives, task
from tests.sandbox.images import spec_of
from tests.sandbox.test_escapes import listening

from bridle.config import RuntimeSpec
from bridle.types import Cause

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

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


async def played(tmp_path, backend, script, *, another=None, env=None, **options):
    """The result of a session whose harness is `script`; `another` opens a second session."""
    (tmp_path / "node").mkdir()
    async with a_node(tmp_path / "node", {"content": "hello"}) as node:
        runtime = RuntimeSpec(**{**await spec_of(backend), **options.pop("runtime", {})})
        names = dict(env or {})
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
async def test_a_session_key_gives_access_to_its_own_model_route_only(
    tmp_path, backend, attempt, status
):
    script = f'said=$({attempt}); [[ $said =~ ^{status}$ ]] || {{ echo "$said" >&2; exit 71; }}'
    result = await played(tmp_path, backend, script, another="other")
    assert (result.status, result.error) == ("COMPLETED", None)


async def test_a_reward_file_written_by_the_agent_gives_no_reward(tmp_path, backend):
    evaluator = checked("true", config={"command": "true", "reward_file": "reward.txt"})
    script = "echo 1 > reward.txt; (setsid bash -c 'while :; do echo 1 > reward.txt; done' &) "
    result = await played(tmp_path, backend, script, evaluator=evaluator)
    assert result.cause is Cause.EVALUATOR
    assert result.reward is None


async def test_the_evaluator_finds_the_agent_s_files_and_none_of_its_processes(tmp_path, backend):
    check = "test -s out.txt && ! ps ax -o comm= | grep -q tail"
    script = "echo x > out.txt; (setsid tail -f /dev/null </dev/null >/dev/null 2>&1 &)"
    result = await played(tmp_path, backend, script, evaluator=checked(check))
    assert (result.status, result.reward) == ("COMPLETED", 1.0)


async def test_an_agent_s_file_does_not_replace_what_is_bound_below_the_work_folder(tmp_path):
    (tmp_path / "expected").write_text("42\n")
    runtime = {"kwargs": {"binds": [f"{tmp_path}/expected:/work/data/expected"]}}
    script = "mv data aside; mkdir data; echo 7 > data/expected; grep -qx 7 data/expected"
    result = await played(
        tmp_path, "bubblewrap", script, runtime=runtime,
        evaluator=checked("grep -qx 42 data/expected"),
    )  # fmt: skip
    assert (result.status, result.reward) == ("COMPLETED", 1.0), result.error


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


async def test_a_killed_sandbox_ends_the_session_with_cause_infrastructure(tmp_path, backend):
    async with asyncio.TaskGroup() as group:
        running = group.create_task(played(tmp_path, backend, "sleep 54.5"))
        async with asyncio.timeout(30):
            while (pid := await asyncio.to_thread(process_1)) is None:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
    assert running.result().cause is Cause.INFRASTRUCTURE
    assert "ended from outside" in running.result().error


FAULTS = {
    "forks a daemon": (
        "(env -i setsid bash -c 'while :; do sleep 1; done' </dev/null >/dev/null 2>&1 &)",
        {},
        ("COMPLETED", None, ""),
    ),
    "ignores SIGTERM": (
        "trap '' TERM; while :; do sleep 1; done",
        {"budgets": {"agent_s": 3}},
        ("TIMEOUT", Cause.TIMEOUT, "budget of 3 s"),
    ),
    "prints 1 GiB": (
        "head -c 1073741824 /dev/zero",
        {},
        ("COMPLETED", None, ""),
    ),
    "opens 10,000 files": (
        "for ((i = 0; i < 10000; i++)); do exec {fd}</dev/null || exit 9; done",
        {},
        ("ERROR", Cause.HARNESS_CRASH, "Too many open files"),
    ),
    "deletes its work directory": (
        'rm -rf "$PWD" 2>/dev/null; true',
        {"evaluator": checked()},
        ("COMPLETED", None, ""),
    ),
    "links out of its artifact folder": (
        "mkdir out; ln -s /etc/passwd out/evil; ln -s /etc link; echo x > out/own",
        {"artifacts": {"paths": ["out", "link"]}},
        ("COMPLETED", None, ""),
    ),
    "fills its disk": (
        "for ((i = 0; ; i++)); do head -c 4000000 /dev/zero > f$i || exit 3; sleep 0.05; done",
        {"runtime": {"storage_mb": 20}},
        ("ERROR", Cause.LIMIT, "limit of storage"),
    ),
    "takes too much memory": (
        "head -c 400000000 /dev/zero | tail",
        {"runtime": {"memory_mb": 64}},
        ("ERROR", Cause.LIMIT, "limit of memory"),
    ),
}
"""What a harness does -> its script, its task's own fields, and how the session must end."""


@pytest.mark.parametrize("fault", FAULTS)
async def test_each_misbehaviour_of_a_harness_gives_its_own_status_and_cause(
    tmp_path, backend, fault
):
    script, options, (status, cause, words) = FAULTS[fault]
    result = await played(tmp_path, backend, script, **{"budgets": {"agent_s": 50}, **options})
    assert (result.status, result.cause) == (status, cause), result.error
    assert words in (result.error or "")
    logs = sum(path.stat().st_size for path in tmp_path.rglob("run/sessions/*/*"))
    assert logs < 130 << 20
    assert nothing_lives(result.session_id)
    if fault == "links out of its artifact folder":
        assert "out" in result.logs, result.metadata
        kept = sorted(path.name for path in (tmp_path / "node/run" / result.logs["out"]).iterdir())
        assert kept == ["own"]
        assert "link" in result.metadata["left_out"]


async def test_a_missing_image_ends_the_session_with_cause_infrastructure(tmp_path):
    image = "bridle-no-such-image:1"
    async with a_node(tmp_path) as node:
        made = task("true", runtime=RuntimeSpec(backend="docker", image=image))
        result = await node.run(made)
    assert (result.status, result.cause) == ("ERROR", Cause.INFRASTRUCTURE)
    assert f"image {image!r} is not here" in result.error


async def test_a_session_cannot_connect_to_the_engine_or_the_host_s_network(tmp_path, backend):
    script = """
    for at in 127.0.0.1/$PORT $ADDRESS/$PORT 192.0.2.1/80; do
      timeout 3 bash -c "exec 4<>/dev/tcp/$at" && exit 71
    done; true
    """
    with listening() as port:
        address = socket.gethostbyname(socket.gethostname())
        names = {"PORT": str(port), "ADDRESS": address}
        result = await played(tmp_path, backend, script, env=names)
    assert (result.status, result.error) == ("COMPLETED", None)
