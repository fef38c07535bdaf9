"""Steps that make sessions and tasks final: one transaction per step, and each step once.

A session is made final only by the run that holds its lease; whoever comes later finds the row
final and changes nothing. With the last session its task becomes final and gets its place in the
order of `GET /v1/groups`, in the same transaction, as do the callbacks that are then due.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import orjson
from sqlalchemy import RowMapping, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from bridle.errors import BridleError
from bridle.node.ending import Fault, blame, is_scored
from bridle.server import tables as t
from bridle.server.addresses import receiver_of
from bridle.server.schemas import Reward, Terms
from bridle.server.states import (
    FINAL_SESSIONS,
    FINAL_TASKS,
    SESSIONS,
    TASKS,
    Closed,
    Ended,
    SessionState,
    TaskState,
    run_id,
    session_id,
    step,
)
from bridle.types import JSON, Cause, SessionStatus

EARLY_STOP = "early_stop"
"""`tasks.stopped` of a task that has all the usable sessions it asked for."""

CANCELLED = "cancelled"
"""`tasks.stopped` of a task that somebody cancelled."""

MOST_SCORES: Final = 1 << 20
"""Bytes of all rewards of a session: they lie in its row, which is read and written whole."""

MAX_INTERRUPTIONS = 20
"""A session whose server died this often while it ran is not run again."""


class ConflictError(BridleError):
    """The request does not fit what is there, such as an id that is taken by another body."""


async def finish(connection: AsyncConnection, ended: Ended, *, owner: str, now: float) -> Closed:
    """Take in the end of a run that `owner` holds."""
    found = await _session(connection, ended.session_id)
    if found is None:
        return Closed("lost")
    session, task = found
    if (session["state"], session["attempt"], session["leased_by"]) != (
        SessionState.RUNNING,
        ended.attempt,
        owner,
    ):
        return Closed("lost")
    terms = Terms.model_validate_json(task["terms"])
    earlier = _earlier(session)
    failed = sum(one["why"] == "failed" for one in earlier)
    may_again = _stopped(session, task) is None and failed + 1 < terms.max_attempts
    blamed = blame(SessionStatus(ended.status), ended.cause)
    if blamed is Fault.INFRASTRUCTURE and may_again:
        wait_s = terms.retry_backoff_s * 2**failed
        node = ended.result.get("node_id")
        await _again(
            connection, session, "failed", ended.error, now=now, not_before=now + wait_s, node=node
        )
        return Closed("again")
    return await make_final(connection, session, task, ended, now=now)


async def put_back(
    connection: AsyncConnection, session: str, attempt: int, *, owner: str, why: str, now: float
) -> Closed:
    """Have a run that was broken off (`interrupted` or `stopped`) done again."""
    found = await _session(connection, session)
    if found is None:
        return Closed("lost")
    row, task = found
    if (row["state"], row["attempt"], row["leased_by"]) != (SessionState.RUNNING, attempt, owner):
        return Closed("lost")
    if (reason := _stopped(row, task)) is not None:
        return await make_final(connection, row, task, never_ended(row, task, reason), now=now)
    interrupted = sum(one["why"] == "interrupted" for one in _earlier(row))
    if why == "interrupted" and interrupted + 1 >= MAX_INTERRUPTIONS:
        error = f"the server died {interrupted + 1} times while it ran"
        ended = never_ended(row, task, error, status="ERROR", cause=Cause.INFRASTRUCTURE)
        return await make_final(connection, row, task, ended, now=now)
    await _again(connection, row, why, f"the server was {why}", now=now, not_before=0.0)
    return Closed("again")


async def stop_task(
    connection: AsyncConnection, task_id: str, reason: str, *, now: float
) -> Closed | None:
    """Start no further session of a task and end what runs; `None` if there is no such task.

    Nothing changes for a task that is final, or is being ended already.
    """
    query = select(t.tasks).where(t.tasks.c.task_id == task_id).with_for_update()
    task = (await connection.execute(query)).mappings().first()
    if task is None:
        return None
    if TaskState(task["state"]) in FINAL_TASKS:
        return Closed("lost")
    if task["stopped"] is None:
        await _stop(connection, task, reason, now=now)
    closed = await _settle(connection, task["seq"], now=now)
    return replace(closed, run_ids=await _running(connection, task["seq"]))


async def stop_session(
    connection: AsyncConnection, session: str, reason: str, *, now: float
) -> Closed:
    """End a session that waits for a run, and have one that runs end: its run is in `run_ids`."""
    found = await _session(connection, session)
    if found is None or found[0]["state"] not in (SessionState.QUEUED, SessionState.RUNNING):
        return Closed("lost")
    row, task = found
    if row["state"] == SessionState.QUEUED:
        return await make_final(connection, row, task, never_ended(row, task, reason), now=now)
    own = update(t.sessions).where(t.sessions.c.session_id == session)
    await connection.execute(own.values(stopped=reason))
    return Closed("lost", (run_id(session, row["attempt"]),))


async def give_reward(
    connection: AsyncConnection, session: str, given: Reward, *, now: float
) -> Closed:
    """Append a reward to an ended session and count it anew; the last reward is the result's.

    A session whose evaluator had failed is COMPLETED. Raises `ConflictError` for one that has not
    ended, or ended without anything to score, or whose rewards take more than `MOST_SCORES`.
    """
    found = await _session(connection, session)
    if found is None:
        return Closed("lost")
    row, task = found
    result: JSON = orjson.loads(row["result"]) if row["result"] else {}
    cause = result.get("cause")
    if row["state"] not in FINAL_SESSIONS:
        raise ConflictError(f"session {session!r} has not ended: {row['state']}")
    replied = row["version_max"] is not None
    ended = SessionStatus(row["state"]), None if cause is None else Cause(cause)
    if cause != Cause.EVALUATOR and not is_scored(*ended, replied=replied):
        raise ConflictError(f"session {session!r} has nothing to score: {row['state']} ({cause})")
    if cause == Cause.EVALUATOR:
        result |= {"status": SessionState.COMPLETED, "cause": None, "error": None}
    scores = [*result.get("scores", ()), {"at": now, **given.model_dump(mode="json")}]
    if len(orjson.dumps(scores)) > MOST_SCORES and len(scores) > 1:
        raise ConflictError(
            f"the rewards of session {session!r} take more than {MOST_SCORES} bytes"
        )
    result |= {"reward": given.reward, "scores": scores}
    state = step(SESSIONS, SessionState(row["state"]), SessionState(result["status"]))
    usable = state is SessionState.COMPLETED or replied
    own, counts = t.sessions.c, t.tasks.c
    text = orjson.dumps(result).decode()
    changes = update(t.sessions).where(own.session_id == session)
    await connection.execute(changes.values(state=state, usable=int(usable), result=text))
    more = int(usable) - row["usable"]
    count = update(t.tasks).where(counts.seq == task["seq"])
    await connection.execute(count.values(usable=counts.usable + more))
    if TaskState(task["state"]) not in FINAL_TASKS:
        return await _settle(connection, task["seq"], now=now)
    task = await _task(connection, task["seq"])
    after = _final_state(task, Terms.model_validate_json(task["terms"]))
    if after is not TaskState(task["state"]):
        await connection.execute(count.values(state=step(TASKS, TaskState(task["state"]), after)))
    return Closed("final")


async def make_final(
    connection: AsyncConnection, session: RowMapping, task: RowMapping, ended: Ended, *, now: float
) -> Closed:
    """Make a session final, count it, and close its task if it was the last one."""
    await _mark(connection, session, task, ended, now=now)
    return await _settle(connection, task["seq"], now=now)


async def _mark(
    connection: AsyncConnection, session: RowMapping, task: RowMapping, ended: Ended, *, now: float
) -> None:
    """Write a session's end, its callback, and its place in the counts."""
    state = step(SESSIONS, SessionState(session["state"]), SessionState(ended.status))
    await connection.execute(
        update(t.sessions)
        .where(t.sessions.c.session_id == session["session_id"])
        .values(
            state=state,
            leased_by=None,
            leased_until=None,
            ended_at=now,
            usable=int(ended.usable),
            result=orjson.dumps(ended.result).decode(),
            file=ended.file,
            file_bytes=ended.file_bytes,
            version_min=ended.version_min,
            version_max=ended.version_max,
        )
    )
    terms = Terms.model_validate_json(task["terms"])
    await _call_back(connection, terms, task, [session["session_id"]], now=now)
    counts = t.tasks.c
    await connection.execute(
        update(t.tasks)
        .where(counts.seq == task["seq"])
        .values(ended=counts.ended + 1, usable=counts.usable + int(ended.usable))
    )


async def _settle(connection: AsyncConnection, seq: int, *, now: float) -> Closed:
    """Apply the counts of a task: refill it, stop it early, or end it."""
    task = await _task(connection, seq)
    terms = Terms.model_validate_json(task["terms"])
    stops = False
    if task["stopped"] is None:
        wanted = terms.early_stop_min_usable_sessions
        stops = wanted is not None and task["usable"] >= wanted
        unusable = task["ended"] - task["usable"]
        target = task["samples"] + min(terms.max_refills, unusable)
        if stops:
            await _stop(connection, task, EARLY_STOP, now=now)
        elif target > task["target"]:
            row = update(t.tasks).where(t.tasks.c.seq == seq)
            await connection.execute(row.values(target=target, open=1))
        task = await _task(connection, seq)
    if not task["open"] and task["ended"] == task["expanded"]:
        return await _close(connection, task, terms, now=now)
    return Closed("final", await _running(connection, seq) if stops else ())


async def _stop(connection: AsyncConnection, task: RowMapping, reason: str, *, now: float) -> None:
    """No further session of the task starts; those that wait are final."""
    values: JSON = {"open": 0, "stopped": reason}
    if task["state"] == TaskState.RUNNING:
        values["state"] = step(TASKS, TaskState.RUNNING, TaskState.ENDING)
    await connection.execute(update(t.tasks).where(t.tasks.c.seq == task["seq"]).values(**values))
    waiting = select(t.sessions).where(
        t.sessions.c.task_seq == task["seq"], t.sessions.c.state == SessionState.QUEUED
    )
    for row in (await connection.execute(waiting)).mappings().all():
        await _mark(connection, row, task, never_ended(row, task, reason), now=now)


async def _close(
    connection: AsyncConnection, task: RowMapping, terms: Terms, *, now: float
) -> Closed:
    """Make a task final: sessions that never began are told as CANCELLED, its place is taken."""
    await _tell_never_begun(connection, task, terms, now=now)
    state = _final_state(task, terms)
    done_seq = await next_place(connection)
    await connection.execute(
        update(t.tasks)
        .where(t.tasks.c.seq == task["seq"])
        .values(
            state=step(TASKS, TaskState(task["state"]), state),
            ended_at=now,
            done_seq=done_seq,
            expanded=task["target"],
            ended=task["target"],
        )
    )
    await _call_back(connection, terms, task, [None], now=now)
    return Closed("final", (), task["task_id"], task["name"], task["owner"])


def _final_state(task: RowMapping, terms: Terms) -> TaskState:
    """The state of a task whose sessions have all ended."""
    if task["stopped"] not in (None, EARLY_STOP):
        return TaskState.CANCELLED
    enough = max(1.0, terms.min_completed_fraction * task["samples"])
    if task["stopped"] == EARLY_STOP:
        enough = min(enough, terms.early_stop_min_usable_sessions or enough)
    return TaskState.COMPLETED if task["usable"] >= enough else TaskState.FAILED


async def next_place(connection: AsyncConnection) -> int:
    """The next place in the order in which groups end; taken for good when this commits.

    The row stays locked until then, so no place becomes visible after a later one.
    """
    counter = t.numbers.c
    count = (
        update(t.numbers)
        .where(counter.name == "done_seq")
        .values(value=counter.value + 1)
        .returning(counter.value)
    )
    place: int = (await connection.execute(count)).scalar_one()
    return place


async def _tell_never_begun(
    connection: AsyncConnection, task: RowMapping, terms: Terms, *, now: float
) -> None:
    rows: list[dict[str, Any]] = []
    # Read once: a task may have thousands of these.
    nobody: JSON = {"session_id": "", "attempt": 0, "sample_index": 0}
    ended = never_ended(nobody, task, task["stopped"])
    for index in range(task["expanded"], task["target"]):
        row = {
            "session_id": session_id(task["task_id"], index),
            "task_seq": task["seq"],
            "owner": task["owner"],
            "sample_index": index,
            "priority": task["priority"],
            "attempt": 0,
            "state": SessionState.CANCELLED,
            "not_before": 0.0,
            "ended_at": now,
            "usable": 0,
        }
        own = {name: row[name] for name in ("session_id", "sample_index")}
        rows.append(row | {"result": orjson.dumps(ended.result | own).decode()})
    if rows:
        await connection.execute(insert(t.sessions), rows)
        sessions = [row["session_id"] for row in rows]
        await _call_back(connection, terms, task, sessions, now=now)


def never_ended(
    session: RowMapping | JSON,
    task: RowMapping,
    reason: str,
    *,
    status: str = "CANCELLED",
    cause: Cause = Cause.CANCELLED,
) -> Ended:
    """The end of a session that no run brought to an end."""
    spec = orjson.loads(task["spec"])
    agent = spec["agent"]
    result = {
        "session_id": session["session_id"],
        "task_id": task["name"],
        "status": status,
        "timing": {},
        "node_id": None,
        "error": reason,
        "metadata": spec["metadata"],
        "reward": None,
        "sample_index": session["sample_index"],
        "cause": str(cause),
        "harness": agent["harness"] or agent["import_path"],
        "logs": {},
    }
    return Ended(
        session["session_id"], session["attempt"], status, cause, usable=False, result=result
    )


def delivery_id(task_id: str, session: str | None) -> str:
    """Stable: the same result has the same id in every try, and after a restart."""
    return hashlib.sha256(f"{task_id}\n{session or ''}".encode()).hexdigest()[:32]


async def _call_back(
    connection: AsyncConnection,
    terms: Terms,
    task: RowMapping,
    sessions: Sequence[str | None],
    *,
    now: float,
) -> None:
    """Have the ends of these sessions told, and that of the task for `None`."""
    if terms.callback_url is None:
        return
    rows = [
        {
            "delivery_id": delivery_id(task["task_id"], session),
            "task_seq": task["seq"],
            "owner": task["owner"],
            "session_id": session,
            "url": terms.callback_url,
            "receiver": receiver_of(terms.callback_url),
            "state": "pending",
            "tries": 0,
            "next_at": now,
            "made_at": now,
        }
        for session in sessions
    ]
    await connection.execute(insert(t.callbacks), rows)


async def _again(
    connection: AsyncConnection,
    session: RowMapping,
    why: str,
    error: str | None,
    *,
    now: float,
    not_before: float,
    node: str | None = None,
) -> None:
    told = {
        "attempt": session["attempt"],
        "run_id": run_id(session["session_id"], session["attempt"]),
        "why": why,
        "error": error,
        "node_id": node,
        "at": now,
    }
    await connection.execute(
        update(t.sessions)
        .where(t.sessions.c.session_id == session["session_id"])
        .values(
            state=step(SESSIONS, SessionState(session["state"]), SessionState.QUEUED),
            attempt=session["attempt"] + 1,
            not_before=not_before,
            leased_by=None,
            leased_until=None,
            earlier=orjson.dumps([*_earlier(session), told]).decode(),
        )
    )


def _stopped(session: RowMapping, task: RowMapping) -> str | None:
    """Why a session is not run again; `None` = it may be."""
    reason: str | None = session["stopped"] or task["stopped"]
    return reason


def failed_on(session: RowMapping) -> frozenset[str]:
    """The nodes on which earlier runs of a session failed by infrastructure."""
    nodes = (one.get("node_id") for one in _earlier(session) if one["why"] == "failed")
    return frozenset(node for node in nodes if node is not None)


def _earlier(session: RowMapping) -> list[JSON]:
    return orjson.loads(session["earlier"]) if session["earlier"] else []


async def _session(
    connection: AsyncConnection, session: str
) -> tuple[RowMapping, RowMapping] | None:
    """A session's row and its task's, the task's first locked where the database locks rows."""
    seq = select(t.sessions.c.task_seq).where(t.sessions.c.session_id == session)
    query = select(t.tasks).where(t.tasks.c.seq == seq.scalar_subquery()).with_for_update()
    task = (await connection.execute(query)).mappings().first()
    if task is None:
        return None
    own = select(t.sessions).where(t.sessions.c.session_id == session)
    return (await connection.execute(own)).mappings().one(), task


async def _task(connection: AsyncConnection, seq: int) -> RowMapping:
    return (await connection.execute(select(t.tasks).where(t.tasks.c.seq == seq))).mappings().one()


async def _running(connection: AsyncConnection, seq: int) -> tuple[str, ...]:
    query = select(t.sessions.c.session_id, t.sessions.c.attempt).where(
        t.sessions.c.task_seq == seq, t.sessions.c.state == SessionState.RUNNING
    )
    rows: Sequence[Any] = (await connection.execute(query)).all()
    return tuple(run_id(row.session_id, row.attempt) for row in rows)
