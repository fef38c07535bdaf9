"""Sources of groups: the order of tasks, and sessions that run ahead by a bounded number.

Every task comes once per epoch, or those that teach more often. A draw is a function of the seed,
its number, and (for weighted draws) the history so far, so a training that is resumed draws the
same tasks as one that never stopped.

The loop says how many groups may begin (`allow`); a source begins them in order and delivers each
when all its sessions have ended. With `B` groups per update and `max_lag` updates between sampling
and training, `(updates + 1 + max_lag) * B` are allowed: no group begins that could not be trained
in time, and with a lag of 0 the batch of an update begins when the update before it is in the
engine.

On a rollout server a group is a task under a name that says all of it:
`TRAINING.INDEX.ATTEMPT.TASK`. So a trainer that comes back finds what it had begun, and submitting
it twice does nothing. What was taken is acknowledged only when a checkpoint has it (`kept`); until
then the server keeps it and hands it out again. After a death

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
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from bridle.client import AsyncClient, GroupResult
from bridle.config import Task
from bridle.errors import ConfigError, first_error
from bridle.node.local import Executor
from bridle.training.samples import Group
from bridle.trajectory.sample import Trajectory
from bridle.trajectory.scores import clustered_mean
from bridle.types import JSON

Curriculum = Literal["epochs", "learnable"]
"""`epochs`: all tasks once, in an order of the seed's, then again. `learnable`: by chance, tasks
the more often the nearer their success is to one half."""

EXPLORE = 0.05
"""Weight that a task keeps which was always, or never, solved; the largest is 0.25."""


@dataclass(slots=True)
class Record:
    """Results of a task so far."""

    groups: int = 0
    sessions: int = 0
    """With a known reward."""
    reward: float = 0.0
    """Sum over those sessions."""
    flat: int = 0
    """Groups whose rewards did not vary."""
    unknown: int = 0
    """Sessions without a reward."""

    @property
    def success(self) -> float:
        """Mean reward of the task's sessions, smoothed by one more session with reward one half."""
        return (self.reward + 0.5) / (self.sessions + 1)


class History:
    """Per task, what its groups came to."""

    def __init__(self, records: dict[str, Record] | None = None) -> None:
        self.records = records or {}

    def add(self, group: Group) -> None:
        """Add a group's rewards to the record of its task."""
        record = self.records.setdefault(group.task_id, Record())
        known = [reward for reward in group.rewards if not np.isnan(reward)]
        record.groups += 1
        record.sessions += len(known)
        record.reward += float(sum(known))
        record.flat += not group.varies
        record.unknown += len(group.rewards) - len(known)

    def json(self) -> JSON:
        """Return the records of all tasks as JSON, by task id."""
        return {task_id: asdict(record) for task_id, record in self.records.items()}

    @classmethod
    def of(cls, value: JSON) -> History:
        """Return the history that `History.json` wrote."""
        return cls({task_id: Record(**record) for task_id, record in value.items()})


class TaskDraws:
    """Draws tasks by number."""

    def __init__(
        self,
        tasks: Sequence[Task],
        history: History,
        *,
        seed: int,
        curriculum: Curriculum = "epochs",
    ) -> None:
        """`ConfigError` if there is no task, or two have one id."""
        self._tasks = {task.task_id: task for task in tasks}
        self._ids = list(self._tasks)
        self._history = history
        self._seed = seed
        self._curriculum = curriculum
        if not tasks:
            raise ConfigError("there are no tasks to train on; give at least one")
        if len(self._ids) != len(tasks):
            raise ConfigError("two tasks have the same task_id; give each task its own")

    def draw(self, number: int) -> Task:
        """Return the task that draw `number` gives (the first is 0); equal for equal seeds and
        histories.
        """
        size = len(self._ids)
        if self._curriculum == "epochs":
            epoch, place = divmod(number, size)
            order = np.random.default_rng([self._seed, epoch]).permutation(size)
            return self._tasks[self._ids[int(order[place])]]
        chances = [self._history.records.get(task_id, Record()).success for task_id in self._ids]
        success = np.array(chances)
        weights = np.maximum(success * (1 - success), EXPLORE)
        random = np.random.default_rng([self._seed, number])
        return self._tasks[self._ids[int(random.choice(size, p=weights / weights.sum()))]]

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._tasks

    def named(self, task_id: str) -> Task:
        """Return the task of that id; `ConfigError` if the set has none."""
        if task_id not in self._tasks:
            raise ConfigError(
                f"the checkpoint continues with task {task_id!r}, which is not among the given "
                "tasks"
            )
        return self._tasks[task_id]


LABEL = "evaluated_with"
"""Key of a held-out task's metadata: what it is played with, where that is not its own harness."""


@dataclass(frozen=True, slots=True)
class HeldOutEvaluation:
    """Success on tasks that are not trained on."""

    reward: float | None
    """Mean over sessions with a known reward; `None` = there is none."""
    sessions: int
    unknown: int
    """Sessions without a reward."""
    rewards: dict[str, list[float | None]]
    """Per task, in the order of its samples."""
    half_width: float | None = None
    """Of the reward's 95 % interval, over tasks; `None` = fewer than two have a known reward."""
    others: dict[str, HeldOutEvaluation] = field(default_factory=dict)
    """By label, the same tasks with other harnesses; not part of the numbers above."""

    def json(self) -> JSON:
        """Return the evaluation as the JSON object that the run's files hold, without `rewards`."""
        value: JSON = {"reward": self.reward, "sessions": self.sessions, "unknown": self.unknown}
        if self.half_width is not None:
            value["half_width"] = self.half_width
        if self.others:
            value["others"] = {label: one.json() for label, one in self.others.items()}
        return value


def evaluation_of(
    held_out: Sequence[Task], rewards: Mapping[str, Sequence[float | None]]
) -> HeldOutEvaluation:
    """Return the mean of the held-out rewards (`rewards` by task id), overall and per label."""
    labels = [str(task.metadata.get(LABEL, "")) for task in held_out]
    made = {}
    for label in dict.fromkeys(["", *labels]):
        ids = [task.task_id for task, of in zip(held_out, labels, strict=True) if of == label]
        found = {task_id: list(rewards.get(task_id, ())) for task_id in ids}
        every = [reward for of in found.values() for reward in of]
        known = [[reward for reward in of if reward is not None] for of in found.values()]
        mean, half_width = clustered_mean([some for some in known if some])
        unknown = len(every) - sum(map(len, known))
        made[label] = HeldOutEvaluation(mean, len(every), unknown, found, half_width)
    return replace(made.pop(""), others=made)


class GroupSource(Protocol):
    """Gives groups and evaluates."""

    def allow(self, groups: int) -> None:
        """Let `groups` more groups begin."""

    async def take(self) -> Group:
        """Return the next group whose sessions have all ended; raises the error that ended the
        source.
        """

    async def evaluate(self) -> HeldOutEvaluation | None:
        """Run the held-out tasks with the engine's current weights; `None` = there are no such
        tasks.
        """

    def cursor(self) -> JSON:
        """Return the position of the source for a checkpoint.

        After a resume, groups that had begun and were not taken begin again.
        """

    async def kept(self) -> None:
        """Record that a checkpoint has the last `cursor`, so that earlier groups are not needed
        again.
        """


class _Groups:
    """The groups of a source: allowed, begun in order, and queued when they have ended."""

    def __init__(self, draws: TaskDraws, held_out: Sequence[Task], cursor: JSON) -> None:
        self._draws = draws
        self._held_out = held_out
        self._next: int = cursor.get("next", 0)
        self._again: list[tuple[int, str]] = [tuple(one) for one in cursor.get("open", ())]
        """Groups of an earlier process that are begun again, each with its task."""
        self._allowed = asyncio.Semaphore(0)
        self._ended: asyncio.Queue[Group] = asyncio.Queue()

    def allow(self, groups: int) -> None:
        for _ in range(groups):
            self._allowed.release()

    def _cursor(self, begun: Iterable[tuple[int, str]]) -> JSON:
        left = sorted([*begun, *self._again])
        return {"next": self._next, "open": [list(one) for one in left]}


class LocalGroups(_Groups):
    """Groups of an executor's sessions; `local_groups` opens one. Implements `GroupSource`."""

    def __init__(
        self, executor: Executor, draws: TaskDraws, held_out: Sequence[Task], cursor: JSON
    ) -> None:
        super().__init__(draws, held_out, cursor)
        self._executor = executor
        self._open: dict[int, str] = {}

    async def take(self) -> Group:
        group = await self._ended.get()
        del self._open[group.index]
        return group

    def cursor(self) -> JSON:
        return self._cursor(self._open.items())

    async def kept(self) -> None:
        """Do nothing: groups of this process are not kept for a resumed training."""

    async def evaluate(self) -> HeldOutEvaluation | None:
        if not self._held_out:
            return None
        found: dict[str, list[float | None]] = {}
        async with self._executor.run(self._held_out) as results:
            ended = [result async for result in results]
        for result in sorted(ended, key=lambda one: one.sample_index):
            found.setdefault(result.task_id, []).append(result.reward)
        return evaluation_of(self._held_out, found)

    async def feed(self) -> None:
        """Begin groups as they are allowed, until cancelled, which ends all that run."""
        async with asyncio.TaskGroup() as playing:
            while True:
                await self._allowed.acquire()
                if self._again:
                    index, task_id = self._again.pop(0)
                    task = self._draws.named(task_id)
                else:
                    index, self._next = self._next, self._next + 1
                    task = self._draws.draw(index)
                self._open[index] = task.task_id
                playing.create_task(self._play(index, task), name=f"group {index}")

    async def _play(self, index: int, task: Task) -> None:
        async with self._executor.run([task]) as results:
            ended = [result async for result in results]
        ended.sort(key=lambda result: result.sample_index)
        sessions = tuple(result.trajectory for result in ended)
        self._ended.put_nowait(Group(index, task.task_id, sessions))


@asynccontextmanager
async def local_groups(
    executor: Executor,
    draws: TaskDraws,
    *,
    held_out: Sequence[Task] = (),
    cursor: JSON | None = None,
) -> AsyncIterator[LocalGroups]:
    """Yield a source of groups whose sessions this process's executor runs.

    Leaving the context ends the sessions that still run. `cursor` is the source's position in a
    checkpoint. An error of the executor is raised in the context's body.
    """
    source = LocalGroups(executor, draws, held_out, cursor or {})
    async with _running({"groups": source.feed()}):
        yield source


@asynccontextmanager
async def _running(loops: Mapping[str, Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run loops by name beside the block; what breaks one is raised in the block's body."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(loop, name=name) for name, loop in loops.items()]
            try:
                yield
            finally:
                for one in running:
                    one.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors


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
        """Parse the id of a group on the server; `None` = it is no group of `training`."""
        first, _, rest = group_id.partition(".")
        index, _, rest = rest.partition(".")
        attempt, _, task_id = rest.partition(".")
        if first != training or not (index.isdecimal() and attempt.isdecimal() and task_id):
            return None
        return cls(first, int(index), int(attempt), task_id)


class ServerGroups(_Groups):
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
        super().__init__(draws, held_out, cursor)
        self._client = client
        self._training = training
        self._version = version
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

    async def take(self) -> Group:
        group = await self._ended.get()
        self._taken.append(str(self._open.pop(group.index)))
        return group

    def cursor(self) -> JSON:
        return self._cursor((index, name.task_id) for index, name in self._open.items())

    async def kept(self) -> None:
        """Acknowledge to the server the groups that the last checkpoint covers."""
        taken, self._taken = self._taken, []
        if taken:
            await self._client.ack(task_ids=taken)

    async def evaluate(self) -> HeldOutEvaluation | None:
        """Run the held-out tasks on the server with the current weights; `None` = there are no such
        tasks.
        """
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
        """Find the groups that an earlier process of this training began; cancel those it will not
        take.
        """
        # The server has had newer weights than those of the checkpoint.
        lost = int((await self._client.policy())["version"] or 0) > self._version
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
                if lost or ended:  # a life before may have put older weights there, and died
                    self._old.add(name)
        await self._drop(unwanted)

    def _wants(self, name: Name, lost: bool, ended: bool) -> bool:  # noqa: FBT001 - private
        """Return whether to train on a group of an earlier process that was not acknowledged."""
        begun = name.index >= self._next or (name.index, name.task_id) in self._again
        return begun and name.task_id in self._draws and (ended or not lost)

    async def _drop(self, names: Sequence[str]) -> None:
        """End groups, and have none of them handed out."""
        if names:
            await self._client.cancel(*names)
            await self._client.ack(task_ids=names)

    async def end(self) -> None:
        """Cancel the groups that have begun and were not taken: the training is over."""
        await self._drop([str(name) for name in (*self._open.values(), *self._known.values())])

    # ---- while it runs

    async def feed(self) -> None:
        """Submit groups to the server as they are allowed, until cancelled."""
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
        """Receive groups that have ended; raises `ServerError` when the server is unreachable for
        long.
        """
        async for group in self._client.groups(ack=False):
            waiting = self._evaluating.pop(group.task_id, None)
            if waiting is not None:
                waiting.set_result(group)
                continue
            name = Name.of(group.task_id, self._training)
            if name is not None:
                await self._hand_on(name, group)
            elif group.task_id.startswith(f"{self._training}."):  # an evaluation of an earlier life
                await self._client.ack(task_ids=[group.task_id])

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
        elif str(name) not in self._taken:  # it was cancelled, and has ended now
            await self._client.ack(task_ids=[str(name)])


def _newest(sessions: Sequence[Trajectory]) -> int:
    """Return the newest version of any token that was sampled; -1 = none is known."""
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
    """Yield a source of groups whose sessions a server runs.

    An error that leaves the context leaves the sessions running there. `training` names this
    training among all on the server, without a dot; `version` is that of the weights that it starts
    from, before they are published; `cursor` is the source's position in a checkpoint.
    `ServerError` when the server refuses, or cannot be reached for as long as the client waits.
    """
    source = ServerGroups(
        client, draws, held_out, training=training, version=version, cursor=cursor or {}
    )
    await source.adopt()
    loops = {"groups to the server": source.feed(), "groups from the server": source.read()}
    async with _running(loops):
        yield source
        await source.end()
