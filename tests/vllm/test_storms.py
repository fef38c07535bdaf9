"""A storm of equal calls on a real vLLM: one sample for each call that got an answer."""

import aiohttp
import pytest
from tests.gateway.house import TOKEN, House
from tests.gateway.storms import Stormy, weather

from bridle.config import Limits
from bridle.types import DeliveryState

from .checks import RecordingVllm, opened_gateway, prompts, sampling_of

CALLS = 200

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


async def test_every_answered_call_of_concurrent_duplicates_is_one_vllm_sample(server):
    engine = Stormy(1, RecordingVllm(server.url))
    async with (
        opened_gateway(server, engine=engine, control_token=TOKEN) as (gateway, store),
        aiohttp.ClientSession() as client,
    ):
        handle = await gateway.open_session(
            sampling=sampling_of(24), limits=Limits(max_calls_in_flight=CALLS // 3)
        )
        session = (handle.session_id, handle.base_urls, handle.key)
        await weather(House(gateway, store, client).control, [session], 1, CALLS)
        exchanges = store.exchanges(handle.session_id)
        delivered = store.deliveries(handle.session_id)
        whole = prompts(exchanges)
        for exchange in exchanges:
            if delivered[exchange.exchange_id].state is not DeliveryState.DELIVERED:
                continue
            [sampled] = [one for one in RecordingVllm.answers if exchange.exchange_id in one]
            said = RecordingVllm.said(sampled)
            assert whole[exchange.exchange_id].tolist() == said.prompt
            assert exchange.output_ids.tolist() == said.ids
