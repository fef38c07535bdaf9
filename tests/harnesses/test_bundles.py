import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bridle.config import cache_dir
from bridle.errors import HarnessError
from bridle.harnesses import bundles
from bridle.harnesses.bundles import MARKER, Builder, Recipe, bundles_dir, ensure, installed


class Work:
    """A recipe that counts how often it is built, and can be held, or made to fail."""

    def __init__(self, **changes):
        self.built = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self.failure = None
        self.recipe = replace(
            Recipe("tool", "1.0", ("lock",), needs="bin/tool", size_mb=1, build=self.build),
            **changes,
        )

    async def build(self, builder: Builder):
        self.built += 1
        builder.say("working")
        (builder.folder / "bin").mkdir()
        (builder.folder / "bin" / "part").write_text("x" * 3_000_000)
        await self.hold.wait()
        if self.failure:
            raise self.failure
        (builder.folder / "bin" / "tool").write_text("tool")


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


async def test_a_bundle_is_built_once_and_then_found(tmp_path):
    work, said = Work(), []
    folder = await ensure(work.recipe, tmp_path / "deep", said.append)
    assert folder == tmp_path / "deep" / work.recipe.folder_name
    assert await ensure(work.recipe, tmp_path / "deep", said.append) == folder
    assert work.built == 1
    facts = json.loads((folder / MARKER).read_text())
    assert (facts["name"], facts["version"], facts["size_mb"]) == ("tool", "1.0", 2)
    assert said[0] == "tool 1.0: working"
    assert said[1].startswith("tool 1.0: ready: 2 MB in ")


async def test_only_a_whole_bundle_of_the_version_is_installed(tmp_path):
    assert installed("tool", "1.0", tmp_path / "none") is None
    (tmp_path / "tool-1.0-half").mkdir()
    assert installed("tool", "1.0", tmp_path) is None
    folder = await ensure(Work().recipe, tmp_path, print)
    assert installed("tool", "1.0", tmp_path) == folder
    assert installed("tool", "1", tmp_path) is None


def test_another_lock_is_another_bundle():
    assert Work().recipe.folder_name == Work().recipe.folder_name
    assert Work(inputs=("other",)).recipe.folder_name != Work().recipe.folder_name


async def test_a_bundle_without_its_marker_or_its_interpreter_is_built_again(tmp_path):
    work = Work()
    folder = await ensure(work.recipe, tmp_path, print)
    (folder / MARKER).unlink()
    assert await ensure(work.recipe, tmp_path, print) == folder
    (folder / "bin" / "tool").unlink()
    assert await ensure(work.recipe, tmp_path, print) == folder
    assert work.built == 3


async def test_what_a_killed_builder_left_is_removed(tmp_path):
    work = Work()
    ruin = tmp_path / f".{work.recipe.folder_name}.building-0000"
    ruin.mkdir()
    await ensure(work.recipe, tmp_path, print)
    assert names(tmp_path) == [work.recipe.folder_name]


@pytest.mark.parametrize("failure", [HarnessError("no"), OSError(28, "No space left on device")])
async def test_a_failed_build_leaves_nothing(tmp_path, failure):
    work = Work()
    work.failure = failure
    with pytest.raises(HarnessError):
        await ensure(work.recipe, tmp_path, print)
    assert names(tmp_path) == []


async def test_a_cancelled_build_leaves_nothing(tmp_path):
    work = Work()
    work.hold.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await ensure(work.recipe, tmp_path, print)
    assert names(tmp_path) == []
    work.hold.set()
    await ensure(work.recipe, tmp_path, print)


async def test_an_installer_that_leaves_no_interpreter_has_failed(tmp_path):
    with pytest.raises(HarnessError, match="the installer left no bin/python"):
        await ensure(Work(needs="bin/python").recipe, tmp_path, print)


async def test_of_two_builders_one_builds_and_one_waits(tmp_path):
    waits = "tool 1.0: another process is building it; waiting"
    work, said = Work(), []
    work.hold.clear()
    async with asyncio.TaskGroup() as group:
        one = group.create_task(ensure(work.recipe, tmp_path, said.append))
        two = group.create_task(ensure(work.recipe, tmp_path, said.append))
        while waits not in said:  # noqa: ASYNC110 - it reports by a plain callback
            await asyncio.sleep(0.01)
        work.hold.set()
    assert one.result() == two.result()
    assert work.built == 1
    assert said.count(waits) == 1


async def test_too_little_room_is_told_before_anything_is_built(tmp_path):
    work = Work(size_mb=1 << 40)
    with pytest.raises(
        HarnessError, match=r"needs about \d+ MB in .*; make room or set BRIDLE_CACHE"
    ):
        await ensure(work.recipe, tmp_path, print)
    assert work.built == 0


async def test_a_bundle_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match="cannot use the bundle folder"):
        await ensure(Work().recipe, tmp_path / "file", print)


def builder(folder):
    return Builder(folder, print, "tool 1.0")


async def test_a_failing_installer_is_quoted(tmp_path):
    with pytest.raises(
        HarnessError, match=r"tool 1\.0: bash -c .* failed \(exit code 3\)[^$]*bad luck"
    ):
        await builder(tmp_path).run(("bash", "-c", "echo bad luck >&2; exit 3"))


async def test_an_installer_that_does_not_end_is_ended(tmp_path):
    kept = bundles.STEP_TIMEOUT_S
    bundles.STEP_TIMEOUT_S = 0.1
    try:
        with pytest.raises(HarnessError, match="timed out"):
            await builder(tmp_path).run(("sleep", "60"))
    finally:
        bundles.STEP_TIMEOUT_S = kept


async def test_an_installer_that_cannot_be_started_is_told(tmp_path):
    with pytest.raises(HarnessError, match=r"working folder .* does not exist"):
        await builder(tmp_path).run(("true",), cwd=tmp_path / "gone")


async def test_installers_see_the_callers_environment_but_nothing_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIDLE_CONTROL_TOKEN", "t")
    monkeypatch.setenv("PYTHONPATH", "/x")
    monkeypatch.setenv("MY_INDEX", "y")
    said = (await builder(tmp_path).run(("env",), env={"EXTRA": "1"})).decode().splitlines()
    seen = {line.partition("=")[0] for line in said}
    assert {"MY_INDEX", "EXTRA", "PATH"} <= seen
    assert not {"BRIDLE_CONTROL_TOKEN", "PYTHONPATH"} & seen


def test_bundles_are_kept_in_the_cache(monkeypatch):
    monkeypatch.setenv("BRIDLE_CACHE", "/somewhere")
    assert bundles_dir() == Path("/somewhere/bundles")
    monkeypatch.delenv("BRIDLE_CACHE")
    assert bundles_dir() == cache_dir() / "bundles"
    assert str(bundles_dir()).startswith(str(Path.home()))
