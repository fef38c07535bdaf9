import asyncio
import io
import os
import subprocess
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from bridle.errors import RuntimeFailure
from bridle.runtimes.base_runtime import EMPTY, Archived
from bridle.runtimes.files import (
    CopyLimits,
    TooMuch,
    check_archive,
    copy_out,
    copy_tree,
    host_path,
    pack,
    pack_bytes,
    remove_folders,
    replace_tree,
    take_out,
    unpack,
)


@pytest.fixture
def source(tmp_path):
    made = tmp_path / "source"
    (made / "a" / "b").mkdir(parents=True)
    (made / "a" / "b" / "file").write_text("text")
    (made / "a" / "link").symlink_to("/etc/hostname")
    return made


def test_a_tree_copy_keeps_files_modes_times_and_links_and_removes_other_entries(source, tmp_path):
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


def test_a_tree_copy_includes_unreadable_entries_and_names_skipped_special_files(source, tmp_path):
    os.mkfifo(source / "a" / "pipe")
    (source / "a" / "b" / "file").chmod(0)
    (source / "a" / "b").chmod(0)
    stayed = replace_tree(source, tmp_path / "target")
    assert stayed == ("a/pipe: neither a regular file nor a folder nor a link",)
    assert (tmp_path / "target" / "a" / "b" / "file").read_text() == "text"


def test_paths_in_keep_are_not_overwritten_by_a_tree_copy(source, tmp_path):
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
        (CopyLimits(entries=3), "more than 3 files"),
        (CopyLimits(depth=1), "the folder a has more than 1 folders inside each other"),
        (CopyLimits(bytes=1), "more than 0 MiB"),
    ],
)
def test_a_tree_copy_beyond_its_file_depth_or_byte_limits_is_refused(source, tmp_path, bounds, why):
    with pytest.raises(TooMuch, match=why):
        replace_tree(source, tmp_path / "target", limits=bounds)


def test_a_tree_copy_across_file_systems_is_complete(tmp_path):
    content = os.urandom(3 << 20)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        Path(other, "file").write_bytes(content)
        assert replace_tree(Path(other), tmp_path / "target") == ()
    assert (tmp_path / "target" / "file").read_bytes() == content


def test_a_tree_copy_keeps_the_holes_of_sparse_files(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    with (source / "sparse").open("wb") as file:
        file.seek(1 << 30)
        file.write(b"end")
        file.truncate(3 << 30)
    with pytest.raises(TooMuch, match="more than 3071 MiB"):
        replace_tree(source, tmp_path / "target", limits=CopyLimits(bytes=(3 << 30) - 1))
    replace_tree(source, tmp_path / "target")
    copy = tmp_path / "target" / "sparse"
    assert copy.stat().st_size == 3 << 30
    assert copy.stat().st_blocks * 512 < 1 << 20
    with copy.open("rb") as file:
        file.seek(1 << 30)
        assert file.read(4) == b"end\0"


def test_a_tree_copy_refuses_a_source_that_is_a_symbolic_link(source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(NotADirectoryError):
        replace_tree(tmp_path / "link", tmp_path / "target")


def test_copy_out_refuses_links_that_lead_outside_the_folder(source, tmp_path):
    (source / "near").symlink_to("a/b/file")
    copy_out(source / "near", tmp_path / "near", source)
    assert (tmp_path / "near").read_text() == "text"
    with pytest.raises(RuntimeFailure, match="lies outside"):
        copy_out(source / "a" / "link", tmp_path / "far", source)
    copy_out(source / "a", tmp_path / "folder", source)
    assert sorted(entry.name for entry in (tmp_path / "folder").iterdir()) == ["b"]


def test_copying_a_folder_behind_a_symbolic_link_copies_nothing(source, tmp_path):
    (tmp_path / "session").mkdir()
    (tmp_path / "session" / "work").symlink_to(source)
    copy_tree(tmp_path / "session" / "work" / "a", tmp_path / "target", tmp_path / "session")
    assert not list((tmp_path / "target").iterdir())


def test_copy_out_counts_linked_files_toward_its_byte_limit(tmp_path):
    folder = tmp_path / "source" / "out"
    folder.mkdir(parents=True)
    (folder / "0").touch()
    os.truncate(folder / "0", 9 << 30)
    (folder / "1").symlink_to("0")
    with pytest.raises(TooMuch, match="more than 8192 MiB"):
        copy_out(folder, tmp_path / "target", tmp_path / "source")


def test_take_out_skips_and_names_special_files_and_links_that_lead_outside(source, tmp_path):
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


def test_take_out_copies_a_sparse_file_out_of_an_unreadable_folder(source, tmp_path):
    file = source / "a" / "b" / "file"
    os.truncate(file, 1 << 30)
    (source / "a").chmod(0)
    assert take_out(file, tmp_path / "new" / "file", source, 1 << 30) == (1 << 30, ())
    copy = (tmp_path / "new" / "file").stat()
    assert (copy.st_size, copy.st_blocks * 512 < 1 << 20) == (1 << 30, True)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "does not exist"),
        ("a/link", "is not a regular file"),
        ("door/b/file", "not a folder"),
        ("a", "more than 0 MiB"),
        ("a/b/file", "more than 0 MiB"),
    ],
)
def test_a_failed_take_out_leaves_no_target(source, tmp_path, name, why):
    (source / "door").symlink_to("a")
    with pytest.raises(RuntimeFailure, match=why):
        take_out(source / name, tmp_path / "taken", source, 1)
    assert not (tmp_path / "taken").exists()


def test_take_out_refuses_a_path_outside_the_session_folder(source, tmp_path):
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
        ([("out" + "/d" * 200, 0)], "the folder out has more than 100 folders inside each other"),
        ([(f"out/{number}", 0) for number in range(30)], "more than 20 files"),
    ],
)
def test_an_archive_beyond_its_size_depth_or_file_limits_is_refused_before_extraction(
    tmp_path, entries, why
):
    with pytest.raises(TooMuch, match=why):
        check_archive(archived(tmp_path / "x.tar", *entries), CopyLimits(entries=20))


def test_checking_an_archive_returns_the_total_size_of_the_files_in_it(tmp_path):
    archive = archived(tmp_path / "x.tar", ("out/a", 7), ("out/b", 5))
    assert check_archive(archive, CopyLimits(bytes=12)) == 12
    archive.write_bytes(b"no archive" * 100)
    with pytest.raises(RuntimeFailure, match="the archive of copied files is incomplete"):
        check_archive(archive, CopyLimits())


def test_emptying_a_work_folder_of_1200_files_takes_three_rm_calls(tmp_path):
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
    """A runtime whose work folder is reached by commands and archives alone."""

    put_work = Archived.put_work

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

    async def upload(self, source, target):
        self.shared |= {path.name for path in source.rglob("*") if path.lstat().st_nlink > 1}
        copy_tree(source, self.work / target)


async def test_put_work_replaces_files_except_kept_paths(source, tmp_path):
    work = tmp_path / "work"
    (work / "a" / "own").mkdir(parents=True)
    (work / "a" / "own" / "tool").write_text("ours")
    (work / "a" / "gone").touch()
    (source / "a" / "own").write_text("theirs")
    runtime: Any = OnlyArchives(work)

    stayed = await runtime.put_work(source, lambda path, *, is_folder: path.name == "own")

    assert stayed == ("a/own: the checker's own is used",)
    names = {str(path.relative_to(work)) for path in work.rglob("*")}
    assert names == {"a", "a/b", "a/b/file", "a/link", "a/own", "a/own/tool"}
    assert (work / "a/own/tool").read_text() == "ours"
    assert "file" in runtime.shared


@pytest.fixture
def stage(tmp_path):
    (tmp_path / "stage").mkdir()
    return tmp_path / "stage" / "x.tar"


def packed(path, *entries):
    """An archive of hostile entries: (name, type, link name or content)."""
    with tarfile.open(path, "w") as tar:
        for name, kind, value in entries:
            entry = tarfile.TarInfo(name)
            entry.type = kind
            if kind == tarfile.REGTYPE:
                entry.size = len(value)
                tar.addfile(entry, io.BytesIO(value))
            else:
                entry.linkname = value
                tar.addfile(entry)


def test_a_folder_is_packed_for_its_target_with_modes_and_links(tmp_path, stage):
    source = tmp_path / "tree"
    source.mkdir()
    (source / "tool").write_text("run")
    (source / "tool").chmod(0o755)
    (source / "link").symlink_to("tool")

    folder = pack(source, tmp_path / "there" / "tree", stage)

    assert folder == tmp_path / "there" / "tree"
    with tarfile.open(stage) as tar:
        found = {entry.name: entry for entry in tar}
    assert found["./tool"].mode & 0o777 == 0o755
    assert found["./link"].issym()
    assert {entry.uid for entry in found.values()} == {0}


def test_a_file_is_packed_under_the_name_of_its_target(tmp_path, stage):
    (tmp_path / "a").write_text("text")

    assert pack(tmp_path / "a", tmp_path / "there" / "b", stage) == tmp_path / "there"
    unpack(stage, "b", tmp_path / "out" / "c")

    assert (tmp_path / "out" / "c").read_text() == "text"


def test_bytes_are_packed_as_one_file_with_the_given_mode():
    with tarfile.open(fileobj=io.BytesIO(pack_bytes(b"x\0y", "name", 0o600))) as tar:
        (entry,) = tar.getmembers()
        content = tar.extractfile(entry)
        assert (entry.name, entry.mode, content and content.read()) == ("name", 0o600, b"x\0y")


def test_unpack_skips_special_files_and_entries_that_lead_outside_the_target(tmp_path, stage):
    (tmp_path / "secret").write_text("ours")
    packed(
        stage,
        ("out/fine", tarfile.REGTYPE, b"1"),
        ("out/near", tarfile.SYMTYPE, "fine"),
        ("out/far", tarfile.SYMTYPE, str(tmp_path / "secret")),
        ("out/up", tarfile.SYMTYPE, "../../../secret"),
        ("out/beside", tarfile.SYMTYPE, "../taken-by-another"),
        ("out/hard", tarfile.LNKTYPE, "../../secret"),
        ("out/pipe", tarfile.FIFOTYPE, ""),
        ("../outside", tarfile.REGTYPE, b"evil"),
        ("/absolute", tarfile.REGTYPE, b"evil"),
    )

    unpack(stage, "out", tmp_path / "taken")

    assert sorted(path.name for path in (tmp_path / "taken").iterdir()) == ["fine", "near"]
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "stage" / "outside").exists()


def chain_of_links(into):
    """Entries whose last one is written to `victim`, two folders above the folder `into` that they
    are taken out as, where paths of more than 4096 bytes are not looked through."""
    above = len(str(into))
    long, steps = "d" * ((4080 - above) // 16 - 1), "abcdefghijklmnop"
    folder = into.name
    entries: list[tuple[str, bytes, str | bytes]] = [(folder, tarfile.DIRTYPE, "")]
    for step in steps:
        entries += [(f"{folder}/{long}", tarfile.DIRTYPE, "")]
        entries += [(f"{folder}/{step}", tarfile.SYMTYPE, long)]
        folder += f"/{long}"
    chain = f"{'/'.join(steps)}/{'l' * 254}"
    entries += [(f"{into.name}/{chain}", tarfile.SYMTYPE, "../" * len(steps))]
    entries += [(f"{into.name}/escape", tarfile.SYMTYPE, f"{chain}/../../../victim")]
    entries += [(f"{into.name}/escape/owned", tarfile.REGTYPE, b"evil")]
    return entries


@pytest.mark.parametrize("any_link", [False, True])
def test_unpack_writes_nothing_outside_through_a_link_chain_beyond_4096_bytes(
    tmp_path, stage, any_link
):
    packed(stage, *chain_of_links(stage.resolve().parent / "unpacked" / "out"))
    (tmp_path / "victim").mkdir()

    with suppress(OSError):  # of paths that are too long to copy
        unpack(stage, "out", tmp_path / "taken", any_link=any_link)

    assert not list((tmp_path / "victim").iterdir())


def test_unpack_writes_no_file_through_a_link_of_the_same_name(tmp_path, stage):
    entries = [("out/a", tarfile.SYMTYPE, "b"), ("out/a", tarfile.REGTYPE, b"1")]
    packed(stage, *entries, ("out/c", tarfile.LNKTYPE, "out/a"), ("out/d", tarfile.REGTYPE, b"1"))

    unpack(stage, "out", tmp_path / "taken")

    assert sorted(path.name for path in (tmp_path / "taken").iterdir()) == ["a", "d"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_unpack_refuses_a_link_or_special_file_as_the_root_entry(tmp_path, stage, kind):
    packed(stage, ("out", kind, "/etc/hostname"))

    with pytest.raises(RuntimeFailure, match="out does not exist, or is not a regular file"):
        unpack(stage, "out", tmp_path / "taken")


def test_unpack_refuses_a_truncated_archive(tmp_path, stage):
    packed(stage, ("out", tarfile.REGTYPE, os.urandom(50_000)))
    stage.write_bytes(stage.read_bytes()[:20_000])

    with pytest.raises(RuntimeFailure, match="the archive of copied files is incomplete"):
        unpack(stage, "out", tmp_path / "taken")


def test_unpack_with_a_filter_extracts_matching_entries_and_all_folders(tmp_path, stage):
    packed(
        stage,
        ("out/a/mine/below", tarfile.REGTYPE, b"1"),
        ("out/a/theirs", tarfile.REGTYPE, b"2"),
        ("out/empty", tarfile.DIRTYPE, ""),
        ("out/a/link", tarfile.SYMTYPE, "theirs"),
        ("out/first", tarfile.REGTYPE, b"3"),
        ("out/b/mine", tarfile.LNKTYPE, "out/first"),
    )

    unpack(stage, "out", tmp_path / "taken", only=lambda path, *, is_folder: path.name == "mine")

    found = {str(path.relative_to(tmp_path / "taken")) for path in (tmp_path / "taken").rglob("*")}
    assert found == {"a", "a/mine", "a/mine/below", "b", "b/mine", "empty", "first"}
    assert (tmp_path / "taken/b/mine").read_bytes() == b"3"


def test_unpack_leaves_no_second_copy_in_the_staging_folder(tmp_path, stage):
    packed(stage, ("x/a", tarfile.REGTYPE, b"text"))
    unpack(stage, "x", tmp_path / "out")
    assert (tmp_path / "out" / "a").read_text() == "text"
    assert not list(tmp_path.glob("stage/**/a"))


def test_unpack_merges_a_folder_into_an_existing_one(tmp_path, stage):
    packed(stage, ("out/new", tarfile.REGTYPE, b"1"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "old").touch()

    unpack(stage, "out", tmp_path / "taken")

    assert sorted(path.name for path in (tmp_path / "taken").iterdir()) == ["new", "old"]


def test_remove_folders_removes_folders_without_permissions(tmp_path):
    locked = tmp_path / "a" / "locked" / "deep"
    locked.mkdir(parents=True)
    (locked / "file").touch()
    locked.chmod(0o000)
    locked.parent.chmod(0o000)

    remove_folders([tmp_path / "a", tmp_path / "missing"])

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "depth"), [("d", 3000), ("x" * 250, 40)])
def test_remove_folders_removes_a_tree_deeper_than_calls_and_paths_may_be(tmp_path, name, depth):
    at = os.open(tmp_path, os.O_RDONLY)
    for level in ["a", *[name] * depth]:
        os.mkdir(level, dir_fd=at)
        above, at = at, os.open(level, os.O_RDONLY, dir_fd=at)
        os.close(above)
    os.close(os.open("file", os.O_CREAT, dir_fd=at))
    os.fchmod(at, 0)
    os.close(at)

    remove_folders([tmp_path / "a"])

    assert list(tmp_path.iterdir()) == []


def test_remove_folders_does_not_follow_links_inside_a_folder(tmp_path):
    (tmp_path / "kept").mkdir(mode=0o755)
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "kept")

    remove_folders([tmp_path / "a"])

    assert (tmp_path / "kept" / "file").exists()


def test_remove_folders_removes_a_link_in_place_of_a_folder_but_not_its_target(tmp_path):
    other = tmp_path / "other"
    (other / "inner").mkdir(parents=True)
    (other / "inner").chmod(0o500)
    (tmp_path / "work").symlink_to(other)
    (tmp_path / "home").write_text("a file")
    os.mkfifo(tmp_path / "tmp")
    remove_folders([tmp_path / "work", tmp_path / "home", tmp_path / "tmp"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]
    assert (other / "inner").stat().st_mode & 0o777 == 0o500


@pytest.mark.parametrize(
    ("inside", "here"),
    [
        ("/work/a/b", Path("/s/work/a/b")),
        ("/home/u", Path("/s/home")),
        ("/workshop", None),
        ("/home/u/../x", None),
    ],
)
def test_sandbox_path_is_mapped_to_the_host_path_of_its_shared_folder(inside, here):
    folders = {"/work": Path("/s/work"), "/home/u": Path("/s/home")}
    assert host_path(PurePosixPath(inside), folders) == here
