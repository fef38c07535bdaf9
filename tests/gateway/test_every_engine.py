"""The suite of the real vLLM on the other engines, under the official SDKs of all four dialects.

What the engine itself was given and sampled is what capture holds and what trains: on servers of
SGLang's shapes with a script, so that there are calls to answer, and on the embedded engine with a
model of random weights, whose logprobs a plain forward pass gives too.
"""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
import transformers
from tests.conformance.memory import MemoryStore
from tests.embedded.models import HEADS, SMALL
from tests.engines.recording import RecordingEngine
from tests.engines.shapes import SHAPES
from tests.gateway.sdk_agents import CLIENTS, TURNS, reading

from bridle.config import FieldPolicy, SamplingPolicy, builtin_tokenizer_dir
from bridle.embedded import EmbeddedEngine
from bridle.gateway.app import GatewayServer
from bridle.gateway.settings import GatewaySettings
from bridle.prompting.renderer import load_renderer
from bridle.testing import scripted_engine
from bridle.trajectory import rebuild


class Kept(RecordingEngine):
    """Keeps what the engine was given and what it sampled, in ids and logprobs, by both ids."""

    def __init__(self, engine):
        super().__init__(engine)
        self.sampled = {}

    async def generate(self, request):
        ids, logprobs = [], []
        async for chunk in super().generate(request):
            ids += chunk.output_ids.tolist()
            logprobs += chunk.logprobs.tolist()
            yield chunk
        self.sampled[*request.prompt.array().tolist(), *ids] = (len(request.prompt), logprobs)


@asynccontextmanager
async def gateway_on(engine):
    store = MemoryStore()
    renderer, settings = load_renderer("builtin"), GatewaySettings()
    async with GatewayServer(
        engine=engine, renderer=renderer, store=store, settings=settings
    ) as open_:
        yield open_, store


async def trajectories(engine, kept, *, turns, sampling=None):
    """One session of each client, all at once, each held against the engine's own record."""
    async with gateway_on(engine) as (gateway, store):
        handles = [
            await gateway.open_session(client.__name__, sampling=sampling) for client in CLIENTS
        ]
        async with asyncio.TaskGroup() as group:
            for client, handle in zip(CLIENTS, handles, strict=True):
                group.create_task(client(handle, turns))
        for handle in handles:
            await gateway.seal(handle.session_id)
            capture = store.read(handle.session_id)
            trajectory = rebuild(capture)
            check(trajectory, capture, kept)
            yield trajectory


def check(trajectory, capture, kept):
    """Every turn's context and tokens are a call of the engine's, with its logprobs."""
    sizes = {one.exchange_id: len(one.output_ids) for one in capture.exchanges}
    turns = 0
    for trace in trajectory.traces:
        ids = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
        for name, end in zip(trace.exchange_ids, trace.turn_ends, strict=True):
            given, logprobs = kept.sampled[tuple(ids[: len(trace.prompt_ids) + end])]
            assert given == len(trace.prompt_ids) + end - sizes[name]
            assert trace.response_logprobs[end - sizes[name] : end].tolist() == logprobs
            turns += 1
    stats = trajectory.metadata["stats"]
    assert turns == stats["exchanges"]
    assert (stats["breaks"], stats["tokens_excluded"]) == ([], {})


OTHERS = [name for name in SHAPES if not name.startswith("vllm")]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("shape", OTHERS)
async def test_nine_turns_with_tools_are_one_trace_of_the_engines_own_tokens(shape):
    kept = Kept(scripted_engine(reading()["conversations"][0]["turns"]))
    async with SHAPES[shape].over(kept) as engine:
        async for trajectory in trajectories(engine, kept, turns=TURNS):
            stats = trajectory.metadata["stats"]
            assert (stats["exchanges"], stats["traces"], stats["merge_ratio"]) == (TURNS, 1, 1.0)
            assert stats["drift"] == {"exact": TURNS - 1}


@pytest.fixture
def random_model(tmp_path):
    """A small model of random weights with the shipped tokenizer."""
    torch.set_num_threads(1)  # tiny operations on several wait for each other more than they work
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SMALL, **{**HEADS, "max_position_embeddings": 4096})
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(builtin_tokenizer_dir()).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.timeout(180)  # 4 s of a core of one's own, most of it to load the model twice
async def test_logprobs_of_the_embedded_engine_match_a_forward_pass_on_trained_tokens(
    random_model,
):
    kept = Kept(EmbeddedEngine(random_model, device="cpu"))
    model = transformers.Qwen3ForCausalLM.from_pretrained(random_model).eval()
    seed = FieldPolicy(mode="override", value=1)
    sampling = SamplingPolicy(max_output_tokens=24, seed=seed)
    async for trajectory in trajectories(kept, kept, turns=TURNS, sampling=sampling):
        assert trajectory.metadata["stats"]["exchanges"] == TURNS
        for trace in trajectory.traces:
            ids = torch.tensor([[*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]])
            with torch.inference_mode():
                logprobs = torch.log_softmax(model(ids).logits[0, :-1].float(), dim=-1)
            expected = logprobs.gather(1, ids[0, 1:, None])[len(trace.prompt_ids) - 1 :, 0].numpy()
            trained = trace.loss_mask == 1
            assert np.abs(expected - trace.response_logprobs)[trained].max() < 1e-3
