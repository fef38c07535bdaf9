"""The reference trainer on this machine's GPU: rollouts, updates, their agreement, and TRL.

Models of Qwen3's shapes with random weights; nothing is downloaded, the tokenizer is Bridle's own.
The embedded engine samples one group of `--sequences` of up to `--context` tokens each, of which
the last 1/32 is sampled, `--sampled` tokens at most; before, it samples a few tokens, so that the
device's start-up does not count. The reference trainer then updates a fresh copy of the weights
with that group under each of several settings, twice; the second update counts. Before, it computes
the rollout's logprobs again under the same setting: fidelity, as `bridle certify` has it. Where TRL
is installed, its `GRPOTrainer` takes the same group, twice as well, with as many sequences at once
as fit into `--batch-tokens`. The first update's traces are one token shorter, since lengths are
mostly new in training as well. Tokens/s of an update are the tokens of the traces, prompts included
and padding not, by its seconds.

MFU is the share of the device's peak in bfloat16, for the arithmetic that a model needs (three
times the forward pass; what checkpointing computes again does not count). It is `None` where the
peak is not known, and in float32.

The GPU is found; without one the run is of toy size, on the CPU, and says so. A table comes first,
and one line of JSON last. Numbers go to standard error as they come.

    python -m benchmarks.gpu [--sizes 0.6b 1.7b 4b] [--context 32768] [--sequences 8]
        [--sampled 256] [--batch-tokens 16384] [--dtypes bfloat16 float32]
        [--packings rows sequence] [--checkpointing yes no] [--trainers bridle trl]

`--batch-tokens` is the reference trainer's setting. `--dtypes`, `--packings` and `--checkpointing`
leave out some of its rows, such as those in float32, which a GPU computes many times slower, and
`--trainers bridle` leaves out TRL.

A machine without a network needs the wheels of `requirements/embedded.txt` and torch's, and of
`requirements/trl.txt` for the comparison. docs/guides/training.md has the commands.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib.util
import json
import logging
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from rich.console import Console

from bridle.config import builtin_tokenizer_dir
from bridle.embedded import EmbeddedEngine
from bridle.engines.base import GenerateRequest
from bridle.engines.ids import ArrayIds
from bridle.training.forward import facts_of, recompute
from bridle.training.grpo import Learner
from bridle.training.samples import Batch, Group, make_batch
from bridle.training.settings import GrpoSettings
from bridle.trajectory.fidelity import Facts, certify
from bridle.trajectory.sample import MaskReason, Trace, Trajectory
from bridle.types import Sampling

if TYPE_CHECKING:
    from bridle.types import Ids

SIZES = {
    "toy": (64, 128, 2, 4, 2, 16),
    "0.6b": (1024, 3072, 28, 16, 8, 128),
    "1.7b": (2048, 6144, 28, 16, 8, 128),
    "4b": (2560, 9728, 36, 32, 8, 128),
}
"""Hidden size, that of the feed-forward part, layers, heads, heads of keys, head size: Qwen3's."""

PEAKS = {
    "H100 PCIe": 756e12,  # NVIDIA's data sheets of the H100, H200, A100 and L40S, without sparsity
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Operations per second in bfloat16, by what the device's name contains; the first that fits."""

SETTINGS: list[dict[str, Any]] = [
    {"packing": "rows", "dtype": "bfloat16", "gradient_checkpointing": True},
    {"packing": "sequence", "dtype": "bfloat16", "gradient_checkpointing": True},
    {"packing": "sequence", "dtype": "bfloat16", "gradient_checkpointing": False},
    {"packing": "sequence", "dtype": "float32", "gradient_checkpointing": True},
]
"""Of the reference trainer; TRL's are its nearest to the first."""

STEP_TOKENS = 4096
"""Most prompt tokens of one step of the engine: with its default a GPU has too little to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Choice of what to measure of each model; by default all of it."""

    context: int
    sequences: int = 8
    """Of the batch."""
    sampled: int = 256
    """Most tokens that are sampled for a sequence."""
    batch_tokens: int = 16384
    """Of the reference trainer, which has also the following."""
    dtypes: Sequence[str] = ("bfloat16", "float32")
    packings: Sequence[str] = ("rows", "sequence")
    checkpointing: Sequence[str] = ("yes", "no")
    trainers: Sequence[str] = ("bridle", "trl")

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of the reference trainer that are chosen."""
        return [
            one
            for one in SETTINGS
            if "bridle" in self.trainers
            and one["dtype"] in self.dtypes
            and one["packing"] in self.packings
            and yes_or_no(one["gradient_checkpointing"]) in self.checkpointing
        ]


ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def peak_of(name: str) -> float | None:
    """Peak of a device in bfloat16; `None` = not known."""
    return next((peak for known, peak in PEAKS.items() if known in name), None)


def make_model(
    folder: Path, size: str, context: int, *, seed: int = 0, served: bool = False
) -> transformers.PretrainedConfig:
    """Write a model of random weights, whose choices are not all alike, and that never stops.

    One that is `served` has the tokenizer's vocabulary, and weights of its own for its output: vLLM
    on a CPU does not load tied ones anew.
    """
    hidden, inner, layers, heads, key_heads, head = SIZES[size]
    tokenizer = transformers.AutoTokenizer.from_pretrained(builtin_tokenizer_dir(), eos_token=None)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer) if served or size == "toy" else 151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head,
        tie_word_embeddings=not served,
        max_position_embeddings=context,
        initializer_range=0.64 / hidden**0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    with DEVICE:
        model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.fill_(4.7)  # logits of a standard deviation of 3
    model.to(torch.bfloat16 if ON_GPU else torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return config


def operations(config: transformers.PretrainedConfig, traces: Sequence[Trace]) -> float:
    """Arithmetic of a forward and a backward pass over the traces."""
    wide = config.num_attention_heads * config.head_dim
    narrow = config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * wide + 2 * narrow + 3 * config.intermediate_size)
    found = 0.0
    for trace in traces:
        length, sampled = len(trace.prompt_ids) + len(trace.response_ids), len(trace.response_ids)
        attention = 2 * wide * length**2  # two products, of which the causal half is needed
        found += config.num_hidden_layers * (2 * layer * length + attention)
        found += 2 * config.hidden_size * config.vocab_size * sampled
    return 3 * found


async def rollouts(folder: Path, vocabulary: int, plan: Plan) -> tuple[list[Trace], float, str]:
    """Traces of one group by the embedded engine, the seconds that they took, and its decoder."""
    random = np.random.default_rng(0)
    context, sampled = plan.context, min(max(8, plan.context // 32), plan.sampled)
    lengths = np.linspace(context // 2, context - sampled, plan.sequences).astype(int)
    prompts = [random.integers(0, vocabulary, n).astype(np.int32) for n in lengths]
    engine = EmbeddedEngine(folder, step_tokens=STEP_TOKENS)
    await engine.start()
    await sample(engine, "warm", prompts[0][:16], 8)
    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(sample(engine, f"t{n}", prompt, sampled))
                for n, prompt in enumerate(prompts)
            ]
        seconds, decoder = time.perf_counter() - began, engine.stats()["decoder"]
    finally:
        await engine.aclose()
    return [task.result() for task in tasks], seconds, decoder


async def sample(engine: EmbeddedEngine, name: str, prompt: Ids, count: int) -> Trace:
    """One call as a trace."""
    sampling = Sampling(temperature=1.0, max_tokens=count, seed=0)
    request = GenerateRequest(name, ArrayIds(prompt), sampling)
    chunks = [chunk async for chunk in engine.generate(request)]
    ids = np.concatenate([chunk.output_ids for chunk in chunks])
    return Trace(
        trace_id=name,
        prompt_ids=prompt,
        response_ids=ids,
        loss_mask=np.ones(len(ids), np.uint8),
        response_logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        versions=np.zeros(len(ids), np.int32),
        reasons=np.full(len(ids), MaskReason.TRAINED, np.uint8),
        exchange_ids=(name,),
        turn_ends=(len(ids),),
        finish_reason="length",
        logprob_mode="processed",
    )


@contextlib.contextmanager
def measured(into: dict[str, Any]) -> Iterator[None]:
    """Note the most memory that a GPU held, or that there was not enough of it."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    try:
        yield
    except torch.OutOfMemoryError:
        into["error"] = "out of memory"
    into["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else None


@contextlib.contextmanager
def default_attention() -> Iterator[None]:
    """Within the context, torch chooses attention's kernels as it does where Bridle is not used."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)  # noqa: FBT003 - it takes no keyword
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def freed() -> None:
    """Have what nothing refers to leave the device's memory."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def updates(folder: Path, traces: Sequence[Trace], tokens: int, **chosen: Any) -> dict[str, Any]:  # noqa: ANN401
    """One setting of the reference trainer: fidelity first, then two updates."""
    settings = GrpoSettings(learning_rate=1e-9, batch_tokens=tokens, **chosen)
    found: dict[str, Any] = {"trainer": "bridle", **chosen}
    with measured(found):
        learner = Learner.load(folder, settings)
        with learner.computing():
            answers = list(recompute(learner.model, traces, batch_tokens=tokens))
        trainer = facts_of(learner.model, Facts(dtype=settings.dtype, temperature=1.0))
        rollout = Facts(dtype="bfloat16" if ON_GPU else "float32")
        fidelity = certify(traces, answers, trainer, rollout)
        found["fidelity"] = {
            "faithful": fidelity.faithful,
            "kl": fidelity.kl,
            "rms": fidelity.rms,
            "tolerance": fidelity.tolerance,
        }
        for part in (shortened(traces), traces):
            report = learner.update(batch_of(part, settings))
        found |= {"seconds": report.seconds, "computed": report.computed}
        found["logprob_error"] = report.logprob_error
    return found


def batch_of(traces: Sequence[Trace], settings: GrpoSettings) -> Batch:
    """The traces as one group, of which every second succeeded."""
    sessions = [
        Trajectory(one.trace_id, "COMPLETED", (one,), float(n % 2), None, {})
        for n, one in enumerate(traces)
    ]
    return make_batch([Group(0, "task", tuple(sessions))], settings, version=0)


def shortened(traces: Sequence[Trace]) -> list[Trace]:
    """The traces without their first token: the lengths of an update are new, as in training."""
    return [replace(one, prompt_ids=one.prompt_ids[1:]) for one in traces]


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """Times of a trainer's steps."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """Begin and end of each step, in seconds."""

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Note it."""
        self.times.append(time.perf_counter())

    def on_step_end(self, *_: object, **__: object) -> None:
        """Note it, when the device is done."""
        if ON_GPU:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def trl_updates(folder: Path, traces: Sequence[Trace], together: int) -> dict[str, Any]:
    """The same group through TRL's `GRPOTrainer`, with so many sequences at once."""
    from trl import GRPOConfig, GRPOTrainer

    from datasets import Dataset

    found: dict[str, Any] = {"trainer": "trl", "packing": "rows", "gradient_checkpointing": True}
    found["dtype"] = "bfloat16" if ON_GPU else "float32"
    clock, parts = Clock(), iter((shortened(traces), traces))

    def played(*_: object) -> dict[str, list[Any]]:
        part = next(parts)
        return {
            "prompt_ids": [one.prompt_ids.tolist() for one in part],
            "completion_ids": [one.response_ids.tolist() for one in part],
            "logprobs": [one.response_logprobs.tolist() for one in part],
        }

    with measured(found), default_attention(), tempfile.TemporaryDirectory(prefix="bridle-") as out:
        trainer = GRPOTrainer(
            model=str(folder),
            args=GRPOConfig(
                output_dir=out,
                per_device_train_batch_size=together,
                gradient_accumulation_steps=len(traces) // together,
                num_generations=len(traces),
                max_completion_length=max(len(one.response_ids) for one in traces),
                max_steps=2,
                learning_rate=1e-9,
                beta=0.0,
                bf16=ON_GPU,
                use_cpu=not ON_GPU,
                gradient_checkpointing=True,
                model_init_kwargs={"dtype": "float32"},
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": "one"}] * 2),
            reward_funcs=lambda prompts, **_: [float(n % 2) for n in range(len(prompts))],
            rollout_func=played,
            callbacks=[clock],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        found["seconds"] = clock.times[-1] - clock.times[-2]
    return found


def measure(size: str, plan: Plan) -> dict[str, Any]:
    """All numbers of one model."""
    with tempfile.TemporaryDirectory(prefix="bridle-") as made:
        folder = Path(made)
        config = make_model(folder, size, plan.context)
        freed()
        traces, seconds, decoder = asyncio.run(rollouts(folder, config.vocab_size, plan))
        freed()
        tokens = sum(len(one.prompt_ids) + len(one.response_ids) for one in traces)
        sampled = sum(len(one.response_ids) for one in traces)
        rolled = {
            "seconds": seconds,
            "sequences": len(traces),
            "sampled": sampled,
            "tokens": tokens,
            "sampled_s": sampled / seconds,
            "decoder": decoder,
        }
        noted(rolled)
        rows = []
        for chosen in plan.settings():
            rows.append(noted(updates(folder, traces, plan.batch_tokens, **chosen)))
            freed()
        if "trl" in plan.trainers and importlib.util.find_spec("trl") is not None:
            together = math.gcd(len(traces), max(1, plan.batch_tokens // plan.context))
            rows.append(noted(trl_updates(folder, traces, together)))
            freed()
    peak, needed = peak_of(device_name()), operations(config, traces)
    for row in rows:
        done = row.get("seconds")
        row["tokens_s"] = None if done is None else tokens / done
        row["mfu"] = None
        if done is not None and peak is not None and row["dtype"] == "bfloat16":
            row["mfu"] = needed / done / peak
    return {"size": size, "operations": needed, "rollouts": rolled, "updates": rows}


def noted(found: dict[str, Any]) -> dict[str, Any]:
    """Print what was found to standard error, for whoever waits or ends the run early."""
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def device_name() -> str:
    """The machine's name for its GPU, or `CPU`."""
    return str(torch.cuda.get_device_name()) if ON_GPU else "CPU"


def show(report: dict[str, Any]) -> None:
    """Print a Markdown table for each model."""
    console = Console(soft_wrap=True, markup=False, highlight=False)
    beside = "" if report["trl"] else "; TRL is not installed"
    console.print(f"device: {report['device']}; context {report['context']}{beside}")
    for model in report["models"]:
        rolled = model["rollouts"]
        console.print(
            f"\n{model['size']}: {rolled['sequences']} sequences, {rolled['tokens']} tokens, of "
            f"which {rolled['sampled']} were sampled in {rolled['seconds']:.1f} s: "
            f"{rolled['sampled_s']:.0f} tokens/s of rollouts, prompts computed beside\n"
        )
        head = ("trainer", "packing", "dtype", "checkpointing", "update, s", "tokens/s", "MFU",
                "peak GiB", "KL, nats", "rms / tolerance")  # fmt: skip
        console.print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
        for row in model["updates"]:
            console.print(f"| {' | '.join(cells(row))} |")


def yes_or_no(answer: bool) -> str:  # noqa: FBT001
    """The word for it."""
    return "yes" if answer else "no"


def cells(row: dict[str, Any]) -> list[str]:
    """One line of a table; `-` = not known."""

    def answer(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    seen = row.get("fidelity")
    return [
        row["trainer"],
        row["packing"],
        row["dtype"],
        yes_or_no(row["gradient_checkpointing"]),
        row.get("error") or answer(row.get("seconds"), ".2f"),
        answer(row["tokens_s"], ".0f"),
        answer(row["mfu"], ".1%"),
        answer(row["peak_gib"], ".1f"),
        "-" if seen is None else f"{seen['kl']:.1e}",
        "-" if seen is None else f"{seen['rms']:.1e} / {seen['tolerance']:g}",
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = ["0.6b", "1.7b", "4b"] if ON_GPU else ["toy"]
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=sizes)
    parser.add_argument("--context", type=int, default=32768 if ON_GPU else 256)
    for one in fields(Plan)[1:]:
        option = f"--{one.name.replace('_', '-')}"
        default: Any = one.default
        if isinstance(default, int):
            parser.add_argument(option, type=int, default=default)
        else:
            parser.add_argument(option, nargs="+", choices=default, default=default)
    given = vars(parser.parse_args())
    sizes = given.pop("sizes")
    plan = Plan(**given)
    if not ON_GPU:
        torch.set_num_threads(1)  # the fastest for models of toy size
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # TRL and accelerate warn about this and that
    transformers.utils.logging.disable_progress_bar()
    report = {
        "device": device_name(),
        "context": plan.context,
        "batch_tokens": plan.batch_tokens,
        "torch": torch.__version__,
        "trl": importlib.util.find_spec("trl") is not None,
        "models": [measure(size, plan) for size in sizes],
    }
    show(report)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
