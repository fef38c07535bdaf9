"""Runs and sessions by name."""

import shutil

import pytest

from bridle.capture.records import SessionRecord
from bridle.capture.sqlite import SqliteStore
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

    assert str(caught.value) == (
        f"there is no session 'nobody'; looked in {tmp_path} (30 runs); --run names another run"
    )


@pytest.fixture
async def runs(tmp_path):
    """Return a folder of three runs, of which two have a session s-1."""
    for run, ids in {"one": ["s-1"], "two": ["s-1", "s-10"], "three": ["s-10", "s-11"]}.items():
        (tmp_path / run).mkdir()
        async with await SqliteStore.open(tmp_path / run / "capture.sqlite") as store:
            for session_id in ids:
                await store.open_session(SessionRecord(session_id, opened_at=0.0))
    return tmp_path


def test_a_whole_session_id_names_that_session_even_if_ids_of_another_run_begin_with_it(runs):
    shutil.rmtree(runs / "one")
    path, found = find_session("s-1", runs)
    assert (path.parent.name, found.session.session_id) == ("two", "s-1")


def test_a_session_id_of_several_runs_is_refused_with_the_runs_that_have_it(runs):
    with pytest.raises(ConfigError, match=r"session 's-1' is in 2 runs: .*; name one .* --run"):
        find_session("s-1", runs)


def test_the_beginning_of_several_session_ids_is_refused_with_those_ids(runs):
    with pytest.raises(ConfigError, match=r"'s-' is the beginning of 5 session ids: s-1"):
        find_session("s-", runs)


@pytest.mark.parametrize("name", ["trajectories.jsonl", "summary.json"])
def test_another_file_of_a_run_is_not_taken_for_its_capture(finished_run, name):
    with pytest.raises(ConfigError, match=f"{name} is not a run: give its folder"):
        capture_files(finished_run / name)
