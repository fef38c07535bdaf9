"""A folder as a data source: several runs, a training, unreadable and changing files."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.capture.made import MadeSession
from tests.dashboard.house import HOSTILE, busy, captured, client, long, metadata, write

from bridle.capture.records import SessionRecord
from bridle.capture.sqlite import SqliteStore
from bridle.dashboard.folder import DEPTH, CapturedRun, FolderSource, find, measure_some, read_json
from bridle.dashboard.summaries import SessionFilter
from bridle.errors import ConfigError


@pytest.fixture
def opened():
    made = []

    def of(path, **options):
        made.append(FolderSource(path, **options))
        return made[-1]

    yield of
    for one in made:
        one.close()


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nothing to show"):
        FolderSource(tmp_path)


def test_overview_of_a_run_sums_up_all_sessions(run, opened):
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


def test_runs_below_a_folder_are_listed_together_with_their_relative_paths(tmp_path, opened):
    asyncio.run(write(tmp_path / "rounds" / "000", busy()))
    asyncio.run(write(tmp_path / "rounds" / "001", busy(), long(2)))
    source = opened(tmp_path)

    listed = source.sessions(SessionFilter(), 0, 10)
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


def test_overview_follows_added_and_removed_runs(tmp_path, opened):
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


def test_a_truncated_course_file_does_not_replace_the_last_complete_one(tmp_path, opened):
    course = {"steps": [{"step": 1, "reward": 0.5}], "evaluations": []}
    (tmp_path / "course.json").write_text(json.dumps(course))
    source = opened(tmp_path)
    whole = source.overview().trainings

    (tmp_path / "course.json").write_text(json.dumps(course)[:20])

    assert [one.steps for one in source.overview().trainings] == [one.steps for one in whole]
    assert whole[0].steps == [1]


def test_only_log_files_of_a_session_are_served(run, opened, tmp_path):
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


async def test_overview_is_cached_until_a_file_of_the_run_changes(tmp_path, opened):
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


def test_sample_group_has_the_instruction_of_its_task(run, opened):
    assert opened(run).group("one", "").instruction == f"Fix it. {HOSTILE}"


def test_overview_counts_the_sessions_not_yet_measured(tmp_path):
    made = [long(1, f"s{n}") for n in range(20)]
    asyncio.run(write(tmp_path, *made))

    with client(tmp_path, measure_s=0.0) as browser:
        first = browser.source.overview()
        page = browser.get("/").text

    assert first.unmeasured == 8
    assert "12 sessions counted, 8 not yet" in page


def error_of(run):
    return run.facts().error


def run_of(folder):
    return CapturedRun(folder / "capture.sqlite", ".")


def test_runs_are_found_below_a_folder_to_a_depth_but_not_in_session_files(tmp_path):
    below = tmp_path.joinpath(*"abcdefg"[:DEPTH])
    for folder in (tmp_path, tmp_path / "a", below, below / "deeper", tmp_path / "sessions" / "x"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "capture.sqlite").touch()
    (tmp_path / "a" / "course.json").touch()

    captures, courses = find(tmp_path)

    assert [path.parent for path in captures] == [tmp_path, tmp_path / "a", below]
    assert courses == [tmp_path / "a" / "course.json"]
    assert find(tmp_path / "capture.sqlite") == ([tmp_path / "capture.sqlite"], [])


async def test_new_records_of_a_running_run_appear_at_the_next_read(tmp_path):
    run = run_of(tmp_path)
    made = busy()
    async with await SqliteStore.open(tmp_path / "capture.sqlite") as store:
        await made.write(store)
        before = run.lines()
        made.call("a3", exchange_id="a4")
        await store.commit(made.exchanges[-1], made.new_bodies["a4"])
        during = run.lines()
        made.end(1.0)
        await store.close_session(made.outcome)
        await store.open_session(SessionRecord("later", 2.0, "t", metadata(1)))
        await store.open_session(SessionRecord("judge", 3.0, "t", {"judge_of": "busy"}))
        after = run.lines()
    run.close()

    assert [(line.exchanges, line.status) for line in before] == [(7, "RUNNING")]
    assert [line.exchanges for line in during] == [8]
    assert during[0].sampled == before[0].sampled + 5
    assert [(line.session_id, line.status) for line in after] == [
        ("busy", "COMPLETED"), ("later", "RUNNING"),
    ]  # fmt: skip


def test_a_session_is_read_from_disk_once_and_then_cached(tmp_path):
    asyncio.run(write(tmp_path, busy()))
    run = run_of(tmp_path)

    first = run.session("busy")
    again = run.session("busy")
    line = run.line("busy")

    assert first is again
    assert run.reads == 1
    assert line.measured.stats["exchanges"] == 7
    assert run.session("none") is None
    assert run.line("none") is None
    run.close()


def test_a_replaced_capture_file_is_read_again(tmp_path):
    asyncio.run(write(tmp_path / "one", busy()))
    asyncio.run(write(tmp_path / "two", long(3)))
    run = run_of(tmp_path / "one")
    assert [line.session_id for line in run.lines()] == ["busy"]

    (tmp_path / "two" / "capture.sqlite").replace(tmp_path / "one" / "capture.sqlite")

    assert [line.session_id for line in run.lines()] == ["long"]
    run.close()


def test_a_missing_empty_or_foreign_capture_file_is_an_error_of_the_run(tmp_path):
    path = tmp_path / "capture.sqlite"
    run = CapturedRun(path, ".")

    gone = error_of(run)
    path.write_bytes(b"")
    empty = error_of(run)
    path.write_bytes(b"no database, but long enough to be looked at" * 100)
    foreign = error_of(run)

    assert "no such capture file" in gone
    assert "it is empty" in empty
    assert foreign is not None
    assert run.lines() == []
    assert run.line("x") is None


def test_a_truncated_run_json_is_treated_as_missing(tmp_path):
    asyncio.run(write(tmp_path, long(2)))
    answer = {"config": {"tasks": [{"num_samples": 3}, {}], "engines": ["http://e"]}}
    run = run_of(tmp_path)

    (tmp_path / "run.json").write_text(json.dumps(answer)[:-3])
    half = run.facts()
    (tmp_path / "run.json").write_text(json.dumps(answer))
    whole = run.facts()
    (tmp_path / "run.json").write_text("[1]")
    run.close()

    assert half.expected is None
    assert (whole.expected, whole.engines, whole.error) == (4, ("http://e",), None)
    assert read_json(tmp_path / "run.json") is None


def test_a_session_without_outcome_in_a_finished_run_is_abandoned(tmp_path):
    asyncio.run(write(tmp_path, busy()))
    run = run_of(tmp_path)
    assert not run.lines()[0].abandoned

    (tmp_path / "summary.json").write_text("{")

    assert run.lines()[0].abandoned
    run.close()


def test_sessions_are_measured_newest_first_within_a_time_limit(tmp_path):
    made = [MadeSession(f"s{n}", metadata=metadata(n)) for n in range(3)]
    for one in made:
        one.call(None)
        one.end()
    asyncio.run(write(tmp_path, *made))
    run = run_of(tmp_path)
    run.lines()

    assert measure_some([run], 0.0) == 3
    assert list(run.unmeasured()) == ["s2", "s1", "s0"]
    assert measure_some([run], 60.0) == 0
    assert all(line.measured is not None for line in run.lines())
    run.close()
