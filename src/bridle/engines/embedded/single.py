"""The sure way to compute a step: each call on its own, with the model's own cache.

For models that the flat pass over slots doesn't fit: recurrent layers, attention of a kind of its
own. A finished call's cache serves the next call that continues all of it, so the turns of one
session compute only what is new; a beginning shared with others is computed again. How a model is
fed depends on what it gets right (`bridle.engines.embedded.model` finds out): pieces of a prompt
one after another, the whole prompt and then single tokens, or everything anew at each step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from bridle.engines.embedded.call import Call
from bridle.engines.embedded.prefixes import PrefixStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Feeding(StrEnum):
    """How a model's own cache may be filled, best first."""

    PIECES = "pieces"
    """Any number of tokens at any time."""
    TOKENS = "tokens"
    """The whole prompt first, then one token at a time."""
    ANEW = "anew"
    """No cache: all tokens at each step."""


class SingleDecoder:
    """Computes steps call by call; see the module's docstring."""

    def __init__(self, model: PreTrainedModel, feeding: Feeding, *, prefix_bytes: int) -> None:
        self.name = f"single, {feeding.value}"
        self._model = model
        self._feeding = feeding
        self.prefixes = PrefixStore(prefix_bytes)
        parameters = inspect.signature(model.forward).parameters
        recurrent = "past_key_values" not in parameters and "cache_params" in parameters
        self._cache_name = "cache_params" if recurrent else "past_key_values"
        self.pieces = feeding is Feeding.PIECES
        """Whether a prompt may be computed in pieces."""

    def limit(self, cache_bytes: int) -> int | None:  # noqa: ARG002 - the contract's
        """Each cache grows by itself: there is no limit of ours."""
        return None

    def admit(self, call: Call, version: int) -> bool:
        """Take over the cache of an earlier call that `call` continues, if there is one."""
        call.state = None
        call.computed = 0
        call.cache_version = version
        entry, matched = self.prefixes.find(call.ids[: call.length - 1])
        if entry is not None and matched == len(entry.ids):
            self.prefixes.remove(entry)
            call.state = entry.cache
            call.computed = matched
        return True

    def reserve(self, work: Sequence[tuple[Call, int]]) -> bool:  # noqa: ARG002 - the contract's
        """Always: each cache grows by itself."""
        return True

    def release(self, call: Call, *, keep: bool) -> None:
        """Let go of `call`; with `keep` its cache is remembered."""
        if keep and call.state is not None and self._feeding is not Feeding.ANEW:
            ids = call.ids[: call.computed]
            self.prefixes.add(ids, call.state, sum(_tensor_bytes(call.state.layers)))
        call.state = None
        call.computed = 0
        call.cache_version = -1

    def wipe(self) -> None:
        """Nothing is shared between calls."""

    def forward(self, work: Sequence[tuple[Call, int]]) -> torch.Tensor:
        """Compute the next `count` ids of each call; advances `computed`.

        Returns logits of shape (R, vocabulary): one row, in order, for each call of `work` that
        has nothing left to compute.
        """
        rows = []
        for call, count in work:
            last = self._advance(call, call.computed + count)
            if call.pending == 0:
                rows.append(last)
        return torch.stack(rows) if rows else torch.empty(0)

    def _advance(self, call: Call, end: int) -> torch.Tensor:
        """Compute up to `end`; logits after the last token."""
        if self._feeding is Feeding.ANEW:
            output = self._model(input_ids=self._row(call, 0, end), use_cache=False)
            call.computed = end
            last: torch.Tensor = output.logits[0, -1]
            return last
        single = self._feeding is Feeding.TOKENS and call.state is not None
        while call.computed < end:
            until = call.computed + 1 if single else end
            output = self._model(
                input_ids=self._row(call, call.computed, until),
                use_cache=True,
                **({} if call.state is None else {self._cache_name: call.state}),
            )
            call.state = getattr(output, self._cache_name)
            call.computed = until
            last = output.logits[0, -1]
        return last

    def _row(self, call: Call, start: int, end: int) -> torch.Tensor:
        ids = torch.from_numpy(call.ids[start:end].copy()).long()
        return ids.to(self._model.device)[None]


def _tensor_bytes(layers: Iterable[Any]) -> Iterable[int]:
    """Sizes of all tensors that cache layers hold."""
    for layer in layers:
        for held in vars(layer).values():
            several = held if isinstance(held, (list, tuple)) else [held]
            yield from (t.numel() * t.element_size() for t in several if torch.is_tensor(t))
