"""GRPO: one update of a policy from groups of sessions that its earlier weights played.

For a token that trains, with probability p under the weights now, p0 under the weights at the start
of the batch, and q under those that sampled it:

    loss = - weight * min(p0 / q, cap) * min(r * A, clip(r) * A) + kl * weight * k3,  r = p / p0

With a teacher, the loss of each token is more by `distill * weight * min(p0 / q, cap) * KL`, the
reverse divergence of the policy's whole distribution at its position from the teacher's, on the
policy's own samples (on-policy distillation, arXiv 2306.13649).

The first factor is truncated importance sampling: it corrects what an engine computed otherwise and
what lags behind, and never makes a token count more than `importance_cap` times. `k3` is the
unbiased, never negative estimate of the divergence from the reference. Advantages and weights come
with the batch (`bridle.training.samples`).

Every update compares p0 with q on the tokens that were sampled under these very weights: there the
two are the same number computed twice, and a difference means that trainer and engine disagree
about tokens, positions or weights.

Gradient checkpointing and attention of packed traces are the same code on a CPU and a GPU, and
change neither the model's class nor what a checkpoint holds. A LoRA policy keeps the model's
weights and trains small matrices beside them: `peft` makes the layers inside of the model, whose
other uses do not change, and `save_pretrained` writes the adapter alone.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bridle.embedded.model import load_adapter
from bridle.embedded.routing import routing_of
from bridle.errors import ConfigError, TrainingError, boundary, install_extra
from bridle.training.forward import (
    Tokens,
    TraceBatch,
    attention_for,
    certify_pieces,
    check_ids,
    chosen,
    divergence,
    packed_of,
    replayed,
    rows_of,
    threads,
    trees_of,
)
from bridle.training.samples import Batch, nothing_left
from bridle.training.settings import GrpoSettings, LoraSettings
from bridle.trajectory.fidelity import Facts
from bridle.types import JSON

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel


def add_adapter(
    model: PreTrainedModel,
    settings: LoraSettings,
    folder: Path,
    saved: Path | None = None,
    *,
    seed: int = 0,
) -> None:
    """Add a LoRA adapter to `model` and let only it train: the `saved` one, or a new one.

    A new adapter changes no output yet. `folder` is the model's own. `ConfigError` if `peft` is
    missing, for target modules that the model does not have or that cannot be adapted, and for a
    saved adapter of other settings.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"[lora] needs peft: run {install_extra('lora')}")
    import peft
    from peft.tuners.lora import LoraLayer

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if saved is not None:
            load_adapter(model, saved)
            _check_saved(saved, model.peft_config["default"], settings)
        else:
            wanted = peft.LoraConfig(
                r=settings.rank,
                lora_alpha=settings.alpha,
                target_modules=list(settings.targets) or "all-linear",
                task_type="CAUSAL_LM",
            )
            try:
                model.add_adapter(wanted)
            except ValueError as error:
                raise ConfigError(
                    f"[lora] targets = {list(settings.targets)} do not fit the model: {error}"
                ) from error
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(module, LoraLayer):
            raise ConfigError(
                f"[lora] targets = {list(settings.targets)}: the embeddings and the output layer "
                "cannot be adapted, other linear layers can"
            )
    model.peft_config["default"].base_model_name_or_path = str(folder.absolute())


def _check_saved(saved: Path, config: LoraConfig, settings: LoraSettings) -> None:
    """Refuse to go on with an adapter of another form than the settings ask for."""
    old: JSON = {"rank": config.r, "alpha": config.lora_alpha}
    new: JSON = {"rank": settings.rank, "alpha": settings.alpha}
    if settings.targets:
        old["targets"] = sorted(config.target_modules)
        new["targets"] = sorted(settings.targets)
    if old != new:
        raise ConfigError(
            f"[lora]: {saved} was trained with {old}, the settings ask for {new}: keep the old "
            "ones to resume"
        )


def policy_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the state dict under the base model's names, with a LoRA adapter merged in."""
    weights: dict[str, torch.Tensor] = model.state_dict()
    if not getattr(model, "peft_config", None):
        return weights
    from peft.tuners.lora import LoraLayer

    weights = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in weights.items()
        if ".lora_" not in name
    }
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer):
                weights[f"{name}.weight"] = weights[f"{name}.weight"] + module.get_delta_weight(
                    "default"
                )
    return weights


ATTENTION = "bridle_packed"
"""Name of `_attend` among transformers' attention functions."""

CLOSE = 1e-3
"""Largest difference of logits, as a share of the largest, of one computation done in two ways."""


def recompute_layers(model: PreTrainedModel) -> None:
    """Turn on gradient checkpointing: backward passes compute each layer again from its input.

    `ConfigError` for a model whose layers are not known.
    """
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    if not layers:
        name = type(model).__name__
        raise ConfigError(
            f"[grpo] gradient_checkpointing: it is not supported for {name}, whose layers are not "
            "known; turn it off"
        )
    for layer in layers:
        # transformers' own needs training mode, and so dropout. The flag tells `Routing`.
        layer.gradient_checkpointing = True
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def pack_attention(model: PreTrainedModel) -> None:
    """Change the model to take traces end to end in one row, with their `lengths` as an argument.

    `ConfigError` for a model that computes packed traces otherwise than separate ones, such as one
    with recurrent layers.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)
    refused = f"[grpo] packing = 'sequence': {type(model).__name__} cannot compute packed traces"
    ids = torch.arange(12, device=model.device) % model.get_input_embeddings().weight.shape[0]
    routing = routing_of(model)
    with torch.no_grad(), boundary(ConfigError, refused):
        with nullcontext() if routing is None else routing.recording() as recorded:
            apart = model(ids.view(2, 6), use_cache=False).logits.flatten(0, 1)
        model.set_attn_implementation(ATTENTION)
        places = torch.arange(6, device=model.device).repeat(2)[None]
        with replayed(model, routing.rows(recorded) if routing and recorded else None):
            packed = model(ids[None], position_ids=places, lengths=[6, 6], use_cache=False).logits
    if float((packed[0] - apart).abs().max()) > CLOSE * float(apart.abs().max()):
        raise ConfigError(
            f"[grpo] packing = 'sequence': {type(model).__name__} cannot compute packed "
            "traces: it mixes them up; take 'rows' or 'tree'"
        )


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    lengths: list[int] | None = None,
    **more: Any,  # noqa: ANN401 - what transformers hands to attention functions
) -> tuple[torch.Tensor, None]:
    """Attend within each of several sequences of these lengths, shapes (1, heads, T, head size).

    torch's kernels for one causal sequence need no mask. Without `lengths` each row is one sequence
    (B, heads, T, head size). Raises `TrainingError` for the layouts that need a mask or a cache.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is not None or key.shape[2] != query.shape[2]:
        raise TrainingError(
            "a model that is prepared for packing takes packed traces only, without an attention "
            "mask or a key-value cache"
        )
    window = more.get("sliding_window")
    lengths = lengths or [query.shape[2]]
    found = [
        sdpa_attention_forward(module, *three, _window(three[0], window), **more)[0]
        for three in zip(*(one.split(lengths, 2) for one in (query, key, value)), strict=True)
    ]
    return torch.cat(found, 1), None


def _window(query: torch.Tensor, size: int | None) -> torch.Tensor | None:
    """Return the mask of a causal sliding window; `None` = every token sees all before it."""
    length = query.shape[2]
    if size is None or length <= size:
        return None
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device)
    return seen.tril().triu(1 - size)[None, None]


@dataclass(frozen=True, slots=True)
class Terms:
    """The loss of some tokens and what it was made of; sums over tokens."""

    loss: torch.Tensor
    """A scalar with gradients."""
    kl: float
    """Weighted divergence from the reference, nats."""
    teacher_kl: float
    """Weighted reverse divergence from the teacher, nats."""
    clipped: int
    """Tokens whose gradient the clip stopped."""
    capped: int
    """Tokens whose importance weight met the cap."""


@dataclass(frozen=True, slots=True)
class Update:
    """Report of one update."""

    version: int
    """Of the weights that came out."""
    loss: float
    kl: float
    teacher_kl: float
    norm: float
    """Of the gradient, before it was clipped; the last one of the batch."""
    tokens: int
    """Tokens that trained."""
    computed: int
    """Tokens that went through the model, padding included, once per forward pass."""
    traces: int
    sessions: int
    clipped: float
    """Share of the tokens."""
    capped: float
    """Share of the tokens."""
    logprob_error: float | None
    """Largest difference between trainer and rollout logprobs, nats, on tokens sampled under the
    weights that were updated; `None` = there was none."""
    lags: dict[int, int]
    alone: int
    """Advantages that are the session's own for want of others of the role."""
    seconds: float


def objective(
    logprobs: torch.Tensor,
    tokens: Tokens,
    settings: GrpoSettings,
    *,
    start: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
    teacher: torch.Tensor | None = None,
) -> Terms:
    """Return the terms of the GRPO loss for tokens with these current logprobs, all shape (N,).

    `start` are the logprobs at the beginning of the batch (`None` = `logprobs` are they),
    `reference` those of the reference model (`None` = no divergence). `teacher` is each token's
    divergence from the teacher (`None` = there is none).
    """
    device = logprobs.device
    sampled = torch.from_numpy(tokens.old).to(device)
    advantages = torch.from_numpy(tokens.advantages).to(device)
    weights = torch.from_numpy(tokens.weights).to(device)
    start = logprobs.detach() if start is None else start
    importance = (start - sampled).exp()
    ratio = (logprobs - start).exp()
    held = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gain = torch.minimum(ratio * advantages, held * advantages)
    counted = weights * importance.clamp(max=settings.importance_cap)
    loss = -(counted * gain).sum()
    kl = teacher_kl = 0.0
    if teacher is not None:
        loss = loss + settings.distill * (counted * teacher).sum()
        teacher_kl = float((weights * teacher.detach()).sum())
    if reference is not None:
        apart = reference - logprobs
        distance = (weights * (apart.exp() - apart - 1)).sum()
        loss = loss + settings.kl * distance
        kl = float(distance.detach())
    stopped = torch.where(advantages > 0, ratio > held, ratio < held) & (advantages != 0)
    capped = int((importance > settings.importance_cap).sum())
    return Terms(loss, kl, teacher_kl, int(stopped.sum()), capped)


class Learner:
    """A policy with its optimiser; `update` is one step. Blocking: call it in a thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: GrpoSettings,
        *,
        reference: PreTrainedModel | None = None,
        teacher: PreTrainedModel | None = None,
        version: int = 0,
    ) -> None:
        """`model` is trained in place; `None` = a copy of it as it is now is the reference."""
        _align(model)
        self.model = model.eval()
        self.settings = settings
        self.version = version
        """Of the weights in `model`."""
        self.steps = 0
        """Optimiser steps so far."""
        self.reference: PreTrainedModel | None = None
        """The model that `kl` pulls to."""
        if settings.kl:
            held = copy.deepcopy(model) if reference is None else reference
            self.reference = held.eval().requires_grad_(requires_grad=False)
        self.teacher = teacher and teacher.eval().requires_grad_(requires_grad=False)
        self.optimizer = torch.optim.AdamW(
            [one for one in model.parameters() if one.requires_grad],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        if settings.packing == "sequence":
            for one in filter(None, (self.model, self.reference, self.teacher)):
                pack_attention(one)
        if settings.gradient_checkpointing:
            recompute_layers(self.model)

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: GrpoSettings,
        reference: Path | None = None,
        *,
        lora: LoraSettings | None = None,
        adapter: Path | None = None,
    ) -> Learner:
        """Load a learner in float32 from the model in `folder`, on the GPU when there is one.

        With `lora` an adapter of it is trained, the one in the folder `adapter` or a new one.
        `EngineError` if a folder holds no causal language model, or an adapter of another one;
        `ConfigError` if the teacher has another tokenizer, or the adapter other settings.
        """
        from bridle.embedded.model import check_folder, load_model, load_tokenizer

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

        def loaded(one: Path | None) -> PreTrainedModel | None:
            if one is None:
                return None
            check_folder(one)
            return load_model(one, dtype="float32", device=device)

        check_folder(folder)
        model = load_model(folder, dtype="float32", device=device)
        if lora is not None:
            add_adapter(model, lora, folder, adapter, seed=settings.seed)
        above = None if settings.teacher is None else Path(settings.teacher)
        teacher = loaded(above)
        if above and load_tokenizer(above).get_vocab() != load_tokenizer(folder).get_vocab():
            raise ConfigError(
                f"[grpo] teacher: {above} has another tokenizer than {folder}, the model that is "
                "trained"
            )
        return cls(model, settings, reference=loaded(reference), teacher=teacher)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the policy's weights by the names of the initial model."""
        return policy_weights(self.model)

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which forward passes compute in the precision of the settings."""
        half = self.settings.dtype == "bfloat16"
        autocast: AbstractContextManager[None] = torch.autocast(
            self.model.device.type, torch.bfloat16, enabled=half
        )
        return autocast

    def update(self, batch: Batch) -> Update:
        """Train on one batch; the resulting weights are the next policy version.

        Raises `TrainingError` if there is nothing to train on, for ids that the model does not
        have, for a loss or gradient that is not a number, and where trainer and rollout disagree by
        more than `most_mismatch`. The weights are then unchanged, unless a later one of
        `updates_per_batch` fails: they are the next version, after the steps that were done.
        """
        began = time.monotonic()
        if not batch.tokens:
            raise TrainingError(nothing_left(batch))
        check_ids(batch.samples, self.model)
        with threads(self.settings.threads, self.model):
            pieces = list(self._pieces(batch))
            first, starts = self._pass(pieces, None)
            clipped = sum(terms.clipped for terms in first)
            if self.settings.most_mismatch is not None:
                self._certify(pieces, starts, batch.version, self.settings.most_mismatch)
            norm = self._step()
            self.version += 1  # also if a further step fails
            for _ in range(self.settings.updates_per_batch - 1):
                last, _ = self._pass(pieces, starts)
                norm = self._step()
                clipped += sum(terms.clipped for terms in last)
        passes = self.settings.updates_per_batch
        return Update(
            version=self.version,
            loss=sum((float(terms.loss) for terms in first), 0.0),
            kl=sum((terms.kl for terms in first), 0.0),
            teacher_kl=sum((terms.teacher_kl for terms in first), 0.0),
            norm=norm,
            tokens=batch.tokens,
            computed=passes * sum(piece.computed for piece in pieces),
            traces=len(batch.samples),
            sessions=batch.sessions,
            clipped=clipped / batch.tokens / passes,
            capped=sum(terms.capped for terms in first) / batch.tokens,
            logprob_error=_largest(pieces, starts, batch.version),
            lags=batch.lags,
            alone=batch.alone,
            seconds=time.monotonic() - began,
        )

    def _pieces(self, batch: Batch) -> Iterator[TraceBatch]:
        """Yield the batches to compute; traces without an advantage are computed only for the KL
        term and the teacher's.
        """
        settings, pulled = self.settings, self.settings.kl or self.teacher
        samples = [s for s in batch.samples if np.any(s.advantage) or pulled]
        if settings.packing == "tree":
            yield from trees_of(samples, settings.batch_tokens)
        elif settings.packing == "sequence":
            yield from packed_of(samples, settings.batch_tokens)
        else:
            width = int(self.model.config.get_text_config().hidden_size)
            yield from rows_of(samples, settings.batch_tokens, share=self._shares(), width=width)

    def _shares(self) -> bool:
        """Return whether the model's cache holds only keys and values, so that a prefix can be
        shared; a layer that is computed twice would write into it twice.
        """
        shares = bool(getattr(self.model, "_supports_attention_backend", False))
        return shares and not self.settings.gradient_checkpointing

    def _pass(
        self, pieces: Sequence[TraceBatch], starts: Sequence[torch.Tensor] | None
    ) -> tuple[list[Terms], list[torch.Tensor]]:
        """Compute the gradients of the whole batch; return the terms and logprobs of each piece.

        Without `starts` this pass is the batch's first.
        """
        found: list[Terms] = []
        ours: list[torch.Tensor] = []
        self.optimizer.zero_grad(set_to_none=True)
        for number, piece in enumerate(pieces):
            with attention_for(piece):
                terms, logprobs = self._backward(piece, None if starts is None else starts[number])
            found.append(terms)
            ours.append(logprobs)
        return found, ours

    def _backward(
        self, piece: TraceBatch, start: torch.Tensor | None
    ) -> tuple[Terms, torch.Tensor]:
        """Add the gradients of a piece to the weights'; return its terms and logprobs."""
        settings = self.settings
        tokens = piece.tokens()
        with self.computing():
            logits, wanted = piece.logits(self.model, replay=settings.replay_experts)
        logprobs = chosen(logits, wanted, settings.temperature)
        reference = teacher = None
        if self.reference is not None:
            judged = self._judged(piece, self.reference)
            reference = chosen(judged, wanted, settings.temperature)
        if self.teacher is not None:
            judged = self._judged(piece, self.teacher)
            teacher = divergence(logits, judged, settings.temperature)
        terms = objective(
            logprobs, tokens, settings, start=start, reference=reference, teacher=teacher
        )
        if not torch.isfinite(terms.loss):
            raise TrainingError(self._diverged("loss"))
        terms.loss.backward()
        return replace(terms, loss=terms.loss.detach()), logprobs.detach()

    def _judged(self, piece: TraceBatch, model: PreTrainedModel) -> torch.Tensor:
        """Return the logits of a model that does not train."""
        with torch.no_grad(), self.computing():
            return piece.logits(model, replay=False)[0]

    def _certify(
        self,
        pieces: Sequence[TraceBatch],
        logprobs: Sequence[torch.Tensor],
        version: int,
        most: float,
    ) -> None:
        """Raise `TrainingError` if trainer and rollout disagree by more than `most` nats."""
        settings = self.settings
        facts = Facts(version=version, temperature=settings.temperature, dtype=settings.dtype)
        found = certify_pieces(
            zip(pieces, logprobs, strict=True), self.model, facts, replay=settings.replay_experts
        )
        if found is not None and not found.faithful and found.kl > most:
            raise TrainingError(
                f"update {self.version + 1} is refused: its mismatch is above "
                f"[grpo] most_mismatch = {most:g}: {found.summary()}"
            )

    def _step(self) -> float:
        """Apply the gradients; return their norm before clipping."""
        settings = self.settings
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm))
        if not math.isfinite(norm):
            raise TrainingError(self._diverged("gradient"))
        self.steps += 1
        rate = settings.learning_rate * min(1.0, self.steps / (settings.warmup_steps + 1))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return norm

    def _diverged(self, what: str) -> str:
        return (
            f"the {what} at step {self.steps + 1} is not a number; the weights of version "
            f"{self.version} stand; a learning rate below {self.settings.learning_rate:g} may help"
        )


def _align(model: PreTrainedModel) -> None:
    """Move weights that lie where a file has them to where torch puts its own.

    Some CPUs add up unaligned numbers in another order: a resumed training would not be the same.
    """
    for parameter in model.parameters():
        if parameter.data_ptr() % 64:
            parameter.data = parameter.data.clone()


def _largest(
    pieces: Sequence[TraceBatch], logprobs: Sequence[torch.Tensor], version: int
) -> float | None:
    """Return the largest difference from the rollout's logprobs on tokens of `version`."""
    found = []
    for tokens, ours in zip((piece.tokens() for piece in pieces), logprobs, strict=True):
        same = tokens.versions == version
        if same.any():
            found.append(float(abs(ours.cpu().numpy()[same] - tokens.old[same]).max()))
    return max(found, default=None)
