"""A rollout server that can be killed at any moment: real state, files and HTTP, small workers.

Its workers write down in a journal, as capture does, when a run began and when it had ended; a run
that had ended is recalled from there. Some runs fail by infrastructure. Run as a program:

    python killed_server.py FOLDER DATABASE PORT
"""

import asyncio
import random
import sys
import zlib
from contextlib import AsyncExitStack
from pathlib import Path

from tests.server.house import FakeWorkers, failure, result, served

from bridle.aio import Nursery
from bridle.bridges import parquet
from bridle.config import Task
from bridle.server.addresses import Addresses
from bridle.server.app import serving
from bridle.server.database import Database
from bridle.server.delivery import Deliverer
from bridle.server.files import TrajectoryFiles
from bridle.server.schemas import ServiceSettings
from bridle.server.service import Service

RUN_S = 0.03
"""The most that a run takes."""


def fails(run_id):
    """Whether this run fails by infrastructure: one in seven, first attempts only."""
    return ".r" not in run_id and zlib.crc32(run_id.encode()) % 7 == 0


class Journal:
    """Lines `began RUN` and `ended RUN`; an appended line survives `kill -9`."""

    def __init__(self, path):
        self.path = path

    def write(self, what, run_id):
        with self.path.open("a") as file:
            file.write(f"{what} {run_id}\n")

    def lines(self):
        if not self.path.exists():
            return []
        return [tuple(line.split(" ")) for line in self.path.read_text().splitlines()]


class JournalWorkers(FakeWorkers):
    """Workers whose ended runs are known after a kill."""

    def __init__(self, journal):
        super().__init__(capacity=4)
        self.journal = journal

    async def run(self, task, sample_index, run_id, avoid=frozenset()):
        self.journal.write("began", run_id)
        await asyncio.sleep(random.uniform(0, RUN_S))
        if fails(run_id):
            return result(run_id, task, sample_index, **failure())
        self.journal.write("ended", run_id)
        return result(run_id, task, sample_index)

    async def recall(self, run_id):
        if ("ended", run_id) not in self.journal.lines():
            return None
        task_id, _, index = run_id.partition(".r")[0].rpartition(".")
        return result(run_id, Task(task_id=task_id, instruction="x"), int(index))


async def serve(folder, database, port):
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        service = Service(
            database=await enter(await Database.open(database)),
            files=TrajectoryFiles(folder / "trajectories", parquet),
            workers=JournalWorkers(Journal(folder / "journal")),
            settings=ServiceSettings(lease_s=3600),
        )
        await enter(service)
        nursery = await enter(Nursery(service.lost))
        addresses = Addresses(["127.0.0.0/8"])
        deliverer = Deliverer(service, addresses, b"secret", first_wait_s=0.05)
        nursery.start(deliverer.run(), name="deliverer")
        await enter(serving(served(service), host="127.0.0.1", port=port))
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
