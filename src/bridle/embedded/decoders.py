"""Two ways to compute a step of the batch, and the proof at load time that one of them is right.

`SlotDecoder` computes all decoding calls in one forward pass. The cache of each layer is one tensor
(slots, heads, length, head size) for keys and one for values; calls fill slots 0..n-1 without a
gap, so the pass reads a view. A prompt is computed in pieces, each in a pass of its own. The model
gets an attention mask that hides what lies behind each call's last token, and uses its own
attention.

`SingleDecoder` computes each call on its own with the model's own cache, for recurrent layers and
other kinds of attention. It feeds pieces of the prompt, or the whole prompt and then single tokens,
or everything anew at each step.

`proved_decoder` tries them in this order on a few tokens and takes the first whose logits equal the
model's plain forward pass (`test_decoders.py` shows that a model which the slots would compute
wrongly is computed call by call).
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch

from bridle.embedded.call import BatchedCall, common_prefix
from bridle.embedded.routing import routing_of
from bridle.errors import EngineError
from bridle.experts import Rows
from bridle.types import Ids, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Cache: TypeAlias = Any
"""State that a decoder keeps for a call; no one else reads it."""

SHORTEST = 16
"""Ids; a common prefix shorter than this is not looked for."""

LENGTH_STEP = 128
"""Slots grow by multiples of this many tokens."""

_log = logging.getLogger(__name__)


class Decoder(Protocol):
    """Computation of one step."""

    name: str
    pieces: bool
    """True if a prompt may be computed in pieces."""
    copies: bool
    """True if a call can copy the prefix that another call has computed."""
    prefixes: PrefixStore

    def limit(self, cache_bytes: int) -> int | None:
        """Empty the cache and limit its size; return how many tokens of one call fit.

        `None` = there is no limit.
        """

    def admit(self, call: BatchedCall, version: int) -> bool:
        """Add a call, reusing cached prefixes of weights `version`; `False` = no room now."""

    def reserve(self, work: Sequence[tuple[BatchedCall, int]]) -> bool:
        """Reserve cache for the next tokens of these calls; `False` = there is no room."""

    def forward(self, work: Sequence[tuple[BatchedCall, int]]) -> torch.Tensor:
        """Compute the next `count` ids of each call; advances the calls' `computed`.

        Returns logits of shape (R, vocabulary): one row, in order, for each call of `work` that has
        nothing left to compute.
        """

    def release(self, call: BatchedCall, *, keep: bool) -> None:
        """Remove a call; with `keep` its cache may serve later calls."""

    def wipe(self) -> None:
        """Overwrite freed cache memory, so that no infinite number or NaN is left in it."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """Cache of a finished call."""

    ids: Ids
    cache: Cache
    """Covers exactly `ids`."""
    size_bytes: int
    experts: Rows | None = None
    """Of `ids`; `None` = a model without."""


class PrefixStore:
    """Caches of finished calls within a budget of bytes, the least recently used dropped first."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[CachedPrefix, None] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, ids: Ids) -> tuple[CachedPrefix | None, int]:
        """Return the entry with the longest common prefix with `ids`, and its length (0 = none)."""
        best, matched = None, 0
        for entry in reversed(self._entries):
            common = common_prefix(entry.ids, ids)
            if common >= SHORTEST and common > matched:
                best, matched = entry, common
        if best is not None:
            self._entries.move_to_end(best)
        return best, matched

    def add(self, ids: Ids, cache: Cache, size_bytes: int, experts: Rows | None = None) -> None:
        """Store the key-value cache of `ids`, unless it exceeds the whole budget or is very short.

        An entry that is a prefix of `ids` is dropped.
        """
        if size_bytes > self._budget_bytes or len(ids) < SHORTEST:
            return
        shorter, matched = self.find(ids)
        if shorter is not None and matched == len(shorter.ids):
            self.remove(shorter)
        if experts is not None:
            experts = experts[: len(ids)].copy()
            size_bytes += experts.nbytes
        entry = CachedPrefix(ids.copy(), cache, size_bytes, experts)
        self._entries[entry] = None
        self.size_bytes += size_bytes
        while self.size_bytes > self._budget_bytes:
            self.remove(next(iter(self._entries)))

    def covers(self, ids: Ids) -> bool:
        """Return whether a stored entry begins with all of `ids`, so that storing them adds
        nothing.
        """
        return len(ids) > 0 and self.find(ids)[1] == len(ids)

    def remove(self, entry: CachedPrefix) -> None:
        """Remove one entry; removing it again does nothing."""
        if entry not in self._entries:
            return
        del self._entries[entry]
        self.size_bytes -= entry.size_bytes

    def clear(self) -> None:
        self._entries.clear()
        self.size_bytes = 0


class SlotCache:
    """Keys and values of all layers and slots, in the form that a transformers model updates.

    Slot contents are always finite numbers: a masked token has weight 0, and 0 times NaN is NaN.
    """

    slots = 0
    length = 0
    rows: torch.Tensor
    """Slots of the present pass, shape (B,), consecutive."""
    positions: torch.Tensor
    """Positions of its tokens, shape (B, N)."""
    view: tuple[slice, slice, slice]
    """The part of a layer's cache that its attention reads."""

    def __init__(self) -> None:
        self.layers: dict[int, list[torch.Tensor]] = {}
        """Layer -> [keys, values], each (slots, heads, length, head size)."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a forward pass's keys and values, shape (B, heads, N, d); return all keys and
        values that the pass attends to.
        """
        pair = self.layers.get(layer_idx)
        if pair is None:
            pair = [
                new.new_zeros(self.slots, new.shape[1], self.length, new.shape[3])
                for new in (key, value)
            ]
            self.layers[layer_idx] = pair
        for cache, new in zip(pair, (key, value), strict=True):
            cache[self.rows[:, None], :, self.positions] = new.transpose(1, 2)
        return pair[0][self.view], pair[1][self.view]

    def get_seq_length(self, *_: object) -> int:
        """Return 0: models ask for it although they are given the positions of their tokens."""
        return 0

    def resize(self, slots: int, length: int, keep: int) -> None:
        """Change every layer to `slots` slots of `length` tokens; the first `keep` slots keep what
        fits.
        """
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
        """Return the bytes of cache per token and slot; 0 before the first step."""
        tensors = [tensor for pair in self.layers.values() for tensor in pair]
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in tensors)


class SlotDecoder:
    """Computes all decoding calls together; see the module's docstring."""

    name = "slots"
    pieces = True
    copies = True

    def __init__(self, model: PreTrainedModel, *, max_batch: int, prefix_bytes: int) -> None:
        self._model = model
        self._max_batch = max_batch
        self._cache_bytes: float = inf
        self._cache = SlotCache()
        self._calls: list[BatchedCall] = []
        """Call of each slot in use."""
        self.prefixes = PrefixStore(prefix_bytes)
        config = model.config.get_text_config()
        self._window: int | None = getattr(config, "sliding_window", None)
        self._layer_types = set(getattr(config, "layer_types", None) or ())
        parameters = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def limit(self, cache_bytes: int) -> int | None:
        """Empty the cache and limit its size; return how many tokens of one call fit."""
        per_token = self._cache.token_bytes()
        self._cache_bytes = cache_bytes
        self._cache.resize(0, 0, keep=0)
        return cache_bytes // per_token // LENGTH_STEP * LENGTH_STEP

    def admit(self, call: BatchedCall, version: int) -> bool:
        """Add a call, which takes over the longest cached prefix; `False` = no room now."""
        entry, matched = self.prefixes.find(call.ids[: call.length - 1])
        giver: int | None = None
        for slot, other in enumerate(self._calls):
            if other.cache_version == version:
                seen = call.ids[: min(other.computed, call.length - 1)]
                if (common := common_prefix(other.ids, seen)) > matched:
                    giver, matched = slot, common
        slot = len(self._calls)
        if not self._reserve(slot + 1, max(matched, 1)):
            return False
        known: Rows | None = None
        if giver is not None:
            self._copy(giver, slot, matched)
            known = self._calls[giver].experts
        elif entry is not None:
            known = entry.experts
            for layer, pair in self._cache.layers.items():
                for tensor, kept in zip(pair, entry.cache[layer], strict=True):
                    tensor[slot, :, :matched] = kept[:, :matched]
        if known is not None:
            call.routed(0, known[:matched])
        self._calls.append(call)
        call.computed = matched
        call.cache_version = version
        return True

    def _copy(self, source: int, target: int, length: int) -> None:
        for pair in self._cache.layers.values():
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]

    def release(self, call: BatchedCall, *, keep: bool) -> None:
        """Remove a call and free its slot; with `keep` its cache is stored for later calls."""
        slot = self._calls.index(call)
        ids = call.ids[: call.computed]
        if keep and not self.prefixes.covers(ids):
            cache = {
                layer: [tensor[slot, :, : call.computed].clone() for tensor in pair]
                for layer, pair in self._cache.layers.items()
            }
            size_bytes = self._cache.token_bytes() * call.computed
            self.prefixes.add(ids, cache, size_bytes, call.experts)
        last = self._calls.pop()
        if last is not call:
            self._copy(len(self._calls), slot, last.computed)
            self._calls[slot] = last
        call.computed = 0
        call.cache_version = -1

    def wipe(self) -> None:
        """Set the cache of free slots to 0."""
        for pair in self._cache.layers.values():
            for tensor in pair:
                tensor[len(self._calls) :] = 0

    def reserve(self, work: Sequence[tuple[BatchedCall, int]]) -> bool:
        ends = [call.computed + count for call, count in work]
        # A decoding pass runs over all slots: each needs room for one more token.
        ends += [call.computed + 1 for call in self._calls]
        return self._reserve(len(self._calls), max(ends))

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
        """Compute the next ids of each call, those that decode in one batch; returns logits.

        Each call with nothing left to compute has one row, in the order of `work`.
        """
        slots = {call: slot for slot, call in enumerate(self._calls)}
        rows: dict[BatchedCall, torch.Tensor] = {}
        decoding = [call for call, _ in work if call.pending == 1]
        if decoding:
            # Calls that do not decode now take part as well: their next token is computed again.
            ends = [call.computed for call in self._calls]
            ids = [call.ids[end] for call, end in zip(self._calls, ends, strict=True)]
            logits, routed = self._run(0, _column(ids), _column(ends))
            for call in decoding:
                rows[call] = logits[slots[call]]
                if routed is not None:
                    call.routed(call.computed, routed[slots[call]][None])
                call.computed += 1
        for call, count in work:
            if call not in rows:
                start, end = call.computed, call.computed + count
                at = np.arange(start, end, dtype=np.int32)
                logits, routed = self._run(slots[call], call.ids[None, start:end], at[None])
                call.computed = end
                if routed is not None:
                    call.routed(start, routed)
                if call.pending == 0:
                    rows[call] = logits[0]
        ready = [rows[call] for call, _ in work if call in rows]
        return torch.stack(ready) if ready else torch.empty(0)

    def _run(self, first: int, ids: Ids, positions: Ids) -> tuple[torch.Tensor, Rows | None]:
        """Run the model over ids of consecutive slots, shape (B, N).

        Returns the logits after each slot's last id, shape (B, vocabulary), and the experts of
        all ids, slot after slot.
        """
        device, cache = self._model.device, self._cache
        end = int(positions.max()) + 1
        at = torch.from_numpy(positions).long().to(device)
        cache.rows = torch.arange(first, first + len(ids), device=device)
        cache.positions = at
        cache.view = slice(first, first + len(ids)), slice(None), slice(end)
        output, routed = _routed(
            self._model,
            input_ids=torch.from_numpy(ids).long().to(device),
            position_ids=at,
            attention_mask=self._mask(at, end),
            past_key_values=cache,
            use_cache=True,
            **self._options,
        )
        return output.logits[:, -1], routed

    def _mask(self, positions: torch.Tensor, end: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the additive mask, shape (B, 1, N, end), or one for each type of layer."""
        keys = torch.arange(end, device=positions.device)
        seen = keys <= positions[:, None, :, None]
        if self._window is None:
            return self._additive(seen)
        near = seen & (keys > positions[:, None, :, None] - self._window)
        if not self._layer_types:
            return self._additive(near)
        return {
            "full_attention": self._additive(seen),
            "sliding_attention": self._additive(near),
        }

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=self._model.dtype, device=seen.device)
        return mask.masked_fill_(~seen, -inf)


def _column(values: list[int]) -> Ids:
    return np.array(values, dtype=np.int32)[:, None]


class Feeding(StrEnum):
    """Ways to fill a model's own cache, best first."""

    PIECES = "pieces"
    """Any number of tokens at any time."""
    TOKENS = "tokens"
    """The whole prompt first, then one token at a time."""
    ANEW = "anew"
    """No cache: all tokens at each step."""


class SingleDecoder:
    """Computes steps call by call; see the module's docstring."""

    copies = False

    def __init__(self, model: PreTrainedModel, feeding: Feeding, *, prefix_bytes: int) -> None:
        self.name = f"single, {feeding.value}"
        self._model = model
        self._feeding = feeding
        self.prefixes = PrefixStore(prefix_bytes)
        parameters = inspect.signature(model.forward).parameters
        recurrent = "past_key_values" not in parameters and "cache_params" in parameters
        self._cache_name = "cache_params" if recurrent else "past_key_values"
        self.pieces = feeding is Feeding.PIECES

    def limit(self, cache_bytes: int) -> int | None:  # noqa: ARG002 - each cache grows by itself
        """Return `None`: this decoder has no limit."""
        return None

    def admit(self, call: BatchedCall, version: int) -> bool:
        """Add a call, which takes over the cache of an earlier call if it is a prefix."""
        call.state = None
        call.computed = 0
        call.cache_version = version
        entry, matched = self.prefixes.find(call.ids[: call.length - 1])
        if entry is not None and matched == len(entry.ids):
            self.prefixes.remove(entry)
            call.state = entry.cache
            call.computed = matched
            if entry.experts is not None:
                call.routed(0, entry.experts)
        return True

    def reserve(self, work: Sequence[tuple[BatchedCall, int]]) -> bool:  # noqa: ARG002 - see `limit`
        """Return True: each call's cache grows by itself."""
        return True

    def release(self, call: BatchedCall, *, keep: bool) -> None:
        if keep and call.state is not None:
            ids = call.ids[: call.computed]
            size_bytes = sum(_tensor_bytes(call.state.layers))
            self.prefixes.add(ids, call.state, size_bytes, call.experts)
        call.state = None
        call.computed = 0
        call.cache_version = -1

    def wipe(self) -> None:
        """Do nothing: calls share no memory."""

    def forward(self, work: Sequence[tuple[BatchedCall, int]]) -> torch.Tensor:
        """Compute the next ids of each call, one call after the other; returns logits.

        Each call with nothing left to compute has one row, in the order of `work`.
        """
        rows = []
        for call, count in work:
            last = self._advance(call, call.computed + count)
            if call.pending == 0:
                rows.append(last)
        return torch.stack(rows) if rows else torch.empty(0)

    def _advance(self, call: BatchedCall, end: int) -> torch.Tensor:
        """Compute ids up to `end`; return the logits after the last one."""
        anew = self._feeding is Feeding.ANEW
        single = self._feeding is Feeding.TOKENS and call.state is not None
        last: torch.Tensor
        while call.computed < end:
            start = 0 if anew else call.computed
            until = call.computed + 1 if single else end
            output, routed = _routed(
                self._model,
                input_ids=self._row(call, start, until),
                use_cache=not anew,
                **({} if call.state is None else {self._cache_name: call.state}),
            )
            if routed is not None:
                call.routed(start, routed)
            call.state = None if anew else getattr(output, self._cache_name)
            call.computed = until
            last = output.logits[0, -1]
        return last

    def _row(self, call: BatchedCall, start: int, end: int) -> torch.Tensor:
        ids = torch.from_numpy(call.ids[start:end].copy()).long()
        return ids.to(self._model.device)[None]


def _routed(model: PreTrainedModel, **inputs: Any) -> tuple[Any, Rows | None]:  # noqa: ANN401 - the model's own
    """Run the model; return its output, and the experts of all its tokens if it has any."""
    routing = routing_of(model)
    if routing is None:
        return model(**inputs), None
    with routing.recording() as recorded:
        output = model(**inputs)
    return output, routing.rows(recorded)


def _tensor_bytes(layers: Iterable[Any]) -> Iterable[int]:
    """Yield the sizes of all tensors that cache layers hold."""
    for layer in layers:
        for held in vars(layer).values():
            several = held if isinstance(held, (list, tuple)) else [held]
            yield from (t.numel() * t.element_size() for t in several if torch.is_tensor(t))


def proved_decoder(model: PreTrainedModel, vocab_size: int, length: int, **limits: int) -> Decoder:
    """Return the first decoder whose logits equal the model's plain forward pass.

    Raises `EngineError` if none does. `length` is the number of tokens that are compared.
    """
    random = np.random.default_rng(0)
    texts = [random.integers(0, vocab_size, n).astype(np.int32) for n in (length, length // 2)]
    expected = [_plain_logits(model, ids) for ids in texts]
    half = model.dtype in (torch.float16, torch.bfloat16)
    tolerance = 5e-2 if half else 1e-3
    faults = []
    for decoder in _decoders(model, **limits):
        try:
            worst = _worst_difference(decoder, texts, expected)
        except Exception as error:  # noqa: BLE001 - a model may raise anything on the wrong path
            faults.append(f"{decoder.name}: {type(error).__name__}: {error}")
            continue
        if worst <= tolerance:
            if faults:
                _log.warning("embedded engine computes %r (%s)", decoder.name, "; ".join(faults))
            return decoder
        faults.append(f"{decoder.name}: logits differ by {worst:.2g}")
    raise EngineError(
        "the embedded engine cannot sample this model as a causal language model: "
        f"{'; '.join(faults)}"
    )


def _decoders(
    model: PreTrainedModel, *, max_batch: int, prefix_bytes: int
) -> Iterator[SlotDecoder | SingleDecoder]:
    """Yield the decoders to try, best first."""
    types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    standard = getattr(model, "_supports_attention_backend", False)
    if standard and types <= {"full_attention", "sliding_attention"}:
        yield SlotDecoder(model, max_batch=max_batch, prefix_bytes=prefix_bytes)
    for feeding in Feeding:
        yield SingleDecoder(model, feeding, prefix_bytes=prefix_bytes)


def _plain_logits(model: PreTrainedModel, ids: np.ndarray) -> torch.Tensor:
    """Return the logits after every id, shape (T, vocabulary), computed without a cache."""
    row = torch.from_numpy(ids).long().to(model.device)[None]
    logits: torch.Tensor = model(input_ids=row, use_cache=False).logits[0].float()
    return logits


def _worst_difference(
    decoder: Decoder, texts: list[np.ndarray], expected: list[torch.Tensor]
) -> float:
    """Return the largest relative difference of a batch that joins late, in pieces, and decodes."""
    prompts = [ids[:-4] for ids in texts]
    calls = [_call(ids) for ids in prompts]
    worst = 0.0

    def step(work: list[tuple[BatchedCall, int]]) -> None:
        nonlocal worst
        assert decoder.reserve(work)
        logits = decoder.forward(work)
        ready = [call for call, _ in work if call.pending == 0]
        for row, call in zip(logits, ready, strict=True):
            which = calls.index(call)
            wanted = expected[which][call.length - 1]
            difference = (row.float() - wanted).abs().max() / wanted.abs().max()
            worst = max(worst, float(difference.nan_to_num(nan=float("inf"))))
            call.append(int(texts[which][call.length]), 0.0, 0)

    first, second = calls
    decoder.admit(first, 0)
    piece = 5 if decoder.pieces else first.length
    step([(first, piece)])
    decoder.admit(second, 0)
    step([(second, second.length), (first, first.pending)])
    for _ in range(2):
        step([(call, 1) for call in calls])
    decoder.release(first, keep=False)
    step([(second, 1)])
    decoder.release(second, keep=False)
    return worst


def _call(ids: np.ndarray) -> BatchedCall:
    return BatchedCall(
        "probe", ids, Sampling(), limit=8, stop_ids=frozenset(), decode=lambda _: "", mailbox=None
    )
