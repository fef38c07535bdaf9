"""Sessions on a rollout server, for a bridge that wants tasks played.

Each call hands the tasks in under ids of its own, waits until they are final and fetches
trajectories. Nobody has to acknowledge these groups, so a trainer that is killed leaves nothing
behind that would hold up the next one. The same interface as `bridle.bridges.local.LocalSessions`.
"""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from bridle.bridges.base import TaskTable
from bridle.client import DEFAULT_URL, Client
from bridle.config import Task
from bridle.errors import ServerError
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON, SessionStatus


class ServerSessions:
    """Plays tasks on a server; use as a context manager, from any thread."""

    def __init__(
        self, url: str = DEFAULT_URL, *, token: str | None = None, patience_s: float = 1800.0
    ) -> None:
        """Keep the settings; send the server nothing yet.

        `token`: as of `Client`. A server that cannot be reached is waited
        for `patience_s`: it may be started once the trainer's engine is up.
        """
        self._url, self._token, self._patience_s = url, token, patience_s
        self._client: Client

    def __enter__(self) -> Self:
        self._client = Client(self._url, token=self._token, patience_s=self._patience_s)
        self._client.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._client.__exit__()

    def play(self, tasks: Sequence[Task]) -> list[Trajectory]:
        """Run one session for each entry of `tasks` on the server, in order; a task may be listed
        several times.

        The outcome of every session is in its trajectory; its `metadata["task_id"]` is the task's
        own. `ServerError` if the server refuses a task or cannot be reached.
        """
        counts = Counter(task.task_id for task in tasks)
        once = {task.task_id: task for task in tasks}
        call = uuid.uuid4().hex[:12]
        names = {task_id: f"{task_id}.{call}" for task_id in once}
        wanted = {names[task_id]: (task, counts[task_id]) for task_id, task in once.items()}
        self.hand_in(wanted, hand_out=False)
        found = {
            task_id: self.fetch(name, task_id, counts[task_id]) for task_id, name in names.items()
        }
        return [found[task.task_id].pop(0) for task in tasks]

    def hand_in(
        self, groups: Mapping[str, tuple[Task, int]], *, hand_out: bool = True
    ) -> list[str]:
        """Submit groups under these names, each with its task and number of samples.

        Groups with `hand_out` are returned by `ended` until they are acknowledged. Returns the
        names of those groups that the server had before and that have ended.
        """
        tasks = (
            task.model_copy(update={"task_id": name, "num_samples": samples})
            for name, (task, samples) in groups.items()
        )
        fresh = self._client.submit_many(tasks, hand_out=hand_out)
        known = [name for name, is_new in zip(groups, fresh, strict=True) if not is_new]
        return [name for name in known if self._client.task(name)["cursor"] is not None]

    def ended(self, after: int) -> tuple[int, str]:
        """Wait for the next group that ends, and return its position among them and its name.

        `after` is the position of the one before; acknowledged groups are passed over.
        """
        groups = self._client.groups(cursor=after, trajectories=False, ack=False)
        group = next(iter(groups))
        return group.cursor, group.task_id

    def fetch(self, name: str, task_id: str, samples: int) -> list[Trajectory]:
        """Wait until a group has ended, and return its sessions' trajectories, with `task_id` as
        their task.
        """
        self._client.wait(name)
        ended = {one["sample_index"]: one for one in self._client.sessions(name)}
        return [self._trajectory(task_id, ended.get(at)) for at in range(samples)]

    def ack(self, names: Iterable[str]) -> None:
        """Acknowledge these groups to the server, which then may delete them."""
        self._client.ack(task_ids=list(names))

    def set_version(self, version: int) -> None:
        """Set the policy version of the sessions that begin from here on."""
        self._client.set_policy(version=version)

    def give_up(self) -> None:
        """Release the engines to the trainer: the gateways send them no call and no health
        check.
        """
        self._client.set_policy(released=True)

    def take_back(self) -> None:
        """Let the gateways send calls to the engines again."""
        self._client.set_policy(released=False)

    def _trajectory(self, task_id: str, session: JSON | None) -> Trajectory:
        """Fetch the trajectory of one sample; it is empty where the server has none.

        `session` `None` = the server has removed the sessions of the group.
        """
        own, failed = {"task_id": task_id}, SessionStatus.ERROR
        if session is None:
            why = "the server has removed the session (keep_rows_days)"
            return Trajectory("", failed, (), None, why, own)
        try:
            trajectory = self._client.trajectory(session["session_id"])
        except ServerError as refused:
            if refused.status != 404:
                raise
            return Trajectory(session["session_id"], failed, (), None, session["error"], own)
        return dataclasses.replace(trajectory, metadata=trajectory.metadata | own)


@functools.cache
def open_server(server: str, tasks: str) -> tuple[ServerSessions, TaskTable]:
    """Connect to a server and read a task file; later calls of this process return the same
    objects.

    `ConfigError` for a task file that cannot be read.
    """
    from bridle.datasets.jsonl import load_tasks

    return ServerSessions(server).__enter__(), TaskTable(load_tasks(Path(tasks)))
