import asyncio
import secrets

import pytest

from bridle.config import Action, RuntimeSpec
from bridle.errors import RuntimeFailure
from bridle.harnesses.base import Launch
from bridle.lifecycle.preparing import Prewarmed, place, prepare
from bridle.runtimes.local import LocalRuntime


@pytest.fixture
async def runtime(tmp_path):
    (tmp_path / "scratch").mkdir()
    made = LocalRuntime(RuntimeSpec(), f"s-{secrets.token_hex(8)}", tmp_path / "scratch")
    await made.start()
    yield made
    await made.stop()


async def prepared(runtime, tmp_path, *actions):
    log = tmp_path / "prepare.log"
    made = [Action(**action) for action in actions]
    await prepare(runtime, made, stage="prepare", base=tmp_path, log=log)
    return log.read_text() if log.exists() else ""


async def test_steps_are_done_in_order(runtime, tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_text("1")
    (tmp_path / "one").write_text("2")
    said = await prepared(
        runtime,
        tmp_path,
        {"type": "upload_dir", "source": "tree", "target": "."},
        {"type": "upload_file", "source": "one", "target": "sub/b"},
        {"type": "exec", "command": "cat $A b", "cwd": "sub", "env": {"A": "../a"}},
    )
    assert said == "12"


async def test_steps_see_what_earlier_ones_made(runtime, tmp_path):
    said = await prepared(
        runtime,
        tmp_path,
        {"type": "exec", "command": "echo made > x"},
        {"type": "exec", "command": "cat x"},
    )
    assert said == "made\n"


async def test_a_failing_step_is_tried_again_as_often_as_it_may(runtime, tmp_path):
    third = "echo x >> tries; test $(wc -l < tries) = 3"
    step = {"type": "exec", "command": third, "retry_backoff_seconds": 0.01}
    await prepared(runtime, tmp_path, {**step, "max_attempts": 3})
    with pytest.raises(RuntimeFailure, match=r"prepare step 0 \(exec\): .*exit code 1"):
        await prepared(runtime, tmp_path, {**step, "max_attempts": 2})


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ({"type": "exec", "command": "kill -9 $$"}, r"step 0 \(exec\): 'kill -9 \$\$': signal 9"),
        ({"type": "upload_file", "source": "no", "target": "x"}, r"step 0 \(upload_file\): cannot"),
    ],
)
async def test_the_step_that_failed_is_named(runtime, tmp_path, action, said):
    with pytest.raises(RuntimeFailure, match=said):
        await prepared(runtime, tmp_path, action)


async def test_a_harness_gets_its_files_and_folders_and_nobody_else_reads_them(runtime, tmp_path):
    (tmp_path / "skills" / "x").mkdir(parents=True)
    (tmp_path / "skills" / "x" / "SKILL.md").write_text("skill")
    home = runtime.home
    launch = Launch(
        "true", {}, {f"{home}/.config/key": b"k"}, {f"{home}/.skills": tmp_path / "skills"}
    )
    await place(runtime, launch)
    seen = await runtime.exec("stat -c %a $HOME/.config/key; cat $HOME/.skills/x/SKILL.md")
    assert seen.stdout == b"600\nskill"


# ---- prewarmed


class Room:
    """Something that is opened and closed."""

    def __init__(self):
        self.open = asyncio.Event()
        self.closed = 0

    async def make(self, stack):
        stack.push_async_callback(self.close)
        await self.open.wait()
        return self

    async def close(self):
        self.closed += 1


async def test_what_was_made_ready_is_there_when_it_is_needed_and_closed_at_the_end():
    room = Room()
    async with asyncio.TaskGroup() as group:
        fresh = Prewarmed(group, room.make)
        room.open.set()
        made: object = await fresh.get()
        assert made is room
        await fresh.aclose()
        await fresh.aclose()
    assert room.closed == 1


async def test_what_is_not_ready_is_closed_too():
    room = Room()
    async with asyncio.TaskGroup() as group:
        fresh = Prewarmed(group, room.make)
        await asyncio.sleep(0)
        await fresh.aclose()
    assert room.closed == 1


async def test_what_failed_says_so_when_it_is_needed_and_not_before():
    async def fails(stack):
        raise OSError(28, "no space")

    async with asyncio.TaskGroup() as group:
        fresh = Prewarmed(group, fails)
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeFailure, match=r"the fresh runtime: OSError: .*no space"):
            await fresh.get()
        await fresh.aclose()
