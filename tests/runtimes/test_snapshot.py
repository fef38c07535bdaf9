import asyncio
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from bridle.errors import RuntimeFailure
from bridle.runtimes.archive import pack, unpack
from bridle.runtimes.snapshot import (
    EMPTY,
    Bounds,
    TooMuch,
    check_archive,
    copy_out,
    copy_tree,
    put_by_archive,
    replace_tree,
    take_out,
)


@pytest.fixture
def source(tmp_path):
    made = tmp_path / "source"
    (made / "a" / "b").mkdir(parents=True)
    (made / "a" / "b" / "file").write_text("text")
    (made / "a" / "link").symlink_to("/etc/hostname")
    return made


def test_a_copy_has_the_same_files_modes_times_and_links_and_nothing_else(source, tmp_path):
    file, target = source / "a" / "b" / "file", tmp_path / "target"
    file.chmod(0o751)
    os.utime(file, ns=(1, 2_000_000_000))
    (target / "old" / "deep").mkdir(parents=True)
    assert replace_tree(source, target) == ()
    copy = target / "a" / "b" / "file"
    assert (copy.read_text(), copy.stat().st_mode & 0o7777) == ("text", 0o751)
    assert copy.stat().st_mtime_ns == 2_000_000_000
    assert (target / "a" / "link").readlink().as_posix() == "/etc/hostname"
    assert [entry.name for entry in target.iterdir()] == ["a"]


def test_what_is_shut_is_copied_and_what_is_no_file_stays_behind(source, tmp_path):
    os.mkfifo(source / "a" / "pipe")
    (source / "a" / "b" / "file").chmod(0)
    (source / "a" / "b").chmod(0)
    stayed = replace_tree(source, tmp_path / "target")
    assert stayed == ("a/pipe: neither a regular file nor a folder nor a link",)
    assert (tmp_path / "target" / "a" / "b" / "file").read_text() == "text"


def test_what_is_kept_is_the_target_s_own(source, tmp_path):
    target = tmp_path / "target"
    (target / "a").mkdir(parents=True)
    (target / "a" / "mine").write_text("mine")
    (target / "a" / "gone").write_text("gone")
    (source / "a" / "mine").symlink_to("/etc")
    stayed = replace_tree(source, target, keep=lambda path, *, is_folder: path.name == "mine")
    assert stayed == ("a/mine: the checker's own is used",)
    assert (target / "a" / "mine").read_text() == "mine"
    assert not (target / "a" / "gone").exists()


@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        (Bounds(entries=3), "more than 3 files"),
        (Bounds(depth=1), "a is deeper than 1 folders"),
        (Bounds(bytes=1), "more than 0 MiB"),
    ],
)
def test_a_copy_is_bounded(source, tmp_path, bounds, why):
    with pytest.raises(TooMuch, match=why):
        replace_tree(source, tmp_path / "target", bounds=bounds)


def test_a_copy_from_another_file_system_is_whole(tmp_path):
    content = os.urandom(3 << 20)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        Path(other, "file").write_bytes(content)
        assert replace_tree(Path(other), tmp_path / "target") == ()
    assert (tmp_path / "target" / "file").read_bytes() == content


def test_holes_stay_holes(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    with (source / "sparse").open("wb") as file:
        file.seek(1 << 30)
        file.write(b"end")
        file.truncate(3 << 30)
    with pytest.raises(TooMuch, match="more than 3071 MiB"):
        replace_tree(source, tmp_path / "target", bounds=Bounds(bytes=(3 << 30) - 1))
    replace_tree(source, tmp_path / "target")
    copy = tmp_path / "target" / "sparse"
    assert copy.stat().st_size == 3 << 30
    assert copy.stat().st_blocks * 512 < 1 << 20
    with copy.open("rb") as file:
        file.seek(1 << 30)
        assert file.read(4) == b"end\0"


def test_a_folder_that_is_a_link_is_not_entered(source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(NotADirectoryError):
        replace_tree(tmp_path / "link", tmp_path / "target")


def test_only_what_lies_in_the_folder_is_copied_out(source, tmp_path):
    (source / "near").symlink_to("a/b/file")
    copy_out(source / "near", tmp_path / "near", source)
    assert (tmp_path / "near").read_text() == "text"
    with pytest.raises(RuntimeFailure, match="lies outside"):
        copy_out(source / "a" / "link", tmp_path / "far", source)
    copy_out(source / "a", tmp_path / "folder", source)
    assert sorted(entry.name for entry in (tmp_path / "folder").iterdir()) == ["b"]


def test_a_folder_behind_a_link_is_empty(source, tmp_path):
    (tmp_path / "session").mkdir()
    (tmp_path / "session" / "work").symlink_to(source)
    copy_tree(tmp_path / "session" / "work" / "a", tmp_path / "target", tmp_path / "session")
    assert not list((tmp_path / "target").iterdir())


def test_links_to_one_large_file_are_no_way_to_fill_the_disk(tmp_path):
    folder = tmp_path / "source" / "out"
    folder.mkdir(parents=True)
    (folder / "0").touch()
    os.truncate(folder / "0", 9 << 30)
    (folder / "1").symlink_to("0")
    with pytest.raises(TooMuch, match="more than 8192 MiB"):
        copy_out(folder, tmp_path / "target", tmp_path / "source")


def test_what_is_taken_out_loses_only_what_cannot_leave_and_names_it(source, tmp_path):
    out = source / "a"
    os.mkfifo(out / "pipe")
    (out / "b" / "up").symlink_to("../near")
    (out / "near").symlink_to("b/file")
    (out / "b" / "far").symlink_to("../../secret")
    (out / "b" / "file").chmod(0)
    (out / "b").chmod(0)
    size, left = take_out(out, tmp_path / "taken", source, 1 << 20)
    assert size == 4
    assert left == (
        "b/far: a link that leads elsewhere",
        "link: a link that leads elsewhere",
        "pipe: neither a regular file nor a folder nor a link",
    )
    assert (tmp_path / "taken" / "b" / "up").read_text() == "text"


def test_a_file_is_taken_out_of_a_shut_folder_with_its_holes(source, tmp_path):
    file = source / "a" / "b" / "file"
    os.truncate(file, 1 << 30)
    (source / "a").chmod(0)
    assert take_out(file, tmp_path / "new" / "file", source, 1 << 30) == (1 << 30, ())
    copy = (tmp_path / "new" / "file").stat()
    assert (copy.st_size, copy.st_blocks * 512 < 1 << 20) == (1 << 30, True)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "is not there"),
        ("a/link", "is not a regular file"),
        ("door/b/file", "not a folder"),
        ("a", "more than 0 MiB"),
        ("a/b/file", "more than 0 MiB"),
    ],
)
def test_what_cannot_be_taken_out_leaves_nothing(source, tmp_path, name, why):
    (source / "door").symlink_to("a")
    with pytest.raises(RuntimeFailure, match=why):
        take_out(source / name, tmp_path / "taken", source, 1)
    assert not (tmp_path / "taken").exists()


def test_nothing_is_taken_out_of_another_folder(source, tmp_path):
    with pytest.raises(RuntimeFailure, match="lies outside the session's own folder"):
        take_out(source / ".." / "x", tmp_path / "taken", source, 1)


def archived(path, *entries):
    """An archive of (name, size) whose contents are all of one hole: headers without their data."""
    with path.open("wb") as file:
        for name, size in entries:
            entry = tarfile.TarInfo(name)
            entry.size = size
            file.write(entry.tobuf())
            file.truncate(file.tell() + (size + 511) // 512 * 512)
            file.seek(0, os.SEEK_END)
        file.truncate(file.tell() + 1024)
    return path


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([("out/a", 9 << 30)], "more than 8192 MiB"),
        ([("out/a", 5 << 30), ("out/b", 5 << 30)], "more than 8192 MiB"),
        ([("out" + "/d" * 200, 0)], "out is deeper than 100 folders"),
        ([(f"out/{number}", 0) for number in range(30)], "more than 20 files"),
    ],
)
def test_an_archive_that_is_a_bomb_is_refused_before_it_is_taken_out(tmp_path, entries, why):
    with pytest.raises(TooMuch, match=why):
        check_archive(archived(tmp_path / "x.tar", *entries), Bounds(entries=20))


def test_the_size_of_an_archive_is_that_of_its_files(tmp_path):
    archive = archived(tmp_path / "x.tar", ("out/a", 7), ("out/b", 5))
    assert check_archive(archive, Bounds(bytes=12)) == 12
    archive.write_bytes(b"no archive" * 100)
    with pytest.raises(RuntimeFailure, match="no whole archive"):
        check_archive(archive, Bounds())


def test_a_work_folder_of_1200_files_is_emptied_by_three_calls_of_rm(tmp_path):
    work, programs = tmp_path / "work", tmp_path / "programs"
    (work / "-rf" / "below").mkdir(parents=True)
    (work / "a b\n*").symlink_to(programs)
    for number in range(1198):
        (work / f".{number}").touch()
    programs.mkdir()
    (programs / "rm").write_text(f'#!/bin/sh\necho >>{tmp_path}/calls\nexec /bin/rm "$@"\n')
    (programs / "rm").chmod(0o755)

    path = f"{programs}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", EMPTY], cwd=work, env={"PATH": path}, check=True)

    assert list(work.iterdir()) == []
    assert (tmp_path / "calls").read_text() == 3 * "\n"
    assert (programs / "rm").exists()


class OnlyArchives:
    """A place whose work folder is reached by commands and archives alone."""

    def __init__(self, work):
        self.work = work
        self.shared = set()

    async def exec(self, command):
        done = await asyncio.to_thread(
            subprocess.run, ["bash", "-c", command], cwd=self.work, capture_output=True
        )
        return SimpleNamespace(ok=done.returncode == 0, stderr=done.stderr)

    async def copy_kept(self, folder, keep):
        archive = folder.parent / "x.tar"
        pack(self.work, PurePosixPath(), archive)
        unpack(archive, ".", folder, any_link=True, only=keep)
        return ()

    async def upload(self, source, target):
        self.shared |= {path.name for path in source.rglob("*") if path.lstat().st_nlink > 1}
        copy_tree(source, self.work / target)


async def test_a_fresh_work_folder_gets_what_was_left_and_keeps_its_own(source, tmp_path):
    work = tmp_path / "work"
    (work / "a" / "own").mkdir(parents=True)
    (work / "a" / "own" / "tool").write_text("ours")
    (work / "a" / "gone").touch()
    (source / "a" / "own").write_text("theirs")
    place = OnlyArchives(work)

    stayed = await put_by_archive(place, source, lambda path, *, is_folder: path.name == "own")

    assert stayed == ("a/own: the checker's own is used",)
    names = {str(path.relative_to(work)) for path in work.rglob("*")}
    assert names == {"a", "a/b", "a/b/file", "a/link", "a/own", "a/own/tool"}
    assert (work / "a/own/tool").read_text() == "ours"
    assert "file" in place.shared
