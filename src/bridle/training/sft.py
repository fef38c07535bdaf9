"""Supervised fine-tuning on token-exact examples, for any transformers causal language model.

An example is the ids that a policy was given and sampled, and which of them train: what
`bridle export sft` writes. Nothing is rendered or tokenised again. Batches hold examples of like
length, at most so many tokens with padding; the order, and so the result, is a function of the seed
and of torch's arithmetic.

Every trained token counts the same: a step's gradient is the sum over its batch, divided by the
mean number of trained tokens of all batches. (Divided by its own number, a batch of short answers
would count more for each, and a model would learn to give short answers.)

A loss that is not a number ends the training, and the model gets the weights of at most
`SNAPSHOT_STEPS` steps before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import orjson
import torch
from pydantic import Field

from bridle.config import Settings
from bridle.errors import TrainingError
from bridle.training.forward import (
    TraceBatch,
    attention_for,
    check_ids,
    chosen,
    common_prefix,
    threads,
)
from bridle.training.samples import Sample, trains
from bridle.trajectory.sample import Trace
from bridle.types import Ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel


POOL = 16
"""Batches that are sorted by length together: enough that little is padding, few enough that the
order stays random."""

SNAPSHOT_STEPS = 50


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSequence:
    """One sequence to learn from."""

    input_ids: Ids
    """Shape (T,), int32."""
    loss_mask: npt.NDArray[np.uint8]
    """1 = this token trains; shape (T,). The first token never does: nothing comes before it."""


class SftSettings(Settings):
    """Settings of supervised fine-tuning."""

    epochs: int = Field(default=1, ge=1)
    """Number of times that each example is seen."""
    max_steps: int | None = Field(default=None, ge=1)
    """End after this many steps, in the middle of an epoch too; `None` = when the epochs end."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """The highest; reached after the warm-up."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of linear growth from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Schedule after the warm-up: nothing, or falling to 0 at the end."""
    batch_tokens: int = Field(default=8192, ge=1)
    """Most tokens that a batch computes, padding included; a longer example is one of its own."""
    max_length: int | None = Field(default=None, ge=2)
    """Longer examples are cut at the end; `None` = none is cut."""
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0)
    """Largest norm of a step's gradient."""
    share_prefix: bool = False
    """Compute the beginning that all examples have in common (a system prompt, tools) once per
    batch. The gradients are the same; only for models whose cache is of keys and values."""
    seed: int = 0
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of one operation while training; `None` = one for a very small model, else as
    torch is set. One gives the same bits on any number of cores."""


@dataclass(frozen=True, slots=True)
class SftProgress:
    """Progress of a training, reported after every step."""

    step: int
    """Number of steps that are done."""
    steps: int
    """Number of all steps."""
    loss: float
    """Of this step's batch, nats per trained token."""
    tokens: int
    """Trained tokens so far, counted once per epoch."""


@dataclass(frozen=True, slots=True)
class SftResult:
    """Result of a training."""

    losses: tuple[float, ...]
    """Nats per trained token, one per step."""
    tokens: int
    """Trained tokens, counted once per epoch."""
    seconds: float


def read_examples(path: str | Path) -> list[TrainingSequence]:
    """Return the training examples of a JSONL or Parquet file with `input_ids` and `loss_mask`.

    A Parquet file of trajectories (`prompt_ids`, `response_ids`, `loss_mask`) can be used, too.
    Raises `TrainingError` naming the file, and the line or row, of what cannot be used.
    """
    path = Path(path)
    try:
        rows = list(_parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path))
    except OSError as error:
        raise TrainingError(
            f"{path}: the training examples cannot be read: {error.strerror or error}"
        ) from error
    return [_example(row, f"{path}: example {i + 1}") for i, row in enumerate(rows)]


def _json_rows(path: Path) -> Iterator[object]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise TrainingError(f"{path}: line {number} is not JSON: {error}") from error


def _parquet_rows(path: Path) -> Iterator[object]:
    """Yield examples as they are, or traces: prompt, then response with a mask of its own."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
        heads = ["input_ids"] if "input_ids" in names else ["prompt_ids", "response_ids"]
        table = pq.read_table(path, columns=[*heads, "loss_mask"])
    except (pa.ArrowException, KeyError) as error:
        raise TrainingError(f"{path}: {error}") from error
    for row in table.to_pylist():
        if "input_ids" not in row:
            prompt, response = row["prompt_ids"], row["response_ids"]
            row["input_ids"] = prompt + response
            row["loss_mask"] = [0] * len(prompt) + row["loss_mask"]
        yield row


def _example(row: object, where: str) -> TrainingSequence:
    try:
        ids = np.asarray(row["input_ids"], dtype=np.int32)  # type: ignore[index]
        mask = np.asarray(row["loss_mask"], dtype=np.uint8)  # type: ignore[index]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TrainingError(f"{where}: no usable input_ids and loss_mask: {error!r}") from error
    if ids.ndim != 1 or ids.shape != mask.shape:
        raise TrainingError(
            f"{where}: {ids.size} input_ids and {mask.size} values in loss_mask; both must be "
            "lists of one length"
        )
    return TrainingSequence(ids, mask)


def train(
    model: PreTrainedModel,
    examples: Sequence[TrainingSequence],
    settings: SftSettings,
    *,
    progress: Callable[[SftProgress], None] = lambda _: None,
) -> SftResult:
    """Train `model` in place on the examples (supervised fine-tuning); it is left in evaluation
    mode.

    Raises `TrainingError` before the first step if there is nothing to train on or an id is beyond
    the vocabulary; and when a loss is not a number, with the weights of the last snapshot (one each
    `SNAPSHOT_STEPS` steps) back in the model.
    """
    samples = _samples(examples, model, settings.max_length)
    prefix = common_prefix(samples) if settings.share_prefix else 0
    batches = list(_all_batches(samples, prefix, settings))[: settings.max_steps]
    devices = [] if model.device.type == "cpu" else [model.device]
    with torch.random.fork_rng(devices=devices), threads(settings.threads, model):
        torch.manual_seed(settings.seed)
        model.train()
        try:
            return _steps(model, samples, batches, prefix, settings, progress)
        finally:
            model.eval()


def _steps(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    batches: Sequence[list[int]],
    prefix: int,
    settings: SftSettings,
    progress: Callable[[SftProgress], None],
) -> SftResult:
    began = time.monotonic()
    counts = [sum(trains(samples[i].trace) for i in batch) for batch in batches]
    done_tokens = np.cumsum(counts).tolist()
    typical = done_tokens[-1] / len(batches)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _rate(step, len(batches), settings)
    )
    losses: list[float] = []
    good: list[torch.Tensor] = []
    for step, batch in enumerate(batches):
        if step % SNAPSHOT_STEPS == 0:
            good = [parameter.detach().clone() for parameter in model.parameters()]
        piece = TraceBatch(tuple(samples[i] for i in batch), prefix)
        optimizer.zero_grad(set_to_none=True)
        with attention_for(piece):
            loss = -chosen(*piece.logits(model, replay=False), 1.0).sum()
            (loss / typical).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        if not math.isfinite(norm.item() + loss.item()):
            _restore(model, good)
            raise TrainingError(_diverged(step, losses, settings))
        optimizer.step()
        schedule.step()
        losses.append(loss.item() / counts[step])
        progress(SftProgress(step + 1, len(batches), losses[-1], done_tokens[step]))
    return SftResult(tuple(losses), done_tokens[-1], time.monotonic() - began)


def train_folder(
    model_dir: str | Path,
    examples: Sequence[TrainingSequence],
    out_dir: str | Path,
    settings: SftSettings,
    *,
    progress: Callable[[SftProgress], None] = lambda _: None,
) -> SftResult:
    """Train the model in `model_dir` on a CPU or the GPU, and write it with its tokenizer.

    When an error ends the training after its first step, `out_dir` gets the weights of the model
    then: after a loss that is not a number, those of the last snapshot. Raises `EngineError` for a
    folder that holds no such model.
    """
    from bridle.embedded.model import check_folder, load_model, load_tokenizer

    check_folder(Path(model_dir))
    tokenizer = load_tokenizer(Path(model_dir))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(Path(model_dir), dtype="auto", device=device)
    started = False

    def tell(done: SftProgress) -> None:
        nonlocal started
        started = True
        progress(done)

    try:
        return train(model, examples, settings, progress=tell)
    finally:
        if started:
            model.save_pretrained(out_dir)
            tokenizer.save_pretrained(out_dir)


def _samples(
    examples: Sequence[TrainingSequence], model: PreTrainedModel, max_length: int | None
) -> list[Sample]:
    """Return the examples that train, cut to length."""
    kept = []
    for number, example in enumerate(examples, start=1):
        ids = example.input_ids[:max_length]
        mask = (example.loss_mask[:max_length] != 0).astype(np.uint8)
        if mask[1:].any():
            trace = Trace.plain(str(number), ids[:0], ids, mask)
            kept.append(Sample(trace, group=0, advantage=0.0, weight=1.0))
    if not kept:
        raise TrainingError(f"none of the {len(examples)} examples has a token to train on")
    check_ids(kept, model, "example")
    return kept


def _all_batches(
    samples: Sequence[Sample], prefix: int, settings: SftSettings
) -> Iterator[list[int]]:
    """Yield the numbers of each step's examples, over all epochs; `prefix` ids count once a
    batch.
    """
    lengths = np.array([sample.trace.size - prefix for sample in samples])
    batch_tokens = max(1, settings.batch_tokens - prefix)
    random = np.random.default_rng(settings.seed)
    for _ in range(settings.epochs):
        order = random.permutation(len(samples))
        per_pool = max(1, POOL * batch_tokens // int(lengths.mean()))
        for start in range(0, len(order), per_pool):
            pool = order[start : start + per_pool]
            batches = list(
                _batches_of(pool[np.argsort(lengths[pool], kind="stable")], lengths, batch_tokens)
            )
            yield from (batches[i] for i in random.permutation(len(batches)))


def _batches_of(
    order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], batch_tokens: int
) -> Iterator[list[int]]:
    """Cut examples in order of length into batches that fit."""
    batch: list[int] = []
    for i in order.tolist():
        if batch and (len(batch) + 1) * int(lengths[i]) > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    yield batch


def _rate(step: int, steps: int, settings: SftSettings) -> float:
    """Return the learning rate at `step` as a share of the highest."""
    if step < settings.warmup_steps:
        return (step + 1) / (settings.warmup_steps + 1)
    done = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    if settings.schedule == "linear":
        return 1 - done
    return 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1.0


def _restore(model: PreTrainedModel, weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, kept in zip(model.parameters(), weights, strict=True):
            parameter.copy_(kept)


def _diverged(step: int, losses: list[float], settings: SftSettings) -> str:
    last = f"{losses[-1]:.3f}" if losses else "none"
    kept = step - step % SNAPSHOT_STEPS
    return (
        f"the loss at step {step + 1} is not a number (the one before: {last}); the model has the "
        f"weights of step {kept}; a learning rate below {settings.learning_rate:g} may help"
    )
