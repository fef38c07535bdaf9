"""Damage in a capture file: what is left is read, what is not is named."""

import sqlite3
from contextlib import closing

import pytest
from tests.capture.made import MadeSession
from tests.capture.test_sqlite import path, three_turns, written

from bridle.capture.reader import SqliteReader
from bridle.capture.sqlite import SqliteStore
from bridle.errors import StoreError

__all__ = ["path"]


@pytest.mark.parametrize(
    "texts", [b"", b"\x07abc", b"\x01abc", b"\x00abc", b"\x00\x00" + b"\xff" * 20]
)
async def test_damaged_texts_cost_the_texts_and_no_token(path, texts):
    made = three_turns()
    await written(path, made)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE exchanges SET texts = ? WHERE n = 2", (texts,))
    with SqliteReader(path) as reader:
        capture = reader.read("s1")
    first, damaged, last = capture.exchanges
    assert damaged.output_ids.tolist() == made.exchanges[1].output_ids.tolist()
    assert (first.reply, last.reply) == (made.exchanges[0].reply, made.exchanges[2].reply)
    with pytest.raises(StoreError, match="the stored texts of row 1 are damaged"):
        _ = damaged.reply
    assert len(capture.bodies) == len(made.bodies) - 2


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("output_ids", b"\x01\x02\x03", "multiple of element size"),
        ("logprobs", b"", "5 sampled ids but 0 logprobs"),
        ("suffix_ids", b"", "incomplete or truncated stream"),
        ("suffix_ids", b"\0" * 8, "Error -3 while decompressing"),
        ("suffix_zlib", 0, "multiple of element size"),
        ("kind", "agents", "agents"),
        ("versions", "{", "JSONDecodeError"),
        ("sampling", '{"heat": 1}', "heat"),
        ("output_ids", "text", "TypeError"),
    ],
)
async def test_a_damaged_row_is_named_and_the_rest_is_read(path, column, value, why):
    made = three_turns()
    await written(path, made)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE exchanges SET {column} = ? WHERE n = 2", (value,))  # noqa: S608
    with SqliteReader(path) as reader:
        capture = reader.read("s1")
        assert [exchange.exchange_id for exchange in capture.exchanges] == ["x0", "x2"]
        (damaged,) = capture.damaged
        assert damaged.exchange_id == "x1"
        assert why in damaged.why
        assert damaged.sampled == (0 if column == "output_ids" else 5)
        assert capture.bodies == made.bodies
        with pytest.raises(StoreError, match=f"{path}: cannot read exchange x1"):
            reader.exchanges("s1")


async def test_reading_a_capture_file_changes_it_and_its_folder_in_no_way(path):
    await written(path, three_turns())
    before = path.read_bytes()
    with SqliteReader(path) as reader:
        assert len(reader.exchanges("s1")) == 3
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


def session(calls, session_id="s1"):
    made, before = MadeSession(session_id), None
    for _ in range(calls):
        before = made.call(before).exchange_id
    return made


async def test_repeated_totals_report_only_new_exchanges(path):
    made = session(3)
    async with await SqliteStore.open(path) as store:
        with closing(SqliteReader(path)) as reader:
            change = reader.change()
            await made.write(store)
            first, last = reader.totals()
            nothing, same = reader.totals(last)
            assert reader.change() != change
            change = reader.change()
            assert reader.change() == change
            more = made.call(made.exchanges[-1].exchange_id, output=9)
            await store.commit(more, made.new_bodies[more.exchange_id])
            second, _ = reader.totals(last)

    own = made.session_id
    assert first[own].exchanges == 3
    assert first[own].sampled == sum(len(one.output_ids) for one in made.exchanges[:3])
    assert (nothing, same) == ({}, last)
    assert (second[own].exchanges, second[own].sampled) == (1, 9)
    assert second[own].last_at == more.started_at + more.duration_s


async def test_outcomes_and_extents_are_those_of_each_session(path):
    one, two = session(2, "one"), session(1, "two")
    one.end(0.5, cause="limit", error="too long")
    async with await SqliteStore.open(path) as store:
        await one.write(store)
        await two.write(store)
        with closing(SqliteReader(path)) as reader:
            assert reader.outcomes() == {"one": one.outcome}
            assert reader.extent("one") == (2, 2, 1, 0)
            assert reader.extent("two") == (1, 1, 0, 0)
            assert reader.extent("none") == (0, 0, 0, 0)
