"""Bundles are installed whole or not at all, and pruned when no process uses them."""

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bridle.config import cache_dir
from bridle.errors import HarnessError
from bridle.harnesses import bundles
from bridle.harnesses.bundles import (
    ASIDE,
    DAY_S,
    MARKER,
    UNUSED_S,
    Builder,
    Recipe,
    bundles_dir,
    ensure,
    hold,
    installed,
    prune,
    use_lock,
)


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


async def test_a_bundle_is_built_once_and_then_reused(tmp_path):
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


def test_a_bundle_with_another_lock_has_another_folder():
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


async def test_unfinished_build_of_a_killed_builder_is_removed(tmp_path):
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


async def test_an_installer_that_leaves_no_interpreter_is_a_harness_error(tmp_path):
    with pytest.raises(HarnessError, match="the installation made no bin/python"):
        await ensure(Work(needs="bin/python").recipe, tmp_path, print)


async def test_concurrent_builders_of_a_bundle_build_it_once_while_the_second_waits(tmp_path):
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


async def test_full_disk_is_reported_before_the_build(tmp_path):
    work = Work(size_mb=1 << 40)
    with pytest.raises(
        HarnessError, match=r"needs about \d+ MB in .*; make room or set BRIDLE_CACHE"
    ):
        await ensure(work.recipe, tmp_path, print)
    assert work.built == 0


async def test_bundle_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match="cannot use the bundle folder"):
        await ensure(Work().recipe, tmp_path / "file", print)


def builder(folder):
    return Builder(folder, print, "tool 1.0")


async def test_error_of_a_failing_installer_quotes_its_output(tmp_path):
    with pytest.raises(
        HarnessError, match=r"tool 1\.0: bash -c .* failed \(exit code 3\)[^$]*bad luck"
    ):
        await builder(tmp_path).run(("bash", "-c", "echo bad luck >&2; exit 3"))


async def test_an_installer_beyond_its_time_limit_is_killed(tmp_path):
    kept = bundles.STEP_TIMEOUT_S
    bundles.STEP_TIMEOUT_S = 0.1
    try:
        with pytest.raises(HarnessError, match="timed out"):
            await builder(tmp_path).run(("sleep", "60"))
    finally:
        bundles.STEP_TIMEOUT_S = kept


async def test_installer_that_cannot_start_is_reported(tmp_path):
    with pytest.raises(HarnessError, match=r"working folder .* does not exist"):
        await builder(tmp_path).run(("true",), cwd=tmp_path / "gone")


async def test_installers_get_the_environment_without_bridle_variables_and_pythonpath(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("BRIDLE_CONTROL_TOKEN", "t")
    monkeypatch.setenv("PYTHONPATH", "/x")
    monkeypatch.setenv("MY_INDEX", "y")
    said = (await builder(tmp_path).run(("env",), env={"EXTRA": "1"})).decode().splitlines()
    seen = {line.partition("=")[0] for line in said}
    assert {"MY_INDEX", "EXTRA", "PATH"} <= seen
    assert not {"BRIDLE_CONTROL_TOKEN", "PYTHONPATH"} & seen


def test_bundles_folder_lies_in_the_cache_folder(monkeypatch):
    monkeypatch.setenv("BRIDLE_CACHE", "/somewhere")
    assert bundles_dir() == Path("/somewhere/bundles")
    monkeypatch.delenv("BRIDLE_CACHE")
    assert bundles_dir() == cache_dir() / "bundles"
    assert str(bundles_dir()).startswith(str(Path.home()))


def bundle(bundles, name, *, days, size_mb=100):
    """A bundle that was used last so many days ago."""
    folder = bundles / name
    folder.mkdir()
    (folder / "program").write_text("x")
    (folder / MARKER).write_text(json.dumps({"name": name, "size_mb": size_mb}))
    at = time.time() - days * DAY_S
    os.utime(folder / MARKER, (at, at))
    return folder


def gone(pruned):
    return [each.folder.name for each in pruned]


def test_prune_removes_bundles_unused_for_the_given_time(tmp_path):
    bundle(tmp_path, "old", days=20)
    bundle(tmp_path, "new", days=10)
    [old] = prune(tmp_path, unused_s=14 * DAY_S)
    assert (old.folder.name, old.size_mb, old.why) == ("old", 100, "unused for 20 days")
    assert names(tmp_path) == ["new"]


def test_prune_removes_the_longest_unused_bundles_first_until_the_rest_fits(tmp_path):
    for name, days in (("a", 3), ("b", 1), ("c", 2)):
        bundle(tmp_path, name, days=days)
    assert gone(prune(tmp_path, unused_s=UNUSED_S, most_mb=150)) == ["a", "c"]
    assert names(tmp_path) == ["b"]
    assert prune(tmp_path, unused_s=UNUSED_S, most_mb=100) == []


def test_prune_dry_run_lists_bundles_and_removes_nothing(tmp_path):
    for name in ("a", "b"):
        bundle(tmp_path, name, days=40)
    (tmp_path / f"{ASIDE}1").mkdir()
    assert gone(prune(tmp_path, unused_s=UNUSED_S, dry_run=True)) == ["a", "b"]
    assert names(tmp_path) == [f"{ASIDE}1", "a", "b"]


HOLDER = """
import sys
from pathlib import Path
from bridle.harnesses.bundles import hold
hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


BUILDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_prune_keeps_a_bundle_while_another_process_uses_it(tmp_path):
    used = bundle(tmp_path, "used", days=100)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, used],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        at = time.time() + 100 * DAY_S
        assert prune(tmp_path, unused_s=0, most_mb=0, now=at) == []
        assert (used / "program").exists()
        holder.kill()
    assert gone(prune(tmp_path, unused_s=0, now=at)) == ["used"]


async def test_ensure_refreshes_the_last_use_time_of_a_bundle(tmp_path):
    work = Work()
    folder = await ensure(work.recipe, tmp_path, print)
    os.utime(folder / MARKER, (1.0, 1.0))
    assert await ensure(work.recipe, tmp_path, print) == folder
    assert time.time() - (folder / MARKER).stat().st_mtime < DAY_S
    assert prune(tmp_path, unused_s=0, most_mb=0, now=time.time() + DAY_S) == []
    assert work.built == 1


async def test_build_prunes_bundles_unused_for_a_month(tmp_path):
    bundle(tmp_path, "old", days=31)
    bundle(tmp_path, "newer", days=29)
    said = []
    folder = await ensure(Work().recipe, tmp_path, said.append)
    assert names(tmp_path) == sorted(["newer", folder.name])
    assert said[-1] == "removed old (100 MB): unused for 31 days"


def test_prune_removes_unfinished_builds_of_dead_builders_only(tmp_path):
    for name in ("dead", "alive"):
        (tmp_path / f".{name}.building-1").mkdir()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", BUILDER, tmp_path / ".alive.lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == b"held\n"
        prune(tmp_path, unused_s=UNUSED_S)
        assert names(tmp_path) == [".alive.building-1"]
        builder.kill()
    prune(tmp_path, unused_s=UNUSED_S)
    assert names(tmp_path) == []


@pytest.mark.parametrize("marker", ["", "[]", "{"])
def test_prune_keeps_folders_without_a_valid_bundle_marker(tmp_path, marker):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / MARKER).write_text(marker)
    assert prune(tmp_path, unused_s=0, now=time.time() + DAY_S) == []
    assert prune(tmp_path / "none", unused_s=0) == []


def test_a_bundle_whose_lock_file_cannot_be_created_is_used_without_a_lock(tmp_path):
    hold(tmp_path / "no such folder" / "tool")
    assert not use_lock(tmp_path / "no such folder" / "tool").exists()
