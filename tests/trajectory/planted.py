"""Rollouts of a tiny model, and trainers that compute their logprobs under a wrong setting.

Nothing here edits a logprob. Sessions of several turns are sampled token by token; the rollout's
logprobs are what the model says under the rollout's `Computing`, the trainer's are what it says
under another one: a temperature, a top-k, a sliding window, a stale cache and so on.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache

from bridle.trajectory.fidelity import Certificate, Facts, Recomputed, certify
from bridle.trajectory.sample import MaskReason, Trace

VOCABULARY = 64
ROWS, LENGTH = 8, 168
LOGIT_SPREAD = 2.5
"""Standard deviation of the logits: sampled tokens have probabilities from 0.001 to 0.9."""


@dataclass(frozen=True)
class Computing:
    """A way to compute the logprobs of given ids."""

    model: transformers.PreTrainedModel
    temperature: float = 1.0
    top_k: int | None = None
    penalty: float = 1.0
    """Divides the positive logits of tokens that stood there before, as vLLM's does."""
    dtype: torch.dtype = torch.float32
    window: int | None = None
    """Keys that a token attends to; `None` = all before it."""
    bias: float = 0.0
    """Added to the logits of every fourth token."""
    theta: float | None = None
    """Base of the rotary position embedding; `None` = the model's."""
    padded: bool = False
    """Rows are padded at the left to the longest one, and the padding is not masked."""
    positions: str = "plain"
    """`restart`: from 0 at each turn; `stretched`: at half the distance."""
    stale: transformers.PreTrainedModel | None = None
    """Weights under which the keys and values of cached beginnings were computed."""
    padding: int = 0
    """Masked padding at the right: another shape of the batch, the same numbers but for noise."""
    kernel: str = "eager"
    """Attention implementation of transformers."""


@dataclass(frozen=True)
class Session:
    """The ids of one sampled row and what is known about it."""

    ids: np.ndarray
    sampled: np.ndarray
    """Whether the model sampled the token."""
    ends: tuple[int, ...]
    """Where each turn ends."""
    cached: tuple[int, ...]
    """Tokens of each turn's prompt that come from the prefix cache."""

    @property
    def starts(self) -> list[int]:
        """Positions at which each turn's own part of its prompt begins."""
        return [0, *self.ends[:-1]]


@functools.cache
def dense(seed: int) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
        initializer_range=0.3, attn_implementation="eager",
    )  # fmt: skip
    return _spread(transformers.Qwen3ForCausalLM(config))


@functools.cache
def mixture(seed: int) -> transformers.PreTrainedModel:
    """A model of eight experts, two of them for each token."""
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
        initializer_range=0.3, attn_implementation="eager", num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1,
        norm_topk_prob=True,
    )  # fmt: skip
    return _spread(transformers.Qwen3MoeForCausalLM(config))


def _spread(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    width = model.config.hidden_size
    with torch.no_grad():
        model.lm_head.weight.normal_(0, LOGIT_SPREAD / width**0.5)
    return model.eval()


def updated(
    model: transformers.PreTrainedModel, sessions: Sequence[Session], rate: float, seed: int = 0
) -> transformers.PreTrainedModel:
    """The model after one step of Adam from rest, on sessions with random advantages."""
    made = _rounded(model, torch.float32)
    random = np.random.default_rng(seed)
    loss = torch.zeros(())
    for session in sessions:
        row = torch.from_numpy(session.ids).long()[None]
        logits = made(input_ids=row[:, :-1], use_cache=False).logits[0]
        chosen = -torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none")
        loss = loss - random.normal() * chosen[torch.from_numpy(session.sampled[1:])].mean()
    loss.backward()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.sub_(rate * parameter.grad.sign())
    return made


@functools.cache
def play(model: transformers.PreTrainedModel, seed: int, how: Computing) -> list[Session]:
    """Sessions sampled from `model` with the temperature and the processors of `how`."""
    random = np.random.default_rng(seed)
    model.set_attn_implementation("eager")
    plans = [_plan(random) for _ in range(ROWS)]
    ids = torch.from_numpy(random.integers(2, VOCABULARY, (ROWS, LENGTH)))
    sampled = torch.from_numpy(np.stack([mask for mask, _ in plans]))
    generator = torch.Generator().manual_seed(seed)
    cache = DynamicCache(config=model.config)
    seen = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool)
    with torch.inference_mode():
        for at in range(LENGTH - 1):
            seen[torch.arange(ROWS), ids[:, at]] = True
            output = model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            logits = _processed(output.logits[:, 0], seen, how)
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            ids[:, at + 1] = torch.where(sampled[:, at + 1], drawn, ids[:, at + 1])
    found = []
    for row, (mask, ends) in enumerate(plans):
        keep = len(ends) if row == 0 else int(random.integers(2, len(ends) + 1))
        hits = random.random(keep) < 0.5
        starts = [0, *ends[: keep - 1]]
        cached = [start if hit else 0 for start, hit in zip(starts, hits, strict=True)]
        end = ends[keep - 1]
        found.append(Session(ids[row, :end].numpy(), mask[:end], tuple(ends[:keep]), tuple(cached)))
    return found


def _plan(random: np.random.Generator) -> tuple[np.ndarray, list[int]]:
    mask = np.zeros(LENGTH, dtype=np.bool_)
    ends, at = [], 0
    while True:
        start = at + int(random.integers(6, 24))
        at = start + int(random.integers(10, 28))
        if at > LENGTH:
            return mask, ends
        mask[start:at] = True
        ends.append(at)


def _processed(logits: torch.Tensor, seen: torch.Tensor, how: Computing) -> torch.Tensor:
    logits = logits.float()
    if how.penalty != 1:
        lowered = torch.where(logits > 0, logits / how.penalty, logits * how.penalty)
        logits = torch.where(seen, lowered, logits)
    logits = logits / how.temperature
    logits[..., ::4] += how.bias
    if how.top_k is not None:
        least = logits.topk(how.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits


def logprobs(session: Session, how: Computing, longest: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logprob of each sampled token and the entropy there; `longest` of the batch, if padded."""
    ids = torch.from_numpy(session.ids).long()
    model = how.model
    if how.dtype != torch.float32:
        model = _rounded(model, how.dtype)
    if how.theta is not None:
        model = type(model)(_turned(model.config, how.theta))
        model.load_state_dict(how.model.state_dict())
        model.eval()
    model.set_attn_implementation(how.kernel)
    with torch.inference_mode():
        logits = _logits(model, session, ids, how, longest).float()
        seen = torch.zeros(len(ids), VOCABULARY, dtype=torch.bool)
        for at in range(len(ids)):
            seen[at:, ids[at]] = True
        spread = torch.log_softmax(_processed(logits[:-1], seen[:-1], how), -1)
        chosen = spread.gather(1, ids[1:, None])[:, 0]
        entropy = -(spread.exp() * spread.nan_to_num(neginf=0)).sum(-1)
    mask = session.sampled[1:]
    return chosen.numpy()[mask], entropy.numpy()[mask]


def _turned(config: transformers.PreTrainedConfig, theta: float) -> transformers.PreTrainedConfig:
    other = copy.deepcopy(config)
    other.rope_parameters = {**other.rope_parameters, "rope_theta": theta}
    return other


def _rounded(
    model: transformers.PreTrainedModel, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    made = type(model)(model.config)
    made.load_state_dict(model.state_dict())
    return made.to(dtype).eval()


def _logits(
    model: transformers.PreTrainedModel,
    session: Session,
    ids: torch.Tensor,
    how: Computing,
    longest: int,
) -> torch.Tensor:
    size = len(ids)
    if how.stale is not None:
        stale = model if how.stale is how.model else _rounded(how.stale, how.dtype)
        return _with_stale_cache(model, stale, session, ids)
    before = longest - size if how.padded else 0
    row = torch.cat([torch.zeros(before), ids, torch.zeros(how.padding)]).long()
    sees = torch.ones(len(row), len(row)).tril()
    if how.window is not None:
        sees = sees.triu(1 - how.window)
    mask = torch.zeros(sees.shape, dtype=model.dtype)
    mask.masked_fill_(sees == 0, torch.finfo(model.dtype).min)
    places = torch.arange(len(row))
    if how.positions == "restart":
        places = torch.cat([torch.arange(n) for n in np.diff([0, *session.ends])])
    elif how.positions == "stretched":
        places = places / 2
    output = model(
        input_ids=row[None], attention_mask=mask[None, None], position_ids=places[None],
        use_cache=False,
    )  # fmt: skip
    logits: torch.Tensor = output.logits[0, before : before + size]
    return logits


def _with_stale_cache(
    model: transformers.PreTrainedModel,
    stale: transformers.PreTrainedModel,
    session: Session,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Logits of each turn behind keys and values that its cache hit took from the stale weights."""
    rows = []
    for start, end, cached in zip(session.starts, session.ends, session.cached, strict=True):
        cache = DynamicCache(config=model.config)
        if cached:
            stale(input_ids=ids[None, :cached], past_key_values=cache, use_cache=True)
        output = model(input_ids=ids[None, cached:end], past_key_values=cache, use_cache=True)
        rows.append(output.logits[0, start - cached :])
    return torch.cat(rows)


def trace_of(number: int, session: Session, how: Computing, *, mode: str = "processed") -> Trace:
    """The trace that capture would have of the session."""
    start = int(session.sampled.argmax())
    mask = session.sampled[start:].astype(np.uint8)
    values = np.zeros(len(mask), dtype=np.float32)
    values[mask == 1] = logprobs(session, how)[0]
    temperatures = [how.temperature]
    return Trace(
        trace_id=f"s{number}/prefix_merging/0",
        prompt_ids=session.ids[:start].astype(np.int32),
        response_ids=session.ids[start:].astype(np.int32),
        loss_mask=mask,
        response_logprobs=values,
        versions=np.where(mask == 1, 3, -1).astype(np.int32),
        reasons=np.where(mask == 1, MaskReason.TRAINED, MaskReason.PROMPT).astype(np.uint8),
        exchange_ids=tuple(f"s{number}-{turn}" for turn in range(len(session.ends))),
        turn_ends=tuple(end - start for end in session.ends),
        finish_reason="stop",
        logprob_mode=mode,
        metadata={
            "cached_tokens": [*session.cached],
            "sampling": {"temperature": temperatures, "top_k": [how.top_k or -1]},
        },
    )


def recomputed(
    sessions: Sequence[Session], how: Computing, shown: Sequence[Session] | None = None
) -> list[Recomputed]:
    """A trainer's answer: `shown` are the sessions as it has them, if its ids are others."""
    shown = sessions if shown is None else shown
    longest = max(len(session.ids) for session in shown)
    found = []
    for number, (session, seen) in enumerate(zip(sessions, shown, strict=True)):
        values, entropies = logprobs(seen, how, longest)
        found.append(
            Recomputed(
                trace_id=f"s{number}/prefix_merging/0",
                positions=np.flatnonzero(session.sampled).astype(np.int32),
                logprobs=values.astype(np.float32),
                ids=seen.ids.astype(np.int32),
                entropies=entropies.astype(np.float32),
                padding=longest - len(seen.ids),
            )
        )
    return found


@dataclass(frozen=True)
class Run:
    """Rollouts and a trainer's answer, as far as they were planted."""

    traces: list[Trace]
    answers: list[Recomputed]
    rollout: Facts
    """What a truthful engine says."""
    trainer: Facts
    """What a truthful trainer says."""

    def certificate(self, *, facts: bool) -> Certificate:
        """With all facts of both sides; or with what everybody believes, float32 everywhere."""
        if facts:
            return certify(self.traces, self.answers, self.trainer, self.rollout)
        believed = Facts(dtype="float32")
        traces = [
            replace(trace, metadata=trace.metadata | {"sampling": {}}) for trace in self.traces
        ]
        return certify(traces, self.answers, believed, believed)


SHARED = Facts(
    weights="w3", version=3, template="t1", dtype="float32", temperature=1.0, processors="none",
    cache="reset at updates", experts="dense", padding="right", attention="eager",
    positions="0, 1, 2...",
)  # fmt: skip


def run(
    seed: int,
    *,
    rollout: Callable[[Computing], Computing] = lambda how: how,
    trainer: Callable[[Computing], Computing] = lambda how: how,
    engine_facts: dict[str, Any] | None = None,
    trainer_facts: dict[str, Any] | None = None,
    show: Callable[[Sequence[Session], np.random.Generator], Sequence[Session]] | None = None,
    moe: bool = False,
    updated_by: str | None = None,
) -> Run:
    """Play sessions and have both sides compute them.

    `updated_by` names the side whose weights are others: the `trainer`'s, one update later; or the
    `cache`, whose beginnings were computed one update earlier.
    """
    model = mixture(seed) if moe else dense(seed)
    how = rollout(Computing(model))
    sampled = Computing(
        model, temperature=how.temperature, top_k=how.top_k, penalty=how.penalty, bias=how.bias
    )
    sessions = play(model, seed, sampled)
    theirs = trainer(Computing(model))
    if updated_by is not None:
        other = updated(model, sessions, 3e-3, seed)
        how = replace(how, stale=other) if updated_by == "cache" else how
        theirs = replace(theirs, model=other) if updated_by == "trainer" else theirs
    shown = None if show is None else show(sessions, np.random.default_rng(seed))
    return Run(
        [trace_of(number, session, how) for number, session in enumerate(sessions)],
        recomputed(sessions, theirs, shown),
        replace(SHARED, **engine_facts or {}),
        replace(SHARED, **trainer_facts or {}),
    )


def clean(seed: int) -> Run:
    """Two correct computations of the same numbers, whose kernels and batches are others.

    The rollout computes turn by turn behind a cache, the trainer whole padded rows with another
    attention kernel; by the seed in float32, in bfloat16, a rollout in bfloat16 and nothing
    declared, or with experts in float32.
    """
    half = seed % 4 in (1, 2)
    dtype = torch.bfloat16 if half else torch.float32
    theirs = dtype if seed % 4 == 1 else torch.float32
    result = {"dtype": None if seed % 4 == 2 else str(dtype).removeprefix("torch.")}
    return run(
        seed,
        rollout=lambda how: replace(how, stale=how.model, dtype=dtype),
        trainer=lambda how: replace(how, kernel="sdpa", padding=9, dtype=theirs),
        engine_facts=result,
        trainer_facts=result | {"attention": "sdpa"},
        moe=seed % 4 == 3,
    )


def retokenized(sessions: Sequence[Session], random: np.random.Generator) -> list[Session]:
    """In every other row a pair of sampled tokens became another pair."""
    found = []
    for number, session in enumerate(sessions):
        ids = session.ids.copy()
        if number % 2 == 0:
            at = int(random.choice(np.flatnonzero(session.sampled)[2:-4]))
            ids[at] = (ids[at] + 7) % VOCABULARY
        found.append(replace(session, ids=ids))
    return found


def rerendered(sessions: Sequence[Session], random: np.random.Generator) -> list[Session]:
    """The two tokens that open the row and each later turn's message are another template's."""
    found = []
    for session in sessions:
        ids = session.ids.copy()
        for start in session.starts:
            ids[start : start + 2] = random.integers(2, VOCABULARY, 2)
        found.append(replace(session, ids=ids))
    return found


PLANTED: dict[str, Callable[[int], Run]] = {
    "weights": lambda seed: run(
        seed, updated_by="trainer", trainer_facts={"weights": "w4", "version": 4}
    ),
    "ids": lambda seed: run(seed, show=retokenized),
    "template": lambda seed: run(seed, show=rerendered, trainer_facts={"template": "t2"}),
    "dtype": lambda seed: run(
        seed, trainer=lambda how: replace(how, dtype=torch.bfloat16),
        trainer_facts={"dtype": "bfloat16"},
    ),
    "temperature": lambda seed: run(
        seed, trainer=lambda how: replace(how, temperature=(0.7, 0.9, 1.1, 1.3)[seed % 4]),
        trainer_facts={"temperature": (0.7, 0.9, 1.1, 1.3)[seed % 4]},
    ),
    "processor": lambda seed: run(
        seed,
        rollout=lambda how: replace(how, **({"top_k": 20} if seed % 2 else {"penalty": 1.2})),
        engine_facts={"processors": "top_k=20" if seed % 2 else "repetition_penalty=1.2"},
    ),
    "cache": lambda seed: run(
        seed, updated_by="cache", engine_facts={"cache": "kept over updates"}
    ),
    "experts": lambda seed: run(
        seed, moe=True, rollout=lambda how: replace(how, dtype=torch.bfloat16),
        engine_facts={"dtype": "bfloat16", "experts": "routed"},
        trainer_facts={"experts": "routed alone"},
    ),
    "padding": lambda seed: run(
        seed, trainer=lambda how: replace(how, padded=True), trainer_facts={"padding": "left"}
    ),
    "attention": lambda seed: run(
        seed, trainer=lambda how: replace(how, window=64),
        trainer_facts={"attention": "sdpa, window 64"},
    ),
    "positions": lambda seed: run(
        seed, trainer=lambda how: replace(how, positions="restart"),
        trainer_facts={"positions": "from 0 at each turn"},
    ),
}  # fmt: skip
"""Cause -> a run with it, for a seed."""
