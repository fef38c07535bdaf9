"""A folder as a source: several runs, a training, files that must not be read."""

import asyncio
import json

import pytest
from tests.dashboard.house import HOSTILE, busy, captured, client, long, write

from bridle.capture.sqlite import SqliteStore
from bridle.dashboard.folder import Folder
from bridle.dashboard.lines import Wanted
from bridle.errors import ConfigError


@pytest.fixture
def opened():
    made = []

    def of(path, **options):
        made.append(Folder(path, **options))
        return made[-1]

    yield of
    for one in made:
        one.close()


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nothing to show"):
        Folder(tmp_path)


def test_the_first_page_adds_up_all_sessions(run, opened):
    seen = opened(run).overview()

    assert seen.statuses == {"COMPLETED": 2, "ERROR": 1}
    assert (seen.total, seen.expected) == (3, 4)
    assert [(one.cause, one.count) for one in seen.failures] == [("evaluator", 1)]
    assert seen.report.sessions == 3
    assert not seen.report.unequal
    assert not seen.report.unproved
    assert seen.unmeasured == 0
    assert seen.exchanges == 15
    assert seen.versions == (0, 0)


def test_runs_below_are_shown_together_and_can_be_told_apart(tmp_path, opened):
    asyncio.run(write(tmp_path / "rounds" / "000", busy()))
    asyncio.run(write(tmp_path / "rounds" / "001", busy(), long(2)))
    source = opened(tmp_path)

    listed = source.sessions(Wanted(), 0, 10)
    second = source.session("busy", "rounds/001")
    groups, total = source.groups("rounds/000", 0, 10)

    assert listed.total == 3
    assert listed.choices["run"] == ["rounds/000", "rounds/001"]
    assert second.line.run == "rounds/001"
    assert (total, groups[0].run) == (1, "rounds/000")
    assert len(source.group("task-1", "").lines) == 3
    assert len(source.group("task-1", "rounds/001").lines) == 2
    assert source.group("none", "") is None
    assert source.session("long", "rounds/000") is None


def test_a_run_that_comes_later_is_seen_and_one_that_goes_is_not(tmp_path, opened):
    asyncio.run(write(tmp_path / "a", busy()))
    source = opened(tmp_path)
    asyncio.run(write(tmp_path / "b", long(2)))
    assert source.overview().total == 2

    for path in (tmp_path / "a").iterdir():
        path.unlink()

    assert source.overview().total == 1


def test_one_unreadable_run_does_not_hide_the_others(tmp_path, opened):
    asyncio.run(write(tmp_path / "a", busy()))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "capture.sqlite").write_bytes(b"x" * 5000)

    seen = opened(tmp_path).overview()

    assert seen.total == 1
    assert [run.error is None for run in seen.runs] == [True, False]


def test_half_a_course_does_not_hide_the_last_whole_one(tmp_path, opened):
    course = {"steps": [{"step": 1, "reward": 0.5}], "evaluations": []}
    (tmp_path / "course.json").write_text(json.dumps(course))
    source = opened(tmp_path)
    whole = source.overview().trainings

    (tmp_path / "course.json").write_text(json.dumps(course)[:20])

    assert [one.steps for one in source.overview().trainings] == [one.steps for one in whole]
    assert whole[0].steps == [1]


def test_logs_are_served_and_nothing_else_of_the_disk(run, opened, tmp_path):
    source = opened(run)
    (run.parent / "secret").write_text("secret")

    log = source.file("one.0", "", "stdout")

    assert log.read_text() == HOSTILE
    assert source.session("one.0", "").logs["escape"] == "../../secret"
    assert source.file("one.0", "", "escape") is None
    assert source.file("one.0", "", "../run.json") is None
    assert source.file("none", "", "stdout") is None


def test_a_log_that_is_a_link_out_of_the_run_is_not_served(tmp_path, opened):
    (name, *_) = asyncio.run(captured(tmp_path / "run", rewards=(1.0,)))
    log = tmp_path / "run" / "sessions" / name / "stdout.log"
    (tmp_path / "secret").write_text("secret")
    log.unlink()
    log.symlink_to(tmp_path / "secret")

    assert opened(tmp_path / "run").file(name, "", "stdout") is None


async def test_the_first_page_is_made_anew_when_something_was_written(tmp_path, opened):
    made = busy()
    async with await SqliteStore.open(tmp_path / "capture.sqlite") as store:
        await made.write(store)
        source = opened(tmp_path)
        first, again = source.overview(), source.overview()
        await store.close_session(made.end(1.0))
        ended = source.overview()
    (tmp_path / "course.json").write_text('{"steps": [], "evaluations": []}')
    trained = source.overview()
    (tmp_path / "run.json").write_text('{"config": {"tasks": [{"num_samples": 9}]}}')

    assert again is first
    assert (first.statuses, ended.statuses) == ({"RUNNING": 1}, {"COMPLETED": 1})
    assert len(trained.trainings) == 1
    assert source.overview().expected == 9


def test_a_task_has_its_instruction(run, opened):
    assert opened(run).group("one", "").instruction == f"Fix it. {HOSTILE}"


def test_what_could_not_be_built_in_time_is_counted_as_left(tmp_path):
    made = [long(1, f"s{n}") for n in range(20)]
    asyncio.run(write(tmp_path, *made))

    with client(tmp_path, measure_s=0.0) as browser:
        first = browser.source.overview()
        page = browser.get("/").text

    assert first.unmeasured == 8
    assert "8 more are being counted" in page
