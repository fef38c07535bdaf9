"""Runs and sessions by name."""

import pytest

from bridle.cli.captured import capture_file, find_session, sessions
from bridle.errors import ConfigError


def test_a_run_folder_and_its_capture_file_are_the_same_run(finished_run):
    assert capture_file(finished_run) == capture_file(finished_run / "capture.sqlite")
    assert len(list(sessions(finished_run))) == 3


def test_a_folder_without_capture_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="is no run"):
        capture_file(tmp_path)


def test_an_unknown_session_says_where_was_looked(finished_run):
    with pytest.raises(ConfigError, match=str(finished_run)):
        find_session("nobody", finished_run)
