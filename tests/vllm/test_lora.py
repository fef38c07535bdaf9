"""Adapters on a running vLLM: two policies on one server, and updates beside running calls."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from tests.gateway.sdk_agents import openai_client

from bridle.embedded.model import load_model
from bridle.engines.pool import EnginePool
from bridle.engines.pool_replica import Replica, RoutingSettings
from bridle.engines.vllm import VllmEngine
from bridle.errors import EngineError
from bridle.training.grpo import Learner
from bridle.training.settings import GrpoSettings, LoraSettings

from .checks import CLOSE, RecordingVllm, opened_gateway, plain_logprobs, sampling_of, until
from .learning import check_learning
from .serving import VllmServer, printed_flags

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

FLAGS = (*printed_flags("lora"), "--max-model-len", "4096", "--max-loras", "4")
LORA = LoraSettings(rank=8, alpha=16)
TOKENS = 800
GENERATED = "vllm:generation_tokens_total"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A server of the demo's model that takes adapters."""
    from examples.demo.model import demo_model

    with VllmServer(tmp_path_factory.mktemp("lora"), demo_model()) as server:
        yield server.running(*FLAGS)


def make_adapter(model, folder, seed):
    """A random adapter, and in `merged` the model that it makes."""
    learner = Learner.load(model, GrpoSettings(seed=seed), lora=LORA)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, one in learner.model.named_parameters():
            if ".lora_" in name:
                one.normal_(0, 0.1)
    learner.model.save_pretrained(folder)
    plain = load_model(folder, dtype="float32", device=torch.device("cpu"))
    plain.save_pretrained(folder / "merged")
    return folder


@pytest.fixture(scope="module")
def adapters(adapted, tmp_path_factory):
    """Four adapters of other weights."""
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(adapted.model, folder / str(seed), seed) for seed in range(4)]


@asynccontextmanager
async def talking(server, gateway, *, stream=False):
    """A long call under way, of the session that it gives; leaving awaits its end."""
    handle = await gateway.open_session(sampling=sampling_of(TOKENS))
    async with openai_client(handle) as client, asyncio.TaskGroup() as group:

        async def call():
            answer = await client.with_options(timeout=400).chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "Say a lot."}],
                extra_body={"min_tokens": TOKENS},
                stream=stream,
            )
            if stream:
                async for _ in answer:
                    pass

        before = await asyncio.to_thread(server.metric, GENERATED)
        group.create_task(call())
        await until(server, GENERATED, before + 20)
        yield handle.session_id


def check(store, session_id, *weights):
    """Each span has its version, and its logprobs are those of the merged adapter of it."""
    (exchange,) = store.exchanges(session_id)
    spans = exchange.versions
    assert [one.version for one in spans] == [version for version, _ in weights]
    assert (spans[0].start, spans[-1].end) == (0, TOKENS)
    for (_, adapter), span in zip(weights, spans, strict=True):
        said = plain_logprobs(adapter / "merged", exchange.suffix_ids, exchange.output_ids)
        error = np.abs(said - exchange.logprobs)
        assert error[span.start : span.end].max() < CLOSE
        assert len(spans) == 1 or error.max() > 0.1
    return spans


async def names(server):
    listed = await asyncio.to_thread(server.call, "GET", "/v1/models")
    return [one["id"].partition("-")[0] for one in listed["data"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_two_policies_share_one_vllm_and_running_calls_keep_their_adapter(
    adapted, adapters, stream
):
    first, second, other, third = adapters
    async with (
        opened_gateway(adapted) as (one, of_one),
        opened_gateway(adapted) as (two, of_two),
    ):
        await one.update_weights(first, 1)
        await two.update_weights(other, 7)
        async with (
            talking(adapted, one, stream=stream) as old,
            talking(adapted, two, stream=stream) as others,
        ):
            await one.update_weights(second, 2)
            assert not of_one.exchanges(old)
            async with talking(adapted, one, stream=stream) as new:
                pass
        check(of_one, old, (1, first))
        check(of_one, new, (2, second))
        check(of_two, others, (7, other))
        assert await names(adapted) == ["tiny", "tiny@1", "tiny@7", "tiny@2"]
        await one.update_weights(third, 3)
        assert await names(adapted) == ["tiny", "tiny@7", "tiny@2", "tiny@3"]
    assert await names(adapted) == ["tiny"]


async def test_a_call_two_adapter_versions_behind_resumes_under_the_newest(adapted, adapters):
    first, second, third, _ = adapters
    replica = Replica("vllm", RecordingVllm(adapted.url))
    pool = EnginePool([replica], settings=RoutingSettings(keep_tokens=True))
    async with opened_gateway(adapted, engine=pool) as (gateway, store):
        await gateway.update_weights(first, 1)
        async with talking(adapted, gateway, stream=True) as session:
            await gateway.update_weights(second, 2)
            await gateway.update_weights(third, 3)
        old, new = check(store, session, (1, first), (3, third))
        assert old.end == new.start > 5


async def test_loading_an_adapter_without_enable_lora_fails_with_the_vllm_flags(server, adapters):
    engine = VllmEngine(server.url)
    try:
        await engine.start()
        with pytest.raises(EngineError, match=r"--enable-lora.*--max-lora-rank"):
            await engine.load_adapter(adapters[0], 1)
        await engine.health()
    finally:
        await engine.aclose()


async def test_lora_training_on_vllm_improves_and_leaves_no_adapter_loaded(adapted, tmp_path):
    await check_learning(adapted.url, adapted.model, tmp_path, LORA, rate=8e-3)
    assert await names(adapted) == ["tiny"]
