"""The settings of GRPO, from the objective to the loop around it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bridle.config import Settings


class GrpoSettings(Settings):
    """The objective and the optimiser."""

    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear growth from 0; constant afterwards."""
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest norm of a step's gradient."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Largest fall of a token's probability within one batch before its gradient stops."""
    clip_high: float = Field(default=0.2, gt=0)
    """Largest rise, likewise."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Truncated importance sampling: each token weighs its probability under the trainer's weights
    over that under which it was sampled, at most this much."""
    most_mismatch: float | None = Field(default=None, ge=0)
    """Most divergence of trainer and rollout, nats per token, on tokens that the updated weights
    sampled. Above it the update is refused, with the causes; `None` = nothing is compared."""
    replay_experts: bool = True
    """Of a mixture of experts, send each token to the experts that it was sampled with, where these
    were captured; else, and where they were not, the model's own routers choose."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the model that the training began with."""
    teacher: str | None = None
    """Folder of a model with the same tokenizer, which the policy is pulled to on its own samples;
    `None` = rewards alone train."""
    distill: float = Field(default=1.0, gt=0)
    """With a `teacher`: weight of the reverse divergence per token, beside the advantage."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimiser steps on one batch."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Against the group's mean, over its deviation (`grpo`) or not and with a constant in place of
    each length (`dr_grpo`); or against the mean of all others (`rloo`)."""
    normalise: Literal["token", "sequence", "batch"] | None = None
    """The units that weigh the same: each session, all its tokens alike (`token`) or all its traces
    alike (`sequence`); or each token of the batch (`batch`). `None` = `token`, or what `dr_grpo`
    is."""
    flat_groups: Literal["drop", "refill", "keep"] = "drop"
    """Groups whose rewards do not vary: left out, replaced by another group, or kept with advantage
    0 (they dilute a step and, with `kl`, still pull)."""
    packing: Literal["rows", "sequence", "tree"] = "rows"
    """Layout of traces in the model: padded rows that share their common beginning; end to end in
    one sequence; or one tree per group in which each token stands once, under a dense mask."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products; the weights, their gradients and the optimiser stay float32."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass, which computes the layer again. Rows
    do not share their beginning then."""
    max_length: int | None = Field(default=None, ge=2)
    """Longest trace, prompt and response together."""
    overlong: Literal["mask", "truncate", "drop", "refuse"] = "mask"
    """A longer one trains nothing but keeps its share of its session (`mask`), is cut at the end
    (`truncate`), leaves its share to the session's other traces (`drop`), or ends the training."""
    temperature: float = Field(default=1.0, gt=0)
    """At which sessions were sampled: the trainer's logits are divided by it."""
    batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens that are computed at once, padding included; a longer trace is alone."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of one operation while training; `None` = one for a very small model, else as
    torch is set."""
    seed: int = 0

    @model_validator(mode="after")
    def _one_normaliser(self) -> GrpoSettings:
        if self.advantage == "dr_grpo" and self.normalise is not None:
            message = (
                f"dr_grpo divides by a constant: remove normalise = {self.normalise!r}, or take "
                "advantage = 'grpo' or 'rloo'"
            )
            raise ValueError(message)
        return self


class LoraSettings(Settings):
    """Form of a policy that is a LoRA adapter."""

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    """The adapter's part is multiplied by `alpha / rank`."""
    targets: tuple[str, ...] = ()
    """Names of the modules that are adapted (`["q_proj", "v_proj"]`); empty = every linear layer
    but the output layer."""


class LoopSettings(Settings):
    """Schedule of rollouts and updates."""

    steps: int = Field(default=40, ge=1)
    groups_per_step: int = Field(default=8, ge=1)
    """Groups of one update; with `flat_groups = "refill"`, groups that vary."""
    max_lag: int = Field(default=1, ge=0)
    """Most updates between the weights that sampled a token and those that it updates. 0 = rollouts
    and updates alternate; 1 = the next batch is sampled during an update."""
    evaluate_every: int = Field(default=0, ge=0)
    """Steps between evaluations on the held-out tasks; 0 = before the first step and at the end."""
    checkpoint_every: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0 = at the end only."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Older ones are removed."""
    patience: int = Field(default=8, ge=1)
    """Steps' worth of groups in a row that train nothing before the training ends with an error."""
