"""Capture in SQLite: the store suite, and what only a file can show."""

import asyncio
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from tests.capture.made import MadeSession, digest_of
from tests.capture.test_sqlite_writers import Bodies
from tests.conformance.stores import StoreConformance, assert_same
from tests.disks import full_disk

from bridle.capture import sqlite
from bridle.capture.records import SessionRecord
from bridle.capture.sqlite import SqliteReader, SqliteStore
from bridle.errors import StoreError

ROOT = Path(__file__).parents[2]
KILLS = max(3, settings().max_examples // 30)
"""3 by default, 100 in the long form."""


class TestSqliteStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.path = tmp_path / "capture.sqlite"

    @asynccontextmanager
    async def open_store(self):
        async with await SqliteStore.open(self.path) as store:
            yield store


class TestSqliteStoreWithFsync(TestSqliteStore):
    @asynccontextmanager
    async def open_store(self):
        async with await SqliteStore.open(self.path, fsync="group") as store:
            yield store


@pytest.fixture
def path(tmp_path):
    return tmp_path / "capture.sqlite"


def open_files():
    """The files that this process has open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            found.add(str(entry.readlink()))
    return found


def three_turns(session_id="s1"):
    made = MadeSession(session_id)
    made.call()
    made.call("x0", new=900)
    made.call("x1")
    made.end()
    return made


async def written(path, *sessions):
    async with await SqliteStore.open(path) as store:
        for made in sessions:
            await made.write(store)


# ---- over processes


async def test_a_file_is_read_again_after_its_store_is_closed(path):
    one, two = three_turns("one"), three_turns("two")
    await written(path, one, two)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with SqliteReader(path) as reader:
        assert list(reader.sessions()) == [one.record, two.record]
        for made in (one, two):
            capture = reader.read(made.session_id)
            assert_same(capture.exchanges, made.exchanges)
            assert capture.bodies == reader.bodies(made.session_id) == made.bodies
            assert capture.deliveries == made.deliveries
            assert capture.outcome == reader.outcome(made.session_id) == made.outcome


async def test_a_session_continues_in_another_store_of_the_same_file(path):
    made = MadeSession()
    made.call()
    await written(path, made)
    async with await SqliteStore.open(path) as store:
        with pytest.raises(StoreError, match="'s1' is recorded already"):
            await store.open_session(made.record)
        with pytest.raises(StoreError, match="'x0' is recorded already"):
            await store.commit(made.exchanges[0], {})
        made.call("x0")
        await store.commit(made.exchanges[1], made.bodies)
        await store.deliver(made.deliveries["x1"])
        assert_same(store.exchanges("s1"), made.exchanges)
        assert store.deliveries("s1") == made.deliveries
    with closing(sqlite3.connect(path)) as connection:
        stored = connection.execute("SELECT length(texts) FROM exchanges").fetchall()
        assert stored[1][0] < stored[0][0] * 2, "bodies of the first exchange are stored again"


async def test_a_reader_sees_what_another_connection_writes_while_it_writes(path):
    made = three_turns()
    async with await SqliteStore.open(path) as store:
        with SqliteReader(path) as reader:
            assert list(reader.sessions()) == []
            await made.write(store)
            assert_same(reader.exchanges("s1"), made.exchanges)
            with pytest.raises(StoreError, match="'s2' was never opened"):
                reader.read("s2")


def killed_writer(path, seed, *, after_s):
    """Acknowledged (session, exchange, digest) of a writer killed in the middle."""
    command = [sys.executable, "-m", "tests.capture.killed_writer", str(path), str(seed)]
    acknowledged = b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        acknowledged += process.stdout.read(1)
        timer = threading.Timer(after_s, process.send_signal, [signal.SIGKILL])
        timer.start()
        acknowledged += process.stdout.read()
        timer.join()
    assert process.returncode == -signal.SIGKILL
    whole = acknowledged[: acknowledged.rfind(b"\n")]
    return [tuple(line.split()) for line in whole.decode().splitlines()]


@pytest.mark.timeout(900)
async def test_kill_9_takes_nothing_that_was_acknowledged_and_halves_nothing(path):
    delays = random.Random(7)
    expected = {}
    for kill in range(KILLS):
        for session, exchange, digest in killed_writer(path, kill, after_s=delays.random() * 0.2):
            expected[session, exchange] = digest
        with SqliteReader(path) as reader:  # while the killed process's WAL still lies there
            found = {
                (session.session_id, exchange.exchange_id): exchange
                for session in reader.sessions()
                for exchange in reader.exchanges(session.session_id)
            }
        assert expected.keys() <= found.keys()
        assert all(found[key].prompt_digest.hex() == digest for key, digest in expected.items())
    assert len(expected) > 4 * KILLS
    # Nothing half read: ids, digests and bodies of all that is there agree.
    async with await SqliteStore.open(path) as store:
        for session in store.sessions():
            capture = store.read(session.session_id)
            prompt, spans = [], set()
            for exchange in capture.exchanges:
                prompt += exchange.suffix_ids.tolist()
                assert digest_of(prompt) == exchange.prompt_digest
                prompt += exchange.output_ids.tolist()
                spans.update(exchange.request.spans)
            assert spans <= capture.bodies.keys()


async def test_a_torn_tail_is_cut_and_never_misread(path):
    made = three_turns()
    async with await SqliteStore.open(path) as store:
        await made.write(store)
        wal = path.with_name("capture.sqlite-wal").read_bytes()
        for end in (0, 1, 100, 5000, 20000):
            torn = path.with_name(f"torn{end}.sqlite")
            shutil.copy(path, torn)
            torn.with_name(f"{torn.name}-wal").write_bytes(wal[: len(wal) - end])
            async with await SqliteStore.open(torn) as left:
                read = left.exchanges("s1")
                assert_same(read, made.exchanges[: len(read)])
                assert len(read) == 3 or end


# ---- refusals and their errors


async def test_a_newer_format_is_refused_by_name(path):
    await written(path, three_turns())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    for opened in (lambda: SqliteStore.open(path), lambda: asyncio.to_thread(SqliteReader, path)):
        with pytest.raises(StoreError, match=r"capture.sqlite: written by a newer Bridle .*99"):
            await opened()


async def test_a_foreign_database_is_refused(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine (a)")
    with pytest.raises(StoreError, match="not a Bridle capture file"):
        await SqliteStore.open(path)
    with pytest.raises(StoreError, match="not a Bridle capture file"):
        SqliteReader(path)


async def test_an_empty_or_missing_file_is_no_capture_to_read(path):
    with pytest.raises(StoreError, match=f"{path}: no such capture file"):
        SqliteReader(path)
    path.touch()
    with pytest.raises(StoreError, match="it is empty"):
        SqliteReader(path)


@pytest.mark.parametrize(
    "text", [b"not a database at all" * 50, b"SQLite format 3\0" + b"\xff" * 900]
)
async def test_a_corrupt_file_is_named(path, text):
    path.write_bytes(text)
    with pytest.raises(StoreError, match=f"^{path}: cannot open for writing"):
        await SqliteStore.open(path)
    with pytest.raises(StoreError, match=f"^{path}: cannot open for reading") as refused:
        SqliteReader(path)
    assert str(path) not in open_files(), f"left open by {refused}"


async def test_a_truncated_file_is_named(path):
    await written(path, *(three_turns(f"s{n}") for n in range(20)))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError, match=str(path)), SqliteReader(path) as reader:
        reader.exchanges("s19")
    with pytest.raises(StoreError, match=str(path)):
        async with await SqliteStore.open(path) as store:
            await store.open_session(SessionRecord("new", 0.0))


async def test_an_unusable_folder_is_named(tmp_path):
    missing = tmp_path / "no" / "capture.sqlite"
    with pytest.raises(StoreError, match=f"{missing}: cannot open for writing"):
        await SqliteStore.open(missing)
    with pytest.raises(StoreError, match="cannot open for writing"):
        await SqliteStore.open(tmp_path)


async def test_a_full_disk_fails_the_commit_and_later_ones_work(path):
    made = MadeSession()
    async with await SqliteStore.open(path) as store:
        await store.open_session(made.record)
        exchange = made.call(new=100_000)
        with full_disk(), pytest.raises(StoreError, match=f"{path}: cannot write"):
            await store.commit(exchange, made.new_bodies["x0"])
        await store.commit(exchange, made.new_bodies["x0"])
        assert_same(store.exchanges("s1"), made.exchanges)
        assert store.bodies("s1") == made.bodies


async def test_a_file_locked_by_another_is_named(path, monkeypatch):
    made = MadeSession()
    made.call()
    async with await SqliteStore.open(path) as store:
        monkeypatch.setattr(sqlite, "OTHERS_MS", 50)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match=f"{path}: cannot write.*locked"):
                await store.open_session(made.record)
            other.execute("ROLLBACK")
        await made.write(store)
        assert_same(store.exchanges("s1"), made.exchanges)


async def test_a_read_waits_for_a_slow_write(path):
    made = MadeSession()
    async with await SqliteStore.open(path) as store:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            async with asyncio.TaskGroup() as group:
                group.create_task(store.open_session(made.record))
                await asyncio.sleep(0)
                reading = group.create_task(asyncio.to_thread(store.sessions))
                await asyncio.sleep(0.3)
                assert not reading.done()
                other.execute("ROLLBACK")
            assert list(reading.result()) == [made.record]


async def test_a_record_that_is_no_json_is_refused_and_later_ones_are_written(path):
    async with await SqliteStore.open(path) as store:
        with pytest.raises(StoreError, match="cannot write"):
            await store.open_session(SessionRecord("s1", 0.0, metadata={"a": object()}))
        await store.open_session(SessionRecord("s1", 0.0))
        assert len(store.sessions()) == 1


@contextmanager
def unwritable(folder):
    """Nobody who runs this may write to the folder; root gives up being root for that."""
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


async def test_a_folder_that_cannot_be_written_can_be_read():
    with TemporaryDirectory() as folder:
        path = Path(folder, "capture.sqlite")
        made = three_turns()
        await written(path, made)
        os.chmod(path, 0o644)  # noqa: PTH101 - quick; the folder's mode is what counts here
        with unwritable(path.parent), SqliteReader(path) as reader:
            assert_same(reader.exchanges("s1"), made.exchanges)
        path.with_name("capture.sqlite-wal").write_bytes(b"pending")
        with unwritable(path.parent), pytest.raises(StoreError, match="cannot open for reading"):
            SqliteReader(path)


# ---- texts that no UTF-8 can hold


async def test_undecodable_output_survives_as_escapes(path):
    made = MadeSession(metadata={"note": "\udcff"})
    made.call(extra={"raw": "a\ud800b"})
    made.deliver("x0", detail="reset \udcff")
    made.end(None, status="ERROR", error="stderr: \udcff")
    async with await SqliteStore.open(path) as store:
        await made.write(store)
        assert store.sessions()[0].metadata == {"note": "\udcff"}
        assert store.exchanges("s1")[0].extra["raw"] == "a\ud800b"
        assert store.deliveries("s1")["x0"].detail == "reset \\udcff"
        outcome = store.outcome("s1")
        assert outcome is not None
        assert outcome.error == "stderr: \\udcff"


# ---- cost


async def test_a_capture_file_is_at_most_1_3_times_as_large_as_its_distinct_data(path):
    """At most 1.3 times the tokens, logprobs and texts, also for a file of one short session."""
    for turns in (8, 32):
        made = MadeSession()
        for turn in range(turns):
            made.call(f"x{turn - 1}" if turn else None, new=300, output=200)
        file = path.with_name(f"{turns}.sqlite")
        await written(file, made)
        distinct = sum(map(len, made.bodies.values())) + sum(
            4 * len(e.suffix_ids) + 8 * len(e.output_ids) for e in made.exchanges
        )
        assert file.stat().st_size <= 1.3 * distinct


@pytest.mark.parametrize("new", [0, 511, 512, 20_000])
async def test_the_ids_of_long_prompts_are_compressed_and_come_back(path, new):
    made = MadeSession(texts=False)
    made.call(new=new)
    made.call("x0", new=new)
    await written(path, made)
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(
            "SELECT length(suffix_ids), suffix_zlib FROM exchanges"
        ).fetchall()
    if new < 512:
        assert rows == [(4 * new, 0)] * 2
    else:
        assert all(stored < 0.8 * 4 * new and packed for stored, packed in rows)
    with SqliteReader(path) as reader:
        for exchange, expected in zip(reader.exchanges("s1"), made.exchanges, strict=True):
            assert exchange.suffix_ids.dtype == np.dtype("<i4")
            assert exchange.suffix_ids.tolist() == expected.suffix_ids.tolist()
        assert reader.captured("s1") >= 8 * new


def transactions_in(path):
    """Return how many transactions the WAL has: frames that name the size of the database."""
    wal = path.with_name(f"{path.name}-wal").read_bytes()
    frame = 24 + int.from_bytes(wal[8:12])
    heads = [wal[at : at + 16] for at in range(32, len(wal), frame)]
    return sum(any(head[4:8]) for head in heads if head[8:16] == wal[16:24])


async def test_commits_that_wait_together_are_written_together(path):
    made = MadeSession(texts=False)
    async with await SqliteStore.open(path, fsync="group") as store:
        await store.open_session(made.record)
        began, go_on, before = threading.Event(), threading.Event(), transactions_in(path)

        def stand():
            began.set()
            go_on.wait(20)

        async with asyncio.TaskGroup() as group:
            group.create_task(store.commit(made.call(), Bodies(during=stand)))
            await asyncio.to_thread(began.wait)
            for _ in range(200):
                group.create_task(store.commit(made.call(), {}))
            await asyncio.sleep(0)
            go_on.set()
        assert len(store.exchanges("s1")) == 201
        assert 2 <= transactions_in(path) - before <= 10


async def test_the_wal_is_moved_into_the_file_while_the_store_is_open(path):
    made = MadeSession(texts=False)
    async with await SqliteStore.open(path) as store:
        await store.open_session(made.record)
        for _ in range(600):
            await store.commit(made.call(new=2000), {})
        assert len(store.exchanges("s1")) == 600
        assert path.stat().st_size > 2_000_000


async def test_a_checkpoint_that_fails_costs_nothing_but_a_longer_wal(path, monkeypatch):
    made = MadeSession(texts=False)
    async with await SqliteStore.open(path) as store:
        await store.open_session(made.record)
        await store.commit(made.call(new=500_000), {})
    monkeypatch.setattr(sqlite, "CHECKPOINT_RECORDS", 1)
    size = path.stat().st_size
    assert size > 1_000_000
    async with await SqliteStore.open(path) as store:
        with full_disk(size):  # the WAL, which begins anew, has room
            for _ in range(3):
                await store.commit(made.call(new=1000), {})
                assert_same(store.exchanges("s1"), made.exchanges)
        assert path.stat().st_size == size
        await store.commit(made.call(new=1000), {})
        async with asyncio.timeout(15):
            while path.stat().st_size == size:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        assert_same(store.exchanges("s1"), made.exchanges)


async def test_a_read_while_the_writer_ends_raises(path):
    async with await SqliteStore.open(path) as store:
        store._writer.close()
        with pytest.raises(StoreError, match="the store is closed"):
            await asyncio.to_thread(store.sessions)


async def test_a_commit_whose_caller_was_cancelled_is_still_written(path):
    made = MadeSession()
    made.call()
    async with await SqliteStore.open(path) as store:
        await store.open_session(made.record)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(store.commit(made.exchanges[0], made.bodies))
            await asyncio.sleep(0)
            waiting.cancel()
        assert_same(store.exchanges("s1"), made.exchanges)


def test_the_writer_survives_the_end_of_its_caller_s_event_loop(path):
    made = three_turns()
    store = asyncio.run(SqliteStore.open(path))

    async def give_without_waiting():
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(store.open_session(made.record))
            await asyncio.sleep(0)
            waiting.cancel()

    asyncio.run(give_without_waiting())
    for exchange in made.exchanges:
        asyncio.run(store.commit(exchange, made.bodies))
    assert_same(store.exchanges("s1"), made.exchanges)
    asyncio.run(store.aclose())


async def test_a_file_whose_old_sessions_are_removed_does_not_grow(tmp_path):
    async with await SqliteStore.open(tmp_path / "capture.sqlite") as store:
        sizes = []
        for number in range(12):
            made = MadeSession(f"s{number}", seed=number)
            made.call(new=30_000)
            made.end(1.0)
            await made.write(store)
            await store.forget(f"s{number - 2}")
            sizes.append(store.size())
        assert max(sizes[3:]) <= 1.2 * sizes[2]
        assert len(store.sessions()) == 2


async def test_a_store_on_a_full_disk_fails_its_check_until_there_is_room(path):
    async with await SqliteStore.open(path) as store:
        await store.check()
        with full_disk(), pytest.raises(StoreError, match=f"{path}: cannot write"):
            await store.check()
        await store.check()
