"""Logprobs of the tokens that train, under a model's weights, with gradients.

Three layouts of the same numbers. *Batch*: traces side by side, padded at the end, where no trained
token can see it; what all of them begin with is computed once. *Packed*: traces end to end, without
padding, whatever their lengths. *Tree*: `trajectory.packing` lays traces out so that each token
stands once, and a dense mask says who sees whom. Logits are made at the positions that predict a
trained token and nowhere else, because with a large vocabulary they are most of the memory.

`recompute` and `certify_pieces` give the trainer's logprobs of captured tokens, to compare them
with the rollout's. They come from the same pass as an update, so what is certified is what trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from bridle.embedded.routing import routing_of
from bridle.errors import TrainingError
from bridle.experts import Rows as Rows16
from bridle.experts import complete_rows, stack_rows
from bridle.training.samples import Sample, trains
from bridle.trajectory.fidelity import Certificate, Facts, Recomputed, certify
from bridle.trajectory.packing import Packed, block_mask, pack
from bridle.trajectory.sample import Trace, Trajectory
from bridle.types import JSON, Logprobs

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel


Places = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""Of tokens, the number of the sample in its piece and the position in its ids."""

PADDING = 512
"""Tokens of padding in a piece that cost no more than a piece more does."""

LONG = 16384
"""Tokens of a trace from which cuDNN's attention saves what it takes to prepare for a new length,
0.2 s on an H200."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The trained tokens of a piece of a batch, in the order in which the logprobs come."""

    old: npt.NDArray[np.float32]
    """Logprob of each under the weights that sampled it; shape (N,)."""
    versions: npt.NDArray[np.int32]
    """Policy version that sampled each; shape (N,)."""
    advantages: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class TraceBatch:
    """Traces side by side; the classes below lay them out otherwise."""

    samples: tuple[Sample, ...]
    prefix: int = 0
    """Number of leading ids that all of them have in common, none of which trains."""

    @property
    def computed(self) -> int:
        """Number of tokens that go through the model, padding included."""
        longest = max(sample.trace.size for sample in self.samples)
        return self.prefix + len(self.samples) * (longest - self.prefix)

    def tokens(self) -> Tokens:
        """Return the batch's trained tokens: their sampling logprobs, versions, advantages and
        weights.
        """
        numbers, positions = self.places()
        traces = [sample.trace for sample in self.samples]
        starts = np.cumsum([len(trace.response_ids) for trace in traces])
        at = positions + (starts - [trace.size for trace in traces])[numbers]
        return Tokens(
            np.concatenate([trace.response_logprobs for trace in traces])[at],
            np.concatenate([trace.versions for trace in traces])[at],
            np.concatenate([_advantages(sample) for sample in self.samples])[at],
            _floats(sample.weight for sample in self.samples)[numbers],
        )

    def places(self) -> Places:
        """Return the sample and the position of each trained token of the batch."""
        found = [np.flatnonzero(_mask(sample)) for sample in self.samples]
        return np.repeat(np.arange(len(found)), [*map(len, found)]), np.concatenate(found)

    def padding(self) -> list[int]:
        """Return how many padding tokens follow each sample."""
        lengths = [sample.trace.size for sample in self.samples]
        return [max(lengths) - length for length in lengths]

    def logits(
        self, model: PreTrainedModel, *, replay: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits that predict each trained token, shape (N, vocabulary), and the tokens'
        ids.

        With `replay` tokens are routed to the experts that they were sampled with, as far as these
        are known.
        """
        longest = max(sample.trace.size for sample in self.samples)
        padded = list(zip(self.samples, self.padding(), strict=True))
        ids = np.stack([np.pad(one.trace.ids, (0, more), "edge") for one, more in padded])
        masks = np.stack([np.pad(_mask(one), (0, more)) for one, more in padded])
        row = torch.from_numpy(ids).long().to(model.device)
        trained = torch.from_numpy(masks[:, self.prefix + 1 :]).to(model.device)
        experts = self._experts(longest) if replay else None
        extra: dict[str, object] = {"use_cache": False}
        if self.prefix:
            with replayed(model, None if experts is None else experts[0, : self.prefix]):
                shared = shared_prefix(model, row[:1, : self.prefix], len(self.samples))
            extra = {"use_cache": True, "past_key_values": shared}
        rest = None if experts is None else np.concatenate([*experts[:, self.prefix : -1]])
        with replayed(model, rest):
            logits = logits_at(model, trained, input_ids=row[:, self.prefix : -1], **extra)
        return logits, row[:, self.prefix + 1 :][trained]

    def _experts(self, longest: int) -> Rows16 | None:
        """Return the experts of all ids, shape (B, T, layers, top_k); `None` = none are known."""
        return stack_rows([sample.trace.routed_experts for sample in self.samples], longest)


@dataclass(frozen=True, slots=True, eq=False)
class PackedTraces(TraceBatch):
    """Traces end to end, for a model that `grpo.pack_attention` has prepared.

    The last id of a trace predicts nothing and is left out.
    """

    @property
    def computed(self) -> int:
        """Number of tokens that go through the model."""
        return sum(sample.trace.size - 1 for sample in self.samples)

    def padding(self) -> list[int]:
        """Return a zero for each sample: packed samples have no padding."""
        return [0] * len(self.samples)

    def logits(
        self, model: PreTrainedModel, *, replay: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = model.device
        lengths = [sample.trace.size - 1 for sample in self.samples]
        ids = np.concatenate([sample.trace.ids[:-1] for sample in self.samples])
        wanted = np.concatenate([s.trace.ids[1:][_mask(s)[1:]] for s in self.samples])
        at = np.concatenate([_mask(sample)[1:] for sample in self.samples]) != 0
        experts = self._experts(max(lengths) + 1) if replay else None
        if experts is not None:
            rows = zip(experts, lengths, strict=True)
            experts = np.concatenate([row[:length] for row, length in rows])
        with replayed(model, experts):
            logits = logits_at(
                model,
                torch.from_numpy(at).to(device)[None],
                input_ids=torch.from_numpy(ids).long().to(device)[None],
                position_ids=torch.cat([torch.arange(n, device=device) for n in lengths])[None],
                lengths=lengths,
                use_cache=False,
            )
        return logits, torch.from_numpy(wanted).long().to(device)


@dataclass(frozen=True, slots=True, eq=False)
class Tree(TraceBatch):
    """Traces as one tree, each token once."""

    packed: Packed = field(kw_only=True)

    @property
    def computed(self) -> int:
        """Number of tokens that go through the model, each shared one once."""
        return len(self.packed.ids)

    def _trained(self) -> npt.NDArray[np.bool_]:
        mask: npt.NDArray[np.bool_] = (self.packed.loss_mask == 1) & (self.packed.parents >= 0)
        return mask

    def places(self) -> Places:
        trained = self._trained()
        return self.packed.trace_of[trained], self.packed.position_ids[trained]

    def padding(self) -> list[int]:
        """Return a zero for each sample: a tree has no padding."""
        return [0] * len(self.samples)

    def logits(
        self, model: PreTrainedModel, *, replay: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed, trained = self.packed, self._trained()
        device = model.device
        sees = torch.from_numpy(block_mask(packed)).to(device)
        mask = torch.zeros(sees.shape, dtype=model.dtype, device=device)
        mask.masked_fill_(~sees, torch.finfo(model.dtype).min)
        at, place = np.unique(packed.parents[trained], return_inverse=True)
        kept = torch.from_numpy(np.isin(np.arange(len(packed.ids)), at)).to(device)
        with replayed(model, packed.routed_experts() if replay else None):
            logits = logits_at(
                model,
                kept[None],
                input_ids=torch.from_numpy(packed.ids).long().to(device)[None],
                attention_mask=mask[None, None],
                position_ids=torch.from_numpy(packed.position_ids).long().to(device)[None],
                use_cache=False,
            )
        rows = torch.from_numpy(place.astype(np.int64)).to(device)
        wanted = torch.from_numpy(packed.ids[trained]).long().to(device)
        return logits[rows], wanted


def rows_of(
    samples: Sequence[Sample], batch_tokens: int, *, share: bool, width: int | None = None
) -> Iterator[TraceBatch]:
    """Yield samples in batches of at most `batch_tokens` tokens with padding, similar lengths
    together.

    With `share` a batch's common beginning is computed once; only for models whose cache is of keys
    and values. `width` is the model's hidden size: given it, only where that is less work.
    """
    order = sorted(samples, key=attrgetter("trace.size"))
    prefix = common_prefix(order) if share and order else 0
    if width is not None and not sharing_saves(
        [sample.trace.size for sample in order], prefix, width
    ):
        prefix = 0
    piece: list[Sample] = []
    filled = 0
    for sample in order:
        own = sample.trace.size - prefix
        padded = (len(piece) + 1) * own
        padding = padded - filled - own
        if piece and (prefix + padded > batch_tokens or padding > max(PADDING, padded // 8)):
            yield TraceBatch(tuple(piece), prefix)
            piece, filled = [], 0
        piece.append(sample)
        filled += own
    if piece:
        yield TraceBatch(tuple(piece), prefix)


def packed_of(samples: Sequence[Sample], batch_tokens: int) -> Iterator[PackedTraces]:
    """Yield samples packed (first fit) into few batches of at most `batch_tokens` tokens, no
    padding.
    """
    pieces: list[list[Sample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=attrgetter("trace.size"), reverse=True):
        own = sample.trace.size - 1
        place = next((n for n, left in enumerate(room) if own <= left), len(room))
        if place == len(room):
            pieces.append([])
            room.append(batch_tokens)
        pieces[place].append(sample)
        room[place] -= own
    for piece in pieces:
        yield PackedTraces(tuple(piece))


def sharing_saves(lengths: Sequence[int], prefix: int, width: int) -> bool:
    """Return whether computing the shared first `prefix` tokens once is cheaper for rows of these
    lengths.

    A layer's linear part costs a token as much as attention to `6 * width` others. Rows behind a
    shared beginning attend under an explicit mask, whose kernels compute the masked half as well.
    """
    apart = sum(length * length / 2 for length in lengths)
    shared = prefix * prefix / 2 + sum((length - prefix) * length for length in lengths)
    return 6 * width * (len(lengths) - 1) * prefix > shared - apart


def trees_of(samples: Sequence[Sample], batch_tokens: int) -> Iterator[Tree]:
    """Yield samples as trees of shared beginnings, one tree per group, or several for a large
    group.

    Memory and time of a dense mask grow with the square of a tree, so groups are never joined.
    """
    by_group = attrgetter("group")
    for _, group in groupby(sorted(samples, key=by_group), key=by_group):
        yield from _trees(tuple(group), batch_tokens)


def _trees(samples: tuple[Sample, ...], batch_tokens: int) -> Iterator[Tree]:
    tree = _tree(samples)
    if tree.computed <= batch_tokens or len(samples) == 1:
        yield tree
        return
    half = len(samples) // 2
    yield from _trees(samples[:half], batch_tokens)
    yield from _trees(samples[half:], batch_tokens)


def _tree(samples: Sequence[Sample]) -> Tree:
    traces = tuple(sample.trace for sample in samples)
    return Tree(tuple(samples), packed=pack([Trajectory("", "", traces, None, None, {})]))


def _advantages(sample: Sample) -> npt.NDArray[np.float32]:
    size = len(sample.trace.response_ids)
    return np.broadcast_to(np.asarray(sample.advantage, dtype=np.float32), (size,))


def check_ids(samples: Sequence[Sample], model: PreTrainedModel, what: str = "trace") -> None:
    """Raise `TrainingError` for a token id that the model has no embedding for (another
    tokenizer's).

    `what` is the samples' name in the message.
    """
    size = int(model.get_input_embeddings().weight.shape[0])
    for sample in samples:
        ids = sample.trace.ids
        for at in (int(ids.argmax()), int(ids.argmin())):
            if not 0 <= ids[at] < size:
                raise TrainingError(
                    f"{what} {sample.trace.trace_id}: id {ids[at]} at position {at} is beyond the "
                    f"model's vocabulary of {size}; it comes from another tokenizer"
                )


def logits_at(model: PreTrainedModel, places: torch.Tensor, **inputs: Any) -> torch.Tensor:  # noqa: ANN401
    """Return the model's logits at selected positions only, shape (N, vocabulary).

    `places` is a mask of shape (B, T). The states behind the last layer are selected before the
    model's head, because `logits_to_keep` takes a mask in the newest versions of transformers only.
    """

    def select(_: torch.nn.Module, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return states[0][places]

    head = model.get_output_embeddings()
    with nullcontext() if head is None else head.register_forward_pre_hook(select):
        logits: torch.Tensor = model(**inputs).logits
    return logits if logits.ndim == 2 else logits[places]


def shared_prefix(model: PreTrainedModel, row: torch.Tensor, copies: int) -> DynamicCache:
    """Return the key-value cache of one row of ids, repeated for `copies` traces; gradients flow
    into it.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    last = torch.arange(row.shape[1], device=row.device)[None] == row.shape[1] - 1
    logits_at(model, last, input_ids=row, past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.keys = layer.keys.expand(copies, -1, -1, -1)
        layer.values = layer.values.expand(copies, -1, -1, -1)
    return cache


def replayed(model: PreTrainedModel, rows: Rows16 | None) -> AbstractContextManager[None]:
    """Within the context, a forward pass routes its tokens to these experts; `None` = to the
    model's own.
    """
    routing = routing_of(model)
    return nullcontext() if routing is None else routing.replaying(rows)


@contextmanager
def attention_for(piece: TraceBatch) -> Iterator[None]:
    """Within the context, a GPU attends by cuDNN's kernels if a trace of the piece is long.

    They are faster, but prepare themselves for each new length. A layer that is computed twice
    needs the same kernel both times.
    """
    longest = max(sample.trace.size for sample in piece.samples)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(longest >= LONG)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def threads(count: int | None, model: PreTrainedModel) -> Iterator[None]:
    """Within the context, torch computes an operation on so many CPU threads.

    `None` = one for a very small model (see `SMALL_MODEL`), else as torch is set.
    """
    from bridle.embedded.model import SMALL_MODEL

    before = torch.get_num_threads()
    small = model.device.type == "cpu" and model.num_parameters() < SMALL_MODEL
    torch.set_num_threads(count or (1 if small else before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def chosen(logits: torch.Tensor, wanted: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the logprob of each wanted id under the logits at `temperature`, shape (N,),
    float32.
    """
    logits = logits.float()
    if temperature != 1:
        logits = logits / temperature
    return -torch.nn.functional.cross_entropy(logits, wanted, reduction="none")


DIVERGENCE_ROWS = 512
"""Positions whose distributions are in memory at once."""


def divergence(logits: torch.Tensor, other: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the reverse KL divergence of the distributions of `logits` from those of `other`.

    Both have shape (N, vocabulary); vocabularies may differ by padding only. The result has shape
    (N,), in nats; gradients flow into `logits`.
    """
    from torch.utils.checkpoint import checkpoint

    shared = min(logits.shape[-1], other.shape[-1])

    def rows(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        both = (torch.log_softmax(one.float() / temperature, -1) for one in (ours, theirs))
        own, far = (one[:, :shared] for one in both)
        return (own.exp() * (own - far)).sum(-1)

    pieces = zip(logits.split(DIVERGENCE_ROWS), other.split(DIVERGENCE_ROWS), strict=True)
    return torch.cat([checkpoint(rows, *piece, use_reentrant=False) for piece in pieces])


def _floats(values: Iterable[float]) -> npt.NDArray[np.float32]:
    return np.array([*values], dtype=np.float32)


def _mask(sample: Sample) -> npt.NDArray[np.bool_]:
    """Return the mask of a trace's trained tokens, prompt included; the first token is never
    trained.
    """
    prompt = np.zeros(len(sample.trace.prompt_ids), dtype=np.bool_)
    mask = np.concatenate([prompt, sample.trace.loss_mask == 1])
    mask[:1] = False
    return mask


def common_prefix(samples: Sequence[Sample]) -> int:
    """Return how many leading ids all samples share.

    The id before the first that trains is not counted: that one is predicted from it.
    """
    first = samples[0].trace.ids
    length = len(first) - 1
    for sample in samples:
        most = min(length, int(_mask(sample)[1:].argmax()))
        same = first[:most] == sample.trace.ids[:most]
        length = most if same.all() else int(same.argmin())
    return length


# ---- logprobs for `bridle.trajectory.fidelity.certify`


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

    Tokens are routed to the experts that they were sampled with, where these are known; without
    `replay`, as the model's own routers decide. `batch_tokens` bounds what is computed at once,
    padding included. Raises `TrainingError` for an id that the model does not have.
    """
    samples = [Sample(trace, 0, 0.0, 0.0) for trace in traces if trains(trace)]
    check_ids(samples, model)
    for piece in rows_of(samples, batch_tokens, share=False):
        with torch.inference_mode(), attention_for(piece):
            logits, wanted = piece.logits(model, replay=replay)
            spread = torch.log_softmax(logits.float() / temperature, -1)
            chosen = spread.gather(1, wanted[:, None])[:, 0]
            entropies = -(spread.exp() * spread).sum(-1)
        yield from _answers(piece, chosen.cpu().numpy(), entropies.cpu().numpy())


def certify_pieces(
    pieces: Iterable[tuple[TraceBatch, torch.Tensor]],
    model: PreTrainedModel,
    facts: Facts,
    *,
    replay: bool = True,
) -> Certificate | None:
    """Compare the first logprobs of an update with the rollout's, on tokens that its weights
    sampled.

    `facts` has the policy version of these weights; `replay` says whether the logprobs are those of
    the rollout's experts. `None` = no token was sampled under that version.
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
    """Return the facts that the model itself shows (such as its dtype), where `known` has none.

    `traces` are those whose experts were replayed; where all of them are known, routing is no
    difference between trainer and rollout.
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
    piece: TraceBatch,
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
            ids=sample.trace.ids,
            entropies=None if entropies is None else entropies[own],
            padding=padding,
        )
