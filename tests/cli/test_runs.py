"""Runs and sessions by name."""

import shutil

import pytest

from bridle.errors import ConfigError
from bridle.node.results import capture_files, find_session, sessions


def test_a_run_folder_and_its_capture_file_are_the_same_run(finished_run):
    assert capture_files(finished_run) == capture_files(finished_run / "capture.sqlite")
    assert len(list(sessions(finished_run))) == 3


def test_a_folder_without_capture_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="is not a run"):
        capture_files(tmp_path)


def test_error_for_an_unknown_session_names_the_searched_folder(finished_run):
    with pytest.raises(ConfigError, match=str(finished_run)):
        find_session("nobody", finished_run)


def test_captures_of_gateway_workers_are_read_as_one_run(finished_run, tmp_path):
    data = tmp_path / "gateway"
    for number in (0, 10, 2):
        (data / f"worker-{number}").mkdir(parents=True)
        shutil.copy(finished_run / "capture.sqlite", data / f"worker-{number}")
    names = [path.parent.name for path in capture_files(data)]
    assert names == ["worker-0", "worker-2", "worker-10"]
    assert len(list(sessions(data))) == 9
    (data / "worker-2" / "capture.sqlite").unlink()
    (data / "worker-10" / "capture.sqlite").unlink()
    name = next(sessions(data)).session.session_id
    for runs in (data, tmp_path):
        path, found = find_session(name, runs)
        assert path == data / "worker-0" / "capture.sqlite"
        assert found.session.session_id == name


def test_error_for_an_unknown_session_is_one_line_for_any_number_of_runs(finished_run, tmp_path):
    for number in range(30):
        (tmp_path / f"run-{number}").mkdir()
        (tmp_path / f"run-{number}" / "capture.sqlite").symlink_to(finished_run / "capture.sqlite")

    with pytest.raises(ConfigError) as caught:
        find_session("nobody", tmp_path)

    assert str(caught.value) == f"there is no session 'nobody'; looked in {tmp_path} (30 runs)"
