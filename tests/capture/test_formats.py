"""Files of every version load, steps forward are all or nothing."""

import dataclasses
import json
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.capture.made import MadeSession

from bridle.capture import formats
from bridle.capture.formats import (
    VERSION,
    open_for_reading,
    open_for_writing,
)
from bridle.capture.sqlite import SqliteReader, SqliteStore
from bridle.errors import StoreError

FILES = Path(__file__).parent / "files"


def plain(value):
    """A record as JSON values: bytes as hex, arrays as hex with their type."""
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "tobytes"):
        return f"{value.dtype}:{value.tobytes().hex()}"
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


LATER = ("min_p", "repetition_penalty", "logit_bias")


def whole(capture, version):
    """All that a file of that version could hold of a session."""
    facts = json.loads(json.dumps(plain(capture)))
    assert facts.pop("damaged") == []
    if version < 3:
        joins = [delivery.pop("joined_by") for delivery in facts["deliveries"].values()]
        assert joins == [[]] * len(joins)
    for exchange in facts["exchanges"]:
        assert version >= 5 or exchange.pop("experts") is None
    for exchange in facts["exchanges"]:  # the files are older than these, which format 3 can hold
        later = [exchange["sampling"].pop(name) for name in LATER]
        assert not any(later)
    return facts


@pytest.mark.parametrize("version", range(1, VERSION + 1))
async def test_a_file_of_every_version_loads(version, tmp_path):
    """`files/vN.sqlite` was written by the code of version N, `vN.json` is what it holds."""
    expected = json.loads((FILES / f"v{version}.json").read_text())
    copy = tmp_path / "capture.sqlite"
    shutil.copy(FILES / f"v{version}.sqlite", copy)
    with SqliteReader(copy) as reader:
        assert [s.session_id for s in reader.sessions()] == list(expected)
        for session_id, facts in expected.items():
            assert whole(reader.read(session_id), version) == facts
    made = MadeSession("new")
    made.call()
    async with await SqliteStore.open(copy) as store:
        await made.write(store)
        assert len(store.exchanges("new")) == 1
        for session_id, facts in expected.items():
            assert whole(store.read(session_id), version) == facts


@contextmanager
def next_version(monkeypatch, *statements):
    """Another version of the format, to which these statements lead."""
    with monkeypatch.context() as patched:
        patched.setattr(formats, "VERSION", VERSION + 1)
        patched.setitem(formats.CONVERSIONS, VERSION, statements)
        yield


def column_names(connection):
    return [row[1] for row in connection.execute("PRAGMA table_info(sessions)")]


async def test_an_older_file_is_converted_in_place_to_write_and_in_memory_to_read(
    tmp_path, monkeypatch
):
    path = tmp_path / "capture.sqlite"
    open_for_writing(path, fsync=False).close()
    before = path.read_bytes()
    with next_version(monkeypatch, "ALTER TABLE sessions ADD COLUMN more TEXT"):
        with closing(open_for_reading(path)) as connection:
            assert "more" in column_names(connection)
        assert path.read_bytes() == before
        open_for_writing(path, fsync=False).close()
        with closing(open_for_reading(path)) as connection:
            assert "more" in column_names(connection)
    with pytest.raises(StoreError, match="newer"):
        open_for_reading(path)


async def test_a_failed_migration_step_leaves_the_file_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "capture.sqlite"
    open_for_writing(path, fsync=False).close()
    steps = "DROP TABLE outcomes", "SELECT half_way"
    with next_version(monkeypatch, *steps), pytest.raises(StoreError, match="half_way"):
        open_for_writing(path, fsync=False)
    with closing(open_for_reading(path)) as connection:
        assert connection.execute("SELECT count(*) FROM outcomes").fetchone() == (0,)


async def test_a_file_of_a_version_without_a_migration_is_refused(tmp_path):
    path = tmp_path / "capture.sqlite"
    open_for_writing(path, fsync=False).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 0")
    with pytest.raises(StoreError, match=str(path)):
        open_for_writing(path, fsync=False)
