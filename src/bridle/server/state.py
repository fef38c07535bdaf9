"""The state: what was accepted, and every step of it, each one transaction.

Sessions are rows only from the moment at which a slot takes them, so a queue of a million samples
is as many rows as it has tasks. Times are Unix seconds and are given by the caller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from bridle.errors import BridleError, ConfigError
from bridle.server import claiming, closing
from bridle.server import tables as t
from bridle.server.claiming import Room, Shares
from bridle.server.closing import ConflictError
from bridle.server.database import Database
from bridle.server.schemas import Reward, Submission
from bridle.server.states import (
    DELIVERIES,
    Claim,
    Closed,
    DeliveryState,
    Ended,
    Kept,
    SessionState,
    TaskState,
    step,
    task_key,
)
from bridle.server.views import is_due


class QuotaError(BridleError):
    """An owner has as many samples queued as it may have."""


class State:
    """Writes. Every method is one transaction and raises `StateError` if it could not be."""

    def __init__(self, database: Database, shares: Shares | None = None) -> None:
        """`shares` divide slots among owners; `None` = evenly."""
        self._database = database
        self._shares = shares or Shares()

    # ---- tasks come in

    async def submit(
        self,
        submissions: Sequence[Submission],
        *,
        owner: str,
        now: float,
        tenant: bool = False,
        quota: int | None = None,
    ) -> list[bool]:
        """Accept all of `submissions`, or none; whether each is new.

        A `tenant` has ids of his own; owners who are none share theirs. One whose id is taken by
        the same body is as good as accepted. Raises `ConflictError` if by another body,
        `QuotaError` if `owner` would have more than `quota` samples queued, `ConfigError` if these
        alone are more.
        """
        rows = [_row(one, owner, now, tenant=tenant) for one in submissions]
        try:
            return await self._submit(rows, owner, quota)
        except IntegrityError:
            # Another server accepted one of them between our look and our insert.
            return await self._submit(rows, owner, quota)

    async def _submit(
        self, rows: list[dict[str, Any]], owner: str, quota: int | None
    ) -> list[bool]:
        keys, names = [row["task_id"] for row in rows], [row["name"] for row in rows]
        tasks = t.tasks.c
        async with self._database.write() as connection:
            # By name too: the owner may have been an operator, or have submitted before tenants.
            his = (tasks.owner == owner) & tasks.name.in_(names)
            known = select(tasks.name, tasks.digest).where(tasks.task_id.in_(keys) | his)
            digests = {one.name: one.digest for one in await connection.execute(known)}
            fresh: list[bool] = []
            inserted: list[dict[str, Any]] = []
            version = await _number(connection, "policy_version")
            for row in rows:
                taken = digests.get(row["name"])
                if taken is not None and taken != row["digest"]:
                    raise ConflictError(f"task_id {row['name']!r} is taken by another body")
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

    async def bar(self, task_id: str, *, owner: str, now: float, tenant: bool = False) -> None:
        """Take an id by a cancelled task of no session; nothing changes if it is taken."""
        nothing = Submission(task_id=task_id, instruction="cancelled before it was submitted")
        row = _row(nothing, owner, now, tenant=tenant)
        row |= {"digest": "", "state": TaskState.CANCELLED, "open": 0}
        row |= {"samples": 0, "target": 0, "ended_at": now, "acked_at": now, "stopped": "cancelled"}
        async with self._database.write() as connection:
            taken = select(t.tasks.c.seq).where(t.tasks.c.task_id == row["task_id"])
            if (await connection.execute(taken)).first() is None:
                row["done_seq"] = await closing.next_place(connection)
                row["version"] = await _number(connection, "policy_version")
                await connection.execute(insert(t.tasks).values(row))

    # ---- sessions go out

    async def claim(self, room: Room, *, owner: str, now: float, lease_s: float) -> list[Claim]:
        """Lease up to `room.slots` sessions to the server `owner`.

        The slots are divided among the tasks' owners. Of each, sessions to be run again come first,
        then new ones, by priority and then in the order in which their tasks came. None is leased
        while the servers are paused.
        """
        async with self._database.write() as connection:
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
            return await claiming.claim(connection, room, lease, self._shares, now=now)

    async def next_due(self) -> float | None:
        """Time at which the first waiting session may start; `None` if none waits or paused."""
        query = select(func.min(t.sessions.c.not_before)).where(
            t.sessions.c.state == SessionState.QUEUED
        )
        async with self._database.read() as connection:
            if await _number(connection, "paused"):
                return None
            due: float | None = (await connection.execute(query)).scalar_one()
        return due

    async def renew(self, *, owner: str, until: float) -> None:
        """Keep all leases of `owner`."""
        rows = update(t.sessions).where(
            t.sessions.c.state == SessionState.RUNNING, t.sessions.c.leased_by == owner
        )
        async with self._database.write() as connection:
            await connection.execute(rows.values(leased_until=until))

    async def take_over(
        self, dead: Sequence[str], *, owner: str, now: float, lease_s: float
    ) -> list[Claim]:
        """Lease to `owner` what the servers `dead` were running; `owner` itself may be one."""
        s = t.sessions.c
        async with self._database.write() as connection:
            query = (
                select(t.sessions, t.tasks.c.task_id, t.tasks.c.spec)
                .join(t.tasks)
                .where(s.state == SessionState.RUNNING, s.leased_by.in_(dead))
                .with_for_update(skip_locked=True)
            )
            rows = (await connection.execute(query)).mappings().all()
            await claiming.update_all(connection, rows, leased_by=owner, leased_until=now + lease_s)
        return [claiming.claim_of(row) for row in rows]

    # ---- sessions come back

    async def finish(self, ended: Ended, *, owner: str, now: float) -> Closed:
        async with self._database.write() as connection:
            return await closing.finish(connection, ended, owner=owner, now=now)

    async def put_back(
        self, session: str, attempt: int, *, owner: str, why: str, now: float
    ) -> Closed:
        async with self._database.write() as connection:
            return await closing.put_back(
                connection, session, attempt, owner=owner, why=why, now=now
            )

    async def stop_task(self, task_id: str, reason: str, *, now: float) -> Closed | None:
        async with self._database.write() as connection:
            return await closing.stop_task(connection, task_id, reason, now=now)

    async def stop_session(self, session: str, reason: str, *, now: float) -> Closed:
        async with self._database.write() as connection:
            return await closing.stop_session(connection, session, reason, now=now)

    async def give_reward(self, session: str, given: Reward, *, now: float) -> Closed:
        async with self._database.write() as connection:
            return await closing.give_reward(connection, session, given, now=now)

    # ---- groups are forgotten

    async def forget_files(self, task_seq: int) -> None:
        """Note that the files of a group's sessions are not kept any more."""
        rows = update(t.sessions).where(t.sessions.c.task_seq == task_seq)
        group = update(t.tasks).where(t.tasks.c.seq == task_seq)
        async with self._database.write() as connection:
            await connection.execute(rows.values(file=None))
            await connection.execute(group.values(kept=Kept.ROWS))

    async def forget_rows(self, task_seq: int) -> None:
        """Remove a group's sessions and callbacks, and what its task asked for."""
        group = update(t.tasks).where(t.tasks.c.seq == task_seq)
        async with self._database.write() as connection:
            for table in (t.sessions, t.callbacks):
                await connection.execute(delete(table).where(table.c.task_seq == task_seq))
            await connection.execute(group.values(kept=Kept.NAME, spec=""))

    async def give_up_groups(self, *, before: float, now: float) -> None:
        """Count groups that ended `before` and were not acknowledged as acknowledged."""
        tasks = t.tasks.c
        rows = update(t.tasks).where(tasks.acked_at.is_(None), tasks.ended_at < before)
        async with self._database.write() as connection:
            await connection.execute(rows.values(acked_at=now))

    # ---- groups are taken

    async def ack(
        self,
        *,
        cursor: int | None,
        task_ids: Sequence[str],
        now: float,
        tenant: str | None = None,
    ) -> int:
        """Note that groups (of a `tenant`, under his names) have been dealt with; how many were
        not before.
        """
        tasks = t.tasks.c
        names = tasks.task_id if tenant is None else tasks.name
        wanted = names.in_(task_ids) | (tasks.done_seq <= (cursor or 0))
        row = update(t.tasks).where(wanted, tasks.done_seq.is_not(None), tasks.acked_at.is_(None))
        if tenant is not None:
            row = row.where(tasks.owner == tenant)
        async with self._database.write() as connection:
            return (await connection.execute(row.values(acked_at=now))).rowcount

    # ---- callbacks

    async def take_callbacks(
        self, delivery_ids: Sequence[str], *, owner: str, now: float, until: float
    ) -> set[str]:
        """Have `owner` alone try these callbacks, if they are due, until then; those it has got."""
        c = t.callbacks.c
        row = (
            update(t.callbacks)
            .where(c.delivery_id.in_(delivery_ids), is_due(now))
            .values(sent_by=owner, next_at=until)
            .returning(c.delivery_id)
        )
        async with self._database.write() as connection:
            return set((await connection.execute(row)).scalars())

    async def leave_callbacks(self, dead: Sequence[str], *, now: float) -> None:
        """Make the callbacks due that the servers `dead` were sending."""
        c = t.callbacks.c
        row = update(t.callbacks).where(c.state == DeliveryState.PENDING, c.sent_by.in_(dead))
        async with self._database.write() as connection:
            await connection.execute(row.values(sent_by=None, next_at=now))

    async def note_callback(
        self,
        delivery_id: str,
        *,
        tries: int,
        fault: str | None,
        dead: bool,
        now: float,
        next_at: float,
    ) -> None:
        """Write down what came of a try; `fault` `None` = it was acknowledged."""
        after = DeliveryState.PENDING
        if fault is None or dead:
            after = DeliveryState.DELIVERED if fault is None else DeliveryState.DEAD
            step(DELIVERIES, DeliveryState.PENDING, after)
        c = t.callbacks.c
        row = update(t.callbacks).where(
            c.delivery_id == delivery_id, c.state == DeliveryState.PENDING
        )
        values = {"state": after, "tries": tries, "error": fault, "next_at": next_at}
        values["sent_by"] = None
        if after is not DeliveryState.PENDING:
            values["ended_at"] = now
        async with self._database.write() as connection:
            await connection.execute(row.values(**values))

    async def replay(self, delivery_id: str | None, *, now: float) -> int:
        """Have a dead callback sent again (`None` = all dead ones); how many there were."""
        c = t.callbacks.c
        row = update(t.callbacks).where(c.state == DeliveryState.DEAD)
        if delivery_id is not None:
            row = row.where(c.delivery_id == delivery_id)
        after = step(DELIVERIES, DeliveryState.DEAD, DeliveryState.PENDING)
        values = {"state": after, "tries": 0, "next_at": now, "made_at": now, "ended_at": None}
        async with self._database.write() as connection:
            return (await connection.execute(row.values(**values))).rowcount

    # ---- numbers

    async def number(self, name: str) -> int:
        """A number of the server's own: see `tables.numbers`."""
        async with self._database.read() as connection:
            return await _number(connection, name)

    async def check(self) -> None:
        """Raise the `StateError` that a write would meet now."""
        await self._database.check_room()
        same = update(t.numbers).where(t.numbers.c.name == "paused").values(value=t.numbers.c.value)
        async with self._database.write() as connection:
            await connection.execute(same)

    async def set_number(self, name: str, value: int) -> None:
        row = update(t.numbers).where(t.numbers.c.name == name)
        async with self._database.write() as connection:
            await connection.execute(row.values(value=value))


def _row(submission: Submission, owner: str, now: float, *, tenant: bool) -> dict[str, Any]:
    task, terms = submission.split()
    spec, agreed = task.model_dump_json(), terms.model_dump_json()
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
    """The number `name`; if `locked`, nobody changes it before this transaction has ended."""
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
    limit = f"owner {owner!r} may have {quota} samples queued (max_queued_samples)"
    if wanted > quota:
        raise ConfigError(f"tasks: {wanted} samples at once; {limit}")
    if has + wanted > quota:
        raise QuotaError(f"{limit} and has {has}; {wanted} more do not fit")
