"""Traces, sessions and groups by hand, and a model of a few thousand parameters."""

import numpy as np
import torch
import transformers

from bridle.training.samples import Group
from bridle.trajectory.sample import MaskReason, Trace, Trajectory

VOCABULARY = 48


def trace(
    prompt, response, mask=None, *, logprobs=None, version=0, name="t", mode="processed", **more
):
    mask = np.array([1] * len(response) if mask is None else mask, dtype=np.uint8)
    given = np.full(len(response), -1.0) if logprobs is None else np.array(logprobs)
    versions = np.full(len(response), version) if np.isscalar(version) else np.array(version)
    return Trace(
        trace_id=name,
        prompt_ids=np.array(prompt, dtype=np.int32),
        response_ids=np.array(response, dtype=np.int32),
        loss_mask=mask,
        response_logprobs=np.where(mask, given, 0).astype(np.float32),
        versions=np.where(mask, versions, -1).astype(np.int32),
        reasons=np.where(mask, MaskReason.TRAINED, MaskReason.PROMPT).astype(np.uint8),
        exchange_ids=more.pop("exchange_ids", ()),
        turn_ends=more.pop("turn_ends", ()),
        finish_reason="stop",
        logprob_mode=mode,
        **more,
    )


def session(reward, *traces, name="s", status="COMPLETED", error=None):
    return Trajectory(name, status, tuple(traces), reward, error, {})


def group(*sessions, index=0, task_id="task"):
    return Group(index, task_id, sessions)


def tiny_model(seed=0):
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).eval()


def plain_logprobs(model, one):
    """Logprob of every response token of a trace by one plain forward pass."""
    ids = torch.tensor([[*one.prompt_ids.tolist(), *one.response_ids.tolist()]])
    with torch.no_grad():
        table = torch.log_softmax(model(ids, use_cache=False).logits[0].double(), -1)
    start = len(one.prompt_ids)
    places = range(start, ids.shape[1])
    return [float(table[at - 1, ids[0, at]]) if at else 0.0 for at in places]


def sampled_under(model, prompt, response, mask=None, *, version=0, name="t"):
    """A trace whose logprobs are the model's own."""
    bare = trace(prompt, response, mask, name=name)
    return trace(
        prompt, response, mask, logprobs=plain_logprobs(model, bare), version=version, name=name
    )
