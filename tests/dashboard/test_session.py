"""A session for people: tree, exchanges, what cannot be read."""

import asyncio
import sqlite3
from contextlib import closing

from tests.dashboard.house import busy, write

from bridle.dashboard.lines import measured_of
from bridle.dashboard.runs import Run
from bridle.dashboard.session import composition
from bridle.types import DeliveryState


def opened(folder, made):
    asyncio.run(write(folder, made))
    return reopened(folder, made.session_id)


def reopened(folder, session_id):
    with closing(Run(folder / "capture.sqlite", ".")) as run:
        return run.session(session_id)


def test_rows_say_what_becomes_of_each_exchange(tmp_path):
    session = opened(tmp_path, busy())

    rows = {row.exchange.exchange_id: row for row in session.rows(0, 100)}

    assert len(rows) == session.size == 7
    assert rows["a1"].fate == "trained"
    assert rows["a3"].fate == "unresolved"
    assert rows["title"].fate == "kind"
    assert (rows["a1"].is_root, rows["a2"].is_root) == (True, False)
    assert (rows["a1"].new, rows["a2"].new) == (40, 9)
    assert rows["a2"].delivery.state is DeliveryState.DELIVERED
    assert rows["a2"].speakers == "user"
    assert rows["a2"].said.startswith("a2: ")
    assert {row.depth for row in rows.values()} == {0, 1}


def test_a_page_of_rows_is_a_part_of_the_tree(tmp_path):
    session = opened(tmp_path, busy())
    whole = [row.exchange.exchange_id for row in session.rows(0, 100)]

    assert [row.exchange.exchange_id for row in session.rows(2, 3)] == whole[2:5]
    assert session.place(whole[4]) == 4
    assert session.place("none") is None


def test_an_exchange_tells_messages_traces_and_neighbours(tmp_path):
    session = opened(tmp_path, busy())

    detail = session.detail("a2")

    assert [one["role"] for one in detail.earlier] == ["system", "user", "assistant"]
    assert [one["role"] for one in detail.added] == ["user"]
    assert detail.reply[0]["content"].startswith("a2: ")
    assert (detail.before, detail.after) == ("a1", "sub")
    assert detail.fork == []
    assert detail.missing is None
    number, at = detail.traces[0]
    trace = session.trajectory.traces[number]
    assert "a2" in trace.exchange_ids
    assert at == 12 + 40 + 9
    assert session.detail("none") is None


def test_a_fork_is_explained(tmp_path):
    session = opened(tmp_path, busy())

    assert "recorded with parent None, continues b3" in "\n".join(session.detail("short").fork)


def test_raw_parts_are_the_bytes_that_came(tmp_path):
    made = busy()
    session = opened(tmp_path, made)

    assert session.raw("a2", "reply") == made.exchanges[1].reply
    assert session.raw("a1", "request").startswith(b'{"messages":[{"role": "system"')
    assert session.raw("none", "reply") is None


def test_damaged_texts_and_rows_are_sentences(tmp_path):
    asyncio.run(write(tmp_path, busy()))
    with closing(sqlite3.connect(tmp_path / "capture.sqlite")) as connection, connection:
        connection.execute("UPDATE exchanges SET texts = x'09' WHERE exchange_id = 'a1'")
        connection.execute("UPDATE exchanges SET kind = 'odd' WHERE exchange_id = 'b3'")
    session = reopened(tmp_path, "busy")

    rows = {row.exchange.exchange_id: row for row in session.rows(0, 100)}

    assert rows["a1"].said == ""
    assert "cannot read" in session.detail("a2").missing
    assert {lost.exchange_id: lost.sampled for lost in session.lost} == {"b3": 4}


def test_a_session_is_measured_by_its_trajectory(tmp_path):
    measured = measured_of(opened(tmp_path, busy()).trajectory)

    assert measured.versions == (7, 7)
    assert measured.trained + sum(measured.excluded.values()) == 12 + 8 + 7 + 3 + 9 + 4 + 6
    assert measured.turns >= 4


def test_a_trace_is_told_in_parts(tmp_path):
    session = opened(tmp_path, busy())
    trace = session.trajectory.traces[0]

    assert sum(composition(trace).values()) == len(trace.prompt_ids) + len(trace.response_ids)
