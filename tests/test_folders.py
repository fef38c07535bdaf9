import os
import signal
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from tests.disks import full_disk

from bridle.errors import ConfigError
from bridle.folders import LOCK, FolderLock, check_room, private_file, private_folder

HOLD = """
import sys, time
from pathlib import Path
from bridle.folders import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def open_umask():
    """The widest mode for new files that a user can set."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_second_folder_lock_is_refused_with_the_holder_s_pid_and_the_remedy(tmp_path):
    with FolderLock(tmp_path / "data"), pytest.raises(ConfigError) as refused:
        FolderLock(tmp_path / "data")
    expected = rf"data is in use by process {os.getpid()} on \S+ since \d{{4}}-.*: end that process"
    assert refused.match(expected)
    FolderLock(tmp_path / "data").close()


def test_a_held_lock_file_without_a_holder_s_name_still_refuses(tmp_path):
    with FolderLock(tmp_path):
        (tmp_path / LOCK).write_text("")
        with pytest.raises(ConfigError, match="in use by another process: end that process"):
            FolderLock(tmp_path)


def test_a_folder_lock_is_released_when_its_process_is_killed(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {process.pid} on"):
            FolderLock(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    FolderLock(tmp_path).close()


def test_a_folder_lock_with_patience_waits_for_its_release(tmp_path):
    first = FolderLock(tmp_path)
    leaving = threading.Timer(0.1, first.close)
    leaving.start()
    FolderLock(tmp_path, patience_s=60).close()
    leaving.join()


def test_a_lock_file_that_cannot_be_opened_is_refused_by_name(tmp_path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(ConfigError, match=r"\.lock: Is a directory"):
        FolderLock(tmp_path)


def test_private_folders_and_files_are_owner_only_under_any_umask(tmp_path):
    with open_umask():
        folder = private_folder(tmp_path / "a" / "b")
        file = private_file(folder / "file")
        FolderLock(folder).close()
    assert (mode(tmp_path / "a"), mode(folder)) == (0o700, 0o700)
    assert (mode(file), mode(folder / LOCK)) == (0o600, 0o600)


def test_private_file_keeps_the_contents_and_mode_of_an_existing_file(tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "file").chmod(0o640)
    assert private_file(tmp_path / "file").read_text() == "kept"
    assert mode(tmp_path / "file") == 0o640


def test_check_room_raises_on_a_full_disk_or_missing_folder_and_leaves_no_file(tmp_path):
    check_room(tmp_path)
    with full_disk(), pytest.raises(OSError, match="File too large"):
        check_room(tmp_path)
    with pytest.raises(FileNotFoundError):
        check_room(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []
