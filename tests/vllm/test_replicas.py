"""Two real vLLM as one engine; one of them is killed while it samples."""

import asyncio
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from tests.gateway.test_failover import DIALECTS

from bridle.engines.pool import EnginePool
from bridle.engines.pool_replica import Replica, RoutingSettings
from bridle.trajectory import rebuild
from bridle.types import VersionSpan

from .checks import CLOSE, RecordingVllm, opened_gateway, plain_logprobs
from .serving import VllmServer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.needs("weight versions"),
    pytest.mark.timeout(400),
]

TEXT = " ".join(f"word{number}" for number in range(200))
"""What the model says: with `STEP_S`, half a minute of the engine that is killed."""
STEP_S = 0.05
"""Seconds of each of its steps, so that no reply ends before it is killed."""
SOME = 20
"""Tokens that each reply has when its engine is killed, at least."""


@pytest.fixture
def doomed(tmp_path, models):
    """A second server, of the same model."""
    with VllmServer(tmp_path, models[0]) as server:
        yield server.running()


async def test_a_replica_killed_in_mid_reply_is_resumed_by_another_in_every_dialect(
    server, doomed, models
):
    """Its tokens are kept, and the other replica continues them under newer weights."""
    for one in (server, doomed):
        one.say({"conversations": [{"turns": [{"content": TEXT}]}]})
    doomed.slow_down(STEP_S)
    server.load(models[1], 1)
    try:
        pool = EnginePool(
            [
                Replica(url, RecordingVllm(url), partial(RecordingVllm, url))
                for url in (doomed.url, server.url)
            ],
            settings=RoutingSettings(keep_tokens=True, backoff_s=0.2),
        )
        async with opened_gateway(server, engine=pool) as (gateway, store):
            # All begin at one moment, however long the clients take to be made.
            await asyncio.to_thread(doomed.call, "POST", "/pause?mode=keep")
            async with asyncio.TaskGroup() as group:
                asked = []
                for ask in DIALECTS:
                    for stream in (True, False):
                        handle = await gateway.open_session()
                        pool._router.pick(handle.session_id, pool.each()[:1])
                        call = ask(SimpleNamespace(handle=handle), stream=stream)
                        asked.append((handle.session_id, group.create_task(call)))
                await until_there(pool, len(asked))
                await asyncio.to_thread(doomed.call, "POST", "/resume")
                await under_way(pool, len(asked))
                await asyncio.to_thread(doomed.kill)
            assert [task.result() for _, task in asked] == [TEXT] * len(asked)
            await found_down(pool)
            for session_id, _ in asked:
                await gateway.seal(session_id)
                check_resumed(store, session_id, models)
    finally:
        server.load(models[0], 0)


async def until_there(pool, calls):
    """Wait until all calls have been given to the first replica."""
    async with asyncio.timeout(120):
        while len(pool.each()[0].running) < calls:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)


async def under_way(pool, calls):
    """Wait until all calls run on the first replica and have some tokens."""
    first = pool.each()[0]
    async with asyncio.timeout(60):
        while [call.given >= SOME for call in first.running.values()] != [True] * calls:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)


async def found_down(pool):
    """Wait until the pool knows the first replica as down, and only that one.

    Its processes die one after the other, so a last look at its health may still find it well.
    """
    async with asyncio.timeout(60):
        while [one["state"] for one in pool.replicas()] != ["down", "live"]:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.05)


def check_resumed(store, session_id, models):
    """One exchange of the engines' own ids and logprobs, each token under the weights it names."""
    (exchange,) = store.exchanges(session_id)
    ids = exchange.output_ids
    assert exchange.extra["resumed"] == 1
    dead, alive = (RecordingVllm.said(f"{exchange.exchange_id}{end}") for end in ("", "-1"))
    assert alive.prompt == dead.prompt + dead.ids == [*exchange.suffix_ids, *dead.ids]
    assert ids.tolist() == dead.ids + alive.ids
    assert np.array_equal(exchange.logprobs, np.concatenate([dead.logprobs, alive.logprobs]))
    first, second = exchange.versions
    assert first == VersionSpan(0, 0, len(dead.ids))
    assert second == VersionSpan(1, first.end, len(ids))
    assert SOME <= first.end < len(ids)
    for model, span in zip(models, exchange.versions, strict=True):
        expected = plain_logprobs(model, exchange.suffix_ids, ids)
        assert np.abs(expected - exchange.logprobs)[span.start : span.end].max() < CLOSE
    stats = rebuild(store.read(session_id)).metadata["stats"]
    assert stats["tokens_captured"] == stats["tokens_trained"] == len(ids)
