"""A service for tests: a real database and real files, workers whose results a test sets."""

import asyncio
import os
from contextlib import asynccontextmanager

import httpx
import numpy as np

from bridle.bridges import parquet
from bridle.config import AgentSpec, EvaluatorSpec, RuntimeSpec
from bridle.errors import ConfigError
from bridle.gateway.metrics import Metrics as GatewayMetrics
from bridle.node.base import Events
from bridle.node.results import SessionResult
from bridle.runtimes import RUNTIMES
from bridle.server.app import make_app
from bridle.server.callbacks import CallbackAddresses
from bridle.server.http import ApiToken, Auth, ServerContext, TokenRole
from bridle.server.schemas import Submission
from bridle.server.service import Service
from bridle.server.settings import ServiceSettings, SubmissionPolicy
from bridle.server.storage import Database, TrajectoryFiles
from bridle.server.store import ClaimLimits, TaskStore
from bridle.trajectory.sample import Trace, Trajectory
from bridle.types import Cause, SessionStatus

PATIENCE_S = 45.0
"""How long a test waits for what must come."""


def database_of(tmp_path):
    """The database of a test: a file, or what the PostgreSQL suite names."""
    return os.environ.get("BRIDLE_TEST_DATABASE") or tmp_path / "server.sqlite"


async def left_by_killed(tmp_path, *task_ids, owner):
    """Leave what a server that was killed leaves: accepted tasks, whose sessions `owner` leases."""
    async with await Database.open(database_of(tmp_path)) as database:
        state = TaskStore(database)
        await state.submit([submission(name) for name in task_ids], owner="o", now=1.0)
        await state.claim(ClaimLimits(99), owner=owner, now=2.0, lease_s=1e12)


def trace(length=4, version=3, session_id="s"):
    """A trace that trains all of its `length` response tokens."""
    return Trace(
        trace_id=f"{session_id}/prefix_merging/0",
        prompt_ids=np.arange(3, dtype=np.int32),
        response_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.ones(length, dtype=np.uint8),
        response_logprobs=np.full(length, -0.1, dtype=np.float32),
        versions=np.full(length, version, dtype=np.int32),
        reasons=np.zeros(length, dtype=np.uint8),
        exchange_ids=("e1",),
        turn_ends=(length,),
        finish_reason="stop",
        logprob_mode="raw",
        prompt_messages=[{"role": "user", "content": "hello"}],
        response_messages=[{"role": "assistant", "content": "well"}],
        reward=1.0,
    )


def result(
    run_id,
    task,
    index,
    *,
    status="COMPLETED",
    cause=None,
    error=None,
    reward=1.0,
    traces=1,
    node_id=None,
):
    """A session's result as a node gives it."""
    stats = {"traces": traces, "tokens_trained": 4 * traces, "tokens_excluded": {"cut": 1}}
    made = tuple(trace(session_id=run_id) for _ in range(traces))
    trajectory = Trajectory(run_id, status, made, reward, error, {"stats": stats})
    return SessionResult(
        session_id=run_id,
        task_id=task.task_id,
        sample_index=index,
        status=SessionStatus(status),
        cause=None if cause is None else Cause(cause),
        error=error,
        trajectory=trajectory,
        reward=reward,
        timing={"run": 0.01},
        harness="command",
        harness_version="1",
        exit_code=0,
        signal=None,
        logs={},
        metadata=task.metadata,
        node_id=node_id,
    )


def failure(cause="infrastructure", error="it broke", status="ERROR"):
    """Return what to answer for a run that failed."""
    return {"status": status, "cause": cause, "error": error, "reward": None, "traces": 0}


class FakeWorkers:
    """Implements `SessionRunner`: each run ends at once, or when its test lets it.

    `answers` maps a run id, or a task id, to the fields of its result, or to an exception.
    """

    def __init__(self, capacity=4, *, held=False, answers=None, artifacts=None):
        self.capacity = capacity
        self.held = held
        self.answers = answers or {}
        self.artifacts = artifacts or {}
        self.ran = []
        self.avoided = {}
        self.released = []
        self.removed = []
        self.living = {}
        self.recallable = {}
        self.version = 0
        self.drained = []
        self.replicas = []
        self.asked = []
        self.events = Events()

    async def run(self, task, sample_index, run_id, avoid=frozenset()):
        self.ran.append(run_id)
        self.avoided[run_id] = avoid
        answer = self.answers.get(run_id, self.answers.get(task.task_id, {}))
        if self.held:
            self.living[run_id] = asyncio.get_running_loop().create_future()
            try:
                answer = await self.living[run_id] or answer
            finally:
                self.living.pop(run_id, None)
        if isinstance(answer, BaseException):
            raise answer
        return result(run_id, task, sample_index, **answer)

    def let(self, run_id, **answer):
        """Let a held run end with these fields."""
        self.living[run_id].set_result(answer)

    def cancel(self, run_id):
        if run_id not in self.living:
            return False
        self.let(run_id, **failure("cancelled", "cancelled while RUNNING", "CANCELLED"))
        return True

    outlive = False
    capture = None

    def expect(self, run_id):
        return False

    async def settle(self):
        pass

    async def recall(self, run_id):
        return self.recallable.get(run_id)

    def release(self, run_id):
        self.released.append(run_id)

    async def remove(self, run_id):
        self.removed.append(run_id)

    async def kept_bytes(self):
        return 0

    async def set_policy(self, wanted):
        self.asked.append(wanted)
        self.version = wanted.version if wanted.version is not None else self.version

    def policy(self):
        known = {"version": self.version, "paused": False, "hold": None, "model": "fake"}
        return known | {"engines": [{"name": name, "state": "serving"} for name in self.replicas]}

    def nodes(self):
        state = "draining" if self.drained else "live"
        return [{"name": "fake", "state": state, "slots": self.capacity, "free": self.capacity}]

    async def metrics(self):
        return {"fake": GatewayMetrics().render().decode()}

    async def drain_node(self, name):
        if name != "fake":
            raise ConfigError(f"no node {name!r}")
        self.drained.append(name)

    async def add_replica(self, engine):
        self.replicas.append(engine)

    async def remove_replica(self, name, drain_s):
        if name not in self.replicas:
            raise ConfigError(f"no replica {name!r}")
        self.replicas.remove(name)

    async def artifact(self, run_id, name):
        return self.artifacts.get((run_id, name))


def submission(task_id="t", samples=1, **more):
    """A task that names what is there, and needs nothing."""
    return Submission(
        task_id=task_id,
        instruction="Do it.",
        num_samples=samples,
        runtime=RuntimeSpec(backend="local"),
        agent=AgentSpec(harness="command", command="true"),
        evaluator=EvaluatorSpec(),
        **{"retry_backoff_s": 0.0, **more},
    )


def body(task_id="t", samples=1, **more):
    """The same as JSON of `POST /v1/tasks`."""
    return {
        "task_id": task_id,
        "instruction": "Do it.",
        "num_samples": samples,
        "runtime": {"backend": "local"},
        "agent": {"harness": "command", "command": "true"},
        "retry_backoff_s": 0.0,
        **more,
    }


@asynccontextmanager
async def a_service(tmp_path, workers=None, *, owner="me", **settings):
    """A service on `tmp_path`, as often as one likes one after the other."""
    async with await Database.open(database_of(tmp_path)) as database:
        service = Service(
            database=database,
            files=TrajectoryFiles(tmp_path / "trajectories", parquet),
            workers=workers or FakeWorkers(),
            settings=ServiceSettings(**settings),
            owner=owner,
        )
        async with service:
            yield service


TOKEN = ApiToken(name="admin", token="the-token-of-an-admin", roles=(TokenRole.ADMIN,))
KNOWN = {"authorization": f"Bearer {TOKEN.token}"}


def with_token(url):
    """The URL of a server with its token: all that a client needs."""
    return url.replace("http://", f"http://x:{TOKEN.token}@")


def served(service, *, permits=None, tokens=(TOKEN,), callbacks=("127.0.0.0/8",)):
    """Return what an application is made of."""
    permits = permits or SubmissionPolicy(runtimes=tuple(RUNTIMES))
    return ServerContext(service, permits, Auth(tokens), CallbackAddresses(callbacks))


@asynccontextmanager
async def an_app(
    tmp_path, workers=None, *, permits=None, tokens=(TOKEN,), headers=None, **settings
):
    """An HTTP client of an application in this process, which has `TOKEN` where there is no other.

    `.service` is its service, `.app` the application.
    """
    headers = headers or (KNOWN if TOKEN in tokens else None)
    async with a_service(tmp_path, workers, **settings) as service:
        app = make_app(served(service, permits=permits, tokens=tokens))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://server", headers=headers
        ) as http:
            http.service = service  # type: ignore[attr-defined]  # for the tests
            http.app = app  # type: ignore[attr-defined]
            yield http


async def until(condition, what="it"):
    """Wait until `condition()` (or what it awaits) is true; returns that."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.005)


async def ended(service, task_id):
    """The row of a task, once it is final."""

    async def final():
        row = await service.queries.task(task_id)
        return row if row is not None and row["done_seq"] is not None else None

    return await until(final)
