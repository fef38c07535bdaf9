"""An engine that dies in mid-reply, and comes back."""

import asyncio
import os
import signal

import openai
import pytest
from tests.gateway.sdk_agents import openai_client

from bridle.engines.pool import EnginePool
from bridle.engines.pool_replica import Replica, RoutingSettings
from bridle.errors import EngineError

from .checks import (
    RecordingVllm,
    check_session,
    opened_gateway,
    reply,
    request,
    sampling_of,
    until,
)
from .keeper import group_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}},
    },
}
TOKENS = 20_000
"""Far more than are sampled before the engine dies."""


async def sampling(server, tokens=40):
    """Wait until the server has sampled some more."""
    counted = "vllm:generation_tokens_total"
    before = await asyncio.to_thread(server.metric, counted)
    await until(server, counted, before + tokens)


async def lost(client, *, stream):
    """The error of a long reply that its engine does not survive."""
    try:
        reply = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Say a lot."}],
            stream=stream,
            extra_body={"min_tokens": TOKENS},
        )
        if stream:
            async for _ in reply:
                pass
    except openai.APIError as error:
        return error
    raise AssertionError("it got a reply")


async def live(pool):
    """Wait until its replica, started anew, gets calls."""
    async with asyncio.timeout(60):
        while pool.replicas()[0]["state"] != "live":  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.05)


async def unhealthy(engine):
    """The error of the engine's health, as soon as it has one."""
    async with asyncio.timeout(60):
        while True:
            try:
                await engine.health()
            except EngineError as error:
                return error
            await asyncio.sleep(0.2)


async def test_a_killed_vllm_gives_an_error_and_a_restarted_one_continues_the_session(server):
    call = {"name": "look", "arguments": {"page": 1}}
    turns = [{"tool_calls": [call]}, {"content": "The end."}]
    server.say({"conversations": [{"when": {"user_contains": "Read"}, "turns": turns}]})
    replica = Replica(server.url, RecordingVllm(server.url), lambda: RecordingVllm(server.url))
    pool = EnginePool([replica], settings=RoutingSettings(patience_s=1, backoff_s=0.1))
    async with opened_gateway(server, engine=pool) as (gateway, store):
        handle = await gateway.open_session(sampling=sampling_of(TOKENS))
        async with openai_client(handle) as client:
            said = [{"role": "user", "content": "Read."}]
            first = await client.chat.completions.create(model="m", messages=said, tools=[LOOK])
            message = first.choices[0].message
            said.append(message.model_dump(exclude_none=True))
            said.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "."})

            async with asyncio.TaskGroup() as group:
                whole = group.create_task(lost(client, stream=False))
                streamed = group.create_task(lost(client, stream=True))
                await sampling(server)
                await asyncio.to_thread(server.kill)
            assert whole.result().status_code in {500, 502, 503, 504, 529}
            assert "127.0.0.1" not in str(whole.result())
            assert streamed.result().message

            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="m", messages=said, tools=[LOOK])
            await asyncio.to_thread(server.start)
            await live(pool)
            second = await client.chat.completions.create(model="m", messages=said, tools=[LOOK])
            assert second.choices[0].message.content == "The end."
        await gateway.seal(handle.session_id)
        trajectory = check_session(store, handle.session_id, server.model)
    stats = trajectory.metadata["stats"]
    assert (stats["exchanges"], stats["merge_ratio"], stats["traces"]) == (2, 1.0, 1)


async def test_a_killed_vllm_worker_gives_a_retryable_engine_error(server):
    engine = RecordingVllm(server.url)
    await engine.start()
    asked = request([5, 6, 7], max_tokens=TOKENS, min_tokens=TOKENS, stream=True)
    try:
        async with asyncio.TaskGroup() as group:
            call = group.create_task(failing(engine, asked))
            await sampling(server)
            os.kill(worker_of(server), signal.SIGKILL)
        assert call.result().retryable
        assert (await unhealthy(engine)).retryable
    finally:
        await engine.aclose()
        await asyncio.to_thread(server.stop)


async def failing(engine, asked):
    with pytest.raises(EngineError) as caught:
        await reply(engine, asked)
    return caught.value


def worker_of(server):
    """The process that computes: the last of the server's group."""
    return max(group_of(server.tell()))
