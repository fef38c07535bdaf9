"""The fast way to compute a step: one flat forward pass over slots of key-value cache.

All tokens of a step, decode tokens and pieces of prompts alike, go through the model as one row
of N tokens, so that every linear layer runs once. Only attention has to know which token belongs to
which call: it runs batched over all decoding slots, and once per piece of a prompt. The cache of
each layer is one tensor (slots, heads, length, head size) for keys and one for values; calls fill
slots 0..n-1 without a hole, so that decoding reads a view and copies nothing.

The model's own code is used: transformers lets an attention function be registered by name, and
hands a cache object of ours through to it. `bridle.embedded.model` proves at load time that
a model works this way; what doesn't is computed by `bridle.embedded.model`.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from bridle.embedded.call import BatchedCall, common_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from bridle.types import Ids


Cache: TypeAlias = Any
"""What a decoder keeps for a call; only the decoder looks into it."""

SHORTEST = 16
"""Ids; a common beginning shorter than this is not found."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One remembered beginning."""

    ids: Ids
    cache: Cache
    """The decoder's own: covers exactly `ids`."""
    size_bytes: int


class PrefixStore:
    """Remembered beginnings within a budget of bytes."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[Entry, None] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, ids: Ids) -> tuple[Entry | None, int]:
        """The entry with the longest common beginning, and how many ids that is (0 = none)."""
        best, matched = None, 0
        for entry in reversed(self._entries):
            common = common_prefix(entry.ids, ids)
            if common >= SHORTEST and common > matched:
                best, matched = entry, common
        if best is not None:
            self._entries.move_to_end(best)
        return best, matched

    def add(self, ids: Ids, cache: Cache, size_bytes: int) -> None:
        """Remember `cache` for `ids`; what doesn't fit the budget at all is not kept.

        An entry that is a beginning of `ids` is dropped: the new one serves for it.
        """
        if size_bytes > self._budget_bytes or len(ids) < SHORTEST:
            return
        shorter, matched = self.find(ids)
        if shorter is not None and matched == len(shorter.ids):
            self.remove(shorter)
        entry = Entry(ids.copy(), cache, size_bytes)
        self._entries[entry] = None
        self.size_bytes += size_bytes
        while self.size_bytes > self._budget_bytes:
            self.remove(next(iter(self._entries)))

    def covers(self, ids: Ids) -> bool:
        """Return whether an entry starts with all of `ids`, so that storing them adds nothing."""
        return len(ids) > 0 and self.find(ids)[1] == len(ids)

    def remove(self, entry: Entry) -> None:
        """Forget one entry; its cache is then the caller's alone."""
        if entry not in self._entries:
            return
        del self._entries[entry]
        self.size_bytes -= entry.size_bytes

    def clear(self) -> None:
        self._entries.clear()
        self.size_bytes = 0


ATTENTION = "bridle_slots"
"""Name under which transformers finds our attention function."""

LENGTH_STEP = 128
"""Slots grow by multiples of this many tokens."""

_plan = threading.local()
"""The plan of the step that this thread computes; transformers passes no such thing through."""

UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
"""Attention arguments that change the result and are not done here."""


@dataclass(slots=True, eq=False)
class Place:
    """Slot of a call in the cache."""

    slot: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start <= i < end` of the call in `slot`, at `offset` in the flat row."""

    slot: int
    start: int
    end: int
    offset: int


@dataclass(slots=True, eq=False)
class Plan:
    """Inputs of one forward pass: `decoding` tokens first, one per slot, then the pieces."""

    decoding: int
    slots: torch.Tensor
    """Slot of each decoding token, shape (D,), ascending."""
    positions: torch.Tensor
    """Position of each decoding token, shape (D,)."""
    longest: int
    """How much of the cache decoding looks at."""
    used: int
    """How many slots the decoding attention runs over."""
    pieces: list[Piece]
    masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)
    """Made once per step and window: key -1 for decoding, else the offset of a piece."""

    def decode_mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive attention mask of decoding, shape (used, 1, 1, longest)."""
        key = (-1, window)
        if key not in self.masks:
            device = self.slots.device
            ends = torch.zeros(self.used, dtype=torch.long, device=device)
            ends[self.slots] = self.positions
            at = torch.arange(self.longest, device=device)[None]
            seen = at <= ends[:, None]
            if window is not None:
                seen &= at > ends[:, None] - window
            self.masks[key] = _additive(seen, dtype)[:, None, None]
        mask = self.masks[key]
        assert mask is not None
        return mask

    def piece_mask(
        self, piece: Piece, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return a piece's additive attention mask, shape (end - start, end); `None` = plainly
        causal.
        """
        key = (piece.offset, window)
        if key not in self.masks:
            plain = piece.start == 0 and (window is None or window >= piece.end)
            self.masks[key] = None if plain else self._piece_mask(piece, window, dtype)
        return self.masks[key]

    def _piece_mask(self, piece: Piece, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        device = self.slots.device
        at = torch.arange(piece.end, device=device)[None]
        row = torch.arange(piece.start, piece.end, device=device)[:, None]
        seen = at <= row
        if window is not None:
            seen &= at > row - window
        return _additive(seen, dtype)


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where `seen`, minus infinity elsewhere."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, float("-inf"))


class SlotCache:
    """Keys and values of all layers and slots; what the model sees as its cache.

    Slot contents are always finite numbers: a masked token has weight 0, and 0 times NaN is NaN.
    """

    def __init__(self) -> None:
        self.layers: dict[int, list[torch.Tensor]] = {}
        """Layer -> [keys, values], each (slots, heads, length, head size)."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the step's keys and values, shape (1, heads, N, d); gives the whole cache."""
        plan: Plan = _plan.current
        pair = self.layers.get(layer_idx)
        if pair is None:
            pair = [self._made(key), self._made(value)]
            self.layers[layer_idx] = pair
        for cache, new in zip(pair, (key[0], value[0]), strict=True):
            if plan.decoding:
                cache[plan.slots, :, plan.positions] = new[:, : plan.decoding].transpose(0, 1)
            for piece in plan.pieces:
                size = piece.end - piece.start
                part = new[:, piece.offset : piece.offset + size]
                cache[piece.slot, :, piece.start : piece.end] = part
        return pair[0], pair[1]

    slots = 0
    length = 0

    def _made(self, like: torch.Tensor) -> torch.Tensor:
        heads, size = like.shape[1], like.shape[3]
        return like.new_zeros(self.slots, heads, self.length, size)

    def get_seq_length(self, *_: object) -> int:
        """Asked by some models before they look at the positions they are given."""
        return 0

    def resize(self, slots: int, length: int, keep: int) -> None:
        """Make every layer hold `slots` of `length`; the first `keep` slots keep what fits."""
        for pair in self.layers.values():
            for i, old in enumerate(pair):
                if old.shape[0] == slots and old.shape[2] == length:
                    continue
                new = old.new_zeros(slots, old.shape[1], length, old.shape[3])
                kept = min(length, old.shape[2])
                new[:keep, :, :kept] = old[:keep, :, :kept]
                pair[i] = new
        self.slots, self.length = slots, length

    def token_bytes(self) -> int:
        """Bytes of cache per token and slot; 0 before the first step."""
        tensors = [tensor for pair in self.layers.values() for tensor in pair]
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in tensors)


def attention(
    module: torch.nn.Module,  # noqa: ARG001 - the signature is transformers'
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: object,
) -> tuple[torch.Tensor, None]:
    """Attention of a flat step; `query` is (1, heads, N, d), `key` and `value` the whole cache.

    Returns (1, N, heads, value size), as transformers expects. Grouped queries are rows of their
    key head, so keys are never repeated. Raises `NotImplementedError` for variants that it doesn't
    do.
    """
    for name in UNSUPPORTED:
        if more.get(name) is not None:
            raise NotImplementedError(name)
    plan: Plan = _plan.current
    heads, rows = query.shape[1], query.shape[2]
    groups = heads // key.shape[1]
    d = plan.decoding
    out = query.new_empty(rows, heads, value.shape[3])
    if d:
        asked = query[0, :, :d].transpose(0, 1)
        if d != plan.used:
            spread = asked.new_zeros(plan.used, *asked.shape[1:])
            spread[plan.slots] = asked
            asked = spread
        found = scaled_dot_product_attention(
            asked.reshape(plan.used, key.shape[1], groups, -1),
            key[: plan.used, :, : plan.longest],
            value[: plan.used, :, : plan.longest],
            attn_mask=plan.decode_mask(sliding_window, query.dtype),
            scale=scaling,
        ).reshape(plan.used, heads, -1)
        out[:d] = found if d == plan.used else found[plan.slots]
    for piece in plan.pieces:
        size = piece.end - piece.start
        mask = plan.piece_mask(piece, sliding_window, query.dtype)
        shape = (-1, groups, -1, -1)
        found = scaled_dot_product_attention(
            query[0, :, piece.offset : piece.offset + size].unflatten(0, (-1, groups)),
            key[piece.slot, :, : piece.end].unsqueeze(1).expand(shape),
            value[piece.slot, :, : piece.end].unsqueeze(1).expand(shape),
            attn_mask=mask,
            is_causal=mask is None and size > 1,
            scale=scaling,
        )
        out[piece.offset : piece.offset + size] = found.flatten(0, 1).transpose(0, 1)
    return out.unsqueeze(0), None


class SlotDecoder:
    """Computes steps for models with plain attention; see the module's docstring."""

    name = "slots"
    pieces = True

    def __init__(self, model: PreTrainedModel, *, max_batch: int, prefix_bytes: int) -> None:
        self._model = model
        self._max_batch = max_batch
        self._cache_bytes: float = inf
        self._cache = SlotCache()
        self._calls: list[BatchedCall] = []
        """Call of each slot in use."""
        self.prefixes = PrefixStore(prefix_bytes)
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters

    def limit(self, cache_bytes: int) -> int | None:
        """Start over with a cache of at most this size; how many tokens of one call fit it."""
        per_token = self._cache.token_bytes()
        self._cache_bytes = cache_bytes
        self._cache.resize(0, 0, keep=0)
        return cache_bytes // per_token // LENGTH_STEP * LENGTH_STEP

    def admit(self, call: BatchedCall, version: int) -> bool:
        """Give `call` a slot with the longest beginning that is known; False = no room now."""
        entry, matched = self.prefixes.find(call.ids[: call.length - 1])
        giver: BatchedCall | None = None
        for other in self._calls:
            if other.cache_version == version:
                seen = call.ids[: min(other.computed, call.length - 1)]
                if (common := common_prefix(other.ids, seen)) > matched:
                    giver, matched = other, common
        if not self._reserve(len(self._calls) + 1, max(matched, 1)):
            return False
        slot = len(self._calls)
        if giver is not None:
            self._copy(giver.state.slot, slot, matched)
        elif entry is not None:
            self._restore(entry, slot, matched)
        self._calls.append(call)
        call.state = Place(slot)
        call.computed = matched
        call.cache_version = version
        return True

    def _copy(self, source: int, target: int, length: int) -> None:
        for pair in self._cache.layers.values():
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]

    def _restore(self, entry: Entry, slot: int, length: int) -> None:
        for layer, pair in self._cache.layers.items():
            for tensor, kept in zip(pair, entry.cache[layer], strict=True):
                tensor[slot, :, :length] = kept[:, :length]

    def release(self, call: BatchedCall, *, keep: bool) -> None:
        """Free the slot of `call`; with `keep` what it computed is remembered."""
        slot = call.state.slot
        if keep and not self.prefixes.covers(call.ids[: call.computed]):
            cache = {
                layer: [tensor[slot, :, : call.computed].clone() for tensor in pair]
                for layer, pair in self._cache.layers.items()
            }
            size = self._cache.token_bytes() * call.computed
            self.prefixes.add(call.ids[: call.computed], cache, size)
        last = self._calls.pop()
        if last is not call:
            self._copy(last.state.slot, slot, last.computed)
            last.state.slot = slot
            self._calls[slot] = last
        call.state = None
        call.computed = 0
        call.cache_version = -1

    def wipe(self) -> None:
        """Zero the cache of all slots that are not in use (a model gave NaN there)."""
        for pair in self._cache.layers.values():
            for tensor in pair:
                tensor[len(self._calls) :] = 0

    def reserve(self, work: Sequence[tuple[BatchedCall, int]]) -> bool:
        """Make room for `work`; False = the cache's budget doesn't allow it."""
        needed = max(call.computed + count for call, count in work)
        return self._reserve(len(self._calls), needed)

    def _reserve(self, slots: int, length: int) -> bool:
        cache = self._cache
        if slots <= cache.slots and length <= cache.length:
            return True
        longest = max([length, *(call.computed for call in self._calls)])
        exact = -(-longest // LENGTH_STEP) * LENGTH_STEP
        roomy = exact + LENGTH_STEP * (exact // LENGTH_STEP // 2)
        doubled = max(slots, min(self._max_batch, 1 << (slots - 1).bit_length()))
        per_token = cache.token_bytes()
        for n, t in ((doubled, roomy), (doubled, exact), (slots, exact)):
            if n * t * per_token <= self._cache_bytes:
                cache.resize(n, t, keep=len(self._calls))
                return True
        return False

    def forward(self, work: Sequence[tuple[BatchedCall, int]]) -> torch.Tensor:
        """Compute the next `count` ids of each call; advances `computed`.

        Returns logits of shape (R, vocabulary): one row, in order, for each call of `work` that
        has nothing left to compute.
        """
        decoding = [call for call, _ in work if call.pending == 1]
        decoding.sort(key=_slot_of)
        runs = [(call, call.computed, call.length) for call in decoding]
        runs += [(c, c.computed, c.computed + n) for c, n in work if c.pending > 1]
        pieces, rows, offset = [], {}, 0
        for call, start, end in runs:
            if offset >= len(decoding):
                pieces.append(Piece(call.state.slot, start, end, offset))
            offset += end - start
            if end == call.length:
                rows[call] = offset - 1
        _plan.current = self._planned(decoding, pieces)
        logits = self._run(runs, [rows[call] for call, _ in work if call in rows])
        for call, _, end in runs:
            call.computed = end
        return logits

    def _planned(self, decoding: list[BatchedCall], pieces: list[Piece]) -> Plan:
        device = self._model.device
        slots = [call.state.slot for call in decoding]
        at = [call.computed for call in decoding]
        return Plan(
            decoding=len(decoding),
            slots=torch.tensor(slots, dtype=torch.long, device=device),
            positions=torch.tensor(at, dtype=torch.long, device=device),
            longest=max(at, default=0) + 1,
            used=max(slots, default=-1) + 1,
            pieces=pieces,
        )

    def _run(self, runs: list[tuple[BatchedCall, int, int]], ends: list[int]) -> torch.Tensor:
        device = self._model.device
        tokens = np.concatenate([call.ids[start:end] for call, start, end in runs])
        positions = np.concatenate([np.arange(start, end) for _, start, end in runs])
        wanted = torch.tensor(ends, dtype=torch.long, device=device)
        keep = {"logits_to_keep": wanted} if self._keeps_logits and ends else {}
        output = self._model(
            input_ids=torch.from_numpy(tokens).long().to(device)[None],
            position_ids=torch.from_numpy(positions).to(device)[None],
            past_key_values=self._cache,
            use_cache=True,
            **keep,
        )
        logits = output.logits[0]
        return logits if keep else logits[wanted]


def _slot_of(call: BatchedCall) -> int:
    slot: int = call.state.slot
    return slot


def register() -> None:
    """Make transformers know our attention; idempotent."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
