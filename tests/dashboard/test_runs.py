"""A capture file that is written, replaced, half there, or not one."""

import asyncio
import json

from tests.capture.made import MadeSession
from tests.dashboard.house import busy, long, metadata, write

from bridle.capture.records import SessionRecord
from bridle.capture.sqlite import SqliteStore
from bridle.dashboard.runs import DEPTH, Run, find, measure_some, read_json


def error_of(run):
    return run.facts().error


def run_of(folder):
    return Run(folder / "capture.sqlite", ".")


def test_runs_are_found_below_a_folder_but_not_in_a_sessions_files(tmp_path):
    below = tmp_path.joinpath(*"abcdefg"[:DEPTH])
    for folder in (tmp_path, tmp_path / "a", below, below / "deeper", tmp_path / "sessions" / "x"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "capture.sqlite").touch()
    (tmp_path / "a" / "course.json").touch()

    captures, courses = find(tmp_path)

    assert [path.parent for path in captures] == [tmp_path, tmp_path / "a", below]
    assert courses == [tmp_path / "a" / "course.json"]
    assert find(tmp_path / "capture.sqlite") == ([tmp_path / "capture.sqlite"], [])


async def test_a_run_that_is_being_written_is_seen_at_the_next_look(tmp_path):
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


def test_a_session_is_read_once_until_something_is_added(tmp_path):
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


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
    asyncio.run(write(tmp_path / "one", busy()))
    asyncio.run(write(tmp_path / "two", long(3)))
    run = run_of(tmp_path / "one")
    assert [line.session_id for line in run.lines()] == ["busy"]

    (tmp_path / "two" / "capture.sqlite").replace(tmp_path / "one" / "capture.sqlite")

    assert [line.session_id for line in run.lines()] == ["long"]
    run.close()


def test_what_cannot_be_read_is_told(tmp_path):
    path = tmp_path / "capture.sqlite"
    run = Run(path, ".")

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


def test_half_written_settings_are_as_if_they_were_not_there(tmp_path):
    asyncio.run(write(tmp_path, long(2)))
    told = {"config": {"tasks": [{"num_samples": 3}, {}], "engines": ["http://e"]}}
    run = run_of(tmp_path)

    (tmp_path / "run.json").write_text(json.dumps(told)[:-3])
    half = run.facts()
    (tmp_path / "run.json").write_text(json.dumps(told))
    whole = run.facts()
    (tmp_path / "run.json").write_text("[1]")
    run.close()

    assert half.expected is None
    assert (whole.expected, whole.engines, whole.error) == (4, ("http://e",), None)
    assert read_json(tmp_path / "run.json") is None


def test_a_session_without_outcome_in_a_finished_run_has_never_ended(tmp_path):
    asyncio.run(write(tmp_path, busy()))
    run = run_of(tmp_path)
    assert not run.lines()[0].abandoned

    (tmp_path / "summary.json").write_text("{")

    assert run.lines()[0].abandoned
    run.close()


def test_sessions_are_built_within_a_time_newest_first(tmp_path):
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
