"""The official SDKs of all four dialects through the gateway to a real vLLM."""

import pytest
from tests.gateway.sdk_agents import CLIENTS, TURNS, reading

from .checks import RecordingVllm, check_session, opened_gateway, sampling_of
from .serving import ROUTES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.mark.parametrize("client", CLIENTS)
async def test_nine_turns_with_tools_are_one_trace_of_vllm_s_own_tokens(server, client):
    server.say(reading())
    async with opened_gateway(server) as (gateway, store):
        handle = await gateway.open_session()
        await client(handle, TURNS)
        await gateway.seal(handle.session_id)
        trajectory = check_session(store, handle.session_id, server.model)
        assert len(trajectory.traces) == 1
        stats = trajectory.metadata["stats"]
        assert (stats["exchanges"], stats["roots"], stats["merge_ratio"]) == (TURNS, 1, 1.0)
        assert stats["tokens_trained"] == stats["tokens_captured"]
        assert stats["drift"] == {"exact": TURNS - 1}


async def test_with_prompt_engine_vllm_renders_the_first_prompt_and_the_gateway_the_next(server):
    """At the start seven conversations are rendered and sent to its chat route: they are alike."""
    server.say(reading())
    client = CLIENTS[-1]
    async with opened_gateway(server, prompt="engine") as (gateway, store):
        handle = await gateway.open_session()
        await client(handle, TURNS)
        await gateway.seal(handle.session_id)
        trajectory = check_session(store, handle.session_id, server.model)
        assert len(trajectory.traces) == 1
        result = [exchange.extra.get("prompt") for exchange in store.exchanges(handle.session_id)]
        assert result == ["engine", *[None] * (TURNS - 1)]


@pytest.mark.parametrize("route", ROUTES)
async def test_unscripted_tokens_of_a_random_model_are_captured_exactly(server, route):
    """Random weights say junk: no turn parses, and none of its tokens is lost or changed."""
    sampling = sampling_of(96)
    async with opened_gateway(server, engine=RecordingVllm(server.url, route=route)) as (
        gateway,
        store,
    ):
        for client in CLIENTS:
            handle = await gateway.open_session(sampling=sampling)
            await client(handle, 2)
            await gateway.seal(handle.session_id)
            trajectory = check_session(store, handle.session_id, server.model)
            assert trajectory.metadata["stats"]["exchanges"] == 2
            assert trajectory.metadata["stats"]["tokens_captured"] > 0
