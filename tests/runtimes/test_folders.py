"""Removing folders, whatever was done to them."""

import os
from pathlib import Path, PurePosixPath

import pytest

from bridle.runtimes.owner import beside, remove_folders


def test_folders_without_permissions_go_too(tmp_path):
    locked = tmp_path / "a" / "locked" / "deep"
    locked.mkdir(parents=True)
    (locked / "file").touch()
    locked.chmod(0o000)
    locked.parent.chmod(0o000)

    remove_folders([tmp_path / "a", tmp_path / "missing"])

    assert list(tmp_path.iterdir()) == []


def test_what_a_link_leads_to_stays(tmp_path):
    (tmp_path / "kept").mkdir(mode=0o755)
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "kept")

    remove_folders([tmp_path / "a"])

    assert (tmp_path / "kept" / "file").exists()


def test_a_link_in_a_folders_place_goes_and_what_it_names_stays_as_it_is(tmp_path):
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
def test_a_path_inside_is_found_in_the_folders_that_are_shared(inside, here):
    folders = {"/work": Path("/s/work"), "/home/u": Path("/s/home")}
    assert beside(PurePosixPath(inside), folders) == here
