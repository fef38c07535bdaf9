"""Logprobs of traces by the reference trainer, for `bridle.trajectory.fidelity.certify`.

They come from the same forward pass as an update (`bridle.training.forward`), so what is certified
is what trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from bridle.experts import complete_rows
from bridle.training.forward import Piece, check_ids, rows_of
from bridle.training.samples import Sample, trains
from bridle.trajectory.fidelity import Certificate, Facts, Recomputed, certify
from bridle.trajectory.sample import Trace
from bridle.types import JSON, Logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names in a model's config under which it has experts."""


def recompute(
    model: PreTrainedModel,
    traces: Iterable[Trace],
    *,
    temperature: float = 1.0,
    batch_tokens: int = 16384,
    replay: bool = True,
) -> Iterator[Recomputed]:
    """Yield the logprobs and entropies of all tokens that train, under the model's weights.

    Tokens go to the experts that they were sampled with, where these are known; without `replay`
    they go where the model's own routers send them.

    `batch_tokens` bounds what is computed at once, padding included. Raises `TrainingError` for an
    id that the model does not have.
    """
    samples = [Sample(trace, 0, 0.0, 0.0) for trace in traces if trains(trace)]
    check_ids(samples, model)
    for piece in rows_of(samples, batch_tokens, share=False):
        with torch.inference_mode():
            logits, wanted = piece.logits(model, replay=replay)
            spread = torch.log_softmax(logits.float() / temperature, -1)
            chosen = spread.gather(1, wanted[:, None])[:, 0]
            entropies = -(spread.exp() * spread).sum(-1)
        yield from _answers(piece, chosen.cpu().numpy(), entropies.cpu().numpy())


def certify_pieces(
    pieces: Iterable[tuple[Piece, torch.Tensor]],
    model: PreTrainedModel,
    facts: Facts,
    *,
    replay: bool = True,
) -> Certificate | None:
    """Compare the first logprobs of an update with the rollout's, on tokens of its own version.

    `facts` hold that version; `replay` says whether the logprobs are those of the rollout's
    experts. `None` = no token was sampled under it.
    """
    traces: list[Trace] = []
    answers: list[Recomputed] = []
    for piece, logprobs in pieces:
        current = piece.tokens().versions == facts.version
        answers += _answers(piece, logprobs.detach().cpu().numpy(), among=current)
        traces += [sample.trace for sample in piece.samples]
    if not any(len(answer.positions) for answer in answers):
        return None
    return certify(traces, answers, facts_of(model, facts, traces if replay else ()))


def facts_of(model: PreTrainedModel, known: Facts, traces: Iterable[Trace] = ()) -> Facts:
    """Return the facts that the model itself shows, behind those that are known.

    `traces` were replayed; where all of their experts are known, the trainer had no choice.
    """
    config = model.config.get_text_config()
    has_experts = any(getattr(config, name, None) for name in EXPERTS)
    replayed = {complete_rows(trace.routed_experts) is not None for trace in traces} == {True}
    shown: JSON = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "processors": "none",
        "padding": "right",
        "attention": getattr(config, "_attn_implementation", None),
        "positions": str(getattr(config, "rope_parameters", None) or "default"),
        "experts": ("replayed" if replayed else "routed") if has_experts else "dense",
    }
    return Facts(**{name: one for name, one in shown.items() if one is not None} | known.json())


def digest_of_weights(model: PreTrainedModel) -> str:
    """Return the hex digest of the model's weights: sha256 over names and bytes, in the order of
    names.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + b"\0")
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _answers(
    piece: Piece,
    logprobs: Logprobs,
    entropies: Logprobs | None = None,
    among: np.ndarray | None = None,
) -> Iterator[Recomputed]:
    """Split the logprobs of a piece by its samples; `among` selects some of the tokens."""
    numbers, positions = piece.places()
    for number, (sample, padding) in enumerate(zip(piece.samples, piece.padding(), strict=True)):
        own = numbers == number if among is None else (numbers == number) & among
        yield Recomputed(
            trace_id=sample.trace.trace_id,
            positions=positions[own].astype(np.int32),
            logprobs=logprobs[own],
            ids=np.concatenate([sample.trace.prompt_ids, sample.trace.response_ids]),
            entropies=None if entropies is None else entropies[own],
            padding=padding,
        )
