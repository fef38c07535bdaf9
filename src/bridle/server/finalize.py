"""Ends of runs, sessions and tasks; `TaskStore` makes each in a transaction of its own.

Only the run that holds a session's lease makes it final; later calls change nothing. The last
session's transaction also makes its task final, gives it its place in the order of
`GET /v1/groups`, and inserts the callbacks that are then due.
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
from bridle.node.results import Fault, blame, is_scored
from bridle.server import schemas as t
from bridle.server.schemas import (
    FINAL_SESSIONS,
    FINAL_TASKS,
    SESSION_TRANSITIONS,
    TASK_TRANSITIONS,
    Claim,
    EndedRun,
    FinalizeResult,
    GroupOptions,
    Reward,
    SessionState,
    TaskState,
    receiver_of,
    run_id,
    session_id,
    step,
)
from bridle.types import JSON, Cause, SessionStatus

EARLY_STOP = "early_stop"
"""`tasks.stopped` of a task with as many usable sessions as it needs."""

MOST_SCORES: Final = 1 << 20
"""Bytes of all rewards of a session, which are stored in its row."""

MAX_INTERRUPTIONS = 20
"""Runs of a session that may end with their server before the session fails."""


class ConflictError(BridleError):
    """The request contradicts the stored state, such as an id that another body has."""


class Finalizer:
    """The steps that end runs, sessions and tasks, in one transaction."""

    def __init__(self, connection: AsyncConnection, now: float) -> None:
        self._connection = connection
        self._now = now

    async def finish(self, ended: EndedRun, *, owner: str) -> FinalizeResult:
        """Store the end of a run whose lease `owner` holds, or queue its session for
        another run.
        """
        found = await self._leased(ended.session_id, ended.attempt, owner)
        if found is None:
            return FinalizeResult("lost")
        session, task = found
        terms = GroupOptions.model_validate_json(task["terms"])
        failed = sum(one["why"] == "failed" for one in _earlier(session))
        may_again = _stopped(session, task) is None and failed + 1 < terms.max_attempts
        blamed = blame(SessionStatus(ended.status), ended.cause)
        if blamed is Fault.INFRASTRUCTURE and may_again:
            not_before = self._now + terms.retry_backoff_s * 2**failed
            node = ended.result.get("node_id")
            await self._requeue(session, "failed", ended.error, not_before=not_before, node=node)
            return FinalizeResult("again")
        return await self._finalize(session, task, ended)

    async def put_back(self, session: str, attempt: int, *, owner: str, why: str) -> FinalizeResult:
        """Queue a session again; `why` says whether its run was `interrupted` or `stopped`."""
        found = await self._leased(session, attempt, owner)
        if found is None:
            return FinalizeResult("lost")
        row, task = found
        if (reason := _stopped(row, task)) is not None:
            return await self._end_without_run(row, task, reason)
        interrupted = sum(one["why"] == "interrupted" for one in _earlier(row))
        if why == "interrupted" and interrupted + 1 >= MAX_INTERRUPTIONS:
            error = (
                f"the session was interrupted {interrupted + 1} times: each time its server or its "
                "node was lost while it ran"
            )
            return await self._end_without_run(row, task, error, Cause.INFRASTRUCTURE)
        await self._requeue(row, why, f"the run was {why}", not_before=0.0)
        return FinalizeResult("again")

    async def stop_task(self, task_id: str, reason: str) -> FinalizeResult | None:
        """Stop a task: queued sessions end now; the runs to cancel are in the result's `run_ids`.

        `None` = there is no such task. A task that is final or stopped already does not change.
        """
        query = select(t.tasks).where(t.tasks.c.task_id == task_id).with_for_update()
        task = (await self._connection.execute(query)).mappings().first()
        if task is None:
            return None
        if TaskState(task["state"]) in FINAL_TASKS:
            return FinalizeResult("lost")
        if task["stopped"] is None:
            await self._stop(task, reason)
        result = await self._apply_counts(task["seq"])
        return replace(result, run_ids=await self._running(task["seq"]))

    async def stop_session(self, session: str, reason: str) -> FinalizeResult:
        """End a queued session; the run of a running one, to be cancelled, is in the result's
        `run_ids`.
        """
        found = await self._session(session)
        if found is None or found[0]["state"] not in (SessionState.QUEUED, SessionState.RUNNING):
            return FinalizeResult("lost")
        row, task = found
        if row["state"] == SessionState.QUEUED:
            return await self._end_without_run(row, task, reason)
        await self._update_session(session, stopped=reason)
        return FinalizeResult("lost", (run_id(session, row["attempt"]),))

    async def give_reward(self, session: str, given: Reward) -> FinalizeResult:
        """Append a reward to an ended session and update its task's counts; the last reward counts.

        A session whose evaluator failed becomes COMPLETED. Raises `ConflictError` for a session
        that has not ended, has nothing to score, or whose rewards take more than `MOST_SCORES`.
        """
        found = await self._session(session)
        if found is None:
            return FinalizeResult("lost")
        row, task = found
        result: JSON = orjson.loads(row["result"]) if row["result"] else {}
        cause = result.get("cause")
        if row["state"] not in FINAL_SESSIONS:
            raise ConflictError(
                f"session {session!r} is {row['state']} and has not ended: only ended sessions "
                "can be scored"
            )
        replied = row["version_max"] is not None
        ended = SessionStatus(row["state"]), None if cause is None else Cause(cause)
        if cause != Cause.EVALUATOR and not is_scored(*ended, replied=replied):
            raise ConflictError(
                f"session {session!r} has nothing to score: it ended as {row['state']} ({cause})"
            )
        if cause == Cause.EVALUATOR:
            result |= {"status": SessionState.COMPLETED, "cause": None, "error": None}
        scores = [*result.get("scores", ()), {"at": self._now, **given.model_dump(mode="json")}]
        if len(orjson.dumps(scores)) > MOST_SCORES and len(scores) > 1:
            raise ConflictError(
                f"the stored rewards of session {session!r} would take more than {MOST_SCORES} "
                "bytes, the limit"
            )
        result |= {"reward": given.reward, "scores": scores}
        state = step(SESSION_TRANSITIONS, row["state"], SessionState(result["status"]))
        usable = int(state is SessionState.COMPLETED or replied)
        text = orjson.dumps(result).decode()
        await self._update_session(session, state=state, usable=usable, result=text)
        seq, before = task["seq"], task["state"]
        await self._update_task(seq, usable=t.tasks.c.usable + usable - row["usable"])
        if before not in FINAL_TASKS:
            return await self._apply_counts(seq)
        task = await self._task(seq)
        after = _final_state(task, GroupOptions.model_validate_json(task["terms"]))
        await self._update_task(seq, state=step(TASK_TRANSITIONS, before, after))
        return FinalizeResult("final")

    async def _finalize(
        self, session: RowMapping, task: RowMapping, ended: EndedRun
    ) -> FinalizeResult:
        """Make a session final, and its task if it was the last one."""
        await self._mark(session, task, ended)
        return await self._apply_counts(task["seq"])

    async def _end_without_run(
        self, session: RowMapping, task: RowMapping, error: str, cause: Cause = Cause.CANCELLED
    ) -> FinalizeResult:
        return await self._finalize(
            session, task, without_run(claim_of(session, task), error, cause)
        )

    async def _mark(self, session: RowMapping, task: RowMapping, ended: EndedRun) -> None:
        """Store a session's end and its callback, and count it."""
        state = step(SESSION_TRANSITIONS, session["state"], SessionState(ended.status))
        await self._update_session(
            session["session_id"],
            state=state,
            leased_by=None,
            leased_until=None,
            ended_at=self._now,
            usable=int(ended.usable),
            result=orjson.dumps(ended.result).decode(),
            file=ended.file,
            file_bytes=ended.file_bytes,
            version_min=ended.version_min,
            version_max=ended.version_max,
        )
        terms = GroupOptions.model_validate_json(task["terms"])
        await self._insert_callbacks(terms, task, [session["session_id"]])
        counts = {"ended": t.tasks.c.ended + 1, "usable": t.tasks.c.usable + int(ended.usable)}
        await self._update_task(task["seq"], **counts)

    async def _apply_counts(self, seq: int) -> FinalizeResult:
        """Refill a task, stop it early, or end it, as its counts require."""
        task = await self._task(seq)
        terms = GroupOptions.model_validate_json(task["terms"])
        stops = False
        if task["stopped"] is None:
            wanted = terms.early_stop_min_usable_sessions
            stops = wanted is not None and task["usable"] >= wanted
            unusable = task["ended"] - task["usable"]
            target = task["samples"] + min(terms.max_refills, unusable)
            if stops:
                await self._stop(task, EARLY_STOP)
            elif target > task["target"]:
                await self._update_task(seq, target=target, open=1)
            task = await self._task(seq)
        if not task["open"] and task["ended"] == task["expanded"]:
            return await self._close(task, terms)
        return FinalizeResult("final", await self._running(seq) if stops else ())

    async def _stop(self, task: RowMapping, reason: str) -> None:
        """Start no further session of a task, and make its queued ones final."""
        values: JSON = {"open": 0, "stopped": reason}
        if task["state"] == TaskState.RUNNING:
            values["state"] = step(TASK_TRANSITIONS, TaskState.RUNNING, TaskState.ENDING)
        await self._update_task(task["seq"], **values)
        waiting = select(t.sessions).where(
            t.sessions.c.task_seq == task["seq"], t.sessions.c.state == SessionState.QUEUED
        )
        for row in (await self._connection.execute(waiting)).mappings().all():
            await self._mark(row, task, without_run(claim_of(row, task), reason))

    async def _close(self, task: RowMapping, terms: GroupOptions) -> FinalizeResult:
        """Make a task final, and its sessions that never started CANCELLED."""
        await self._cancel_unstarted(task, terms)
        state = _final_state(task, terms)
        done_seq = await self.next_place()
        await self._update_task(
            task["seq"],
            state=step(TASK_TRANSITIONS, task["state"], state),
            ended_at=self._now,
            done_seq=done_seq,
            acked_at=None if terms.hand_out else self._now,
            expanded=task["target"],
            ended=task["target"],
        )
        await self._insert_callbacks(terms, task, [None])
        return FinalizeResult("final", (), task["task_id"], task["name"], task["owner"])

    async def next_place(self) -> int:
        """Return the next number in the order in which groups end.

        The counter's row is locked until the commit, so no number becomes visible after a later
        one.
        """
        counter = t.numbers.c
        count = (
            update(t.numbers)
            .where(counter.name == "done_seq")
            .values(value=counter.value + 1)
            .returning(counter.value)
        )
        place: int = (await self._connection.execute(count)).scalar_one()
        return place

    async def _cancel_unstarted(self, task: RowMapping, terms: GroupOptions) -> None:
        rows: list[dict[str, Any]] = []
        # Parsed once: a task may have thousands of these.
        nobody = Claim("", task["task_id"], 0, 0, task["spec"])
        ended = without_run(nobody, task["stopped"])
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
                "ended_at": self._now,
                "usable": 0,
            }
            own = {name: row[name] for name in ("session_id", "sample_index")}
            rows.append(row | {"result": orjson.dumps(ended.result | own).decode()})
        if rows:
            await self._connection.execute(insert(t.sessions), rows)
            sessions = [row["session_id"] for row in rows]
            await self._insert_callbacks(terms, task, sessions)

    async def _insert_callbacks(
        self, terms: GroupOptions, task: RowMapping, sessions: Sequence[str | None]
    ) -> None:
        """Insert the callbacks of these sessions; `None` = the one of the task."""
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
                "next_at": self._now,
                "made_at": self._now,
            }
            for session in sessions
        ]
        await self._connection.execute(insert(t.callbacks), rows)

    async def _requeue(
        self,
        session: RowMapping,
        why: str,
        error: str | None,
        *,
        not_before: float,
        node: str | None = None,
    ) -> None:
        run = {
            "attempt": session["attempt"],
            "run_id": run_id(session["session_id"], session["attempt"]),
            "why": why,
            "error": error,
            "node_id": node,
            "at": self._now,
        }
        await self._update_session(
            session["session_id"],
            state=step(SESSION_TRANSITIONS, session["state"], SessionState.QUEUED),
            attempt=session["attempt"] + 1,
            not_before=not_before,
            leased_by=None,
            leased_until=None,
            earlier=orjson.dumps([*_earlier(session), run]).decode(),
        )

    async def _session(self, session: str) -> tuple[RowMapping, RowMapping] | None:
        """Return a session's row and its task's; locks the task's row first, to order writers."""
        seq = select(t.sessions.c.task_seq).where(t.sessions.c.session_id == session)
        query = select(t.tasks).where(t.tasks.c.seq == seq.scalar_subquery()).with_for_update()
        task = (await self._connection.execute(query)).mappings().first()
        if task is None:
            return None
        own = select(t.sessions).where(t.sessions.c.session_id == session)
        return (await self._connection.execute(own)).mappings().one(), task

    async def _leased(
        self, session: str, attempt: int, owner: str
    ) -> tuple[RowMapping, RowMapping] | None:
        """Return the rows of `_session` if `owner` holds the lease of this run, else `None`."""
        found = await self._session(session)
        held = (SessionState.RUNNING, attempt, owner)
        if (
            found is None
            or tuple(found[0][name] for name in ("state", "attempt", "leased_by")) != held
        ):
            return None
        return found

    async def _update_session(self, session: str, **values: object) -> None:
        row = update(t.sessions).where(t.sessions.c.session_id == session)
        await self._connection.execute(row.values(**values))

    async def _update_task(self, seq: int, **values: object) -> None:
        await self._connection.execute(update(t.tasks).where(t.tasks.c.seq == seq).values(**values))

    async def _task(self, seq: int) -> RowMapping:
        return (
            (await self._connection.execute(select(t.tasks).where(t.tasks.c.seq == seq)))
            .mappings()
            .one()
        )

    async def _running(self, seq: int) -> tuple[str, ...]:
        query = select(t.sessions.c.session_id, t.sessions.c.attempt).where(
            t.sessions.c.task_seq == seq, t.sessions.c.state == SessionState.RUNNING
        )
        rows: Sequence[Any] = (await self._connection.execute(query)).all()
        return tuple(run_id(row.session_id, row.attempt) for row in rows)


def _final_state(task: RowMapping, terms: GroupOptions) -> TaskState:
    """Return the state of a task whose sessions have all ended."""
    if task["stopped"] not in (None, EARLY_STOP):
        return TaskState.CANCELLED
    enough = max(1.0, terms.min_completed_fraction * task["samples"])
    if task["stopped"] == EARLY_STOP:
        enough = min(enough, terms.early_stop_min_usable_sessions or enough)
    return TaskState.COMPLETED if task["usable"] >= enough else TaskState.FAILED


def without_run(claim: Claim, error: str, cause: Cause | None = Cause.CANCELLED) -> EndedRun:
    """Return the result of a session that ended before it was run: CANCELLED, or ERROR with a
    cause.

    `None` as `cause` = the task cannot be run: the session is not tried again.
    """
    spec = orjson.loads(claim.spec)
    agent = spec["agent"]
    status = SessionStatus.CANCELLED if cause is Cause.CANCELLED else SessionStatus.ERROR
    result = {
        "session_id": claim.session_id,
        "task_id": spec["task_id"],
        "status": str(status),
        "timing": {},
        "node_id": None,
        "error": error,
        "metadata": spec["metadata"],
        "reward": None,
        "sample_index": claim.sample_index,
        "cause": str(cause or Cause.INFRASTRUCTURE),
        "harness": agent["harness"] or agent["import_path"],
        "logs": {},
    }
    return EndedRun(
        claim.session_id, claim.attempt, str(status), cause, usable=False, result=result
    )


def delivery_id(task_id: str, session: str | None) -> str:
    """Return the id of a result's callback, the same in every attempt and after a restart."""
    return hashlib.sha256(f"{task_id}\n{session or ''}".encode()).hexdigest()[:32]


def _stopped(session: RowMapping, task: RowMapping) -> str | None:
    """Return why a session is not run again; `None` = it may be."""
    reason: str | None = session["stopped"] or task["stopped"]
    return reason


def claim_of(session: RowMapping, task: RowMapping) -> Claim:
    """Return the claim (session, task, attempt) of a session that is leased to be run.

    It avoids nodes on which this session failed because of infrastructure.
    """
    nodes = (one.get("node_id") for one in _earlier(session) if one["why"] == "failed")
    return Claim(
        session["session_id"],
        task["task_id"],
        session["sample_index"],
        session["attempt"],
        task["spec"],
        frozenset(node for node in nodes if node is not None),
        session["owner"],
    )


def _earlier(session: RowMapping) -> list[JSON]:
    return orjson.loads(session["earlier"]) if session["earlier"] else []
