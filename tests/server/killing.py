"""Kills a rollout server again and again while a trainer works, and judges what the trainer got.

The trainer takes groups with ack, and dies too: its iterator is thrown away with a group in hand.
"""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

from tests.server.house import body
from tests.server.killed_receiver import KEPT
from tests.server.killed_server import Journal
from tests.server.test_delivery import Receiver

from bridle.client import AsyncClient

SAMPLES = 3
PATIENCE_S = 300.0
"""How long a trainer waits for a server that is being started again; a busy machine takes long."""

ROOT = Path(__file__).resolve().parents[2]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Killed:
    """A process that is started again after every kill; the server's, if no other is named."""

    def __init__(self, folder, *arguments, program="killed_server.py"):
        self.port = free_port()
        path = Path(__file__).with_name(program)
        words = [path, folder, *arguments, self.port]
        self.command = [sys.executable, *map(str, words)]
        self.log = folder / "log"
        self.kills = 0

    def start(self):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stderr=log, env=environment)

    def kill(self):
        assert self.process.poll() is None, f"it ended by itself: {self.log.read_text()[-4000:]}"
        self.end()
        self.kills += 1

    def end(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    async def again(self):
        """Killed, and started again."""
        self.kill()
        self.start()

    async def run(self, kills, drawn, others):
        """So many kills, of it or of one of `others`; it answers before each, and at last."""
        self.start()
        for _ in range(kills):
            await self.answers()
            await asyncio.sleep(drawn.uniform(0, 0.4))
            await drawn.choice([self.again, *others])()

    async def answers(self):
        async with AsyncClient(f"http://127.0.0.1:{self.port}") as client:
            await client.status()


async def train(url, wanted, seen):
    """Take groups until all of `wanted` were acknowledged; die now and then with one in hand."""
    done = set()
    async with AsyncClient(url, patience_s=PATIENCE_S) as client:
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

    @property
    def got(self):
        return self.bodies()


async def crash_run(folder, database, *, tasks, kills, seed, others=(), told_to=None):
    """The whole story; returns what it came to. Fails by its assertions.

    `others` are killed as well: each kills what it knows and starts it again. `told_to` is the
    receiver of callbacks.
    """
    drawn = random.Random(seed)
    server = Killed(folder, database)
    url = f"http://127.0.0.1:{server.port}"
    seen = []
    async with (told_to or Receiver()).up() as receiver:
        bodies = [body(f"t{number}", SAMPLES) for number in range(tasks)]
        for one in bodies[::5]:
            one["callback_url"] = receiver.url
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(server.run(kills, drawn, others))
                async with AsyncClient(url, patience_s=PATIENCE_S) as client:
                    for start in range(0, tasks, 7):
                        await client.submit_many(bodies[start : start + 7])
                        await asyncio.sleep(drawn.uniform(0, 0.1))
                wanted = {one["task_id"] for one in bodies if "callback_url" not in one}
                group.create_task(train(url, wanted, seen))
                group.create_task(all_told(receiver, bodies[::5]))
        finally:
            server.end()
    judge(folder, seen, receiver, bodies)
    return {"kills": server.kills, "groups": len(seen), "callbacks": len(receiver.got)}


async def all_told(receiver, bodies):
    """Wait until the receiver has the result of each of these tasks."""
    wanted = {one["task_id"] for one in bodies}

    def told():
        return {one["task_id"] for one in receiver.bodies() if "session_id" not in one}

    while told() != wanted:  # noqa: ASYNC110 - another process does it
        await asyncio.sleep(0.05)


def judge(folder, seen, receiver, bodies):
    """Every accepted session ended exactly once, whatever was seen twice."""
    expected = {f"{one['task_id']}.{index}": one for one in bodies for index in range(SAMPLES)}
    told: dict[str, set[str]] = {name: set() for name in expected}
    for group in seen:
        names = [one.session_id for one in group.results]
        assert names == [f"{group.task_id}.{index}" for index in range(SAMPLES)]
        for one in group.results:
            told[one.session_id].add(f"{one.raw['run_id']} {one.status}")
            assert one.trajectory.metadata["run_id"] == one.raw["run_id"]
    for one in receiver.bodies():
        for result in [one] if "session_id" in one else one["results"]:
            told[result["session_id"]].add(f"{result['run_id']} {result['status']}")
    assert {name: len(results) for name, results in told.items() if len(results) != 1} == {}
    ended: Counter[str] = Counter()
    for what, run in Journal(folder / "journal").lines():
        session = run.partition(".r")[0]
        assert not ended[session], f"{run} {what} after {session} had ended"
        ended[session] += what == "ended"
    assert set(ended.values()) == {1}
    assert set(ended) == set(expected)
