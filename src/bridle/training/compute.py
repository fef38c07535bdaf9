"""Ways to compute an update: gradient checkpointing, and attention of packed traces.

Both are the same code on a CPU and a GPU, and change neither the model's class nor what a
checkpoint holds.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bridle.embedded.routing import routing_of
from bridle.errors import ConfigError, TrainingError, boundary
from bridle.training.forward import replayed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "bridle_packed"
"""Name of `_attend` among transformers' attention functions."""

CLOSE = 1e-3
"""Largest difference of logits, as a share of the largest, of one computation done in two ways."""


def recompute_layers(model: PreTrainedModel) -> None:
    """Have backward passes compute each layer again, so that only its input is kept until then.

    `ConfigError` for a model whose layers are not known.
    """
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    if not layers:
        name = type(model).__name__
        raise ConfigError(f"[grpo] gradient_checkpointing: the layers of {name} are not known")
    for layer in layers:
        # transformers' own needs training mode, and so dropout. The flag tells `Routing`.
        layer.gradient_checkpointing = True
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def pack_attention(model: PreTrainedModel) -> None:
    """Have the model take traces end to end, with their `lengths` as an argument.

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
        raise ConfigError(f"{refused}: it mixes them up; take 'rows' or 'tree'")


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
        raise TrainingError("a model that is prepared for packing takes traces end to end only")
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
