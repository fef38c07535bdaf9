"""Kills a rollout server again and again while a trainer works, and judges what the trainer got.

The trainer takes groups with ack, and dies too: its iterator is thrown away with a group in hand.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

from tests.ports import free_port
from tests.server.house import TOKEN, body
from tests.server.killed_node import Journal
from tests.server.killed_receiver import KEPT
from tests.server.killed_server import NODE_PID

from bridle.client import AsyncClient, GroupResult

SAMPLES = 3

EACH = 5
"""Tasks that are submitted before each kill; every fifth has callbacks."""

PATIENCE_S = 300.0
"""How long a trainer waits for a server that is being started again; a busy machine takes long."""

ROOT = Path(__file__).resolve().parents[2]


class Killed:
    """A process that is started again after every kill; the server's, if no other is named."""

    def __init__(self, folder, *arguments, program="killed_server.py"):
        self.port = free_port()
        path = Path(__file__).with_name(program)
        words = [path, folder, *arguments, self.port]
        self.command = [sys.executable, *map(str, words)]
        self.folder = folder
        self.log = folder / "log"

    def start(self):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stderr=log, env=environment)

    def kill(self):
        assert self.process.poll() is None, f"it ended by itself: {self.log.read_text()[-4000:]}"
        self.end()

    def end(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    async def again(self):
        """Killed, and started again."""
        self.kill()
        await asyncio.sleep(random.uniform(0, 0.1))
        self.start()

    async def kill_node(self):
        """Kill the process of the server's node, as soon as there is one."""
        path = self.folder / NODE_PID
        while True:
            pid = int(path.read_text() or 0) if path.exists() else 0
            if pid and self.process.pid == parent_of(pid):
                os.kill(pid, signal.SIGKILL)
                return
            await asyncio.sleep(0.01)


async def train(url, wanted, seen):
    """Take groups until all of `wanted` were acknowledged; die now and then with one in hand."""
    done = set()
    async with AsyncClient(url, token=TOKEN.token, patience_s=PATIENCE_S) as client:
        while not wanted <= done:
            takes = random.randint(1, 5)
            groups = client.groups(ack=False, quiet_s=PATIENCE_S)
            async for group in groups:
                seen.append(group)
                takes -= 1
                if takes == 0:
                    break
                await client.ack(task_ids=[group.task_id])
                done.add(group.task_id)
                if wanted <= done:
                    break
            await groups.aclose()


class KilledReceiver(Killed):
    """A receiver of callbacks in a process of its own."""

    def __init__(self, folder):
        super().__init__(folder, program="killed_receiver.py")
        self.kept = folder / KEPT
        self.url = f"http://127.0.0.1:{self.port}/callbacks/session_result"

    @asynccontextmanager
    async def up(self):
        self.start()
        try:
            yield self
        finally:
            self.end()

    def bodies(self):
        lines = self.kept.read_text().split("\n")[:-1] if self.kept.exists() else []
        return [json.loads(line) for line in lines]


async def crash_run(folder, database, *, kills, seed, others=None):
    """The whole story; returns what it came to. Fails by its assertions.

    Killed are the server, its node, the receiver of callbacks, and `others` (name -> what kills it
    and starts it again), in an order drawn by `seed`, each as often as the others. Before each kill
    a few tasks are submitted, so that it meets a batch that runs.
    """
    drawn = random.Random(seed)
    server, receiver = Killed(folder, database), KilledReceiver(folder)
    victims = {
        "server": server.again,
        "node": server.kill_node,
        "receiver": receiver.again,
        **(others or {}),
    }
    seen: list[GroupResult] = []
    url = f"http://127.0.0.1:{server.port}"
    async with receiver.up():
        bodies = [body(f"t{number}", SAMPLES, max_attempts=100) for number in range(EACH * kills)]
        for one in bodies[::5]:
            one["callback_url"] = receiver.url
        server.start()
        try:
            async with asyncio.TaskGroup() as group:
                killing = group.create_task(kill(victims, bodies, drawn, server))
                wanted = {one["task_id"] for one in bodies if "callback_url" not in one}
                group.create_task(train(url, wanted, seen))
                group.create_task(all_delivered(receiver, bodies[::5]))
        finally:
            server.end()
        judge(folder, seen, receiver, bodies)
    result = {"groups": len(seen), "callbacks": len(receiver.bodies())}
    return killing.result() | result | {"sessions": len(bodies) * SAMPLES}


async def kill(victims, bodies, drawn, server):
    """One kill for each few of `bodies`; how many of whom, and how many met sessions that ran."""
    killed: Counter[str] = Counter()
    order: list[str] = []
    busy = 0
    journal = Journal(server.folder / "journal")
    url = f"http://127.0.0.1:{server.port}"
    async with AsyncClient(url, token=TOKEN.token, patience_s=PATIENCE_S) as client:
        for start in range(0, len(bodies), EACH):
            order = order or drawn.sample(sorted(victims), len(victims))
            await client.submit_many(bodies[start : start + EACH])
            await asyncio.sleep(drawn.uniform(0, 0.3))
            victim = order.pop()
            ended = {run.partition(".r")[0] for what, run in journal.lines() if what == "ended"}
            busy += len(ended) < (start + EACH) * SAMPLES
            await victims[victim]()
            killed[victim] += 1
    return {"kills": dict(killed), "busy": busy}


def parent_of(pid):
    """The process that a process is a child of; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))


async def all_delivered(receiver, bodies):
    """Wait until the receiver has the result of each of these tasks."""
    wanted = {one["task_id"] for one in bodies}

    def delivered():
        return {one["task_id"] for one in receiver.bodies() if "session_id" not in one}

    while delivered() != wanted:  # noqa: ASYNC110 - another process does it
        await asyncio.sleep(0.05)


def judge(folder, seen, receiver, bodies):
    """Every accepted session ended exactly once, whatever was seen twice."""
    expected = {f"{one['task_id']}.{index}": one for one in bodies for index in range(SAMPLES)}
    outcome: dict[str, set[str]] = {name: set() for name in expected}
    for group in seen:
        names = [one.session_id for one in group.results]
        assert names == [f"{group.task_id}.{index}" for index in range(SAMPLES)]
        for one in group.results:
            outcome[one.session_id].add(f"{one.raw['run_id']} {one.status}")
            assert one.trajectory.metadata["run_id"] == one.raw["run_id"]
    for one in receiver.bodies():
        for result in [one] if "session_id" in one else one["results"]:
            outcome[result["session_id"]].add(f"{result['run_id']} {result['status']}")
    assert {name: len(results) for name, results in outcome.items() if len(results) != 1} == {}
    ended: Counter[str] = Counter()
    for what, run in Journal(folder / "journal").lines():
        session = run.partition(".r")[0]
        assert not ended[session], f"{run} {what} after {session} had ended"
        ended[session] += what == "ended"
    assert set(ended.values()) == {1}
    assert set(ended) == set(expected)
