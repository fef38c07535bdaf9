"""Thousands of calls under drawn engine faults: the counters are exact and nothing piles up."""

import asyncio
import gc
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import structlog
from tests.gateway.house import house, scripted, user

from bridle.engines.base import CutError
from bridle.errors import EngineError

CALLS = 10
"""Calls of one session."""

AT_ONCE = 8
"""Sessions that live at the same time."""

log = structlog.get_logger(__name__)


class Faulty:
    """A scripted engine that fails now and then: before the first token, or in the midst."""

    def __init__(self, seed: int) -> None:
        self._inner = scripted({"reasoning": "hm", "content": "a few words in answer"})
        self._random = random.Random(seed)
        self.faults = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def generate(self, request):
        fate = self._random.random()
        if fate < 0.05:
            status = self._random.choice([429, 500, 503])
            self.faults[str(status)] += 1
            raise EngineError("drawn", status=status, retryable=status != 500, retry_after_s=0.01)
        async for chunk in self._inner.generate(request):
            if fate > 0.97:
                self.faults["cut"] += 1
                raise CutError("drawn")
            yield chunk


async def one_session(home, answered):
    """Have one conversation, a third of it streamed; an error is the end of its turn only."""
    caller = await home.session()
    messages = [user("go")]
    for number in range(CALLS):
        body = {"model": "m", "messages": messages, "stream": number % 3 == 0}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        async with home.client.post(caller.url, json=body, headers=caller.headers) as response:
            raw = await response.read()
            whole = response.status == 200 and b'"error"' not in raw
            answered[response.status] += 1
        if whole:
            answered["whole"] += 1
            answered["tokens"] += int(re.findall(rb'"completion_tokens": ?(\d+)', raw)[-1])
            said = {"role": "assistant", "content": "a few words in answer"}
            messages = [*messages, said, user(f"go on {number}")]
    status, _ = await home.control("DELETE", f"/sessions/{caller.session_id}")
    assert status == 200
    for index, exchange in enumerate(caller.exchanges):
        answered["sampled"] += len(exchange.output_ids)
        answered[str(caller.delivery(index))] += 1
    await home.store.forget(caller.session_id)


async def sessions(home, count, answered):
    """Have so many sessions, a few at a time."""
    left = iter(range(count))

    async def worker():
        for _ in left:
            await one_session(home, answered)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())


def numbers(text):
    """The value of each sample of `/metrics`."""
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def own_objects():
    """Living objects of our own classes, by class."""
    gc.collect()
    kinds = Counter(str(type(one)) for one in gc.get_objects())
    return Counter({kind: n for kind, n in kinds.items() if kind.startswith("<class 'bridle.")})


def resident_kib():
    return int(re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[0])


async def soak(seed, calls):
    engine, answered, began = Faulty(seed), Counter(), time.monotonic()
    async with house(engine=engine) as home:
        warm = calls // 5 // CALLS
        await sessions(home, warm, answered)
        objects, memory = own_objects(), resident_kib()
        rest = calls // CALLS - warm
        await sessions(home, rest, answered)
        left, more = own_objects(), resident_kib() - memory
        _, text = await home.control("GET", "/metrics")
    took = time.monotonic() - began
    log.info(
        "soaked",
        seed=seed,
        calls=calls,
        took_s=round(took),
        answered=answered,
        faults=engine.faults,
    )
    grown = left.total() - objects.total()
    log.info("left", sessions=rest, objects=grown, kib=more)
    reply = numbers(text)
    asked = {name: value for name, value in reply.items() if 'route="generate"' in name}
    assert sum(asked.values()) == calls
    for status in (key for key in answered if isinstance(key, int)):
        name = f'bridle_requests_total{{dialect="openai_chat",route="generate",status="{status}"}}'
        assert reply[name] == answered[status], asked
    ended = {name: value for name, value in reply.items() if name.startswith("bridle_calls_total")}
    assert sum(ended.values()) == calls, ended
    assert ended['bridle_calls_total{outcome="committed"}'] == answered["whole"], ended
    assert reply['bridle_deliveries_total{state="delivered"}'] == answered["delivered"]
    assert answered["delivered"] == answered["whole"]
    assert reply["bridle_sampled_tokens_total"] == answered["sampled"] == answered["tokens"]
    assert reply["bridle_calls_in_flight"] == reply["bridle_sessions_open"] == 0
    assert set(engine.faults) == {"429", "500", "503", "cut"}
    # Connections come and go; what sessions leave is at least one object for each.
    assert grown < rest / 2, left - objects
    return more / rest


async def test_counters_are_exact_and_ended_sessions_leave_no_objects():
    await soak(seed=time.time_ns() % 1000, calls=1_000)


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_counters_are_exact_and_memory_is_flat_over_50000_calls():
    # 0.2 KiB are the hashes of ended keys, which are bounded; with the heap's fragments 0.6 to 1.1.
    assert await soak(seed=1, calls=50_000) < 2
