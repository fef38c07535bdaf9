"""Reads of the server's database, their rows as the JSON of the HTTP API, and sessions' results.

Each page is bounded and costs as much as its rows. Polar has no cancelled state: in its shapes a
cancelled session is ERROR and a cancelled task `failed`; `cause` has the reason.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson
from sqlalchemy import (
    ColumnElement,
    Executable,
    Label,
    RowMapping,
    Select,
    Table,
    and_,
    case,
    func,
    literal,
    or_,
    select,
    union_all,
)

from bridle.capture.records import Outcome
from bridle.errors import StoreError
from bridle.server import schemas as t
from bridle.server.schemas import (
    FINAL_TASKS,
    CallbackState,
    GroupOptions,
    GroupOrder,
    RetentionLevel,
    Row,
    SessionState,
    TaskState,
    run_id,
)
from bridle.server.storage import Database, TrajectoryFiles
from bridle.trajectory import with_outcome
from bridle.trajectory.result import packed_json, trajectory_json
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON

FARTHEST_S: Final = 1200.0
"""No callback waits longer than this for its next attempt."""

LAST_SAMPLE: Final = 2**31 - 1
"""The largest integer that PostgreSQL compares a sample's index with."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts by state."""

    tasks: dict[str, int]
    sessions: dict[str, int]
    """Only those that have started."""
    waiting: int
    """Sessions that have not started."""
    unacked: int
    """Groups that have ended and are not acknowledged."""
    callbacks: dict[str, int]


class Queries:
    """Reads; each method raises `StateError` if the database cannot be used.

    Those of `of(owner)` read only that owner's rows, and `task_id` is a task's id as the owner
    knows it; otherwise it is the task's key (`task_key`). Every row of a task has its `key`.
    """

    def __init__(self, database: Database, owner: str | None = None) -> None:
        self._database = database
        self._owner = owner

    def of(self, owner: str | None) -> Queries:
        """Return the same queries restricted to the tasks of one owner; `None` = of all owners."""
        return self if owner == self._owner else Queries(self._database, owner)

    @property
    def _task_id(self) -> Label[str]:
        tasks = t.tasks.c
        return (tasks.task_id if self._owner is None else tasks.name).label("task_id")

    @property
    def _tasks(self) -> Select[*tuple[Any, ...]]:
        rest = (column for column in t.tasks.c if column is not t.tasks.c.task_id)
        query = select(*rest, self._task_id, t.tasks.c.task_id.label("key"))
        return query if self._owner is None else query.where(t.tasks.c.owner == self._owner)

    def _with_task(self, table: Table) -> Select[*tuple[Any, ...]]:
        """Select the owner's sessions or callbacks with their task's ids and acknowledgement."""
        tasks = t.tasks.c
        more = self._task_id, tasks.task_id.label("key"), tasks.name, tasks.acked_at
        query = select(table, *more).join(t.tasks)
        return query if self._owner is None else query.where(table.c.owner == self._owner)

    async def task(self, task_id: str) -> RowMapping | None:
        """Return a task's row by its id (a tenant's own name for it); `None` = there is none."""
        known = t.tasks.c.task_id if self._owner is None else t.tasks.c.name
        return await self._first(self._tasks.where(known == task_id))

    async def tasks(
        self, *, after: int, limit: int, state: TaskState | None = None
    ) -> Sequence[RowMapping]:
        """Return tasks in the order of submission, after number `after`."""
        query = self._tasks.where(t.tasks.c.seq > after)
        if state is not None:
            query = query.where(t.tasks.c.state == state)
        return await self._all(query.order_by(t.tasks.c.seq).limit(limit))

    async def sessions(
        self, task_seq: int, *, after: int = -1, limit: int | None = None, final: bool = False
    ) -> Sequence[RowMapping]:
        """Return a task's sessions in the order of their samples, after sample `after`.

        With `final` only those that have ended; `limit` `None` = all.
        """
        s = t.sessions.c
        after = min(after, LAST_SAMPLE)
        query = select(t.sessions).where(s.task_seq == task_seq, s.sample_index > after)
        if final:
            query = query.where(s.ended_at.is_not(None))
        return await self._all(query.order_by(s.sample_index).limit(limit))

    async def newest(
        self, *, limit: int, offset: int = 0, state: SessionState | None = None
    ) -> Sequence[RowMapping]:
        """Return the rows of sessions that have started, those of the newest task first."""
        s = t.sessions.c
        query = self._with_task(t.sessions)
        if state is not None:
            query = query.where(s.state == state)
        query = query.order_by(s.task_seq.desc(), s.sample_index.desc())
        return await self._all(query.limit(limit).offset(offset))

    async def session(self, session_id: str) -> RowMapping | None:
        """Return a session's row, with its task's `task_id`, `key` and `name`."""
        query = self._with_task(t.sessions)
        return await self._first(query.where(t.sessions.c.session_id == session_id))

    async def groups(
        self, *, after: int, limit: int, order: GroupOrder = "done", acked: bool = False
    ) -> Sequence[RowMapping]:
        """Return the rows of final tasks; with `acked` also those acknowledged.

        `after` is the position in the order in which they ended (`done_seq`) or were submitted
        (`seq`).
        """
        tasks = t.tasks.c
        query = self._tasks.where(tasks.done_seq.is_not(None))
        if not acked:
            query = query.where(tasks.acked_at.is_(None))
        if order == "submitted":
            unended = select(func.min(tasks.seq)).where(tasks.done_seq.is_(None))
            if self._owner is not None:
                unended = unended.where(tasks.owner == self._owner)
            first = await self._number(unended)
            query = query.where(tasks.seq > after).order_by(tasks.seq)
            if first is not None:
                query = query.where(tasks.seq < first)
        elif order == "priority":
            query = query.where(tasks.done_seq > after)
            query = query.order_by(tasks.priority.desc(), tasks.done_seq)
        else:
            query = query.where(tasks.done_seq > after).order_by(tasks.done_seq)
        return await self._all(query.limit(limit))

    async def ended(self, task_ids: Sequence[str]) -> set[str]:
        """Return those of these tasks whose groups have ended."""
        tasks = t.tasks.c
        name = tasks.task_id if self._owner is None else tasks.name
        query = select(name).where(name.in_(task_ids), tasks.done_seq.is_not(None))
        if self._owner is not None:
            query = query.where(tasks.owner == self._owner)
        return {row[0] for row in await self._rows(query)}

    async def counts(self) -> Counts:
        """Return how many tasks, sessions and callbacks are in each state, in one query."""
        tasks, nothing = t.tasks.c, literal(0)
        waits = func.sum(case((tasks.open == 1, tasks.target - tasks.expanded), else_=0))
        is_unacked = tasks.acked_at.is_(None) & tasks.done_seq.is_not(None)
        unacked = func.sum(case((is_unacked, 1), else_=0))
        # One query, because each is a round trip.
        parts = [
            select(literal("tasks"), tasks.state, func.count(), waits, unacked),
            select(literal("sessions"), t.sessions.c.state, func.count(), nothing, nothing),
            select(literal("callbacks"), t.callbacks.c.state, func.count(), nothing, nothing),
        ]
        tables = (t.tasks, t.sessions, t.callbacks)
        if self._owner is not None:
            both = zip(parts, tables, strict=True)
            parts = [part.where(table.c.owner == self._owner) for part, table in both]
        both = zip(parts, tables, strict=True)
        query = union_all(*(part.group_by(table.c.state) for part, table in both))
        found: dict[str, dict[str, int]] = {"tasks": {}, "sessions": {}, "callbacks": {}}
        totals = [0, 0]
        for what, state, count, waiting, left in await self._rows(query):
            found[what][state] = count
            totals = [totals[0] + int(waiting), totals[1] + int(left)]
        return Counts(found["tasks"], found["sessions"], totals[0], totals[1], found["callbacks"])

    async def owners(self) -> dict[str, dict[str, int]]:
        """Return, by owner, how many samples are `waiting` to be started and how many sessions
        `running`.
        """
        tasks, s = t.tasks.c, t.sessions.c
        waits = func.sum(tasks.target - tasks.expanded)
        query = union_all(
            select(literal("waiting"), tasks.owner, waits)
            .where(tasks.open == 1)
            .group_by(tasks.owner),
            select(literal("running"), s.owner, func.count())
            .where(s.state == SessionState.RUNNING)
            .group_by(s.owner),
        )
        found: dict[str, dict[str, int]] = {}
        for what, owner, count in await self._rows(query):
            found.setdefault(owner, {"waiting": 0, "running": 0})[what] = int(count)
        return found

    async def inflight_groups(self) -> Counter[str]:
        """Return how many groups of each owner have started and not ended."""
        states = (TaskState.RUNNING, TaskState.ENDING)
        return await self._by_owner(t.tasks.c.state.in_(states))

    async def unacked_groups(self) -> Counter[str]:
        """Return how many groups of each owner have ended and are not acknowledged."""
        tasks = t.tasks.c
        return await self._by_owner(tasks.acked_at.is_(None) & tasks.done_seq.is_not(None))

    async def started_groups(self) -> int:
        """Return how many groups have started a session, ended ones included."""
        query = select(func.count()).where(t.tasks.c.started_at.is_not(None))
        return await self._number(query) or 0

    async def leases(self) -> dict[str, float]:
        """Return, by server, when the last of its leases on running sessions ends."""
        s = t.sessions.c
        query = select(s.leased_by, func.max(s.leased_until)).group_by(s.leased_by)
        rows = await self._rows(query.where(s.state == SessionState.RUNNING))
        return {owner: until for owner, until in rows if owner is not None}

    async def held_by(self, owner: str) -> dict[str, bool]:
        """Return the ids of the runs leased to the server `owner`, and whether each may
        continue.
        """
        s = t.sessions.c
        stopped = func.coalesce(s.stopped, t.tasks.c.stopped)
        query = select(s.session_id, s.attempt, stopped).join(t.tasks)
        query = query.where(s.state == SessionState.RUNNING, s.leased_by == owner)
        rows = await self._rows(query)
        return {run_id(session, attempt): reason is None for session, attempt, reason in rows}

    async def running_since(self, version: int) -> Sequence[RowMapping]:
        """Return running sessions whose run started under a policy older than `version`."""
        s = t.sessions.c
        query = select(t.sessions).where(
            s.state == SessionState.RUNNING, s.version_started < version
        )
        return await self._all(query)

    # ---- callbacks

    async def due_callbacks(
        self, *, now: float, limit: int, without: Sequence[str] = ()
    ) -> Sequence[RowMapping]:
        """Return due callbacks, oldest first, without those to the receivers `without`."""
        c = t.callbacks.c
        query = self._with_task(t.callbacks)
        query = query.where(is_due(now), c.receiver.not_in(without))
        return await self._all(query.order_by(c.next_at, c.seq).limit(limit))

    async def next_callback(self, *, without: Sequence[str] = ()) -> float | None:
        """Return when the next callback is due, not counting the receivers `without`; `None` = none
        waits.
        """
        c = t.callbacks.c
        query = select(func.min(c.next_at)).where(
            c.state == CallbackState.PENDING, c.receiver.not_in(without)
        )
        ((due,),) = await self._rows(query)
        return None if due is None else float(due)

    async def callbacks(
        self, *, after: int, limit: int, state: CallbackState | None = None
    ) -> Sequence[RowMapping]:
        """Return callbacks in the order of their creation, after number `after`."""
        query = self._with_task(t.callbacks).where(t.callbacks.c.seq > after)
        if state is not None:
            query = query.where(t.callbacks.c.state == state)
        return await self._all(query.order_by(t.callbacks.c.seq).limit(limit))

    # ---- retention

    async def removable(
        self, kept: RetentionLevel, *, before: float | None, limit: int
    ) -> Sequence[RowMapping]:
        """Return acknowledged groups of a retention level that have no pending callbacks, the first
        acknowledged first.

        They were acknowledged before `before`; `None` = at any time.
        """
        tasks, c = t.tasks.c, t.callbacks.c
        pending = select(c.seq).where(c.task_seq == tasks.seq, c.state == CallbackState.PENDING)
        query = select(tasks.seq, tasks.task_id).where(
            tasks.kept == kept, tasks.acked_at.is_not(None), ~pending.exists()
        )
        if before is not None:
            query = query.where(tasks.acked_at < before)
        return await self._all(query.order_by(tasks.acked_at, tasks.seq).limit(limit))

    async def kept_groups(self) -> int:
        """Return how many ended groups still have files."""
        tasks = t.tasks.c
        query = select(func.count()).where(
            tasks.kept == RetentionLevel.ALL, tasks.ended_at.is_not(None)
        )
        return await self._number(query) or 0

    async def file_bytes(self) -> int:
        """Return the size in bytes of all trajectories on disk."""
        query = select(func.sum(t.sessions.c.file_bytes)).where(t.sessions.c.file.is_not(None))
        return await self._number(query) or 0

    # ---- helpers

    async def _by_owner(self, condition: ColumnElement[bool]) -> Counter[str]:
        owner = t.tasks.c.owner
        query = select(owner, func.count()).where(condition).group_by(owner)
        return Counter(dict(await self._rows(query)))

    async def _number(self, query: Select[int | None]) -> int | None:
        ((value,),) = await self._rows(query)
        # PostgreSQL's sum of large integers is a decimal.
        return None if value is None else int(value)

    async def _rows(self, query: Executable) -> Sequence[Any]:
        async with self._database.read() as connection:
            return (await connection.execute(query)).all()

    async def _first(self, query: Select[*tuple[object, ...]]) -> RowMapping | None:
        async with self._database.read() as connection:
            return (await connection.execute(query)).mappings().first()

    async def _all(self, query: Select[*tuple[object, ...]]) -> Sequence[RowMapping]:
        async with self._database.read() as connection:
            return (await connection.execute(query)).mappings().all()


def is_due(now: float) -> ColumnElement[bool]:
    """Return the SQL condition that a callback is due.

    One whose time is impossibly far ahead is due, too: the clock was set back.
    """
    c = t.callbacks.c
    return and_(
        c.state == CallbackState.PENDING, or_(c.next_at <= now, c.next_at > now + FARTHEST_S)
    )


def is_final(task: Mapping[Any, Any]) -> bool:
    """Return whether the task in this row is final: all its sessions have ended."""
    return TaskState(task["state"]) in FINAL_TASKS


class ResultSource(Protocol):
    """The database and the files that results are read from; `Service` is one."""

    queries: Queries
    files: TrajectoryFiles


async def trajectory(source: ResultSource, session: Row) -> Trajectory | None:
    """Read a session's trajectory with its latest reward; `None` = it was removed or never
    existed.
    """
    if session["file"] is None:
        return None
    try:
        found = await source.files.read(session["file"])
        return await asyncio.to_thread(_with_reward, found, orjson.loads(session["result"]))
    except StoreError as error:
        row = await source.queries.session(session["session_id"])
        if row is None:
            raise
        if row["file"] is None:  # retention removed it meanwhile
            return None
        raise StoreError(
            f"the trajectory of session {row['session_id']!r} cannot be read; restore its file, or "
            f"acknowledge task {row['task_id']!r} to pass over its group: {error}"
        ) from error


def _with_reward(found: Trajectory, result: JSON) -> Trajectory:
    if not (scores := result.get("scores")):
        return found
    outcome = Outcome(
        found.session_id,
        result["status"],
        scores[-1]["at"],
        result["reward"],
        error=result["error"],
        trace_rewards=scores[-1]["trace_rewards"],
    )
    return with_outcome(found, outcome)


async def session_result(
    source: ResultSource, session: Row, *, polar: bool = False, packed: bool = False
) -> JSON:
    """Return a final session's result as JSON with its trajectory.

    With `packed`, arrays are bytes (for msgpack).
    """
    found = await trajectory(source, session)
    form = packed_json if packed else trajectory_json
    read = None if found is None else await asyncio.to_thread(form, found)
    return result_json(session, read, polar=polar)


async def task_status(source: ResultSource, task: Row, *, results: bool) -> JSON:
    """Return Polar's `TaskStatus`, with the results of ended sessions if `results`."""
    rows = await source.queries.sessions(task["seq"], final=True) if results else []
    ended = [await session_result(source, row, polar=True) for row in rows]
    paths = [f"{source.files.root}/{row['file']}" for row in rows if row["file"]]
    return polar_task(task, ended, paths)


def polar_status(task: Row) -> str:
    """Return a task's status as Polar has it: `running`, `completed` or `failed`."""
    state = TaskState(task["state"])
    if state not in FINAL_TASKS:
        return "running"
    return "completed" if state is TaskState.COMPLETED else "failed"


def polar_state(status: str) -> str:
    """Return the name that Polar's clients know for a session's status."""
    return {"CANCELLED": "ERROR", "QUEUED": "REGISTERED"}.get(status, status)


def polar_task(task: Row, results: list[JSON], paths: list[str]) -> JSON:
    """Return a task's row as Polar's `TaskStatus`, with Bridle's own fields added."""
    return {
        "task_id": task["task_id"],
        "status": polar_status(task),
        "results": results,
        "result_paths": paths,
        "total_sessions": task["target"],
        "completed_sessions": task["ended"],
        "state": task["state"],
        "usable_sessions": task["usable"],
        "stopped": task["stopped"],
    }


def result_json(session: Row, trajectory: JSON | None, *, polar: bool) -> JSON:
    """Return a final session's `SessionResult`; without a `trajectory` it has an empty one."""
    result: JSON = orjson.loads(session["result"])
    status = polar_state(result["status"]) if polar else result["status"]
    if trajectory is None:
        trajectory = {
            "status": result["status"],
            "metadata": {"removed": session["file_bytes"] is not None},
            "traces": [],
            "error": result["error"],
            "session_id": session["session_id"],
            "reward": result["reward"],
        }
    if polar:
        trajectory = trajectory | {"status": polar_state(trajectory["status"])}
    return result | {"status": status, "trajectory": trajectory, "attempt": session["attempt"]}


def session_json(session: Row, stage: str | None) -> JSON:
    """Return a session's row as JSON without its trajectory; `stage` is that of a running one."""
    result: JSON = {} if session["result"] is None else orjson.loads(session["result"])
    own = ("session_id", "sample_index", "attempt", "started_at", "ended_at")
    versions = ("version_started", "version_min", "version_max")
    known = ("cause", "error", "reward", "harness", "harness_version", "runtime", "contains")
    return {
        **{name: session[name] for name in (*own, *versions)},
        **{name: result.get(name) for name in known},
        "status": stage or session["state"],
        "usable": bool(session["usable"]),
        "scores": result.get("scores", []),
        "fork": (result.get("metadata") or {}).get("fork"),
        "timing": result.get("timing") or {},
        "artifacts": [path.split("/", 2)[-1] for path in (result.get("logs") or {}).values()],
        "has_trajectory": session["file"] is not None,
        "earlier": orjson.loads(session["earlier"]) if session["earlier"] else [],
    }


def task_json(task: Row) -> JSON:
    """Return a task's row as JSON: its state, its counts of sessions, its times and its group's
    options.
    """
    terms = GroupOptions.model_validate_json(task["terms"])
    names = (
        *("task_id", "seq", "state", "stopped", "priority", "samples", "owner"),
        *("submitted_at", "started_at", "ended_at", "acked_at"),
    )
    return {
        **{name: task[name] for name in names},
        "total_sessions": task["target"],
        "started_sessions": task["expanded"],
        "ended_sessions": task["ended"],
        "usable_sessions": task["usable"],
        "version_submitted": task["version"],
        "cursor": task["done_seq"],
        "terms": terms.model_dump(mode="json"),
    }


def group_json(task: Row, sessions: list[JSON], *, version: int) -> JSON:
    """Return an ended group as JSON: its sessions, those of them that cannot be trained
    (`missing`), and how many policy versions it lags behind `version`.
    """
    sampled = [one["version_min"] for one in sessions if one["version_min"] is not None]
    names = ("session_id", "sample_index", "status", "error", "cause")
    return task_json(task) | {
        "sessions": sessions,
        "missing": [{name: one[name] for name in names} for one in sessions if not one["usable"]],
        "version_lag": max(0, version - min(sampled)) if sampled else None,
    }


def callback_json(row: Row) -> JSON:
    """Return a callback's row as JSON, without its body."""
    names = (
        *("seq", "delivery_id", "task_id", "session_id", "url", "state", "tries", "next_at"),
        *("made_at", "ended_at", "error"),
    )
    return {name: row[name] for name in names}
