"""Sessions are claimed: free run slots are divided among owners by weight, then filled by priority.

An owner is due as many slots as its weight says, of those that the owners with waiting sessions
have; the owner that is furthest below its share comes first. A fraction of a slot is kept as
credit, so an owner whose share is less than one slot gets one from time to time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Select, Table, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from bridle.server import closing
from bridle.server import tables as t
from bridle.server.states import SESSIONS, TASKS, Claim, SessionState, TaskState, session_id, step


class Shares:
    """Chooses owners for free slots, and remembers who got less than its share."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights` of owners; any other has 1."""
        self._weights = weights or {}
        self._credits: dict[str, float] = {}
        """In slots, from -1 to 1."""
        self._turns: dict[str, int] = {}
        """When an owner got its last slot."""

    def divide(
        self, slots: int, waiting: Collection[str], running: Mapping[str, int]
    ) -> dict[str, int]:
        """Return the free `slots` that each owner with `waiting` sessions may take, given its
        `running` ones.
        """
        due = self._due(slots + sum(running.get(owner, 0) for owner in waiting), waiting)
        owners, given = sorted(waiting), Counter[str]()

        def short(owner: str) -> tuple[float, int, int]:
            has = running.get(owner, 0) + given[owner]
            below = due[owner] + self._credits.get(owner, 0.0) - has
            return round(below, 6), -given[owner], -self._turns.get(owner, 0)

        for _ in range(slots if owners else 0):
            given[max(owners, key=short)] += 1
        return dict(given)

    def started(self, waiting: Collection[str], started: Mapping[str, int]) -> None:
        """So many sessions of the owners that had `waiting` ones have started."""
        due = self._due(sum(started.values()), waiting)
        self._credits = {
            owner: max(-1.0, min(1.0, self._credits.get(owner, 0.0) + much - started.get(owner, 0)))
            for owner, much in due.items()
        }
        turn = max(self._turns.values(), default=0) + 1
        self._turns = {owner: self._turns.get(owner, 0) for owner in waiting}
        self._turns |= dict.fromkeys(started, turn)

    def _due(self, slots: int, owners: Collection[str]) -> dict[str, float]:
        weights = {owner: self._weights.get(owner, 1.0) for owner in owners}
        whole = sum(weights.values())
        return {owner: slots * weight / whole for owner, weight in weights.items()}


@dataclass(frozen=True, slots=True)
class Room:
    """Numbers of sessions that may be started."""

    slots: int
    """Sessions."""
    groups: int | None = None
    """Groups that are not started yet, of all owners; `None` = any number."""
    limits: Sequence[tuple[int, Mapping[str, int]]] = ()
    """Groups that one owner may have, and how many each has."""

    def of(self, owner: str, slots: int, begun: Counter[str]) -> Room:
        """Room for one owner, after groups have `begun`."""
        left = [limit - had.get(owner, 0) - begun[owner] for limit, had in self.limits]
        left += [] if self.groups is None else [self.groups - begun.total()]
        return Room(slots, max(0, min(left)) if left else None)


async def claim(
    connection: AsyncConnection, room: Room, lease: dict[str, Any], shares: Shares, *, now: float
) -> list[Claim]:
    """Lease sessions; as `State.claim`."""
    waiting = await _waiting(connection)
    running = await _running(connection) if len(waiting) > 1 else Counter[str]()
    served, begun, claims = set(waiting), Counter[str](), list[Claim]()
    while served and len(claims) < room.slots:
        for owner, slots in shares.divide(room.slots - len(claims), served, running).items():
            found = await _claim_again(connection, owner, slots, lease, now)
            own = room.of(owner, slots - len(found), begun)
            new = await _claim_new(connection, owner, own, lease, now)
            begun[owner] += len({one.task_id for one in new if one.sample_index == 0})
            running[owner] += len(found) + len(new)
            claims += found + new
            if len(found) + len(new) < slots:
                served.discard(owner)
    started = Counter(one.owner for one in claims)
    shares.started(served | set(started), started)
    return claims


async def _waiting(connection: AsyncConnection) -> list[str]:
    """The owners with sessions to be started or run again; costs a look at an index for each."""
    tasks, sessions = t.tasks.c, t.sessions.c
    new = _owners(t.tasks, tasks.open == 1, "new")
    again = _owners(t.sessions, sessions.state == SessionState.QUEUED, "again")
    return list((await connection.execute(new.union(again))).scalars())


def _owners(table: Table, condition: ColumnElement[bool], name: str) -> Select[str]:
    """The distinct owners of such rows: the least, then the least beyond it, and so on."""
    owner = table.c.owner
    found = select(func.min(owner).label("owner")).where(condition).cte(name, recursive=True)
    beyond = select(func.min(owner)).where(condition, owner > found.c.owner)
    step_on = select(beyond.correlate(found).scalar_subquery()).where(found.c.owner.is_not(None))
    chain = found.union_all(step_on)
    return select(chain.c.owner).where(chain.c.owner.is_not(None))


async def _running(connection: AsyncConnection) -> Counter[str]:
    """Count the running sessions of each owner, on all servers."""
    s = t.sessions.c
    query = select(s.owner, func.count()).where(s.state == SessionState.RUNNING).group_by(s.owner)
    return Counter(dict((await connection.execute(query)).all()))


async def _claim_again(
    connection: AsyncConnection, owner: str, slots: int, lease: dict[str, Any], now: float
) -> list[Claim]:
    s = t.sessions.c
    # A last run that began in the future: the clock has been set back, or is another server's.
    due = or_(s.not_before <= now, s.started_at > now)
    query = (
        select(t.sessions, t.tasks.c.task_id, t.tasks.c.spec)
        .join(t.tasks)
        .where(s.state == SessionState.QUEUED, s.owner == owner, due)
        .order_by(s.priority.desc(), s.task_seq, s.sample_index)
        .limit(slots)
        .with_for_update(skip_locked=True)
    )
    rows = (await connection.execute(query)).mappings().all()
    step(SESSIONS, SessionState.QUEUED, lease["state"])
    await update_all(connection, rows, **lease)
    return [claim_of(row) for row in rows]


async def _claim_new(
    connection: AsyncConnection, owner: str, room: Room, lease: dict[str, Any], now: float
) -> list[Claim]:
    """Expand tasks into sessions that run at once."""
    tasks, slots, groups, claims = t.tasks.c, room.slots, room.groups, list[Claim]()
    while slots > 0:
        mine = [tasks.open == 1, tasks.owner == owner]
        if groups == 0:
            mine.append(tasks.state == TaskState.RUNNING)
        # One priority at a time, so that the index has the order.
        highest = select(func.max(tasks.priority)).where(*mine).scalar_subquery()
        query = select(t.tasks).where(*mine, tasks.priority == highest).order_by(tasks.seq)
        query = query.limit(slots).with_for_update(skip_locked=True)
        found = (await connection.execute(query)).mappings().all()
        if not found:
            break
        for task in found:
            if slots == 0 or (groups == 0 and task["state"] == TaskState.QUEUED):
                break
            if groups is not None and task["state"] == TaskState.QUEUED:
                groups -= 1
            count = min(slots, task["target"] - task["expanded"])
            slots -= count
            claims += await _expand(connection, task, count, lease, now)
    return claims


async def _expand(
    connection: AsyncConnection, task: RowMapping, count: int, lease: dict[str, Any], now: float
) -> list[Claim]:
    begin = task["expanded"]
    claims = [
        Claim(
            session_id(task["task_id"], index),
            task["task_id"],
            index,
            1,
            task["spec"],
            owner=task["owner"],
        )
        for index in range(begin, begin + count)
    ]
    rows = [
        {
            "session_id": claim.session_id,
            "task_seq": task["seq"],
            "owner": task["owner"],
            "sample_index": claim.sample_index,
            "priority": task["priority"],
            "attempt": 1,
            "not_before": 0.0,
            "usable": 0,
            **lease,
        }
        for claim in claims
    ]
    await connection.execute(insert(t.sessions), rows)
    await connection.execute(
        update(t.tasks)
        .where(t.tasks.c.seq == task["seq"])
        .values(
            state=step(TASKS, TaskState(task["state"]), TaskState.RUNNING),
            expanded=begin + count,
            open=int(begin + count < task["target"]),
            started_at=task["started_at"] or now,
        )
    )
    return claims


async def update_all(
    connection: AsyncConnection, rows: Sequence[RowMapping], **values: object
) -> None:
    ids = [row["session_id"] for row in rows]
    if ids:
        query = update(t.sessions).where(t.sessions.c.session_id.in_(ids))
        await connection.execute(query.values(**values))


def claim_of(row: RowMapping) -> Claim:
    return Claim(
        row["session_id"],
        row["task_id"],
        row["sample_index"],
        row["attempt"],
        row["spec"],
        closing.failed_on(row),
        row["owner"],
    )
