"""Groups from a rollout server: the trainer submits tasks, and takes groups as they end.

A group is a task of the server under a name that says all of it: `TRAINING.INDEX.ATTEMPT.TASK`. So
a trainer that comes back finds what it had begun, and submitting it twice does nothing. What was
taken is acknowledged only when a checkpoint has it (`kept`); until then the server keeps it and
hands it out again. After a death

- groups that a checkpoint has are acknowledged and not seen again;
- all others go on, or are handed out again, under the numbers that they had;
- what was sampled from weights that the checkpoint does not have, which nobody can have again, is
  ended and begun again: no update of the final weights saw it, so nothing is lost or doubled.

Groups of others on the same server are left alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bridle.client import AsyncClient, GroupResult
from bridle.config import Task
from bridle.training.groups import HeldOutEvaluation, TaskDraws, evaluation_of, first_error
from bridle.training.samples import Group
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON

EVALUATE_FIRST = 100
"""Priority of evaluations: an update waits for them."""


@dataclass(frozen=True, slots=True)
class Name:
    """Parsed name of a group on the server."""

    training: str
    index: int
    attempt: int
    task_id: str

    def __str__(self) -> str:
        return f"{self.training}.{self.index:06d}.{self.attempt}.{self.task_id}"

    @classmethod
    def of(cls, group_id: str, training: str) -> Name | None:
        """Read one of `training`'s names; `None` = it is none."""
        first, _, rest = group_id.partition(".")
        index, _, rest = rest.partition(".")
        attempt, _, task_id = rest.partition(".")
        if first != training or not (index.isdecimal() and attempt.isdecimal() and task_id):
            return None
        return cls(first, int(index), int(attempt), task_id)


class ServerGroups:
    """Groups of a server's sessions; `server_groups` opens one. Implements `GroupSource`."""

    def __init__(
        self,
        client: AsyncClient,
        draws: TaskDraws,
        held_out: Sequence[Task],
        *,
        training: str,
        version: int,
        cursor: JSON,
    ) -> None:
        self._client = client
        self._draws = draws
        self._held_out = held_out
        self._training = training
        self._version = version
        self._next: int = cursor.get("next", 0)
        self._again: list[tuple[int, str]] = [tuple(one) for one in cursor.get("open", ())]
        self._attempts: Counter[int] = Counter()
        self._open: dict[int, Name] = {}
        """Allowed and not taken."""
        self._known: dict[int, Name] = {}
        """Submitted by an earlier life, not yet allowed in this one."""
        self._early: dict[Name, Group] = {}
        """Handed out before it was allowed."""
        self._old: set[Name] = set()
        """Of an earlier life: perhaps sampled from weights that are lost."""
        self._taken: list[str] = []
        """Not acknowledged yet."""
        self._evaluating: dict[str, asyncio.Future[GroupResult]] = {}
        self._life = secrets.token_hex(3)
        self._evaluations = 0
        self._allowed = asyncio.Semaphore(0)
        self._ended: asyncio.Queue[Group] = asyncio.Queue()

    def allow(self, groups: int) -> None:
        for _ in range(groups):
            self._allowed.release()

    async def take(self) -> Group:
        group = await self._ended.get()
        self._taken.append(str(self._open.pop(group.index)))
        return group

    def cursor(self) -> JSON:
        mine = [(index, name.task_id) for index, name in self._open.items()]
        left = sorted([*mine, *self._again])
        return {"next": self._next, "open": [list(one) for one in left]}

    async def kept(self) -> None:
        taken, self._taken = self._taken, []
        if taken:
            await self._client.ack(task_ids=taken)

    async def evaluate(self) -> HeldOutEvaluation | None:
        if not self._held_out:
            return None
        self._evaluations += 1
        prefix = f"{self._training}.e{self._life}-{self._evaluations}."
        named = {f"{prefix}{task.task_id}": task for task in self._held_out}
        loop = asyncio.get_running_loop()
        waiting = {name: loop.create_future() for name in named}
        self._evaluating.update(waiting)
        tasks = [task.model_copy(update={"task_id": name}) for name, task in named.items()]
        await self._client.submit_many(tasks, dispatch_priority=EVALUATE_FIRST)
        groups = [await one for one in waiting.values()]
        await self._client.ack(task_ids=[*named])
        found = {
            named[group.task_id].task_id: [one.reward for one in group.results] for group in groups
        }
        return evaluation_of(self._held_out, found)

    # ---- what an earlier life left

    async def adopt(self) -> None:
        """Find what an earlier life had begun; end what nobody will take."""
        lost = await self._weights_are_lost()
        unwanted: list[str] = []
        async for task in self._client.tasks():
            if not str(task["task_id"]).startswith(f"{self._training}."):
                continue
            name = Name.of(task["task_id"], self._training)
            if name is not None:
                self._attempts[name.index] = max(self._attempts[name.index], name.attempt + 1)
            if task["acked_at"]:
                continue
            ended = task["cursor"] is not None
            if name is None or task["state"] == "cancelled" or not self._wants(name, lost, ended):
                unwanted.append(task["task_id"])
            else:
                self._known[name.index] = name
                if lost:
                    self._old.add(name)
        await self._drop(unwanted)

    def _wants(self, name: Name, lost: bool, ended: bool) -> bool:  # noqa: FBT001 - private
        """Return whether to train on a group of an earlier process that was not acknowledged."""
        begun = name.index >= self._next or (name.index, name.task_id) in self._again
        return begun and name.task_id in self._draws and (ended or not lost)

    async def _weights_are_lost(self) -> bool:
        """Return whether the server has had newer weights than those of the checkpoint."""
        return int((await self._client.policy())["version"] or 0) > self._version

    async def _drop(self, names: Sequence[str]) -> None:
        """End groups, and have none of them handed out."""
        if names:
            await self._client.cancel(*names)
            await self._client.ack(task_ids=names)

    async def end(self) -> None:
        """End what was begun and is not taken: the training is over."""
        await self._drop([str(name) for name in (*self._open.values(), *self._known.values())])

    # ---- while it runs

    async def feed(self) -> None:
        """Submit groups as they are allowed."""
        while True:
            await self._allowed.acquire()
            if self._again:
                index, task_id = self._again.pop(0)
            else:
                index, self._next = self._next, self._next + 1
                known = self._known.get(index)
                task_id = self._draws.draw(index).task_id if known is None else known.task_id
            await self._begin(index, task_id)

    async def _begin(self, index: int, task_id: str) -> None:
        name = self._known.pop(index, None)
        if name is not None:
            self._open[index] = name
            if (group := self._early.pop(name, None)) is not None:
                self._ended.put_nowait(group)
            return
        name = Name(self._training, index, self._attempts[index], task_id)
        self._attempts[index] += 1
        self._open[index] = name
        task = self._draws.named(task_id).model_copy(update={"task_id": str(name)})
        await self._client.submit(task)

    async def read(self) -> None:
        """Hand on what ends; raises `ServerError` when the server is gone for long."""
        async for group in self._client.groups(ack=False):
            waiting = self._evaluating.pop(group.task_id, None)
            if waiting is not None:
                waiting.set_result(group)
                continue
            name = Name.of(group.task_id, self._training)
            if name is not None:
                await self._hand_on(name, group)

    async def _hand_on(self, name: Name, group: GroupResult) -> None:
        sessions = tuple(one.trajectory for one in group.results)
        if name in self._old and _newest(sessions) > self._version:
            await self._client.ack(task_ids=[str(name)])
            if self._known.pop(name.index, None) is None:
                await self._begin(name.index, name.task_id)
        elif self._open.get(name.index) == name:
            self._ended.put_nowait(Group(name.index, name.task_id, sessions))
        elif self._known.get(name.index) == name:
            self._early[name] = Group(name.index, name.task_id, sessions)


def _newest(sessions: Sequence[Trajectory]) -> int:
    """The newest version of any token that was sampled; -1 = none is known."""
    versions_by_trace = [trace.versions for session in sessions for trace in session.traces]
    return max((int(versions.max()) for versions in versions_by_trace if len(versions)), default=-1)


@asynccontextmanager
async def server_groups(
    client: AsyncClient,
    draws: TaskDraws,
    *,
    training: str,
    version: int = 0,
    held_out: Sequence[Task] = (),
    cursor: JSON | None = None,
) -> AsyncIterator[ServerGroups]:
    """Groups of a server's sessions; an error that leaves the block leaves them running there.

    `training` names this training among all on the server, without a dot; `version` is that of the
    weights that it goes on from, before they are published; `cursor` that of the checkpoint.
    `ServerError` when the server refuses, or cannot be reached for as long as the client waits.
    """
    source = ServerGroups(
        client, draws, held_out, training=training, version=version, cursor=cursor or {}
    )
    await source.adopt()
    try:
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(source.feed(), name="groups to the server"),
                group.create_task(source.read(), name="groups from the server"),
            ]
            try:
                yield source
                await source.end()
            finally:
                for one in running:
                    one.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
