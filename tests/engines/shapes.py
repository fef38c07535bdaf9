"""The serving engines' shapes: an engine of ours behind a server, and the adapter that reads it."""

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.engines.completions import CompletionServer
from tests.engines.sglang_server import SglangServer

from bridle.engines.base import GenerateRequest
from bridle.engines.ids import ArrayIds
from bridle.engines.sglang import SglangEngine
from bridle.engines.vllm import VllmEngine
from bridle.engines.vllm_routes import VllmRoute
from bridle.scripted.server import EngineServer
from bridle.scripted.tokenizer import load_tokenizer
from bridle.types import Sampling

TOKENIZER = load_tokenizer(None)
PROMPT = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to serve and to read."""

    server: type[EngineServer]
    adapter: Any
    serving: dict[str, Any] = field(default_factory=dict)
    reading: dict[str, Any] = field(default_factory=dict)
    tells_prompt: bool = True
    """Whether streams tell the prompt's ids."""

    @asynccontextmanager
    async def over(self, engine, **options):
        """A started adapter of `engine` behind the server."""
        async with self.server(engine, **self.serving) as server:
            adapter = self.adapter(server.url, **self.reading, **options)
            try:
                await adapter.start()
                yield adapter
            finally:
                await adapter.aclose()


SHAPES = {
    "vllm chat": Shape(EngineServer, VllmEngine, reading={"route": VllmRoute.CHAT}),
    "vllm generate": Shape(EngineServer, VllmEngine, reading={"route": VllmRoute.GENERATE}),
    "vllm completions": Shape(
        CompletionServer, VllmEngine, reading={"route": VllmRoute.COMPLETIONS}
    ),
    "sglang": Shape(SglangServer, SglangEngine, tells_prompt=False),
    "sglang incremental": Shape(
        SglangServer, SglangEngine, serving={"incremental": True}, tells_prompt=False
    ),
}


def request(prompt=PROMPT, **fields):
    """A call that samples freely."""
    fields.setdefault("sampling", Sampling(temperature=1.0, max_tokens=500))
    fields.setdefault("request_id", "r")
    return GenerateRequest(prompt=ArrayIds(np.asarray(prompt)), **fields)


async def collect(engine, made):
    """All chunks of one call."""
    return [chunk async for chunk in engine.generate(made)]


def ids_of(chunks):
    """All sampled ids."""
    return np.concatenate([chunk.output_ids for chunk in chunks])


def logprobs_of(chunks):
    """All logprobs."""
    return np.concatenate([chunk.logprobs for chunk in chunks])
