"""A rollout server that can be killed at any moment: real state, files and HTTP, small workers.

Its runs are done by a node in a process of its own, which can be killed too. It writes down in a
journal, as capture does, when a run began and when it had ended; a run that had ended is recalled
from there. Some runs fail by infrastructure. Run as a program:

    python killed_server.py FOLDER DATABASE PORT
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import AsyncExitStack
from pathlib import Path

from tests.server.house import FakeWorkers, failure, result, served
from tests.server.killed_node import Journal

from bridle.aio import Nursery
from bridle.bridges import parquet
from bridle.config import Task
from bridle.server.app import serve_api
from bridle.server.callbacks import CallbackAddresses, CallbackSender
from bridle.server.service import Service
from bridle.server.settings import ServiceSettings
from bridle.server.storage import Database, TrajectoryFiles

NODE_PID = "node.pid"
"""File with the id of the node's process."""


class NodeProcess:
    """The node's process; another one is started when it was killed."""

    def __init__(self, folder):
        self._folder = folder
        self._process: Process | None = None
        self._starting = asyncio.Lock()
        self._waiting = {}
        self._nursery = Nursery(lambda error: print(error, file=sys.stderr))  # noqa: T201 - the log
        self.made = 0

    async def run(self, run_id):
        """Return whether a run did well; `None` = its node died meanwhile."""
        async with self._starting:
            if self._process is None:
                await self._start()
        if self._process is None:
            return None
        assert self._process.stdin is not None
        waiting = self._waiting[run_id] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(f"{run_id}\n".encode())
        return await waiting

    async def _start(self):
        program = Path(__file__).with_name("killed_node.py")
        arguments = (program, self._folder / "journal", str(os.getpid()))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", *arguments, stdin=PIPE, stdout=PIPE
        )
        self.made += 1
        (self._folder / NODE_PID).write_text(str(self._process.pid))
        self._nursery.start(self._listen(self._process), name="node")

    async def _listen(self, process):
        async for line in process.stdout:
            run_id, how = line.decode().split()
            self._waiting.pop(run_id).set_result(how == "ok")
        await process.wait()
        self._process = None
        for waiting in self._waiting.values():
            waiting.set_result(None)
        self._waiting.clear()


class JournalWorkers(FakeWorkers):
    """Workers whose ended runs are known after a kill of the server or of the node."""

    def __init__(self, folder):
        super().__init__(capacity=4)
        self.journal = Journal(folder / "journal")
        self.node = NodeProcess(folder)

    async def run(self, task, sample_index, run_id, avoid=frozenset()):
        did_well = await self.node.run(run_id)
        node_id = f"node{self.node.made}"
        if did_well is None:
            did_well = ("ended", run_id) in self.journal.lines()
        answer = {} if did_well else failure(error="its node died")
        return result(run_id, task, sample_index, **answer, node_id=node_id)

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
            workers=JournalWorkers(folder),
            settings=ServiceSettings(lease_s=3600),
        )
        await enter(service)
        nursery = await enter(Nursery(service.failed))
        addresses = CallbackAddresses(["127.0.0.0/8"])
        deliverer = CallbackSender(service, addresses, b"secret", first_wait_s=0.05)
        nursery.start(deliverer.run(), name="deliverer")
        await enter(serve_api(served(service), host="127.0.0.1", port=port))
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
