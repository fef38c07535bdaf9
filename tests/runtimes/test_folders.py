"""Removing folders, whatever was done to them."""

from bridle.runtimes.folders import remove_folders


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
