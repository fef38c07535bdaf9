"""Logits to tokens, with the exact logprob of each token under the distribution it was drawn from.

The distribution of a call is the softmax of its logits after, in this order: `logit_bias`,
penalties, suppressed ids (`min_tokens`), temperature, min-p, top-k, top-p over what top-k left.
This is vLLM's order, and the logprobs are what vLLM calls processed. A token is drawn by inverting
the cumulative distribution in float64 at one uniform number of the call's own, so the draw does not
depend on the neighbours in the batch beyond rounding of the logits. At temperature 0 the
distribution is a single point: the most likely token, with logprob 0.0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bridle.engines.embedded.call import Call


def sample(logits: torch.Tensor, calls: Sequence[Call]) -> tuple[list[int], list[float]]:
    """Draw one token for each row of `logits`, shape (B, V); row b belongs to `calls[b]`.

    Returns token ids and logprobs (nats). A row that holds NaN gives a NaN logprob. May change
    `logits` in place.
    """
    logits = logits.float()
    for row, call in enumerate(calls):
        if call.counts is not None or call.bias or call.min_tokens:
            _adjust(logits[row], call)
    if any(call.temperature != 1.0 for call in calls):
        logits = logits / logits.new_tensor([[call.temperature] for call in calls])
    if any(call.min_p for call in calls):
        shares = logits.new_tensor([[call.min_p] for call in calls])
        best = logits.max(dim=-1, keepdim=True).values
        logits = logits.masked_fill(logits < best + shares.log(), float("-inf"))
    narrow = [b for b, call in enumerate(calls) if call.top_k or call.top_p < 1.0]
    if narrow:
        rows = logits[narrow]
        logits[narrow] = _narrowed(rows, [calls[b] for b in narrow])
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = _draw(logprobs, calls)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    if any(call.greedy for call in calls):
        greedy = torch.tensor([call.greedy for call in calls], device=logits.device)
        best, at = logprobs.max(dim=-1)
        tokens = torch.where(greedy, at, tokens)
        chosen = torch.where(greedy, torch.where(best.isnan(), best, 0.0), chosen)
    return tokens.tolist(), chosen.tolist()


def _draw(logprobs: torch.Tensor, calls: Sequence[Call]) -> torch.Tensor:
    """One id per row, shape (B,), int64; an id of probability 0 is never drawn."""
    cumulative = logprobs.double().exp_().cumsum(dim=-1)
    uniforms = [[0.0 if call.greedy else call.uniforms.next()] for call in calls]
    points = cumulative.new_tensor(uniforms) * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, points, right=True)[:, 0]
    return found.clamp_(max=logprobs.shape[-1] - 1)


def _adjust(logits: torch.Tensor, call: Call) -> None:
    """Apply the bias, penalties and suppressed ids to one row in place."""
    for token, bias in call.bias.items():
        if 0 <= token < len(logits):
            logits[token] += bias
    if call.repetition != 1.0:
        seen = torch.tensor(np.unique(call.ids[: call.length]), device=logits.device).long()
        of_seen = logits[seen]
        logits[seen] = torch.where(
            of_seen > 0, of_seen / call.repetition, of_seen * call.repetition
        )
    if call.counts:
        ids = torch.tensor(list(call.counts), device=logits.device)
        counts = logits.new_tensor(list(call.counts.values()))
        logits[ids] -= call.presence + call.frequency * counts
    if suppressed := [i for i in call.suppressed if 0 <= i < len(logits)]:
        logits[suppressed] = float("-inf")


def _narrowed(logits: torch.Tensor, calls: Sequence[Call]) -> torch.Tensor:
    """Rows with everything outside top-k, then top-p, at minus infinity.

    Ties with the last one kept stay in, as in vLLM.
    """
    ordered = logits.sort(dim=-1, descending=True).values
    size = logits.shape[-1]
    ranks = torch.tensor([[min(call.top_k or size, size) - 1] for call in calls]).to(logits.device)
    least = ordered.gather(1, ranks)
    if any(call.top_p < 1.0 for call in calls):
        kept = ordered.masked_fill(ordered < least, float("-inf"))
        probs = kept.double().softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs
        top_p = before.new_tensor([[call.top_p] for call in calls])
        inside = (before < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
        least = torch.maximum(least, ordered.gather(1, inside - 1))
    return logits.masked_fill(logits < least, float("-inf"))
