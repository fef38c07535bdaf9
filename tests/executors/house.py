"""Nodes for tests: real hosts on a node that does as it is told, reached by links that can fail."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

from tests.lifecycle.house import task as a_task
from tests.server.house import result, until

from bridle.errors import ConfigError, EngineError, NodeLostError
from bridle.executors.cluster import ClusterRunner
from bridle.executors.hosting import Hosted, NodeHost
from bridle.executors.members import Patience
from bridle.lifecycle.events import Events, SessionChanged
from bridle.types import SessionStatus, without_user_info

PATIENT = {"lost_after_s": 30, "tell_s": 0.05, "again_s": 0.01, "open_s": 30}
"""For tests in which no node is lost, on a busy machine neither."""

HASTY = {"lost_after_s": 1.0}
"""For tests in which one is; the others answer in time on a busy machine too."""


class FakeNode:
    """Has `capacity` sessions at once; each ends when it is let."""

    def __init__(self, capacity=4):
        self.capacity = capacity
        self.events = Events()
        self.living = {}
        self.ran = []

    def stages(self):
        return {SessionStatus.RUNNING: len(self.living)} if self.living else {}

    async def run(self, task, sample_index=0, *, session_id=None, avoid=frozenset()):
        self.ran.append(session_id)
        self.living[session_id] = asyncio.get_running_loop().create_future()
        self.tell(session_id, task, sample_index, SessionStatus.RUNNING)
        try:
            answer = await self.living[session_id]
        finally:
            del self.living[session_id]
        if isinstance(answer, BaseException):
            raise answer
        ended = result(session_id, task, sample_index, **answer)
        self.tell(session_id, task, sample_index, ended.status)
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

    def __init__(self, node_id, node, gateway, disk):
        super().__init__(Hosted(node, gateway, SimpleNamespace()), node_id=node_id)
        self.disk = disk

    async def recall(self, run_ids):
        return {one: self.disk[one] for one in run_ids if one in self.disk}


class FakeLink:
    """Implements `Link` on a host in this process; its machine can be silent, restart or die."""

    def __init__(self, name, capacity=4, offers=None, opening=None):
        self.name = name
        self.offers = offers or {}
        self.opening = opening
        """An error that greeting raises."""
        self.disk = {}
        """Results that capture has: run id -> result."""
        self.calls = []
        self.failure = None
        self.refusals = 0
        self.left = False
        self.node = FakeNode(capacity)
        self.gateway = FakeGateway()
        self.host = FakeHost(f"id-{name}", self.node, self.gateway, self.disk)

    async def restart(self, capacity=4):
        """Its process dies and another one comes up on the same disk."""
        await self.host.__aexit__()
        self.node = FakeNode(capacity)
        self.host = FakeHost(f"id-{self.name}", self.node, self.gateway, self.disk)
        await self.host.__aenter__()

    async def _reached(self, word):
        self.calls.append(word)
        if self.failure == "silent":
            await asyncio.Event().wait()
        if self.failure is not None:
            raise NodeLostError(self.failure, may_return=self.failure == "away")

    async def hello(self, owner):
        await self._reached("hello")
        if self.opening is not None:
            raise self.opening
        return self.host.hello(owner)

    async def news(self, owner, epoch, after, *, wait_s):
        await self._reached("news")
        if self.host.epoch != epoch:
            raise NodeLostError("it was started anew", may_return=True)
        news = await self.host.news(owner, after, wait_s=wait_s)
        await self._reached("heard")
        return news

    async def start(self, owner, starts):
        await self._reached("start")
        if self.refusals:
            self.refusals -= 1
            return ["full" for _ in starts]
        return self.host.start(owner, starts)

    async def result(self, run_id):
        await self._reached("result")
        return self.host.result(run_id)

    async def recall(self, run_ids):
        await self._reached("recall")
        return await self.host.recall(run_ids)

    async def ack(self, owner, run_ids):
        await self._reached("ack")
        self.host.ack(owner, run_ids)

    async def cancel(self, run_id):
        await self._reached("cancel")
        return self.host.cancel(run_id)

    async def drain(self):
        await self._reached("drain")
        self.host.drain()

    async def set_policy(self, wanted):
        await self._reached("set_policy")
        return await self.host.set_policy(wanted)

    async def add_replica(self, engine):
        await self._reached("add_replica")
        return await self.host.add_replica(engine)

    async def remove_replica(self, name, drain_s):
        await self._reached("remove_replica")
        return await self.host.remove_replica(name, drain_s)

    async def artifact(self, run_id, name):
        await self._reached("artifact")
        return f"{self.name} {run_id} {name}".encode() if run_id in self.disk else None

    async def remove(self, run_id):
        await self._reached("remove")
        self.disk.pop(run_id, None)

    async def metrics(self):
        await self._reached("metrics")
        return await self.host.metrics()

    async def kept_bytes(self):
        await self._reached("kept_bytes")
        return 100

    async def leave(self):
        self.left = True


@asynccontextmanager
async def a_runner(*links, owner="me", outlive=False, settled=True, patience=None):
    """A runner that has heard of all `links`."""
    patience = Patience(**{**PATIENT, **(patience or {})})
    async with ClusterRunner(owner, outlive=outlive, patience=patience) as runner:
        for link in links:
            runner.join(link)
        await runner.first_heard()
        if settled:
            runner.settle()
        yield runner


@asynccontextmanager
async def some_links(*names, **more):
    """Links with hosts that are up."""
    links = [FakeLink(name, **more) for name in names]
    for link in links:
        await link.host.__aenter__()
    try:
        yield links
    finally:
        for link in links:
            await link.host.__aexit__()


def task(**changes):
    return a_task("true", **changes)


def where(links, run_id):
    """The link whose node runs it; `None` = none does."""
    return next((link for link in links if run_id in link.node.living), None)


async def begun(links, *run_ids):
    """Wait until all of these run somewhere; where the first one does."""
    await until(lambda: all(where(links, one) for one in run_ids))
    return where(links, run_ids[0])


__all__ = [
    "HASTY",
    "PATIENT",
    "ConfigError",
    "FakeLink",
    "a_runner",
    "begun",
    "some_links",
    "task",
    "until",
    "where",
]
