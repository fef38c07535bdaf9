"""Capture in one SQLite file: one writer with group commit, readers beside it.

Callers on event loops queue records and await them. The writer's thread writes all waiting records
in one transaction and resolves their futures. When `commit` returns, the operating system has the
record: `kill -9` of this process cannot lose it. `fsync="group"` makes each transaction durable
against power loss too, with one fsync for all waiting records.

Without fsync, a small record is written by its caller, at once or when the thread is idle. In a
gateway on two shared cores, beside other processes, that takes 0.09 ms, against 0.30 ms with two
hand-offs between threads (benchmarks/gateway.py); half of the 0.09 ms compresses texts. After a
write that was slow, callers leave the writing to the thread for a while, so a slow disk stalls one
call, not all sessions.

The writer keeps the ids and bodies of each session, so that nothing is stored twice. Readers use a
connection of their own and wait until all earlier records are written.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from bridle.capture import formats
from bridle.capture.reader import SqliteReader, WrittenSession
from bridle.capture.records import (
    Commit,
    Delivery,
    Exchange,
    Outcome,
    Score,
    SessionCapture,
    SessionRecord,
)
from bridle.capture.texts import (
    BODY,
    DATA_BYTES,
    DIGEST_BYTES,
    HEAD,
    REPLY,
    Packed,
    body_entries,
    head_digest,
    pack,
)
from bridle.errors import StoreError, boundary
from bridle.folders import check_room
from bridle.types import record

__all__ = ["SqliteReader", "SqliteStore"]

CHECKPOINT_RECORDS = 500
"""Records after which an idle writer checkpoints: some 5 MB of WAL, 5 to 20 ms."""

CHECKPOINT_RECORDS_BUSY = 16 * CHECKPOINT_RECORDS
"""Records after which it checkpoints even if callers wait."""

GROUP_WITHOUT_FSYNC = 4
"""Most records of one transaction without fsync, so that the first of many waiting records is not
held up by the last (32 at once: median 1.5 ms, against 2.5 ms in one transaction)."""

OTHERS_MS = 5000
"""Time that a write waits for another process's lock; as `formats` opens the file."""

WRITTEN_HERE = 1 << 15
"""Bytes of texts up to which a caller writes its own record: more takes long to compress."""

HELD_UP_S = 0.05
"""Duration of a transaction without fsync that shows a busy disk; a busy processor costs less."""

SHY_S = 5.0
"""Time for which callers then leave the writing to the thread."""

TOGETHER_S = 0.004
"""Time that deliveries wait for each other before the next exchange takes them along."""

LATER_S = 0.02
"""Time that a delivery waits to be written with an exchange, up to twice that: a transaction of its
own would cost half as much as the exchange's."""

SOON_S = 0.001
"""Time after which the caller of a small record looks again whether the thread is idle. A queued
record would keep the next ones in the queue: the thread waits 5 ms for each turn of the
interpreter."""

Work = Callable[["_Writer"], None]


class SqliteStore:
    """The store of nodes (`bridle.capture.records.Store`). Make one with `open`."""

    def __init__(self, path: Path, writer: _Writer, reader: SqliteReader) -> None:
        self.path = path
        self._writer = writer
        self._reader = reader
        self._closed = False

    @classmethod
    async def open(cls, path: str | Path, fsync: Literal["off", "group"] = "off") -> SqliteStore:
        """Open or make the capture file at `path`; `aclose` closes it.

        The file of a killed process is recovered: every committed record is there, an incomplete
        one at its end is removed. Raises `StoreError` for an unusable folder, a foreign or corrupt
        file, a newer format.
        """
        path = Path(path)
        with ExitStack() as opened:
            connection = formats.open_for_writing(path, fsync=fsync == "group")
            opened.callback(connection.close)
            reader = SqliteReader(path)
            opened.pop_all()
        group = GROUP_WITHOUT_FSYNC if fsync == "off" else sys.maxsize
        return cls(path, _Writer(path, connection, group), reader)

    async def open_session(self, session: SessionRecord) -> None:
        await self._write(lambda writer: writer.open_session(session))

    async def commit(self, exchange: Exchange, bodies: Mapping[bytes, bytes]) -> None:
        """Record an exchange with the `bodies` that are new to its session."""
        for written in self.commit_now([(exchange, bodies)]) or ():
            await written

    def commit_now(self, commits: Sequence[Commit]) -> Sequence[asyncio.Future[None]] | None:
        """Record exchanges in one transaction; `None` = written, else futures of each."""
        size = 0
        works: list[Work] = []
        for exchange, bodies in commits:
            size += len(exchange.reply)
            for digest in bodies:
                size += len(bodies[digest])
            works += (partial(_Writer.commit, exchange=exchange, bodies=bodies),)
        return self._write_now(works, size=size, commits=True)

    async def deliver(self, delivery: Delivery) -> None:
        """Record whether a reply was delivered, and wait until it is written."""
        self._check_open()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        job = Job(partial(_Writer.deliver, delivery=delivery), loop, done)
        self._writer.give_later(job, LATER_S)
        await done

    def deliver_soon(self, delivery: Delivery, failed: Callable[[StoreError], object]) -> None:
        """Record whether a reply was delivered; it is written later, but readers see it at once."""
        work = partial(_Writer.deliver, delivery=delivery)
        job = Job(work, asyncio.get_running_loop(), failed=failed)
        if self._closed:
            job.finish(self._closed_error())
        else:
            self._writer.give_later(job, LATER_S)

    async def close_session(self, outcome: Outcome) -> None:
        await self._write(lambda writer: writer.close_session(outcome))

    async def score(self, score: Score) -> None:
        await self._write(lambda writer: writer.score(score))

    async def forget(self, session_id: str) -> None:
        """Remove all records of a session; freed pages are reused, the file does not shrink."""
        await self._write(lambda writer: writer.forget(session_id), size=sys.maxsize)

    async def written(self) -> None:
        """Return when all earlier records were written, or failed."""
        for _ in range(2):  # what failed beside others is tried once more, alone
            with suppress(StoreError):  # the caller of that record gets it
                await self._write(lambda _: None)

    async def flush(self) -> None:
        """Return when all earlier records are synced to the disk."""
        await self._write(lambda writer: writer.want_sync(), size=sys.maxsize)

    async def check(self) -> None:
        """Raise the `StoreError` that writing a record would raise now; needs 1 MiB of free
        disk.
        """
        with boundary(StoreError, f"{self.path}: cannot write"):
            await asyncio.to_thread(check_room, self.path.parent)
        await self._write(lambda writer: writer.touch())

    async def aclose(self) -> None:
        """Write all pending records and close the file; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._reader.close()
        await asyncio.to_thread(self._writer.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def sessions(self) -> Sequence[SessionRecord]:
        """Return all sessions in the order they were opened."""
        return self._given_before().sessions()

    def exchanges(self, session_id: str) -> Sequence[Exchange]:
        """Return a session's exchanges in commit order; empty if it is unknown."""
        return self._given_before().exchanges(session_id)

    def deliveries(self, session_id: str) -> Mapping[str, Delivery]:
        """Return the last delivery record of each exchange of a session, by exchange id."""
        return self._given_before().deliveries(session_id)

    def bodies(self, session_id: str) -> Mapping[bytes, bytes]:
        """Return all content-addressed bodies of a session."""
        return self._given_before().bodies(session_id)

    def read(self, session_id: str) -> SessionCapture:
        """Return all records of one session. Raises `StoreError` if it was never opened."""
        return self._given_before().read(session_id)

    def outcome(self, session_id: str) -> Outcome | None:
        """Return the session's outcome; `None` = it still runs, or was killed."""
        return self._given_before().outcome(session_id)

    def size(self) -> int:
        """Return how many bytes the records take, without freed space."""
        return self._given_before().size()

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> StoreError:
        return StoreError(f"{self.path}: the store is closed")

    async def _write(self, work: Work, *, size: int = 0) -> None:
        """Run `work` and wait for it; see `_write_now`."""
        for written in self._write_now([work], size=size) or ():
            await written

    def _write_now(
        self, works: Sequence[Work], *, size: int, commits: bool = False
    ) -> Sequence[asyncio.Future[None]] | None:
        """Do `works` here where the writer is idle; else the writer's thread does them.

        `size` is about how many bytes they write. `None` = they are done; else each is when its
        future is.
        """
        if self._closed:
            self._check_open()
        written = Written.BY_THREAD
        if size <= WRITTEN_HERE:
            written = self._writer.write_now(works, commits=commits)
        if written is Written.HERE:
            return None
        loop = asyncio.get_running_loop()
        ends: list[asyncio.Future[None]] = []
        for work in works:
            ends += (loop.create_future(),)
            job = Job(work, loop, ends[-1])
            if written is Written.SOON:
                self._writer.give_later(job, SOON_S)
            else:
                self._writer.give(job)
        return ends

    def _given_before(self) -> SqliteReader:
        """Return the reader, after all earlier records have been written."""
        self._check_open()
        self._writer.wait_until_written()
        return self._reader


class _Writer:
    """Thread that writes. Methods without a note run in it, inside a transaction.

    A caller that finds nothing queued or running may do its work itself: `write_now`.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, group: int) -> None:
        self._path = path
        self._writing = boundary(StoreError, f"{path}: cannot write")
        self._connection = connection
        self._group = group
        self._states: dict[str, WrittenSession] = {}
        self._records = 0
        """Since the last checkpoint."""
        self._sync_wanted = False
        self._turn = threading.Lock()
        """Held while the connection is used."""
        self._shy_until = 0.0
        self._patience_ms = OTHERS_MS
        self._along = 0.0
        """Time from which an exchange takes the deferred jobs along."""
        self._watching: asyncio.AbstractEventLoop | None = None
        """The loop with a timer for the deferred jobs."""
        self._jobs = Jobs()
        # A daemon: what was acknowledged is written, so an exit without `aclose` loses nothing.
        self._thread = threading.Thread(target=self._run, name=f"capture {path}", daemon=True)
        self._thread.start()

    # From any thread.

    def give(self, job: Job) -> None:
        self._jobs.give(job)

    def give_later(self, job: Job, seconds: float) -> None:
        """Defer a job to the next transaction, at most for `SOON_S`, or for twice `LATER_S`."""
        if job.done is not None:
            self._along = 0.0
        elif not self._jobs.left:
            self._along = time.monotonic() + TOGETHER_S
        self._jobs.left.append(job)
        if seconds < LATER_S:
            job.loop.call_later(seconds, self._write_later, job)
        elif self._watching is not job.loop:
            self._watching = job.loop
            job.loop.call_later(LATER_S, self._look, job)

    def _look(self, job: Job) -> None:
        """Write a deferred job, or look later at those of its loop that came since."""
        left = [one for one in (*self._jobs.left,) if one.loop is job.loop]
        if left and job not in left:
            job.loop.call_later(LATER_S, self._look, left[0])
        else:
            self._watching = None
            self._write_later(job)

    def _write_later(self, job: Job) -> None:
        if job not in self._jobs.left:
            return
        if (written := self.write_now()) is Written.SOON:
            job.loop.call_later(SOON_S, self._write_later, job)
        elif written is Written.BY_THREAD:
            self._jobs.give()

    def write_now(self, works: Sequence[Work] = (), *, commits: bool = False) -> Written:
        """Do `works` and the deferred jobs in the calling thread, or return who has to.

        They are one transaction; if it fails, `works` are one of their own, and the thread does the
        deferred jobs. `commits` = they are exchanges, which take deferred jobs along only from time
        to time. Raises `StoreError`.
        """
        started = time.monotonic()
        if self._group > GROUP_WITHOUT_FSYNC or started < self._shy_until:
            return Written.BY_THREAD
        jobs = self._jobs
        if jobs.given != jobs.finished or not self._turn.acquire(blocking=False):
            return Written.SOON
        try:
            if self._patience_ms:
                self._wait_for_others(0)
            waits = not jobs.left or (commits and started < self._along)
            later = () if waits else jobs.take_left()
            try:
                self._transact(works, later, single=commits and not later and len(works) == 1)
            except StoreError:
                if not later:
                    raise
                self._transact_without(works, later)
        except StoreError as error:
            if getattr(error.__cause__, "sqlite_errorcode", None) != sqlite3.SQLITE_BUSY:
                raise
            return Written.BY_THREAD  # another process writes; the thread can wait for it
        finally:
            self._turn.release()
        if self._records >= CHECKPOINT_RECORDS:
            jobs.put(threading.Event())  # wakes the thread, which sees to it
        ended = time.monotonic()
        if ended - started > HELD_UP_S:
            self._shy_until = ended + SHY_S
        return Written.HERE

    def _transact_without(self, works: Sequence[Work], later: Sequence[Job]) -> None:
        """Write `works` alone, and leave the deferred jobs to the thread."""
        self._jobs.give(*later)
        if works:
            self._transact(works)

    def wait_until_written(self) -> None:
        """Block until every earlier job has been tried."""
        written = threading.Event()
        self._jobs.put(written)
        while not written.wait(timeout=0.2):
            if not self._thread.is_alive():
                raise StoreError(
                    f"{self._path}: the store is closed: nothing more can be read or written"
                )

    def close(self) -> None:
        """Write the queued jobs, end the thread, close the file (which empties the WAL)."""
        self._jobs.put(None)
        self._thread.join()

    # The thread.

    def _run(self) -> None:
        try:
            while True:
                waiting = [self._jobs.get()]
                while len(waiting) < self._group and not self._jobs.empty:
                    waiting.append(self._jobs.get())
                with self._turn:
                    self._wait_for_others(OTHERS_MS)
                    self._write([job for job in waiting if isinstance(job, Job)])
                for event in waiting:
                    if isinstance(event, threading.Event):
                        event.set()
                if None in waiting:
                    return
                with self._turn:
                    self._checkpoint()
        finally:
            self._connection.close()

    def _wait_for_others(self, milliseconds: int) -> None:
        """Set how long a transaction waits for the lock of another process."""
        if milliseconds != self._patience_ms:
            self._connection.execute(f"PRAGMA busy_timeout = {milliseconds}")
            self._patience_ms = milliseconds

    def _write(self, jobs: list[Job]) -> None:
        """Write all jobs in one transaction; if it fails, each in its own."""
        if not jobs:
            return
        fault = None
        try:
            self._transact([job.work for job in jobs])
        except StoreError as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._write([job])
                return
            fault = error
        for job in jobs:
            self._jobs.finished += 1
            job.finish(fault)

    def _transact(
        self, works: Sequence[Work], later: Sequence[Job] = (), *, single: bool = False
    ) -> None:
        """Do the deferred jobs, then `works`, in one transaction, and end their waits.

        `single` = they are one statement, which is a transaction by itself.
        """
        try:
            if not single:
                self._connection.execute("BEGIN IMMEDIATE")
            for job in later:
                job.work(self)
                self._records += 1
            for work in works:
                work(self)
                self._records += 1
            if not single:
                self._connection.execute("COMMIT")
            if self._sync_wanted:
                self._sync_wanted = False
                formats.sync_file(self._path.with_name(self._path.name + "-wal"))
        except BaseException:
            with self._writing:
                # What the states say of this transaction is not in the file: read it anew.
                self._states.clear()
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        for job in later:
            if job.done is not None:
                job.finish(None, asyncio.get_running_loop())

    def _checkpoint(self) -> None:
        """Checkpoint the WAL when it is long, preferably while nobody waits."""
        limit = CHECKPOINT_RECORDS if self._jobs.empty else CHECKPOINT_RECORDS_BUSY
        if self._records < limit:
            return
        self._records = 0
        # A failure loses nothing: the WAL stays longer. A full disk shows at the next commit.
        with suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    # The records.

    def open_session(self, session: SessionRecord) -> None:
        if self._find(session.session_id) is not None:
            raise StoreError(
                f"{self._path}: session {session.session_id!r} is recorded already; give the new "
                "session another id"
            )
        cursor = self._connection.execute(
            "INSERT INTO sessions (session_id, opened_at, task_id, metadata) VALUES (?, ?, ?, ?)",
            formats.session_row(session),
        )
        self._states[session.session_id] = WrittenSession(number=cursor.lastrowid or 0)

    def commit(self, exchange: Exchange, bodies: Mapping[bytes, bytes]) -> None:
        """Record an exchange and the texts that its session does not have yet."""
        states, session_id = self._states, exchange.session_id
        state = states[session_id] if session_id in states else self._state(session_id)
        if exchange.exchange_id in state.exchange_ids:
            message = f"{self._path}: exchange {exchange.exchange_id!r} is recorded already"
            raise StoreError(message)
        if exchange.request.head != state.head[0]:
            state.head = exchange.request.head, head_digest(exchange.request.head)
        head = state.head[1]
        entries: list[Packed] = [(REPLY, bytes(DIGEST_BYTES), exchange.reply)]
        if head not in state.heads:
            state.heads.add(head)
            entries += ((HEAD, head, exchange.request.head),)
        new: set[bytes] = set()
        for digest, body in bodies.items():
            if digest in state.bodies:
                continue
            if len(body) < DATA_BYTES:
                new.add(digest)
                entries += ((BODY, digest, body),)
                continue
            for entry in body_entries(digest, body):
                if entry[1] not in state.bodies and entry[1] not in new:
                    new.add(entry[1])
                    entries += (entry,)
        if exchange.sampling is not state.sampling[0]:
            state.sampling = exchange.sampling, formats.sampling_json(exchange.sampling)
        row = formats.exchange_row(state.number, exchange, pack(entries), head, state.sampling[1])
        self._connection.execute(formats.INSERT_EXCHANGE, row)
        state.exchange_ids.add(exchange.exchange_id)
        state.bodies |= new

    def deliver(self, delivery: Delivery) -> None:
        states, session_id = self._states, delivery.session_id
        state = states[session_id] if session_id in states else self._state(session_id)
        self._connection.execute(
            "INSERT INTO deliveries VALUES (?, ?, ?, ?, ?, ?, ?)",
            formats.delivery_row(state.number, state.deliveries, delivery),
        )
        state.deliveries += 1

    def close_session(self, outcome: Outcome) -> None:
        state = self._state(outcome.session_id)
        if state.closed:
            raise StoreError(
                f"{self._path}: session {outcome.session_id!r} has an outcome already; a session "
                "ends only once"
            )
        self._connection.execute(
            "INSERT INTO outcomes VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            formats.outcome_row(state.number, outcome),
        )
        self._states.pop(outcome.session_id)

    def score(self, score: Score) -> None:
        found = self._connection.execute(
            "UPDATE sessions SET scores = json_insert(coalesce(scores, '[]'), '$[#]', json(?))"
            " WHERE session_id = ?",
            (formats.score_json(score), score.session_id),
        )
        if not found.rowcount:
            raise StoreError(f"{self._path}: session {score.session_id!r} was never opened")

    def forget(self, session_id: str) -> None:
        if (state := self._find(session_id)) is not None:
            for query in formats.FORGET:
                self._connection.execute(query, (state.number,))
            self._states.pop(session_id, None)

    def touch(self) -> None:
        """Rewrite one page unchanged."""
        self._connection.execute(f"PRAGMA application_id = {formats.APPLICATION_ID}")

    def want_sync(self) -> None:
        """Sync this transaction and all before it before its jobs are finished."""
        self._sync_wanted = True

    def _state(self, session_id: str) -> WrittenSession:
        """Return a session's state. Raises `StoreError` if the session was never opened."""
        state = self._find(session_id)
        if state is None:
            raise StoreError(f"{self._path}: session {session_id!r} was never opened")
        return state

    def _find(self, session_id: str) -> WrittenSession | None:
        """Return a session's state, read from the file if an earlier process wrote it."""
        state = self._states.get(session_id)
        if state is None:
            state = WrittenSession.read(self._connection, session_id)
        if state is not None:
            self._states[session_id] = state
        return state


class Written(Enum):
    """Outcome of a caller's attempt to write a record itself."""

    HERE = "here"
    SOON = "soon"
    """The caller can write soon, when the thread has done its present work."""
    BY_THREAD = "by the thread"
    """The record must be queued."""


@record(eq=False)
class Job:
    """Work to write, and the future of its caller."""

    work: Callable[[Any], None]
    """Called with the writer, inside a transaction."""
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None] | None = None
    """`None` = nobody waits."""
    failed: Callable[[StoreError], object] | None = None
    """Called with the error where nobody waits; `None` = nobody wants it."""

    def finish(
        self, error: StoreError | None, here: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """Pass a write's result to its caller; `here` is the event loop of this thread."""
        if self.done is None and error is None:
            return
        if self.loop is here:
            self._pass_on(error)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._pass_on, error)

    def _pass_on(self, error: StoreError | None) -> None:
        if self.done is None:
            if error is not None and self.failed is not None:
                self.failed(error)
        elif self.done.done():
            pass
        elif error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Jobs:
    """Job queue of the writer's thread.

    Callers on any loop and in any thread add jobs; the next write also takes the deferred ones.
    Queued jobs run after all jobs that were deferred or queued before them.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Job | threading.Event | None] = queue.SimpleQueue()
        self.left: deque[Job] = deque()
        """Those that wait for the next transaction."""
        self._counting = threading.Lock()
        self.given = 0
        """Jobs that were queued; the thread is busy until it has finished as many."""
        self.finished = 0
        """Queued jobs that were done; counted by the writer's thread."""

    @property
    def empty(self) -> bool:
        return self._queue.empty()

    def give(self, *jobs: Job) -> None:
        """Queue the deferred jobs of the writer, then `jobs`."""
        with self._counting:
            for job in (*self.take_left(), *jobs):
                self.given += 1
                self._queue.put(job)

    def put(self, event: threading.Event | None) -> None:
        """Queue the deferred jobs, then an event for the thread to set; `None` ends the thread."""
        self.give()
        self._queue.put(event)

    def get(self) -> Job | threading.Event | None:
        """Wait for the next job or event of the queue, and return it."""
        return self._queue.get()

    def take_left(self) -> list[Job]:
        """Return all deferred jobs, and remove them from the queue: the caller does them."""
        jobs: list[Job] = []
        if not self.left:
            return jobs
        try:  # another thread may take some
            while self.left:
                jobs += (self.left.popleft(),)
        except IndexError:
            pass
        return jobs
