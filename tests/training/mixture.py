"""A tiny mixture of experts that plays through a gateway, and trainers of it that are off."""

from typing import Any

import aiohttp
import numpy as np
import orjson
import torch
import transformers
from tests.conformance.memory import MemoryStore
from tests.embedded.models import HEADS

from bridle.config import FieldPolicy, SamplingPolicy, builtin_tokenizer_dir
from bridle.embedded import EmbeddedEngine
from bridle.embedded.routing import routing_of
from bridle.gateway.app import GatewayServer
from bridle.gateway.settings import GatewaySettings
from bridle.prompting.renderer import load_renderer
from bridle.training.forward import recompute
from bridle.trajectory import rebuild

EXPERTS, TOP_K, LAYERS = 16, 3, 3
TIE = 5e-6
"""Difference of a pair, as a share of the weights: 40 times the rounding of float32."""


def save_mixture(folder, *, ties, seed=0):
    """Write the model. With `ties` its experts come in pairs that the router hardly tells apart.

    Three of them are taken for each token, so that one pair is always divided.
    """
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        **HEADS | {"max_position_embeddings": 4096},
        vocab_size=2048, hidden_size=32, num_hidden_layers=LAYERS, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, moe_intermediate_size=24, norm_topk_prob=True,
        initializer_range=0.3, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for router in routers(model):
            if ties:
                router.weight[1::2] = router.weight[::2] * (1 + TIE)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(builtin_tokenizer_dir()).save_pretrained(folder)
    return folder


def routers(model):
    return [one for one in model.modules() if type(one).__name__.endswith("TopKRouter")]


async def played(folder, *, sessions, turns, tokens=24):
    """Trajectories of sessions of so many turns, captured by a gateway over the embedded engine."""
    torch.set_num_threads(1)
    store, engine = MemoryStore(), EmbeddedEngine(folder, device="cpu")
    sampling = SamplingPolicy(max_output_tokens=tokens, seed=FieldPolicy(mode="override", value=1))
    renderer, settings = load_renderer("builtin"), GatewaySettings()
    found = []
    async with (
        GatewayServer(engine=engine, renderer=renderer, store=store, settings=settings) as gateway,
        aiohttp.ClientSession() as client,
    ):
        for number in range(sessions):
            handle = await gateway.open_session(f"s{number}", sampling=sampling)
            messages = [{"role": "user", "content": f"Say {number}."}]
            for turn in range(turns):
                async with client.post(
                    handle.base_urls["openai"] + "/chat/completions",
                    data=orjson.dumps({"model": "m", "messages": messages}),
                    headers={"Authorization": f"Bearer {handle.key}"},
                ) as response:
                    assert response.status == 200, await response.text()
                    reply = orjson.loads(await response.read())["choices"][0]["message"]
                messages += [reply, {"role": "user", "content": f"And {turn}?"}]
            await gateway.seal(handle.session_id)
            found.append(rebuild(store.read(handle.session_id)))
    await engine.aclose()
    return found


def off(folder, *, noise=0.0, dtype=None, seed=0):
    """The trainer's model with routers that are off: by noise of a share of their weights, or
    rounded to `dtype`.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for router in routers(model):
            drawn = torch.randn(router.weight.shape, generator=generator)
            router.weight *= 1 + noise * drawn
            if dtype is not None:
                router.weight.copy_(router.weight.to(dtype))
    return model


def difference(model, traces, *, replay):
    """KL of trainer and rollout per token, in nats, and the largest difference of a logprob."""
    by_id = {trace.trace_id: trace for trace in traces}
    found = []
    for answer in recompute(model, traces, replay=replay):
        trace = by_id[answer.trace_id]
        rollout = trace.response_logprobs[answer.positions - len(trace.prompt_ids)]
        found.append(answer.logprobs.astype(np.float64) - rollout)
    apart = np.concatenate(found)
    return float(np.mean(np.expm1(apart) - apart)), float(np.abs(apart).max())


def flipped(model, traces):
    """Share of tokens and layers that the model's own routers would send to other experts."""
    routing: Any = routing_of(model)
    other = among = 0
    for trace in traces:
        ids = np.concatenate([trace.prompt_ids, trace.response_ids])[:-1]
        with torch.no_grad(), routing.recording() as recorded:
            model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False)
        own, rolled = (
            np.sort(one, -1) for one in (routing.rows(recorded), trace.routed_experts[:-1])
        )
        other += int((own != rolled).any(-1).sum())
        among += own.shape[0] * own.shape[1]
    return other / among
