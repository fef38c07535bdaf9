"""Writes to the server's database: accepted tasks and each later step, one transaction each.

A session gets its row when a slot takes it, so a queue of a million samples has as many rows as it
has tasks. Callers pass the time, in Unix seconds.

Free slots are divided among owners by weight, then filled by priority (`FairShares`). An owner is
due as many slots as its weight says, of those of all owners with queued sessions; the owner
furthest below its share comes first. Fractions of a slot are kept as credit, so that an owner whose
share is below one slot gets one from time to time.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Delete,
    RowMapping,
    Select,
    Table,
    Update,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from bridle.errors import BridleError, ConfigError
from bridle.server import schemas as t
from bridle.server.finalize import ConflictError, Finalizer, claim_of
from bridle.server.queries import is_due
from bridle.server.schemas import (
    CALLBACK_TRANSITIONS,
    TASK_TRANSITIONS,
    CallbackState,
    Claim,
    EndedRun,
    FinalizeResult,
    RetentionLevel,
    Reward,
    SessionState,
    Submission,
    TaskState,
    session_id,
    step,
    task_key,
)
from bridle.server.storage import Database


class QuotaError(BridleError):
    """An owner has used up one of its quotas."""


class TaskStore:
    """Writes; each method is one transaction and raises `StateError` if it fails."""

    def __init__(self, database: Database, shares: FairShares | None = None) -> None:
        """`shares` divide slots among owners; `None` = evenly."""
        self.database = database
        self._shares = shares or FairShares()

    # ---- submission

    async def submit(
        self,
        submissions: Sequence[Submission],
        *,
        owner: str,
        now: float,
        tenant: bool = False,
        quota: int | None = None,
    ) -> list[bool]:
        """Accept all of `submissions`, or none; return whether each is new.

        A submission whose id has the same body already is accepted and not new. A `tenant` has its
        own ids; other owners share theirs. Raises `ConflictError` if an id has another body,
        `QuotaError` if `owner` would have more than `quota` samples queued, `ConfigError` if these
        alone are more.
        """
        rows = [_row(one, owner, now, tenant=tenant) for one in submissions]
        try:
            return await self._submit(rows, owner, quota)
        except IntegrityError:
            # Another server inserted one of them after our query.
            return await self._submit(rows, owner, quota)

    async def _submit(
        self, rows: list[dict[str, Any]], owner: str, quota: int | None
    ) -> list[bool]:
        keys, names = [row["task_id"] for row in rows], [row["name"] for row in rows]
        tasks = t.tasks.c
        async with self.database.write() as connection:
            # By name too: the owner may have been an operator, or have submitted before tenants.
            own = (tasks.owner == owner) & tasks.name.in_(names)
            known = select(tasks.name, tasks.digest).where(tasks.task_id.in_(keys) | own)
            digests = {one.name: one.digest for one in await connection.execute(known)}
            fresh: list[bool] = []
            inserted: list[dict[str, Any]] = []
            version = await _number(connection, "policy_version")
            for row in rows:
                taken = digests.get(row["name"])
                if taken is not None and taken != row["digest"]:
                    raise ConflictError(
                        f"task_id {row['name']!r} was submitted before with another body; give "
                        "the new task its own id"
                    )
                fresh.append(taken is None)
                if taken is None:
                    digests[row["name"]] = row["digest"]
                    inserted.append(row | {"version": version})
            if inserted:
                if quota is not None:
                    wanted = sum(row["target"] for row in inserted)
                    await _check_quota(connection, owner, quota, wanted)
                await connection.execute(insert(t.tasks), inserted)
        return fresh

    async def reserve(self, task_id: str, *, owner: str, now: float, tenant: bool = False) -> None:
        """Reserve a task id by storing a cancelled task without sessions; nothing if the id is
        taken.
        """
        nothing = Submission(task_id=task_id, instruction="cancelled before it was submitted")
        row = _row(nothing, owner, now, tenant=tenant)
        row |= {"digest": "", "state": TaskState.CANCELLED, "open": 0}
        row |= {"samples": 0, "target": 0, "ended_at": now, "acked_at": now, "stopped": "cancelled"}
        async with self.database.write() as connection:
            taken = select(t.tasks.c.seq).where(t.tasks.c.task_id == row["task_id"])
            if (await connection.execute(taken)).first() is None:
                row["done_seq"] = await Finalizer(connection, now).next_place()
                row["version"] = await _number(connection, "policy_version")
                await connection.execute(insert(t.tasks).values(row))

    # ---- claims and leases

    async def claim(
        self, limits: ClaimLimits, *, owner: str, now: float, lease_s: float
    ) -> list[Claim]:
        """Lease up to `limits.slots` queued sessions to the server `owner`; none while servers are
        paused.

        The slots are divided among the tasks' owners. Of each owner, sessions to be run again come
        first, then new ones, by priority and then in the order of submission.
        """
        async with self.database.write() as connection:
            if await _number(connection, "paused", locked=True):
                return []
            version = await _number(connection, "policy_version")
            lease = {
                "state": SessionState.RUNNING,
                "leased_by": owner,
                "leased_until": now + lease_s,
                "started_at": now,
                "version_started": version,
            }
            return await _Claims(connection, lease, now).claim(limits, self._shares)

    async def next_due(self) -> float | None:
        """Return when the first queued session may start; `None` = none is queued, or servers are
        paused.
        """
        query = select(func.min(t.sessions.c.not_before)).where(
            t.sessions.c.state == SessionState.QUEUED
        )
        async with self.database.read() as connection:
            if await _number(connection, "paused"):
                return None
            due: float | None = (await connection.execute(query)).scalar_one()
        return due

    async def renew(self, *, owner: str, until: float) -> None:
        """Extend the leases of all running sessions that the server `owner` holds to `until`."""
        rows = update(t.sessions).where(
            t.sessions.c.state == SessionState.RUNNING, t.sessions.c.leased_by == owner
        )
        await self._write(rows.values(leased_until=until))

    async def take_over(
        self, dead: Sequence[str], *, owner: str, now: float, lease_s: float
    ) -> list[Claim]:
        """Lease the running sessions of the dead servers `dead` to `owner`, which may be one of
        them.
        """
        s = t.sessions.c
        theirs = _SESSIONS.where(s.state == SessionState.RUNNING, s.leased_by.in_(dead))
        lease = {"leased_by": owner, "leased_until": now + lease_s}
        async with self.database.write() as connection:
            return await _leased(connection, theirs, lease)

    # ---- ends

    @asynccontextmanager
    async def _finalizing(self, now: float) -> AsyncIterator[Finalizer]:
        async with self.database.write() as connection:
            yield Finalizer(connection, now)

    async def finish(self, ended: EndedRun, *, owner: str, now: float) -> FinalizeResult:
        """Store the end of a run whose lease `owner` holds, or queue its session for
        another run.
        """
        async with self._finalizing(now) as finalizer:
            return await finalizer.finish(ended, owner=owner)

    async def put_back(
        self, session: str, attempt: int, *, owner: str, why: str, now: float
    ) -> FinalizeResult:
        """Queue a session again; `why` says whether its run was `interrupted` or `stopped`."""
        async with self._finalizing(now) as finalizer:
            return await finalizer.put_back(session, attempt, owner=owner, why=why)

    async def stop_task(self, task_id: str, reason: str, *, now: float) -> FinalizeResult | None:
        """Stop a task: queued sessions end now; the runs to cancel are in the result's `run_ids`.

        `None` = there is no such task.
        """
        async with self._finalizing(now) as finalizer:
            return await finalizer.stop_task(task_id, reason)

    async def stop_session(self, session: str, reason: str, *, now: float) -> FinalizeResult:
        """End a queued session; the run of a running one, to be cancelled, is in the result's
        `run_ids`.
        """
        async with self._finalizing(now) as finalizer:
            return await finalizer.stop_session(session, reason)

    async def give_reward(self, session: str, given: Reward, *, now: float) -> FinalizeResult:
        """Append a reward to an ended session; the last one counts."""
        async with self._finalizing(now) as finalizer:
            return await finalizer.give_reward(session, given)

    # ---- retention

    async def forget_files(self, task_seq: int) -> None:
        """Record in the database that the files of a group's sessions were removed."""
        rows = update(t.sessions).where(t.sessions.c.task_seq == task_seq)
        group = update(t.tasks).where(t.tasks.c.seq == task_seq)
        await self._write(rows.values(file=None), group.values(kept=RetentionLevel.ROWS))

    async def forget_rows(self, task_seq: int) -> None:
        """Delete a group's sessions and callbacks and its task's JSON."""
        group = update(t.tasks).where(t.tasks.c.seq == task_seq)
        await self._write(
            *(
                delete(table).where(table.c.task_seq == task_seq)
                for table in (t.sessions, t.callbacks)
            ),
            group.values(kept=RetentionLevel.NAME, spec=""),
        )

    async def ack_abandoned(self, *, before: float, now: float) -> None:
        """Acknowledge groups that ended `before` and that nobody acknowledged."""
        tasks = t.tasks.c
        rows = update(t.tasks).where(tasks.acked_at.is_(None), tasks.ended_at < before)
        await self._write(rows.values(acked_at=now))

    # ---- acknowledgement

    async def ack(
        self,
        *,
        cursor: int | None,
        task_ids: Sequence[str],
        now: float,
        tenant: str | None = None,
    ) -> int:
        """Acknowledge groups by task ids or up to a cursor; return how many were not acknowledged
        before.

        With a `tenant`, only its groups, and `task_ids` are its own names.
        """
        tasks = t.tasks.c
        names = tasks.task_id if tenant is None else tasks.name
        wanted = names.in_(task_ids) | (tasks.done_seq <= (cursor or 0))
        row = update(t.tasks).where(wanted, tasks.done_seq.is_not(None), tasks.acked_at.is_(None))
        if tenant is not None:
            row = row.where(tasks.owner == tenant)
        return await self._write(row.values(acked_at=now))

    # ---- callbacks

    async def claim_callbacks(
        self, delivery_ids: Sequence[str], *, owner: str, now: float, until: float
    ) -> set[str]:
        """Lease those of these callbacks that are due to the server `owner`; return their ids."""
        c = t.callbacks.c
        row = (
            update(t.callbacks)
            .where(c.delivery_id.in_(delivery_ids), is_due(now))
            .values(sent_by=owner, next_at=until)
            .returning(c.delivery_id)
        )
        async with self.database.write() as connection:
            return set((await connection.execute(row)).scalars())

    async def release_callbacks(self, dead: Sequence[str], *, now: float) -> None:
        """Make the callbacks that the dead servers `dead` were sending due now."""
        c = t.callbacks.c
        row = update(t.callbacks).where(c.state == CallbackState.PENDING, c.sent_by.in_(dead))
        await self._write(row.values(sent_by=None, next_at=now))

    async def record_attempt(
        self,
        delivery_id: str,
        *,
        tries: int,
        fault: str | None,
        dead: bool,
        now: float,
        next_at: float,
    ) -> None:
        """Store the outcome of an attempt to send a callback; `fault` `None` = it was
        acknowledged.
        """
        after = CallbackState.PENDING
        if fault is None or dead:
            after = CallbackState.DELIVERED if fault is None else CallbackState.DEAD
            step(CALLBACK_TRANSITIONS, CallbackState.PENDING, after)
        c = t.callbacks.c
        row = update(t.callbacks).where(
            c.delivery_id == delivery_id, c.state == CallbackState.PENDING
        )
        values = {
            "state": after,
            "tries": tries,
            "error": fault,
            "next_at": next_at,
            "sent_by": None,
        }
        if after is not CallbackState.PENDING:
            values["ended_at"] = now
        await self._write(row.values(**values))

    async def replay(self, delivery_id: str | None, *, now: float) -> int:
        """Make a dead callback due again (`None` = all dead ones); return how many."""
        c = t.callbacks.c
        row = update(t.callbacks).where(c.state == CallbackState.DEAD)
        if delivery_id is not None:
            row = row.where(c.delivery_id == delivery_id)
        after = step(CALLBACK_TRANSITIONS, CallbackState.DEAD, CallbackState.PENDING)
        values = {"state": after, "tries": 0, "next_at": now, "made_at": now, "ended_at": None}
        return await self._write(row.values(**values))

    # ---- numbers

    async def number(self, name: str) -> int:
        """Return the stored number `name` (such as `policy_version` or `paused`), common to all
        servers.
        """
        async with self.database.read() as connection:
            return await _number(connection, name)

    async def check(self) -> None:
        """Raise `StateError` if a write to the database would fail now."""
        await self.database.check_room()
        same = update(t.numbers).where(t.numbers.c.name == "paused").values(value=t.numbers.c.value)
        await self._write(same)

    async def set_number(self, name: str, value: int) -> None:
        """Store the number `name` (such as `policy_version` or `paused`), common to all servers."""
        row = update(t.numbers).where(t.numbers.c.name == name)
        await self._write(row.values(value=value))

    async def _write(self, *statements: Update | Delete) -> int:
        """Execute statements in one transaction; return how many rows the last one changed."""
        async with self.database.write() as connection:
            for statement in statements:
                result = await connection.execute(statement)
        return result.rowcount


def _row(submission: Submission, owner: str, now: float, *, tenant: bool) -> dict[str, Any]:
    task, terms = submission.split()
    # The default is left out: digests from before the field was there stay the same.
    unsaid = {"hand_out"} if terms.hand_out else None
    spec, agreed = task.model_dump_json(), terms.model_dump_json(exclude=unsaid)
    return {
        "task_id": task_key(task.task_id, owner if tenant else None),
        "name": task.task_id,
        "digest": hashlib.sha256(f"{spec}\n{agreed}".encode()).hexdigest(),
        "spec": spec,
        "terms": agreed,
        "owner": owner,
        "priority": terms.dispatch_priority,
        "state": TaskState.QUEUED,
        "open": 1,
        "samples": task.num_samples,
        "target": task.num_samples,
        "expanded": 0,
        "ended": 0,
        "usable": 0,
        "submitted_at": now,
    }


async def _number(connection: AsyncConnection, name: str, *, locked: bool = False) -> int:
    """Return the number `name`; `locked` keeps it as it is until the transaction ends."""
    query = select(t.numbers.c.value).where(t.numbers.c.name == name)
    if locked:
        query = query.with_for_update(read=True)
    value: int = (await connection.execute(query)).scalar_one()
    return value


async def _check_quota(connection: AsyncConnection, owner: str, quota: int, wanted: int) -> None:
    tasks = t.tasks.c
    query = select(func.coalesce(func.sum(tasks.target - tasks.expanded), 0)).where(
        tasks.open == 1, tasks.owner == owner
    )
    has = (await connection.execute(query)).scalar_one()
    if wanted > quota:
        raise ConfigError(
            f"tasks: {wanted} samples were submitted at once; owner {owner!r} may have {quota} "
            "queued (max_queued_samples)"
        )
    if has + wanted > quota:
        raise QuotaError(
            f"owner {owner!r} may have {quota} samples queued (max_queued_samples) and has {has}; "
            f"{wanted} more do not fit"
        )


class FairShares:
    """Division of free slots among owners, with credit for those below their share."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights` of owners; any other has 1."""
        self._weights = weights or {}
        self._credits: dict[str, float] = {}
        """In slots, from -1 to 1."""
        self._turns: dict[str, int] = {}
        """Turn in which an owner got its last slot."""

    def divide(
        self, slots: int, waiting: Collection[str], running: Mapping[str, int]
    ) -> dict[str, int]:
        """Return how many of the free slots each owner in `waiting` gets, given its `running`
        sessions.
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
        """Update each owner's credit after the sessions in `started` were started."""
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
class ClaimLimits:
    """Limits on the sessions that may be started now."""

    slots: int
    """Sessions."""
    groups: int | None = None
    """Groups that are not started yet, of all owners; `None` = any number."""
    limits: Sequence[tuple[int, Mapping[str, int]]] = ()
    """Groups that one owner may have, and how many each has."""

    def of(self, owner: str, slots: int, begun: Counter[str]) -> ClaimLimits:
        """Return the limits for one owner's next claim, after the groups in `begun` have
        started.
        """
        left = [limit - had.get(owner, 0) - begun[owner] for limit, had in self.limits]
        left += [] if self.groups is None else [self.groups - begun.total()]
        return ClaimLimits(slots, max(0, min(left)) if left else None)


class _Claims:
    """Claims of one transaction: each session gets the `lease`, which are values of its row."""

    def __init__(self, connection: AsyncConnection, lease: dict[str, Any], now: float) -> None:
        self._connection = connection
        self._lease = lease
        self._now = now

    async def claim(self, limits: ClaimLimits, shares: FairShares) -> list[Claim]:
        """Lease sessions; see `TaskStore.claim`."""
        waiting = await self._waiting()
        running = await self._running() if len(waiting) > 1 else Counter[str]()
        served, begun, claims = set(waiting), Counter[str](), list[Claim]()
        while served and len(claims) < limits.slots:
            for owner, slots in shares.divide(limits.slots - len(claims), served, running).items():
                found = await self._claim_again(owner, slots)
                own = limits.of(owner, slots - len(found), begun)
                new = await self._claim_new(owner, own)
                begun[owner] += len({one.task_id for one in new if one.sample_index == 0})
                running[owner] += len(found) + len(new)
                claims += found + new
                if len(found) + len(new) < slots:
                    served.discard(owner)
        started = Counter(one.owner for one in claims)
        shares.started(served | set(started), started)
        return claims

    async def _waiting(self) -> list[str]:
        """Return the owners with queued sessions; costs one index look-up for each."""
        tasks, sessions = t.tasks.c, t.sessions.c
        new = _owners(t.tasks, tasks.open == 1, "new")
        again = _owners(t.sessions, sessions.state == SessionState.QUEUED, "again")
        return list((await self._connection.execute(new.union(again))).scalars())

    async def _running(self) -> Counter[str]:
        """Count the running sessions of each owner, on all servers."""
        s = t.sessions.c
        running = s.state == SessionState.RUNNING
        query = select(s.owner, func.count()).where(running).group_by(s.owner)
        return Counter(dict((await self._connection.execute(query)).all()))

    async def _claim_again(self, owner: str, slots: int) -> list[Claim]:
        s = t.sessions.c
        # A last run in the future: the clock was set back, or is another server's.
        due = or_(s.not_before <= self._now, s.started_at > self._now)
        query = _SESSIONS.where(s.state == SessionState.QUEUED, s.owner == owner, due)
        query = query.order_by(s.priority.desc(), s.task_seq, s.sample_index).limit(slots)
        return await _leased(self._connection, query, self._lease)

    async def _claim_new(self, owner: str, limits: ClaimLimits) -> list[Claim]:
        """Lease sessions that have no row yet."""
        tasks, slots, groups, claims = t.tasks.c, limits.slots, limits.groups, list[Claim]()
        while slots > 0:
            mine = [tasks.open == 1, tasks.owner == owner]
            if groups == 0:
                mine.append(tasks.state == TaskState.RUNNING)
            # One priority at a time, so that the index has the order.
            highest = select(func.max(tasks.priority)).where(*mine).scalar_subquery()
            query = select(t.tasks).where(*mine, tasks.priority == highest).order_by(tasks.seq)
            query = query.limit(slots).with_for_update(skip_locked=True)
            found = (await self._connection.execute(query)).mappings().all()
            if not found:
                break
            for task in found:
                if slots == 0 or (groups == 0 and task["state"] == TaskState.QUEUED):
                    break
                if groups is not None and task["state"] == TaskState.QUEUED:
                    groups -= 1
                count = min(slots, task["target"] - task["expanded"])
                slots -= count
                claims += await self._expand(task, count)
        return claims

    async def _expand(self, task: RowMapping, count: int) -> list[Claim]:
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
                **self._lease,
            }
            for claim in claims
        ]
        await self._connection.execute(insert(t.sessions), rows)
        await self._connection.execute(
            update(t.tasks)
            .where(t.tasks.c.seq == task["seq"])
            .values(
                state=step(TASK_TRANSITIONS, task["state"], TaskState.RUNNING),
                expanded=begin + count,
                open=int(begin + count < task["target"]),
                started_at=task["started_at"] or self._now,
            )
        )
        return claims


def _owners(table: Table, condition: ColumnElement[bool], name: str) -> Select[str]:
    """Return the distinct owners of such rows: the least, then the least above it, and so on."""
    owner = table.c.owner
    found = select(func.min(owner).label("owner")).where(condition).cte(name, recursive=True)
    beyond = select(func.min(owner)).where(condition, owner > found.c.owner)
    step_on = select(beyond.correlate(found).scalar_subquery()).where(found.c.owner.is_not(None))
    chain = found.union_all(step_on)
    return select(chain.c.owner).where(chain.c.owner.is_not(None))


_SESSIONS: Final = select(t.sessions, t.tasks.c.task_id, t.tasks.c.spec).join(t.tasks)
"""Sessions with what a claim has of their task."""


async def _leased(
    connection: AsyncConnection, query: Select[*tuple[Any, ...]], lease: Mapping[str, object]
) -> list[Claim]:
    """Write the values of a lease into the rows of a query of `_SESSIONS` that are not locked."""
    locked = query.with_for_update(skip_locked=True)
    rows = (await connection.execute(locked)).mappings().all()
    if ids := [row["session_id"] for row in rows]:
        sessions = update(t.sessions).where(t.sessions.c.session_id.in_(ids))
        await connection.execute(sessions.values(**lease))
    return [claim_of(row, row) for row in rows]
