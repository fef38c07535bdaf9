"""A real server whose workers follow the test's orders."""

from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
from tests.server.house import TOKEN, FakeWorkers, a_service, served
from tests.training.made import session, trace

from bridle.client import AsyncClient
from bridle.config import AgentSpec, RuntimeSpec, Task
from bridle.server.app import serve_api


class Workers(FakeWorkers):
    """Each token of a session is of the version that samples when it ends; the last sample of a
    group is worth nothing.
    """

    async def run(self, task, sample_index, run_id, *more):
        made = await super().run(task, sample_index, run_id, *more)
        last = task.num_samples > 1 and sample_index + 1 == task.num_samples
        reward = 0.0 if last else made.reward
        one = trace([1], [2, 3], version=np.array([self.version] * 2), name=run_id)
        return replace(made, reward=reward, trajectory=session(reward, one, name=run_id))


@asynccontextmanager
async def a_server(tmp_path, workers=None, **settings):
    """A client of a server; `.workers` are its workers."""
    workers = workers or Workers(capacity=64)
    async with (
        a_service(tmp_path, workers, **settings) as service,
        serve_api(served(service), host="127.0.0.1", port=0) as url,
        AsyncClient(url, token=TOKEN.token, patience_s=10) as client,
    ):
        client.workers = workers  # type: ignore[attr-defined]  # for the tests
        client.service = service  # type: ignore[attr-defined]
        yield client


class Death(Exception):
    """Of a trainer."""


def tasks(count=4, samples=2):
    return [
        Task(
            task_id=f"t{n}",
            instruction="go",
            num_samples=samples,
            runtime=RuntimeSpec(backend="local"),
            agent=AgentSpec(harness="command", command="true"),
        )
        for n in range(count)
    ]
