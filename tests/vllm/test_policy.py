"""Weights that change while a reply is being sampled."""

import asyncio

import numpy as np
import pytest
from tests.gateway.sdk_agents import openai_client

from bridle.engines.vllm_routes import VllmRoute
from bridle.errors import EngineError
from bridle.node.fleet import Here, update
from bridle.trajectory import rebuild
from bridle.types import VersionSpan

from .checks import (
    CLOSE,
    RecordingVllm,
    opened_gateway,
    plain_logprobs,
    sampling_of,
    until,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.needs("weight versions"),
    pytest.mark.timeout(300),
]

TOKENS = 1200
"""Long enough to be changed under way: some seconds."""


def check_spans(exchange, models):
    """Each token's logprob is a plain forward pass's of the weights that its span names.

    Over the whole prompt: vLLM drops what it had computed with the old weights.
    """
    for model, span in zip(models, exchange.versions, strict=True):
        expected = plain_logprobs(model, exchange.suffix_ids, exchange.output_ids)
        error = np.abs(expected - exchange.logprobs)
        assert error[span.start : span.end].max() < CLOSE
        assert len(error) == span.end - span.start or error.max() > 0.1


@pytest.fixture
def updated(server, models):
    """The server; its first weights come back afterwards."""
    yield server
    server.load(models[0], 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_version_spans_show_a_weight_update_in_mid_reply_of_vllm(updated, models, stream):
    async with opened_gateway(updated) as (gateway, store):
        handle = await gateway.open_session(sampling=sampling_of(TOKENS))
        async with (
            openai_client(handle) as client,
            asyncio.TaskGroup() as group,
        ):
            asking = {"min_tokens": TOKENS}
            said = [{"role": "user", "content": "Say a lot."}]
            before = await asyncio.to_thread(updated.metric, "vllm:generation_tokens_total")
            call = group.create_task(
                client.chat.completions.create(
                    model="m", messages=said, extra_body=asking, stream=stream
                )
            )
            await until(updated, "vllm:generation_tokens_total", before + 40)
            await asyncio.to_thread(updated.call, "POST", "/pause?mode=keep")
            await asyncio.to_thread(updated.load, models[1], 1)
            await asyncio.to_thread(updated.call, "POST", "/resume")
            if stream:
                async for _ in await call:
                    pass
        (exchange,) = store.exchanges(handle.session_id)
    first, second = exchange.versions
    assert first == VersionSpan(0, 0, first.end)
    assert second == VersionSpan(1, first.end, TOKENS)
    assert 20 < first.end < TOKENS
    check_spans(exchange, models)


async def test_a_call_aborted_by_a_weight_update_is_resumed_as_one_reply(updated, models):
    """`pause` with its default mode ends calls; the gateway resumes them under the new weights."""
    async with opened_gateway(updated) as (gateway, store):
        handle = await gateway.open_session(sampling=sampling_of(TOKENS))
        async with (
            openai_client(handle) as client,
            asyncio.TaskGroup() as group,
        ):
            before = await asyncio.to_thread(updated.metric, "vllm:generation_tokens_total")
            call = group.create_task(
                client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": "Say a lot."}],
                    extra_body={"min_tokens": TOKENS},
                )
            )
            await until(updated, "vllm:generation_tokens_total", before + 40)
            await asyncio.to_thread(updated.call, "POST", "/pause?mode=abort")
            await asyncio.to_thread(updated.load, models[1], 1)
            await asyncio.to_thread(updated.call, "POST", "/resume")
        assert (await call).choices[0].finish_reason == "length"
        (exchange,) = store.exchanges(handle.session_id)
    assert [span.version for span in exchange.versions] == [0, 1]
    assert len(exchange.output_ids) == TOKENS
    assert exchange.extra["resumed"] >= 1
    check_spans(exchange, models)


FIRST, LATER = 8, range(300, 500, 4)
"""Tokens of the first reply of a session, and of its later ones: one number for each session. They
differ, so that the sessions do not all wait for the beginning of a reply at the same time."""


async def turns(handle, together, over, later):
    """A harness: one short call, and when all harnesses have had theirs, others until the weight
    update is over.

    So the update finds calls of both gateways under way, and every session ends with new weights.
    """
    said = [{"role": "user", "content": f"Say a little, {handle.session_id}."}]

    async def turn(client, tokens):
        reply = await client.chat.completions.create(
            model="m", messages=said, max_tokens=tokens, extra_body={"min_tokens": tokens}
        )
        message = reply.choices[0].message.model_dump(exclude_none=True)
        said.extend((message, {"role": "user", "content": "Say more."}))

    async with openai_client(handle) as client:
        await turn(client, FIRST)
        await together.wait()
        while not over.is_set():
            await turn(client, later)


async def test_a_weight_update_amid_fifty_sessions_fails_no_call(updated, models):
    counted = "vllm:generation_tokens_total"
    async with (
        opened_gateway(updated) as (one, of_one),
        opened_gateway(updated) as (other, of_other),
    ):
        homes = [(one, of_one), (other, of_other)] * (len(LATER) // 2)
        opened = [(await gateway.open_session(), store) for gateway, store in homes]
        together, over = asyncio.Barrier(len(LATER) + 1), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for (handle, _), tokens in zip(opened, LATER, strict=True):
                group.create_task(turns(handle, together, over, tokens))
            await together.wait()
            before = await asyncio.to_thread(updated.metric, counted)
            await until(updated, counted, before + len(LATER))
            await until(updated, "vllm:num_requests_running", len(LATER) / 2)
            await update([Here(one), Here(other)], str(models[1]), 1)
            over.set()
        for gateway in (one, other):
            assert gateway.policy()["version"] == 1
    resumed_at = set()
    for (handle, store), tokens in zip(opened, LATER, strict=True):
        first, *later = store.exchanges(handle.session_id)
        assert first.versions == (VersionSpan(0, 0, FIRST),)
        versions = [[span.version for span in exchange.versions] for exchange in later]
        assert versions[-1] in ([0, 1], [1])
        assert versions == sorted(versions)
        assert {len(exchange.output_ids) for exchange in later} == {tokens}
        assert {exchange.versions[-1].end for exchange in later} == {tokens}
        if [0, 1] in versions:
            resumed_at.add(store)
        (trace,) = rebuild(store.read(handle.session_id)).traces
        assert sorted({*trace.versions[trace.loss_mask == 1].tolist()}) == [0, 1]
        check_trace(trace, models)
    assert resumed_at == {of_one, of_other}


def check_trace(trace, models):
    """Each trained token's logprob is that of the weights that the trace says sampled it."""
    for version, model in enumerate(models):
        expected = plain_logprobs(model, trace.prompt_ids, trace.response_ids)
        its = (trace.loss_mask == 1) & (trace.versions == version)
        assert its.any()
        assert np.abs(expected - trace.response_logprobs)[its].max() < CLOSE


async def test_a_vllm_weight_version_that_is_no_number_is_refused_by_name(updated):
    await asyncio.to_thread(
        updated.call, "POST", "/update_weight_version", {"new_version": "after-lunch"}
    )
    engine = RecordingVllm(updated.url, route=VllmRoute.GENERATE)
    try:
        with pytest.raises(EngineError, match="after-lunch"):
            await engine.start()
    finally:
        await engine.aclose()
