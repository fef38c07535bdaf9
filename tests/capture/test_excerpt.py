"""One session of a capture file as a file of its own."""

import pytest
from tests.dashboard.house import busy, write

from bridle.capture.reader import SqliteReader, excerpt
from bridle.capture.sqlite import SqliteStore
from bridle.errors import StoreError
from bridle.trajectory import rebuild
from bridle.trajectory.result import trajectory_json


async def test_an_excerpt_has_all_of_its_session_and_nothing_of_others(tmp_path):
    await write(tmp_path / "run", busy("a"), busy("b"), busy("c"))
    source = tmp_path / "run" / "capture.sqlite"
    copy = tmp_path / "copy.sqlite"

    copy.write_bytes(excerpt(source, "b"))

    with SqliteReader(copy) as mine, SqliteReader(source) as theirs:
        assert [one.session_id for one in mine.sessions()] == ["b"]
        same, whole = mine.read("b"), theirs.read("b")
    assert (same.session, same.outcome) == (whole.session, whole.outcome)
    assert (same.bodies, same.deliveries) == (whole.bodies, whole.deliveries)
    assert [one.reply for one in same.exchanges] == [one.reply for one in whole.exchanges]
    assert trajectory_json(rebuild(same)) == trajectory_json(rebuild(whole))
    assert [path.name for path in tmp_path.iterdir() if "copy" in path.name] == ["copy.sqlite"]


async def test_an_excerpt_of_a_running_session_is_a_snapshot(tmp_path):
    made = busy("a")
    async with await SqliteStore.open(tmp_path / "capture.sqlite") as store:
        await store.open_session(made.record)
        first, *others = made.exchanges
        await store.commit(first, made.new_bodies[first.exchange_id])
        copy = excerpt(store.path, "a")
        for exchange in others:
            await store.commit(exchange, made.new_bodies[exchange.exchange_id])
        assert len(store.exchanges("a")) == len(made.exchanges)
    (tmp_path / "copy.sqlite").write_bytes(copy)
    with SqliteReader(tmp_path / "copy.sqlite") as reader:
        assert [one.exchange_id for one in reader.exchanges("a")] == [first.exchange_id]


async def test_an_excerpt_of_an_unknown_session_is_none_and_of_a_missing_file_an_error(tmp_path):
    await write(tmp_path / "run", busy("a"))
    assert excerpt(tmp_path / "run" / "capture.sqlite", "b") is None
    with pytest.raises(StoreError, match="no such capture file"):
        excerpt(tmp_path / "none.sqlite", "a")
