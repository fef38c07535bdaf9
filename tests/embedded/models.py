"""Tiny models of several architectures with random weights, and how these tests call an engine."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from bridle.config import builtin_tokenizer_dir
from bridle.embedded import EmbeddedEngine
from bridle.engines.base import GenerateChunk, GenerateRequest
from bridle.types import FinishReason, Sampling

VOCAB = 2048
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, **HEADS, eos_token_id=2),
    "llama": lambda: transformers.LlamaConfig(**SMALL, **HEADS, eos_token_id=2),
    "mixture": lambda: transformers.Qwen3MoeConfig(
        **SMALL,
        **HEADS,
        eos_token_id=2,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        initializer_range=0.3,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, eos_token_id=2
    ),
    "mistral": lambda: transformers.MistralConfig(**SMALL, **HEADS, sliding_window=7),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, **HEADS, sliding_window=7),
    "mamba": lambda: transformers.MambaConfig(
        **SMALL, state_size=4, expand=2, tie_word_embeddings=False
    ),
}


def save_model(folder: Path, name: str = "qwen3", *, seed: int = 0, scale: float = 6.0) -> Path:
    """Write a model of CONFIGS with random weights, far enough from uniform to be distinguished."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale)
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(builtin_tokenizer_dir())
    tokenizer.save_pretrained(folder)
    return folder


def adapt(base: Path, folder: Path, *, rank: int) -> None:
    """Write a LoRA adapter of random weights for the model in `base`."""
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    model.add_adapter(peft.LoraConfig(r=rank, target_modules="all-linear"))
    torch.manual_seed(rank)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if ".lora_" in name:
                one.normal_(0, 0.2)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(folder)


class Ids:
    """A prompt of given ids."""

    kept = 0

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = np.array(list(ids), dtype=np.int32)
        self.length = len(self._ids)

    def __len__(self) -> int:
        return self.length

    def array(self) -> np.ndarray:
        return self._ids

    def json(self) -> bytes:
        raise AssertionError("an engine in process needs no text")


@dataclass
class Answer:
    """All chunks of a call, joined."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    chunks: list[GenerateChunk] = field(default_factory=list)

    def add(self, chunk: GenerateChunk) -> None:
        assert chunk.output_ids.dtype == np.int32
        assert chunk.logprobs.dtype == np.float32
        assert len(chunk.output_ids) == len(chunk.logprobs)
        self.chunks.append(chunk)
        self.ids += chunk.output_ids.tolist()
        self.logprobs += chunk.logprobs.tolist()

    @property
    def last(self) -> GenerateChunk:
        return self.chunks[-1]

    @property
    def finish(self) -> FinishReason | None:
        return self.last.finish_reason

    @property
    def cached(self) -> int:
        return self.chunks[0].cached_tokens


_count = iter(range(10**9))


def request(prompt: Iterable[int], name: str | None = None, **sampling: Any) -> GenerateRequest:
    """A call with a fresh id, greedy by default."""
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, **sampling}
    return GenerateRequest(name or f"call-{next(_count)}", Ids(prompt), Sampling(**given))


async def answer(engine: EmbeddedEngine, asked: GenerateRequest) -> Answer:
    """Await the whole reply."""
    whole = Answer()
    async for chunk in engine.generate(asked):
        whole.add(chunk)
    return whole


class Stop:
    """The engine's thread stands before its third step from now until `go_on` is set."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        assert engine._loaded is not None
        assert engine._batch is not None
        self._inbox = engine._batch._inbox
        decoder: Any = engine._loaded.decoder
        forward, steps = decoder.forward, itertools.count()
        self.go_on, self._stands = threading.Event(), threading.Event()
        self.fault: BaseException | None = None
        """What the third step raises."""

        def forward_then(work: Any) -> Any:
            if next(steps) == 2:
                self._stands.set()
                self.go_on.wait(60)
                if self.fault is not None:
                    raise self.fault
            return forward(work)

        decoder.forward = forward_then

    async def first_of(self, stream: AsyncIterator[GenerateChunk]) -> GenerateChunk:
        """The first chunk of a call; the thread stands when this returns."""
        chunk = await anext(stream)
        await asyncio.to_thread(self._stands.wait, 60)
        return chunk

    async def go_on_with_news(self) -> None:
        """Go on when something was posted to the thread, which stands."""
        while self._inbox.empty():  # noqa: ASYNC110 - it has no event of a loop's
            await asyncio.sleep(0.001)
        self.go_on.set()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random ids; none of them a special token."""
    return np.random.default_rng([seed, length]).integers(300, VOCAB - 100, length).tolist()


class Oracle:
    """The model itself, by transformers' plain forward pass."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

    def logits(self, ids: list[int]) -> torch.Tensor:
        """After every id, shape (T, vocabulary)."""
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The most likely continuation, one whole forward pass for each token."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def logprobs(
        self, prompt: list[int], output: list[int], temperature: float = 1.0
    ) -> list[float]:
        """Of each output id, by one forward pass over everything."""
        logits = self.logits(prompt + output)[len(prompt) - 1 : -1] / temperature
        rows = torch.log_softmax(logits, dim=-1)
        return rows[torch.arange(len(output)), output].tolist()
