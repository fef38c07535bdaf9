"""Kills a rollout server again and again while a trainer works, and judges what the trainer got.

The trainer takes groups with ack, and dies too: its iterator is thrown away with a group in hand.
"""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.server.house import body
from tests.server.killed_server import Journal
from tests.server.test_delivery import Receiver

from bridle.client import AsyncClient

SAMPLES = 3
ROOT = Path(__file__).resolve().parents[2]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Killed:
    """The server's process, started again after every kill."""

    def __init__(self, folder, database):
        self.port = free_port()
        program = Path(__file__).with_name("killed_server.py")
        self.command = [sys.executable, str(program), str(folder), str(database), str(self.port)]
        self.log = folder / "log"
        self.kills = 0

    def start(self):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stderr=log, env=environment)

    def kill(self):
        assert self.process.poll() is None, "the server ended by itself: see its log"
        self.end()
        self.kills += 1

    def end(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    async def run(self, kills, random_s):
        """So many lives; the last one goes on."""
        self.start()
        for _ in range(kills):
            await self.answers()
            await asyncio.sleep(random_s())
            self.kill()
            self.start()

    async def answers(self):
        async with AsyncClient(f"http://127.0.0.1:{self.port}") as client:
            await client.status()


async def train(url, wanted, seen):
    """Take groups until all of `wanted` were acknowledged; die now and then with one in hand."""
    done = set()
    async with AsyncClient(url, patience_s=60) as client:
        while not wanted <= done:
            takes = random.randint(1, 5)
            groups = client.groups(ack=False, quiet_s=60)
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


async def crash_run(folder, database, *, tasks, kills, seed):
    """The whole story; returns what it came to. Fails by its assertions."""
    drawn = random.Random(seed)
    server = Killed(folder, database)
    url = f"http://127.0.0.1:{server.port}"
    seen = []
    async with Receiver().up() as receiver:
        bodies = [body(f"t{number}", SAMPLES) for number in range(tasks)]
        for one in bodies[::5]:
            one["callback_url"] = receiver.url
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(server.run(kills, lambda: drawn.uniform(0, 0.4)))
                async with AsyncClient(url, patience_s=60) as client:
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
