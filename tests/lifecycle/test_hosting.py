import asyncio
import re
import shutil

import pytest
from tests.lifecycle.house import AGENT, a_node, checked, nothing_lives, task
from tests.sandbox.images import spec_of

from bridle.config import Action, AgentSpec, RuntimeSpec
from bridle.errors import ConfigError
from bridle.lifecycle.manager import plan
from bridle.runtimes.door import python
from bridle.runtimes.local import LocalRuntime
from bridle.types import JSON, Cause

KINDS = [
    pytest.param("local"),
    *(
        pytest.param(kind, marks=[pytest.mark.sandbox, pytest.mark.timeout(180)])
        for kind in ("bubblewrap", "docker")
    ),
]


@pytest.fixture(params=KINDS)
def backend(request):
    return request.param


async def hosted(backend, command=AGENT, **changes):
    """A task whose harness runs on the host."""
    spec = RuntimeSpec(**await spec_of(backend), **changes.pop("runtime", {}))
    return task(command, agent={"place": "host"}, runtime=spec, **changes)


def commands(*lines: str) -> list[JSON]:
    return [*({"shell": [line]} for line in lines), {"content": "It is done."}]


def agent_for(backend):
    """The test's own agent, where the harness's place shows it."""
    return AGENT if backend == "local" else f"{python()} -S $WORKDIR/agent.py"


async def run(tmp_path, backend, *lines, command=None, **changes):
    prepare = (Action(type="upload_file", source=AGENT.split()[-1], target="agent.py"),)
    line = command or agent_for(backend)
    made = await hosted(backend, line, runtime={"prepare": prepare}, **changes)
    async with a_node(tmp_path, *commands(*lines)) as node:
        result = await node.run(made)
        assert list(node.scratch.folder.glob("*/*")) == []
    assert nothing_lives(result.session_id)
    assert nothing_lives(f"{result.session_id}.host")
    return result


async def test_the_harness_is_beside_the_sandbox_and_its_commands_in_it(tmp_path, backend):
    where = "echo $BRIDLE_SESSION $PWD $HOME"
    command = f"echo host: $BRIDLE_SESSION $HOME > out.txt; {agent_for(backend)}"
    result = await run(
        tmp_path,
        backend,
        f"{where} >> out.txt; echo key: $OPENAI_API_KEY. >> out.txt",
        command=command,
        evaluator=checked(f"cat out.txt; {where}"),
    )
    assert (result.status, result.error, result.reward) == ("COMPLETED", None, 1.0)
    host, inside, key, evaluator = result.metadata["evaluation"]["output"].splitlines()
    assert f" {result.session_id}.host " in host
    assert inside == evaluator
    assert inside.startswith(f"{result.session_id} ")
    assert key == "key: ."


async def test_streams_codes_signals_folders_and_variables_pass_the_door(tmp_path, backend):
    script = """
    set -u; mkdir -p sub; cd sub
    test "$(printf abc | bash -c 'cat; echo e >&2' 2>err)" = abc && grep -qx e err || exit 11
    bash -c 'exit 7'; test $? = 7 || exit 12
    bash -c 'kill -TERM $$'; test $? = 143 || exit 13
    test "$(bash -c 'basename $PWD')" = sub || exit 14
    test "$(MINE='a b' bash -c 'echo $MINE')" = 'a b' || exit 15
    test "$(bash -c 'echo "$1|$2"' x '' 'y  z')" = '|y  z' || exit 16
    echo 'echo $((6 * 7))' | sh | grep -qx 42 || exit 17
    timeout -s KILL 0.3 bash -c 'sleep 54.25'
    bash -c 'for i in {1..200}; do grep -qsxz 54[.]25 /proc/[0-9]*/cmdline || exit 0; sleep 0.05
    done; exit 1' || exit 18
    head -c 300000 /dev/zero | bash -c 'wc -c' | grep -qx 300000 || exit 19
    bash -c 'exec 2>&1; no-such-program'; test $? = 127 || exit 20
    bash -c : <&- >&- 2>&- || exit 21
    """
    result = await run(
        tmp_path,
        backend,
        command=f"{script}\ncd ..; {agent_for(backend)}",
        evaluator=checked("true"),
    )
    assert (result.status, result.error) == ("COMPLETED", None)


async def test_what_its_own_tools_write_is_the_sandbox_s(tmp_path, backend):
    command = f"echo one > made.txt; {agent_for(backend)}; grep -qx two made.txt"
    result = await run(
        tmp_path,
        backend,
        "grep -qx one made.txt && echo two > made.txt",
        command=command,
        evaluator=checked("grep -qx two made.txt"),
    )
    assert (result.status, result.error, result.reward) == ("COMPLETED", None, 1.0)


async def test_the_budget_ends_harness_and_commands(tmp_path):
    result = await run(tmp_path, "local", command="bash -c 'sleep 54'", budgets={"agent_s": 0.3})
    assert (result.status, result.cause) == ("TIMEOUT", Cause.TIMEOUT)


async def test_a_cancelled_session_leaves_neither_harness_nor_commands(tmp_path, backend):
    made = await hosted(backend, "bash -c 'echo $BRIDLE_SESSION > up; sleep 54'")
    async with a_node(tmp_path) as node, asyncio.TaskGroup() as group:
        running = group.create_task(node.run(made))
        async with asyncio.timeout(30):
            while not any(  # noqa: ASYNC110 - no event
                file.stat().st_size for file in node.scratch.folder.glob("*/work/up")
            ):
                await asyncio.sleep(0.02)
        (session_id,) = node.session_ids()
        assert not nothing_lives(session_id)
        node.cancel(session_id)
    assert running.result().cause is Cause.CANCELLED
    assert nothing_lives(session_id)
    assert nothing_lives(f"{session_id}.host")


async def test_a_sandbox_that_breaks_is_not_the_harness_s_fault(tmp_path):
    # A work folder that is no folder any more: no command can start there.
    result = await run(
        tmp_path, "local", command=f"cd /; {AGENT}; D=$WORKDIR; rm -rf $D; touch $D; bash -c true"
    )
    assert (result.status, result.cause) == ("ERROR", Cause.INFRASTRUCTURE)
    assert re.search(r"run: cannot start|cannot", result.error)


def test_what_cannot_be_on_the_host_is_refused_with_what_can():
    agent = AgentSpec(harness="codex", place="host")
    wanted = task().model_copy(update={"agent": agent, "runtime": RuntimeSpec(backend="local")})
    with pytest.raises(ConfigError, match=r"'codex' runs in the sandbox only.*mini_swe_agent"):
        plan(wanted)
    spec = RuntimeSpec(backend="apptainer", image="x.sif")
    with pytest.raises(ConfigError, match=r"cannot share its work folder.*local, bubblewrap and"):
        plan(task(agent={"place": "host"}, runtime=spec))


async def test_several_commands_run_at_once(tmp_path):
    script = "for i in {1..8}; do bash -c 'sleep 0.05; echo x' & done; wait"
    command = f"test $(({script}) | wc -l) = 8 && {AGENT}"
    async with asyncio.timeout(15):
        result = await run(tmp_path, "local", command=command)
    assert (result.status, result.error) == ("COMPLETED", None)


class Boxed(LocalRuntime):
    """Says that it contains."""

    contains = True


async def test_who_is_contained_is_not_let_out_where_bubblewrap_lacks(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    for name in ("bash", "tar"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    result = await run(tmp_path, "tests.lifecycle.test_hosting:Boxed", command="touch ran")
    assert (result.status, result.cause) == ("ERROR", Cause.INFRASTRUCTURE)
    assert "the bubblewrap runtime needs bwrap" in result.error
