import asyncio
import json
import os
import secrets
import subprocess
from contextlib import AsyncExitStack

import pytest
from tests.node.house import a_node, checked, task
from tests.node.simulated import simulate

from bridle.config import Action, AgentSpec, BuilderSpec, RuntimeSpec
from bridle.errors import ConfigError, HarnessError, RuntimeFailure
from bridle.harnesses import open_harness
from bridle.harnesses.command import CommandHarness
from bridle.node.base import Installing, SessionChanged
from bridle.node.local import OWNER, NodeSettings, Scratch, check, reap
from bridle.runtimes.process import owner_mark
from bridle.types import Cause


def most_at_once(node, status, until):
    """The most sessions that were between entering `status` and one of `until`."""
    most, inside = 0, set()
    for event in node.seen:
        if not isinstance(event, SessionChanged):
            continue
        if event.status == status:
            inside.add(event.session_id)
        elif event.status in until:
            inside.discard(event.session_id)
        most = max(most, len(inside))
    return most


ENDS = ("COMPLETED", "ERROR", "TIMEOUT", "CANCELLED")


async def test_a_running_node_removes_the_remains_of_a_dead_one(tmp_path):
    async with a_node(tmp_path, settings={"reap_s": 0.02}):
        left = Scratch.make(tmp_path / "scratch")
        disown(left, 2**22 + 1)
        async with asyncio.timeout(15):
            while left.folder.exists():  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)
        assert list((tmp_path / "scratch").glob(left.folder.name)) == []


async def test_run_slots_and_the_ready_buffer_are_bounded(tmp_path):
    settings = {"run_slots": 2, "init_slots": 2, "ready_buffer": 3, "post_slots": 1}
    async with a_node(tmp_path, settings=settings) as node:
        async with asyncio.TaskGroup() as group:
            go = tmp_path / "go"
            for _ in range(10):
                group.create_task(node.run(task(f"until [ -e {go} ]; do sleep 0.05; done")))
            async with asyncio.timeout(15):
                while {"RUNNING": 2, "READY": 3}.items() - node.stages().items():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            go.touch()
        assert most_at_once(node, "RUNNING", ("BUILDING", *ENDS)) == 2
        assert most_at_once(node, "INITIALIZING", ("READY", *ENDS)) <= 2
        assert most_at_once(node, "INITIALIZING", ("RUNNING", *ENDS)) == 3


async def test_evaluation_in_a_separate_runtime_holds_no_run_slot(tmp_path):
    async with a_node(tmp_path, settings={"run_slots": 1, "post_slots": 1}) as node:
        async with asyncio.TaskGroup() as group:
            go = tmp_path / "go"
            wait = f"until [ -e {go} ]; do sleep 0.05; done"
            scored = group.create_task(node.run(task(evaluator=checked(wait))))
            async with asyncio.timeout(30):
                while "EVALUATING" not in node.stages():  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0.01)
                group.create_task(node.run(task(wait, task_id="t-2")))
                while node.stages() != {"EVALUATING": 1, "RUNNING": 1}:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            go.touch()
        result = scored.result()
        assert (result.reward, result.metadata["evaluation"]["place"]) == (1.0, "apart")


def test_a_ready_buffer_keeps_the_run_slots_busy():
    # Long-tailed runs, and a fifth of a run to make a runtime ready; half a second of computing.
    assert simulate(60, run_slots=4).share > 0.95
    assert simulate(60, run_slots=4, ready_buffer=0).share < 0.9


async def test_a_session_without_a_ready_buffer_is_initialised_in_its_run_slot(tmp_path):
    settings = {"run_slots": 1, "init_slots": 2, "ready_buffer": 0}
    async with a_node(tmp_path, settings=settings) as node:
        async with asyncio.TaskGroup() as group:
            bad = RuntimeSpec(prepare=(Action(type="exec", command="false"),))
            runs = [group.create_task(node.run(one)) for one in (task(runtime=bad), task(), task())]
        assert [run.result().status for run in runs] == ["ERROR", "COMPLETED", "COMPLETED"]
        assert most_at_once(node, "INITIALIZING", ("BUILDING", *ENDS)) == 1


async def test_an_ended_session_leaves_nothing_in_the_scratch_folder(tmp_path):
    async with a_node(tmp_path) as node:
        for evaluator in (checked(), checked(trusted=True)):
            assert (await node.run(task(evaluator=evaluator))).reward == 1.0
        left = {path.name for path in node.scratch.folder.iterdir()}
    assert left == {OWNER, "sessions"}


async def test_a_node_reports_its_stages_and_free_slots(tmp_path):
    settings = {"run_slots": 1, "ready_buffer": 1, "post_slots": 1}
    async with a_node(tmp_path, settings=settings) as node:
        assert (node.capacity, node.free, node.stages()) == (4, 4, {})
        async with asyncio.TaskGroup() as group:
            running = group.create_task(node.run(task("sleep 60"), run_id="mine"))
            while node.stages() != {"RUNNING": 1}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (node.free, node.session_ids()) == (3, ("mine",))
            with pytest.raises(ConfigError, match="session 'mine' is running already"):
                await node.run(task(), run_id="mine")
            assert node.cancel("mine")
        assert (running.result().session_id, running.result().status) == ("mine", "CANCELLED")
        assert not node.cancel("mine")
        assert node.free == 4


async def test_a_slow_evaluator_does_not_block_the_next_session(tmp_path):
    settings = {"run_slots": 1, "post_slots": 2}
    async with a_node(tmp_path, settings=settings) as node:
        slow = task(
            evaluator=checked(
                "until [ -e $FLAG ]; do sleep 0.02; done", env={"FLAG": f"{tmp_path}/flag"}
            )
        )
        async with asyncio.TaskGroup() as group:
            first = group.create_task(node.run(slow))
            while "EVALUATING" not in [str(event.status) for event in node.seen]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            second = await node.run(task())
            assert second.status == "COMPLETED"
            assert not first.done()
            (tmp_path / "flag").touch()
    assert first.result().reward == 1.0


async def test_results_are_appended_to_the_run_folder_as_sessions_end(tmp_path):
    async with a_node(tmp_path) as node:
        one, two = await node.run(task()), await node.run(task("exit 1"))
        lines = [json.loads(line) for line in node.folder.trajectories.read_text().splitlines()]
        assert [line["session_id"] for line in lines] == [one.session_id, two.session_id]
        assert [line["status"] for line in lines] == ["COMPLETED", "ERROR"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"agent": {"harness": "nano", "command": None}}, "unknown harness 'nano'"),
        ({"evaluator": {"strategy": "luck"}}, "unknown evaluator 'luck'"),
        ({"runtime": RuntimeSpec(backend="cloud")}, "unknown runtime 'cloud'"),
        ({"runtime": RuntimeSpec(backend="local", image="x")}, "cannot give image"),
        ({"builder": BuilderSpec(strategy="pile")}, "unknown builder 'pile'"),
        ({"builder": BuilderSpec(config={"max": 1})}, "builder prefix_merging: config: max"),
    ],
)
async def test_unknown_names_in_a_task_raise_before_anything_runs(tmp_path, changes, said):
    async with a_node(tmp_path) as node:
        with pytest.raises(ConfigError, match=rf"task 't-1': .*{said}"):
            check([task(), task(**changes)])
        with pytest.raises(ConfigError, match=said):
            await node.run(task(**changes))
        assert node.seen == []
        assert node.store.sessions() == []


class Counted(CommandHarness):
    """A harness that is installed when `go` is set, or is not."""

    name = "counted"
    installed = 0
    go: asyncio.Event | None = None

    async def install(self, bundles, report):
        type(self).installed += 1
        report("counted: working")
        await (self.go.wait() if self.go else asyncio.sleep(0.05))
        if "broken" in self._line:
            raise HarnessError("npm is missing: install node")
        folder = bundles / "counted"
        folder.mkdir(parents=True)
        (folder / "file").write_text("bundled")
        return folder


def counted(command):
    agent = AgentSpec(import_path="tests.node.test_local:Counted", command=command)
    return task().model_copy(update={"agent": agent})


async def test_a_harness_is_installed_once_and_reported(tmp_path):
    Counted.installed = 0
    settings = {"bundles": tmp_path / "bundles"}
    async with a_node(tmp_path, settings=settings) as node:
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(node.run(counted("true"))) for _ in range(3)]
        lines = [event.line for event in node.seen if isinstance(event, Installing)]
    assert Counted.installed == 1
    assert lines == ["counted: working"]
    assert {run.result().cause for run in runs} == {Cause.HARNESS_NO_CALL}


async def test_an_installation_holds_back_no_other_harness(tmp_path):
    settings = {"bundles": tmp_path / "bundles", "init_slots": 2}
    harness = open_harness(counted("true").agent)
    assert isinstance(harness, Counted)
    harness.go = asyncio.Event()
    async with a_node(tmp_path, settings=settings) as node, asyncio.TaskGroup() as group:
        slow = group.create_task(node.install(harness))
        await asyncio.sleep(0)
        assert await node.install(open_harness(task("true").agent)) is None
        assert not slow.done()
        harness.go.set()
    assert slow.result() is not None


async def test_a_failed_harness_installation_is_not_repeated(tmp_path):
    Counted.installed = 0
    async with a_node(tmp_path, settings={"bundles": tmp_path / "bundles"}) as node:
        results = [await node.run(counted("broken")) for _ in range(2)]
    assert Counted.installed == 1
    assert [result.cause for result in results] == [Cause.INFRASTRUCTURE] * 2
    assert results[0].error == "init: npm is missing: install node"


def test_slot_defaults_follow_the_machine_and_the_number_of_run_slots():
    settings = NodeSettings()
    assert settings.run_slots >= 2
    assert settings.ready_buffer >= settings.init_slots
    wide = NodeSettings(run_slots=64)
    assert (wide.init_slots, wide.ready_buffer, wide.post_slots) == (32, 32, 32)
    assert NodeSettings(run_slots=1).ready_buffer == 2


async def test_a_new_node_removes_the_scratch_folder_of_a_killed_node(tmp_path):
    async with a_node(tmp_path) as node:
        left = node.scratch.folder.with_name("bridle-left")
        left.mkdir()
        disown(Scratch(left), 4194999)
    (tmp_path / "run").rename(tmp_path / "first")
    async with a_node(tmp_path):
        assert not left.exists()


def test_skills_path_is_relative_to_the_task_folder(tmp_path):
    located = task(
        agent={"harness": "pi", "command": None, "skills_path": "s"}, task_dir=str(tmp_path)
    )
    with pytest.raises(ConfigError, match=rf"task 't-1': agent\.skills_path: .* in {tmp_path}/s"):
        check([located])
    (tmp_path / "s").mkdir()
    (tmp_path / "s/SKILL.md").write_text("x")
    check([located])


LEFT, OTHER = (f"s-{secrets.token_hex(8)}" for _ in range(2))
"""Session ids of this run alone: another run of these tests may be under way."""


@pytest.fixture
def dead():
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


def sleeper(session_id):
    env = {"BRIDLE_SESSION": session_id}
    return subprocess.Popen(["sleep", "60"], env=env, start_new_session=True)


def disown(scratch, pid):
    """Make a process of this machine the owner of `scratch`, one that was started long ago."""
    machine = owner_mark().split(".", 2)[2]
    (scratch.folder / OWNER).write_text(f"{pid}.1.{machine}")


async def test_each_session_gets_its_own_scratch_folder(tmp_path):
    scratch = Scratch.make(tmp_path)
    async with AsyncExitStack() as stack:
        one, two = scratch.session("s-1", stack), scratch.session("s-2", stack)
    assert one != two
    assert one.parent == two.parent == scratch.folder
    scratch.remove()
    scratch.remove()
    assert list(tmp_path.iterdir()) == []


def test_an_impossible_scratch_folder_is_a_runtime_failure(tmp_path):
    with pytest.raises(RuntimeFailure, match=r"cannot make a scratch folder in .*/none"):
        Scratch.make(tmp_path / "none")


async def test_reaper_keeps_the_folder_of_a_living_node(tmp_path):
    scratch = Scratch.make(tmp_path)
    assert await reap(tmp_path) == 0
    assert scratch.folder.exists()


async def test_reaper_removes_the_folder_and_processes_of_a_dead_node(tmp_path, dead):
    scratch = Scratch.make(tmp_path)
    scratch.session(LEFT, AsyncExitStack())
    disown(scratch, dead)
    left, other = sleeper(LEFT), sleeper(OTHER)
    assert await reap(tmp_path) == 1
    assert left.wait(timeout=30) != 0
    assert other.poll() is None
    other.kill()
    other.wait()
    assert not scratch.folder.exists()


async def test_reaper_removes_a_folder_whose_owner_pid_was_reused(tmp_path):
    scratch = Scratch.make(tmp_path)
    disown(scratch, os.getpid())
    assert await reap(tmp_path) == 1


@pytest.mark.parametrize("owner", [b"", b"\xff", b"1.2", b"4194999.1.0badcafe.4026531836"])
async def test_reaper_keeps_a_folder_of_an_unknown_process_or_machine(tmp_path, owner):
    scratch = Scratch.make(tmp_path)
    (scratch.folder / OWNER).write_bytes(owner)
    assert await reap(tmp_path) == 0
    assert scratch.folder.exists()


async def test_reaper_removes_the_folder_of_a_dead_node_without_sessions(tmp_path, dead):
    scratch = Scratch.make(tmp_path)
    disown(scratch, dead)
    assert await reap(tmp_path) == 1
