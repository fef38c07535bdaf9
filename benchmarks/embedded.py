"""The embedded engine against a plain batched torch loop: tokens per second, and exact logprobs.

Both sample from the same random 1M-parameter model of Qwen3's architecture (the shape of the demo
model): prompts of 128 tokens, 128 sampled tokens each, temperature 1, the time of the prompts
included. The loop is what one would write by hand: transformers' model and cache, one batch of
equal lengths, `multinomial`, logprobs kept. It runs with torch's own choice of threads and with one
thread; the engine runs as it is, streaming to as many asyncio callers. Each is run several times in
turn, and the best run counts.

Afterwards every logprob that the engine gave is computed again by a plain forward pass.

    python benchmarks/embedded.py [--concurrency 1 8 32] [--runs 3] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers

from bridle.config import builtin_tokenizer_dir
from bridle.embedded import EmbeddedEngine
from bridle.engines.base import GenerateRequest
from bridle.engines.ids import ArrayIds
from bridle.types import Sampling

if TYPE_CHECKING:
    from bridle.types import Ids

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One concurrency."""

    concurrency: int
    loop_tokens_s: float
    engine_tokens_s: float
    ratio: float
    first_token_ms: float
    """Median over the calls of the engine's best run."""
    logprob_error: float
    """Largest absolute difference to the plain forward pass, in nats."""


@dataclass(slots=True)
class Answer:
    """Result of one call."""

    ids: Ids
    logprobs: np.ndarray
    first_s: float


def make_model(folder: Path) -> None:
    """Write the model; its output weights are scaled so that its choices are not all alike."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
    )
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(builtin_tokenizer_dir()).save_pretrained(folder)


def plain_loop(model: transformers.PreTrainedModel, prompts: np.ndarray) -> float:
    """Tokens per second of the loop over one batch of prompts, shape (B, T)."""
    began = time.perf_counter()
    with torch.inference_mode():
        cache = transformers.DynamicCache(config=model.config)
        row = torch.from_numpy(prompts).long()
        kept = []
        for _ in range(OUTPUT_TOKENS):
            output = model(input_ids=row, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logprobs = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
            row = torch.multinomial(logprobs.exp(), 1)
            kept.append((row, logprobs.gather(1, row)))
    return len(prompts) * OUTPUT_TOKENS / (time.perf_counter() - began)


async def ask(engine: EmbeddedEngine, name: str, prompt: np.ndarray, began: float) -> Answer:
    """One call of exactly OUTPUT_TOKENS tokens."""
    sampling = Sampling(temperature=1.0, max_tokens=OUTPUT_TOKENS, min_tokens=OUTPUT_TOKENS)
    chunks, first_s = [], 0.0
    async for chunk in engine.generate(GenerateRequest(name, ArrayIds(prompt), sampling)):
        first_s = first_s or time.perf_counter() - began
        chunks.append(chunk)
    ids = np.concatenate([chunk.output_ids for chunk in chunks])
    return Answer(ids, np.concatenate([chunk.logprobs for chunk in chunks]), first_s)


async def engine_run(engine: EmbeddedEngine, prompts: np.ndarray) -> tuple[float, list[Answer]]:
    """Tokens per second of as many calls at once as there are prompts, and what they gave."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(engine, f"{i}", p, began)) for i, p in enumerate(prompts)]
    speed = len(prompts) * OUTPUT_TOKENS / (time.perf_counter() - began)
    return speed, [task.result() for task in tasks]


def logprob_error(
    model: transformers.PreTrainedModel, prompts: np.ndarray, answers: list[Answer], end: list[int]
) -> float:
    """Largest absolute difference to one forward pass over prompt and output.

    The `end` tokens were not allowed (`min_tokens`), so they have no part in the distribution.
    """
    outputs = torch.from_numpy(np.stack([answer.ids for answer in answers])).long()
    rows = torch.cat([torch.from_numpy(prompts).long(), outputs], dim=1)
    with torch.inference_mode():
        logits = model(input_ids=rows).logits[:, PROMPT_TOKENS - 1 : -1].float()
        logits[..., end] = float("-inf")
        logprobs = torch.log_softmax(logits, dim=-1).gather(2, outputs[..., None])[..., 0]
    given = np.stack([answer.logprobs for answer in answers])
    return float(np.abs(logprobs.numpy() - given).max())


async def measure(folder: Path, concurrency: int, runs: int) -> Row:
    """Loop and engine in turn; the engine is new each time, so that nothing is remembered."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    random = np.random.default_rng(concurrency)
    prompts = random.integers(0, 2048, (concurrency, PROMPT_TOKENS)).astype(np.int32)
    threads = torch.get_num_threads()
    loop, best, answers = 0.0, 0.0, []
    plain_loop(model, prompts)
    for _ in range(runs):
        for count in (threads, 1):
            torch.set_num_threads(count)
            loop = max(loop, plain_loop(model, prompts))
        engine = EmbeddedEngine(folder)
        end = list((await engine.start()).eos_token_ids)
        speed, given = await engine_run(engine, prompts)
        await engine.aclose()
        if speed > best:
            best, answers = speed, given
    torch.set_num_threads(threads)
    first_ms = 1000 * float(np.median([answer.first_s for answer in answers]))
    error = logprob_error(model, prompts, answers, end)
    return Row(concurrency, loop, best, best / loop, first_ms, error)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        rows = [asyncio.run(measure(Path(folder), n, options.runs)) for n in options.concurrency]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print("concurrency  loop tok/s  engine tok/s  ratio  first token ms  max logprob error")
    for row in rows:
        print(
            f"{row.concurrency:11}  {row.loop_tokens_s:10.0f}  {row.engine_tokens_s:12.0f}"
            f"  {row.ratio:5.2f}  {row.first_token_ms:14.1f}  {row.logprob_error:17.2e}"
        )


if __name__ == "__main__":
    main()
