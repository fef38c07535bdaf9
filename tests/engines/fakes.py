"""An engine whose every failure a test decides, and pools of them."""

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from bridle.engines.base import EngineInfo, GenerateChunk, GenerateRequest
from bridle.engines.ids import ArrayIds
from bridle.engines.pool import EnginePool
from bridle.engines.pool_replica import Replica, RoutingSettings
from bridle.errors import EngineError
from bridle.types import FinishReason, LogprobMode, Sampling

INFO = EngineInfo("m", 1000, LogprobMode.RAW, token_in=True, version=0)
QUICK = {"backoff_s": 0.01, "max_backoff_s": 0.02, "health_every_s": 0.02, "patience_s": 15}


def lost(message="connection refused"):
    """Return what an adapter raises for a server that is not there."""
    return EngineError(message, retryable=True)


class Fake:
    """Counts up from 0 in chunks of one token, after a prompt of 3; goes on counting after a longer
    one. A test makes it fail, hang, or say other things."""

    def __init__(self, *, tokens=4, info=INFO, versions=(), numbered=False):
        self.tokens = tokens
        self.versions = versions
        """What its last chunk says of the versions."""
        self.numbered = numbered
        self.info = info
        self.asked: list[GenerateRequest] = []
        self.faults: deque[tuple[int, Exception]] = deque()
        """For each next call: after so many tokens, this."""
        self.sick: Exception | None = None
        """What `health` and `start` say."""
        self.looked = 0
        self.started = self.closed = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.aborted: set[str] = set()

    def fail(self, error, *, after=0):
        self.faults.append((after, error))

    async def start(self):
        self.started += 1
        if self.sick is not None:
            raise self.sick
        return self.info

    async def generate(self, request):
        self.asked.append(request)
        after, fault = self.faults.popleft() if self.faults else (0, None)
        for token in range(len(request.prompt) - 3, self.tokens):
            while not self.gate.is_set() and request.request_id not in self.aborted:  # noqa: ASYNC110 - either may come
                await asyncio.sleep(0.002)
            if fault is not None and token - len(request.prompt) + 3 == after:
                raise fault
            ended = FinishReason.STOP if token == self.tokens - 1 else None
            if request.request_id in self.aborted:
                yield chunk([], FinishReason.ABORT)
                return
            ending = {"versions": self.versions, "numbered": self.numbered} if ended else {}
            yield chunk([token], ended, **ending)
            await asyncio.sleep(0)

    async def abort(self, request_id):
        self.aborted.add(request_id)

    async def health(self):
        self.looked += 1
        if self.sick is not None:
            raise self.sick

    async def set_version(self, version):
        self.info = replace(self.info, version=version)

    async def aclose(self):
        self.closed += 1


def chunk(ids, finish=None, **more):
    array = np.array(ids, dtype=np.int32)
    return GenerateChunk(array, -array.astype(np.float32), finish, **more)


def call(name="r", session="s", **more):
    return GenerateRequest(
        name, ArrayIds(np.arange(3, dtype=np.int32)), Sampling(), session_id=session, **more
    )


async def said(pool, request=None):
    """Tokens of a call and its last chunk."""
    chunks = [one async for one in pool.generate(request or call())]
    return [token for one in chunks for token in one.output_ids.tolist()], chunks[-1]


@asynccontextmanager
async def pooled(*fakes, reopen=None, **settings):
    """A started pool of fakes named `a`, `b`...; leaving it closes them."""
    replicas = [
        Replica(name, fake, None if reopen is None else partial(reopen, fake))
        for name, fake in zip("abcdef", fakes, strict=False)
    ]
    pool = EnginePool(replicas, settings=RoutingSettings(**{**QUICK, **settings}))
    try:
        await pool.start()
        yield pool
    finally:
        await pool.aclose()


@asynccontextmanager
async def one_running(pool, fake):
    """A call that waits at the gate of `fake`, and ends when the block does."""
    fake.gate.clear()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(said(pool))
        await until(lambda: fake.asked)
        yield running
        fake.gate.set()


def state(pool, name):
    return next(one["state"] for one in pool.replicas() if one["name"] == name)


async def until(condition):
    """Wait until `condition()` holds."""
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.002)
