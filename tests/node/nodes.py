"""Remote nodes for tests: real hosts on a scripted node, reached by a proxy that can fail."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any

from tests.node.house import task as a_task
from tests.server.house import result, until

from bridle.errors import ConfigError, EngineError, NodeLostError
from bridle.node.base import REMOTE_METHODS, SessionChanged
from bridle.node.cluster import ClusterRunner
from bridle.node.fleet import NodeTimeouts
from bridle.node.host import NodeHost
from bridle.node.local import LocalNode
from bridle.types import SessionStatus, without_user_info

PATIENT = {"lost_after_s": 30, "tell_s": 0.05, "again_s": 0.01, "open_s": 30}
"""For tests in which no node is lost, on a busy machine neither."""

HASTY = {"lost_after_s": 1.0}
"""For tests in which one is; the others answer in time on a busy machine too."""


class FakeNode(LocalNode):
    """Has `capacity` sessions at once; each ends when its test lets it."""

    capacity = 4

    def __init__(self, capacity=4, gateway: Any = None):
        none: Any = None
        fake: Any = gateway or FakeGateway()
        super().__init__(gateway=fake, store=none, folder=none)
        self.capacity = capacity
        self.living = {}
        self.ran = []

    def stages(self):
        return {SessionStatus.RUNNING: len(self.living)} if self.living else {}

    async def run(self, task, sample_index=0, run_id=None, avoid=frozenset()):
        self.ran.append(run_id)
        self.living[run_id] = asyncio.get_running_loop().create_future()
        self.tell(run_id, task, sample_index, SessionStatus.RUNNING)
        try:
            answer = await self.living[run_id]
        finally:
            del self.living[run_id]
        if isinstance(answer, BaseException):
            raise answer
        ended = result(run_id, task, sample_index, **answer)
        self.tell(run_id, task, sample_index, ended.status)
        return ended

    def tell(self, run_id, task, index, status):
        self.events.tell(SessionChanged(run_id, task.task_id, index, "fake", status, 0.0))

    def cancel(self, run_id):
        if run_id not in self.living:
            return False
        self.let(run_id, status="CANCELLED", cause="cancelled", error="cancelled", reward=None)
        return True

    def let(self, run_id, **answer):
        self.living[run_id].set_result(answer)


class FakeGateway:
    """Keeps a policy, and notes which sessions it was to forget."""

    def __init__(self):
        self.version = 0
        self.asked = []
        self.forgotten = []
        self.replicas = ["http://engine"]
        self.refuses = None

    def policy(self):
        return {
            "version": self.version,
            "paused": False,
            "hold": None,
            "model": "m",
            "replicas": list(self.replicas),
            "engines": [{"name": name, "state": "serving"} for name in self.replicas],
        }

    async def set_policy(self, wanted):
        self.asked.append(wanted)
        if self.refuses is not None:
            raise EngineError(self.refuses)
        if wanted.version is not None:
            self.version = wanted.version

    async def add_replica(self, engine):
        if self.refuses is not None:
            raise EngineError(self.refuses)
        self.replicas.append(without_user_info(engine))

    async def remove_replica(self, name, drain_s):
        self.replicas.remove(without_user_info(name))

    def metrics(self):
        return f"# TYPE bridle_sessions_open gauge\nbridle_sessions_open {self.version}\n"

    def forget(self, run_id):
        self.forgotten.append(run_id)


class FakeHost(NodeHost):
    """A host whose capture is a table."""

    def __init__(self, node_id, node, disk):
        super().__init__(node, node_id=node_id)
        self.disk = disk

    async def recall_all(self, run_ids):
        return {one: self.disk[one] for one in run_ids if one in self.disk}

    async def artifact(self, run_id, name):
        return f"{self.node_id} {run_id} {name}".encode() if run_id in self.disk else None

    async def remove(self, run_id):
        self.disk.pop(run_id, None)

    async def kept_bytes(self):
        return 100


class FakeRemote:
    """Implements `RemoteNode` on a host in this process; its machine can hang, restart or die."""

    def __init__(self, name, capacity=4, offers=None, opening=None):
        self.name = name
        self.offers = offers or {}
        self.opening = opening
        """An error that connecting raises."""
        self.disk = {}
        """Results that capture has: run id -> result."""
        self.calls = []
        self.failure = None
        self.refusals = 0
        self.left = False
        self.gateway = FakeGateway()
        self._make(capacity)

    def _make(self, capacity):
        self.node = FakeNode(capacity, self.gateway)
        self.host = FakeHost(f"id-{self.name}", self.node, self.disk)

    async def restart(self, capacity=4):
        """Its process dies and another one comes up on the same disk."""
        await self.host.__aexit__()
        self._make(capacity)
        await self.host.__aenter__()

    async def _reached(self, method):
        self.calls.append(method)
        if self.failure == "silent":
            await asyncio.Event().wait()
        if self.failure is not None:
            raise NodeLostError(self.failure, may_return=self.failure == "away")

    def __getattr__(self, method):
        if method not in REMOTE_METHODS:
            raise AttributeError(method)

        async def call(*given):
            await self._reached(method)
            return await self.host.call(method, *given)

        return call

    async def connect(self, owner):
        await self._reached("connect")
        if self.opening is not None:
            raise self.opening
        return self.host.connect(owner)

    async def poll(self, owner, epoch, after, wait_s):
        await self._reached("poll")
        batch = await self.host.poll(owner, epoch, after, wait_s)
        await self._reached("polled")
        return batch

    async def start(self, owner, requests):
        await self._reached("start")
        if self.refusals:
            self.refusals -= 1
            return ["full" for _ in requests]
        return self.host.start(owner, requests)

    async def leave(self):
        self.left = True


@asynccontextmanager
async def a_runner(*nodes, owner="me", outlive=False, settled=True, timeouts=None):
    """A runner that is in contact with all `nodes`."""
    timeouts = NodeTimeouts(**{**PATIENT, **(timeouts or {})})
    async with ClusterRunner(owner, outlive=outlive, timeouts=timeouts) as runner:
        for node in nodes:
            runner.join(node)
        await runner.first_contact()
        if settled:
            await runner.settle()
        yield runner


@asynccontextmanager
async def remote_nodes(*names, **more):
    """Remote nodes with hosts that are up."""
    remotes = [FakeRemote(name, **more) for name in names]
    for remote in remotes:
        await remote.host.__aenter__()
    try:
        yield remotes
    finally:
        for remote in remotes:
            await remote.host.__aexit__()


def task(**changes):
    return a_task("true", **changes)


def where(remotes, run_id):
    """The remote whose node runs it; `None` = none does."""
    return next((remote for remote in remotes if run_id in remote.node.living), None)


async def begun(remotes, *run_ids):
    """Wait until all of these run somewhere; where the first one does."""
    await until(lambda: all(where(remotes, one) for one in run_ids))
    return where(remotes, run_ids[0])


__all__ = [
    "HASTY",
    "PATIENT",
    "ConfigError",
    "FakeRemote",
    "a_runner",
    "begun",
    "remote_nodes",
    "task",
    "until",
    "where",
]
