"""Bundles that nobody uses go; one that a living process has asked for never does."""

import json
import os
import subprocess
import sys
import time

import pytest
from tests.harnesses.test_bundles import Work, names

from bridle.harnesses.bundles import (
    ASIDE,
    DAY_S,
    MARKER,
    UNUSED_S,
    ensure,
    hold,
    prune,
    use_lock,
)


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


def test_what_was_not_used_for_long_goes(tmp_path):
    bundle(tmp_path, "old", days=20)
    bundle(tmp_path, "new", days=10)
    [old] = prune(tmp_path, unused_s=14 * DAY_S)
    assert (old.folder.name, old.size_mb, old.why) == ("old", 100, "unused for 20 days")
    assert names(tmp_path) == ["new"]


def test_the_longest_unused_go_first_until_the_rest_fits(tmp_path):
    for name, days in (("a", 3), ("b", 1), ("c", 2)):
        bundle(tmp_path, name, days=days)
    assert gone(prune(tmp_path, unused_s=UNUSED_S, most_mb=150)) == ["a", "c"]
    assert names(tmp_path) == ["b"]
    assert prune(tmp_path, unused_s=UNUSED_S, most_mb=100) == []


def test_a_dry_run_says_the_same_and_removes_nothing(tmp_path):
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


def test_one_that_another_process_uses_stays_until_that_process_is_killed(tmp_path):
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


async def test_asking_for_a_bundle_is_using_it(tmp_path):
    work = Work()
    folder = await ensure(work.recipe, tmp_path, print)
    os.utime(folder / MARKER, (1.0, 1.0))
    assert await ensure(work.recipe, tmp_path, print) == folder
    assert time.time() - (folder / MARKER).stat().st_mtime < DAY_S
    assert prune(tmp_path, unused_s=0, most_mb=0, now=time.time() + DAY_S) == []
    assert work.built == 1


async def test_a_build_removes_what_nobody_has_used_for_a_month(tmp_path):
    bundle(tmp_path, "old", days=31)
    bundle(tmp_path, "newer", days=29)
    said = []
    folder = await ensure(Work().recipe, tmp_path, said.append)
    assert names(tmp_path) == sorted(["newer", folder.name])
    assert said[-1] == "removed old (100 MB): unused for 31 days"


def test_ruins_of_dead_builders_go_and_those_of_living_ones_stay(tmp_path):
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
def test_what_is_no_bundle_is_left_alone(tmp_path, marker):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / MARKER).write_text(marker)
    assert prune(tmp_path, unused_s=0, now=time.time() + DAY_S) == []
    assert prune(tmp_path / "none", unused_s=0) == []


def test_where_nothing_may_be_written_a_bundle_is_used_all_the_same(tmp_path):
    hold(tmp_path / "no such folder" / "tool")
    assert not use_lock(tmp_path / "no such folder" / "tool").exists()
